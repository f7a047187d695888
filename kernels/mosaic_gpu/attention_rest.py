"""The gradients of the rest: the tokens of a head beyond its whole tiles.

As rows of products they would fill 64 rows with at most 16 tokens, so they are columns. The weights of a tile
of 64 tokens and the rest, and their slopes, are computed for the gradients of the tile anyway; transposed,
they are strips, [STEP, ROWS]. What the tile adds to the gradients of the rest are products of its transposed
features, [WIDE, ROWS], and the tile's weights or slopes, [ROWS, STEP]. Products have at least 64 rows, so the
features beyond the first WIDE are columns: both strips are rows, and are multiplied by [ROWS, STEP features].
Each warpgroup sums up its tiles, and the second one adds both sums at the end of a head.

The weights between two tokens of the rest belong to no whole tile. They are the corner. The kernel computes
it as a tile of the last 64 tokens and sets all rows but those of the rest to zero.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.mosaic_gpu.attention_copies import Memory
from swjax.kernels.mosaic_gpu.attention_heads import (
    COMPUTE,
    ROWS,
    STEP,
    WIDE,
    Ref,
    Rows,
    load,
    store,
)

# For each gradient [WIDE features, STEP tokens], and if heads are wider [ROWS, STEP features], of which the
# STEP rows of its strip count.
Sums = tuple[jax.Array, ...]
DQ, DK, DV = range(3)  # places in `Buffers.rest`


@dataclass(frozen=True)
class Rest(Memory):
    """The work of one block of threads on the rest of its heads."""

    def no_sums(self, gradients: int) -> Sums:
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, STEP), jnp.float32), plgpu.Layout.WGMMA)
        return (zeros,) * (gradients * len(self.heads.pieces))

    def rest_products(
        self, warpgroup: jax.Array, rows: Rows, *pairs: tuple[tuple[Ref, ...], jax.Array]
    ) -> Sums:
        """What a tile adds to the sums.

        Args:
          warpgroup: the compute warpgroup.
          rows: the tile.
          *pairs: an operand, and its factor [ROWS, STEP], for each gradient.
        """
        # Otherwise the compiler computes the addresses of strips before the loop over heads, and spills them.
        warpgroup = lax.optimization_barrier(warpgroup)
        strips = self.buffers.results[1].at[warpgroup]
        places = [pl.ds(i * STEP, STEP) for i in range(len(pairs))]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a tile of results was there
        for place, (_, factor) in zip(places, pairs):
            strips.at[place].T[...] = factor.astype(self.q.dtype)
        plgpu.commit_smem()
        wider = len(self.heads.pieces) > 1

        def multiply(*sums):
            remaining = iter(sums)
            all_strips = load(strips.at[pl.ds(0, ROWS)]) if wider else None
            for place, (operand, _) in zip(places, pairs):
                plgpu.wgmma(next(remaining), operand[0].at[rows].T, strips.at[place].T)
                if wider:
                    plgpu.wgmma(next(remaining), all_strips, operand[1].at[rows])
            return tuple(plgpu.wgmma_accumulator_load(x, wait_n=0) for x in sums)

        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, STEP), jnp.float32)
        return pl.run_scoped(multiply, *[accumulator] * (len(pairs) * len(self.heads.pieces)))

    def corner(self, x: jax.Array) -> jax.Array:
        """[ROWS, STEP] with zeros in the rows before the rest, and past the end of the sequence."""
        row = iota(x.shape, 0) - (ROWS - STEP)
        return jnp.where((row >= 0) & (row < self.heads.rest), x, 0.0)

    def put_sums(self, sums: Sums, kinds: tuple[int, ...], warpgroup: jax.Array) -> None:
        """Writes the sums of one warpgroup for some gradients to shared memory."""
        count = len(self.heads.pieces)
        for i, kind in enumerate(kinds):
            wide, *narrow = sums[i * count : (i + 1) * count]
            for token in range(self.heads.rest):
                column = jnp.where(iota(wide.shape, 1) == token, wide, 0.0)
                self.buffers.rest[warpgroup, kind, token, pl.ds(0, WIDE)] = jnp.sum(column, axis=1)
            for x in narrow:
                self._put_rows(x, i * STEP, kind, warpgroup)
        plgpu.commit_smem()

    def _put_rows(self, x: jax.Array, first: int, kind: int, warpgroup: jax.Array) -> None:
        """Writes some rows of [ROWS, STEP features]: the tokens of the rest, from row `first`."""
        rows = self.buffers.results[2].at[warpgroup, :, pl.ds(0, STEP)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(rows, x)
        plgpu.commit_smem()
        for token in range(self.heads.rest):
            row = load(rows.at[first + token], plgpu.Layout.WGMMA.reduce(0))
            store(self.buffers.rest.at[warpgroup, kind, token, pl.ds(WIDE, STEP)], row)

    def store_rest(self, head: jax.Array, warpgroup: jax.Array) -> None:
        """Adds the sums of both warpgroups and writes the gradients."""
        rest_full = self.buffers.rest_full

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_arrive(rest_full)

        @pl.when(warpgroup == COMPUTE - 1)
        def _():
            plgpu.barrier_wait(rest_full)
            for kind, to in ((DQ, self.dq), (DK, self.dk), (DV, self.dv)):
                scale = 1.0 if kind == DV else self.heads.scale
                for token in range(self.heads.rest):
                    self._store_token(head, kind, to, token, scale)

    def _store_token(self, head: jax.Array, kind: int, to: Ref, token: int, scale: float) -> None:
        example, number = self.heads.place(head)
        row = self.heads.whole * ROWS + token
        for piece in self.heads.pieces:
            features = pl.ds(*piece)
            layout = plgpu.Layout.WGMMA.reduce(0 if piece.first else 1)
            x, y = (
                load(self.buffers.rest.at[i, kind, token, features], layout) for i in range(COMPUTE)
            )
            store(to.at[example, row, number, features], ((x + y) * scale).astype(to.dtype))


def plus(sums: Sums, more: Sums) -> Sums:
    return tuple(x + y for x, y in zip(sums, more))


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
