"""The specification of quantizers."""

import jax
import jax.numpy as jnp

from swjax.kernels import formats
from swjax.kernels.formats import LARGEST, SMALLEST_ABSMAX, QTensor, to_float32


def quantize(
    x: jax.Array, axes: tuple[int, ...] = (-1,), dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """Scales `x` so that its absolute maximum over `axes` is the largest value of `dtype`, and rounds.

    ``scale = max(absmax(x), 2**-92) / largest``, ``values = round(x / scale)``, ties to even. Zeros stay
    zeros. A non-finite element makes its scale non-finite, and so every product with it. The values are the
    same on every platform and in every implementation.

    If the absolute maximum is below 2**-92 (2e-28), the error is absolute, up to half a step (8e-31 in int8),
    and smaller elements become zeros. Scale such arrays first, as loss scaling does.

    Args:
      x: [...] float16, bfloat16 or float32, of any rank and size, empty included.
      axes: axes that one scale spans: the last axis for row-wise, all axes for tensor-wise.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".
      transpose: whether to return the transpose of a matrix x.

    Returns:
      A QTensor; its scale has length 1 along `axes`.

    Raises:
      ValueError: the dtype is not a quantized dtype, x has no floating dtype, or x lacks one of the axes.

    >>> q = quantize(jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    >>> q.values.tolist()
    [[64, -127, 32], [0, 0, 0]]
    """
    return quantize_by(x, formats.absolute_maximum(x, axes), dtype, transpose=transpose)


def quantize_by(
    x: jax.Array,
    absmax: jax.Array,
    dtype: str = "int8",
    *,
    transpose: bool = False,
    clip: bool = False,
) -> QTensor:
    """Like `quantize`, with known absolute maxima, such as the maxima of the global array of a shard `x`.

    Args:
      x: [...] float16, bfloat16 or float32.
      absmax: float32 with the rank of x, and length 1 along the axes that one scale spans.
      dtype, transpose: see `quantize`.
      clip: for fp8 and an `absmax` that elements may exceed, as that of a constant scale: larger elements are
        clipped, and elements that are not finite become NaN.

    Returns:
      A QTensor.

    Raises:
      ValueError: the dtype is not a quantized dtype, or int8 with `clip`, or x has no floating dtype.

    >>> quantize_by(jnp.array([[1.0, -2.0]]), jnp.array([[4.0]])).values.tolist()
    [[32, -64]]
    >>> scale_2 = static_absmax(2.0, "float8_e4m3fn", ndim=1)
    >>> quantize_by(jnp.array([0.3, 2000.0]), scale_2, "float8_e4m3fn", clip=True).values.tolist()
    [0.15625, 448.0]
    """
    check_clip(dtype, clip)
    if dtype not in LARGEST:
        raise ValueError(f"dtype must be one of {', '.join(LARGEST)}, got {dtype!r}")
    absmax = jnp.maximum(absmax, SMALLEST_ABSMAX)
    # One division per scale, not one per element.
    scaled = to_float32(x) * formats.divide(LARGEST[dtype], absmax)
    if clip:
        inside = jnp.clip(scaled, -LARGEST[dtype], LARGEST[dtype])
        scaled = jnp.where(jnp.isfinite(scaled), inside, jnp.nan)
    scaled = jnp.round(scaled) if dtype == "int8" else formats.round_to_fp8(scaled, dtype)
    q = QTensor(scaled.astype(dtype), formats.scale_of(absmax, dtype))
    return q.T if transpose else q


def static_absmax(scale: float, dtype: str, ndim: int) -> jax.Array:
    """The `absmax` of `quantize_by` for a constant scale: float32 with `ndim` axes of length 1.

    Args:
      scale: a power of two, so that the scale of the result is this one, without rounding.
      dtype: "float8_e4m3fn" or "float8_e5m2".
      ndim: rank of the array to quantize.

    >>> static_absmax(0.5, "float8_e4m3fn", ndim=1).tolist()
    [224.0]
    """
    return jnp.full((1,) * ndim, scale * LARGEST[dtype], jnp.float32)


def check_clip(dtype: str, clip: bool) -> None:
    """Raises a ValueError if values would be clipped to integers, which have no NaN."""
    if clip and dtype == "int8":
        raise ValueError("clip needs a dtype with a NaN, got 'int8': use fp8, or clip=False")


def quantize_both(
    x: jax.Array, absmax: jax.Array, dtype: str = "int8", *, clip: bool = False
) -> tuple[QTensor, QTensor]:
    """Quantizes a matrix and its transpose with one scale, in one pass; or each matrix of a stack.

    Args:
      x: [..., k, n] float16, bfloat16 or float32.
      absmax: [..., p] float32, absolute maxima of p parts of a matrix; the function uses the largest.
      dtype, clip: see `quantize_by`.

    Returns:
      QTensors with values [..., k, n] and [..., n, k], and the same scale [..., 1, 1].

    >>> q, transposed = quantize_both(jnp.array([[1.0, -2.0]]), jnp.array([1.0, 4.0]))
    >>> q.values.tolist(), transposed.values.tolist()
    ([[32, -64]], [[32], [-64]])
    """
    largest = formats.absolute_maximum(absmax, (-1,))[..., None]
    q = quantize_by(x, largest, dtype, clip=clip)
    return q, QTensor(q.values.mT, q.scale)


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
    return quantize(x, (x.ndim - 1,), dtype), token_sum(x)


def token_sum(x: jax.Array) -> jax.Array:
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


def quantized_output(
    y: jax.Array, quantize_to: str | None, high_precision: bool
) -> tuple[jax.Array | None, QTensor | None]:
    """The results of an operation that is fused with the row-wise quantizer: (y or None, QTensor or None)."""
    q = quantize(y, (y.ndim - 1,), quantize_to) if quantize_to else None
    return y if high_precision else None, q
