"""Products of rows that are sorted by group."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels.availability import Unavailable
from swjax.kernels.block_weight_gradients.triton import COLUMNS, ROTATION, TILE, rotated_tokens
from swjax.kernels.block_weight_gradients.triton import why_not as why_not_blocks
from swjax.kernels.formats import QTensor
from swjax.kernels.products.tiles import TritonTile
from swjax.kernels.products.triton import load_scale, program_block, sum_of_products
from swjax.kernels.ragged import tiles
from swjax.kernels.ragged.schedule import (
    blocks_of_groups,
    bounds,
    largest_first,
    padded_length,
    row_tiles,
    tile_count,
)
from swjax.kernels.rotations.reference import rotation_matrix
from swjax.kernels.triton_gpu import launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, to_quantized
from swjax.kernels.triton_gpu.chunks import SMALLEST, range_constants


@triton.jit
def _ragged_matmul_kernel(
    tiles_ptr,  # [3, TILES], see `schedule.row_tiles`
    a_ptr,  # [M, K]
    b_ptr,  # [GROUPS, N, K], or [GROUPS, K, N] if not LAST
    a_scale_ptr,  # [M]
    b_scale_ptr,  # [GROUPS] or [GROUPS, N]
    addend_ptr,  # [M, N]
    out_ptr,  # [M, N]
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    LAST: tl.constexpr,  # whether the last axis of b is summed over
    SCALED: tl.constexpr,  # whether a and b have scales
    CHANNELS: tl.constexpr,  # whether b has a scale per group and column, rather than per group
    ADDEND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # number of row tiles that share columns of b in the L2 cache
):
    """Computes some columns of a tile of rows of one group."""
    tile, block_n = program_block(TILES, N, 1, BLOCK_N, GROUP, tl.program_id(0))
    group = tl.load(tiles_ptr + tile)
    first = tl.load(tiles_ptr + TILES + tile)
    end = tl.load(tiles_ptr + 2 * TILES + tile)
    row = first + tl.arange(0, BLOCK_M)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < end)[:, None] & (column < N)[None, :]
    out_at = out_ptr + row[:, None].to(tl.int64) * N + column[None, :]
    if group < GROUPS:
        # Past the edges, loads read other rows of a and b, so that they need no mask. The store has a mask.
        a_row = tl.minimum(row, M - 1).to(tl.int64)
        b_column = column % N if N % BLOCK_N else column
        k = tl.arange(0, BLOCK_K)
        a_at = a_ptr + a_row[:, None] * K + k[None, :]
        b_at = b_ptr + group.to(tl.int64) * (N * K)
        if LAST:
            b_at = b_at + b_column[None, :] * K + k[:, None]
        else:
            b_at = b_at + k[:, None] * N + b_column[None, :]
        integer: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
        total_type: tl.constexpr = tl.int32 if integer else tl.float32
        total = tl.zeros((BLOCK_M, BLOCK_N), total_type)
        total = sum_of_products(a_at, b_at, total, k, K, BLOCK_K, 1, 1 if LAST else N)
        out = total.to(tl.float32)
        if SCALED:
            a_scale = tl.load(a_scale_ptr + row, mask=row < end, other=0.0)[:, None]
            b_scale_at = b_scale_ptr + group * (N if CHANNELS else 1)
            out *= a_scale * load_scale(b_scale_at, column, N, CHANNELS, 1)
        if ADDEND:
            at = row[:, None].to(tl.int64) * N + column[None, :]
            out += tl.load(addend_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)
        tl.store(out_at, zeros, mask=inside)


def ragged_matmul(
    a: jax.Array | QTensor,
    b: jax.Array | QTensor,
    group_sizes: jax.Array,
    addend: jax.Array | None = None,
    *,
    axis: int,
    out_dtype: str,
    precision: jax.lax.PrecisionLike = None,
    tile: TritonTile | None = None,
) -> jax.Array:
    """`reference.ragged_matmul` for 8-bit and 16-bit operands. Transposes 8-bit matrices if `axis` is 1."""
    del precision  # the products of 16-bit numbers are exact
    one, scaled = jnp.zeros(1, jnp.float32), isinstance(a, QTensor)
    a_scale = b_scale = one
    channels = False
    if isinstance(a, QTensor):
        assert isinstance(b, QTensor), "both operands are quantized, or none"
        channels = b.scale.size > b.scale.shape[0]
        (a, a_scale), (b, b_scale) = a, b
        if axis == 1:  # tensor cores read them along the last axis
            b, axis = b.mT, 2
    assert not isinstance(b, QTensor), "both operands are quantized, or none"
    (m, k), groups, n = a.shape, len(b), b.shape[3 - axis]
    tile = tile or tiles.product_tile(m, n, k, groups, a.dtype.itemsize)
    count = tile_count(m, groups, tile.m)
    return launcher.call(
        row_tiles(group_sizes, m, tile.m),
        a,
        b,
        a_scale.reshape(-1),
        b_scale.reshape(-1),
        one if addend is None else addend,
        kernel=_ragged_matmul_kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(count * triton.cdiv(n, tile.n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        TILES=count,
        GROUPS=groups,
        M=m,
        N=n,
        K=k,
        LAST=axis == 2,
        SCALED=scaled,
        CHANNELS=channels,
        ADDEND=addend is not None,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP=tile.group,
    )


@triton.jit
def _ragged_weight_gradient_kernel(
    order_ptr,  # [3, GROUPS]: the groups, largest first; their first rows; their numbers of rows
    x_ptr,  # [M, K]
    g_ptr,  # [M, N]
    out_ptr,  # [GROUPS, K, N]
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # of K
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,  # rows
    GROUP: tl.constexpr,  # number of blocks of K that share columns of g in the L2 cache
):
    """Computes a block of xT g over the rows of one group."""
    blocks: tl.constexpr = tl.cdiv(K, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    place = tl.program_id(0) // blocks
    group = tl.load(order_ptr + place).to(tl.int64)
    start = tl.load(order_ptr + GROUPS + place)
    end = start + tl.load(order_ptr + 2 * GROUPS + place)
    block_m, block_n = program_block(K, N, BLOCK_M, BLOCK_N, GROUP, tl.program_id(0) % blocks)
    feature = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_feature = feature % K if K % BLOCK_M else feature
    g_column = column % N if N % BLOCK_N else column
    step = tl.arange(0, STEP)
    x_at = x_ptr + (start + step).to(tl.int64)[None, :] * K + x_feature[:, None]
    g_at = g_ptr + (start + step).to(tl.int64)[:, None] * N + g_column[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(start, end, STEP):
        known = step < end - row
        x = tl.load(x_at, mask=known[None, :], other=0.0)
        g = tl.load(g_at, mask=known[:, None], other=0.0)
        total = tl.dot(x, g, total)
        x_at += STEP * K
        g_at += STEP * N
    inside = (feature < K)[:, None] & (column < N)[None, :]
    at = group * (K * N) + feature[:, None] * N + column[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def ragged_weight_gradient(
    x: jax.Array,
    g: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    precision: jax.lax.PrecisionLike = None,
    tile: TritonTile | None = None,
) -> jax.Array:
    """`reference.ragged_weight_gradient` for 16-bit operands."""
    del precision  # the products of 16-bit numbers are exact
    (m, k), n, groups = x.shape, g.shape[1], len(group_sizes)
    tile = tile or tiles.weight_gradient_tile(k, n)
    blocks = triton.cdiv(k, tile.m) * triton.cdiv(n, tile.n)
    starts, ends = bounds(group_sizes, m)
    return launcher.call(
        largest_first(starts, ends - starts),
        x,
        g,
        kernel=_ragged_weight_gradient_kernel,
        out_type=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        grid=(groups * blocks,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        GROUPS=groups,
        K=k,
        N=n,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        STEP=tile.k,
        GROUP=tile.group,
    )


# --- the weight gradient in rotated int8 --------------------------------------------------------------


@triton.jit
def _ragged_rotation_kernel(
    blocks_ptr,  # [4, BLOCKS], `first`, `start`, `end` and `to` of `schedule.GroupBlocks`
    x_ptr,  # [M, N]
    rotation_ptr,  # [ROTATION, ROTATION]: token, rotated token
    values_ptr,  # [N, LENGTH]
    scale_ptr,  # [BLOCKS, N]
    BLOCKS: tl.constexpr,
    N: tl.constexpr,
    LENGTH: tl.constexpr,  # padded rows of all groups
    ROTATION: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rotates, transposes and quantizes some columns of one block of rows; twice, as the kernel of products
    with equal blocks."""
    block = tl.program_id(1)
    first = tl.load(blocks_ptr + block)
    begin = tl.load(blocks_ptr + BLOCKS + block)
    end = tl.load(blocks_ptr + 2 * BLOCKS + block)
    to = tl.multiple_of(tl.load(blocks_ptr + 3 * BLOCKS + block), ROTATION)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, ROTATION)
    h = tl.load(rotation_ptr + token[:, None] * ROTATION + token[None, :])
    known = column < N
    largest = tl.zeros((BLOCK_N, ROTATION), tl.float32)
    for start in range(first, end, ROTATION):
        rotated = rotated_tokens(x_ptr, x_ptr, h, start + token, column, begin, end, N, True)
        largest = nan_maximum(largest, tl.abs(rotated))
    absmax = tl.reduce(largest, 1, nan_maximum)
    absmax = nan_maximum(absmax, tl.full(absmax.shape, SMALLEST, tl.float32))
    tl.store(scale_ptr + block * N + column, absmax * INVERSE, mask=known)
    factor = tl.div_rn(tl.full(absmax.shape, LARGEST, tl.float32), absmax)[:, None]
    at = values_ptr + column[:, None].to(tl.int64) * LENGTH + to + token[None, :]
    for start in range(first, end, ROTATION):
        rotated = rotated_tokens(x_ptr, x_ptr, h, start + token, column, begin, end, N, True)
        values = to_quantized(rotated * factor, values_ptr.dtype.element_ty)
        tl.store(at, values, mask=known[:, None])
        at += ROTATION


