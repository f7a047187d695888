"""Kernels for TPUs, in Pallas's interpreter, have the bits of the specification."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import release
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from kernel_cases import normal

import swjax
from swjax.kernels import dispatch, reference, targets
from swjax.kernels.fused_products.reference import Factors
from swjax.kernels.reference import QTensor

M, K, N = 256, 256, 128
X, G, UP, ADDEND = (
    jnp.asarray(normal(shape, "bfloat16", seed))
    for seed, shape in enumerate(((M, K), (M, N), (M, K), (M, N)))
)
GAMMA, BETA, BIAS = (jnp.asarray(normal((n,), seed=n + i)) for i, n in enumerate((K, K, N)))
W = reference.quantize(jnp.asarray(normal((K, N), seed=9)), (0, 1))
FACTORS = Factors(G, W)
NORM = {"epsilon": 1e-6}
ROWS = {
    "quantize": ((X,), {}),
    "layer_norm": ((X, GAMMA, BETA), NORM),
    "rms_norm": ((X, GAMMA), NORM | {"offset": 1.0}),
    "gelu": ((X,), {"approximate": False}),
    "gelu, tanh": ((X,), {"approximate": True}),
    "gated": ((X, UP), {"activation": "silu"}),
    "gated, tanh": ((X, UP), {"activation": "gelu_tanh"}),
}


def interpreted(operation, *arrays, **options):
    with pltpu.force_tpu_interpret_mode():
        run = partial(dispatch.kernel("pallas_tpu", operation), **options)
        return jax.block_until_ready(jax.jit(run)(*arrays))


def assert_same_bits(operation, *arrays, **options):
    """Asserts that the interpreted kernel has the bits of the specification, but for sums over tokens."""
    got = interpreted(operation, *arrays, **options)
    want = jax.jit(partial(getattr(reference, operation), **options))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if a.ndim > 1:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", [release(each) if "," in each else each for each in ROWS])
def test_row_operations(case):
    arrays, options = ROWS[case]
    operation = case.split(",")[0]
    if operation != "quantize":
        options = options | {"quantize_to": "int8"}
    assert_same_bits(operation, *arrays, **options)


def test_sequences_whose_tokens_do_not_fill_tiles():
    assert_same_bits("quantize", X.reshape(64, 4, K))


def test_rows_with_nan_infinity_and_zeros():
    x = X.at[3, 5].set(jnp.nan).at[4, 6].set(-jnp.inf).at[5].set(0).at[6].set(1e-30)
    got, want = interpreted("quantize", x), reference.quantize(x)
    np.testing.assert_array_equal(got.scale, want.scale)
    finite = jnp.isfinite(want.scale[:, 0])
    np.testing.assert_array_equal(got.values[finite], want.values[finite])
    assert not finite[3] and not finite[4] and finite.sum() == M - 2


@pytest.mark.parametrize(
    "case, axis",
    [
        (None, 0),
        (None, -1),
        ("layer_norm", 0),
        release("rms_norm", 0),
        ("gelu", 0),
        release("gated", 0),
    ],
)
def test_products(case, axis):
    arrays, settings = ROWS[case] if case else ((X,), {})
    w = W if axis == 0 else W.T
    options = {"row_operation": case, "settings": tuple(settings.items())}
    terms = BIAS, None if case else ADDEND
    assert_same_bits("fused_product", arrays, w, *terms, **options, axis=axis, out_dtype="bfloat16")


@pytest.mark.parametrize("recompute", [True, release(False)])
@pytest.mark.parametrize("case", ["layer_norm", release("rms_norm"), "gelu", release("gated")])
def test_products_backward(case, recompute):
    arrays, settings = ROWS[case]
    last = {"layer_norm": (UP, BETA if recompute else None), "rms_norm": (UP,)}.get(case, ())
    if case != "layer_norm":
        settings = settings | {"recompute": recompute}
    if case in ("gelu", "gated"):
        settings = settings | {"quantize_to": None}
    given = arrays[:2] if "norm" in case else arrays
    options = {"row_operation": f"{case}_backward", "settings": tuple(settings.items())}
    if case != "gelu":
        assert_same_bits("fused_product_backward", *given, FACTORS, *last, **options)
        return
    # The derivative of the exact GELU is another polynomial: single results round to the next number.
    (dx, _, total, y), (want, _, of_all, wanted) = (
        run("fused_product_backward", *given, FACTORS, **options)
        for run in (interpreted, partial(dispatch.run, implementation="xla"))
    )
    assert jnp.mean(dx != want) < 0.01
    np.testing.assert_allclose(dx.astype(float), want.astype(float), rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(total, of_all, atol=0.05 * float(jnp.abs(of_all).max()))
    if recompute:
        np.testing.assert_allclose(y.astype(float), wanted.astype(float), rtol=2**-7, atol=1e-6)


W1, W2 = (jnp.asarray(normal(shape, seed=7) * 0.05) for shape in ((K, N), (N, K)))
PROLOGUE = swjax.LayerNorm(GAMMA, BETA)


def mlp(x, prologue, w1, b1, w2):
    return swjax.mlp(x, w1, b1, w2, None, prologue=prologue, add_input=True)


def both_ways(function, *arguments):
    y, vjp = jax.vjp(function, *arguments)
    return y, *vjp(jnp.ones_like(y))


@pytest.mark.parametrize(
    "function, arguments, kernels",
    [
        (swjax.switchback, (X, W1, BIAS), ["fused_product"] * 2),
        (mlp, (X, PROLOGUE, W1, BIAS, W2), ["fused_product", "fused_product_backward"] * 2),
    ],
)
def test_layers_choose_them_for_tpus(function, arguments, kernels):
    want = jax.jit(partial(both_ways, function))(*arguments)
    with targets.compiling_for("TPU v6e"), pltpu.force_tpu_interpret_mode():
        with dispatch.record() as calls:
            got = jax.jit(partial(both_ways, function))(*arguments)
        jax.block_until_ready(got)
    ran = [operation for operation, name in calls if name == "pallas_tpu"]
    assert sorted(name for name in ran if name.startswith("fused")) == sorted(kernels)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max())


@pytest.mark.parametrize("chip", ["TPU v4", "TPU v7"])
def test_other_tpus_use_xla(chip):
    with targets.compiling_for(chip):
        assert dispatch.choose("quantize", X) == "xla"


@pytest.mark.parametrize(
    "arrays, options, reason",
    [
        ((X[:100],), {}, "a multiple of 128 rows, got 100"),
        ((X[:, :100],), {}, "a multiple of 128 columns"),
        ((X.reshape(64, 4, K),), {}, None),
        ((X.reshape(4, 16, 4, K),), {}, "a multiple of 8 tokens"),
        ((X.astype("float16"),), {}, "got float16"),
        ((X,), {"dtype": "float8_e4m3fn"}, "rows to int8"),
    ],
)
def test_why_not(arrays, options, reason):
    with targets.compiling_for("TPU v6e"):
        if reason is None:
            assert dispatch.choose("quantize", *arrays, **options) == "pallas_tpu"
            return
        assert dispatch.choose("quantize", *arrays, **options) == "xla"
        with pytest.raises(ValueError, match=f"'pallas_tpu' of 'quantize' .*{reason}.*'xla'"):
            dispatch.choose("quantize", *arrays, **options, implementation="pallas_tpu")


def test_weights_that_do_not_fit_use_xla():
    x, w = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((4096, 14_336), "bfloat16"), ((14_336, 8192), "int8"))
    )
    q = QTensor(w, jax.ShapeDtypeStruct((1, 1), "float32"))
    with targets.compiling_for("TPU v6e"):
        reason = dispatch.why_not(
            "pallas_tpu", "fused_product", (x,), q, row_operation=None, settings=(), axis=0
        )
    assert "MiB of VMEM" in str(reason)


def test_a_sharded_layer_runs_the_kernels_on_each_shard():
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    layout = swjax.Layout(P("fsdp"), P("fsdp"))
    layer = partial(both_ways, partial(swjax.switchback, layout=layout))
    with targets.compiling_for("TPU v6e"), jax.set_mesh(mesh), dispatch.record() as calls:
        jax.eval_shape(layer, X, W1, BIAS)
    assert calls.count(("fused_product", "pallas_tpu")) == 2
