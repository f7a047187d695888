"""Quantizers of blocks with float32 scales: each reads its input once, and writes what both products read."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels.availability import Unavailable
from swjax.kernels.block_formats.reference import Blocks
from swjax.kernels.triton_gpu import launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, to_quantized
from swjax.kernels.triton_gpu.chunks import SMALLEST, range_constants

BLOCK = 128  # values that share a scale, and rows and columns of a program
MOST_ROWS = 65_535 * BLOCK  # CUDA limits the second axis of a grid


@triton.jit
def _scale_and_factor(absmax, LARGEST: tl.constexpr, INVERSE: tl.constexpr):
    """The scale and its reciprocal; NaN for a block with a non-finite element."""
    absmax = tl.where(absmax < float("inf"), tl.maximum(absmax, SMALLEST), float("nan"))
    return absmax * INVERSE, tl.div_rn(tl.full(absmax.shape, LARGEST, tl.float32), absmax)


@triton.jit
def _quantize_blocks_kernel(
    x_ptr,  # [M, N]
    values_ptr,  # [M, N]
    scale_ptr,  # segments: [N / BLOCK, M]; squares: [M / BLOCK, N / BLOCK]
    transposed_ptr,  # [N, M]
    transposed_scale_ptr,  # [M / BLOCK, N]
    M: tl.constexpr,
    N: tl.constexpr,
    SQUARES: tl.constexpr,  # whether BLOCK x BLOCK elements share a scale
    STRAIGHT: tl.constexpr,  # whether to write the values, for sums over N
    TRANSPOSED: tl.constexpr,  # whether to write their transpose, for sums over M
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantizes BLOCK x BLOCK elements."""
    row = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    at = row[:, None] * N + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    across = column[:, None].to(tl.int64) * M + row[None, :]
    if SQUARES:
        absmax = tl.reduce(tl.reduce(tl.abs(x), 1, nan_maximum), 0, nan_maximum)
        scale, factor = _scale_and_factor(absmax, LARGEST, INVERSE)
        tl.store(scale_ptr + tl.program_id(1) * (N // BLOCK) + tl.program_id(0), scale)
        values = to_quantized(x * factor, values_ptr.dtype.element_ty)
        tl.store(values_ptr + at, values, mask=inside)
        tl.store(transposed_ptr + across, tl.trans(values), mask=tl.trans(inside))
    else:
        if STRAIGHT:
            scale, factor = _scale_and_factor(
                tl.reduce(tl.abs(x), 1, nan_maximum), LARGEST, INVERSE
            )
            tl.store(scale_ptr + tl.program_id(0) * M + row, scale, mask=row < M)
            values = to_quantized(x * factor[:, None], values_ptr.dtype.element_ty)
            tl.store(values_ptr + at, values, mask=inside)
        if TRANSPOSED:
            scale, factor = _scale_and_factor(
                tl.reduce(tl.abs(x), 0, nan_maximum), LARGEST, INVERSE
            )
            tl.store(transposed_scale_ptr + tl.program_id(1) * N + column, scale, mask=column < N)
            values = to_quantized(x * factor[None, :], transposed_ptr.dtype.element_ty)
            tl.store(transposed_ptr + across, tl.trans(values), mask=tl.trans(inside))


def quantize_segments(
    x: jax.Array, *, axes: tuple[int, ...], dtype: str, block: int
) -> tuple[Blocks, ...]:
    """`reference.quantize_segments` for segments of 128."""
    found = _quantize(x.reshape(-1, x.shape[-1]), dtype, squares=False, axes=axes)
    if -1 in axes:
        values, scales, _ = found[-1]
        scales = scales.reshape(*x.shape[:-1], -1)
        found[-1] = Blocks(values.reshape(x.shape), scales, jnp.ones((1,) * x.ndim))
    return tuple(found[axis] for axis in axes)


def quantize_squares(w: jax.Array, *, dtype: str, block: int) -> tuple[Blocks, Blocks]:
    """`reference.quantize_squares` for squares of 128."""
    found = _quantize(w, dtype, squares=True, axes=(0, -1))
    return found[0], found[-1]


def _quantize(
    x: jax.Array, dtype: str, *, squares: bool, axes: tuple[int, ...]
) -> dict[int, Blocks]:
    """Blocks of a matrix for sums over its last axis (-1) and its rows (0): those in `axes`."""
    (m, n), straight, transposed = x.shape, -1 in axes, 0 in axes
    scales = (m // BLOCK, n // BLOCK) if squares else (n // BLOCK, m)
    values, scale, values_t, scale_t = launcher.call(
        x,
        kernel=_quantize_blocks_kernel,
        out_type=(
            launcher.output(straight, (m, n), dtype),
            launcher.output(straight, scales, jnp.float32),
            launcher.output(transposed, (n, m), dtype),
            launcher.output(transposed and not squares, (m // BLOCK, n), jnp.float32),
        ),
        grid=(triton.cdiv(n, BLOCK), triton.cdiv(m, BLOCK)),
        num_warps=8,
        M=m,
        N=n,
        SQUARES=squares,
        STRAIGHT=straight,
        TRANSPOSED=transposed,
        BLOCK=BLOCK,
        **range_constants(dtype),
    )
    one = jnp.ones((1, 1))
    if squares:
        return {-1: Blocks(values, scale, one), 0: Blocks(values_t, scale.T, one)}
    found = {-1: Blocks(values, scale.T, one), 0: Blocks(values_t, scale_t.T, one)}
    return {axis: found[axis] for axis in axes}


def why_not(
    x: jax.Array, *, dtype: str, block: int, axes: tuple[int, ...] = (-1, 0)
) -> Unavailable | None:
    """Why a kernel cannot quantize blocks of x; None: it can."""
    if not dtype.startswith("float8") or block != BLOCK:
        return Unavailable(f"is for fp8 and blocks of {BLOCK}, got {dtype} and {block}: use 'xla'")
    m, n = x.size // x.shape[-1], x.shape[-1]
    if m > MOST_ROWS or (-1 in axes and n % BLOCK) or (0 in axes and m % BLOCK):
        return Unavailable(
            f"needs blocks of {BLOCK} that divide axes {axes}, and up to {MOST_ROWS} rows, got {m} x {n}: "
            "use 'xla'"
        )
    return None


WHY_NOT = {"quantize_segments": why_not, "quantize_squares": why_not}
