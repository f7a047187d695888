"""The linear layer: every recipe compared with its transcription; shapes, dtypes, transformations."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import thinning
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numeric import floor_db, snr_db

import swjax
from swjax.linear.layer import Layer
from swjax.recipes import RECIPES, Product, Quantizer, Recipe
from swjax.testing import assert_quantized, matrix_products

NAMES = list(RECIPES)


def arrays(shape, n, dtype="float32", seed=0):
    """Returns x [*shape], w [k, n], bias [n] and g [*shape[:-1], n]; one feature of x is an outlier."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if shape[-1] > 2:
        x[..., 1] *= 8
    w = rng.standard_normal((shape[-1], n)) / max(np.sqrt(shape[-1]), 1)
    g = rng.standard_normal((*shape[:-1], n))
    return [jnp.asarray(a, dtype) for a in (x, w, rng.standard_normal(n), g)]


@partial(jax.jit, static_argnums=3)
def products(x, w, g, recipe, bias=None):
    """Returns y, dx, dw and, with a bias, its gradient."""
    y, vjp = jax.vjp(lambda *args: swjax.switchback(*args, recipe=recipe), x, w, bias)
    return [a for a in (y, *vjp(g)) if a is not None]


@pytest.mark.parametrize(
    "name, dtype", thinning.thinned(NAMES, ["float32", "bfloat16", "float16"], full=[])
)
def test_matches_the_papers_algorithm(name, dtype):
    x, w, _, g = arrays((96, 160), 72, dtype)
    expected = getattr(oracle, name)(*(np.asarray(a) for a in (x, w, g)))
    # Rotated in another precision, a value near the middle of two of fp8 becomes the other one.
    most = 55 if name == "fp8_hadamard" else np.inf
    for part, k, got, want in zip(
        "fwd dgrad wgrad".split(), (160, 72, 96), products(x, w, g, name), expected
    ):
        assert got.dtype == jnp.dtype(dtype)
        assert snr_db(got, want) > min(most, floor_db(dtype, k)), part


def test_recipes_differ_from_each_other():
    """The transcriptions of any two recipes differ in at least one product."""
    x, w, _, g = (np.asarray(a) for a in arrays((96, 160), 72))
    found = {name: getattr(oracle, name)(x, w, g) for name in NAMES}
    for one, other in itertools.combinations(NAMES, 2):
        worst = min(snr_db(a, b) for a, b in zip(found[one], found[other]))
        assert worst < floor_db("float32", 160), (one, other)


# {recipe: SNR in dB of (y, dx, dw)} against float64 products, for normal data.
SNR_DB = {
    "standard": (129, 130, 130),
    "switchback": (38, 38, 130),
    "switchback_m": (38, 38, 42),
    "switchback_q": (39, 40, 130),
    "llm_int8": (39, 40, 39),
    "llm_int8_outlier6": (39, 40, 39),
    "switchback_hadamard": (38, 38, 40),
    "int8_hadamard": (38, 38, 40),
    "fp8_switchback": (28, 24, 130),
    "fp8_tensorwise": (28, 24, 24),
    "fp8_static": (28, 24, 24),
    "fp8_hadamard": (28, 24, 24),
    "fp8_block128": (28, 28, 28),
    "fp4_dge": (17, 17, 3),  # dw is that of an estimate of rounding
    "mxfp8": (28, 28, 28),
    "nvfp4": (17, 17, 17),
}


# Of each number format one; `test_matches_the_papers_algorithm` has every recipe.
@pytest.mark.parametrize(
    "name",
    thinning.kept(
        NAMES, ["switchback", "switchback_hadamard", "fp8_switchback", "fp4_dge", "nvfp4"]
    ),
)
def test_signal_to_noise(name):
    rng = np.random.default_rng(1)
    x, w, g = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in [(512, 384), (384, 256), (512, 256)]
    )
    exact = oracle.standard(*(np.asarray(a) for a in (x, w, g)))
    for got, want, expected in zip(products(x, w, g, name), exact, SNR_DB[name]):
        assert abs(snr_db(got, want) - expected) < (2 if expected < 100 else 10)


