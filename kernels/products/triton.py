"""The quantized product."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels.formats import QTensor
from swjax.kernels.products import tiles
from swjax.kernels.triton_gpu import launcher


@triton.jit
def program_block(
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, program,
):  # fmt: skip
    """The row and the column of a program's output block, in an order that reuses the L2 cache."""
    blocks_m: tl.constexpr = tl.cdiv(M, BLOCK_M)
    blocks_n: tl.constexpr = tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * blocks_n) * GROUP
    height = min(blocks_m - first, GROUP)
    block_m = first + program % (GROUP * blocks_n) % height
    return block_m, program % (GROUP * blocks_n) // height


@triton.jit
def sum_of_products(
    a_at, b_at, total, k, K: tl.constexpr, BLOCK_K: tl.constexpr, A_STEP: tl.constexpr,
    B_STEP: tl.constexpr,
):  # fmt: skip
    """Adds the products of the blocks of a [rows, K] and b [K, columns] to `total`.

    Args:
      a_at, b_at: pointers to the first blocks.
      total: [rows, columns] int32 or fp32.
      k: indices of a block along the contracted axis.
      K: length of the contracted axis.
      BLOCK_K: length of a block.
      A_STEP, B_STEP: distances in memory between neighbours along the contracted axis.
    """
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(k < K - start)[None, :], other=0.0)
            b = tl.load(b_at, mask=(k < K - start)[:, None], other=0.0)
        total = tl.dot(a, b, total, out_dtype=total.dtype)
        a_at += BLOCK_K * A_STEP
        b_at += BLOCK_K * B_STEP
    return total


@triton.jit
def load_scale(scale_ptr, at, SIZE: tl.constexpr, PER_ELEMENT: tl.constexpr, AXIS: tl.constexpr):
    """Loads scales at some indices along axis AXIS of a block, or the only scale."""
    if PER_ELEMENT:
        return tl.expand_dims(tl.load(scale_ptr + at, mask=at < SIZE, other=0.0), 1 - AXIS)
    else:
        return tl.load(scale_ptr + tl.zeros((1, 1), tl.int32))


@triton.jit
def _matmul_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [N, K]
    a_scale_ptr,  # [M] or [1]
    b_scale_ptr,  # [N] or [1]
    bias_ptr,  # [N]
    addend_ptr,  # [M, N]
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_ROWS: tl.constexpr,  # whether a has one scale per row, rather than one scale
    B_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    ADDEND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # number of row blocks that share columns of b in the L2 cache
):
    """Computes a block of a bT, scaled, plus bias and addend."""
    block_m, block_n = program_block(M, N, BLOCK_M, BLOCK_N, GROUP, tl.program_id(0))
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the edge, loads read the first rows instead, so that they need no mask. The store has a mask.
    a_row = (row % M if M % BLOCK_M else row).to(tl.int64)
    b_row = (column % N if N % BLOCK_N else column).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + a_row[:, None] * K + k[None, :]
    b_at = b_ptr + b_row[None, :] * K + k[:, None]
    integer: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    total_type: tl.constexpr = tl.int32 if integer else tl.float32
    total = tl.zeros((BLOCK_M, BLOCK_N), total_type)
    total = sum_of_products(a_at, b_at, total, k, K, BLOCK_K, 1, 1)
    a_scale = load_scale(a_scale_ptr, row, M, A_ROWS, 0)
    b_scale = load_scale(b_scale_ptr, column, N, B_ROWS, 1)
    out = total.to(tl.float32) * (a_scale * b_scale)
    if BIAS:
        out += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    inside = (row < M)[:, None] & (column < N)[None, :]
    at = row[:, None].to(tl.int64) * N + column[None, :]
    if ADDEND:
        out += tl.load(addend_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def matmul(
    a: QTensor,
    b: QTensor,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
    tile: tiles.TritonTile | None = None,
) -> jax.Array:
    """`reference.matmul`."""
    a, b = (q.T if axis == 0 else q for q, axis in zip((a, b), contract))
    k = a.values.shape[-1]
    m, n = a.values.size // k, b.values.shape[0]
    tile = tile or tiles.triton_tile(m, n, k)
    y = launcher.call(
        a.values.reshape(m, k),
        b.values,
        a.scale.reshape(-1),
        b.scale.reshape(-1),
        *(jnp.zeros(1, jnp.float32) if term is None else term for term in (bias, addend)),
        kernel=_matmul_kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        M=m,
        N=n,
        K=k,
        A_ROWS=a.scale.size > 1,
        B_ROWS=b.scale.size > 1,
        BIAS=bias is not None,
        ADDEND=addend is not None,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP=tile.group,
    )
    return y.reshape(*a.values.shape[:-1], n)


WHY_NOT: dict = {}  # it accepts all arguments
