"""The shared memory of attention backward, and its memory warpgroup."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.attention.mosaic_gpu import backward_heads
from swjax.kernels.attention.mosaic_gpu.backward_heads import Heads
from swjax.kernels.attention.mosaic_gpu.forward_scratch import (
    ROWS,
    SWIZZLE_TOKENS,
    line,
    row_buffer,
)
from swjax.kernels.mosaic_gpu.pipeline import COMPUTE, Ref, swizzled


class BackwardScratch(NamedTuple):
    """The shared memory of a block.

    Attributes:
      q, k, v, g: [slots, span, d].
      out: [COMPUTE, ROWS, d].
      results: two views of the same memory. The first holds a tile of a gradient, [COMPUTE, ROWS, d]. The
        second, [COMPUTE, d, ROWS], holds two strips in its first 2 * STEP rows: the weights between a tile
        and the rest, and their slopes.
      lse: [slots + 1, padded].
      delta: [2, padded].
      rest: sums of dq, dk and dv of the rest, [COMPUTE, 3, rest, d].
      keys_full, queries_full, keys_empty, queries_empty: a barrier for each tile of each slot.
      lse_full: [slots + 1].
      out_full, out_empty: a barrier for each compute warpgroup.
      exchange: a barrier at which the compute warpgroups wait for each other's delta.
      rest_full: a barrier; the first compute warpgroup has written all of its `rest`.
    """

    q: Ref
    k: Ref
    v: Ref
    g: Ref
    out: Ref
    results: Ref
    lse: Ref
    delta: Ref
    rest: Ref
    keys_full: Ref
    queries_full: Ref
    keys_empty: Ref
    queries_empty: Ref
    lse_full: Ref
    out_full: Ref
    out_empty: Ref
    exchange: Ref
    rest_full: Ref


def allocate(tokens: int, width: int, slots: int, dtype: jax.typing.DTypeLike) -> BackwardScratch:
    """Describes the buffers."""
    span, padded = backward_heads.span(tokens), backward_heads.padded(tokens)
    tile = SWIZZLE_TOKENS, line(width)
    whole, rest = backward_heads.cut(tokens)
    tiles = slots * (whole + (rest > 0))
    operand = swizzled((slots, span, width), dtype, tile)
    strips = swizzled((COMPUTE, width, ROWS), dtype, tile)
    rows = row_buffer(width, dtype)
    full = plgpu.Barrier(num_barriers=tiles, num_arrivals=2 * backward_heads.copies(width))
    return BackwardScratch(
        q=operand,
        k=operand,
        v=operand,
        g=operand,
        out=rows,
        results=plgpu.RefUnion(rows, strips),
        lse=plgpu.SMEM((slots + 1, padded), jnp.float32),
        delta=plgpu.SMEM((2, padded), jnp.float32),
        rest=plgpu.SMEM((COMPUTE, 3, max(rest, 1), width), jnp.float32),
        keys_full=full,
        queries_full=full,
        keys_empty=plgpu.Barrier(num_barriers=tiles, num_arrivals=COMPUTE),
        queries_empty=plgpu.Barrier(num_barriers=tiles, num_arrivals=whole),
        lse_full=plgpu.Barrier(num_barriers=slots + 1),
        out_full=plgpu.Barrier(num_barriers=COMPUTE),
        out_empty=plgpu.Barrier(num_barriers=COMPUTE),
        exchange=plgpu.Barrier(num_arrivals=COMPUTE),
        rest_full=plgpu.Barrier(),
    )


def shared_memory(tokens: int, width: int, slots: int) -> int:
    """The size of the buffers in bytes. Every buffer starts at a multiple of 1024 bytes."""
    span, padded = backward_heads.span(tokens), backward_heads.padded(tokens)
    halves = [slots * span * width] * 4 + [COMPUTE * ROWS * width] * 2
    floats = [(slots + 1) * padded, 2 * padded, COMPUTE * 3 * backward_heads.cut(tokens)[1] * width]
    sizes = [2 * n for n in halves] + [4 * n for n in floats]
    barriers = 512  # at most
    return sum(-(-size // 1024) * 1024 for size in sizes) + barriers


class Slot(NamedTuple):
    """The shared memory of one head.

    Attributes:
      q, k, v, g: [span, d].
      lse, delta: [padded].
      first: number of its first barrier.
    """

    q: Ref
    k: Ref
    v: Ref
    g: Ref
    lse: Ref
    delta: Ref
    first: jax.Array


@dataclass(frozen=True)
class Copies:
    """The heads of one block of threads.

    Attributes:
      heads: the heads of the block.
      q, k, v, out, g, dq, dk, dv: [b, t, h, d].
      lse: [b, h, padded], times log2(e); infinite past the end of the sequence.
      scratch: shared memory.
      slots: number of heads in shared memory.
      causal: whether a query sees only its own key and those before it.
    """

    heads: Heads
    q: Ref
    k: Ref
    v: Ref
    out: Ref
    g: Ref
    lse: Ref
    dq: Ref
    dk: Ref
    dv: Ref
    scratch: BackwardScratch
    slots: int
    causal: bool

    def copy(self) -> None:
        """Copies all heads, in the order in which tiles become free: the memory warpgroup."""
        heads, b = self.heads, self.scratch
        early = (heads.whole - 1) // COMPUTE * COMPUTE  # keys that are not the last of a warpgroup

        def copy_head(head, _):
            for tile in range(early):
                self.copy_operands(head, tile, keys=True)
            for tile in range(COMPUTE):
                self.copy_operands(head, tile, keys=False)
                if tile == 0:
                    self.copy_lse(head)
                self.copy_out(head, tile)
            for tile in range(early, heads.tiles):
                self.copy_operands(head, tile, keys=True)
            for tile in range(COMPUTE, heads.tiles):
                self.copy_operands(head, tile, keys=False)
            for tile in range(COMPUTE, heads.tiles):
                self.copy_out(head, tile)

        count = heads.count()
        lax.fori_loop(0, count, copy_head, None)

        @pl.when(count > 0)
        def _():
            for warpgroup in range(COMPUTE):
                plgpu.barrier_wait(b.out_empty.at[warpgroup])

        def drain(i, _):
            plgpu.barrier_wait(b.keys_empty.at[i])
            plgpu.barrier_wait(b.queries_empty.at[i])

        lax.fori_loop(0, jnp.minimum(count, self.slots) * heads.tiles, drain, None)

    def copy_operands(self, head: jax.Array, tile: int, keys: bool) -> None:
        """Copies a tile of k and v, or of q and g."""
        heads, b = self.heads, self.scratch
        sources = ((self.k, b.k), (self.v, b.v)) if keys else ((self.q, b.q), (self.g, b.g))
        full, empty = (b.keys_full, b.keys_empty) if keys else (b.queries_full, b.queries_empty)
        slot = lax.rem(head, self.slots)
        number = slot * heads.tiles + tile

        @pl.when(head >= self.slots)
        def _():
            plgpu.barrier_wait(empty.at[number])

        for source, to in sources:
            heads.copy_tile(source, head, tile, to, slot, full.at[number])

    def copy_lse(self, head: jax.Array) -> None:
        example, number = self.heads.place(head)
        other = lax.rem(head, self.slots + 1)
        plgpu.copy_gmem_to_smem(
            self.lse.at[example, number],
            self.scratch.lse.at[other],
            self.scratch.lse_full.at[other],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def copy_out(self, head: jax.Array, tile: int) -> None:
        example, number = self.heads.place(head)
        warpgroup = tile % COMPUTE

        def wait():
            plgpu.barrier_wait(self.scratch.out_empty.at[warpgroup])

        wait() if tile >= COMPUTE else pl.when(head > 0)(wait)
        rows = self.heads.rows(tile + 0 * head)
        plgpu.copy_gmem_to_smem(
            self.out.at[example, rows, number],
            self.scratch.out.at[warpgroup],
            self.scratch.out_full.at[warpgroup],
        )

    def slot(self, head: jax.Array) -> Slot:
        """The shared memory of a head."""
        b, slot, other = self.scratch, lax.rem(head, self.slots), lax.rem(head, self.slots + 1)
        # Otherwise the compiler computes all addresses before the loop over heads, and spills them.
        slot, other = lax.optimization_barrier(slot), lax.optimization_barrier(other)
        q, k, v, g = (x.at[slot] for x in (b.q, b.k, b.v, b.g))
        return Slot(
            q, k, v, g, b.lse.at[other], b.delta.at[lax.rem(head, 2)], slot * self.heads.tiles
        )
