"""The 8-bit formats, and rounding, maxima and divisions that give the same bits on every platform."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Smallest absolute maximum; smaller ones are raised to it. An all-zero vector then has a positive scale, and
# the scale and its reciprocal are normal fp32 numbers. fp32 subnormals, which some platforms read as zeros,
# round to zero in every quantized type.
SMALLEST_ABSMAX = 2.0**-92

# The largest magnitude of each quantized type: symmetric int8 and the OCP fp8 formats.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

# Reciprocals of LARGEST, rounded to fp32.
INVERSE = {name: float(np.float32(1.0 / largest)) for name, largest in LARGEST.items()}

# Stored mantissa bits, and the exponent of the smallest normal value.
FP8_MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2, "float4_e2m1fn": 1}
FP8_SMALLEST_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14, "float4_e2m1fn": 0}


class QTensor(NamedTuple):
    """A quantized array, ``values * scale``.

    Attributes:
      values: int8, float8_e4m3fn or float8_e5m2, with the shape of the quantized array.
      scale: float32, with the same rank; length 1 along every axis that shares a scale.
    """

    values: jax.Array
    scale: jax.Array

    def _refuse(self, *_: Any) -> Any:
        """A tuple's operators repeat and concatenate."""
        raise TypeError(
            "a QTensor has no arithmetic: pass it to swjax.switchback, or use swjax.dequantize(q)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = _refuse  # type: ignore[misc]  # not a tuple's
    __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse  # type: ignore[misc]  # not a tuple's
    __truediv__ = __neg__ = _refuse  # type: ignore[misc]  # not a tuple's

    @property
    def T(self) -> "QTensor":
        """The transpose of a matrix, or of each matrix of a stack."""
        return QTensor(self.values.mT, self.scale.mT)


def to_float32(x: jax.Array) -> jax.Array:
    """Casts `x` to fp32, after rounding to its own dtype, which XLA for GPUs may have skipped."""
    if not jnp.issubdtype(x.dtype, jnp.floating):  # the cast would drop an imaginary part
        raise ValueError(f"x must be float16, bfloat16 or float32, got {x.dtype}: cast it first")
    exact = x.astype(jnp.float32)
    if x.dtype == jnp.float32:
        return exact
    kind = jnp.finfo(x.dtype)
    rounded = lax.reduce_precision(exact, kind.nexp, kind.nmant)
    if x.dtype == jnp.float16:  # reduce_precision flushes float16 subnormals to zero
        subnormal = jnp.abs(exact) < 2.0**-14
        rounded = jnp.where(subnormal, jnp.round(exact * 2.0**24) * 2.0**-24, rounded)
    return rounded


def absolute_maximum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest magnitude of `x` over `axes`.

    Args:
      x: [...] float16, bfloat16 or float32, empty included.
      axes: axes to reduce.

    Returns:
      float32 with the rank of x and length 1 along `axes`: 0 for an empty x, NaN if x contains NaN.

    >>> absolute_maximum(jnp.array([[1.0, -3.0]]), (1,)).tolist()
    [[3.0]]
    """
    # The maximum compares integers, whose order is that of positive floats with NaN on top. XLA for CPUs
    # drops NaN from a maximum of floats, so that a gradient of NaN would become zeros. The maximum of no
    # unsigned integers is 0, so an empty x needs no `initial=`, for which XLA would add a kernel.
    bits = lax.bitcast_convert_type(jnp.abs(to_float32(x)), jnp.uint32)
    axes = np.lib.array_utils.normalize_axis_tuple(axes, x.ndim, "axes")
    largest = lax.expand_dims(lax.reduce_max(bits, axes), sorted(axes))
    return lax.bitcast_convert_type(largest, jnp.float32)


def scale_of(absmax: jax.Array, dtype: str) -> jax.Array:
    """``absmax / largest`` as a multiplication, because only XLA rewrites a division by a constant to one."""
    return absmax * jnp.float32(INVERSE[dtype])


def divide(x: float | jax.Array, y: jax.Array) -> jax.Array:
    """``x / y`` in fp32, correctly rounded even if the hardware's division is not (XLA on GPUs).

    The function applies one Newton step to an exact remainder. Quotient and divisor are split into halves
    whose products are exact. A huge divisor is scaled down first, because GPUs flush the halves of its
    quotient to zero.
    """
    small = jnp.where(y < 2.0**64, jnp.float32(1), jnp.float32(2.0**-64))
    y = y * small
    quotient = x / y
    high, low = _halves(quotient)
    y_high, y_low = _halves(y)
    remainder = ((x - high * y_high) - high * y_low - low * y_high) - low * y_low
    return (quotient + remainder / y) * small


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits `x` into a sum of two numbers with 12 significant bits."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def round_to_fp8(x: jax.Array, dtype: str, bits: jax.Array | None = None) -> jax.Array:
    """Rounds `x` to the spacing of an fp8 or fp4 format, ties to even or stochastically, in fp32.

    A cast to fp8 and back would do the same, but XLA for GPUs removes such pairs (it may keep more precision
    than requested). After this rounding the cast changes nothing.

    Args:
      x: [...] float32. For x beyond the format's largest value, the result is not a value of the format.
      dtype: "float8_e4m3fn", "float8_e5m2" or "float4_e2m1fn".
      bits: uint32 [...], uniformly random: rounds away from zero with a probability that is the distance to
        the neighbour towards zero in units of the spacing, so that the mean is x. None rounds to nearest.

    Returns:
      [...] float32.

    >>> round_to_fp8(jnp.array([0.3, 17.1, 0.001]), "float8_e4m3fn").tolist()
    [0.3125, 18.0, 0.001953125]
    """
    spacing = spacing_of(x, dtype)
    steps = x / spacing
    if bits is None:
        rounded = jnp.round(steps)
    else:
        whole = jnp.trunc(steps)
        up = (bits >> 8).astype(jnp.float32) * 2.0**-24 < jnp.abs(steps - whole)
        rounded = whole + jnp.where(up, jnp.sign(steps), 0)
    return jnp.where(jnp.isfinite(x), rounded * spacing, x)


def spacing_of(x: jax.Array, dtype: str) -> jax.Array:
    """The distance between the two neighbours of each element in an fp8 or fp4 format; see `round_to_fp8`.

    >>> spacing_of(jnp.array([0.1, 1.2, 5.0]), "float4_e2m1fn").tolist()
    [0.5, 0.5, 2.0]
    """
    exponent_bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    power = lax.bitcast_convert_type(exponent_bits, jnp.float32)  # 2 ** floor(log2 |x|), or 0
    power = jnp.maximum(power, 2.0 ** FP8_SMALLEST_EXPONENT[dtype])  # subnormals: a fixed spacing
    return power * 2.0 ** -FP8_MANTISSA_BITS[dtype]
