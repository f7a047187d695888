"""Symmetric products: one triangle of tiles is computed, and written to both triangles."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels.availability import Unavailable
from swjax.kernels.products.triton import sum_of_products
from swjax.kernels.triton_gpu import launcher

TILE = 128  # rows and columns of an output tile
STEP = 64  # elements of a step along the contracted axis


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
    BLOCK_K: tl.constexpr,
):
    """Computes a tile on or below the diagonal, and writes it and its transpose."""
    blocks: tl.constexpr = tl.cdiv(M, BLOCK_M)
    pairs: tl.constexpr = blocks * (blocks + 1) // 2
    batch = tl.program_id(0) // pairs
    number = tl.program_id(0) % pairs
    # Tiles are numbered row by row. The comparisons correct a square root that is rounded up or down.
    block_row = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    block_row = tl.where(block_row * (block_row + 1) // 2 > number, block_row - 1, block_row)
    block_row = tl.where((block_row + 1) * (block_row + 2) // 2 <= number, block_row + 1, block_row)
    block_column = number - block_row * (block_row + 1) // 2
    row = block_row * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_column * BLOCK_M + tl.arange(0, BLOCK_M)
    # Past the edge, loads read the first rows instead, so that they need no mask. The stores have a mask.
    a_row = row % M if M % BLOCK_M else row
    b_row = column % M if M % BLOCK_M else column
    step: tl.constexpr = M if BY_COLUMNS else 1  # between elements along the contracted axis
    stride: tl.constexpr = 1 if BY_COLUMNS else K
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + batch.to(tl.int64) * (M * K) + a_row[:, None] * stride + k[None, :] * step
    b_at = b_ptr + batch.to(tl.int64) * (M * K) + b_row[None, :] * stride + k[:, None] * step
    total = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    total = sum_of_products(a_at, b_at, total, k, K, BLOCK_K, step, step)
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
    if block_row == block_column:
        total = tl.where(row[:, None] >= column[None, :], total, tl.trans(total))
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=inside)
    if block_row != block_column:
        mirrored = column[:, None] * M + row[None, :]
        tl.store(out_ptr + mirrored, tl.trans(out), mask=(column < M)[:, None] & (row < M)[None, :])


def symmetric_product(
    a: jax.Array,
    b: jax.Array,
    addend: jax.Array | None = None,
    factors: jax.Array | None = None,
    *,
    contract: int = -1,
) -> jax.Array:
    """`reference.symmetric_product` for 16-bit operands."""
    batch = a.shape[0]
    m, k = a.shape[1:] if contract == -1 else a.shape[:0:-1]
    blocks = triton.cdiv(m, TILE)
    return launcher.call(
        a,
        b,
        *(jnp.zeros(1, jnp.float32) if term is None else term for term in (addend, factors)),
        kernel=_symmetric_kernel,
        out_type=jax.ShapeDtypeStruct((batch, m, m), a.dtype),
        grid=(batch * (blocks * (blocks + 1) // 2),),
        num_warps=8,
        num_stages=3,
        M=m,
        K=k,
        BY_COLUMNS=contract == -2,
        ADDEND=addend is not None,
        FACTORS=factors is not None,
        BLOCK_M=TILE,
        BLOCK_K=STEP,
    )


def why_not(a: jax.Array, *_: Any, contract: int = -1, **__: Any) -> Unavailable | None:
    """Returns why the kernel cannot multiply these operands, or None if it can."""
    if a.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"is for 16-bit operands, got {a.dtype}: use 'xla'")
    if a.shape[1 if contract == -1 else 2] * max(a.shape[1:]) >= 2**31:
        return Unavailable(f"is for matrices below 2^31 elements, got {a.shape[1:]}: use 'xla'")
    return None


WHY_NOT = {"symmetric_product": why_not}
