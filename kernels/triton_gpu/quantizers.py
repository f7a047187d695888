"""Row quantizers, which read rows once, and `quantize`, which chooses the method for the scales."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import reference, tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.reference import QTensor
from swjax.kernels.triton_gpu import chunks, launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum
from swjax.kernels.triton_gpu.chunks import (
    load_chunk,
    smallest_absmax,
    store_quantized,
    store_sum,
    zero_sums,
)
from swjax.kernels.triton_gpu.scales import quantize_by


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
    programs = chunks.program_count(x, tile, persistent=total)
    values, scale, sums = launcher.call(
        x,
        kernel=_quantize_rows_kernel,
        out_type=(
            *chunks.quantized_outputs(x, dtype),
            launcher.output(total, (programs, x.shape[-1]), jnp.float32),
        ),
        grid=(programs,),
        num_warps=tile.warps,
        SUM=total,
        **chunks.range_constants(dtype),
        **chunks.row_constants(x, tile, persistent=total),
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
    return quantize_by(x, reference.absolute_maximum(x, axes), dtype, transpose=transpose)


def why_not_quantize(x: jax.Array, axes: tuple[int, ...] = (-1,), **_: Any) -> Unavailable | None:
    """Returns why `quantize` cannot compute scales over these axes, or None if it can."""
    spanned = sorted(axis % x.ndim for axis in axes)
    if spanned not in (list(range(x.ndim)), list(range(x.ndim - 1)), [x.ndim - 1]):
        return Unavailable(
            f"supports scales over the last axis, the other axes or all axes, got axes {spanned}: use 'xla'"
        )
    return None


def quantize_and_sum(
    x: jax.Array, dtype: str = "int8", *, tile: tiles.RowTile | None = None
) -> tuple[QTensor, jax.Array]:
    """`reference.quantize_and_sum`."""
    q, total = quantize_rows(x, dtype, total=True, tile=tile)
    assert total is not None, "total=True"
    return q, total
