"""Quantizers: of rows, which are read once, and of matrices with known absolute maxima."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor, absolute_maximum
from swjax.kernels.quantizers.reference import check_clip
from swjax.kernels.triton_gpu import chunks, launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, to_quantized
from swjax.kernels.triton_gpu.chunks import (
    SMALLEST,
    load_chunk,
    smallest_absmax,
    store_quantized,
    store_sum,
    zero_sums,
)

BLOCK = 64  # rows and columns per program
MOST_ROWS = 65_535 * BLOCK  # CUDA limits the second axis of a grid


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [M, WIDTH]
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    sums_ptr,  # [programs, WIDTH]
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUM: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Quantizes rows, and sums them if SUM."""
    sums = zero_sums(CHUNK, CHUNKS)
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        for i in tl.static_range(CHUNKS):
            xs = xs + (load_chunk(x_ptr, block, i, M, WIDTH, ROWS, CHUNK),)
        absmax = smallest_absmax(ROWS, CHUNK)
        totals = ()
        for i in tl.static_range(CHUNKS):
            absmax = nan_maximum(absmax, tl.abs(xs[i]))
            if SUM:
                totals = totals + (sums[i] + tl.sum(xs[i], 0),)
        if SUM:
            sums = totals
        store_quantized(
            xs, absmax, values_ptr, scale_ptr, block, M, WIDTH, ROWS, CHUNK, CHUNKS, LARGEST,
            INVERSE,
        )  # fmt: skip
    if SUM:
        for i in tl.static_range(CHUNKS):
            store_sum(sums_ptr, sums[i], i, WIDTH, CHUNK)


def quantize_rows(
    x: jax.Array, dtype: str, *, total: bool = False, tile: tiles.RowTile | None = None
) -> tuple[QTensor, jax.Array | None]:
    """Quantizes x [..., n] row-wise; if `total`, also returns the sum of its rows, [n] float32."""
    tile = tile or tiles.row_tile("none", x.shape[-1])
    launch = chunks.row_launch(x, tile, persistent=total)
    values, scale, sums = launcher.call(
        x,
        kernel=_quantize_rows_kernel,
        out_type=(
            *chunks.quantized_outputs(x, dtype),
            launcher.output(total, (*launch["grid"], x.shape[-1]), jnp.float32),
        ),
        SUM=total,
        **chunks.range_constants(dtype),
        **launch,
    )
    return QTensor(values, scale), jnp.sum(sums, axis=0) if total else None


