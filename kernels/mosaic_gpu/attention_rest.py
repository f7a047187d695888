"""The gradients of the rest: the tokens of a head beyond its whole tiles.

As rows of products they would fill 64 rows with at most 16 tokens, so they are columns. The weights of a tile
of 64 tokens and the rest, and their slopes, are computed for the gradients of the tile anyway. Transposed and
in shared memory they are strips, [STEP, ROWS]. What the tile adds to the gradients of the rest are products
of its transposed features, [WIDE, ROWS], and of transposed strips. Products have at least 64 rows, so the
features beyond the first WIDE are columns, and the strips of all gradients are rows. Each warpgroup sums up
its tiles, and the second one adds both sums at the end of a head.

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

# The sum of a gradient is [WIDE features, STEP tokens]. If heads have more features, NARROW is the sum of the
# others, [ROWS, STEP features]: STEP tokens of each gradient, in this order.
DQ, DK, DV, NARROW = range(4)
Sums = dict[int, jax.Array]
Factors = dict[int, tuple[tuple[Ref, ...], jax.Array]]


@dataclass(frozen=True)
class Rest(Memory):
    """The work of one block of threads on the rest of its heads."""

    def no_sums(self, *gradients: int) -> Sums:
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, STEP), jnp.float32), plgpu.Layout.WGMMA)
        return dict.fromkeys((*gradients, *[NARROW] * (len(self.heads.pieces) > 1)), zeros)

    def add_rest(self, sums: Sums, warpgroup: jax.Array, rows: Rows, factors: Factors) -> Sums:
        """Adds the products of a tile to the sums of some gradients, and returns all sums.

        Args:
          sums: of the tiles before.
          warpgroup: the compute warpgroup.
          rows: the tile.
          factors: for each of these gradients an operand, and [ROWS, STEP] weights or slopes.
        """
        # Otherwise the compiler computes the addresses of strips before the loop over tiles, and spills them.
        strips = self.buffers.results[1].at[lax.optimization_barrier(warpgroup)]
        place = lambda gradient: strips.at[pl.ds(gradient * STEP, STEP)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a tile of results was there
        for gradient, (_, factor) in factors.items():
            place(gradient).T[...] = factor.astype(self.q.dtype)
        plgpu.commit_smem()

        def multiply(wide, narrow):
            for gradient, (operand, _) in factors.items():
                plgpu.wgmma(wide[gradient], operand[0].at[rows].T, place(gradient).T)
            all_strips = load(strips.at[pl.ds(0, ROWS)]) if narrow else None
            for gradient, x in narrow.items():
                operand, _ = factors[gradient]
                plgpu.wgmma(x, all_strips, operand[1].at[rows])
            return jax.tree.map(lambda x: plgpu.wgmma_accumulator_load(x, wait_n=0), (wide, narrow))

        accumulators = dict.fromkeys(factors, plgpu.WGMMAAccumulatorRef((ROWS, STEP), jnp.float32))
        wide, narrow = pl.run_scoped(multiply, accumulators, accumulators if NARROW in sums else {})
        sums = sums | {gradient: sums[gradient] + x for gradient, x in wide.items()}
        for gradient, x in narrow.items():
            mine = lax.div(iota(x.shape, 0), STEP) == gradient
            sums[NARROW] += jnp.where(mine, x, 0.0)
        return sums

    def corner(self, x: jax.Array) -> jax.Array:
        """[ROWS, STEP] with zeros in the rows before the rest, and past the end of the sequence."""
        row = iota(x.shape, 0) - (ROWS - STEP)
        return jnp.where((row >= 0) & (row < self.heads.rest), x, 0.0)

    def put_wide(self, sums: Sums, warpgroup: jax.Array) -> Sums:
        """Writes the sums of one warpgroup to shared memory, except NARROW. Returns this one."""
        wide = dict(sums)
        narrow = {NARROW: wide.pop(NARROW)} if NARROW in sums else {}
        for gradient, x in wide.items():
            for token in range(self.heads.rest):
                column = jnp.where(iota(x.shape, 1) == token, x, 0.0)
                place = self.buffers.rest.at[warpgroup, gradient, token, pl.ds(0, WIDE)]
                place[...] = jnp.sum(column, axis=1)
        plgpu.commit_smem()
        return narrow

    def put_narrow(self, sums: Sums, warpgroup: jax.Array) -> None:
        """Writes NARROW, if heads have it, of one warpgroup to shared memory."""
        if NARROW not in sums:
            return
        rows = self.buffers.results[2].at[warpgroup, :, pl.ds(0, STEP)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(rows, sums[NARROW])
        plgpu.commit_smem()
        for gradient in (DQ, DK, DV):
            for token in range(self.heads.rest):
                row = load(rows.at[gradient * STEP + token], plgpu.Layout.WGMMA.reduce(0))
                store(self.buffers.rest.at[warpgroup, gradient, token, pl.ds(WIDE, STEP)], row)
        plgpu.commit_smem()

    def store_rest(self, head: jax.Array, warpgroup: jax.Array) -> None:
        """Adds the sums of both warpgroups and writes the gradients."""
        rest_full = self.buffers.rest_full

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_arrive(rest_full)

        @pl.when(warpgroup == COMPUTE - 1)
        def _():
            plgpu.barrier_wait(rest_full)
            for gradient, to in ((DQ, self.dq), (DK, self.dk), (DV, self.dv)):
                scale = 1.0 if gradient == DV else self.heads.scale
                for token in range(self.heads.rest):
                    self._store_token(head, gradient, to, token, scale)

    def _store_token(
        self, head: jax.Array, gradient: int, to: Ref, token: int, scale: float
    ) -> None:
        example, number = self.heads.place(head)
        row = self.heads.whole * ROWS + token
        for piece in self.heads.pieces:
            features = pl.ds(*piece)
            layout = plgpu.Layout.WGMMA.reduce(0 if piece.first else 1)
            x, y = (
                load(self.buffers.rest.at[i, gradient, token, features], layout)
                for i in range(COMPUTE)
            )
            store(to.at[example, row, number, features], ((x + y) * scale).astype(to.dtype))


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
