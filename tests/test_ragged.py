"""`swjax.ragged_switchback`: the linear layer of experts, and its place in `swjax.quantized`."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import swjax
from swjax import auto
from swjax.testing import assert_quantized, matrix_products

RNG = np.random.default_rng(0)
ROWS, K, N = 12, 16, 8
SIZES = jnp.array([4, 0, 5], jnp.int32)  # three rows beyond
STARTS = (0, 4, 4, 9)
X = jnp.asarray(RNG.normal(size=(ROWS, K)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(3, K, N)) * [[[1.0]], [[9.0]], [[3.0]]], jnp.float32)
G = jnp.asarray(RNG.normal(size=(ROWS, N)), jnp.float32)


def by_expert(x, w, recipe):
    """One layer for each expert."""
    parts = [
        swjax.switchback(x[start:stop], w[e], recipe=recipe)
        for e, (start, stop) in enumerate(pairwise(STARTS))
    ]
    return jnp.concatenate([*parts, jnp.zeros((ROWS - STARTS[-1], N), x.dtype)])


@partial(jax.jit, static_argnums=0)
def with_gradients(fn, x, w, g):
    y, vjp = jax.vjp(fn, x, w)
    return y, *vjp(g)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("switchback", "bfloat16"),
        ("switchback_m", "float32"),
        ("switchback_q", "float32"),
        ("fp8_switchback", "bfloat16"),
        ("standard", "bfloat16"),
    ],
)
def test_each_expert_is_a_layer_of_its_own_rows(recipe, dtype):
    x, g = X.astype(dtype).at[-1].set(jnp.nan), G.astype(dtype)
    layer = lambda x, w: swjax.ragged_switchback(x, w, SIZES, recipe=recipe)
    got = with_gradients(layer, x, W, g)
    want = with_gradients(partial(by_expert, recipe=recipe), x, W, g)
    for ours, reference in zip(got, want):
        assert ours.dtype == reference.dtype
        np.testing.assert_allclose(
            *(np.asarray(a, "float64") for a in (ours, reference)), rtol=1e-6, atol=1e-5
        )
    count = 0 if recipe == "standard" else 2
    if not recipe.startswith("fp8"):
        assert matrix_products(with_gradients, layer, x, W, g)["s8", "s8"] == count


# --- an operation on x before the layer -----------------------------------------------------------------

SCALE, SHIFT = 1.0 + X[0] / 4, X[1]
PROLOGUES = {
    "gelu": swjax.Gelu(),
    "gelu_tanh": swjax.Gelu(approximate=True),
    "rms_norm": swjax.RMSNorm(SCALE),
    "layer_norm": swjax.LayerNorm(SCALE, SHIFT),
}


def plainly(prologue, x):
    """The prologue in JAX's own operations, which JAX differentiates."""
    if isinstance(prologue, swjax.Gelu):
        return jax.nn.gelu(x, approximate=prologue.approximate)
    rows = x.astype("float32")
    if isinstance(prologue, swjax.LayerNorm):
        rows -= rows.mean(-1, keepdims=True)
    rows *= jax.lax.rsqrt((rows**2).mean(-1, keepdims=True) + prologue.epsilon)
    rows *= prologue.scale[None]
    if isinstance(prologue, swjax.LayerNorm):
        rows += prologue.bias[None]
    return rows.astype(x.dtype)


