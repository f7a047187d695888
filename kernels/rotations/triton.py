"""Rotates and quantizes rows, which are read once."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.formats import QTensor
from swjax.kernels.quantizers.triton import quantize, why_not_rows
from swjax.kernels.rotations.reference import rotate_features, rotation_matrix
from swjax.kernels.rotations.tiles import rotation_tile
from swjax.kernels.triton_gpu import chunks, launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, round_to
from swjax.kernels.triton_gpu.chunks import load_chunk, smallest_absmax, store_quantized

LEAST_ROTATION = 16  # the least length of a sum on tensor cores


@triton.jit
def _quantize_rotated_kernel(
    x_ptr,  # [M, WIDTH]
    matrix_ptr,  # [ROTATION, ROTATION], transposed
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,  # 1 / sqrt(ROTATION)
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of ROTATION features is a row of the left operand of a product with the matrix."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    side = tl.arange(0, ROTATION)
    matrix = tl.load(matrix_ptr + side[:, None] * ROTATION + side[None, :])
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        ys = ()
        absmax = smallest_absmax(ROWS, CHUNK)
        for i in tl.static_range(CHUNKS):
            x = load_chunk(x_ptr, block, i, M, WIDTH, ROWS, CHUNK).to(dtype)
            groups = tl.reshape(x, (ROWS * CHUNK // ROTATION, ROTATION))
            mixed = tl.dot(groups, matrix, out_dtype=tl.float32) * FACTOR
            y = round_to(tl.reshape(mixed, (ROWS, CHUNK)), dtype)[1]
            ys = ys + (y,)
            absmax = nan_maximum(absmax, tl.abs(y))
        store_quantized(
            ys, absmax, values_ptr, scale_ptr, block, M, WIDTH, ROWS, CHUNK, CHUNKS, LARGEST,
            INVERSE,
        )  # fmt: skip


def quantize_rotated(
    x: jax.Array, dtype: str = "int8", *, rotation: int, tile: tiles.RowTile | None = None
) -> QTensor:
    """`reference.quantize_rotated`. XLA rotates float32 rows, very long rows, and small groups."""
    width = x.shape[-1]
    if x.dtype == jnp.float32 or width > tiles.WIDEST_ROW or rotation < LEAST_ROTATION:
        return quantize(rotate_features(x, rotation), dtype=dtype)
    tile = tile or rotation_tile(width)
    values, scale = launcher.call(
        x,
        jnp.asarray(rotation_matrix(rotation).T, x.dtype),
        kernel=_quantize_rotated_kernel,
        out_type=chunks.quantized_outputs(x, dtype),
        ROTATION=rotation,
        FACTOR=1 / math.sqrt(rotation),
        **chunks.range_constants(dtype),
        **chunks.row_launch(x, tile, persistent=True),
    )
    return QTensor(values, scale)


# As `quantize`: see `quantizers.why_not_rows`.
WHY_NOT = {"quantize_rotated": why_not_rows}