SHAPES = [
    ((7,), 5),
    ((1, 1), 1),
    ((3, 5, 17), 29),
    ((2, 1, 3, 13), 7),
    ((0, 8), 4),
    ((4, 0, 8), 4),
    ((5, 3), 0),
]


@pytest.mark.parametrize("sizes, name", thinning.thinned(SHAPES, NAMES, full=["switchback"]))
def test_any_shape(sizes, name):
    shape, n = sizes
    x, w, bias, g = arrays(shape, n)
    y, dx, dw, db = products(x, w, g, name, bias)
    assert (y.shape, dx.shape, dw.shape, db.shape) == (g.shape, x.shape, w.shape, bias.shape)
    tokens = math.prod(shape[:-1])
    flat = products(x.reshape(tokens, shape[-1]), w, g.reshape(tokens, n), name, bias)
    for got, want in zip((y, dx, dw, db), flat):
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=2e-5, atol=2e-5)
    if x.size == 0:
        assert not dw.any() and not db.any()


@pytest.mark.parametrize("name", thinning.kept(NAMES, thinning.RECIPES))
def test_zero_rows_and_zero_weights_give_zeros(name):
    x, w, bias, g = arrays((6, 16), 8)
    x, g = x.at[2].set(0), g.at[3].set(0)
    y, dx = products(x, w, g, name, bias)[:2]
    np.testing.assert_array_equal(y[2], bias)
    assert not dx[3].any()
    y, dx, dw = products(jnp.zeros_like(x), jnp.zeros_like(w), jnp.zeros_like(g), name)
    assert not (y.any() or dx.any() or dw.any())


@pytest.mark.parametrize("name, bad", thinning.thinned(NAMES, [np.nan, np.inf], full=[]))
def test_a_non_finite_token_stays_visible_and_alone(name, bad):
    x, w, _, g = arrays((6, 16), 8)
    y, _, dw = products(x.at[2, 3].set(bad), w, g, name)
    assert not jnp.isfinite(y[2]).all() and not jnp.isfinite(dw[3]).any()
    _, dx, dw_of_bad = products(x, w, g.at[2, 3].set(bad), name)
    assert not jnp.isfinite(dx[2]).any() and not jnp.isfinite(dw_of_bad[:, 3]).any()
    if RECIPES[name].fwd is None or RECIPES[name].fwd.lhs.scope == "row":
        others = jnp.delete(y, 2, axis=0)
        assert jnp.isfinite(others).all()


def gradients(f, x, w, bias, g):
    y, vjp = jax.vjp(f, x, w, bias)
    return y, *vjp(g.astype(y.dtype))


def test_recipes_whose_outputs_depend_on_the_batch():
    """Those that docs/recipes.md names under "Padding and outlier tokens"."""
    x, w, *_ = arrays((8, 64), 16)
    other = x.at[4:].multiply(8)
    y = jax.jit(partial(swjax.switchback, w=w), static_argnames="recipe")
    found = {name for name in NAMES if jnp.any(y(x, recipe=name) != y(other, recipe=name), 1)[0]}
    assert found == {"fp8_tensorwise", "llm_int8_outlier6", "nvfp4"}


@pytest.mark.parametrize(
    "x_dtype, w_dtype",
    thinning.thinned(["float32", "bfloat16", "float16"], ["float32", "bfloat16"], full=[]),
)
def test_dtypes_of_results_follow_the_arguments(x_dtype, w_dtype):
    x, w, bias, g = arrays((6, 16), 8)
    x, w = x.astype(x_dtype), w.astype(w_dtype)
    for name in NAMES:
        for out_dtype in (None, "float32", "float16"):
            f = partial(swjax.switchback, recipe=name, out_dtype=out_dtype)
            y, dx, dw, db = jax.eval_shape(partial(gradients, f), x, w, bias, g)
            assert y.dtype == jnp.dtype(out_dtype or x_dtype)
            assert (dx.dtype, dw.dtype, db.dtype) == (x.dtype, w.dtype, bias.dtype)


