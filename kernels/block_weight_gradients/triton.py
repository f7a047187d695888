"""The int8 weight gradient of rotated tokens, with one scale per column and block of tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels.availability import Unavailable
from swjax.kernels.block_weight_gradients.reference import cut_into_blocks
from swjax.kernels.rotations.reference import rotation_matrix
from swjax.kernels.triton_gpu import launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, to_quantized
from swjax.kernels.triton_gpu.chunks import SMALLEST, range_constants

ROTATION = 128  # tokens per rotation; a block is a multiple of it
COLUMNS = 64  # columns per quantizing program
TILE = 128  # output rows and columns per multiplying program, and tokens per step
MOST_TOKENS = 2**24  # TILE times as many is the largest 32-bit offset within a tile


@triton.jit
def rotated_tokens(
    x_ptr, present_ptr, h, row, column, begin, end, N: tl.constexpr, ALL: tl.constexpr
):  # fmt: skip
    """Rotates some tokens of x: float32 [columns, rotated tokens], with zeros before token `begin`, from
    token `end` on and, unless ALL, for tokens that are absent."""
    known = (row >= begin) & (row < end)
    if not ALL:
        known &= tl.load(present_ptr + row, mask=known, other=0.0) != 0
    inside = known[:, None] & (column < N)[None, :]
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * N + column[None, :], mask=inside, other=0.0)
    return tl.dot(tl.trans(x), h)


@triton.jit
def _weight_gradient_rotation_kernel(
    x_ptr,  # [M, N]
    rotation_ptr,  # [ROTATION, ROTATION]: token, rotated token
    present_ptr,  # [M]; not read if ALL tokens are present
    values_ptr,  # [N, BLOCKS * LENGTH]
    scale_ptr,  # [BLOCKS, N]
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    LENGTH: tl.constexpr,  # tokens per block
    ROTATION: tl.constexpr,
    ALL: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rotates, transposes and quantizes some columns of one block of tokens.

    The kernel rotates twice, for the maxima and for the values, because a block of rotated tokens would not
    fit into registers. The second time x comes from the L2 cache.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * LENGTH
    token = tl.arange(0, ROTATION)
    h = tl.load(rotation_ptr + token[:, None] * ROTATION + token[None, :])
    known = column < N
    largest = tl.zeros((BLOCK_N, ROTATION), tl.float32)
    for start in range(0, LENGTH, ROTATION):
        row = first + start + token
        rotated = rotated_tokens(x_ptr, present_ptr, h, row, column, 0, M, N, ALL)
        largest = nan_maximum(largest, tl.abs(rotated))
    absmax = tl.reduce(largest, 1, nan_maximum)
    absmax = nan_maximum(absmax, tl.full(absmax.shape, SMALLEST, tl.float32))
    tl.store(scale_ptr + tl.program_id(1) * N + column, absmax * INVERSE, mask=known)
    factor = tl.div_rn(tl.full(absmax.shape, LARGEST, tl.float32), absmax)[:, None]
    for start in range(0, LENGTH, ROTATION):
        row = first + start + token
        rotated = rotated_tokens(x_ptr, present_ptr, h, row, column, 0, M, N, ALL)
        values = to_quantized(rotated * factor, values_ptr.dtype.element_ty)
        at = column[:, None].to(tl.int64) * (BLOCKS * LENGTH) + row[None, :]
        tl.store(values_ptr + at, values, mask=known[:, None])


@triton.jit
def _weight_gradient_blocks_kernel(
    a_ptr,  # [M, BLOCKS * LENGTH]
    b_ptr,  # [N, BLOCKS * LENGTH]
    a_scale_ptr,  # [BLOCKS, M]
    b_scale_ptr,  # [BLOCKS, N]
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    LENGTH: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes a tile of a bT times FACTOR: int32 sums within a block of tokens, float32 sums over blocks."""
    tokens: tl.constexpr = BLOCKS * LENGTH
    first_row, first_column = tl.program_id(1) * BLOCK_M, tl.program_id(0) * BLOCK_N
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    # Past the edge, loads read the last rows instead, so that they need no mask. The store has a mask.
    a_row, b_row = tl.minimum(row, M - 1), tl.minimum(column, N - 1)
    # One moving pointer per operand with fixed 32-bit offsets, because a pointer per element would spill.
    a_ptr += first_row.to(tl.int64) * tokens
    b_ptr += first_column.to(tl.int64) * tokens
    k = tl.arange(0, BLOCK_K)
    a_at = (a_row - first_row)[:, None] * tokens + k[None, :]
    b_at = (b_row - first_column)[None, :] * tokens + k[:, None]
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(BLOCKS):
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for _ in range(0, LENGTH, BLOCK_K):
            total = tl.dot(tl.load(a_ptr + a_at), tl.load(b_ptr + b_at), total, out_dtype=tl.int32)
            a_ptr += BLOCK_K
            b_ptr += BLOCK_K
        a_scale = tl.load(a_scale_ptr + block * M + a_row)[:, None]
        b_scale = tl.load(b_scale_ptr + block * N + b_row)[None, :]
        out += total.to(tl.float32) * (a_scale * b_scale)
    inside = (row < M)[:, None] & (column < N)[None, :]
    at = row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out_ptr + at, (out * FACTOR).to(out_ptr.dtype.element_ty), mask=inside)


