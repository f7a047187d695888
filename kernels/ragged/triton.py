"""Products of rows that are sorted by group."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor
from swjax.kernels.products.tiles import TritonTile
from swjax.kernels.products.triton import load_scale, program_block
from swjax.kernels.ragged import tiles
from swjax.kernels.ragged.schedule import bounds, row_tiles, tile_count
from swjax.kernels.triton_gpu import launcher


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
        for start in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                a = tl.load(a_at)
                b = tl.load(b_at)
            else:
                a = tl.load(a_at, mask=(k < K - start)[None, :], other=0.0)
                b = tl.load(b_at, mask=(k < K - start)[:, None], other=0.0)
            total = tl.dot(a, b, total, out_dtype=total_type)
            a_at += BLOCK_K
            b_at += BLOCK_K if LAST else BLOCK_K * N
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
    """`reference.ragged_matmul` for 8-bit and 16-bit operands. 8-bit matrices are transposed if `axis` is 1."""
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
    order_ptr,  # [3, GROUPS]: the groups, largest first; their first rows; the rows after their last ones
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
    end = tl.load(order_ptr + 2 * GROUPS + place)
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
    return launcher.call(
        _largest_first(bounds(group_sizes, m)),
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


def _largest_first(starts_and_ends: jax.Array) -> jax.Array:
    """Puts the longest sums first, so that none of them starts when all others have ended.

    Returns:
      int32 [3, e]: groups, first rows, and rows after the last ones.
    """
    starts, ends = starts_and_ends
    order = jnp.argsort(starts - ends).astype(jnp.int32)
    return jnp.stack([order, starts[order], ends[order]])


def why_not_products(a: jax.Array | QTensor, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why `ragged_matmul` cannot multiply these, or None if it can."""
    return None if isinstance(a, QTensor) else _why_not_16_bits(a)


def why_not_weight_gradient(x: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why `ragged_weight_gradient` cannot multiply these, or None if it can."""
    return _why_not_16_bits(x)


def _why_not_16_bits(x: jax.Array) -> Unavailable | None:
    if x.dtype in (jnp.bfloat16, jnp.float16):
        return None
    return Unavailable(f"is for 16-bit operands, got {x.dtype}: use 'xla'")


WHY_NOT = {"ragged_matmul": why_not_products, "ragged_weight_gradient": why_not_weight_gradient}
