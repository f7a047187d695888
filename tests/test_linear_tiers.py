"""The three tiers of a layer, each tested alone: recipe (products), sharding (sharded), arithmetic."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numeric import snr_db

import swjax
from swjax import Layout
from swjax.kernels.reference import QTensor
from swjax.linear import products
from swjax.linear.arithmetic import Arithmetic
from swjax.linear.layouts import Spec
from swjax.linear.planning import plan_layer
from swjax.linear.plans import Plan
from swjax.linear.products import Forms, Settings
from swjax.linear.sharded import Operand, Sharded
from swjax.recipes import RECIPES


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W, G = draw(4, 6, 16), draw(16, 8, seed=1), draw(4, 6, 8, seed=2)

# --- arithmetic ---------------------------------------------------------------------------------------


def test_arithmetic_of_arrays():
    arithmetic = Arithmetic("xla")
    y = arithmetic.product(X, W, jnp.ones(8), axes=(-1, 0), out_dtype="float32")
    np.testing.assert_allclose(y, X @ W + 1, rtol=1e-5, atol=1e-5)
    dx = arithmetic.product(G, W, axes=(-1, 1), out_dtype="float32")
    np.testing.assert_allclose(dx, G @ W.T, rtol=1e-5, atol=1e-5)
    (dw,) = arithmetic.weight_gradients(X, (G,), axes=[(0, 0)], out_dtype="bfloat16")
    assert dw.dtype == jnp.bfloat16
    assert snr_db(dw, jnp.einsum("bti,btj->ij", X, G)) > 45


@pytest.mark.parametrize("transpose", [True, False])
def test_arithmetic_of_quantized_arrays(transpose):
    """Both layouts of w, contracted over its first or last axis, give the same bits."""
    x, w = swjax.quantize(X), swjax.quantize(W, (0, 1))
    want = swjax.dequantize(x) @ swjax.dequantize(w)
    w, axis = (w.T, 1) if transpose else (w, 0)
    y = Arithmetic("xla").product(x, w, axes=(-1, axis), out_dtype="float32")
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


def test_arithmetic_passes_its_implementation_on():
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        Arithmetic("triton").run("quantize", W, axes=(0,), dtype="int8")
    assert Arithmetic("xla").reads_last_axis is False


# --- sharding -----------------------------------------------------------------------------------------

ALONE = Sharded(Plan(None, ((), ())), Arithmetic("xla"))
SPECS = {"replicated": P(), "rows": P("data"), "columns": P(None, "data")}


def sharded(w_spec):
    """Returns (the steps of a layer on two devices, operands x, w and g), for use in `jax.set_mesh`."""
    plan = plan_layer(X, W, Layout(w_spec, P("data")))
    assert plan.mesh is not None
    operands = Operand(X, plan.x, -1), Operand(W, plan.w, 0), Operand(G, plan.y, -1)
    return Sharded(plan, Arithmetic("xla")), *operands


def mesh():
    return jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_sharded_products_are_those_of_one_device(spec):
    with mesh():
        steps, x, w, g = sharded(spec)
        y = jax.jit(lambda: steps.output(x, w, None, out_dtype="float32"))()
        dx = jax.jit(
            lambda: steps.input_gradient(g, w._replace(axis=1), out_dtype="float32", summed=True)
        )()
        rows = x._replace(axis=0), g._replace(axis=0)
        dw = jax.jit(lambda: steps.weight_gradient(*rows, out_dtype="float32"))()
    np.testing.assert_allclose(y, X @ W, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, G @ W.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, jnp.einsum("bti,btj->ij", X, G), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("quantizer", [RECIPES["switchback"].fwd.rhs, RECIPES["llm_int8"].fwd.rhs])
@pytest.mark.parametrize("transpose", [True, False])
def test_sharded_scales_are_those_of_one_device(spec, quantizer, transpose):
    want = ALONE.quantize(quantizer, W, Spec(((), ())), 0, transpose=transpose)
    with mesh():
        steps, _, w, _ = sharded(spec)
        got = jax.jit(lambda: steps.quantize(quantizer, W, w.spec, 0, transpose=transpose))()
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_partial_sums_add_up():
    """With tensor-parallel columns, each device has partial sums, which are all-reduced once."""
    with mesh():
        plan = plan_layer(X, W, Layout(P(None, "data"), P()))
        steps = Sharded(plan, Arithmetic("xla"))
        g, w = Operand(G, plan.y, -1), Operand(W, plan.w, 1)
        partial = lambda: steps.input_gradient(g, w, out_dtype="float32", summed=False)
        parts = jax.jit(partial)()
        total = jax.jit(lambda: steps.sum_partial((partial(), partial())))()
    assert parts.shape == (2, *X.shape)
    np.testing.assert_allclose(jnp.sum(parts, 0), G @ W.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, 2 * G @ W.T, rtol=1e-5, atol=1e-5)


# --- recipes ------------------------------------------------------------------------------------------


class Recorder(NamedTuple):
    """Computes on one device, and records the operands of every product."""

    seen: list
    plan: Plan = ALONE.plan
    arithmetic: Arithmetic = ALONE.arithmetic

    def __getattr__(self, name):
        if name not in ("output", "input_gradient", "weight_gradient"):
            return getattr(ALONE, name)

        def product(a, b, *rest, **options):
            blocks = " in blocks" if options.get("blocks") else ""
            self.seen.append((name, _kind(a.value), _kind(b.value) + blocks))
            return getattr(ALONE, name)(a, b, *rest, **options)

        return product


def _kind(value):
    """Returns the dtype, and for a QTensor the number of scales: "float32", "int8 x24"."""
    if isinstance(value, QTensor):
        return f"{value.values.dtype} x{value.scale.size}"
    return value.dtype.name


EXACT = ("float32", "float32")
ROWS, ONE, E4M3, E5M2 = "int8 x24", "int8 x1", "float8_e4m3fn", "float8_e5m2"
# {recipe: operands of output, input_gradient and weight_gradient}; x and g have 24 tokens, w is [16, 8].
OPERANDS = {
    "standard": ([EXACT], [EXACT], [EXACT]),
    "switchback": ([(ROWS, ONE)], [(ROWS, ONE)], [EXACT]),
    "switchback_m": ([(ROWS, ONE)], [(ROWS, ONE)], [EXACT]),
    "switchback_q": ([(ROWS, "int8 x8")], [(ROWS, "int8 x16")], [EXACT]),
    "llm_int8": (
        [(ROWS, "int8 x8")],
        [(ROWS, "int8 x16")],
        [("int8 x16", "int8 x8")],
    ),
    "llm_int8_outlier6": (
        [(ROWS, "int8 x8"), EXACT],
        [(ROWS, "int8 x16")],
        [("int8 x16", "int8 x8"), EXACT],
    ),
    "switchback_hadamard": ([(ROWS, ONE)], [(ROWS, ONE)], [("float32", "float32 in blocks")]),
    "fp8_switchback": (
        [(f"{E4M3} x24", f"{E4M3} x1")],
        [(f"{E5M2} x24", f"{E4M3} x1")],
        [EXACT],
    ),
    "fp8_tensorwise": (
        [(f"{E4M3} x1", f"{E4M3} x1")],
        [(f"{E5M2} x1", f"{E4M3} x1")],
        [(f"{E4M3} x1", f"{E5M2} x1")],
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_is_quantized_how(recipe):
    recorder = Recorder([])
    settings = Settings(RECIPES[recipe], "float32", "float32", recorder)
    w = products.weight_forms(W, settings)
    products.output(Forms(X), w, None, settings)
    products.input_gradient(Forms(G), w, settings)
    products.weight_gradient(Forms(X), Forms(G), settings, out_dtype="float32")
    for name, want in zip(("output", "input_gradient", "weight_gradient"), OPERANDS[recipe]):
        assert [kinds for product, *kinds in recorder.seen if product == name] == list(
            map(list, want)
        )


def test_a_quantized_form_that_fits_is_not_quantized_again():
    recorder = Recorder([])
    settings = Settings(RECIPES["switchback"], "float32", "float32", recorder)
    q = swjax.quantize_weight(W)
    y = products.output(Forms(quantized=swjax.quantize(X)), Forms(transposed=q), None, settings)
    assert recorder.seen == [("output", ROWS, ONE)]
    np.testing.assert_array_equal(y, swjax.switchback(X, W))


def test_fp8_is_saved_as_bytes():
    q = swjax.quantize(W, dtype="float8_e4m3fn").values
    assert products.to_bytes(q).dtype == jnp.uint8
    np.testing.assert_array_equal(
        products.from_bytes(products.to_bytes(q), q.dtype).astype(jnp.float32),
        q.astype(jnp.float32),
    )
    assert products.to_bytes(W) is W
