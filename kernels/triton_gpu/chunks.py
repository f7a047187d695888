"""Rows in the registers of a Triton program, as tuples of chunks.

A block of `ROWS` rows is stored as `CHUNKS` arrays of `CHUNK` columns, a power of two as Triton requires. For
example, 1280 columns are 5 x 256, so that no lane idles. `block` counts blocks of rows, `i` counts chunks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import INVERSE, LARGEST, SMALLEST_ABSMAX, QTensor
from swjax.kernels.triton_gpu import launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, round_to, to_float32, to_quantized

SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_ABSMAX)


# --- loads and stores ---------------------------------------------------------------------------------


@triton.jit
def load_chunk(
    x_ptr, block, i: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, PAIRS: tl.constexpr = True,
):  # fmt: skip
    """Loads a chunk of x [M, WIDTH] in fp32, with zeros past the edges."""
    # int64, because a tensor may have over 2**31 elements.
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = i * CHUNK + tl.arange(0, CHUNK)
    at = x_ptr + row[:, None] * WIDTH + column[None, :]
    if M % ROWS == 0 and WIDTH % CHUNK == 0:
        return to_float32(tl.load(at), PAIRS)
    else:
        inside = (row < M)[:, None] & (column < WIDTH)[None, :]
        return to_float32(tl.load(at, mask=inside, other=0.0), PAIRS)


@triton.jit
def store_chunk(
    y_ptr, y, block, i: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes a chunk to y [M, WIDTH]."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = i * CHUNK + tl.arange(0, CHUNK)
    at = y_ptr + row[:, None] * WIDTH + column[None, :]
    if M % ROWS == 0 and WIDTH % CHUNK == 0:
        tl.store(at, y)
    else:
        tl.store(at, y, mask=(row < M)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def round_chunk(
    x, y_ptr, dtype: tl.constexpr, block, i: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Rounds a chunk to `dtype`, and returns it in fp32; writes it to y [M, WIDTH] if WRITE."""
    y, exact = round_to(x, dtype)
    if WRITE:
        store_chunk(y_ptr, y, block, i, M, WIDTH, ROWS, CHUNK)
    return exact


@triton.jit
def load_vector(x_ptr, i: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Loads a chunk [1, CHUNK] of a vector [WIDTH] in fp32, with zeros past the edge."""
    column = (i * CHUNK + tl.arange(0, CHUNK))[None, :]
    if WIDTH % CHUNK == 0:
        return tl.load(x_ptr + column).to(tl.float32)
    else:
        return tl.load(x_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)


# --- sums over columns and rows -----------------------------------------------------------------------


@triton.jit
def zero_sums(CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Initial sums over rows: zeros."""
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums = sums + (tl.zeros((CHUNK,), tl.float32),)
    return sums


@triton.jit
def store_sum(
    y_ptr,
    total,
    i: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SUM: tl.constexpr = 0,
    SUMS: tl.constexpr = 1,
):
    """Writes a chunk of sum number SUM, of the SUMS sums of this program, to y [programs, SUMS, WIDTH].

    XLA adds the sums of all programs in a fixed order.
    """
    column = i * CHUNK + tl.arange(0, CHUNK)
    row = tl.program_id(0) * SUMS + SUM
    tl.store(y_ptr + row * WIDTH + column, total, mask=column < WIDTH)


@triton.jit
def row_sum(xs, CHUNKS: tl.constexpr):
    """The sum of each row: [ROWS, 1]."""
    total = xs[0]
    for i in tl.static_range(1, CHUNKS):
        total += xs[i]
    return tl.sum(total, 1)[:, None]


@triton.jit
def moments(
    xs, WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EPSILON: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """Returns rows, minus their mean if CENTRED (zero past the edge), and reciprocals of their deviations."""
    if CENTRED:
        mean = row_sum(xs, CHUNKS) * (1.0 / WIDTH)
    rows = ()
    squares = ()
    for i in tl.static_range(CHUNKS):
        x = xs[i]
        if CENTRED:
            x = x - mean
            if WIDTH % CHUNK != 0:
                x = tl.where((i * CHUNK + tl.arange(0, CHUNK) < WIDTH)[None, :], x, 0.0)
        rows = rows + (x,)
        squares = squares + (x * x,)
    deviation = tl.sqrt_rn(row_sum(squares, CHUNKS) * (1.0 / WIDTH) + EPSILON)
    return rows, tl.div_rn(tl.full(deviation.shape, 1.0, tl.float32), deviation)


# --- quantization -------------------------------------------------------------------------------------


@triton.jit
def smallest_absmax(ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """The initial absolute maximum of each row, per lane."""
    return tl.full((ROWS, CHUNK), SMALLEST, tl.float32)


@triton.jit
def store_quantized(
    ys, absmax, values_ptr, scale_ptr, block, M: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Quantizes rows, in fp32 or 16 bits, by their absolute maxima.

    Each lane of `absmax` has the maximum over its own columns.
    """
    absmax = tl.reduce(absmax, 1, nan_maximum)
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(scale_ptr + row, absmax * INVERSE, mask=row < M)
    factor = tl.div_rn(tl.full((ROWS,), LARGEST, tl.float32), absmax)[:, None]
    for i in tl.static_range(CHUNKS):
        values = to_quantized(to_float32(ys[i], True) * factor, values_ptr.dtype.element_ty)
        store_chunk(values_ptr, values, block, i, M, WIDTH, ROWS, CHUNK)


# --- launches -----------------------------------------------------------------------------------------


def row_launch(
    x: jax.Array, tile: tiles.RowTile, *, persistent: bool, sums: int = 1
) -> dict[str, Any]:
    """The grid, the warps and the sizes for which a row kernel is compiled.

    There is one program per block of rows; or, if `persistent`, few that loop over blocks, and each writes
    `sums` rows of partial sums. Stages are tuned for 16 bits, because fp32 rows might not fit into shared
    memory with as many stages.
    """
    width = x.shape[-1]
    programs = blocks = triton.cdiv(x.size // width, tile.rows)
    if persistent:
        programs = min(blocks, tiles.row_programs(tile, sums))
    return {
        "grid": (programs,),
        "num_warps": tile.warps,
        "M": x.size // width,
        "WIDTH": width,
        "ROWS": tile.rows,
        "CHUNK": tile.chunk,
        "CHUNKS": triton.cdiv(width, tile.chunk),
        "STAGES": tile.stages if persistent and x.dtype.itemsize == 2 else 1,
    }


def range_constants(dtype: str | None) -> dict[str, float]:
    """The range of the dtype to which a kernel quantizes; with None it does not quantize."""
    return {"LARGEST": LARGEST[dtype or "int8"], "INVERSE": INVERSE[dtype or "int8"]}


def quantized_outputs(x: jax.Array, dtype: str | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the values and scales of the rows of x."""
    return (
        launcher.output(dtype, x.shape, dtype),
        launcher.output(dtype, (*x.shape[:-1], 1), jnp.float32),
    )


def qtensor(values: jax.Array, scale: jax.Array, dtype: str | None) -> QTensor | None:
    """Combines the two outputs into a QTensor; None if the kernel did not quantize."""
    return QTensor(values, scale) if dtype else None


def why_not(x: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why a row kernel cannot read x, or None if it can."""
    if x.shape[-1] > tiles.WIDEST_ROW:
        return Unavailable(
            f"supports rows of up to {tiles.WIDEST_ROW}, got {x.shape[-1]}: use 'xla'"
        )
    return None
