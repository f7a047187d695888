"""The products of attention backward: what its compute warpgroups do."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.mosaic_gpu.attention_copies import Slot
from swjax.kernels.mosaic_gpu.attention_heads import (
    COMPUTE,
    LOG2_E,
    ROWS,
    STEP,
    Ref,
    Rows,
    load,
    store,
)
from swjax.kernels.mosaic_gpu.attention_rest import DK, DQ, DV, Rest, Sums, iota

Block = tuple[int, int]  # of columns: the first one, and their number


@dataclass(frozen=True)
class Backward(Rest):
    """The work of one block of threads."""

    def compute(self, warpgroup: jax.Array) -> None:
        """Computes the gradients of the tiles of one warpgroup, of all heads."""

        def compute_head(head, _):
            # Otherwise the compiler computes addresses before the loop over heads, and spills them.
            self.compute_head(head, lax.optimization_barrier(warpgroup))

        lax.fori_loop(0, self.heads.count(), compute_head, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def compute_head(self, head: jax.Array, warpgroup: jax.Array) -> None:
        b, heads = self.buffers, self.heads
        # Of three tiles, the first warpgroup has two with queries as rows, and one with keys. The corner goes
        # to the warpgroup with fewer tiles.
        first_key = COMPUTE - 1 - warpgroup
        count = lambda first: (heads.whole - first + COMPUTE - 1) // COMPUTE
        query_corner = (lax.rem(warpgroup + heads.whole, COMPUTE) == 0).astype(jnp.int32)
        barrier = lax.rem(head, self.slots) * heads.tiles
        wait_queries = lambda tile, _: plgpu.barrier_wait(b.queries_full.at[barrier + tile])
        free_keys = lambda tile, _: plgpu.barrier_arrive(b.keys_empty.at[barrier + tile])

        def query_tile(i, carry):
            waited, sums = carry
            tile = warpgroup + COMPUTE * i
            lax.fori_loop(waited, tile + 1, wait_queries, None)
            return tile + 1, self.query_rows(head, tile, warpgroup, sums)

        def key_tile(i, sums):
            tile = first_key + COMPUTE * i
            sums = self.key_rows(head, tile, warpgroup, sums)
            free_keys(tile, None)
            return sums

        def free_others(tile, _):
            mine = (lax.rem(tile, COMPUTE) == first_key) & (tile < heads.whole)
            pl.when(jnp.logical_not(mine))(lambda: free_keys(tile, None))

        plgpu.barrier_wait(b.lse_full.at[lax.rem(head, self.slots + 1)])
        start = (jnp.int32(0), self.no_sums(DK, DV))
        waited, sums = lax.fori_loop(0, count(warpgroup), query_tile, start)
        lax.fori_loop(waited, heads.tiles, wait_queries, None)
        if heads.rest:
            add_corner = lambda _, sums: self.query_corner(head, warpgroup, sums)
            sums = lax.fori_loop(0, query_corner, add_corner, sums)
        plgpu.barrier_wait(b.exchange)
        if heads.rest:
            sums = self.no_sums(DQ) | self.put_wide(sums, warpgroup)
            add_to_dq = lambda _, sums: self.key_corner(head, warpgroup, sums)
            sums = lax.fori_loop(0, 1 - query_corner, add_to_dq, sums)
        lax.fori_loop(0, heads.tiles, free_others, None)
        sums = lax.fori_loop(0, count(first_key), key_tile, sums)
        if heads.rest:
            self.put_narrow(self.put_wide(sums, warpgroup), warpgroup)
            self.store_rest(head, warpgroup)

    def query_rows(
        self, head: jax.Array, tile: jax.Array, warpgroup: jax.Array, sums: Sums
    ) -> Sums:
        """Computes and writes dq of a tile. Returns the sums of dk and dv of the rest, with this tile."""
        b, slot, rows = self.buffers, self.slot(head), self.heads.rows(tile)
        delta = self.find_delta(slot, rows, tile, warpgroup)
        lse = load(slot.lse.at[rows], plgpu.Layout.WGMMA.reduce(1))

        def sum_up(*dq):
            for block in self.column_blocks():
                wait = partial(plgpu.barrier_wait, b.keys_full.at[slot.first + block[0] // ROWS])
                pl.when(tile < COMPUTE)(wait)  # in the first tile of this warpgroup
                weights, ds = self.query_weights(slot, rows, block, lse, delta)
                self.add(dq, ds, slot.k, block)
            more = sums
            if self.heads.rest:
                factors = {DK: (slot.q, ds), DV: (slot.g, weights)}
                more = self.add_rest(sums, warpgroup, rows, factors)
            return completed(dq), more

        dq, sums = pl.run_scoped(sum_up, *self.gradient())
        self.store([x * self.heads.scale for x in dq], self.dq, head, tile, warpgroup)
        return sums

    def query_corner(self, head: jax.Array, warpgroup: jax.Array, sums: Sums) -> Sums:
        """Adds the products of the rest's queries and keys to the sums of dk and dv of the rest."""
        slot, rows = self.slot(head), self.heads.rows(self.heads.whole)
        delta = self.find_delta(slot, rows, jnp.int32(self.heads.whole), warpgroup)
        lse = load(slot.lse.at[rows], plgpu.Layout.WGMMA.reduce(1))
        weights, ds = self.query_weights(slot, rows, self.column_blocks()[-1], lse, delta)
        factors = {DK: (slot.q, self.corner(ds)), DV: (slot.g, self.corner(weights))}
        return self.add_rest(sums, warpgroup, rows, factors)

    def query_weights(
        self, slot: Slot, rows: Rows, block: Block, lse: jax.Array, delta: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The weights of a block of keys, and their slopes: [ROWS queries, keys]."""
        count = len(self.heads.pieces)  # of products that are started together

        def multiply(s, dp):
            multiply_features(s, slot.q, rows, slot.k, block)
            multiply_features(dp, slot.g, rows, slot.v, block)
            weights = self.weights(plgpu.wgmma_accumulator_load(s, wait_n=count), lse, 0)
            if sum(block) > self.heads.tokens:
                weights = jnp.where(iota(weights.shape, 1) < self.heads.rest, weights, 0.0)
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=0)
            return weights, self.slopes(weights, dp, delta, 0)

        return pl.run_scoped(multiply, *scores(block))

    def key_rows(self, head: jax.Array, tile: jax.Array, warpgroup: jax.Array, sums: Sums) -> Sums:
        """Computes and writes dk and dv of a tile. Returns the sums of dq of the rest, with this tile."""
        b, slot, rows = self.buffers, self.slot(head), self.heads.rows(tile)
        blocks = self.column_blocks()
        free = lambda i: plgpu.barrier_arrive(b.queries_empty.at[slot.first + i])

        def sum_up(*dk_dv):
            dk, dv = dk_dv[: len(self.heads.pieces)], dk_dv[len(self.heads.pieces) :]

            for i, block in enumerate(blocks):

                def add_dv(weights, i=i, block=block):
                    if i > 0:
                        free(i - 1)  # its products are complete, as these weights are
                    self.add(dv, weights, slot.g, block)

                ds = self.key_slopes(slot, rows, block, add_dv)
                self.add(dk, ds, slot.q, block)
            more = sums
            if self.heads.rest:
                more = self.add_rest(sums, warpgroup, rows, {DQ: (slot.k, ds)})
            results = completed(dk), completed(dv)
            free(len(blocks) - 1)
            return *results, more

        dk, dv, sums = pl.run_scoped(sum_up, *self.gradient(), *self.gradient())
        self.store([x * self.heads.scale for x in dk], self.dk, head, tile, warpgroup)
        self.store(dv, self.dv, head, tile, warpgroup)
        return sums

    def key_corner(self, head: jax.Array, warpgroup: jax.Array, sums: Sums) -> Sums:
        """Adds the products of the rest's queries and keys to the sums of dq of the rest."""
        slot, rows = self.slot(head), self.heads.rows(self.heads.whole)
        ds = self.corner(self.key_slopes(slot, rows, self.column_blocks()[-1]))
        return self.add_rest(sums, warpgroup, rows, {DQ: (slot.k, ds)})

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
        columns, count = pl.ds(*block), len(self.heads.pieces)

        def multiply(s, dp):
            multiply_features(s, slot.k, rows, slot.q, block)
            multiply_features(dp, slot.v, rows, slot.g, block)
            lse, delta = (
                load(x.at[columns], plgpu.Layout.WGMMA.reduce(0)) for x in (slot.lse, slot.delta)
            )
            weights = self.weights(plgpu.wgmma_accumulator_load(s, wait_n=count), lse, 1)
            if use_weights:
                use_weights(weights)
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=count if use_weights else 0)
            return self.slopes(weights, dp, delta, 1)

        return pl.run_scoped(multiply, *scores(block))

    def find_delta(
        self, slot: Slot, rows: Rows, tile: jax.Array, warpgroup: jax.Array
    ) -> jax.Array:
        """The inner products of a tile of outputs and their gradients: [ROWS]."""
        b = self.buffers
        plgpu.barrier_wait(b.out_full.at[warpgroup])
        products = (
            load(out).astype(jnp.float32) * load(g.at[rows]).astype(jnp.float32)
            for out, g in zip(self.columns(b.out.at[warpgroup]), slot.g)
        )
        delta = reduce(operator.add, (jnp.sum(x, axis=1) for x in products))
        slot.delta[rows] = delta  # some rows of two tiles are written twice, with the same values
        plgpu.commit_smem()  # the next copy to the buffer of out comes after these loads
        plgpu.barrier_arrive(b.out_empty.at[warpgroup])

        @pl.when(tile + COMPUTE >= self.heads.tiles)  # the last tile of this warpgroup
        def _():
            plgpu.barrier_arrive(b.exchange)

        return delta

    def column_blocks(self) -> list[Block]:
        """(first column, number of columns) of each product; the last is the rest."""
        blocks = [(tile * ROWS, ROWS) for tile in range(self.heads.whole)]
        return blocks + [(self.heads.whole * ROWS, STEP)] * (self.heads.rest > 0)

    def columns(self, ref: Ref) -> list[Ref]:
        """The columns of each piece of the features."""
        return [ref.at[:, pl.ds(*piece)] for piece in self.heads.pieces]

    def gradient(self) -> list[Any]:
        """Accumulators of a tile of a gradient."""
        return [plgpu.WGMMAAccumulatorRef((ROWS, p.width), jnp.float32) for p in self.heads.pieces]

    def add(
        self, sums: tuple[Ref, ...], a: jax.Array, operand: tuple[Ref, ...], block: Block
    ) -> None:
        """Adds the product of registers a, [ROWS, columns], and a block of columns."""
        a = a.astype(self.q.dtype)
        first, count = block
        for x, b, piece in zip(sums, operand, self.heads.pieces):
            more = -count % piece.width  # a product takes a multiple of the width of a line
            columns = a
            if more:
                before = plgpu.layout_cast(jnp.zeros((ROWS, more), a.dtype), plgpu.Layout.WGMMA)
                columns = jnp.concatenate([before, a], axis=1)
            plgpu.wgmma(x, columns, b.at[pl.ds(first - more, count + more)])

    def weights(self, scores: jax.Array, lse: jax.Array, axis: int) -> jax.Array:
        """The softmax of scores, whose `axis` is that of lse."""
        factor = self.heads.scale * LOG2_E
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
        """Writes a tile of a gradient, given by pieces of the features."""
        example, number = self.heads.place(head)
        results = self.buffers.results[0].at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for columns, value in zip(self.columns(results), values):
            store(columns, value.astype(to.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(results, to.at[example, self.heads.rows(tile), number])


def multiply_features(
    sums: Ref, a: tuple[Ref, ...], rows: Rows, b: tuple[Ref, ...], block: Block
) -> None:
    """Adds the inner products of rows of a and of a block of rows of b."""
    for x, y in zip(a, b):
        plgpu.wgmma(sums, x.at[rows], y.at[pl.ds(*block)].T)


def completed(sums: tuple[Ref, ...]) -> list[jax.Array]:
    return [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in sums]


def scores(block: Block) -> list[Any]:
    """Accumulators of scores and of the gradients of weights."""
    return [plgpu.WGMMAAccumulatorRef((ROWS, block[1]), jnp.float32)] * 2