@triton.jit
def _ragged_blocks_kernel(
    order_ptr,  # [3, GROUPS]: the groups, largest first; their first blocks; their numbers of blocks
    blocks_ptr,  # [4, BLOCKS], as above
    a_ptr,  # [K, LENGTH]
    b_ptr,  # [N, LENGTH]
    a_scale_ptr,  # [BLOCKS, K]
    b_scale_ptr,  # [BLOCKS, N]
    out_ptr,  # [GROUPS, K, N]
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    LENGTH: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,  # of K
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,  # rows
    GROUP: tl.constexpr,
):
    """Computes a tile of a bT times FACTOR over the blocks of one group: int32 sums within a block, float32
    sums over blocks."""
    tiles_of_group: tl.constexpr = tl.cdiv(K, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    place, program = tl.program_id(0) // tiles_of_group, tl.program_id(0) % tiles_of_group
    group = tl.load(order_ptr + place).to(tl.int64)
    first_block = tl.load(order_ptr + GROUPS + place)
    count = tl.load(order_ptr + 2 * GROUPS + place)
    tile_m, tile_n = program_block(K, N, BLOCK_M, BLOCK_N, GROUP, program)
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the edge, loads read the last rows instead, so that they need no mask. The store has a mask.
    a_row, b_row = tl.minimum(row, K - 1), tl.minimum(column, N - 1)
    k = tl.arange(0, STEP)
    a_at = a_row[:, None].to(tl.int64) * LENGTH + k[None, :]
    b_at = b_row[None, :].to(tl.int64) * LENGTH + k[:, None]
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first_block, first_block + count):
        length = tl.load(blocks_ptr + 2 * BLOCKS + block) - tl.load(blocks_ptr + block)
        to = tl.multiple_of(tl.load(blocks_ptr + 3 * BLOCKS + block), STEP)
        a_block, b_block = a_ptr + to, b_ptr + to
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for _ in range(0, length, STEP):
            a, b = tl.load(a_block + a_at), tl.load(b_block + b_at)
            total = tl.dot(a, b, total, out_dtype=tl.int32)
            a_block += STEP
            b_block += STEP
        a_scale = tl.load(a_scale_ptr + block * K + a_row)[:, None]
        b_scale = tl.load(b_scale_ptr + block * N + b_row)[None, :]
        out += total.to(tl.float32) * (a_scale * b_scale)
    inside = (row < K)[:, None] & (column < N)[None, :]
    at = group * (K * N) + row[:, None] * N + column[None, :]
    tl.store(out_ptr + at, (out * FACTOR).to(out_ptr.dtype.element_ty), mask=inside)