@pytest.mark.parametrize(
    ("name", "recipe", "dtype"),
    [
        ("gelu", "switchback", "float32"),
        ("gelu", "standard", "bfloat16"),
        ("gelu_tanh", "fp8_switchback", "float32"),
        ("rms_norm", "switchback_q", "float32"),
        ("layer_norm", "switchback_m", "float32"),
        ("layer_norm", "standard", "float32"),
        ("rms_norm", "switchback_hadamard", "bfloat16"),
    ],
)
def test_a_prologue_comes_before_the_product(name, recipe, dtype):
    """Rows beyond the groups, whatever they are, change no gradient, also that of the norm's scale."""
    x, g, prologue = X.astype(dtype), G.astype(dtype), PROLOGUES[name]
    layer = partial(swjax.ragged_switchback, group_sizes=SIZES, recipe=recipe)
    ours = lambda x, of: layer(x, of[0], prologue=of[1])
    got = with_gradients(ours, x.at[STARTS[-1] :].set(jnp.nan), (W, prologue), g)
    composed = lambda x, of: layer(plainly(of[1], x), of[0])
    want = with_gradients(composed, x, (W, prologue), g)
    # The layer of `switchback_m` reads the quantized x, and its prologue recomputes it. In 16 bits the
    # derivative of the composition rounds more often.
    error = 0.02 if recipe == "switchback_m" else 0.01 if dtype == "bfloat16" else 1e-3
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(each, "float64") for each in (a, b))
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)
    for rows in got[:2]:
        assert not np.asarray(rows[STARTS[-1] :], "float32").any()


def test_a_prologue_in_other_forms():
    """Quantized weights, higher derivatives, a `jax.shard_map` that sums the gradient, and an error."""
    layer = partial(swjax.ragged_switchback, group_sizes=SIZES)
    loss = lambda layer, prologue, w: jnp.sum(jnp.sin(layer(X, w / 20, prologue=prologue)))
    exact = lambda x, w, prologue: jax.lax.ragged_dot(plainly(prologue, x), w, SIZES)
    norm = PROLOGUES["layer_norm"]
    first = lambda fn, of: jax.tree.leaves(jax.grad(partial(loss, fn))(of, W))
    second = lambda fn: jax.jit(jax.grad(lambda of: sum(jnp.sum(d**2) for d in first(fn, of))))
    for a, b in zip(*(jax.tree.leaves(second(fn)(norm)) for fn in (layer, exact)), strict=True):
        assert jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(b)

    q = jax.vmap(swjax.quantize_weight)(W)
    dx = lambda w: jax.grad(lambda x: jnp.vdot(layer(x, w, prologue=norm), G))(X)
    np.testing.assert_allclose(jax.jit(dx)(q), jax.jit(dx)(W), rtol=1e-4, atol=1e-5)

    mesh = jax.make_mesh((2,), ("experts",), axis_types=(AxisType.Auto,))
    each = lambda x, w, sizes, of: swjax.ragged_switchback(x, w, sizes, prologue=of)
    specs = {"in_specs": (*(P("experts"),) * 3, P()), "out_specs": P("experts")}
    both = jax.shard_map(each, mesh=mesh, **specs)
    arrays = [jnp.concatenate([a, a]) for a in (X, W, SIZES)]
    summed = jax.jit(jax.grad(lambda of: jnp.sum(jnp.sin(both(*arrays, of)))))(norm)
    one = jax.jit(jax.grad(lambda of: jnp.sum(jnp.sin(each(X, W, SIZES, of)))))(norm)
    for a, b in zip(*map(jax.tree.leaves, (summed, one)), strict=True):
        np.testing.assert_allclose(a, 2 * b, rtol=1e-4, atol=1e-5)

    with pytest.raises(ValueError, match=r"RMSNorm's scale .* \(16,\) of x's features, got \(3,\)"):
        layer(X, W, prologue=swjax.RMSNorm(jnp.ones(3)))


# --- gate, up, activation, down -----------------------------------------------------------------------

DOWN = jnp.asarray(RNG.normal(size=(3, N, K)), jnp.float32)
WEIGHTS = (W, W[::-1] / 3, DOWN)


