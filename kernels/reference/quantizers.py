"""Quantized arrays, and the operations that create them."""

from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from swjax.kernels.reference import numbers
from swjax.kernels.reference.numbers import LARGEST, SMALLEST_ABSMAX, to_float32


class QTensor(NamedTuple):
    """A quantized array, ``values * scale``.

    Attributes:
      values: int8, float8_e4m3fn or float8_e5m2, with the shape of the quantized array.
      scale: float32, with the same rank; length 1 along every axis that shares a scale.
    """

    values: jax.Array
    scale: jax.Array

    def _refuse(self, *_) -> NoReturn:
        # A tuple's own would concatenate or repeat the fields.
        raise TypeError("a QTensor has no arithmetic: use swjax.dequantize(q), or scale its scale")

    __add__ = __radd__ = __mul__ = __rmul__ = _refuse

    @property
    def T(self) -> "QTensor":
        """The transpose of a matrix."""
        return QTensor(self.values.T, self.scale.T)


def quantize(
    x: jax.Array, axes: tuple[int, ...] = (-1,), dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """Scales `x` so that its absolute maximum over `axes` is the largest value of `dtype`, and rounds.

    ``scale = max(absmax(x), 2**-92) / largest``, ``values = round(x / scale)``, ties to even. Zeros stay
    zeros. A non-finite element makes its scale non-finite, and so every product with it. The values are the
    same on every platform and in every implementation.

    Args:
      x: [...] float16, bfloat16 or float32, of any rank and size, empty included.
      axes: axes that one scale spans: the last axis for row-wise, all axes for tensor-wise.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".
      transpose: whether to return the transpose of a matrix x.

    Returns:
      A QTensor; its scale has length 1 along `axes`.

    Raises:
      ValueError: the dtype is not a quantized dtype, or x has no floating dtype.

    >>> q = quantize(jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    >>> q.values.tolist()
    [[64, -127, 32], [0, 0, 0]]
    """
    return quantize_by(x, numbers.absolute_maximum(x, axes), dtype, transpose=transpose)


def quantize_by(
    x: jax.Array, absmax: jax.Array, dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """Like `quantize`, with known absolute maxima, such as the maxima of the global array of a shard `x`.

    Args:
      x: [...] float16, bfloat16 or float32.
      absmax: float32 with the rank of x, and length 1 along the axes that one scale spans.
      dtype, transpose: see `quantize`.

    Returns:
      A QTensor.

    Raises:
      ValueError: the dtype is not a quantized dtype, or x has no floating dtype.

    >>> quantize_by(jnp.array([[1.0, -2.0]]), jnp.array([[4.0]])).values.tolist()
    [[32, -64]]
    """
    if dtype not in LARGEST:
        raise ValueError(f"dtype must be one of {', '.join(LARGEST)}, got {dtype!r}")
    absmax = jnp.maximum(absmax, SMALLEST_ABSMAX)
    # One division per scale, not one per element.
    scaled = to_float32(x) * numbers.divide(LARGEST[dtype], absmax)
    scaled = jnp.round(scaled) if dtype == "int8" else numbers.round_to_fp8(scaled, dtype)
    q = QTensor(scaled.astype(dtype), numbers.scale_of(absmax, dtype))
    return q.T if transpose else q


def quantize_both(x: jax.Array, absmax: jax.Array, dtype: str = "int8") -> tuple[QTensor, QTensor]:
    """Quantizes a weight and its transpose with one scale, in one pass.

    Args:
      x: [k, n] float16, bfloat16 or float32.
      absmax: [p] float32, absolute maxima of p parts of x; the function uses the largest.
      dtype: see `quantize`.

    Returns:
      QTensors with values [k, n] and [n, k], and the same scale [1, 1].

    >>> q, transposed = quantize_both(jnp.array([[1.0, -2.0]]), jnp.array([1.0, 4.0]))
    >>> q.values.tolist(), transposed.values.tolist()
    ([[32, -64]], [[32], [-64]])
    """
    q = quantize_by(x, numbers.absolute_maximum(absmax[None], (0, 1)), dtype)
    return q, q.T


def quantize_and_sum(x: jax.Array, dtype: str = "int8") -> tuple[QTensor, jax.Array]:
    """Quantizes `x` row-wise and sums its rows: a gradient and the gradient of a bias, in one pass.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      dtype: see `quantize`.

    Returns:
      The QTensor, and the sum over all axes except the last: [n] float32.

    >>> q, total = quantize_and_sum(jnp.array([[1.0, -2.0], [2.0, 2.0]]))
    >>> total.tolist()
    [3.0, 0.0]
    """
    return quantize(x, (x.ndim - 1,), dtype), row_sum(x)


def row_sum(x: jax.Array) -> jax.Array:
    """Sums x [..., n] over all axes except the last: [n] float32."""
    return jnp.sum(to_float32(x), axis=tuple(range(x.ndim - 1)))


def dequantize(q: QTensor, dtype: str = "float32") -> jax.Array:
    """The array that `q` approximates: ``values * scale``.

    Args:
      q: a QTensor [...].
      dtype: dtype of the result.

    Returns:
      [...] in `dtype`.

    >>> dequantize(QTensor(jnp.array([[2, -4]], jnp.int8), jnp.array([[0.5]]))).tolist()
    [[1.0, -2.0]]
    """
    return (q.values.astype(jnp.float32) * q.scale).astype(dtype)