def block_weight_gradient(
    x: jax.Array,
    g: jax.Array,
    present: jax.Array | None = None,
    *,
    dtypes: tuple[str, str],
    block: int,
    rotation: int,
    out_dtype: str,
) -> jax.Array:
    """`reference.block_weight_gradient` for 16-bit operands in int8, with rotations of 128 tokens."""
    cut = dict(zip(("BLOCKS", "LENGTH"), cut_into_blocks(x.shape[0], block, rotation)))
    (a, a_scale), (b, b_scale) = (
        quantize_rotated_blocks(operand, present, dtype, **cut)
        for operand, dtype in zip((x, g), dtypes)
    )
    m, n = x.shape[1], g.shape[1]
    return launcher.call(
        a,
        b,
        a_scale,
        b_scale,
        kernel=_weight_gradient_blocks_kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(triton.cdiv(n, TILE), triton.cdiv(m, TILE)),
        num_warps=8,
        num_stages=3,
        M=m,
        N=n,
        FACTOR=1 / rotation,  # exact: each operand has a factor sqrt(rotation)
        BLOCK_M=TILE,
        BLOCK_N=TILE,
        BLOCK_K=TILE,
        **cut,
    )


def quantize_rotated_blocks(
    x: jax.Array, present: jax.Array | None, dtype: str, *, BLOCKS: int, LENGTH: int
) -> tuple[jax.Array, jax.Array]:
    """Rotates the present tokens of x [tokens, n], pads them with zeros to BLOCKS * LENGTH, and quantizes.

    Returns:
      Values [n, BLOCKS * LENGTH] and scales [BLOCKS, n].
    """
    tokens, n = x.shape
    return launcher.call(
        x,
        jnp.asarray(rotation_matrix(ROTATION).T, x.dtype),
        x if present is None else present,
        kernel=_weight_gradient_rotation_kernel,
        out_type=(
            jax.ShapeDtypeStruct((n, BLOCKS * LENGTH), dtype),
            jax.ShapeDtypeStruct((BLOCKS, n), jnp.float32),
        ),
        grid=(triton.cdiv(n, COLUMNS), BLOCKS),
        num_warps=4,
        num_stages=4,
        M=tokens,
        N=n,
        BLOCKS=BLOCKS,
        LENGTH=LENGTH,
        ROTATION=ROTATION,
        ALL=present is None,
        BLOCK_N=COLUMNS,
        **range_constants(dtype),
    )


def why_not(
    x: jax.Array, *_: jax.Array, dtypes: tuple[str, str], rotation: int, **options: Any
) -> Unavailable | None:
    """Returns why `block_weight_gradient` cannot multiply these operands, or None if it can."""
    del options  # other arrays have the dtype of x
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"is for 16-bit operands, got {x.dtype}: use 'xla'")
    if dtypes != ("int8", "int8") or rotation != ROTATION:
        return Unavailable(
            f"is for int8 and rotation={ROTATION}, got {dtypes} and rotation={rotation}: use 'xla'"
        )
    if x.shape[0] > MOST_TOKENS:
        return Unavailable(f"supports up to {MOST_TOKENS} tokens, got {x.shape[0]}: use 'xla'")
    return None


WHY_NOT = {"block_weight_gradient": why_not}
