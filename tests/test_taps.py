"""The measurements of taps, compared with NumPy, in models with and without stacked layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import thinning
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numeric import snr_db

import swjax
import swjax.nnx
from swjax import diagnostics
from swjax.diagnostics import taps
from swjax.optax import adamw_rms_by_path, rms_by_path, stable_adamw
from swjax.recipes import RECIPES, Product, Quantizer, Recipe
from swjax.testing import matrix_products

ROTATED = RECIPES["switchback_hadamard"].wgrad
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(12, 64)) * RNG.uniform(0.1, 9, (12, 1)), jnp.float32)


def measured(loss, model, *args, **which):
    return jax.jit(lambda *args: diagnostics.measure(loss, model, *args, **which))(*args)


def two_layers(recipe="switchback"):
    first, second = ((64, 32), (32, 8))
    return nnx.Sequential(
        swjax.nnx.Linear(*first, recipe=recipe, rngs=nnx.Rngs(0)),
        jnp.sin,
        nnx.Linear(*second, rngs=nnx.Rngs(1)),
    )


def loss(model, x):
    return jnp.mean(jnp.square(model(x)))


def by_hand(x, axes, kept=None):
    """Returns the shares of zeros and of saturated values, and the SQNR in dB, of int8."""
    x = np.asarray(x, np.float64)
    inside = x if kept is None else np.where(kept, 0, x)
    scale = np.maximum(np.max(np.abs(inside), axis=axes, keepdims=True), 1e-30) / 127
    values = np.rint(inside / scale)
    nonzero = np.sum(inside != 0)
    noise = np.sum(np.square(inside - values * scale))
    return {
        "zeros": np.sum((values == 0) & (inside != 0)) / nonzero,
        "saturated": np.sum(np.abs(values) == 127) / nonzero,
        "sqnr_db": 10 * np.log10(np.sum(np.square(x)) / noise),
    }


@pytest.mark.parametrize(("recipe", "w_axes"), [("switchback", (0, 1)), ("switchback_q", (0,))])
def test_health_is_that_of_the_operands(recipe, w_axes):
    model = two_layers(recipe)
    found = measured(loss, model, X)
    layer, rest = model.layers[0], lambda y: jnp.mean(jnp.square(model.layers[2](jnp.sin(y))))
    operands = {
        "x": (X, (1,)),
        "w": (layer.kernel[...], w_axes),
        "g": (jax.grad(rest)(layer(X)), (1,)),
    }
    expected = {
        f"quantization/{name}/layers/0/{operand}": value
        for operand, (array, axes) in operands.items()
        for name, value in by_hand(array, axes).items()
    }
    assert found.keys() == expected.keys()  # only the first layer is quantized
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "recipe", thinning.first(["switchback_hadamard", "llm_int8", Recipe(wgrad=ROTATED)])
)
def test_weight_gradients_are_measured_as_they_are_quantized(recipe):
    """1,300 tokens of very different magnitude: two blocks, the last tokens of which are zeros."""
    model = two_layers(recipe)
    x = jnp.asarray(RNG.normal(size=(1300, 64)) * np.exp(RNG.normal(size=(1300, 1))), jnp.float32)
    found = measured(loss, model, x)
    layer, rest = model.layers[0], lambda y: jnp.mean(jnp.square(model.layers[2](jnp.sin(y))))
    for operand, array in {"x": x, "g": jax.grad(rest)(layer(x))}.items():
        array = np.asarray(array, np.float64)
        quantized, axes = (array, (0,)) if recipe == "llm_int8" else (oracle.rotated(array), (1,))
        for name, value in by_hand(quantized, axes).items():
            metric = f"quantization/{name}/layers/0/wgrad_{operand}"
            # Rotations in float32 round a few values to the neighbouring integer.
            np.testing.assert_allclose(found[metric], value, rtol=5e-3, err_msg=metric)
    nothing = recipe == Recipe(wgrad=ROTATED)  # no product of the forward pass
    assert np.isnan(found["quantization/sqnr_db/layers/0/x"]) == nothing


def test_operands_in_block_formats_are_measured():
    """Also tokens [2, 20, ...] whose number no block divides."""
    x = jnp.asarray(RNG.normal(size=(2, 20, 64)), jnp.float32)
    as_mx = lambda a: oracle.in_blocks(a, oracle.mx, 32)
    for recipe, round_, round_w in (
        ("mxfp8", as_mx, as_mx),
        ("nvfp4", oracle.nv, lambda a: oracle.nv(a, square=True)),
    ):
        found = measured(loss, model := two_layers(recipe), x)
        rows = np.asarray(x).reshape(-1, 64)
        operands = {
            "x": (rows, round_(rows)),
            "w": (w := np.asarray(model.layers[0].kernel[...]).T, round_w(w)),
        }
        if recipe == "mxfp8":
            operands["wgrad_x"] = (rows.T, as_mx(rows.T))
        for operand, (exact, rounded) in operands.items():
            got = found[f"quantization/sqnr_db/layers/0/{operand}"]
            np.testing.assert_allclose(got, snr_db(rounded, exact), rtol=1e-3, err_msg=operand)


@pytest.mark.parametrize(
    "recipe", thinning.first(["switchback_hadamard", "switchback", "fp8_switchback"])
)
def test_sqnr_does_not_depend_on_the_magnitude(recipe):
    """Squares of the operands underflow and overflow float32; the scales are powers of two, so exact."""
    model = two_layers(recipe)
    model.layers = nnx.List([model.layers[0]])  # linear: the gradient has the magnitude of x

    run = jax.jit(lambda x: diagnostics.measure(loss, model, x))

    def sqnr(exponent):
        found = run(X * 2.0**exponent)
        return {name: value for name, value in found.items() if "sqnr_db" in name}

    expected = sqnr(0)
    assert 15 < min(expected.values()) and max(expected.values()) < 60
    for exponent in (-80, -63, -53, -45, -40, 20, 45, 63, 90):
        for name, value in sqnr(exponent).items():
            np.testing.assert_allclose(value, expected[name], atol=2e-3, err_msg=(exponent, name))


def sqnr_of(*operands):
    """The SQNR that `read` computes from the sums of several calls."""
    sums = sum(taps.operand_sums(jnp.asarray(x, jnp.float32), (1,), "int8") for x in operands)
    return taps._summary(sums)["sqnr_db"]


@pytest.mark.release
def test_sqnr_of_calls_of_different_magnitude_is_that_of_their_sums():
    def by_sums(*scales):
        operands = [np.asarray(X[:, i : i + 8] * s, np.float64) for i, s in enumerate(scales)]
        quantized = [reference_of(x) for x in operands]
        noise = sum(np.sum(np.square(x - q)) for x, q in zip(operands, quantized))
        return operands, 10 * np.log10(sum(np.sum(np.square(x)) for x in operands) / noise)

    def reference_of(x):
        scale = np.max(np.abs(x), axis=1, keepdims=True) / 127
        return np.rint(x / scale) * scale

    # The elements of the second to fourth are on both sides of an edge of the ranges.
    for scales in (
        (1, 3),
        (2.0**-42, 2.0**-44),
        (2.0**42, 2.0**41),
        (1, 2.0**41),
        (2.0**60, 1e-20),
    ):
        operands, expected = by_sums(*scales)
        np.testing.assert_allclose(sqnr_of(*operands), expected, rtol=1e-4, err_msg=scales)


@pytest.mark.parametrize("scale", [2.0**-85, 2.0**-42, 1, 2.0**42, 2.0**100])
def test_sqnr_is_at_most_200_and_nan_without_a_finite_signal(scale):
    exact = np.full((2, 4), 127 * scale)
    np.testing.assert_allclose(sqnr_of(exact), 200)
    assert np.isnan(sqnr_of(np.zeros((2, 4))))
    for bad in (np.nan, np.inf):
        assert np.isnan(sqnr_of(np.array([[bad, scale], [scale, scale]])))


@pytest.mark.release
def test_sqnr_of_scanned_and_mapped_layers_does_not_depend_on_the_magnitude():
    class Mapped(Stack):
        def __call__(self, x):
            return jax.vmap(super().__call__)(x[:, None])

    for model in (Stack(True), Mapped(True)):
        run = jax.jit(lambda x, model=model: diagnostics.measure(loss, model, x))
        usual, small = (run(X * s) for s in (1.0, 2.0**-60))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), small, usual)


def test_outliers_stay_out():
    found = measured(loss, two_layers("llm_int8_outlier6"), X)
    kept = np.max(np.abs(X), 0, keepdims=True) >= 6
    assert 0 < kept.sum() < 64
    for operand, axes in {"x": (1,), "wgrad_x": (0,)}.items():
        for name, value in by_hand(X, axes, kept).items():
            metric = f"quantization/{name}/layers/0/{operand}"
            np.testing.assert_allclose(found[metric], value, rtol=1e-3)


def test_outliers_of_16_bits_are_those_of_the_layer():
    """6.1 would round to 6.09375 in bfloat16; the layer compares in float32."""
    product = Product(Quantizer("int8", "row"), Quantizer("int8", "channel"), 6.1)
    layer = swjax.nnx.Linear(
        16, 4, recipe=Recipe(fwd=product), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    x = jnp.zeros((3, 16)).at[:, 0].set(6.09375)
    found = measured(loss, nnx.Sequential(layer), x)
    assert found["quantization/saturated/layers/0/x"] == 1  # NaN if x had no other feature


@pytest.mark.release
def test_converted_attention_is_measured_through_its_dot_general():
    model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    swjax.nnx.quantize_model(model, {"query|out": "switchback"})
    x = X.reshape(3, 16, 16)
    found = measured(loss, model, x)
    assert {name.split("/")[2] for name in found} == {"query", "out"}
    for name, value in by_hand(x, (2,)).items():
        np.testing.assert_allclose(found[f"quantization/{name}/query/x"], value, rtol=1e-3)
    assert 30 < found["quantization/sqnr_db/out/g"] < 60
    assert type(model) is nnx.MultiHeadAttention and not nnx.state(model, taps.Tap)


class Stack(nnx.Module):
    """Three equal layers whose parameters are stacked, scanned or not."""

    def __init__(self, scanned: bool):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs):
            return swjax.nnx.Linear(64, 64, use_bias=False, rngs=rngs)

        self.layers, self.scanned = layers(nnx.Rngs(0)), scanned

    def __call__(self, x):
        graph, stacked = nnx.split(self.layers)

        @jax.checkpoint
        def step(x, parameters):
            return x + nnx.merge(graph, parameters)(x), None

        if self.scanned:
            return jax.lax.scan(step, x, stacked)[0]
        for i in range(3):
            x, _ = step(x, jax.tree.map(lambda p, i=i: p[i], stacked))
        return x


def test_stacks_have_a_value_for_each_layer():
    which = {"features": "layers"}
    scanned, unrolled = (measured(loss, Stack(scanned), X, **which) for scanned in (True, False))
    assert {value.shape for value in scanned.values()} == {(3,)}
    assert len(scanned) == 3 * 3 + 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), scanned, unrolled)
    first = swjax.nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    first.kernel[...] = Stack(True).layers.kernel[0]
    np.testing.assert_allclose(
        scanned["stability/feature_mean_abs/layers"][0], jnp.mean(jnp.abs(first(X))), rtol=1e-5
    )


class Fused(nnx.Module):
    """Layers in fused calls, with a LayerNorm and a GELU."""

    def __init__(self):
        layers = (swjax.nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(4))
        self.q, self.k, self.fc1, self.fc2 = layers

    def __call__(self, x):
        norm = swjax.LayerNorm(jnp.ones(64), jnp.zeros(64))
        (q, k), x = swjax.nnx.linears((self.q, self.k), x, prologue=norm, residual=True)
        return swjax.nnx.mlp(self.fc1, self.fc2, x + q * k)


def test_fused_layers_are_measured_one_by_one():
    model = Fused()
    found = measured(loss, model, X)
    assert {name.split("/")[2] for name in found} == {"q", "k", "fc1", "fc2"}
    assert all(np.isfinite(value) for value in found.values())
    centred = X - X.mean(1, keepdims=True)
    normalised = centred / np.sqrt(X.var(1, keepdims=True) + 1e-6)
    for name, value in by_hand(normalised, (1,)).items():
        np.testing.assert_allclose(found[f"quantization/{name}/k/x"], value, rtol=1e-2)


class Residual(nnx.Module):
    """Layers that add the residual stream."""

    def __init__(self, dtype):
        layer = partial(swjax.nnx.Linear, dtype=dtype)
        self.out = layer(64, 64, rngs=nnx.Rngs(0))
        self.fc1, self.fc2 = layer(64, 128, rngs=nnx.Rngs(1)), layer(128, 64, rngs=nnx.Rngs(2))

    def __call__(self, x):
        x = self.out(x, addend=x)
        return swjax.nnx.mlp(self.fc1, self.fc2, x, add_input=True)


@pytest.mark.parametrize("dtype", thinning.first(["bfloat16", "float16", None]))
@pytest.mark.release
def test_outputs_of_layers_with_an_addend_stay_the_same(dtype):
    """Sums outside of the layers would be rounded twice, and have the dtype of the residual stream."""
    model = Residual(dtype and jnp.dtype(dtype))
    want = model(X)
    for which in ({}, {"features": "out|fc2"}):
        got = taps.insert(nnx.clone(model), **which)(X)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_an_mlp_and_its_inputs_stay_the_same():
    """The layers compute in bfloat16, and add and return the inputs in it."""
    layer = partial(swjax.nnx.Linear, dtype=jnp.bfloat16)
    layers = nnx.List([layer(64, 128, rngs=nnx.Rngs(0)), layer(128, 64, rngs=nnx.Rngs(1))])
    tapped = taps.insert(nnx.clone(layers))
    got, want = (
        swjax.nnx.mlp(*each, 100 * X, add_input=True, residual=True) for each in (tapped, layers)
    )
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_layers_that_share_inputs_return_the_same_inputs():
    """The layers compute in bfloat16, together and one by one, and return the inputs in it."""
    layer = partial(swjax.nnx.Linear, 64, 64, dtype=jnp.bfloat16)
    layers = nnx.List([layer(rngs=nnx.Rngs(i)) for i in range(2)])
    tapped = taps.insert(nnx.clone(layers))
    (_, got), (_, want) = (swjax.nnx.linears(each, X, residual=True) for each in (tapped, layers))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.release
def test_an_addend_of_another_sharding():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    layer = taps.insert(swjax.nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        addend = jax.device_put(X, jax.NamedSharding(mesh, P(None, "data")))
        np.testing.assert_array_equal(layer(x, addend=addend), layer(x, addend=x))


def test_health_of_a_layer_does_not_depend_on_its_addend():
    layer, direction = swjax.nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.cos(X)

    def linear_loss(layer, x, addend):
        return jnp.mean(layer(x, addend=addend) * direction)

    alone, added = (measured(linear_loss, layer, X, addend) for addend in (None, 100 * X))
    assert alone == added


def test_weight_gradients_are_not_computed():
    model = two_layers()
    products = matrix_products(lambda x: diagnostics.measure(loss, model, x), X)
    assert sum(products.values()) == 3  # two outputs, one input gradient


def test_layers_used_twice_are_averaged():
    layer = swjax.nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    once, twice = (
        diagnostics.measure(
            lambda m, x, n=n: sum(loss(m, x) for _ in range(n)), layer, X, features=""
        )
        for n in (1, 2)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), once, twice)


def test_mistakes_are_said_in_one_line():
    with pytest.raises(ValueError, match="matches no linear layer"):
        diagnostics.measure(loss, two_layers(), X, quantization="layers/2")
    model = Pair()
    with pytest.raises(ValueError, match="^features can be measured .* got tuple of Pair: .*"):
        diagnostics.measure(lambda m, x: m(x)[0].sum(), model, X, quantization=None, features="")


@pytest.mark.parametrize(
    "model",
    [nnx.Linear(64, 8, rngs=nnx.Rngs(0)), two_layers("standard")],
    ids=["plain", "standard"],
)
def test_a_model_without_quantized_layers_is_refused(model):
    message = "^the model must have a layer with a quantized product, .*nnx.quantize_model .*=None .*only$"
    with pytest.raises(ValueError, match=message):
        diagnostics.measure(loss, model, X)
    assert len(diagnostics.measure(loss, model, X, quantization=None, features=".*")) >= 2


def test_what_is_not_an_nnx_model_is_refused():
    with pytest.raises(TypeError, match="^model must be an NNX model, got the Linen .* Dense: "):
        diagnostics.measure(loss, linen.Dense(3), X)
    for model in (None, X, loss):  # the last: swapped arguments
        with pytest.raises(TypeError, match="^model must be an NNX model, .* call measure.loss_fn"):
            diagnostics.measure(two_layers(), model, X)


def test_features_are_those_of_modules_that_can_be_called():
    model = two_layers()  # its `layers` are an nnx.List
    found = diagnostics.measure(loss, model, X, quantization=None, features=".*")
    assert {name.partition("_abs")[2] for name in found} == {"", "/layers/0", "/layers/2"}
    for features in ("nothing", "layers"):
        message = f"^pattern '{features}' matches no module .* 'layers/0', 'layers/2', ''$"
        with pytest.raises(ValueError, match=message):
            diagnostics.measure(loss, model, X, features=features)
    with pytest.raises(ValueError, match=r"^pattern '\(' is not a regular expression: "):
        diagnostics.measure(loss, model, X, features="(")
    message = "^pattern '.' matches no module that can be called: the model has none$"
    with pytest.raises(ValueError, match=message):
        taps.insert(nnx.Dict(a=nnx.Param(X)), quantization=None, features=".")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln = nnx.LayerNorm(64, rngs=rngs)
        self.fc = swjax.nnx.Linear(64, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.0, deterministic=True)

    def __call__(self, x):
        return x + self.drop(self.fc(self.ln(x)))


class Tower(nnx.Module):
    """Three scanned blocks and a LayerNorm that is not stacked."""

    def __init__(self):
        self.b = nnx.split_rngs(splits=3)(nnx.vmap(Block))(nnx.Rngs(0))
        self.ln = nnx.LayerNorm(64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.ln(
            nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.b
            )
        )


def test_modules_of_a_stack_have_a_value_for_each_layer():
    found = measured(loss, Tower(), X, quantization=None, features=".*")
    shapes = {name.partition("_abs")[2]: value.shape for name, value in found.items()}
    assert shapes == dict.fromkeys(["/b", "/b/ln", "/b/fc", "/b/drop"], (3,)) | {"": (), "/ln": ()}
    with pytest.raises(ValueError, match="^features of .* must be .* Stack with .* [(]3, 3[)]: "):
        diagnostics.measure(loss, Stack(True), X, features="")


class Pair(nnx.Module):
    def __call__(self, x):
        return x, x


@pytest.mark.parametrize("clip_norm", thinning.first([0.1, 0.0]))
def test_adamw_has_the_rms_of_stable_adamw(clip_norm):
    """AdamW's RMS equals that of `stable_adamw` without update clipping, also with gradient clipping."""
    params = {"w": jnp.ones((4, 5)), "blocks": jnp.ones((3, 7))}
    axes = {"w": None, "blocks": 0}
    first = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    with jax.numpy_dtype_promotion("standard"):
        adamw = optax.chain(first, optax.adamw(1e-3, b2=0.99, eps=1e-6))
        stable = optax.chain(
            first, stable_adamw(1e-3, b2=0.99, clip_threshold=jnp.inf, block_axes=axes)
        )
        updates = [jax.jit(optimizer.update) for optimizer in (adamw, stable)]
        states = adamw.init(params), stable.init(params)
        for step in range(8):
            grads = jax.tree.map(lambda p, s=step: (10.0**s) * jnp.cos(p + p.size), params)
            states = tuple(update(grads, s, params)[1] for update, s in zip(updates, states))
            given, _ = first.update(grads, first.init(params))
            found = adamw_rms_by_path(states[0], given, b2=0.99, eps=1e-6, block_axes=axes)
            expected = rms_by_path(states[1])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    assert found["blocks"].shape == (3,) and (clip_norm or found["w"] > 2.3)


