"""Attention backward of short sequences, for Hopper.

One block of threads stays on each multiprocessor and processes one head after the other. Queries, keys,
values and gradients of a head stay in shared memory, in tiles of ROWS tokens. First the rows of products are
queries, then they are keys; each row loops over all columns. So every sum stays in registers and has a fixed
order::

    queries    s = q k^T, dp = g v^T, ds = exp(s - lse) (dp - delta), dq += ds k
    keys       the same, transposed; dv += exp(s - lse)^T g, dk += ds^T q

One warpgroup copies. The others compute; each processes every second tile, or every third::

    keys_full[tile], queries_full[tile]      copies have arrived           memory -> compute warpgroups
    keys_empty[tile], queries_empty[tile]    all have read the tile        compute -> memory warpgroup
    out_full[warpgroup], out_empty[...]      the same for tiles of out, which only delta needs
    exchange                                 all have written their delta  compute -> compute warpgroups
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.mosaic_gpu import attention_heads
from swjax.kernels.mosaic_gpu.attention_copies import Buffers, Variant
from swjax.kernels.mosaic_gpu.attention_heads import ROWS, Heads
from swjax.kernels.mosaic_gpu.attention_products import Backward

SMALL = 128 * 1024  # bytes of an array below which TMA copies packed rows past the end of an example
SHARED_MEMORY = 227 * 1024  # bytes of a block of threads


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    gradient: jax.Array,
    *,
    causal: bool = False,
    variant: Variant | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.attention_backward` without a causal mask.

    Args:
      q, k, v, out, lse, gradient, causal: of the operation.
      variant: how a block of threads divides its work; None for `usual`.
      multiprocessors, interpret: for tests.
    """
    del causal
    _, tokens, _, width = q.shape
    variant = variant or usual(tokens)
    blocks = multiprocessors or tiles.multiprocessors()
    span, padded = attention_heads.span(tokens), attention_heads.padded(tokens)
    count = pl.cdiv(span, ROWS)
    compute, slots = min(variant.compute, count), variant.slots
    variant = dataclasses.replace(variant, compute=compute)
    pieces = attention_heads.pieces(width, variant.line)
    interpreted = interpret is not None
    shape, few = q.shape, q.shape[0]
    more = ((0, max(few, pl.cdiv(SMALL, q.size // few * 2)) - few), (0, 0), (0, 0), (0, 0))
    q, k, v, out, gradient = (jnp.pad(x, more) for x in (q, k, v, out, gradient))

    def attention_backward_kernel(q, k, v, out, g, lse, dq, dk, dv, *buffers):
        block = lax.axis_index("block")
        heads = Heads(shape, blocks, block, compute, interpreted)
        work = Backward(heads, q, k, v, out, g, lse, dq, dk, dv, Buffers(*buffers), variant, pieces)
        attention_heads.specialize(compute, work.copy, work.compute)

    operand = tuple(piece.buffer((slots, span), q.dtype) for piece in pieces)
    tile = plgpu.SMEM((compute, ROWS, width), q.dtype)
    vector, two_vectors = (plgpu.SMEM((n, padded), jnp.float32) for n in (slots + 1, 2))
    copies = 2 * sum(attention_heads.copies(piece) for piece in pieces)
    full = plgpu.Barrier(num_barriers=slots * count, num_arrivals=copies)
    buffers = Buffers(
        q=operand,
        k=operand,
        v=operand,
        g=operand,
        out=tile,
        results=tile,
        lse=vector,
        delta=two_vectors,
        last=(two_vectors,) * (2 * variant.lone),
        keys_full=full,
        queries_full=full,
        keys_empty=plgpu.Barrier(num_barriers=slots * count, num_arrivals=compute),
        queries_empty=plgpu.Barrier(num_barriers=slots * count, num_arrivals=count),
        lse_full=plgpu.Barrier(num_barriers=slots + 1),
        out_full=plgpu.Barrier(num_barriers=compute),
        out_empty=plgpu.Barrier(num_barriers=compute),
        exchange=plgpu.Barrier(num_arrivals=compute),
        last_full=plgpu.Barrier(num_arrivals=compute),
    )
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    run = attention_heads.kernel(
        attention_backward_kernel,
        (like_q,) * 3,
        buffers,
        blocks=blocks,
        compute=compute,
        interpret=interpret,
    )
    padding = ((0, 0), (0, 0), (0, padded - tokens))
    lse = jnp.pad(lse * jnp.float32(attention_heads.LOG2_E), padding, constant_values=jnp.inf)
    return tuple(x[:few] for x in run(q, k, v, out, gradient, lse))


def usual(tokens: int) -> Variant:
    """The variant with the fewest spilled registers; times are not known."""
    return Variant(columns=(128 if attention_heads.span(tokens) % 128 <= ROWS else 64, 64))


def shared_memory(tokens: int, width: int, variant: Variant) -> int:
    """Bytes of shared memory of a block of threads."""
    span, padded = attention_heads.span(tokens), attention_heads.padded(tokens)
    operands = 4 * 2 * variant.slots * span * width
    return operands + 4 * variant.compute * ROWS * width + 8 * (variant.slots + 1) * padded + 1024


def why_not(q: jax.Array, *_: Any, causal: bool = False, **__: Any) -> Unavailable | None:
    """Why `attention_backward` cannot differentiate attention of these queries; None: it can."""
    tokens, width = q.shape[1], q.shape[3]
    if jax.__version_info__ < (0, 11):
        return Unavailable("needs jax 0.11: use 'triton'")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"needs a 16-bit dtype, got {q.dtype}: use 'xla'")
    if causal:
        return Unavailable("has no causal mask: use 'triton'")
    if width % 16 or not 16 <= width <= 128:
        return Unavailable(
            f"supports heads of 16 to 128 features, a multiple of 16, got {width}: use 'triton'"
        )
    if tokens > tiles.LONGEST_SEQUENCE or (shared_memory(tokens, width, Variant()) > SHARED_MEMORY):
        return Unavailable(
            f"keeps a head in shared memory, which {tokens} tokens of {width} features exceed: "
            "use 'triton'"
        )
    return None
