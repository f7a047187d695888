"""Quantized arrays, and the operations that make them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from swjax.kernels.reference import numbers
from swjax.kernels.reference.numbers import LARGEST, SMALLEST_ABSMAX, to_float32


class QTensor(NamedTuple):
    """A quantized array, ``values * scale``.

    Attributes:
      values: int8, float8_e4m3fn or float8_e5m2, of the shape of the array that is quantized.
      scale: float32, of the same rank; length 1 along every axis that shares one scale.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def T(self) -> "QTensor":
        """The transpose, of a matrix."""
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
      axes: the axes one scale spans: the last one for row-wise, all of them for tensor-wise.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".
      transpose: return the transpose, of a matrix x.

    Returns:
      A QTensor; its scale has length 1 along `axes`.

    >>> q = quantize(jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    >>> q.values.tolist()
    [[64, -127, 32], [0, 0, 0]]
    """
    return quantize_by(x, numbers.absolute_maximum(x, axes), dtype, transpose=transpose)


def quantize_by(
    x: jax.Array, absmax: jax.Array, dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """`quantize` with known absolute maxima, such as those of a sharded array with the shard `x`.

    Args:
      x: [...] float16, bfloat16 or float32.
      absmax: float32 of the rank of x, of length 1 along the axes one scale spans.
      dtype, transpose: as for `quantize`.

    Returns:
      A QTensor.

    >>> quantize_by(jnp.array([[1.0, -2.0]]), jnp.array([[4.0]])).values.tolist()
    [[32, -64]]
    """
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
      absmax: [p] float32: the absolute maxima of p parts of x; the largest is used.
      dtype: as for `quantize`.

    Returns:
      QTensors with values [k, n] and [n, k], and the same scale [1, 1].

    >>> q, transposed = quantize_both(jnp.array([[1.0, -2.0]]), jnp.array([1.0, 4.0]))
    >>> q.values.tolist(), transposed.values.tolist()
    ([[32, -64]], [[32], [-64]])
    """
    q = quantize_by(x, numbers.absolute_maximum(absmax[None], (0, 1)), dtype)
    return q, q.T


def quantize_and_sum(x: jax.Array, dtype: str = "int8") -> tuple[QTensor, jax.Array]:
    """`x` quantized row-wise, and the sum of its rows: a gradient, and that of a bias, in one pass.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      dtype: as for `quantize`.

    Returns:
      The QTensor, and the sum over all axes but the last: [n] float32.

    >>> q, total = quantize_and_sum(jnp.array([[1.0, -2.0], [2.0, 2.0]]))
    >>> total.tolist()
    [3.0, 0.0]
    """
    return quantize(x, (x.ndim - 1,), dtype), row_sum(x)


def row_sum(x: jax.Array) -> jax.Array:
    """The sum of x [..., n] over all axes but the last: [n] float32."""
    return jnp.sum(to_float32(x), axis=tuple(range(x.ndim - 1)))


def dequantize(q: QTensor, dtype: str = "float32") -> jax.Array:
    """The array that `q` approximates: ``values * scale``.

    Args:
      q: a QTensor [...].
      dtype: of the result.

    Returns:
      [...] in `dtype`.

    >>> dequantize(QTensor(jnp.array([[2, -4]], jnp.int8), jnp.array([[0.5]]))).tolist()
    [[1.0, -2.0]]
    """
    return (q.values.astype(jnp.float32) * q.scale).astype(dtype)