def quantize(
    x: jax.Array, axes: tuple[int, ...] = (-1,), dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """`reference.quantize` for row-wise scales, one scale, or scales along the last axis.

    Rows are read once. In the other cases XLA computes the maxima, and a second pass rounds and transposes.
    """
    axes = tuple(axis % x.ndim for axis in axes)
    rowwise = axes == (x.ndim - 1,)
    if rowwise and not transpose and x.shape[-1] <= tiles.WIDEST_ROW:
        return quantize_rows(x, dtype)[0]
    return quantize_by(x, absolute_maximum(x, axes), dtype, transpose=transpose)


def why_not_quantize(
    x: jax.Array, axes: tuple[int, ...] = (-1,), *_: Any, transpose: bool = False, **__: Any
) -> Unavailable | None:
    """Returns why `quantize` cannot compute scales over these axes, or None if it can."""
    spanned = sorted(axis % x.ndim for axis in axes)
    if spanned not in (list(range(x.ndim)), list(range(x.ndim - 1)), [x.ndim - 1]):
        return Unavailable(
            f"supports scales over the last axis, the other axes or all axes, got axes {spanned}: use 'xla'"
        )
    if spanned == [x.ndim - 1] and not transpose and x.shape[-1] <= tiles.WIDEST_ROW:
        return None
    return why_not_rows(x)


def why_not_rows(x: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why a grid cannot hold the blocks of x, or None if it can."""
    if (rows := math.prod(x.shape[:-1])) > MOST_ROWS:
        return Unavailable(f"supports up to {MOST_ROWS} rows, got {rows}: use 'xla'")
    return None


def quantize_and_sum(x: jax.Array, dtype: str = "int8") -> tuple[QTensor, jax.Array]:
    """`reference.quantize_and_sum`."""
    q, total = quantize_rows(x, dtype, total=True)
    assert total is not None, "total=True"
    return q, total


@triton.jit
def _quantize_by_kernel(
    x_ptr,  # [STACK, M, N]
    absmax_ptr,  # [STACK, PARTS], [M] or [N]
    values_ptr,  # [STACK, M, N]
    transposed_ptr,  # [STACK, N, M]
    scale_ptr,  # [STACK], [M] or [N]
    M: tl.constexpr,
    N: tl.constexpr,
    SCOPE: tl.constexpr,  # span of one scale: "tensor", "row" or "column"
    PARTS: tl.constexpr,  # number of parts of a tensor, each with its maximum
    STRAIGHT: tl.constexpr,  # whether to write the values
    TRANSPOSED: tl.constexpr,  # whether to write their transpose
    CLIP: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Quantizes a block of a matrix; the first block of each scale writes the scale.

    A stack has more than one matrix only if each has one scale.
    """
    number = tl.program_id(2)
    matrix = number.to(tl.int64) * (M * N)
    x_ptr, values_ptr, transposed_ptr = x_ptr + matrix, values_ptr + matrix, transposed_ptr + matrix
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < M)[:, None] & (column < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCOPE == "tensor":
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        at, known = tl.zeros((1,), tl.int64) + number, tl.full((1,), True, tl.int1)
        parts = absmax_ptr + number * PARTS + tl.arange(0, PARTS)
        largest = tl.reduce(tl.load(parts), 0, nan_maximum)
        absmax = tl.zeros((1,), tl.float32) + largest
    else:
        if SCOPE == "row":
            first = tl.program_id(0) == 0
            at, known = row, row < M
        else:
            first = tl.program_id(1) == 0
            at, known = column.to(tl.int64), column < N
        absmax = tl.load(absmax_ptr + at, mask=known, other=1.0)
    absmax = nan_maximum(absmax, tl.full(absmax.shape, SMALLEST, tl.float32))
    if first:
        tl.store(scale_ptr + at, absmax * INVERSE, mask=known)
    factor = tl.div_rn(tl.full(absmax.shape, LARGEST, tl.float32), absmax)
    x *= factor[:, None] if SCOPE == "row" else factor[None, :]
    if CLIP:  # a conversion of infinity gives the largest value
        x = tl.where(tl.abs(x) < float("inf"), tl.clamp(x, -LARGEST, LARGEST), float("nan"))
    if STRAIGHT:
        values = to_quantized(x, values_ptr.dtype.element_ty)
        tl.store(values_ptr + row[:, None] * N + column[None, :], values, mask=inside)
    if TRANSPOSED:
        values = to_quantized(x, transposed_ptr.dtype.element_ty)
        at = column[:, None].to(tl.int64) * M + row[None, :]
        tl.store(transposed_ptr + at, tl.trans(values), mask=tl.trans(inside))


def quantize_by(
    x: jax.Array,
    absmax: jax.Array,
    dtype: str = "int8",
    *,
    transpose: bool = False,
    clip: bool = False,
) -> QTensor:
    """`reference.quantize_by` for row-wise scales, one scale, or scales along the last axis."""
    if absmax.size == 1:
        scope = "tensor"
    else:
        scope = "row" if absmax.shape[-1] == 1 else "column"
    check_clip(dtype, clip)
    outputs = {"straight": not transpose, "transposed": transpose, "clip": clip}
    values, transposed, scale = _quantize_matrix(x, absmax, dtype, scope, **outputs)
    scale = scale.reshape(absmax.shape)
    return QTensor(transposed, scale.T) if transpose else QTensor(values.reshape(x.shape), scale)


def why_not_quantize_by(x: jax.Array, absmax: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why `quantize_by` cannot use scales of this shape, or None if it can."""
    *rows, n = x.shape
    ones = (1,) * len(rows)
    if absmax.shape not in ((*ones, 1), (*rows, 1), (*ones, n)):
        return Unavailable(
            f"supports one scale, or one per row or column, got absmax {absmax.shape}: use 'xla'"
        )
    return why_not_rows(x)


def quantize_both(
    x: jax.Array, absmax: jax.Array, dtype: str = "int8", *, clip: bool = False
) -> tuple[QTensor, QTensor]:
    """`reference.quantize_both`."""
    check_clip(dtype, clip)
    if absmax.shape[-1] & (absmax.shape[-1] - 1):  # Triton needs power-of-two sizes
        absmax = absolute_maximum(absmax, (-1,))
    outputs = {"straight": True, "transposed": True, "clip": clip}
    values, transposed, scale = _quantize_matrix(
        x, absmax, dtype, "tensor", stack=math.prod(x.shape[:-2]), **outputs
    )
    scale = scale.reshape(*x.shape[:-2], 1, 1)
    shape = (*x.shape[:-2], *x.shape[:-3:-1])
    return QTensor(values.reshape(x.shape), scale), QTensor(transposed.reshape(shape), scale)


def why_not_quantize_both(x: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why a grid cannot hold the blocks of these matrices, or None if it can."""
    stack, rows = math.prod(x.shape[:-2]), x.shape[-2]
    if stack > MOST_ROWS // BLOCK or rows > MOST_ROWS:
        return Unavailable(
            f"supports up to {MOST_ROWS // BLOCK} matrices of {MOST_ROWS} rows, got {stack} of {rows}: "
            "use 'xla'"
        )
    return None


def _quantize_matrix(
    x: jax.Array,
    absmax: jax.Array,
    dtype: str,
    scope: str,
    *,
    straight: bool,
    transposed: bool,
    clip: bool,
    stack: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes the rows of x: values [m, n], transposed values [n, m], as far as requested, and scales;
    for a stack its matrices one after the other.

    Args:
      x: [..., n].
      absmax: one per row or column, or the maxima of parts of a tensor.
      dtype: dtype of the values.
      scope: span of one scale: "row", "column" or "tensor".
      straight: whether to compute the values.
      transposed: whether to compute their transpose.
      clip: see `reference.quantize_by`.
      stack: number of matrices in x, each with one scale.
    """
    matrix = x.reshape(-1, x.shape[-1])
    m, n = matrix.shape[0] // stack, matrix.shape[1]
    return launcher.call(
        matrix,
        absmax.reshape(-1),
        kernel=_quantize_by_kernel,
        out_type=(
            jax.ShapeDtypeStruct((stack * m, n) if straight else (1,), dtype),
            jax.ShapeDtypeStruct((stack * n, m) if transposed else (1,), dtype),
            jax.ShapeDtypeStruct((stack if scope == "tensor" else absmax.size,), jnp.float32),
        ),
        grid=(triton.cdiv(n, BLOCK), triton.cdiv(m, BLOCK), stack),
        num_warps=4,
        M=m,
        N=n,
        SCOPE=scope,
        PARTS=absmax.size // stack,
        STRAIGHT=straight,
        TRANSPOSED=transposed,
        CLIP=clip,
        BLOCK_M=BLOCK,
        BLOCK_N=BLOCK,
        **chunks.range_constants(dtype),
    )


# Each has the signature of its operation. Operations without an entry accept all arguments.
WHY_NOT = {
    "quantize": why_not_quantize,
    "quantize_by": why_not_quantize_by,
    "quantize_both": why_not_quantize_both,
    "quantize_and_sum": chunks.why_not,
}
