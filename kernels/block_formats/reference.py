"""Formats whose blocks of neighbours share a scale, emulated: values are rounded as in hardware, and
multiplied in bfloat16 or float32. Matrix units of Blackwell multiply MXFP8 and NVFP4 themselves.

A block has one scale, in float32 or in an 8-bit format; NVFP4 adds one float32 scale for the whole array.
bfloat16 holds values times scales of MXFP8 and NVFP4 exactly, so a bfloat16 product with float32 sums
computes what matrix units for these formats do. The product of e4m3 and a float32 scale is rounded to
float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from swjax.kernels import targets
from swjax.kernels.formats import (
    LARGEST,
    SMALLEST_ABSMAX,
    QTensor,
    absolute_maximum,
    divide,
    round_to_fp8,
    spacing_of,
    to_float32,
)
from swjax.kernels.products.reference import matmul

SCALES = ("float32", "float8_e8m0fnu", "float8_e4m3fn")
# The largest magnitude of each element format, and its binary exponent.
ELEMENTS = LARGEST | {"float4_e2m1fn": 6.0}
_LARGEST_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15, "float4_e2m1fn": 2}


class Blocks(NamedTuple):
    """An array in a block format: ``values * scales * scale``, each scale repeated over its block.

    Attributes:
      values: float32 [...], values of the element format; or in that format, see `for_matrix_units`.
      scales: the same of the format of the scales, one for each block; the last block may be shorter.
      scale: float32 with one element.
    """

    values: jax.Array
    scales: jax.Array
    scale: jax.Array


def block_absolute_maximum(
    x: jax.Array, axis: int, block: int, *, square: bool = False
) -> jax.Array:
    """The largest magnitude of each block.

    Args:
      x: [...] float16, bfloat16 or float32.
      axis: the axis along which a block extends.
      block: its length. The last block of a row may be shorter.
      square: whether a block also extends along the other axis of a matrix x.

    Returns:
      float32: like x, with ceil(n / block) elements instead of n along `axis`, if `square` along both axes.

    >>> block_absolute_maximum(jnp.array([[1.0, -3.0, 2.0]]), -1, 2).tolist()
    [[3.0, 2.0]]
    """
    magnitude = to_float32(x)
    for each in (0, 1) if square else (axis % x.ndim,):
        magnitude = absolute_maximum(_split(magnitude, each, block), (each + 1,)).squeeze(each + 1)
    return magnitude


def quantize_blocks(
    x: jax.Array,
    axis: int = -1,
    *,
    dtype: str,
    block: int,
    scale: str,
    square: bool = False,
    ceil: bool = False,
    absmax: jax.Array | None = None,
    bits: jax.Array | None = None,
) -> Blocks:
    """Scales each block so that its largest magnitude fits into `dtype`, and rounds.

    With m the largest magnitude of a block, `scale` is the format of its scale:

    - "float32": m / largest(dtype), as in `swjax.quantize`.
    - "float8_e8m0fnu", MX: 2 ** (floor(log2 m) - e), with the exponent e of the largest value of `dtype`.
      This is the OCP specification. It rounds the scale down, which clips up to an eighth of m. With `ceil`,
      m / largest(dtype) is rounded up to a power of two, as in `jax.nn.scaled_matmul`, which clips nothing.
    - "float8_e4m3fn", NVFP4: m / largest(dtype) * encode, rounded to e4m3, with encode = 448 *
      largest(dtype) / M and the largest magnitude M of the array, as in Transformer Engine.

    m and M are at least 2**-92, as in `swjax.quantize`. A block with a non-finite element becomes NaN; in
    NVFP4, the whole array.

    Args:
      x: [...] float16, bfloat16 or float32, of any size.
      axis: the axis along which a block extends: that of the contraction.
      dtype: "float8_e4m3fn", "float8_e5m2" or "float4_e2m1fn".
      block: elements per block.
      scale: format of the scales, see above.
      square: whether blocks are `block` x `block` elements of a matrix.
      ceil: whether scales of MX are rounded up.
      absmax: float32 with one element, M; None takes that of x. For shards of a larger array.
      bits: uint32 like x, random: rounds stochastically, see `round_to_fp8`, so that the mean over bits is x,
        clipped where a scale was rounded down. None rounds to nearest, ties to even.

    Returns:
      Blocks.

    Raises:
      ValueError: a format does not exist, the block is not positive, `square` and x is no matrix, or `ceil`
        and the scales are not those of MX.

    >>> x, options = jnp.array([[3.0, 400.0, 0.3, 0.0]]), {"dtype": "float4_e2m1fn", "block": 2}
    >>> q = quantize_blocks(x, **options, scale="float8_e8m0fnu")
    >>> q.values.tolist(), q.scales.tolist()
    ([[0.0, 6.0, 4.0, 0.0]], [[64.0, 0.0625]])

    References:
      Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
      NVIDIA, "Pretraining large language models with NVFP4", 2025, https://arxiv.org/abs/2509.25149
    """
    if (
        dtype not in _LARGEST_EXPONENT
        or scale not in SCALES
        or block < 1
        or (square and x.ndim != 2)
        or (ceil and scale != "float8_e8m0fnu")
    ):
        raise ValueError(
            f"quantize_blocks needs a dtype of {', '.join(_LARGEST_EXPONENT)}, a scale of "
            f"{', '.join(SCALES)}, a positive block, for square blocks a matrix and for ceil "
            f"float8_e8m0fnu, got {dtype!r}, {scale!r}, {block}, {x.shape} and ceil={ceil}"
        )
    largest, one = ELEMENTS[dtype], jnp.ones((1,) * x.ndim, jnp.float32)
    if not x.size:
        return Blocks(to_float32(x), block_absolute_maximum(x, axis, block, square=square), one)
    maxima = jnp.maximum(block_absolute_maximum(x, axis, block, square=square), SMALLEST_ABSMAX)
    finite, maxima = jnp.isfinite(maxima), jnp.where(jnp.isfinite(maxima), maxima, 1.0)
    if scale == "float32":
        factors, scales = divide(largest, maxima), maxima * jnp.float32(1 / np.float32(largest))
    elif scale == "float8_e8m0fnu":
        power = lax.bitcast_convert_type(maxima, jnp.uint32) & jnp.uint32(0x7F800000)
        scales = lax.bitcast_convert_type(power, jnp.float32) * 2.0 ** -_LARGEST_EXPONENT[dtype]
        if ceil:
            scales = jnp.where(maxima > scales * largest, 2 * scales, scales)
        factors = 1 / scales  # exact: a power of two
    else:
        whole = absolute_maximum(x, tuple(range(x.ndim))) if absmax is None else absmax
        whole = jnp.maximum(whole.reshape(one.shape), SMALLEST_ABSMAX)
        encode = divide(LARGEST[scale] * largest, whole)
        one = divide(1.0, encode)
        scales = divide(maxima, jnp.float32(largest)) * encode
        scales = round_to_fp8(jnp.minimum(scales, LARGEST[scale]), scale)
        decode = scales * one
        inverse = divide(1.0, jnp.where(decode > 0, decode, 1.0))
        factors = jnp.where(decode > 0, inverse, jnp.finfo(jnp.float32).max)
    shape, spread = x.shape, (axis, block, square)
    scaled = to_float32(x) * _spread(factors, shape, *spread)
    values = jnp.clip(round_to_fp8(scaled, dtype, bits), -largest, largest)
    values = jnp.where(_spread(finite, shape, *spread), values, jnp.nan)
    return Blocks(values, jnp.where(finite, scales, jnp.nan), one)


def random_bits(x: jax.Array, shape: tuple[int, ...], stream: int = 0) -> jax.Array:
    """Random bits for stochastic rounding, seeded by x, so that a layer needs no key.

    The seed of a counter-based generator is the sum of the hashes of all elements of x. Equal x give equal
    bits, so a repeated, resumed or recomputed step rounds alike, on every device that holds x. Different x
    give unrelated bits.

    Args:
      x: [...] float16, bfloat16 or float32, equal on every platform.
      shape: the shape of the result.
      stream: a different number for each use of the same x.

    Returns:
      uint32 with the given shape.

    >>> random_bits(jnp.ones(3), (2,)).dtype
    dtype('uint32')
    """
    hashed = lax.bitcast_convert_type(to_float32(x), jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's final mixing
        hashed = (hashed ^ (hashed >> shift)) * jnp.uint32(factor)
    seed = jnp.sum(hashed ^ (hashed >> 16), dtype=jnp.uint32)
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)
    return jax.random.bits(key, shape, "uint32")


def emulated(x: Blocks, axis: int, block: int, *, square: bool = False, dtype: str) -> QTensor:
    """Converts an array in a block format to a QTensor whose values include the scales of the blocks.

    Args:
      x: the result of `quantize_blocks`.
      axis, block, square: those of `quantize_blocks`.
      dtype: of the values; "bfloat16" holds them exactly, unless the scales are float32.

    Returns:
      A QTensor with one scale.

    >>> options = {"dtype": "float8_e4m3fn", "block": 1, "scale": "float8_e8m0fnu"}
    >>> x = quantize_blocks(jnp.array([[3.0, 400.0]]), **options)
    >>> emulated(x, -1, 1, dtype="bfloat16").values.tolist()
    [[3.0, 384.0]]
    """
    values = x.values * _spread(x.scales, x.values.shape, axis, block, square)
    return QTensor(values.astype(dtype), x.scale)


def estimator(w: jax.Array, dtype: str, power: float) -> jax.Array:
    """The derivative of a smooth approximation of rounding the columns of a weight.

    With a column scaled to the largest value of `dtype`, and neighbours a <= |w| < a + d in `dtype`::

        t = 2 (|w| - a) / d - 1        f(w) = a + d / 2 (1 + sign(t) |t| ** (1 / power))
        df / dw = min(|t| ** (1 / power - 1) / power, 3)

    f is the identity for power 1, and rounding for an infinite power.

    Args:
      w: [k, n] float16, bfloat16 or float32.
      dtype: see `quantize_blocks`.
      power: at least 1.

    Returns:
      float32 [k, n], the factor of the gradient of the rounded weight.

    >>> w = jnp.array([[6.0], [2.0], [2.4]])
    >>> [round(float(factor), 2) for factor in estimator(w, "float4_e2m1fn", 5.0)[:, 0]]
    [0.2, 0.2, 0.72]

    References:
      Wang et al., "Optimizing large language model training using FP4 quantization", 2025,
      https://arxiv.org/abs/2501.17116
    """
    maxima = jnp.maximum(absolute_maximum(w, (0,)), SMALLEST_ABSMAX)
    scaled = to_float32(w) * divide(ELEMENTS[dtype], maxima)
    steps = jnp.abs(scaled) / spacing_of(scaled, dtype)
    t = jnp.abs(2 * (steps - jnp.floor(steps)) - 1)
    return jnp.minimum(t ** (1 / power - 1) / power, 3)


def clamped(x: jax.Array, quantile: float) -> jax.Array:
    """Clips each row to two of its elements, those of the ranks (1 - quantile) n and quantile n of n.

    Args:
      x: [..., n].
      quantile: in [0.5, 1).

    >>> clamped(jnp.array([[5.0, -9.0, 2.0, 1.0]]), 0.75).tolist()
    [[5.0, 1.0, 2.0, 1.0]]
    """
    ordered, n = jnp.sort(x, axis=-1), x.shape[-1]
    low, high = (
        ordered[..., rank : rank + 1] for rank in (int((1 - quantile) * n), int(quantile * n))
    )
    return jnp.clip(x, low, high)


def for_matrix_units(
    x: Blocks, axis: int, block: int, *, square: bool = False, dtype: str, scale: str
) -> Blocks:
    """Converts the result of `quantize_blocks` to the formats of elements and scales, with `axis` last.

    Args:
      x: the result; the block divides the length of the axis.
      axis, block, square, dtype, scale: those of `quantize_blocks`. Each row of a square gets its scale.

    Returns:
      Blocks.

    >>> options = {"dtype": "float8_e4m3fn", "block": 2, "scale": "float8_e8m0fnu"}
    >>> x = for_matrix_units(quantize_blocks(jnp.ones((4, 3)), 0, **options), 0, **options)
    >>> x.values.shape, x.scales.shape, x.scales.dtype.name
    ((3, 4), (3, 2), 'float8_e8m0fnu')
    """
    values, scales = x.values, x.scales
    if square:
        other = 1 - axis % 2
        scales = jnp.repeat(scales, block, other)
        scales = lax.slice_in_dim(scales, 0, values.shape[other], axis=other)
    values, scales = (jnp.moveaxis(a, axis, -1) for a in (values, scales))
    return Blocks(_pairs_of_last_axis(values.astype(dtype)), scales.astype(scale), x.scale)


def _pairs_of_last_axis(x: jax.Array) -> jax.Array:
    """Packs 4-bit neighbours along the last axis into bytes, as matrix units read them; returns x itself.

    Without this, XLA for GPUs drops the transposes and multiplies in 16 bits. XLA for CPUs has no such
    bitcast.
    """
    if x.dtype != jnp.float4_e2m1fn or targets.platform() == "cpu":
        return x
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    packed = lax.optimization_barrier(lax.bitcast_convert_type(pairs, jnp.uint8))
    return lax.bitcast_convert_type(packed, x.dtype).reshape(x.shape)


def quantize_segments(
    x: jax.Array, *, axes: tuple[int, ...], dtype: str, block: int
) -> tuple[Blocks, ...]:
    """Quantizes x for products that sum over its last axis, over its rows, or one of each.

    Args:
      x: [..., n] float16, bfloat16 or float32, with m rows.
      axes: for each result, -1 for neighbours along the last axis, or 0 for neighbours among the rows.
      dtype: see `quantize_blocks`; scales are float32.
      block: elements of a segment. It divides the length of the axis.

    Returns:
      For each axis a Blocks, whose last axis is the one to sum over: values [..., n] and scales [..., n /
      block] for -1, values [n, m] and scales [n, m / block] for 0.

    >>> along, across = quantize_segments(jnp.ones((2, 4)), axes=(-1, 0), dtype="float8_e4m3fn", block=2)
    >>> along.values.shape, along.scales.shape, across.values.shape, across.scales.shape
    ((2, 4), (2, 2), (4, 2), (4, 1))
    """
    options: dict[str, Any] = {"dtype": dtype, "block": block, "scale": "float32"}

    def along(axis: int) -> Blocks:
        x_ = x if axis == -1 else x.reshape(-1, x.shape[-1])
        return for_matrix_units(quantize_blocks(x_, axis, **options), axis, **options)

    return tuple(map(along, axes))


def quantize_squares(w: jax.Array, *, dtype: str, block: int) -> tuple[Blocks, Blocks]:
    """Quantizes `block` x `block` elements of a weight, for both products that read it.

    Args:
      w: [k, n] float16, bfloat16 or float32; the block divides k and n.
      dtype, block: see `quantize_segments`.

    Returns:
      Blocks for a sum over k, with values [n, k] and scales [n / block, k / block]; and for a sum over n.

    >>> over_k, over_n = quantize_squares(jnp.ones((2, 4)), dtype="float8_e4m3fn", block=2)
    >>> over_k.values.shape, over_k.scales.shape, over_n.scales.shape
    ((4, 2), (2, 1), (1, 2))
    """
    q = quantize_blocks(w, 0, dtype=dtype, block=block, scale="float32", square=True)
    q = q._replace(values=q.values.astype(dtype))
    return Blocks(q.values.T, q.scales.T, q.scale), q


def block_matmul(
    a: Blocks,
    b: Blocks,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    *,
    out_dtype: str,
) -> jax.Array:
    """``a bT + bias + addend`` of two arrays in block formats, multiplied by matrix units that can.

    XLA for Blackwell multiplies MXFP8 and NVFP4 as they are, and sums in float32. Elsewhere it multiplies
    values times scales, which bfloat16 holds exactly. With float32 scales, values times scales are rounded to
    float32 and multiplied in float32; kernels may instead multiply the exact sums of a block by both scales.

    Args:
      a: values [..., k] and scales [..., k / block].
      b: values [n, k] and scales [n, k / block], or with float32 scales [n / block, k / block].
      bias: [n] or None.
      addend: [..., n] or None.
      out_dtype: dtype of the result.

    Returns:
      [..., n] in `out_dtype`.

    >>> options = {"dtype": "float8_e4m3fn", "block": 2, "scale": "float8_e8m0fnu"}
    >>> x = for_matrix_units(quantize_blocks(jnp.ones((1, 2)), **options), -1, **options)
    >>> block_matmul(x, x, out_dtype="float32").tolist()
    [[2.0]]
    """
    if a.scales.dtype == jnp.float32:
        lhs, rhs = (QTensor(_dequantized(q), q.scale) for q in (a, b))
        return matmul(lhs, rhs, bias, addend, out_dtype=out_dtype)
    values, scales = (part.reshape(-1, part.shape[-1]) for part in (a.values, a.scales))
    y = lax.scaled_dot(
        values,
        b.values,
        lhs_scale=scales,
        rhs_scale=b.scales,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).reshape(*a.values.shape[:-1], b.values.shape[0])
    y = y * (a.scale.reshape(()) * b.scale.reshape(()))
    y = y if bias is None else y + to_float32(bias).reshape((1,) * (y.ndim - 1) + bias.shape)
    return (y if addend is None else y + to_float32(addend)).astype(out_dtype)


def _dequantized(q: Blocks) -> jax.Array:
    """Values times float32 scales, of segments or of squares."""
    block = q.values.shape[-1] // q.scales.shape[-1]
    scales = jnp.repeat(q.scales, block, axis=-1)
    if q.scales.shape[0] < q.values.shape[0]:
        scales = jnp.repeat(scales, block, axis=0)
    return q.values.astype(jnp.float32) * scales


def _split(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Pads an axis with zeros to whole blocks, and splits it in two: [..., blocks, block, ...]."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % block)
    shape = (*x.shape[:axis], -(-x.shape[axis] // block), block, *x.shape[axis + 1 :])
    return jnp.pad(x, padding).reshape(shape)


def _spread(x: jax.Array, shape: tuple[int, ...], axis: int, block: int, square: bool) -> jax.Array:
    """Repeats what each block has for all of its elements."""
    for each in (0, 1) if square else (axis % len(shape),):
        x = lax.slice_in_dim(jnp.repeat(x, block, axis=each), 0, shape[each], axis=each)
    return x
