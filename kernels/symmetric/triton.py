"""Symmetric products: one triangle of tiles is computed, and written to both triangles."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels.availability import Unavailable
from swjax.kernels.triton_gpu import launcher


@triton.jit
def _symmetric_kernel(
    a_ptr,  # [BATCH, M, K], or [BATCH, K, M] if BY_COLUMNS
    b_ptr,  # like a
    addend_ptr,  # [BATCH, M, M]
    factors_ptr,  # [BATCH, 3]
    out_ptr,  # [BATCH, M, M]
    M: tl.constexpr,
    K: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ADDEND: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a multiple of BLOCK_M
    BLOCK_K: tl.constexpr,
):
    """Computes a tile that reaches below the diagonal, and writes its lower part to both triangles."""
    blocks_m: tl.constexpr = tl.cdiv(M, BLOCK_M)
    ratio: tl.constexpr = BLOCK_N // BLOCK_M
    # Row i has i // ratio + 1 tiles. Rows are numbered in groups of `ratio`, whose tiles are as many.
    groups: tl.constexpr = tl.cdiv(blocks_m, ratio)
    last: tl.constexpr = blocks_m - (groups - 1) * ratio  # rows of the last group
    tiles: tl.constexpr = ratio * (groups * (groups - 1) // 2) + last * groups
    batch = tl.program_id(0) // tiles
    number = tl.program_id(0) % tiles
    # The largest group with ratio group (group + 1) / 2 <= number. The comparisons correct the rounded root.
    group = ((tl.sqrt(8.0 * (number // ratio).to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    group = tl.where(ratio * (group * (group + 1) // 2) > number, group - 1, group)
    group = tl.where(ratio * ((group + 1) * (group + 2) // 2) <= number, group + 1, group)
    inside_group = number - ratio * (group * (group + 1) // 2)
    block_row = group * ratio + inside_group // (group + 1)
    block_column = inside_group % (group + 1)
    row = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_column * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the edge, loads read the first rows instead, so that they need no mask. The stores have a mask.
    a_row = row % M if M % BLOCK_M else row
    b_row = column % M if M % BLOCK_N else column
    step: tl.constexpr = M if BY_COLUMNS else 1  # between elements along the contracted axis
    stride: tl.constexpr = 1 if BY_COLUMNS else K
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + batch.to(tl.int64) * (M * K) + a_row[:, None] * stride + k[None, :] * step
    b_at = b_ptr + batch.to(tl.int64) * (M * K) + b_row[None, :] * stride + k[:, None] * step
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(k < K - start)[None, :], other=0.0)
            b = tl.load(b_at, mask=(k < K - start)[:, None], other=0.0)
        total = tl.dot(a, b, total)
        a_at += BLOCK_K * step
        b_at += BLOCK_K * step

    inside = (row < M)[:, None] & (column < M)[None, :]
    out_ptr += batch.to(tl.int64) * (M * M)
    at = row[:, None] * M + column[None, :]
    if FACTORS:
        total *= tl.load(factors_ptr + 3 * batch)
    if ADDEND:
        addend = tl.load(addend_ptr + batch.to(tl.int64) * (M * M) + at, mask=inside, other=0.0).to(
            tl.float32
        )
        if FACTORS:
            addend *= tl.load(factors_ptr + 3 * batch + 1)
        total += addend
    if FACTORS:
        identity = tl.load(factors_ptr + 3 * batch + 2)
        total += tl.where(row[:, None] == column[None, :], identity, 0.0)
    out = total.to(out_ptr.dtype.element_ty)
    mirrored = column[:, None] * M + row[None, :]
    if block_row * BLOCK_M >= (block_column + 1) * BLOCK_N:  # below the diagonal
        tl.store(out_ptr + at, out, mask=inside)
        tl.store(
            out_ptr + mirrored, tl.trans(out), mask=(column < M)[:, None] & (row < M)[None, :]
        )
    elif BLOCK_M == BLOCK_N:
        out = tl.where(row[:, None] >= column[None, :], out, tl.trans(out))
        tl.store(out_ptr + at, out, mask=inside)
    else:
        tl.store(out_ptr + at, out, mask=inside & (row[:, None] >= column[None, :]))
        above = (column[:, None] < row[None, :]) & (row < M)[None, :]
        tl.store(out_ptr + mirrored, tl.trans(out), mask=above)


@dataclass(frozen=True)
class SymmetricTile:
    """The tile sizes of the symmetric product.

    Attributes:
      m, n: rows and columns of an output tile; n is a multiple of m.
      k: length of a step along the contracted axis.
      warps: warps of 32 threads per program.
      stages: stages of the pipeline of loads.
    """

    m: int = 128
    n: int = 128
    k: int = 64
    warps: int = 8
    stages: int = 3


def symmetric_product(
    a: jax.Array,
    b: jax.Array,
    addend: jax.Array | None = None,
    factors: jax.Array | None = None,
    *,
    contract: int = -1,
    tile: SymmetricTile = SymmetricTile(),
) -> jax.Array:
    """`reference.symmetric_product` for 16-bit operands."""
    batch = a.shape[0]
    m, k = a.shape[1:] if contract == -1 else a.shape[:0:-1]
    row_tiles = (i * tile.m // tile.n + 1 for i in range(triton.cdiv(m, tile.m)))
    return launcher.call(
        a,
        b,
        *(jnp.zeros(1, jnp.float32) if term is None else term for term in (addend, factors)),
        kernel=_symmetric_kernel,
        out_type=jax.ShapeDtypeStruct((batch, m, m), a.dtype),
        grid=(batch * sum(row_tiles),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        M=m,
        K=k,
        BY_COLUMNS=contract == -2,
        ADDEND=addend is not None,
        FACTORS=factors is not None,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
    )


def why_not(a: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why the kernel cannot multiply these operands, or None if it can."""
    if a.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"is for 16-bit operands, got {a.dtype}: use 'xla'")
    if a.shape[1] * a.shape[2] >= 2**31:
        return Unavailable(f"is for matrices below 2^31 elements, got {a.shape[1:]}: use 'xla'")
    return None


WHY_NOT = {"symmetric_product": why_not}