@pytest.mark.parametrize("name, devices", thinning.thinned(NAMES, [1, 2], full=[]))
def test_addends_are_not_rounded_before_the_sum(name, devices):
    """The addend is beyond the range of float16, the sum is not."""
    x, w, addend = (jnp.full(*of) for of in (((8, 16), 16.0), ((16, 32), -32.0), ((8, 32), 7e4)))
    mesh = jax.make_mesh((1, devices), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    layout = swjax.Layout(PartitionSpec("tensor"))  # all-reduces products, and adds afterwards
    options = {"recipe": name, "out_dtype": "float16", "layout": layout}
    with jax.set_mesh(mesh):
        y = jax.jit(partial(swjax.switchback, **options))(x, w, addend=addend)
    np.testing.assert_allclose(np.asarray(y, np.float32), 7e4 - 16**2 * 32, rtol=1e-2)


@pytest.mark.parametrize("prologue", [None, swjax.Gelu()])
def test_the_gradient_of_the_residual_is_added(prologue):
    x, w, _, g = arrays((8, 16), 24)
    layer = partial(swjax.switchback, prologue=prologue)
    with_residual = lambda x: layer(x, w, residual=True)
    _, vjp = jax.vjp(with_residual, x)
    alone = jax.vjp(lambda x: layer(x, w), x)[1](g)[0]
    np.testing.assert_allclose(vjp((g, 2 * x))[0], alone + 2 * x, rtol=1e-5, atol=1e-5)


def test_scales_come_from_the_fp32_weight():
    x, w, _, _ = arrays((32, 64), 16)
    x = x.astype(jnp.bfloat16)
    full = swjax.switchback(x, w, out_dtype="float32")
    rounded = swjax.switchback(x, w.astype(jnp.bfloat16), out_dtype="float32")
    want = oracle.int8(np.asarray(x), 1) @ oracle.int8(np.asarray(w), None)
    assert snr_db(full, want) > 120 > snr_db(rounded, want)


@pytest.mark.parametrize("name", thinning.kept(NAMES, ["switchback", "fp8_tensorwise"]))
def test_sharded_batch_and_weight_change_nothing(name):
    """The batch is sharded over two devices; the weight is replicated, or sharded along either dimension."""
    x, w, bias, g = arrays((8, 5, 16), 24)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    one = products(x, w, g, name, bias)
    for spec in [(), ("data",), (None, "data")]:
        two = products(put(x, "data"), put(w, *spec), put(g, "data"), name, put(bias))
        for got, want in zip(two, one):  # sums over tokens have another order
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", thinning.kept(NAMES, ["switchback", "switchback_hadamard"]))
def test_forms_that_kernels_read_change_nothing(name, monkeypatch):
    """Kernels read transposed quantized weights. Tested on one device, and on two with sharded weights."""
    x, w, bias, g = arrays((8, 5, 16), 24)
    want = products(x, w, g, name, bias)
    monkeypatch.setattr(Layer, "reads_last_axis", True)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    for spec in [None, (), ("data",), (None, "data")]:
        put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        if spec is None:
            args = x, w, g, name, bias
        else:
            args = put(x, "data"), put(w, *spec), put(g, "data"), name, put(bias)
        got, expected = products(*args), list(want)
        in_blocks = RECIPES[name].is_emulated()
        y_db, dx_db, dw_db = (db - 10 for db in SNR_DB[name])  # rounded twice, differently
        if ("hadamard" in name or in_blocks) and spec is not None:  # blocks of a device's tokens
            assert snr_db(got.pop(2), expected.pop(2)) > dw_db
        if (name in ("int8_hadamard", "fp8_hadamard") or in_blocks) and spec:  # of its features
            assert snr_db(got.pop(0), expected.pop(0)) > y_db
            assert snr_db(got.pop(0), expected.pop(0)) > dx_db
        elif name == "nvfp4" and spec is not None:  # a device's elements seed its rounding
            assert snr_db(got.pop(1), expected.pop(1)) > dx_db
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def loss_and_grads(x, w, recipe):
    return jax.grad(lambda x, w: swjax.switchback(x, w, recipe=recipe).sum(), (0, 1))(x, w)


def test_int8_products_are_int8():
    """The compiled program has exactly the recipe's int8 products."""
    x, w, _, _ = arrays((64, 32), 48)
    for name, count in {
        "switchback": 1,
        "switchback_m": 1,
        "switchback_q": 1,
        "llm_int8": 2,
    }.items():
        # the gradients do not need y
        assert_quantized(partial(loss_and_grads, recipe=name), x, w, count=count)
    assert set(matrix_products(partial(loss_and_grads, recipe="standard"), x, w)) == {
        ("f32", "f32")
    }
    assert_quantized(partial(swjax.switchback, recipe="llm_int8"), x, w, count=1)
    with pytest.raises(AssertionError, match="at least one int8 x int8 .* found: 1 f32 x f32"):
        assert_quantized(partial(swjax.switchback, recipe="standard"), x, w)


def test_switchback_m_keeps_int8_only():
    x, w, _, _ = arrays((64, 32), 48, "bfloat16")

    def residual_bytes(recipe):
        _, vjp = jax.vjp(partial(swjax.switchback, recipe=recipe), x, w)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))

    assert residual_bytes("standard") == x.nbytes + w.nbytes
    assert residual_bytes("switchback") == x.nbytes + w.size + 4  # w as int8, and its scale
    scales = 64 * 4 + 4
    assert residual_bytes("switchback_m") == x.size + w.size + scales


