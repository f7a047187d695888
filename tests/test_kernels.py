"""The specification itself: quantizers and products of `swjax.kernels.reference`."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swjax
from swjax.kernels import dispatch, reference

pytestmark = pytest.mark.usefixtures("compiles_as_users_do")


def test_nan_is_not_lost_among_nan():
    """The quantizers keep NaN, although XLA for CPUs drops it from the maximum of a vector of NaN."""
    x = jnp.ones((64, 128)).at[3].set(jnp.nan).at[5, ::2].set(jnp.nan)
    scale = jax.jit(swjax.quantize)(x).scale.ravel()
    assert jnp.flatnonzero(~jnp.isfinite(scale)).tolist() == [3, 5]


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


def vjp_of(function, gradient, *primals):
    y, vjp = jax.vjp(function, *primals)
    return y, vjp(gradient)


def normal(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


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


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match="must be .* triton, mosaic_gpu, pallas_tpu .*got 'cuda'"):
        dispatch.choose("quantize", jnp.ones((2, 2)), implementation="cuda")