def ragged_block_weight_gradient(
    x: jax.Array,
    gs: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    dtypes: tuple[str, str],
    block: int,
    rotation: int,
    out_dtype: str,
) -> tuple[jax.Array, ...]:
    """`reference.ragged_block_weight_gradient` for 16-bit operands in int8, with rotations of 128 tokens.

    x is rotated once for all gs. The rotated arrays have at most 134 rows a group more than x and g.
    """
    m, k = x.shape
    groups = len(group_sizes)
    length = padded_length(m, groups, rotation)
    of_groups = blocks_of_groups(group_sizes, m, block, rotation)
    blocks = jnp.stack([of_groups.first, of_groups.start, of_groups.end, of_groups.to])
    order = largest_first(of_groups.first_block, of_groups.counts)
    quantize = partial(quantize_rotated_blocks, blocks=blocks, length=length)
    a, a_scale = quantize(x, dtype=dtypes[0])

    def product(g):
        n = g.shape[1]
        b, b_scale = quantize(g, dtype=dtypes[1])
        return launcher.call(
            order,
            blocks,
            a,
            b,
            a_scale,
            b_scale,
            kernel=_ragged_blocks_kernel,
            out_type=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
            grid=(groups * triton.cdiv(k, TILE) * triton.cdiv(n, TILE),),
            num_warps=8,
            num_stages=3,
            GROUPS=groups,
            BLOCKS=blocks.shape[1],
            K=k,
            N=n,
            LENGTH=length,
            FACTOR=1 / rotation,  # exact: each operand has a factor sqrt(rotation)
            BLOCK_M=TILE,
            BLOCK_N=TILE,
            STEP=ROTATION,
            GROUP=8,
        )

    return tuple(map(product, gs))


