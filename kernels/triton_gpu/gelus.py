"""GELU, forward and backward."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.reference import QTensor
from swjax.kernels.triton_gpu import chunks, launcher
from swjax.kernels.triton_gpu.arithmetic import gelu_slope, gelu_value, nan_maximum, round_to
from swjax.kernels.triton_gpu.chunks import (
    load_chunk,
    round_chunk,
    smallest_absmax,
    store_chunk,
    store_quantized,
    store_sum,
    zero_sums,
)


@triton.jit
def _gelu_kernel(
    x_ptr,  # [M, WIDTH]
    y_ptr,  # [M, WIDTH]
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TANH: tl.constexpr,
    WRITE: tl.constexpr,  # whether to write y
    QUANTIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes GELU of rows, rounded to the dtype of x, and writes or quantizes it, or both."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        for i in tl.static_range(CHUNKS):
            # Loads in pairs made this compute-bound kernel 1 to 5% slower.
            x = load_chunk(x_ptr, block, i, M, WIDTH, ROWS, CHUNK, False)
            xs = xs + (gelu_value(x, TANH),)
        ys = ()
        absmax = smallest_absmax(ROWS, CHUNK)
        for i in tl.static_range(CHUNKS):
            y = round_chunk(xs[i], y_ptr, dtype, block, i, M, WIDTH, ROWS, CHUNK, WRITE)
            ys = ys + (y,)
            absmax = nan_maximum(absmax, tl.abs(y))
        if QUANTIZE:
            store_quantized(
                ys, absmax, values_ptr, scale_ptr, block, M, WIDTH, ROWS, CHUNK, CHUNKS, LARGEST,
                INVERSE,
            )  # fmt: skip


def gelu(
    x: jax.Array,
    *,
    approximate: bool = False,
    quantize_to: str | None = None,
    high_precision: bool = True,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.gelu`."""
    if tile is None:  # tuned for the call in an MLP, which quantizes and does not write y
        tuned = quantize_to and not high_precision
        tile = tiles.row_tile("gelu", x.shape[-1]) if tuned else tiles.row_rule(x.shape[-1])
    persistent = tile.stages > 1  # several blocks per program, with prefetch
    y, values, scale = launcher.call(
        x,
        kernel=_gelu_kernel,
        out_type=(
            launcher.output(high_precision, x.shape, x.dtype),
            *chunks.quantized_outputs(x, quantize_to),
        ),
        grid=(chunks.program_count(x, tile, persistent=persistent),),
        num_warps=tile.warps,
        TANH=approximate,
        WRITE=high_precision,
        QUANTIZE=quantize_to is not None,
        **chunks.range_constants(quantize_to),
        **chunks.row_constants(x, tile, persistent=persistent),
    )
    return y if high_precision else None, chunks.qtensor(values, scale, quantize_to)


@triton.jit
def _gelu_backward_kernel(
    x_ptr,  # [M, WIDTH]
    gradient_ptr,  # [M, WIDTH]
    dx_ptr,  # [M, WIDTH]
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    sums_ptr,  # [programs, WIDTH]
    y_ptr,  # [M, WIDTH], GELU's output
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TANH: tl.constexpr,
    QUANTIZE: tl.constexpr,
    RECOMPUTE: tl.constexpr,  # whether to write y
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes dx = gradient times GELU's slope, rounded to the dtype of x; writes, sums and quantizes it."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    sums = zero_sums(CHUNK, CHUNKS)
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        for i in tl.static_range(CHUNKS):
            x = load_chunk(x_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            gradient = load_chunk(gradient_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            if RECOMPUTE:
                y = round_to(gelu_value(x, TANH), dtype)[0]
                store_chunk(y_ptr, y, block, i, M, WIDTH, ROWS, CHUNK)
            xs = xs + (gradient * gelu_slope(x, TANH),)
        dxs = ()
        absmax = smallest_absmax(ROWS, CHUNK)
        totals = ()
        for i in tl.static_range(CHUNKS):
            dx = round_chunk(xs[i], dx_ptr, dtype, block, i, M, WIDTH, ROWS, CHUNK, True)
            dxs = dxs + (dx,)
            absmax = nan_maximum(absmax, tl.abs(dx))
            totals = totals + (sums[i] + tl.sum(dx, 0),)
        sums = totals
        if QUANTIZE:
            store_quantized(
                dxs, absmax, values_ptr, scale_ptr, block, M, WIDTH, ROWS, CHUNK, CHUNKS, LARGEST,
                INVERSE,
            )  # fmt: skip
    for i in tl.static_range(CHUNKS):
        store_sum(sums_ptr, sums[i], i, WIDTH, CHUNK)


def gelu_backward(
    x: jax.Array,
    gradient: jax.Array,
    *,
    approximate: bool = False,
    quantize_to: str | None = None,
    recompute: bool = False,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array, QTensor | None, jax.Array, jax.Array | None]:
    """`reference.gelu_backward`."""
    tile = tile or tiles.row_tile("gelu_backward", x.shape[-1])
    programs = chunks.program_count(x, tile, persistent=True)
    rows = jax.ShapeDtypeStruct(x.shape, x.dtype)
    dx, values, scale, sums, y = launcher.call(
        x,
        gradient,
        kernel=_gelu_backward_kernel,
        out_type=(
            rows,
            *chunks.quantized_outputs(x, quantize_to),
            jax.ShapeDtypeStruct((programs, x.shape[-1]), jnp.float32),
            launcher.output(recompute, x.shape, x.dtype),
        ),
        grid=(programs,),
        num_warps=tile.warps,
        TANH=approximate,
        RECOMPUTE=recompute,
        QUANTIZE=quantize_to is not None,
        **chunks.range_constants(quantize_to),
        **chunks.row_constants(x, tile, persistent=True),
    )
    q = chunks.qtensor(values, scale, quantize_to)
    return dx, q, jnp.sum(sums, axis=0), y if recompute else None