def mlp_by_layers(x, ws, recipe):
    """The layers one by one, and JAX's derivative of the activation, in the dtype of x."""
    layer = partial(swjax.ragged_switchback, group_sizes=SIZES, recipe=recipe)
    gate, up = (layer(x, w).astype("float32") for w in ws[:2])
    return layer((jax.nn.silu(gate) * up).astype(x.dtype), ws[2])


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("switchback", "float32"),
        ("switchback_m", "bfloat16"),
        ("switchback_q", "float32"),
        ("fp8_switchback", "float32"),
        ("standard", "bfloat16"),
    ],
)
def test_gated_mlp_is_three_layers(recipe, dtype):
    x, g = (jnp.asarray(RNG.normal(size=(ROWS, K)), dtype) for _ in range(2))
    x = x.at[-1].set(jnp.nan)
    ours = lambda x, ws: swjax.gated_ragged_mlp(x, *ws, SIZES, recipe=recipe)
    got = with_gradients(ours, x, WEIGHTS, g)
    want = with_gradients(partial(mlp_by_layers, recipe=recipe), x, WEIGHTS, g)
    # `switchback_m` recomputes h, and its layer alone reads the quantized h. The layers round more often.
    error = {"switchback_m": 0.02, "standard": 0.01}.get(recipe, 1e-4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(each, "float64") for each in (a, b))
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)
    assert not np.asarray(got[0][STARTS[-1] :], "float32").any()


def test_gated_mlp_in_other_forms():
    """Quantized weights, higher derivatives, and rotated rows, where the shapes of a test would not do."""
    x = jnp.asarray(RNG.normal(size=(ROWS, K)), jnp.float32)
    layer = lambda x, ws: swjax.gated_ragged_mlp(x, *ws, SIZES)
    q = tuple(jax.vmap(swjax.quantize_weight)(w) for w in WEIGHTS)
    loss = lambda ws, x: jnp.vdot(layer(x, ws), x)
    dx, want = (jax.jit(jax.grad(partial(loss, ws)))(x) for ws in (q, WEIGHTS))
    np.testing.assert_allclose(dx, want, rtol=1e-4, atol=1e-4)
    exact = lambda x, ws: mlp_by_layers(x, ws, "standard")
    first = lambda fn, ws: jax.grad(lambda x: jnp.sum(jnp.sin(fn(x, ws) / 50)))(x)
    second = lambda fn: jax.jit(jax.grad(lambda ws: jnp.sum(first(fn, ws) ** 2)))(WEIGHTS)
    for a, b in zip(second(layer), second(exact)):
        assert jnp.linalg.norm(a - b) < 0.1 * jnp.linalg.norm(b)


def test_rotated_rows(monkeypatch):
    monkeypatch.setattr(auto, "LEAST_WIDTH", 1)
    monkeypatch.setattr(auto, "LEAST_ROTATED_ROWS", 1)
    x, g = (jnp.asarray(RNG.normal(size=(ROWS, K)), "bfloat16") for _ in range(2))
    mlp = partial(swjax.gated_ragged_mlp, group_sizes=SIZES, implementation="xla")
    ours = lambda recipe: lambda x, ws: mlp(x, *ws, recipe=recipe)
    got, want = (
        with_gradients(ours(recipe), x, WEIGHTS, g)
        for recipe in ("switchback_hadamard", "switchback")
    )
    jax.tree.map(np.testing.assert_array_equal, got[:2], want[:2])
    for a, b in zip(got[2], want[2], strict=True):
        assert 0 < jnp.linalg.norm(a - b) < 0.03 * jnp.linalg.norm(b)
    used = swjax.testing.implementations(ours("switchback_hadamard"), x, WEIGHTS)
    assert used["gated", "xla"] == 1 and used["ragged_matmul", "xla"] == 3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*rows an expert")
