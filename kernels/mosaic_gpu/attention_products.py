"""The products of attention backward: what its compute warpgroups do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.mosaic_gpu.attention_copies import Memory, Slot
from swjax.kernels.mosaic_gpu.attention_heads import LOG2_E, ROWS, Ref, load


@dataclass(frozen=True)
class Backward(Memory):
    """The work of one block of threads."""

    def compute(self, warpgroup: jax.Array) -> None:
        """Computes the gradients of the tiles of one warpgroup, of all heads."""
        b, count, step = self.buffers, self.heads.tiles, self.variant.compute

        early, lone = self.variant.early, self.variant.lone
        rows = count - lone  # tiles of keys as rows

        def compute_head(head, _):
            queries = (count - warpgroup + step - 1) // step
            first = warpgroup if lone else lax.rem(warpgroup + step - count % step, step)
            keys = (rows - first + step - 1) // step
            barrier = lax.rem(head, self.variant.slots) * count
            wait_queries = lambda tile, _: plgpu.barrier_wait(b.queries_full.at[barrier + tile])
            free_keys = lambda tile, _: plgpu.barrier_arrive(b.keys_empty.at[barrier + tile])

            def free_others(tile, _):
                mine = (lax.rem(tile, step) == first) & (tile < rows)
                pl.when(jnp.logical_not(mine))(lambda: free_keys(tile, None))

            def query_tile(i, waited):
                tile = warpgroup + step * i
                lax.fori_loop(waited, tile + 1, wait_queries, None)
                self.query_rows(head, tile, warpgroup, i == 0, i == queries - 1)
                return tile + 1

            def key_tile(i, freed):
                tile = first + step * i
                self.key_rows(head, tile, warpgroup)
                if early:
                    free_keys(tile, None)
                else:
                    lax.fori_loop(freed, tile + 1, free_keys, None)
                return tile + 1

            plgpu.barrier_wait(b.lse_full.at[lax.rem(head, self.variant.slots + 1)])
            waited = lax.fori_loop(0, queries, query_tile, jnp.int32(0))
            lax.fori_loop(waited, count, wait_queries, None)
            if lone:
                plgpu.barrier_arrive(b.last_full)
            if early:
                lax.fori_loop(0, count, free_others, None)
            plgpu.barrier_wait(b.exchange)
            freed = lax.fori_loop(0, keys, key_tile, jnp.int32(0))
            if lone:
                pl.when(warpgroup == step - 1)(lambda: self.last_key(head, warpgroup))
            if not early:
                lax.fori_loop(freed, count, free_keys, None)

        lax.fori_loop(0, self.heads.count(), compute_head, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

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

        lse = load(slot.lse.at[rows], plgpu.Layout.WGMMA.reduce(1))
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
                dp = self.sums(dp, later)
                ds = self.slopes(weights, dp, delta, 0)
                if self.variant.lone and sum(block) > self.heads.tokens:
                    for x, y in zip(slot.last, (weights, ds)):  # zero in all columns but the first
                        x[rows] = jnp.sum(y, axis=1)
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
                    load(x.at[pl.ds(*block)], plgpu.Layout.WGMMA.reduce(0))
                    for x in (slot.lse, slot.delta)
                )
                weights = self.weights(self.sums(s, 1), lse, 1)
                if block[0] > 0:
                    free((block[0] - length, length))
                self.add_product(dv, weights, slot.g, block)
                dp = plgpu.wgmma_accumulator_load(dp, wait_n=len(self.pieces))
                ds = self.slopes(weights, dp, delta, 1)
                self.add_product(dk, ds, slot.q, block)

            self.sweep(issue, finish, length, False)
            results = [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in dk_dv]
            free(self.column_blocks(length)[-1])
            return results[: len(self.pieces)], results[len(self.pieces) :]

        dk, dv = pl.run_scoped(sum_up, *self.accumulators(), *self.accumulators())
        scale = self.heads.width**-0.5
        self.store([x * scale for x in dk], self.dk, head, tile, warpgroup)
        self.store(dv, self.dv, head, tile, warpgroup)

    def last_key(self, head: jax.Array, warpgroup: jax.Array) -> None:
        """Computes and writes dk and dv of the last key, in all rows of a tile."""
        b, slot = self.buffers, self.slot(head)
        plgpu.barrier_wait(b.last_full)
        blocks = self.column_blocks(ROWS)

        def sum_up(*dk_dv):
            dk, dv = dk_dv[: len(self.pieces)], dk_dv[len(self.pieces) :]
            for block in blocks:
                weights, ds = (
                    lax.broadcast_in_dim(
                        load(x.at[pl.ds(*block)], plgpu.Layout.WGMMA.reduce(0)),
                        (ROWS, block[1]),
                        (1,),
                    )
                    for x in slot.last
                )
                self.add_product(dv, weights, slot.g, block)
                self.add_product(dk, ds, slot.q, block)
                plgpu.wgmma_wait(0)  # otherwise too many operands are in registers at once
                for tile in self.done_tiles(block):
                    plgpu.barrier_arrive(b.queries_empty.at[slot.first + tile])
            results = [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in dk_dv]
            return results[: len(self.pieces)], results[len(self.pieces) :]

        dk, dv = pl.run_scoped(sum_up, *self.accumulators(), *self.accumulators())
        scale, tile = self.heads.width**-0.5, jnp.int32(self.heads.tiles - 1)
        self.store([x * scale for x in dk], self.dk, head, tile, warpgroup)
        self.store(dv, self.dv, head, tile, warpgroup)

    def find_delta(self, slot: Slot, rows: Any, warpgroup: jax.Array) -> jax.Array:
        """The inner products of a tile of outputs and their gradients: [ROWS]."""
        b = self.buffers
        plgpu.barrier_wait(b.out_full.at[warpgroup])

        def part(piece, gradients):
            columns = pl.ds(piece.first, piece.width)
            out, g = load(b.out.at[warpgroup, :, columns]), load(gradients.at[rows])
            return jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=1)

        delta, *more = [part(piece, g) for piece, g in zip(self.pieces, slot.g)]
        for x in more:
            delta += x
        slot.delta[rows] = delta  # rows of two tiles are written twice, with the same values
        plgpu.commit_smem()  # the next copy to the buffer of out comes after these loads
        plgpu.barrier_arrive(b.out_empty.at[warpgroup])
        return delta

    def column_blocks(self, length: int) -> list[tuple[int, int]]:
        """(first column, number of columns) of each product. The first are multiples of ROWS columns."""
        span = self.heads.span
        length = min(length, span // ROWS * ROWS)
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
        held = [
            kind in self.variant.held or (self.variant.held and p.line < 64) for p in self.pieces
        ]
        return [load(x.at[rows]) if hold else x.at[rows] for x, hold in zip(buffers, held)]

    def multiply_lines(
        self,
        sums: Ref,
        rows: list[Ref | jax.Array],
        buffers: tuple[Ref, ...],
        block: tuple[int, int],
    ) -> None:
        """Adds the inner products of rows and of a block of columns."""
        for a, columns in zip(rows, buffers):
            plgpu.wgmma(sums, a, columns.at[pl.ds(*block)].T)

    def add_product(
        self,
        sums: tuple[Ref, ...],
        a: jax.Array,
        buffers: tuple[Ref, ...],
        block: tuple[int, int],
    ) -> None:
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

    def slopes(self, weights: jax.Array, dp: jax.Array, delta: jax.Array, axis: int) -> jax.Array:
        """The gradients of scaled scores, from those of weights, dp; `axis` is that of delta."""
        return weights * (dp - lax.broadcast_in_dim(delta, dp.shape, (axis,)))

    def store(
        self,
        values: list[jax.Array],
        to: Ref,
        head: jax.Array,
        tile: jax.Array,
        warpgroup: jax.Array,
    ) -> None:
        """Writes a tile of a gradient."""
        self.heads.store(values, self.pieces, self.buffers.results.at[warpgroup], to, head, tile)