def quantize_rotated_blocks(
    x: jax.Array, *, dtype: str, blocks: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """Rotates and quantizes the blocks of x [m, n]: values [n, length], and scales [blocks, n]."""
    n, count = x.shape[1], blocks.shape[1]
    return launcher.call(
        blocks,
        x,
        jnp.asarray(rotation_matrix(ROTATION).T, x.dtype),
        kernel=_ragged_rotation_kernel,
        out_type=(
            jax.ShapeDtypeStruct((n, length), dtype),
            jax.ShapeDtypeStruct((count, n), jnp.float32),
        ),
        grid=(triton.cdiv(n, COLUMNS), count),
        num_warps=4,
        num_stages=4,
        BLOCKS=count,
        N=n,
        LENGTH=length,
        ROTATION=ROTATION,
        BLOCK_N=COLUMNS,
        **range_constants(dtype),
    )


def why_not_products(a: jax.Array | QTensor, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why `ragged_matmul` cannot multiply these, or None if it can."""
    return None if isinstance(a, QTensor) else why_not_weight_gradient(a)


def why_not_weight_gradient(x: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why `ragged_weight_gradient` cannot multiply these, or None if it can."""
    if x.dtype in (jnp.bfloat16, jnp.float16):
        return None
    return Unavailable(f"is for 16-bit operands, got {x.dtype}: use 'xla'")


WHY_NOT = {
    "ragged_matmul": why_not_products,
    "ragged_weight_gradient": why_not_weight_gradient,
    "ragged_block_weight_gradient": why_not_blocks,
}
