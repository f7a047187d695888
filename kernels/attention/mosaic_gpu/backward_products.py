"""The products of attention backward: what its compute warpgroups do.

The rest are the tokens of a head beyond its whole tiles. As rows of products they would fill 64 rows with at
most 16 tokens, so they are columns: what a tile adds to their gradients are products of its transposed
features, [64, 64], and of [64, 16] weights or slopes, which are computed for the gradients of the tile
anyway. Each warpgroup sums up its tiles, and the second one adds both sums at the end of a head. The weights
between two tokens of the rest belong to no whole tile. They are the corner. The kernel computes it as a tile
of the last 64 tokens and sets all rows but those of the rest to zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.attention.mosaic_gpu import backward_heads
from swjax.kernels.attention.mosaic_gpu.backward_copies import Copies, Slot
from swjax.kernels.attention.mosaic_gpu.backward_heads import Rows, store
from swjax.kernels.attention.mosaic_gpu.forward_scratch import LOG2_E, ROWS, STEP
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import COMPUTE, Ref, iota, load_as

Sums = tuple[jax.Array, ...]  # of the rest, [64 features, STEP tokens] each
Block = tuple[int, int]  # of columns: the first one, and their number
DQ, DK, DV = range(3)  # places in `BackwardScratch.rest`


@dataclass(frozen=True)
class BackwardWork(Copies):
    """The work of one block of threads."""

    def compute(self, warpgroup: jax.Array) -> None:
        """Computes the gradients of the tiles of one warpgroup, of all heads."""

        def compute_head(head, _):
            # Otherwise the compiler computes addresses before the loop over heads, and spills them.
            self.compute_head(head, lax.optimization_barrier(warpgroup))

        lax.fori_loop(0, self.heads.count(), compute_head, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def compute_head(self, head: jax.Array, warpgroup: jax.Array) -> None:
        b, heads = self.scratch, self.heads
        tiles, whole = heads.tiles, heads.whole
        barrier = lax.rem(head, self.slots) * tiles
        # Of three tiles, the first warpgroup has two with queries as rows, and one with keys. The corner goes
        # to the warpgroup with fewer tiles.
        first = COMPUTE - 1 - warpgroup
        rest = (lax.rem(warpgroup + whole, COMPUTE) == 0).astype(jnp.int32)
        blocks = len(backward_heads.features(heads.width))
        wait_queries = lambda tile, _: plgpu.barrier_wait(b.queries_full.at[barrier + tile])
        free_keys = lambda tile, _: plgpu.barrier_arrive(b.keys_empty.at[barrier + tile])

        def query_tile(i, carry):
            waited, sums = carry
            tile = warpgroup + COMPUTE * i
            lax.fori_loop(waited, tile + 1, wait_queries, None)
            return tile + 1, self.query_rows(head, tile, warpgroup, sums)

        def is_mine(tile):  # as rows of keys
            return (lax.rem(tile, COMPUTE) == first) & (tile < whole)

        def free_others(tile, _):
            needed = is_mine(tile)
            if heads.overlap:  # the last tile begins in the one before
                needed |= is_mine(tile + 1) & (tile + 1 == whole - 1)
            pl.when(jnp.logical_not(needed))(lambda: free_keys(tile, None))

        def key_tile(i, sums):
            tile = first + COMPUTE * i
            sums = self.key_rows(head, tile, warpgroup, sums)
            free_keys(tile, None)
            if heads.overlap:
                pl.when(tile == whole - 1)(lambda: free_keys(tile - 1, None))
            return sums

        plgpu.barrier_wait(b.lse_full.at[lax.rem(head, self.slots + 1)])
        count = (whole - warpgroup + COMPUTE - 1) // COMPUTE
        waited, sums = lax.fori_loop(0, count, query_tile, (jnp.int32(0), zeros(2 * blocks)))
        lax.fori_loop(waited, tiles, wait_queries, None)
        if heads.rest:
            add_corner = lambda _, sums: self.query_corner(head, warpgroup, sums)
            sums = lax.fori_loop(0, rest, add_corner, sums)
        else:
            lax.fori_loop(0, tiles, free_others, None)
        plgpu.barrier_wait(b.exchange)
        more = zeros(blocks)
        if heads.rest:
            self.put_rest(sums[:blocks], DK, warpgroup, scale=True)
            self.put_rest(sums[blocks:], DV, warpgroup, scale=False)
            add_to_dq = lambda _, sums: self.key_corner(head, warpgroup, sums)
            more = lax.fori_loop(0, 1 - rest, add_to_dq, more)
            lax.fori_loop(0, tiles, free_others, None)
        count = (whole - first + COMPUTE - 1) // COMPUTE
        more = lax.fori_loop(0, count, key_tile, more)
        if heads.rest:
            self.put_rest(more, DQ, warpgroup, scale=True)

            @pl.when(warpgroup == 0)
            def _():
                plgpu.barrier_arrive(b.rest_full)

            @pl.when(warpgroup == 1)
            def _():
                plgpu.barrier_wait(b.rest_full)
                self.store_rest(head)

    def query_rows(
        self, head: jax.Array, tile: jax.Array, warpgroup: jax.Array, sums: Sums
    ) -> Sums:
        """Computes and writes dq of a tile. Returns the sums of dk and dv of the rest, with this tile."""
        b, slot, rows = self.scratch, self.slot(head), self.heads.rows(tile)
        delta = self.find_delta(slot, rows, tile, warpgroup)
        lse = load_as(slot.lse.at[rows], plgpu.Layout.WGMMA.reduce(1))

        def sum_up(dq):
            for block in self.column_blocks():
                wait = partial(plgpu.barrier_wait, b.keys_full.at[slot.first + block[0] // ROWS])
                pl.when(tile < COMPUTE)(wait)  # in the first tile of this warpgroup
                weights, ds = self.query_weights(slot, rows, block, lse, delta)
                self.add(dq, ds, slot.k, block)
            new: Sums = ()
            if self.heads.rest:
                new = self.rest_products(warpgroup, rows, (slot.q, ds), (slot.g, weights))
            return plgpu.wgmma_accumulator_load(dq, wait_n=0), new

        dq, new = pl.run_scoped(sum_up, self.gradient())
        self.store(dq * self.scale, self.dq, head, tile, warpgroup)
        return plus(sums, new)

    def query_corner(self, head: jax.Array, warpgroup: jax.Array, sums: Sums) -> Sums:
        """Adds the products of the rest's queries and keys to the sums of dk and dv of the rest."""
        slot, tile = self.slot(head), jnp.int32(self.heads.whole)
        rows = self.heads.rows(self.heads.whole)
        delta = self.find_delta(slot, rows, tile, warpgroup)
        lse = load_as(slot.lse.at[rows], plgpu.Layout.WGMMA.reduce(1))
        weights, ds = self.query_weights(slot, rows, self.column_blocks()[-1], lse, delta)
        pairs = (slot.q, self.corner(ds)), (slot.g, self.corner(weights))
        return plus(sums, self.rest_products(warpgroup, rows, *pairs))

    def query_weights(
        self, slot: Slot, rows: Rows, block: Block, lse: jax.Array, delta: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The weights of a block of keys, and their slopes: [ROWS queries, keys]."""

        def multiply(s, dp):
            plgpu.wgmma(s, slot.q.at[rows], slot.k.at[pl.ds(*block)].T)
            plgpu.wgmma(dp, slot.g.at[rows], slot.v.at[pl.ds(*block)].T)
            weights = self.weights(plgpu.wgmma_accumulator_load(s, wait_n=1), lse, 0)
            key = block[0] + iota(weights.shape, 1)
            if self.causal:
                weights = jnp.where(key <= start(rows) + iota(weights.shape, 0), weights, 0.0)
            elif sum(block) > self.heads.tokens:
                weights = jnp.where(key < self.heads.tokens, weights, 0.0)
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=0)
            return weights, self.slopes(weights, dp, delta, 0)

        return pl.run_scoped(multiply, *scores(block))

    def key_rows(self, head: jax.Array, tile: jax.Array, warpgroup: jax.Array, sums: Sums) -> Sums:
        """Computes and writes dk and dv of a tile. Returns the sums of dq of the rest, with this tile."""
        b, slot, rows = self.scratch, self.slot(head), self.heads.rows(tile)
        blocks = self.column_blocks()
        free = lambda i: plgpu.barrier_arrive(b.queries_empty.at[slot.first + i])

        def sum_up(dk, dv):
            for i, block in enumerate(blocks):

                def add_dv(weights, i=i, block=block):
                    if i > 0:
                        free(i - 1)  # its products are complete, as these weights are
                    self.add(dv, weights, slot.g, block)

                ds = self.key_slopes(slot, rows, block, add_dv)
                self.add(dk, ds, slot.q, block)
            new: Sums = ()
            if self.heads.rest:
                new = self.rest_products(warpgroup, rows, (slot.k, ds))
            results = [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in (dk, dv)]
            free(len(blocks) - 1)
            return *results, new

        dk, dv, new = pl.run_scoped(sum_up, self.gradient(), self.gradient())
        self.store(dk * self.scale, self.dk, head, tile, warpgroup)
        self.store(dv, self.dv, head, tile, warpgroup)
        return plus(sums, new)

    def key_corner(self, head: jax.Array, warpgroup: jax.Array, sums: Sums) -> Sums:
        """Adds the products of the rest's queries and keys to the sums of dq of the rest."""
        slot, rows = self.slot(head), self.heads.rows(self.heads.whole)
        ds = self.corner(self.key_slopes(slot, rows, self.column_blocks()[-1]))
        return plus(sums, self.rest_products(warpgroup, rows, (slot.k, ds)))

    def key_slopes(
        self,
        slot: Slot,
        rows: Rows,
        block: Block,
        use_weights: Callable[[jax.Array], None] | None = None,
    ) -> jax.Array:
        """The slopes of the weights of a block of queries: [ROWS keys, queries].

        Args:
          slot, rows, block: the head, the keys and the queries.
          use_weights: starts the product of the weights, before their slopes are computed.
        """
        columns = pl.ds(*block)

        def multiply(s, dp):
            plgpu.wgmma(s, slot.k.at[rows], slot.q.at[columns].T)
            plgpu.wgmma(dp, slot.v.at[rows], slot.g.at[columns].T)
            lse, delta = (
                load_as(x.at[columns], plgpu.Layout.WGMMA.reduce(0)) for x in (slot.lse, slot.delta)
            )
            weights = self.weights(plgpu.wgmma_accumulator_load(s, wait_n=1), lse, 1)
            if self.causal:
                query = block[0] + iota(weights.shape, 1)
                weights = jnp.where(start(rows) + iota(weights.shape, 0) <= query, weights, 0.0)
            if use_weights:
                use_weights(weights)
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=1 if use_weights else 0)
            return self.slopes(weights, dp, delta, 1)

        return pl.run_scoped(multiply, *scores(block))

    def rest_products(
        self, warpgroup: jax.Array, rows: Rows, *pairs: tuple[Ref, jax.Array]
    ) -> Sums:
        """Products of a tile's transposed features, [64 features, ROWS], with each [ROWS, STEP]."""
        # Otherwise the compiler computes the addresses of strips before the loop over tiles, and spills them.
        strips = self.scratch.results[1].at[lax.optimization_barrier(warpgroup)]
        places = [pl.ds(i * STEP, STEP) for i in range(len(pairs))]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a tile of results was there
        for place, (_, strip) in zip(places, pairs):
            strips.at[place].T[...] = strip.astype(self.q.dtype)
        plgpu.commit_smem()
        firsts = backward_heads.features(self.heads.width)

        def multiply(*sums):
            remaining = iter(sums)
            for place, (operand, _) in zip(places, pairs):
                for first in firsts:
                    features = operand.at[rows, pl.ds(first, 64)].T
                    plgpu.wgmma(next(remaining), features, strips.at[place].T)
            return tuple(plgpu.wgmma_accumulator_load(x, wait_n=0) for x in sums)

        count = len(pairs) * len(firsts)
        return pl.run_scoped(
            multiply, *[plgpu.WGMMAAccumulatorRef((64, STEP), jnp.float32)] * count
        )

    def corner(self, x: jax.Array) -> jax.Array:
        """[ROWS, STEP] with zeros in the rows before the rest, and past the end of the sequence."""
        row = iota(x.shape, 0) - (ROWS - STEP)
        return jnp.where((row >= 0) & (row < self.heads.rest), x, 0.0)

    def put_rest(self, sums: Sums, kind: int, warpgroup: jax.Array, scale: bool) -> None:
        """Writes the sums of one warpgroup for a gradient of the rest to shared memory."""
        firsts = backward_heads.features(self.heads.width)
        for first, x in zip(firsts, sums):
            if scale:
                x = x * self.scale
            for token in range(self.heads.rest):
                column = jnp.where(iota(x.shape, 1) == token, x, 0.0)
                place = self.scratch.rest.at[warpgroup, kind, token, pl.ds(first, 64)]
                place[...] = jnp.sum(column, axis=1)
        plgpu.commit_smem()

    def store_rest(self, head: jax.Array) -> None:
        """Adds the sums of both warpgroups and writes the gradients of the rest."""
        example, number = self.heads.place(head)
        for kind, to in ((DQ, self.dq), (DK, self.dk), (DV, self.dv)):
            for token in range(self.heads.rest):
                for first in backward_heads.features(self.heads.width):
                    columns = pl.ds(first, 64)
                    total, more = (
                        load_as(
                            self.scratch.rest.at[i, kind, token, columns],
                            plgpu.Layout.WGMMA.reduce(1),
                        )
                        for i in range(COMPUTE)
                    )
                    place = to.at[example, self.heads.whole * ROWS + token, number, columns]
                    store(place, (total + more).astype(to.dtype))

    def find_delta(
        self, slot: Slot, rows: Rows, tile: jax.Array, warpgroup: jax.Array
    ) -> jax.Array:
        """The inner products of a tile of outputs and their gradients: [ROWS]."""
        b = self.scratch
        plgpu.barrier_wait(b.out_full.at[warpgroup])
        out, g = load_as(b.out.at[warpgroup]), load_as(slot.g.at[rows])
        delta = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=1)
        slot.delta[rows] = delta  # some rows of two tiles are written twice, with the same values
        plgpu.commit_smem()  # the next copy to the buffer of out comes after these loads
        plgpu.barrier_arrive(b.out_empty.at[warpgroup])

        @pl.when(tile + COMPUTE >= self.heads.tiles)  # the last tile of this warpgroup
        def _():
            plgpu.barrier_arrive(b.exchange)

        return delta

    def column_blocks(self) -> list[Block]:
        """(first column, number of columns) of each product, tile by tile."""
        return [self.heads.columns(tile) for tile in range(self.heads.tiles)]

    @property
    def scale(self) -> float:
        return self.heads.width**-0.5

    def gradient(self) -> Any:
        return plgpu.WGMMAAccumulatorRef((ROWS, self.heads.width), jnp.float32)

    def add(self, sums: Ref, a: jax.Array, operand: Ref, block: Block) -> None:
        """Adds the product of registers a, [ROWS, columns], and a block of columns."""
        a = a.astype(self.q.dtype)
        first, count = block
        if more := -count % self.heads.line:  # a product takes whole lines of columns
            before = plgpu.layout_cast(jnp.zeros((ROWS, more), a.dtype), plgpu.Layout.WGMMA)
            a = jnp.concatenate([before, a], axis=1)
            first, count = first - more, count + more
        plgpu.wgmma(sums, a, operand.at[pl.ds(first, count)])

    def weights(self, scores: jax.Array, lse: jax.Array, axis: int) -> jax.Array:
        """The softmax of scores, whose `axis` is that of lse."""
        factor = self.scale * LOG2_E
        return jnp.exp2(scores * factor - lax.broadcast_in_dim(lse, scores.shape, (axis,)))

    def slopes(self, weights: jax.Array, dp: jax.Array, delta: jax.Array, axis: int) -> jax.Array:
        """The gradients of scaled scores, from those of weights, dp; `axis` is that of delta."""
        return weights * (dp - lax.broadcast_in_dim(delta, dp.shape, (axis,)))

    def store(
        self, value: jax.Array, to: Ref, head: jax.Array, tile: jax.Array, warpgroup: jax.Array
    ) -> None:
        """Writes a tile of a gradient."""
        example, number = self.heads.place(head)
        results = self.scratch.results[0].at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(results, value.astype(to.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(results, to.at[example, self.heads.rows(tile), number])


def scores(block: Block) -> list[Any]:
    return [plgpu.WGMMAAccumulatorRef((ROWS, block[1]), jnp.float32)] * 2


def zeros(count: int) -> Sums:
    return (pipeline.zeros((64, STEP)),) * count


def plus(sums: Sums, more: Sums) -> Sums:
    return tuple(x + y for x, y in zip(sums, more)) if more else sums


def start(rows: Rows) -> jax.Array | int:
    assert rows.start is not None
    return rows.start