@pytest.mark.parametrize("x64", [False, True])
def test_adamw_rms_with_traced_hyperparameters(x64):
    """Under strict dtype promotion, also where JAX's default float is float64."""
    params = {"w": jnp.full(3, 2.0, jnp.float32)}
    adamw = optax.adamw(1e-3, b2=0.99)
    with jax.numpy_dtype_promotion("standard"):
        _, state = adamw.update(params, adamw.init(params), params)
    with jax.enable_x64(x64):
        read = jax.jit(lambda b2, eps: adamw_rms_by_path(state, params, b2=b2, eps=eps))
        np.testing.assert_allclose(read(0.99, 1e-8)["w"], 1, rtol=1e-5)
        np.testing.assert_allclose(read(0.99, 4.0)["w"], 0.5, rtol=1e-5)


def test_adamw_of_an_nnx_optimizer():
    model = two_layers()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    with jax.numpy_dtype_promotion("standard"):

        @nnx.jit
        def step(model, optimizer, x):
            grads = nnx.grad(loss)(model, x)
            optimizer.update(model, grads)
            return diagnostics.adamw_rms(optimizer.opt_state, grads)

        found = step(model, optimizer, X)
    assert set(found) == {
        f"stability/rms/layers/{i}/{n}" for i in (0, 2) for n in ("kernel", "bias")
    }
    np.testing.assert_allclose(list(found.values()), 1, rtol=1e-5)


