"""The shared memory of attention backward, and its memory warpgroup."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.mosaic_gpu.attention_heads import ROWS, Heads, Piece, Ref


@dataclass(frozen=True)
class Variant:
    """How a block of threads divides its work.

    Attributes:
      compute: number of compute warpgroups.
      columns: number of columns of a product of scores, with queries as rows and with keys as rows.
      ahead: whether the scores of the next columns are multiplied before those of the current ones are used,
        with queries as rows.
      slots: number of heads in shared memory.
      line: number of features of a swizzled line in shared memory, 64 or 16.
      held: names of rows that are held in registers: "keys", "queries"; any name holds lines of 16 features.
      early: whether a warpgroup releases the keys of other warpgroups before its first rows of keys.
      lone: whether a last key that is alone in its tile takes its weights from the rows of queries.
    """

    compute: int = 2
    columns: tuple[int, int] = (64, 64)
    ahead: bool = False
    slots: int = 1
    line: int = 64
    held: str = ""
    early: bool = False
    lone: bool = False


class Buffers(NamedTuple):
    """The shared memory of a block, in the order of the kernel's arguments.

    Attributes:
      q, k, v, g: [slots, span, features] of each piece of the features.
      out, results: [compute warpgroups, ROWS, d].
      lse: [slots + 1, span].
      delta: [2, span].
      last: weights of the last key and their slopes, [2, span], if `lone`.
      keys_full, queries_full, keys_empty, queries_empty: a barrier for each tile of each slot.
      lse_full: [slots + 1].
      out_full, out_empty: a barrier for each compute warpgroup.
      exchange: a barrier at which the compute warpgroups wait for each other.
      last_full: a barrier; `last` is complete.
    """

    q: tuple[Ref, ...]
    k: tuple[Ref, ...]
    v: tuple[Ref, ...]
    g: tuple[Ref, ...]
    out: Ref
    results: Ref
    lse: Ref
    delta: Ref
    last: tuple[Ref, ...]
    keys_full: Ref
    queries_full: Ref
    keys_empty: Ref
    queries_empty: Ref
    lse_full: Ref
    out_full: Ref
    out_empty: Ref
    exchange: Ref
    last_full: Ref


class Slot(NamedTuple):
    """The shared memory of one head.

    Attributes:
      q, k, v, g: [span, features] of each piece of the features.
      lse, delta: [span].
      last: weights of the last key and their slopes, [span].
      first: number of its first barrier.
    """

    q: tuple[Ref, ...]
    k: tuple[Ref, ...]
    v: tuple[Ref, ...]
    g: tuple[Ref, ...]
    lse: Ref
    delta: Ref
    last: tuple[Ref, ...]
    first: jax.Array


@dataclass(frozen=True)
class Memory:
    """The heads of one block of threads.

    Attributes:
      heads: the heads of the block.
      q, k, v, out, g, dq, dk, dv: [b, t, h, d].
      lse: [b, h, span], times LOG2_E; infinite past the end of the sequence.
      buffers: shared memory.
      variant: see there.
      pieces: of the features.
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
    buffers: Buffers
    variant: Variant
    pieces: tuple[Piece, ...]

    def copy(self) -> None:
        """Copies all heads: the memory warpgroup."""
        heads, b, variant = self.heads, self.buffers, self.variant

        def copy_head(head, _):
            early = min(heads.tiles, variant.compute)
            # If `lone`, the keys that are released last are copied after the first queries.
            keys = early if variant.lone else heads.tiles - early
            for tile in range(keys):
                self.copy_tile(head, tile, keys=True)
            for tile in range(early):
                self.copy_tile(head, tile, keys=False)
                if tile == 0:
                    self.copy_lse(head)
                self.copy_out(head, tile)
            for tile in range(keys, heads.tiles):
                self.copy_tile(head, tile, keys=True)
            for tile in range(early, heads.tiles):
                self.copy_tile(head, tile, keys=False)
            for tile in range(early, heads.tiles):
                self.copy_out(head, tile)

        count = heads.count()
        lax.fori_loop(0, count, copy_head, None)

        @pl.when(count > 0)
        def _():
            for warpgroup in range(variant.compute):
                plgpu.barrier_wait(b.out_empty.at[warpgroup])

        def drain(i, _):
            plgpu.barrier_wait(b.keys_empty.at[i])
            plgpu.barrier_wait(b.queries_empty.at[i])

        lax.fori_loop(0, jnp.minimum(count, variant.slots) * heads.tiles, drain, None)

    def copy_tile(self, head: jax.Array, tile: int, keys: bool) -> None:
        """Copies a tile of k and v, or of q and g."""
        heads, b = self.heads, self.buffers
        sources = ((self.k, b.k), (self.v, b.v)) if keys else ((self.q, b.q), (self.g, b.g))
        full, empty = (b.keys_full, b.keys_empty) if keys else (b.queries_full, b.queries_empty)
        slot = lax.rem(head, self.variant.slots)
        number = slot * heads.tiles + tile

        @pl.when(head >= self.variant.slots)
        def _():
            plgpu.barrier_wait(empty.at[number])

        rows = heads.tail if tile == heads.tiles - 1 else ROWS
        for source, buffers in sources:
            for piece, to in zip(self.pieces, buffers):
                heads.copy_rows(source, head, tile * ROWS, rows, piece, to, slot, full.at[number])

    def copy_lse(self, head: jax.Array) -> None:
        example, number = self.heads.place(head)
        other = lax.rem(head, self.variant.slots + 1)
        plgpu.copy_gmem_to_smem(
            self.lse.at[example, number],
            self.buffers.lse.at[other],
            self.buffers.lse_full.at[other],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def copy_out(self, head: jax.Array, tile: int) -> None:
        example, number = self.heads.place(head)
        warpgroup = tile % self.variant.compute

        def wait():
            plgpu.barrier_wait(self.buffers.out_empty.at[warpgroup])

        wait() if tile >= self.variant.compute else pl.when(head > 0)(wait)
        rows = pl.ds(self.heads.first_row(tile + 0 * head), ROWS)
        plgpu.copy_gmem_to_smem(
            self.out.at[example, rows, number],
            self.buffers.out.at[warpgroup],
            self.buffers.out_full.at[warpgroup],
        )

    def slot(self, head: jax.Array) -> Slot:
        """The shared memory of a head."""
        b, slot = self.buffers, lax.rem(head, self.variant.slots)
        other = lax.rem(head, self.variant.slots + 1)
        # Otherwise the compiler computes all addresses before the loop over heads, and spills them.
        slot, other = lax.optimization_barrier(slot), lax.optimization_barrier(other)
        two = lax.rem(head, 2) if self.variant.slots > 1 else other
        q, k, v, g = (tuple(x.at[slot] for x in pieces) for pieces in (b.q, b.k, b.v, b.g))
        last = tuple(x.at[two] for x in b.last)
        return Slot(q, k, v, g, b.lse.at[other], b.delta.at[two], last, slot * self.heads.tiles)
