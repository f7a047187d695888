"""The cross-entropy of logits: one program for each token, which reads its logits twice."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.cross_entropy.reference import is_class
from swjax.kernels.triton_gpu import launcher
from swjax.kernels.triton_gpu.arithmetic import round_to

# The initial maximum: finite, because the difference of two infinities is NaN.
LOWEST: tl.constexpr = tl.constexpr(-1e30)
# For a row; the fastest of seven pairs on an H200: benchmarks/notes/language.md.
MOST_WARPS, MOST_PIECES = 8, 4


@triton.jit
def _load(x_ptr, start, V: tl.constexpr, PIECES: tl.constexpr, CHUNK: tl.constexpr):
    """Loads logits from `start` on in fp32, minus infinity past the edge; returns their columns too."""
    column = start + tl.arange(0, PIECES)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    if V % (PIECES * CHUNK) == 0:
        return column, tl.load(x_ptr + column).to(tl.float32)
    else:
        x = tl.load(x_ptr + column, mask=column < V, other=float("-inf"))
        return column, x.to(tl.float32)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # [M, V]
    labels_ptr,  # [M], -1 for no class
    where_ptr,  # [M]
    losses_ptr,  # [M]
    gradient_ptr,  # [M, V]
    V: tl.constexpr,
    PIECES: tl.constexpr,
    CHUNK: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """Computes the loss of a token, and its gradient by the logits.

    A thread reads the same columns of each of the PIECES of CHUNK columns. It keeps the maximum of its
    logits and the sum of their exponentials relative to that maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * V
    label, counts = tl.load(labels_ptr + row), tl.load(where_ptr + row) != 0
    largest = tl.full((CHUNK,), LOWEST, tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    span: tl.constexpr = PIECES * CHUNK
    for start in tl.range(0, V, span):
        _, x = _load(x_ptr, start, V, PIECES, CHUNK)
        above = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(x - above[None, :]), 0)
        largest = above
    above = tl.max(largest, 0)
    lse = above + tl.log(tl.sum(total * tl.exp(largest - above), 0))
    own = tl.load(x_ptr + label, mask=label >= 0, other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(counts, lse - own, 0.0))
    if GRADIENT:
        # Backwards, because the L2 cache has the last columns.
        blocks: tl.constexpr = tl.cdiv(V, span)
        for block in tl.range(0, blocks):
            column, x = _load(x_ptr, (blocks - 1 - block) * span, V, PIECES, CHUNK)
            slope = tl.exp(x - lse) - tl.where(column == label, 1.0, 0.0)
            slope = round_to(tl.where(counts, slope, 0.0), gradient_ptr.dtype.element_ty)[0]
            if V % span == 0:
                tl.store(gradient_ptr + row * V + column, slope)
            else:
                tl.store(gradient_ptr + row * V + column, slope, mask=column < V)


def cross_entropy(
    logits: jax.Array, labels: jax.Array, where: jax.Array, *, gradient: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """`reference.cross_entropy`."""
    v = logits.shape[-1]
    vector = 16 // logits.dtype.itemsize  # elements per thread of a load of 16 bytes
    warps = max(1, min(MOST_WARPS, tiles.power_above(v) // (32 * vector)))
    chunk = warps * 32 * vector
    pieces = max(1, min(MOST_PIECES, tiles.power_above(v) // chunk))
    losses, slopes = launcher.call(
        logits,
        jnp.where(is_class(labels, v), labels, -1).astype(jnp.int32),
        where.astype(jnp.int32),
        kernel=_cross_entropy_kernel,
        out_type=(
            jax.ShapeDtypeStruct(labels.shape, jnp.float32),
            launcher.output(gradient, logits.shape, logits.dtype),
        ),
        grid=(labels.size,),
        num_warps=warps,
        V=v,
        PIECES=pieces,
        CHUNK=chunk,
        GRADIENT=gradient,
    )
    return losses, slopes if gradient else None


# Operations without an entry accept all arguments.
WHY_NOT: dict[str, Callable] = {}