def test_adamw_rms_of_a_part_of_the_parameters():
    """As of fine-tuning, where `optax.partition` freezes the others: it was refused."""
    params = {"w": jnp.ones(3), "b": jnp.full(2, 2.0), "frozen": jnp.ones(1)}
    labels, adamw = {"w": "w", "b": "b", "frozen": "no"}, optax.adamw(1e-3)
    for optimizer in (
        optax.partition({"w": adamw, "b": adamw, "no": optax.set_to_zero()}, labels),
        optax.masked(adamw, {"w": True, "b": True, "frozen": False}),
    ):
        with jax.numpy_dtype_promotion("standard"):
            _, state = optimizer.update(params, optimizer.init(params), params)
        found = adamw_rms_by_path(state, params)
        assert found.keys() == {"w", "b"}
        np.testing.assert_allclose(list(found.values()), 1, rtol=1e-5)
    two = [adamw.init({"w": jnp.ones(3)})] * 2
    for state, match in (
        (adamw.init(params), "for 'b', whose gradient has the shape None: "),
        (two, "for 'w', whose gradient has the shape .3,. and another moment: "),
        (optax.sgd(1.0).init(params), "must contain an optax.ScaleByAdamState, got none"),
    ):
        with pytest.raises(ValueError, match=match):
            adamw_rms_by_path(state, {"w": jnp.ones(3)})