def test_of_what_a_prologue_writes_again_nothing_is_kept():
    x, w, _, g = arrays((64, 32), 48, "bfloat16")
    norm = swjax.LayerNorm(jnp.ones(32), jnp.zeros(32))
    kept, dws = [], []
    for recipe in ("switchback", "switchback_m"):
        _, vjp = jax.vjp(partial(swjax.switchback, recipe=recipe, prologue=norm), x, w)
        kept.append(sum(leaf.nbytes for leaf in jax.tree.leaves(vjp)))
        dws.append(vjp(g)[1])
    assert kept[0] == kept[1] and jnp.array_equal(*dws)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_mlp_in_every_form_of_its_weights(activation):
    """`standard` in float32 has the values and the gradients of the plain code."""
    x, gate, _, _ = arrays((3, 7, 32), 48)
    up, down = gate[::-1] * 2, gate[:, ::-1].T
    act = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=False)}
    act["gelu_tanh"] = jax.nn.gelu
    plain = lambda x, gate, up, down: (act[activation](x @ gate) * (x @ up)) @ down
    fused = partial(swjax.gated_mlp, activation=activation, recipe="standard")
    forms = (
        fused,
        lambda x, gate, up, down: fused(x, jnp.stack([gate, up]), None, down),
        lambda x, gate, up, down: fused(x, jnp.concatenate([gate, up], 1), None, down),
    )

    def results(form):
        y, vjp = jax.vjp(form, x, gate, up, down)
        return y, *vjp(x)

    want = results(plain)
    for got in map(results, forms):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_a_gated_mlp_saves_two_hidden_arrays():
    """Of its activations: x, gate and up; with a norm before it, the backward pass recomputes its output."""
    x, w, _, _ = arrays((64, 32), 48, "bfloat16")

    def residual_bytes(x, gate, up, down):
        norm = swjax.RMSNorm(jnp.ones(32))
        _, vjp = jax.vjp(partial(swjax.gated_mlp, prologue=norm), x, gate, up, down)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))

    quantized = 3 * (w.size + 4)
    assert residual_bytes(x, w, 2 * w, w.T) == x.nbytes + 2 * 64 * 48 * 2 + quantized + 32 * 4


def test_memory_efficient_and_vector_wise_combine():
    q = RECIPES["switchback_q"]
    x, w, _, g = arrays((48, 32), 24)
    y, dx, dw = products(x, w, g, Recipe(q.fwd, q.dgrad, None, save_quantized=True))
    want = oracle.switchback_q(*(np.asarray(a) for a in (x, w, g)))
    np.testing.assert_allclose(y, want[0], rtol=1e-5, atol=1e-5)
    assert snr_db(dx, want[1]) > 35  # requantizes the saved int8 weight
    assert snr_db(dw, oracle.int8(np.asarray(x), 1).T @ np.asarray(g, np.float64)) > 100


def test_standard_is_a_plain_product():
    x, w, bias, _ = arrays((6, 16), 8, "bfloat16")
    plain = x @ w + bias[None]
    np.testing.assert_array_equal(swjax.switchback(x, w, bias, recipe="standard"), plain)


