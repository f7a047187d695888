"""The specification itself: quantizers and products of `swjax.kernels.reference`."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import thinning

import swjax
from swjax.kernels import dispatch, reference

pytestmark = pytest.mark.usefixtures("compiles_as_users_do")

SMALLEST_ABSMAX = 2.0**-92


@pytest.mark.parametrize(
    "axes, dtype",
    thinning.thinned(
        [(-1,), (0,), (0, 1), (1, 2), (0, 1, 2)], ["float32", "bfloat16", "float16"], full=[]
    ),
)
def test_int8_is_the_nearest_integer(axes, dtype):
    x = (
        np.random.default_rng(0)
        .standard_normal((5, 7, 33))
        .astype(ml_dtypes.bfloat16)
        .astype(dtype)
    )
    q = jax.jit(lambda x: swjax.quantize(x, axes, "int8"))(x)
    absmax = np.max(np.abs(x.astype(np.float32)), axis=axes, keepdims=True)
    assert (
        q.values.dtype == jnp.int8
        and q.scale.dtype == jnp.float32
        and q.scale.shape == absmax.shape
    )
    exact = x.astype(np.float64) * 127 / absmax
    assert np.max(np.abs(np.asarray(q.values, np.float64) - exact)) <= 0.5 + 1e-4
    assert np.max(np.abs(np.asarray(q.values))) == 127
    np.testing.assert_allclose(q.scale, absmax / 127, rtol=1e-6)
    error = np.abs(np.asarray(jax.jit(swjax.dequantize)(q)) - x.astype(np.float32))
    assert (error <= np.asarray(q.scale) * 0.5001).all()


def test_ties_round_to_even():
    x = jnp.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert swjax.quantize(x).values.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38, 1e-31])
def test_tiny_vectors_quantize_to_zero_with_a_positive_scale(dtype, tiny):
    q = swjax.quantize(jnp.full((2, 4), tiny, jnp.float32), (-1,), dtype)
    assert (q.scale > 0).all() and jnp.isfinite(q.scale).all()
    assert (jnp.abs(swjax.dequantize(q) - tiny) <= SMALLEST_ABSMAX).all()


@pytest.mark.parametrize("size", [1e-27, SMALLEST_ABSMAX, 1e-29, 1e-30, 1e-31, 1e-36])
def test_int8_errors_of_tiny_vectors_are_as_documented(size):
    """Relative to the largest element down to 2**-92, and absolute below."""
    x = np.float32(size) * np.linspace(-1, 1, 101, dtype=np.float32)
    error = np.abs(np.asarray(swjax.dequantize(swjax.quantize(x[None])))[0] - x)
    assert error.max() <= max(size, SMALLEST_ABSMAX) / 254 * (1 + 1e-5)
    assert SMALLEST_ABSMAX / 254 < 8e-31


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("large", [1e4, 3e38])
def test_large_values_do_not_overflow(dtype, large):
    x = jnp.array([[large, -large, large / 2, 0.0]], jnp.float32)
    np.testing.assert_allclose(swjax.dequantize(swjax.quantize(x, (-1,), dtype)), x, rtol=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_makes_its_scale_non_finite(bad):
    q = swjax.quantize(jnp.array([[1.0, bad], [1.0, 2.0]]))
    assert jnp.isfinite(q.scale).ravel().tolist() == [False, True]


def test_nan_is_not_lost_among_nan():
    """The quantizers keep NaN, although XLA for CPUs drops it from the maximum of a vector of NaN."""
    x = jnp.ones((64, 128)).at[3].set(jnp.nan).at[5, ::2].set(jnp.nan)
    scale = jax.jit(swjax.quantize)(x).scale.ravel()
    assert jnp.flatnonzero(~jnp.isfinite(scale)).tolist() == [3, 5]


def test_fp8_values_are_those_of_ml_dtypes():
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    for dtype, largest in {"float8_e4m3fn": 448, "float8_e5m2": 57344}.items():
        q = swjax.quantize(jnp.asarray(x), (-1,), dtype)
        scaled = x * (np.float32(largest) / np.max(np.abs(x), -1, keepdims=True))
        np.testing.assert_array_equal(np.asarray(q.values), scaled.astype(dtype))


def test_int8_sums_are_exact():
    """Sums far above 2**24 are exact, so the accumulator is int32."""
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


@pytest.mark.parametrize("numerator", reference.LARGEST.values())
def test_division_is_correctly_rounded(numerator):
    """Division is correctly rounded for absolute maxima of every magnitude."""
    rng = np.random.default_rng(0)
    y = np.exp2(rng.uniform(np.log2(reference.SMALLEST_ABSMAX), 127.9, 100_000)).astype(np.float32)
    largest = np.finfo(np.float32).max
    y = np.concatenate([y, np.float32([reference.SMALLEST_ABSMAX, 1, 127, 2.0**90, largest])])
    for divide in (reference.divide, jax.jit(reference.divide)):
        np.testing.assert_array_equal(divide(numerator, y), np.float32(numerator) / y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantize_and_sum_is_both(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 40, 33)), dtype)
    q, total = reference.quantize_and_sum(x)
    jax.tree.map(np.testing.assert_array_equal, q, reference.quantize(x))
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(
        total, np.sum(np.asarray(x, np.float64), (0, 1)), rtol=1e-5, atol=1e-5
    )


def vjp_of(function, gradient, *primals):
    y, vjp = jax.vjp(function, *primals)
    return y, vjp(gradient)


def normal(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("shape", [(2, 3, 64), (7,)])
def test_layer_norm_is_that_of_flax(shape):
    x, gamma, beta, gradient = normal(shape, shape[-1:], shape[-1:], shape)
    layer = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)

    def flax(x, gamma, beta):
        return layer.apply({"params": {"scale": gamma, "bias": beta}}, x)

    want = vjp_of(flax, gradient, x, gamma, beta)
    y, none = jax.jit(partial(reference.layer_norm, epsilon=1e-5))(x, gamma, beta)
    backward = jax.jit(partial(reference.layer_norm_backward, epsilon=1e-5))
    *gradients, no_y = backward(x, gamma, gradient)
    got = y, tuple(gradients)
    assert none is None and no_y is None
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_has_the_bits_of_flax(dtype):
    x, gamma, gradient = normal((2, 5, 33), (33,), (2, 5, 33))
    x = x.astype(dtype)
    layer = nn.RMSNorm(epsilon=1e-5, dtype=dtype)

    @jax.numpy_dtype_promotion("standard")
    def flax(x, gamma):
        return layer.apply({"params": {"scale": gamma}}, x)

    _, gradients = vjp_of(flax, gradient.astype(dtype), x, gamma)
    for gamma_, offset in ((gamma, 0.0), (gamma - 1, 1.0)):
        if offset == 0:
            y, _ = jax.jit(partial(reference.rms_norm, epsilon=1e-5))(x, gamma)
            np.testing.assert_array_equal(y, jax.jit(flax)(x, gamma))
        backward = jax.jit(partial(reference.rms_norm_backward, epsilon=1e-5, offset=offset))
        *got, _ = backward(x, gamma_, gradient.astype(dtype))
        rtol = 1e-2 if dtype == "bfloat16" else 1e-4
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=rtol, atol=rtol),
            *(tuple(t.astype("float32") for t in of) for of in (got, gradients)),
        )


@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_is_that_of_jax(approximate):
    gradient, noise = normal((4, 1000), (4, 1000))
    x = jnp.linspace(-12, 12, 4000).reshape(4, 1000) + noise
    want, (want_dx,) = vjp_of(partial(jax.nn.gelu, approximate=approximate), gradient, x)
    y, _ = reference.gelu(x, approximate=approximate)
    dx, none, total, no_y = reference.gelu_backward(x, gradient, approximate=approximate)
    assert none is None and no_y is None
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
    close(y, want)
    close(dx, want_dx)
    close(total, np.sum(np.asarray(dx, np.float64), 0))


@pytest.mark.parametrize("high_precision", [True, False])
@pytest.mark.parametrize("target", reference.LARGEST)
def test_fused_quantizers_quantize_the_rounded_result(high_precision, target):
    x, gamma, beta = (t.astype(jnp.bfloat16) for t in normal((6, 64), (64,), (64,)))
    layer_norm = partial(reference.layer_norm, x, gamma, beta, epsilon=1e-6)
    rms_norm = partial(reference.rms_norm, x, gamma, epsilon=1e-6)
    for operation in (
        layer_norm,
        rms_norm,
        partial(reference.gelu, x),
        partial(reference.gated, x, x),
    ):
        y, q = operation(quantize_to=target, high_precision=high_precision)
        full, _ = operation()
        assert full.dtype == jnp.bfloat16
        jax.tree.map(np.testing.assert_array_equal, q, reference.quantize(full, (-1,), target))
        assert (y is None) == (not high_precision)
    dx, q, *_ = reference.gelu_backward(x, x, quantize_to=target)
    jax.tree.map(np.testing.assert_array_equal, q, reference.quantize(dx, (-1,), target))


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match="must be .* triton, mosaic_gpu, pallas_tpu .*got 'cuda'"):
        dispatch.choose("quantize", jnp.ones((2, 2)), implementation="cuda")