@pytest.mark.parametrize(
    "recipe", ["standard", "switchback", "switchback_q", "switchback_hadamard", "fp8_switchback"]
)
def test_kernels_give_the_values_of_xla(recipe, monkeypatch):
    monkeypatch.setattr(auto, "LEAST_WIDTH", 1)
    monkeypatch.setattr(auto, "LEAST_ROTATED_ROWS", 1)
    m, k, h, sizes = 1000, 256, 384, jnp.array([300, 0, 1, 640, 20], jnp.int32)
    x, g = (jnp.asarray(RNG.normal(size=(m, k)), "bfloat16") for _ in range(2))
    shapes = (5, k, h), (5, k, h), (5, h, k)
    ws = tuple(jnp.asarray(RNG.normal(size=of) / 16, jnp.float32) for of in shapes)

    def layer(implementation):
        options = {"recipe": recipe, "implementation": implementation}
        return lambda x, ws: swjax.gated_ragged_mlp(x, *ws, sizes, **options)

    ours = "triton" if recipe == "switchback_hadamard" else None
    got, want = (with_gradients(layer(name), x, ws, g) for name in (ours, "xla"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(each, "float64") for each in (a, b))
        # Hopper sums fp8 products with 14 bits: see `numeric.FP8_SUM_DB`.
        error = 0.02 if recipe.startswith("fp8") else 0.01
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)
    used = swjax.testing.implementations(layer(ours), x, ws)
    assert {name for _, name in used} <= {"triton", "mosaic_gpu"}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X, W, W[:, :, :4], DOWN, SIZES), {}, r"one shape, got \(3, 16, 8\) and \(3, 16, 4\)"),
        ((X, W, W, W, SIZES), {}, r"gated_ragged_mlp needs .* got x \(12, 8\), w \(3, 16, 8\)"),
        ((X, W, W, DOWN, SIZES), {"activation": "relu"}, "activation must be one of silu"),
        ((X, W, W, DOWN, SIZES), {"implementation": "cuda"}, "implementation must be one of xla"),
    ],
)
def test_errors_of_the_mlp_are_one_line(arguments, options, message):
    with pytest.raises(ValueError, match=message) as error:
        swjax.gated_ragged_mlp(*arguments, **options)
    assert "\n" not in str(error.value)


# --- quantized weights, transformations, errors -------------------------------------------------------


@pytest.mark.parametrize(("recipe", "error"), [("switchback", 0), ("switchback_q", 0.02)])
def test_quantized_weights_have_no_gradient_and_give_the_same(recipe, error):
    layer = lambda x, w: swjax.ragged_switchback(x, w, SIZES, recipe=recipe)
    q = jax.vmap(partial(swjax.quantize_weight, recipe=recipe))(W)
    y, dx = jax.jit(lambda q: jax.value_and_grad(lambda x: jnp.vdot(layer(x, q), G))(X))(q)
    want = with_gradients(layer, X, W, G)
    np.testing.assert_allclose(y, jnp.vdot(want[0], G), rtol=1e-5)
    assert jnp.linalg.norm(dx - want[1]) <= error * jnp.linalg.norm(want[1])


def test_transformations():
    """Higher derivatives are those of the exact product; vmap, remat and shard_map change nothing."""
    layer = lambda x, w: swjax.ragged_switchback(x, w, SIZES)
    exact = lambda x, w: jax.lax.ragged_dot(x, w, SIZES)
    first = lambda fn, w: jax.grad(lambda x: jnp.sum(jnp.sin(fn(x, w))))(X)
    second = lambda fn: jax.jit(jax.grad(lambda w: jnp.sum(first(fn, w) ** 2)))(W / 20)
    assert jnp.linalg.norm(second(layer) - second(exact)) < 0.05 * jnp.linalg.norm(second(exact))

    loss = lambda fn, x, w: jnp.sum(jnp.tanh(fn(x, w)))
    grads = jax.jit(jax.grad(partial(loss, layer), argnums=(0, 1)))
    want = grads(X, W)
    policy = swjax.checkpoint_policies.save_weights
    remat = jax.jit(jax.grad(partial(loss, jax.checkpoint(layer, policy=policy)), argnums=(0, 1)))
    jax.tree.map(np.testing.assert_array_equal, remat(X, W), want)
    stacked = jax.vmap(lambda x, w, s: swjax.ragged_switchback(x, w, s))
    twice = [jnp.stack([a, a]) for a in (X, W, SIZES)]
    np.testing.assert_array_equal(jax.jit(stacked)(*twice)[1], jax.jit(layer)(X, W))

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    each = jax.shard_map(layer, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    both = jax.jit(jax.grad(partial(loss, each), argnums=(0, 1)))
    dx, dw = both(jnp.concatenate([X, X]), W)
    np.testing.assert_allclose(dx[:ROWS], want[0], rtol=1e-6)
    np.testing.assert_allclose(dw, 2 * want[1], rtol=1e-6)


def test_experts_on_a_mesh_axis_stay_where_they_are():
    """Each device has its own experts, and the rows for them: nothing moves between devices."""
    mesh = jax.make_mesh((2,), ("experts",), axis_types=(AxisType.Auto,))
    layer = lambda x, ws, sizes: swjax.gated_ragged_mlp(x, *ws, sizes)
    each = jax.shard_map(layer, mesh=mesh, in_specs=P("experts"), out_specs=P("experts"))
    loss = lambda fn: lambda x, ws, sizes: jnp.sum(jnp.tanh(fn(x, ws, sizes)))
    twice = lambda tree: jax.tree.map(lambda a: jnp.concatenate([a, a]), tree)
    both = jax.jit(jax.value_and_grad(loss(each), argnums=(0, 1)))
    arrays = twice((X, WEIGHTS, SIZES))
    value, grads = both(*arrays)
    want, of_one = jax.jit(jax.value_and_grad(loss(layer), argnums=(0, 1)))(X, WEIGHTS, SIZES)
    np.testing.assert_allclose(value, 2 * want, rtol=1e-5)
    for got, one in zip(jax.tree.leaves(grads), jax.tree.leaves(of_one), strict=True):
        np.testing.assert_allclose(got, jnp.concatenate([one, one]), rtol=1e-4, atol=1e-5)
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, P("experts")))
    moved = swjax.testing.collectives(jax.grad(loss(each), argnums=(0, 1)), *placed)
    assert not [each for each in moved if each.shape]


