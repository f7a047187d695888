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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.mosaic_gpu import attention_heads
from swjax.kernels.mosaic_gpu.attention_heads import LOG2_E, ROWS, Heads, Piece, Ref


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
      held: rows that are held in registers: "" for none, "tail" for lines of 16 features, "keys" also for all k
        and v, "all".
      early: whether exponentials come before the wait for dp.
    """

    compute: int = 2
    columns: tuple[int, int] = (64, 64)
    ahead: bool = False
    slots: int = 1
    line: int = 64
    held: str = ""
    early: bool = True


class Buffers(NamedTuple):
    """The shared memory of a block, in the order of the kernel's arguments.

    Attributes:
      q, k, v, g: [slots, span, features] of each piece of the features.
      out, results: [compute warpgroups, ROWS, d].
      lse, delta: [slots + 1, span].
      keys_full, queries_full, keys_empty, queries_empty: a barrier for each tile of each slot.
      lse_full: [slots + 1].
      out_full, out_empty: a barrier for each compute warpgroup.
      exchange: a barrier at which the compute warpgroups wait for each other.
    """

    q: tuple[Ref, ...]
    k: tuple[Ref, ...]
    v: tuple[Ref, ...]
    g: tuple[Ref, ...]
    out: Ref
    results: Ref
    lse: Ref
    delta: Ref
    keys_full: Ref
    queries_full: Ref
    keys_empty: Ref
    queries_empty: Ref
    lse_full: Ref
    out_full: Ref
    out_empty: Ref
    exchange: Ref


class Slot(NamedTuple):
    """The shared memory of one head.

    Attributes:
      q, k, v, g: [span, features] of each piece of the features.
      lse, delta: [span].
      first: number of its first barrier.
    """

    q: tuple[Ref, ...]
    k: tuple[Ref, ...]
    v: tuple[Ref, ...]
    g: tuple[Ref, ...]
    lse: Ref
    delta: Ref
    first: jax.Array


@dataclass(frozen=True)
class Backward:
    """The work of one block of threads.

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

    # --- Copies ---------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Copies all heads: the memory warpgroup."""
        heads, b, variant = self.heads, self.buffers, self.variant

        def copy_head(head, _):
            early = min(heads.tiles, variant.compute)
            for tile in range(heads.tiles - early):
                self.copy_tile(head, tile, keys=True)
            for tile in range(early):
                self.copy_tile(head, tile, keys=False)
                if tile == 0:
                    self.copy_lse(head)
                self.copy_out(head, tile)
            for tile in range(heads.tiles - early, heads.tiles):
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

    # --- Products -------------------------------------------------------------------------------------

    def compute(self, warpgroup: jax.Array) -> None:
        """Computes the gradients of the tiles of one warpgroup, of all heads."""
        b, count, step = self.buffers, self.heads.tiles, self.variant.compute

        def compute_head(head, _):
            queries = (count - warpgroup + step - 1) // step
            first = lax.rem(warpgroup + step - count % step, step)
            keys = (count - first + step - 1) // step
            barrier = lax.rem(head, self.variant.slots) * count
            wait_queries = lambda tile, _: plgpu.barrier_wait(b.queries_full.at[barrier + tile])
            free_keys = lambda tile, _: plgpu.barrier_arrive(b.keys_empty.at[barrier + tile])

            def query_tile(i, waited):
                tile = warpgroup + step * i
                lax.fori_loop(waited, tile + 1, wait_queries, None)
                self.query_rows(head, tile, warpgroup, i == 0, i == queries - 1)
                return tile + 1

            def key_tile(i, freed):
                tile = first + step * i
                self.key_rows(head, tile, warpgroup)
                lax.fori_loop(freed, tile + 1, free_keys, None)
                return tile + 1

            plgpu.barrier_wait(b.lse_full.at[lax.rem(head, self.variant.slots + 1)])
            waited = lax.fori_loop(0, queries, query_tile, jnp.int32(0))
            lax.fori_loop(waited, count, wait_queries, None)
            plgpu.barrier_wait(b.exchange)
            freed = lax.fori_loop(0, keys, key_tile, jnp.int32(0))
            lax.fori_loop(freed, count, free_keys, None)

        lax.fori_loop(0, self.heads.count(), compute_head, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def slot(self, head: jax.Array) -> Slot:
        """The shared memory of a head."""
        b, slot = self.buffers, lax.rem(head, self.variant.slots)
        other = lax.rem(head, self.variant.slots + 1)
        # Otherwise the compiler computes all addresses before the loop over heads, and spills them.
        slot, other = lax.optimization_barrier(slot), lax.optimization_barrier(other)
        q, k, v, g = (tuple(x.at[slot] for x in pieces) for pieces in (b.q, b.k, b.v, b.g))
        return Slot(q, k, v, g, b.lse.at[other], b.delta.at[other], slot * self.heads.tiles)

    def query_rows(
        self, head: jax.Array, tile: jax.Array, warpgroup: jax.Array, first: Any, last: Any
    ) -> None:
        """Computes and writes dq of a tile, the first or the last one of this warpgroup in the head."""
        b, slot = self.buffers, self.slot(head)
        rows = pl.ds(self.heads.first_row(tile), ROWS)
        delta = self.find_delta(slot, rows, warpgroup)

        @pl.when(last)
        def _():
            plgpu.barrier_arrive(b.exchange)

        lse = plgpu.load(slot.lse.at[rows], layout=plgpu.Layout.WGMMA.reduce(1))
        q, g = self.hold(slot.q, rows, "queries"), self.hold(slot.g, rows, "queries")

        def issue(block, s, dp):
            @pl.when(first)
            def _():
                for tile in self.begun_tiles(block):
                    plgpu.barrier_wait(b.keys_full.at[slot.first + tile])

            self.multiply_lines(s, q, slot.k, block)
            self.multiply_lines(dp, g, slot.v, block)

        def sum_up(*dq):
            def finish(block, s, dp, later):
                weights = self.weights(self.sums(s, 1 + later), lse, 0)
                if sum(block) > self.heads.tokens:
                    column = plgpu.broadcasted_iota(
                        jnp.int32, weights.shape, 1, layout=plgpu.Layout.WGMMA
                    )
                    weights = jnp.where(column < self.heads.tokens - block[0], weights, 0.0)
                if self.variant.early:
                    weights = lax.optimization_barrier(weights)  # while dp is computed
                dp = self.sums(dp, later)
                ds = weights * (dp - lax.broadcast_in_dim(delta, dp.shape, (0,)))
                self.add_product(dq, ds, slot.k, block)

            self.sweep(issue, finish, self.variant.columns[0], self.variant.ahead)
            return [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in dq]

        dq = pl.run_scoped(sum_up, *self.accumulators())
        scale = self.heads.width**-0.5
        self.store([x * scale for x in dq], self.dq, head, tile, warpgroup)

    def key_rows(self, head: jax.Array, tile: jax.Array, warpgroup: jax.Array) -> None:
        """Computes and writes dk and dv of a tile."""
        b, slot, length = self.buffers, self.slot(head), self.variant.columns[1]
        rows = pl.ds(self.heads.first_row(tile), ROWS)
        k, v = self.hold(slot.k, rows, "keys"), self.hold(slot.v, rows, "keys")

        def issue(block, s, dp):
            self.multiply_lines(s, k, slot.q, block)
            self.multiply_lines(dp, v, slot.g, block)

        def free(block):
            for tile in self.done_tiles(block):
                plgpu.barrier_arrive(b.queries_empty.at[slot.first + tile])

        def sum_up(*dk_dv):
            dk, dv = dk_dv[: len(self.pieces)], dk_dv[len(self.pieces) :]

            def finish(block, s, dp, later):
                lse, delta = (
                    plgpu.load(x.at[pl.ds(*block)], layout=plgpu.Layout.WGMMA.reduce(0))
                    for x in (slot.lse, slot.delta)
                )
                weights = self.weights(self.sums(s, 1), lse, 1)
                if block[0] > 0:
                    free((block[0] - length, length))
                self.add_product(dv, weights, slot.g, block)
                dp = plgpu.wgmma_accumulator_load(dp, wait_n=len(self.pieces))
                ds = weights * (dp - lax.broadcast_in_dim(delta, dp.shape, (1,)))
                self.add_product(dk, ds, slot.q, block)

            self.sweep(issue, finish, length, False)
            results = [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in dk_dv]
            free(self.column_blocks(length)[-1])
            return results[: len(self.pieces)], results[len(self.pieces) :]

        dk, dv = pl.run_scoped(sum_up, *self.accumulators(), *self.accumulators())
        scale = self.heads.width**-0.5
        self.store([x * scale for x in dk], self.dk, head, tile, warpgroup)
        self.store(dv, self.dv, head, tile, warpgroup)

    def find_delta(self, slot: Slot, rows: Any, warpgroup: jax.Array) -> jax.Array:
        """The inner products of a tile of outputs and their gradients: [ROWS]."""
        b, layout = self.buffers, plgpu.Layout.WGMMA
        plgpu.barrier_wait(b.out_full.at[warpgroup])
        delta = None
        for piece, gradients in zip(self.pieces, slot.g):
            columns = pl.ds(piece.first, piece.width)
            out = plgpu.load(b.out.at[warpgroup, :, columns], layout=layout, optimized=False)
            g = plgpu.load(gradients.at[rows], layout=layout, optimized=False)
            part = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=1)
            delta = part if delta is None else delta + part
        plgpu.barrier_arrive(b.out_empty.at[warpgroup])
        slot.delta[rows] = delta
        return delta

    def column_blocks(self, length: int) -> list[tuple[int, int]]:
        """(first column, number of columns) of each product."""
        span = self.heads.span
        return [(at, min(length, span - at)) for at in range(0, span, length)]

    def done_tiles(self, block: tuple[int, int]) -> list[int]:
        """The tiles whose last column is in a block of columns."""
        ends = [min((tile + 1) * ROWS, self.heads.span) for tile in range(self.heads.tiles)]
        return [tile for tile, end in enumerate(ends) if block[0] < end <= sum(block)]

    def begun_tiles(self, block: tuple[int, int]) -> list[int]:
        """The tiles whose first column is in a block of columns."""
        firsts = [tile * ROWS for tile in range(self.heads.tiles)]
        return [tile for tile, first in enumerate(firsts) if block[0] <= first < sum(block)]

    def sweep(self, issue: Callable, finish: Callable, columns: int, ahead: bool) -> None:
        """Processes all blocks of columns.

        Args:
          issue: function (block, s, dp) that starts the products of s and dp.
          finish: function (block, s, dp, later) that uses them; `later` sums were started after them.
          columns: number of columns of a block.
          ahead: whether the products of a block are issued before the previous one is finished.
        """
        blocks = self.column_blocks(columns)
        sums = lambda length: [plgpu.WGMMAAccumulatorRef((ROWS, length), jnp.float32)] * 2

        def block(i, s, dp):
            def next_block(next_s, next_dp):
                issue(blocks[i + 1], next_s, next_dp)
                if ahead:
                    finish(blocks[i], s, dp, 2)
                block(i + 1, next_s, next_dp)

            last = i + 1 == len(blocks)
            if last or not ahead:
                finish(blocks[i], s, dp, 0)
            if not last:
                pl.run_scoped(next_block, *sums(blocks[i + 1][1]))

        def first_block(s, dp):
            issue(blocks[0], s, dp)
            block(0, s, dp)

        pl.run_scoped(first_block, *sums(blocks[0][1]))

    def sums(self, accumulator: Ref, later: int) -> jax.Array:
        """Waits for scores, after which `later` more were started."""
        return plgpu.wgmma_accumulator_load(accumulator, wait_n=later * len(self.pieces))

    def accumulators(self) -> list[Any]:
        return [plgpu.WGMMAAccumulatorRef((ROWS, p.width), jnp.float32) for p in self.pieces]

    def hold(self, buffers: tuple[Ref, ...], rows: Any, kind: str) -> list[Ref | jax.Array]:
        """The rows of a tile, in shared memory or in registers."""
        held = [kind in self.variant.held or (self.variant.held and p.line < 64) for p in self.pieces]
        load = lambda x: plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
        return [load(x.at[rows]) if hold else x.at[rows] for x, hold in zip(buffers, held)]

    def multiply_lines(self, sums, rows, buffers, block) -> None:
        """Adds the inner products of rows and of a block of columns."""
        for a, columns in zip(rows, buffers):
            plgpu.wgmma(sums, a, columns.at[pl.ds(*block)].T)

    def add_product(self, sums, a, buffers, block) -> None:
        """Adds the products of registers a, [ROWS, columns], and a block of columns."""
        a = a.astype(self.q.dtype)
        for accumulator, piece, b in zip(sums, self.pieces, buffers):
            first, count = block
            operand = a
            if more := -count % piece.line:  # a product takes whole lines of columns
                zeros = jnp.zeros((ROWS, more), a.dtype)
                zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                operand = jnp.concatenate([zeros, a], axis=1)
                first, count = first - more, count + more
            plgpu.wgmma(accumulator, operand, b.at[pl.ds(first, count)])

    def weights(self, scores: jax.Array, lse: jax.Array, axis: int) -> jax.Array:
        """The softmax of scores, whose `axis` is that of lse."""
        factor = self.heads.width**-0.5 * LOG2_E
        return jnp.exp2(scores * factor - lax.broadcast_in_dim(lse, scores.shape, (axis,)))

    def store(self, values, to, head, tile, warpgroup) -> None:
        """Writes a tile of a gradient."""
        self.heads.store(
            values, self.pieces, self.buffers.results.at[warpgroup], to, head, tile
        )


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    gradient: jax.Array,
    *,
    causal: bool = False,
    variant: Variant = Variant(),
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.attention_backward` without a causal mask."""
    del causal
    _, tokens, _, width = q.shape
    blocks = multiprocessors or tiles.multiprocessors()
    span, padded = attention_heads.span(tokens), attention_heads.padded(tokens)
    count = pl.cdiv(span, ROWS)
    compute, slots = min(variant.compute, count), variant.slots
    variant = dataclasses.replace(variant, compute=compute)
    pieces = attention_heads.pieces(width, variant.line)
    interpreted = interpret is not None

    def attention_backward_kernel(*refs):
        inputs, buffers = refs[:9], refs[9:]
        block = lax.axis_index("block")
        heads = Heads(q.shape, blocks, block, compute, interpreted)
        work = Backward(heads, *inputs, Buffers(*buffers), variant, pieces)
        attention_heads.specialize(compute, work.copy, work.compute)

    operand = tuple(piece.buffer((slots, span), q.dtype) for piece in pieces)
    tile = plgpu.SMEM((compute, ROWS, width), q.dtype)
    vector = plgpu.SMEM((slots + 1, padded), jnp.float32)
    copies = 2 * sum(attention_heads.copies(piece) for piece in pieces)
    full = plgpu.Barrier(num_barriers=slots * count, num_arrivals=copies)
    buffers = Buffers(
        *[operand] * 4,
        out=tile,
        results=tile,
        lse=vector,
        delta=vector,
        keys_full=full,
        queries_full=full,
        keys_empty=plgpu.Barrier(num_barriers=slots * count, num_arrivals=compute),
        queries_empty=plgpu.Barrier(num_barriers=slots * count, num_arrivals=count),
        lse_full=plgpu.Barrier(num_barriers=slots + 1),
        out_full=plgpu.Barrier(num_barriers=compute),
        out_empty=plgpu.Barrier(num_barriers=compute),
        exchange=plgpu.Barrier(num_arrivals=compute),
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
    lse = jnp.pad(lse * jnp.float32(LOG2_E), padding, constant_values=jnp.inf)
    return run(q, k, v, out, gradient, lse)