@pytest.mark.parametrize(
    "contracted, batch, lhs, rhs",
    [
        (((2,), (0,)), ((), ()), (3, 5, 16), (16, 4, 2)),  # query projection of an attention layer
        (((1, 2), (0, 1)), ((), ()), (3, 5, 16), (5, 16, 8)),  # its output projection
        (((0,), (1,)), ((), ()), (16, 3), (4, 16)),
        (((2,), (1,)), ((1,), (0,)), (5, 3, 16), (3, 16, 8)),
    ],
)
def test_dot_general_takes_any_contraction(contracted, batch, lhs, rhs):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (lhs, rhs))
    want = jax.lax.dot_general(a, b, (contracted, batch))
    standard = swjax.dot_general("standard")(a, b, (contracted, batch))
    np.testing.assert_allclose(standard, want, rtol=1e-5, atol=1e-5)
    assert snr_db(swjax.dot_general("switchback")(a, b, (contracted, batch)), want) > 30


def test_dot_generals_of_one_recipe_are_equal():
    products = [swjax.dot_general("switchback"), swjax.dot_general(RECIPES["switchback"])]
    assert len(set(products)) == 1 and swjax.dot_general("standard") not in products


@pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128"])
def test_standard_takes_float64_and_complex(dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w, bias, g = (
            jnp.asarray(rng.standard_normal(s) * (1 + 1j if "complex" in dtype else 1), dtype)
            for s in ((4, 3), (3, 2), (2,), (4, 2))
        )
        layer = partial(swjax.switchback, recipe="standard")
        plain = lambda x, w, bias: x @ w + bias[None]
        got, want = (gradients(f, x, w, bias, g) for f in (layer, plain))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "complex64" else 1e-13)
        with pytest.raises(ValueError, match="got float64: cast it first; .* 'standard' with"):
            swjax.switchback(jnp.ones((4, 3), "float64"), jnp.ones((3, 2), "float64"))
        with pytest.raises(ValueError, match="got float64: cast it first; .* 'standard' with"):
            layer(jnp.ones((4, 3), "float64"), jnp.ones((3, 2), "float32"))


def test_standard_counts_the_operations_of_a_product():
    """JAX counts the same FLOPs before compilation as for a plain product."""
    x, w, bias, g = arrays((64, 32), 48)
    layer, plain = (
        partial(swjax.switchback, recipe="standard"),
        lambda x, w, bias: x @ w + bias[None],
    )
    counts = [
        jax.jit(partial(gradients, f)).lower(x, w, bias, g).cost_analysis()["flops"]
        for f in (layer, plain)
    ]
    assert counts[0] == counts[1]


def test_long_sums_of_int8_products_do_not_overflow():
    """int32 holds 133,144 products of 127 x 127."""
    length = 300_000
    x, w, bias = jnp.ones((1, length)), jnp.ones((length, 1)), jnp.ones(1)
    np.testing.assert_allclose(swjax.switchback(x, w, bias), length + 1, rtol=1e-6)
    dw = jax.grad(lambda w: jnp.sum(swjax.switchback(x.T, w, recipe="llm_int8")))(w[:1])
    np.testing.assert_allclose(dw, length, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(0, 16), (0, 5, 16), (4, 0, 16)])