Q = jax.vmap(swjax.quantize_weight)(W)


@pytest.mark.parametrize(
    ("arguments", "recipe", "message"),
    [
        ((X, W, [1, 2, 3]), "switchback", "group_sizes must be an array, got a list: pass jnp.as"),
        ((X, W[0], SIZES), "switchback", r"needs x \[m, k\], w \[e, k, n\] .* got x \(12, 16\)"),
        ((X, W, SIZES[:2]), "switchback", r"group_sizes \(2,\)"),
        ((X, W[:0], SIZES[:0]), "switchback", r"at least one expert, got w \(0, 16, 8\)"),
        ((X, W, jnp.array([-1, 2, 3])), "switchback", r"at least 0 .* 12 rows .* \[-1, 2, 3\]"),
        ((X, W, jnp.array([9, 2, 3])), "switchback", r"at most the 12 rows of x, got \[9, 2, 3\]"),
        ((X, W, SIZES.astype("float32")), "switchback", "group_sizes must be .* got float32"),
        ((X.astype("int8"), W, SIZES), "switchback", "x must be float16.* got int8"),
        ((X, W, SIZES), "llm_int8", "weight gradient in 16 bits .* tokens, got .*use 'switchback'"),
        ((X, W, SIZES), "int8_hadamard", "without rotated features and outliers"),
        ((X, W, SIZES), "swichback", "recipe must be one of"),
        (
            (X, Q, SIZES),
            "fp8_switchback",
            r"quantized w must be float8_e4m3fn \[e, n, k\] with .*, got int8 \(3,",
        ),
        ((Q, W, SIZES), "switchback", "x must be an array, got a QTensor: only w may be quantized"),
    ],
)
def test_errors_are_one_line(arguments, recipe, message):
    with pytest.raises(ValueError, match=message) as error:
        swjax.ragged_switchback(*arguments, recipe=recipe)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="out_dtype must be a floating dtype, got int32"):
        swjax.ragged_switchback(X, W, SIZES, out_dtype="int32")


# --- in `swjax.quantized` -----------------------------------------------------------------------------


def experts(params, x):
    """A mixture of experts whose rows are sorted by expert; the gates and the last einsum are dense."""
    chosen = jnp.argmax(x @ params["router"], -1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=3)
    hidden = jax.lax.ragged_dot(x[order], params["wi"].astype(x.dtype), sizes)
    y = jax.lax.ragged_dot(jax.nn.relu(hidden), params["wo"].swapaxes(1, 2).astype(x.dtype), sizes)
    return jnp.einsum("ebk,ekn->ebn", jnp.stack([y] * 3), params["dense"].astype(x.dtype))


