"""The gradients of the rest: the tokens of a head beyond its whole tiles.

As rows of products they would fill 64 rows with at most 16 tokens. They are columns instead. The weights of a
tile of 64 tokens and the rest, and their slopes, are computed for the gradients of the tile; in shared memory
they are strips [64, 16]. Products of the tile's transposed features, [features, 64], and of the strips are
what the tile adds to the gradients of the rest. Each warpgroup sums up its tiles; the second one adds both
sums at the end of a head.

The weights between two tokens of the rest belong to no whole tile. They are the corner, which is computed as
a tile: the last 64 tokens, of which only the rest counts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.mosaic_gpu.attention_copies import Memory
from swjax.kernels.mosaic_gpu.attention_heads import COMPUTE, FEATURES, ROWS, STEP, Ref, Rows, load

Sums = tuple[jax.Array, ...]  # [FEATURES, STEP] for each block of features
DQ, DK, DV = range(3)  # places in `Buffers.rest`


@dataclass(frozen=True)
class Rest(Memory):
    """The work of one block of threads on the rest of its heads."""

    @property
    def blocks(self) -> list[int]:
        """The first feature of each block of FEATURES. The last block may overlap the one before."""
        return sorted({0, self.heads.width - FEATURES})

    def no_sums(self) -> Sums:
        zeros = jnp.zeros((FEATURES, STEP), jnp.float32)
        return (plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),) * len(self.blocks)

    def rest_products(
        self, warpgroup: jax.Array, rows: Rows, *pairs: tuple[Ref, jax.Array]
    ) -> list[Sums]:
        """The product of a tile's transposed features and of a strip, [ROWS, STEP], for each pair."""
        strips = self.buffers.results[1].at[warpgroup]
        places = [pl.ds(i * STEP, STEP) for i in range(len(pairs))]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a tile of results was there
        for place, (_, strip) in zip(places, pairs):
            strips.at[place].T[...] = strip.astype(self.q.dtype)
        plgpu.commit_smem()

        def multiply(*sums):
            for place, (operand, _), of_operand in zip(places, pairs, self._by_operand(sums)):
                for first, x in zip(self.blocks, of_operand):
                    features = operand.at[rows, pl.ds(first, FEATURES)].T
                    plgpu.wgmma(x, features, strips.at[place].T)
            return [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in sums]

        accumulator = plgpu.WGMMAAccumulatorRef((FEATURES, STEP), jnp.float32)
        count = len(pairs) * len(self.blocks)
        return self._by_operand(pl.run_scoped(multiply, *[accumulator] * count))

    def _by_operand(self, sums):
        count = len(self.blocks)
        return [tuple(sums[i : i + count]) for i in range(0, len(sums), count)]

    def corner(self, x: jax.Array) -> jax.Array:
        """[ROWS, STEP] of the last tokens, with zeros in the rows that are not in the rest."""
        row = iota(x.shape, 0) - (ROWS - STEP)
        return jnp.where((row >= 0) & (row < self.heads.rest), x, 0.0)

    def put_sums(self, sums: Sums, kind: int, warpgroup: jax.Array) -> None:
        """Writes the sums of one warpgroup to shared memory."""
        for first, x in zip(self.blocks, sums):
            for token in range(self.heads.rest):
                column = jnp.where(iota(x.shape, 1) == token, x, 0.0)
                features = pl.ds(first, FEATURES)
                self.buffers.rest[warpgroup, kind, token, features] = jnp.sum(column, axis=1)
        plgpu.commit_smem()

    def store_rest(self, head: jax.Array, warpgroup: jax.Array) -> None:
        """Adds the sums of both warpgroups and writes the gradients."""
        b = self.buffers

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_arrive(b.rest_full)

        @pl.when(warpgroup == COMPUTE - 1)
        def _():
            plgpu.barrier_wait(b.rest_full)
            for kind, to in ((DQ, self.dq), (DK, self.dk), (DV, self.dv)):
                scale = 1.0 if kind == DV else self.heads.scale
                for token in range(self.heads.rest):
                    for first in self.blocks:
                        self._store_features(head, kind, to, token, pl.ds(first, FEATURES), scale)

    def _store_features(self, head, kind, to, token, features, scale):
        example, number = self.heads.place(head)
        x, y = (
            load(self.buffers.rest.at[i, kind, token, features], plgpu.Layout.WGMMA.reduce(1))
            for i in range(COMPUTE)
        )
        row = self.heads.whole * ROWS + token
        to[example, row, number, features] = ((x + y) * scale).astype(to.dtype)


def plus(sums: Sums, more: Sums) -> Sums:
    return tuple(x + y for x, y in zip(sums, more))


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
