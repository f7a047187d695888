"""The specification itself: quantizers and products of `swjax.kernels.reference`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import swjax
from swjax.kernels import dispatch, reference

SMALLEST_SCALE = 2.0**-92


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axes", [(-1,), (0,), (0, 1), (1, 2), (0, 1, 2)])
def test_int8_is_the_nearest_integer(dtype, axes):
    x = (
        np.random.default_rng(0)
        .standard_normal((5, 7, 33))
        .astype(ml_dtypes.bfloat16)
        .astype(dtype)
    )
    q = swjax.quantize(jnp.asarray(x), axes, "int8")
    absmax = np.max(np.abs(x.astype(np.float32)), axis=axes, keepdims=True)
    assert (
        q.values.dtype == jnp.int8
        and q.scale.dtype == jnp.float32
        and q.scale.shape == absmax.shape
    )
    exact = x.astype(np.float64) * 127 / absmax
    assert np.max(np.abs(np.asarray(q.values, np.float64) - exact)) <= 0.5 + 1e-4
    assert np.max(np.abs(q.values)) == 127
    np.testing.assert_allclose(q.scale, absmax / 127, rtol=1e-6)
    error = np.abs(np.asarray(swjax.dequantize(q)) - x.astype(np.float32))
    assert (error <= np.asarray(q.scale) * 0.5001).all()


def test_ties_round_to_even():
    x = jnp.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert swjax.quantize(x).values.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38, 1e-31])
def test_tiny_vectors_quantize_to_zero_with_a_positive_scale(dtype, tiny):
    q = swjax.quantize(jnp.full((2, 4), tiny, jnp.float32), (-1,), dtype)
    assert (q.scale > 0).all() and jnp.isfinite(q.scale).all()
    assert (jnp.abs(swjax.dequantize(q) - tiny) <= SMALLEST_SCALE).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("large", [1e4, 3e38])
def test_large_values_do_not_overflow(dtype, large):
    x = jnp.array([[large, -large, large / 2, 0.0]], jnp.float32)
    np.testing.assert_allclose(swjax.dequantize(swjax.quantize(x, (-1,), dtype)), x, rtol=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_makes_its_scale_non_finite(bad):
    q = swjax.quantize(jnp.array([[1.0, bad], [1.0, 2.0]]))
    assert jnp.isfinite(q.scale).ravel().tolist() == [False, True]


def test_fp8_values_are_those_of_ml_dtypes():
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    for dtype, largest in {"float8_e4m3fn": 448, "float8_e5m2": 57344}.items():
        q = swjax.quantize(jnp.asarray(x), (-1,), dtype)
        scaled = x * (np.float32(largest) / np.max(np.abs(x), -1, keepdims=True))
        np.testing.assert_array_equal(np.asarray(q.values), scaled.astype(dtype))


def test_int8_sums_are_exact():
    """Sums far beyond 2**24 and 16 bits: the accumulator is int32, not a float."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(100, 128, (700, 700)).astype(np.int8) for _ in range(2))
    one = np.ones((1, 1), np.float32)
    got = reference.matmul(
        reference.QTensor(a, one), reference.QTensor(b, one), out_dtype="float32"
    )
    want = a.astype(np.int64) @ b.T.astype(np.int64)
    assert want.max() > 2**23
    np.testing.assert_array_equal(got, want.astype(np.float32))


def test_bias_and_scales_act_in_fp32_before_the_output_dtype():
    a = reference.QTensor(jnp.array([[100]], jnp.int8), jnp.array([[1 / 3]], jnp.float32))
    b = reference.QTensor(jnp.array([[100]], jnp.int8), jnp.array([[3.0]], jnp.float32))
    bias = jnp.array([-9999.0], jnp.float32)  # 10000 and 9999 are both 9984 in bf16
    assert float(reference.matmul(a, b, bias, out_dtype="bfloat16")[0, 0]) == 1.0


@pytest.mark.parametrize("dtype", reference.LARGEST)
def test_quantization_is_the_same_jitted_and_not(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 257)), jnp.float32)
    jitted = jax.jit(swjax.quantize, static_argnums=(1, 2))
    jax.tree.map(
        np.testing.assert_array_equal, swjax.quantize(x, (-1,), dtype), jitted(x, (-1,), dtype)
    )


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match=r"must be one of xla, triton, mosaic_gpu .*got 'cuda'"):
        dispatch.choose("quantize", jnp.ones((2, 2)), implementation="cuda")


def test_kernels_answer_to_one_name_only():
    """A top-level `kernels` would be a second copy of every module, and another project's name."""
    run = subprocess.run([sys.executable, "-c", "import kernels"], capture_output=True, text=True)
    assert "must be imported as 'swjax.kernels'" in run.stderr or "No module named" in run.stderr
    assert run.returncode == 1