PARAMS = {
    "router": W[0, :, :3],
    "wi": W,
    "wo": jnp.asarray(RNG.normal(size=(3, K, N)), jnp.float32),
    "dense": jnp.asarray(RNG.normal(size=(3, K, N)), jnp.float32),
}


def test_experts_of_any_program():
    int8 = swjax.quantized(experts)
    report = int8.report(PARAMS, X)
    rows = [(p.path, p.equation, p.flops) for p in report if p.recipe]
    assert rows == [
        ("wi", "ragged ab,cbd->ad", 2 * ROWS * K * N),
        ("wo", "ragged ab,cbd->ad", 2 * ROWS * K * N),
        ("dense", "abc,acd->abd", 3 * 2 * ROWS * K * N),
    ]
    loss = lambda fn, params, x: jnp.mean(fn(params, x) ** 2)
    got, want = (jax.jit(jax.grad(partial(loss, fn)))(PARAMS, X) for fn in (int8, experts))
    for name in ("wi", "wo", "dense"):
        assert 0 < jnp.linalg.norm(got[name] - want[name]) < 0.05 * jnp.linalg.norm(want[name])
    assert_quantized(int8, PARAMS, X, count=3)
    (again,) = swjax.quantized(
        lambda w, x: swjax.ragged_switchback(x, w, SIZES), {".*": "switchback"}
    ).report(W, X)
    assert (again.reason, again.flops) == ("already quantized", 2 * ROWS * K * N)


def test_reports_count_weight_gradients_of_few_rows_as_16_bits():
    """All three counted as 8 bits, but `ragged_switchback` rotates no rows of small experts."""
    int8 = swjax.quantized(experts, {"w.|dense": "switchback_hadamard"})
    report, stays = int8.report(PARAMS, X), "the weight gradient stays in 16 bits: few rows"
    in_8_bits = {p.path: not p.reason.startswith(stays) for p in report if p.recipe}
    assert in_8_bits == {"wi": False, "wo": False, "dense": True}
    dense = next(p.flops for p in report if p.path == "dense")
    assert report.weight_gradient_share == dense / sum(p.flops for p in report)
    grads = [
        jax.jit(jax.grad(lambda p, fn=fn: jnp.sum(fn(p, X) ** 2)))(PARAMS)
        for fn in (int8, swjax.quantized(experts, {"w.|dense": "switchback"}))
    ]
    differ = {name: bool(jnp.any(grads[0][name] != grads[1][name])) for name in in_8_bits}
    assert differ == in_8_bits