@pytest.mark.parametrize("prologue", [None, swjax.Gelu()])
def test_no_tokens_on_a_mesh(shape, kind, prologue):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    layout = swjax.Layout(PartitionSpec("data"), PartitionSpec("data"))

    def loss(w, bias, x):
        one = swjax.switchback(x, w, bias, prologue=prologue, layout=layout)
        two = swjax.mlp(x, w, bias, w.T, None, prologue=prologue, layouts=(layout, layout))
        return jnp.sum(one) + jnp.sum(two)

    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, PartitionSpec("data")))
        grads = jax.jit(jax.grad(loss, (0, 1, 2)))(w, jnp.ones(8), jnp.ones(shape))
    assert [g.shape for g in grads] == [(16, 8), (8,), shape]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_gelu_and_a_residual_connection_on_a_mesh(kind):
    x, w, _, _ = arrays((4, 5, 16), 16)

    def loss(w, x):
        y, x = swjax.switchback(x, w, prologue=swjax.Gelu(), residual=True, layout=layout)
        return jnp.sum(jnp.sin(x + y))

    layout = swjax.Layout(PartitionSpec("data"), PartitionSpec("data"))
    want = jax.jit(jax.grad(loss, (0, 1)))(w, x)
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(kind,))):
        got = jax.jit(jax.grad(loss, (0, 1)))(w, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, w: swjax.switchback(x, w.T), r"needs x \[..., k\] .* x \(4, 3\) and w \(5, 3\)"),
        (lambda x, w: swjax.switchback(x, ()), r"got \(\): pass at least one weight"),
        (lambda x, w: swjax.switchback(x, None), "w must be an array, got a NoneType: pass"),
        (lambda x, w: swjax.switchback(x, w, jnp.ones(3)), r"bias must have the shape \(5,\)"),
        (lambda x, w: swjax.switchback(x, w, addend=jnp.ones(5)),
         r"addend must be an array of the shape \(4, 5\) of y, got \(5,\): add other shapes to y instead"),
        (lambda x, w: swjax.switchback(x, (w, w), addend=x),
         "addend is for one weight, got 2: add arrays to the outputs instead"),
        (lambda x, w: swjax.switchback(x, w, addend=jnp.zeros((*x.shape[:-1], 5), int)),
         "addend must be float16, bfloat16 or float32, got int32: cast it first"),
        (lambda x, w: swjax.mlp(x, w, None, w.T[:, :2], None, add_input=True),
         r"x \(add_input=True\) must be an array of the shape \(.*, 2\) of y, got .*: add other shapes"),
        (lambda x, w: swjax.switchback([[1.0, 2.0, 3.0]], w),
         r"x must be an array, got a list: pass jnp.asarray\(x\)"),
        (lambda x, w: swjax.switchback(swjax.quantize(x), w),
         "x must be an array, got a QTensor: only w may be quantized"),
        (lambda x, w: swjax.switchback(x, w, swjax.quantize(w)),
         "bias must be an array, got a QTensor: only w may be quantized"),
        (lambda x, w: swjax.mlp(x, w, None, 2.0, None),
         r"w must be an array, got a float: pass jnp.asarray\(w\)"),
        (lambda x, w: swjax.switchback(x.astype(int), w),
         "x must be float16, bfloat16 or float32, got int32: cast"),
        (lambda x, w: swjax.switchback(x, (w, w), jnp.zeros(5)),
         "2 weights need None or a tuple of 2 biases, .* got one for all"),
        (lambda x, w: swjax.switchback(x, (w, w), (None,)), "tuple of 2 biases, .* got 1"),
        (lambda x, w: swjax.switchback(x, w, recipe="int4"),
         "recipe must be one of standard, switchback, .* got 'int4'"),
        (lambda x, w: swjax.switchback(x, w, recipe={".*": "switchback"}),
         "recipe must be one of standard, switchback, .* got {'.*': 'switchback'}"),
        (lambda x, w: swjax.switchback(x, w, implementation="cuda"),
         "implementation must be one of xla, triton, mosaic_gpu, pallas_tpu or None"),
        (lambda x, w: swjax.gated_mlp(x, w, w, w.T, activation="relu"),
         "activation must be one of silu, gelu, gelu_tanh, got 'relu': apply others between"),
        (lambda x, w: swjax.gated_mlp(x, w, None, w.T),
         r"w_gate must be an array \[2, k, h\] or \[k, 2 h\] if w_up is None, got \(3, 5\): pass both"),
        (lambda x, w: swjax.gated_mlp(x, w, w[:, :2], w.T),
         r"w_gate and w_up must have one shape, got \(3, 5\) and \(3, 2\)"),
        (lambda x, w: swjax.gated_mlp(x, w, w, w), r"got x \(4, 5\) and w \(3, 5\)"),
        (lambda x, w: swjax.switchback(x, w, prologue=swjax.RMSNorm(jnp.ones(5))),
         r"RMSNorm's scale must be an array of the shape \(3,\) of x's features, got \(5,\)"),
        (lambda x, w: swjax.switchback(x, w, prologue=jax.nn.gelu),
         "prologue must be a swjax.LayerNorm, a swjax.RMSNorm, a swjax.Gelu or None, got <"),
        (lambda x, w: swjax.switchback(x, w, prologue=swjax.LayerNorm(jnp.ones(1), jnp.zeros(3))),
         r"LayerNorm's scale must be an array of the shape \(3,\) of x's features, got \(1,\)"),
        (lambda x, w: swjax.mlp(x, w, None, w.T, None, prologue=swjax.LayerNorm(jnp.ones(3), None)),
         "LayerNorm's bias must be an array of the shape .*, got NoneType"),
        (lambda x, w: swjax.switchback(x, w, out_dtype=jnp.int32),
         "out_dtype must be a floating dtype, got int32: cast y instead"),
        (lambda x, w: swjax.switchback(x, w, out_dtype=jnp.complex64),
         "out_dtype must be a floating dtype, got complex64: cast y instead"),
        (lambda x, w: swjax.quantize_weight(w[None]),
         r"quantize_weight needs w \[k, n\], got \(1, 3, 5\): use jax.vmap"),
        (lambda x, w: swjax.quantize(x, dtype="int4"),
         "dtype must be one of int8, float8_e4m3fn, float8_e5m2, got 'int4'"),
        (lambda x, w: swjax.quantize(x, axes=(2,)), "axes: axis 2 is out of bounds for array of dim"),
        (lambda x, w: swjax.quantize(x.astype(complex)), "x must .* got complex64: cast it first"),
        (lambda x, w: swjax.quantize_weight(w.astype(int)), "x must be float16, .* int32: cast"),
        (lambda x, w: swjax.dot_general("int4"), "got 'int4'"),
        (lambda x, w: Quantizer("int8", "tesnor"), "scope must be one of .*got 'tesnor'"),
        (lambda x, w: Quantizer("int4", "row"), "dtype must be one of .*got 'int4'"),
        (lambda x, w: Recipe(fwd="switchback"), "fwd must be a Product or None, got 'switchback'"),
        (lambda x, w: Product("int8", "int8"), "lhs must be a Quantizer, got 'int8'"),
        (lambda x, w: Product(Quantizer("int8", "row"), Quantizer("float8_e4m3fn", "tensor")),
         "int8 with int8, or fp8 with fp8, got int8 and float8_e4m3fn"),
        (lambda x, w: Product(Quantizer("int8", "row"), Quantizer("int8", "channel"), -6.0),
         "outlier_threshold must be at least 0, got -6.0: 0 turns outliers off"),
        (lambda x, w: swjax.switchback(x, [w, w]), "got a list: .*or a tuple of several weights"),
        (lambda x, w: Recipe(save_quantized=True), "needs quantized fwd and dgrad"),
        (lambda x,
         w: Recipe(*[Product(Quantizer("int8", "row"), Quantizer("int8", "channel"), 6.0)] * 2, None, True),
         "cannot keep outliers"),
    ],
)  # fmt: skip
def test_errors_name_the_invariant_the_value_and_the_remedy(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(jnp.ones((4, 3)), jnp.ones((3, 5)))


def test_assert_quantized_says_that_fp8_may_be_emulated():
    x, w = jnp.ones((8, 32)), jnp.ones((32, 16))
    with pytest.raises(AssertionError, match="found: 1 f32 x f32; fp8 products are emulated where"):
        assert_quantized(jnp.dot, x, w, dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="dtype must be one of int8, float8_e4m3fn, .*, got 'fp8'"):
        assert_quantized(jnp.dot, x, w, dtype="fp8")


@pytest.mark.parametrize("operate", ["q * 2", "2.0 * q", "q + q", "q @ q", "x - q", "-q", "q / 2"])
def test_a_qtensor_has_no_arithmetic(operate):
    """It is a tuple, which operators would repeat and concatenate."""
    with pytest.raises(TypeError, match=r"a QTensor has no arithmetic: .* swjax.dequantize\(q\)"):
        eval(operate, {"q": swjax.quantize(jnp.ones((2, 2))), "x": jnp.ones((2, 2))})
