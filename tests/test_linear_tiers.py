"""The steps of a layer, each tested alone: quantizers, products, and what a recipe makes them read."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import swjax
from swjax import Layout
from swjax.kernels import reference
from swjax.kernels.reference import QTensor
from swjax.linear import products, rules
from swjax.linear.layer import Layer, Operand, from_bytes, quantize_sharded, to_bytes
from swjax.linear.layouts import Spec
from swjax.linear.sharding import Sharding, sharding_of_layer
from swjax.recipes import RECIPES, Recipe


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W, G = draw(4, 6, 16), draw(16, 8, seed=1), draw(4, 6, 8, seed=2)

ALONE = Layer(
    Recipe(), Sharding(None, ((), ())), "float32", "float32", "float32", implementation="xla"
)
NONE = (None,)

# --- products -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transpose", [True, False])
def test_both_layouts_of_a_quantized_weight_have_the_same_product(transpose):
    """The product sums over the first or the last axis of w."""
    x, w = swjax.quantize(X), swjax.quantize(W, (0, 1))
    want = swjax.dequantize(x) @ swjax.dequantize(w)
    known = Operand(transposed=w.T) if transpose else Operand(quantized=w)
    layer = replace(ALONE, recipe=RECIPES["switchback"])
    y = products.output(Operand(X, x), known, None, None, layer)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


def test_steps_pass_their_implementation_on():
    layer = replace(ALONE, implementation="triton")
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        quantize_sharded(RECIPES["switchback"].fwd.rhs, W, Spec(((), ())), 0, layer)
    assert ALONE.reads_last_axis is False


SPECS = {"replicated": P(), "rows": P("data"), "columns": P(None, "data")}


def sharded(w_spec, *tokens):
    """Returns a layer on two devices, for use in `jax.set_mesh`."""
    sharding = sharding_of_layer(X, W, Layout(w_spec, P(*tokens)))
    assert sharding.mesh is not None
    return replace(ALONE, sharding=sharding)


def mesh():
    return jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_sharded_products_are_those_of_one_device(spec):
    with mesh():
        layers = (sharded(spec, "data"),)

        @jax.jit
        def run():
            x, w, g = Operand(X), (Operand(W),), (Operand(G),)
            y = products.output(x, *w, jnp.ones(8), None, *layers)
            dx = products.input_gradients(g, w, layers)
            return y, *dx, *products.weight_gradients(x, g, layers)

        y, dx, dw = run()
    np.testing.assert_allclose(y, X @ W + 1, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, G @ W.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, jnp.einsum("bti,btj->ij", X, G), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("quantizer", [RECIPES["switchback"].fwd.rhs, RECIPES["llm_int8"].fwd.rhs])
@pytest.mark.parametrize("transpose", [True, False])
def test_sharded_scales_are_those_of_one_device(spec, quantizer, transpose):
    want = quantize_sharded(quantizer, W, Spec(((), ())), 0, ALONE, transpose=transpose)
    with mesh():
        layer = sharded(spec, "data")
        w_spec = layer.sharding.w
        got = jax.jit(
            lambda: quantize_sharded(quantizer, W, w_spec, 0, layer, transpose=transpose)
        )()
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_input_gradients_of_layers_are_all_reduced_once():
    """With tensor-parallel columns, each device adds its partial sums first."""
    with mesh():
        layer = sharded(P(None, "data"))
        run = jax.jit(
            lambda: products.input_gradients(
                (Operand(G), Operand(G)), (Operand(W), Operand(W)), (layer, layer)
            )
        )
        (total,) = run()
        assert run.lower().as_text().count("all_reduce") == 1
    np.testing.assert_allclose(total, 2 * G @ W.T, rtol=1e-5, atol=1e-5)


# --- recipes ------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """Records the operands of every product: {(operation, kind of a, kind of b)}."""
    calls = []

    def record(name, operation, a, b, *rest, **options):
        calls.append((name, _kind(a), _kind(b)))
        return operation(a, b, *rest, **options)

    for name in ("dot", "matmul", "weight_gradient", "block_weight_gradient"):
        monkeypatch.setattr(reference, name, partial(record, name, getattr(reference, name)))
    return calls


def _kind(value):
    """Returns the dtype, and for a QTensor the number of scales: "float32", "int8 x24"."""
    if isinstance(value, QTensor):
        return f"{value.values.dtype} x{value.scale.size}"
    return value.dtype.name


def exact(name):
    return [(name, "float32", "float32")]


def int8(rows, columns, name="matmul", dtypes=("int8", "int8")):
    return [(name, f"{dtypes[0]} x{rows}", f"{dtypes[1]} x{columns}")]


DOT, XTG = exact("dot"), exact("weight_gradient")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# {recipe: products of the output, dx and dw}; x and g have 24 tokens, w is [16, 8].
OPERANDS = {
    "standard": (DOT, DOT, XTG),
    "switchback": (int8(24, 1), int8(24, 1), XTG),
    "switchback_m": (int8(24, 1), int8(24, 1), XTG),
    "switchback_q": (int8(24, 8), int8(24, 16), XTG),
    "llm_int8": (int8(24, 8), int8(24, 16), int8(16, 8)),
    "llm_int8_outlier6": (int8(24, 8) + DOT, int8(24, 16), int8(16, 8) + XTG),
    "switchback_hadamard": (int8(24, 1), int8(24, 1), exact("block_weight_gradient")),
    "int8_hadamard": (int8(24, 1), int8(24, 1), exact("block_weight_gradient")),
    "fp8_switchback": (int8(24, 1, dtypes=(E4M3, E4M3)), int8(24, 1, dtypes=(E5M2, E4M3)), XTG),
    "fp8_tensorwise": (
        int8(1, 1, dtypes=(E4M3, E4M3)),
        int8(1, 1, dtypes=(E5M2, E4M3)),
        int8(1, 1, dtypes=(E4M3, E5M2)),
    ),
    "fp8_static": (
        int8(1, 1, dtypes=(E4M3, E4M3)),
        int8(1, 1, dtypes=(E5M2, E4M3)),
        int8(1, 1, dtypes=(E4M3, E5M2)),
    ),
    "fp8_hadamard": (
        int8(24, 1, dtypes=(E4M3, E4M3)),
        int8(24, 1, dtypes=(E5M2, E4M3)),
        exact("block_weight_gradient"),
    ),
    # Values that include the scales of blocks.
    "fp8_block128": (int8(1, 1, dtypes=("float32", "float32")),) * 3,
    "fp4_dge": (
        int8(1, 1, dtypes=("float32", "float32")) + DOT,
        int8(1, 1, dtypes=("float32", "float32")),
        int8(1, 1, dtypes=(E4M3, E5M2)),
    ),
    "mxfp8": (int8(1, 1, dtypes=("bfloat16", "bfloat16")),) * 3,
    "nvfp4": (int8(1, 1, dtypes=("bfloat16", "bfloat16")),) * 3,
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_is_quantized_how(recipe, seen):
    layers = (replace(ALONE, recipe=RECIPES[recipe].rotating(*W.shape)),)

    def layer():
        _, _, ws = rules.forward(rules.LayerArrays(X, (W,), NONE, None), NONE, layers)
        y, seen[:] = seen[:], []
        products.input_gradients((Operand(G),), ws, layers)
        dx, seen[:] = seen[:], []
        products.weight_gradients(Operand(X), (Operand(G),), layers)
        dw = [call for call in seen if call != DOT[0]]  # `weight_gradient` calls `dot`
        assert (y, dx, dw) == OPERANDS[recipe]

    jax.eval_shape(layer)


def test_a_quantized_form_that_fits_is_not_quantized_again(seen, monkeypatch):
    want, x, w = swjax.switchback(X, W), swjax.quantize(X), swjax.quantize_weight(W)
    seen.clear()
    monkeypatch.setattr(reference, "quantize", None)
    layer = replace(ALONE, recipe=RECIPES["switchback"])
    y = products.output(Operand(quantized=x), Operand(transposed=w), None, None, layer)
    assert seen == int8(24, 1)
    np.testing.assert_array_equal(y, want)


def test_fp8_is_saved_as_bytes():
    q = swjax.quantize(W, dtype="float8_e4m3fn").values
    assert to_bytes(q).dtype == jnp.uint8
    np.testing.assert_array_equal(
        from_bytes(to_bytes(q), q.dtype).astype(jnp.float32), q.astype(jnp.float32)
    )
    assert to_bytes(W) is W