def test_megablox_is_a_ragged_product():
    """JAX's kernel for TPUs, with each order of the axes of w; without a recipe the kernel stays."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    params = {"up": W[:, :, :4], "down": W.mT[:, :4]}

    def mlp(product, params, x):
        h = product(x, params["up"].astype(x.dtype), False)
        return product(jnp.tanh(h), params["down"].astype(x.dtype).mT, True)

    dot = lambda x, w, last: jax.lax.ragged_dot(x, w.mT if last else w, SIZES)
    kernel = lambda x, w, last: gmm(x, w, SIZES, x.dtype, (ROWS, 8, 8), transpose_rhs=last)
    grads = lambda product: jax.jit(
        jax.grad(lambda *args: jnp.sum(swjax.quantized(partial(mlp, product))(*args) ** 2))
    )(params, X)
    jax.tree.map(np.testing.assert_array_equal, grads(kernel), grads(dot))
    some = swjax.quantized(partial(mlp, kernel), {"up": "switchback", "down": "standard"})
    assert str(jax.make_jaxpr(some)(params, X)).count("pallas_call") == 1


def test_only_tokens_move_between_the_devices_of_converted_experts():
    """A program that sends rows to the devices of their experts is converted, and gathers no weight."""
    mesh = jax.make_mesh((2,), ("experts",), axis_types=(AxisType.Auto,))

    def exchange(x):
        halves = x.reshape(2, -1, x.shape[-1])
        return jax.lax.all_to_all(halves, "experts", 0, 0).reshape(x.shape)

    def of_device(w, x, sizes):
        y = jax.lax.ragged_dot(exchange(x), w["in"], sizes)
        return exchange(jax.lax.ragged_dot(jax.nn.relu(y), w["out"], sizes))

    plain = jax.shard_map(of_device, mesh=mesh, in_specs=P("experts"), out_specs=P("experts"))
    int8 = swjax.quantized(plain)
    loss = lambda fn: lambda *arrays: jnp.mean(fn(*arrays) ** 2)
    twice = lambda tree: jax.tree.map(lambda a: jnp.concatenate([a, a]), tree)
    arrays = twice(({"in": W, "out": PARAMS["wo"].mT}, X, SIZES))
    arrays = jax.device_put(arrays, jax.NamedSharding(mesh, P("experts")))
    got, want = (jax.jit(jax.grad(loss(fn)))(*arrays) for fn in (int8, plain))
    for name in want:
        assert 0 < jnp.linalg.norm(got[name] - want[name]) < 0.05 * jnp.linalg.norm(want[name])
    moved = [
        each for each in swjax.testing.collectives(jax.grad(loss(int8)), *arrays) if each.shape
    ]
    assert {each.op for each in moved} == {"all-to-all"}, moved


def mixtures(params, x):
    """Layers of experts in a scan with remat: ragged products, an einsum, and a `jax.vmap`."""

    def layer(x, p):
        y = jnp.tanh(jax.lax.ragged_dot(x, p["wi"].astype(x.dtype), SIZES))
        x = x + jax.lax.ragged_dot(y, p["wo"].swapaxes(1, 2), SIZES)
        y = jnp.einsum("ebk,kehf->ebhf", jnp.stack([x] * 3), p["up"])
        down = jax.vmap(lambda y, w: jnp.einsum("bhf,hfk->bk", y, w), in_axes=(0, 2))
        return x + down(jnp.tanh(y), p["down"]).sum(0), None

    return jax.lax.scan(jax.checkpoint(layer), x, params)[0]


@pytest.mark.parametrize("recipe", ["switchback", "switchback_q"])
def test_frozen_experts(recipe):
    """Their values are those of the parameters; no call quantizes a weight or returns its gradient."""
    shapes = {"wi": (3, K, N), "wo": (3, K, N), "up": (K, 3, 2, N), "down": (2, N, 3, K)}
    params = {
        name: jnp.asarray(RNG.normal(size=(2, *shape)) / 4, jnp.float32)
        for name, shape in shapes.items()
    }
    int8 = swjax.quantized(mixtures, {".*": recipe})
    frozen = int8.freeze(params, X)
    shapes = {name: w.values.shape for name, w in frozen.items()}
    assert shapes["wi"] == (2, 3, N, K) and shapes["wo"] == (2, 3, K, N)
    assert shapes["up"] == (2, 3, 2 * N, K) and shapes["down"] == (2, 3, K, 2 * N)
    step = jax.jit(jax.value_and_grad(lambda x, params: jnp.sum(int8(params, x) ** 2)))
    (y, dx), (want, wanted) = step(X, frozen), step(X, params)
    assert y == want
    # Scales of columns are no scales of rows: `switchback_q` quantizes again for the input gradient.
    tolerance = {"switchback": 1e-5, "switchback_q": 0.02}[recipe]
    assert jnp.linalg.norm(dx - wanted) <= tolerance * jnp.linalg.norm(wanted)
    other = swjax.quantized(lambda p, x: mixtures(p | {"wi": p["wi"][:, ::-1]}, x), {".*": recipe})
    with pytest.raises(ValueError, match="'wi' was frozen for another product"):
        other(frozen, X)


def test_experts_without_a_recipe_are_named_in_the_error():
    with pytest.raises(ValueError, match="ragged .* parameter 'wi': .*weight gradient.*'standard'"):
        swjax.quantized(experts, {"w.": "llm_int8"})(PARAMS, X)
    with pytest.raises(ValueError, match="parameter 'wi': .*'triton' .* needs an NVIDIA GPU"):
        swjax.quantized(experts, {"w.": "switchback"}, implementation="triton")(PARAMS, X)
