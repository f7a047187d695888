"""What every kernel computes, in jax.numpy: the specification, and the XLA path on every platform.

A quantized array is a ``QTensor``: narrow ``values`` and an fp32 ``scale`` with ``x ~ values * scale``.
Scales are found over an operand's *contracted* axes, or over the whole tensor, so that they factor out
of the product: ``(a . b)[i, j] = scale_a[i] * scale_b[j] * sum_k a.values[i, k] * b.values[k, j]``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# An absolute maximum below this counts as this: an all-zero vector gets a positive scale, and neither the
# scale nor its reciprocal leaves the normal range of fp32.
SMALLEST_ABSMAX = 2.0**-100

# The largest magnitude of each quantized type: symmetric int8 and the OCP fp8 formats.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

# Stored bits of the mantissa, and the exponent of the smallest normal value.
FP8_MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
FP8_SMALLEST_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14}


class QTensor(NamedTuple):
    """A quantized array, ``values * scale``.

    Attributes:
      values: int8, float8_e4m3fn or float8_e5m2, of the shape of the array it stands for.
      scale: fp32, of the same rank; length 1 along every axis that shares one scale.
    """

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, axes: tuple[int, ...] = (-1,), dtype: str = "int8") -> QTensor:
    """Scales `x` so that its absolute maximum over `axes` is the largest value of `dtype`, and rounds.

    ``scale = max(absmax(x), 2**-100) / largest``, ``values = round(x / scale)``, ties to even. Zeros stay
    zeros. A non-finite element makes its scale non-finite, and so every product with it.

    Args:
      x: [...] float16, bfloat16 or float32, of any rank and size, empty included.
      axes: the axes one scale spans: the last one for row-wise, all of them for tensor-wise.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".

    Returns:
      A QTensor; its scale has length 1 along `axes`.

    >>> q = quantize(jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    >>> q.values.tolist()
    [[64, -127, 32], [0, 0, 0]]
    """
    wide = x.astype(jnp.float32)
    absmax = jnp.max(jnp.abs(wide), axis=axes, keepdims=True, initial=0.0)
    absmax = jnp.maximum(absmax, SMALLEST_ABSMAX)
    scaled = wide * (LARGEST[dtype] / absmax)  # one division a scale, not one an element
    scaled = jnp.round(scaled) if dtype == "int8" else round_to_fp8(scaled, dtype)
    # Multiplied, not divided: XLA rewrites a division by a constant, other compilers do not.
    return QTensor(scaled.astype(dtype), absmax * jnp.float32(1.0 / LARGEST[dtype]))


def round_to_fp8(x: jax.Array, dtype: str) -> jax.Array:
    """`x` rounded to the spacing of an fp8 format, ties to even, as fp32.

    A cast to fp8 and back does the same, but XLA for GPUs removes such pairs (it may keep more precision
    than asked for): after this rounding the cast changes nothing.

    Args:
      x: [...] float32. Beyond the largest value of the format the result is none of its values.
      dtype: "float8_e4m3fn" or "float8_e5m2".

    >>> round_to_fp8(jnp.array([0.3, 17.1, 0.001]), "float8_e4m3fn").tolist()
    [0.3125, 18.0, 0.001953125]
    """
    exponent_bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    power = lax.bitcast_convert_type(exponent_bits, jnp.float32)  # 2 ** floor(log2 |x|), or 0
    power = jnp.maximum(power, 2.0 ** FP8_SMALLEST_EXPONENT[dtype])  # subnormals: a fixed spacing
    spacing = power * 2.0 ** -FP8_MANTISSA_BITS[dtype]
    return jnp.where(jnp.isfinite(x), jnp.round(x / spacing) * spacing, x)


def dequantize(q: QTensor, dtype: str = "float32") -> jax.Array:
    """The array a QTensor stands for: ``values * scale``, in `dtype`."""
    return (q.values.astype(jnp.float32) * q.scale).astype(dtype)


def dot(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    precision=None,
) -> jax.Array:
    """The product that is not quantized, plus bias: what a linear layer of Flax computes.

    Args:
      a, b: two arrays of one floating dtype.
      contract: the axes of `a` and of `b` that are summed over; the others become the result's axes,
        those of `a` first.
      bias: [n] for the last axis of the result, or None.
      out_dtype: dtype of the result.
      precision: as for `jax.lax.dot_general`.
    """
    product = lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=out_dtype
    )
    return _add_bias(product, bias)


def matmul(
    a: QTensor,
    b: QTensor,
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
) -> jax.Array:
    """The product of two quantized arrays: narrow arithmetic, then scales, bias and `out_dtype`.

    ``(sum_k a.values * b.values) * (a.scale * b.scale) + bias``. int8 values are multiplied as int8 and
    summed in int32. fp8 values are multiplied exactly and summed in fp32.

    Args:
      a, b: QTensors whose scales have length 1 along the contracted axes.
      contract: the axes of `a` and of `b` that are summed over.
      bias: [n] for the last axis of the result, or None.
      out_dtype: dtype of the result.
    """
    if a.values.dtype == jnp.int8:
        accumulator = lax.dot_general(
            a.values, b.values, (contract, ((), ())), preferred_element_type=jnp.int32
        ).astype(jnp.float32)
    else:
        # Every fp8 value is exact in bf16 and in fp32; bf16 products are slow on CPUs.
        wide = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        accumulator = lax.dot_general(
            a.values.astype(wide),
            b.values.astype(wide),
            (contract, ((), ())),
            preferred_element_type=jnp.float32,
        )
    scale_a = lax.squeeze(a.scale, contract[0])
    scale_b = lax.squeeze(b.scale, contract[1])
    scale_a = scale_a.reshape(scale_a.shape + (1,) * scale_b.ndim)
    scale_b = scale_b.reshape((1,) * (scale_a.ndim - scale_b.ndim) + scale_b.shape)
    product = accumulator * (scale_a * scale_b)
    return _add_bias(product, bias).astype(out_dtype)


def _add_bias(product: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is None:
        return product
    return product + bias.astype(product.dtype).reshape((1,) * (product.ndim - 1) + bias.shape)
