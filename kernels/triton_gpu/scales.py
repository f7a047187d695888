"""Quantizes a matrix with known absolute maxima: straight, transposed, or both."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import reference
from swjax.kernels.availability import Unavailable
from swjax.kernels.reference import INVERSE, LARGEST, QTensor
from swjax.kernels.triton_gpu import launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, to_quantized
from swjax.kernels.triton_gpu.chunks import SMALLEST

BLOCK = 64  # rows and columns per program


@triton.jit
def _quantize_by_kernel(
    x_ptr,  # [M, N]
    absmax_ptr,  # [PARTS], [M] or [N]
    values_ptr,  # [M, N]
    transposed_ptr,  # [N, M]
    scale_ptr,  # [1], [M] or [N]
    M: tl.constexpr,
    N: tl.constexpr,
    SCOPE: tl.constexpr,  # span of one scale: "tensor", "row" or "column"
    PARTS: tl.constexpr,  # number of parts of a tensor, each with its maximum
    STRAIGHT: tl.constexpr,  # whether to write the values
    TRANSPOSED: tl.constexpr,  # whether to write their transpose
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Quantizes a block of x; the first block of each scale writes the scale."""
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < M)[:, None] & (column < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCOPE == "tensor":
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        at, known = tl.zeros((1,), tl.int64), tl.full((1,), True, tl.int1)
        largest = tl.reduce(tl.load(absmax_ptr + tl.arange(0, PARTS)), 0, nan_maximum)
        absmax = tl.zeros((1,), tl.float32) + largest
    else:
        if SCOPE == "row":
            first = tl.program_id(0) == 0
            at, known = row, row < M
        else:
            first = tl.program_id(1) == 0
            at, known = column.to(tl.int64), column < N
        absmax = tl.load(absmax_ptr + at, mask=known, other=1.0)
    absmax = nan_maximum(absmax, tl.full(absmax.shape, SMALLEST, tl.float32))
    if first:
        tl.store(scale_ptr + at, absmax * INVERSE, mask=known)
    factor = tl.div_rn(tl.full(absmax.shape, LARGEST, tl.float32), absmax)
    factor = factor[:, None] if SCOPE == "row" else factor[None, :]
    if STRAIGHT:
        values = to_quantized(x * factor, values_ptr.dtype.element_ty)
        tl.store(values_ptr + row[:, None] * N + column[None, :], values, mask=inside)
    if TRANSPOSED:
        values = to_quantized(x * factor, transposed_ptr.dtype.element_ty)
        at = column[:, None].to(tl.int64) * M + row[None, :]
        tl.store(transposed_ptr + at, tl.trans(values), mask=tl.trans(inside))


def quantize_by(
    x: jax.Array, absmax: jax.Array, dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """`reference.quantize_by` for row-wise scales, one scale, or scales along the last axis."""
    if absmax.size == 1:
        scope = "tensor"
    else:
        scope = "row" if absmax.shape[-1] == 1 else "column"
    outputs = {"straight": not transpose, "transposed": transpose}
    values, transposed, scale = _quantize_matrix(x, absmax, dtype, scope, **outputs)
    scale = scale.reshape(absmax.shape)
    return QTensor(transposed, scale.T) if transpose else QTensor(values.reshape(x.shape), scale)


def why_not_quantize_by(x: jax.Array, absmax: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why `quantize_by` cannot use scales of this shape, or None if it can."""
    *rows, n = x.shape
    ones = (1,) * len(rows)
    if absmax.shape not in ((*ones, 1), (*rows, 1), (*ones, n)):
        return Unavailable(
            f"supports one scale, or one per row or column, got absmax {absmax.shape}: use 'xla'"
        )
    return None


def quantize_both(x: jax.Array, absmax: jax.Array, dtype: str = "int8") -> tuple[QTensor, QTensor]:
    """`reference.quantize_both`."""
    if absmax.size & (absmax.size - 1):  # Triton needs power-of-two sizes
        absmax = reference.absolute_maximum(absmax, (0,))
    outputs = {"straight": True, "transposed": True}
    values, transposed, scale = _quantize_matrix(x, absmax, dtype, "tensor", **outputs)
    scale = scale.reshape(1, 1)
    return QTensor(values, scale), QTensor(transposed, scale)


def _quantize_matrix(
    x: jax.Array, absmax: jax.Array, dtype: str, scope: str, *, straight: bool, transposed: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes the rows of x: values [m, n], transposed values [n, m], as far as requested, and scales.

    Args:
      x: [..., n].
      absmax: one per row or column, or the maxima of parts of a tensor.
      dtype: dtype of the values.
      scope: span of one scale: "row", "column" or "tensor".
      straight: whether to compute the values.
      transposed: whether to compute their transpose.
    """
    matrix = x.reshape(-1, x.shape[-1])
    m, n = matrix.shape
    return launcher.call(
        matrix,
        absmax.reshape(-1),
        kernel=_quantize_by_kernel,
        out_type=(
            jax.ShapeDtypeStruct((m, n) if straight else (1,), dtype),
            jax.ShapeDtypeStruct((n, m) if transposed else (1,), dtype),
            jax.ShapeDtypeStruct((1 if scope == "tensor" else absmax.size,), jnp.float32),
        ),
        grid=(triton.cdiv(n, BLOCK), triton.cdiv(m, BLOCK)),
        num_warps=4,
        M=m,
        N=n,
        SCOPE=scope,
        PARTS=absmax.size,
        STRAIGHT=straight,
        TRANSPOSED=transposed,
        LARGEST=LARGEST[dtype],
        INVERSE=INVERSE[dtype],
        BLOCK_M=BLOCK,
        BLOCK_N=BLOCK,
    )
