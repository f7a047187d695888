"""Attention backward of short sequences, for Hopper.

One block of threads stays on each multiprocessor and processes one head after the other. Queries, keys,
values and gradients of a head stay in shared memory, in tiles of 64 tokens. First the rows of products are
queries, then they are keys; each tile of rows loops over all columns. So every sum stays in registers and has
a fixed order::

    queries    s = q k^T, dp = g v^T, ds = exp(s - lse) (dp - delta), dq += ds k
    keys       the same, transposed; dv += exp(s - lse)^T g, dk += ds^T q

A sequence of 257 tokens has four whole tiles and a rest of one token, whose gradients are products of
transposed tiles. One of 99 tokens has two whole tiles, and the second one begins in the first. One warpgroup
copies (`backward_copies`). Two compute, each every second tile (`backward_products`)::

    keys_full[tile], queries_full[tile]      copies have arrived           memory -> compute warpgroups
    keys_empty[tile], queries_empty[tile]    all have read the tile        compute -> memory warpgroup
    out_full[warpgroup], out_empty[...]      the same for tiles of out, which only delta needs
    exchange                                 both have written their delta compute -> compute warpgroups
    rest_full                                sums of the rest are written  first -> second compute warpgroup
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.attention.mosaic_gpu import backward_heads
from swjax.kernels.attention.mosaic_gpu.backward_copies import allocate, shared_memory
from swjax.kernels.attention.mosaic_gpu.backward_heads import Heads
from swjax.kernels.attention.mosaic_gpu.backward_products import BackwardWork
from swjax.kernels.attention.mosaic_gpu.forward_scratch import LOG2_E, ROWS, line
from swjax.kernels.attention.tiles import LONGEST_SEQUENCE
from swjax.kernels.availability import Unavailable
from swjax.kernels.mosaic_gpu import pipeline

SHARED_MEMORY = 227 * 1024  # bytes of a block of threads
REGISTERS = (24, 240)  # per thread, of the memory and the compute warpgroups
COMPILER = {
    "approx_math": True,
    "unsafe_no_auto_barriers": True,
    "reduction_scratch_bytes": 0,  # all sums are those of a warp
    "lowering_semantics": plgpu.LoweringSemantics.Lane,
}


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    gradient: jax.Array,
    *,
    causal: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.attention_backward`, for the arrays that `why_not` accepts."""
    _, tokens, _, width = q.shape
    blocks = tiles.multiprocessors()
    slots = 2 if shared_memory(tokens, width, 2) <= SHARED_MEMORY else 1
    padded = backward_heads.padded(tokens)

    def attention_backward_kernel(q, k, v, out, g, lse, dq, dk, dv, scratch):
        heads = Heads(q.shape, blocks, lax.axis_index("block"))
        work = BackwardWork(heads, q, k, v, out, g, lse, dq, dk, dv, scratch, slots, causal)
        pipeline.specialize(work.copy, work.compute, REGISTERS)

    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    run = pipeline.kernel(
        attention_backward_kernel,
        (like_q,) * 3,
        allocate(tokens, width, slots, q.dtype),
        blocks=blocks,
        compiler=COMPILER,
    )
    padding = ((0, 0), (0, 0), (0, padded - tokens))
    lse = jnp.pad(lse * jnp.float32(LOG2_E), padding, constant_values=jnp.inf)
    return run(q, k, v, out, gradient, lse)


def why_not(q: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Why the kernel does not take 16-bit queries [b, t, h, d] of a known width; None: it does."""
    tokens, heads, width = q.shape[1:]
    if tokens <= ROWS:
        return Unavailable(
            f"supports sequences of more than {ROWS} tokens, got {tokens}: use 'triton'"
        )
    beyond = backward_heads.cut(tokens)[0] * ROWS > tokens  # the last tile ends past the sequence
    if heads == 1 and width != line(width) and beyond:
        return Unavailable(f"supports several heads of {width} features, got one: use 'triton'")
    if tokens > LONGEST_SEQUENCE or shared_memory(tokens, width, 1) > SHARED_MEMORY:
        return Unavailable(
            f"keeps a head in shared memory, which {tokens} tokens of {width} features exceed: "
            "use 'triton'"
        )
    return None
