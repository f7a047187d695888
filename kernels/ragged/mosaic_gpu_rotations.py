"""The rotation of `block_weight_gradients.mosaic_gpu_rotations` for blocks of rows of one group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.block_weight_gradients import mosaic_gpu_rotations as rotations
from swjax.kernels.block_weight_gradients.mosaic_gpu_rotations import COLUMNS, ROTATION
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import Ref
from swjax.kernels.ragged.schedule import ALIGNMENT, GroupBlocks


class BlockTables(NamedTuple):
    """The blocks of rows, or refs to them: their number [1], and fields of `schedule.GroupBlocks`."""

    count: Ref
    first: Ref
    start: Ref
    end: Ref
    to: Ref


@dataclass(frozen=True)
class RaggedRotation(rotations.Rotation):
    """The work of one block of threads; the numbers of steps of the blocks of rows differ."""

    tables: BlockTables

    def count(self) -> jax.Array:
        return self.tables.count[0]

    def span(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        first = pl.multiple_of(self.tables.first[number], ALIGNMENT)
        steps = lax.div(self.tables.end[number] - first + ROTATION - 1, ROTATION)
        return first, steps, pl.multiple_of(self.tables.to[number], ROTATION)

    def remover(self, unit: jax.Array, turns: rotations.Turns) -> Callable[[jax.Array], None]:
        """Returns a function that sets the rows of other groups to zero, in the ring: they may be NaN."""
        number, _ = self.place(unit)
        start, end = self.tables.start[number], self.tables.end[number]

        def remove(i):
            first = self.tables.first[number] + turns.step(i) * ROTATION

            @pl.when((first < start) | (first + ROTATION > end))
            def _():
                step = self.scratch.ring.at[turns.slot(i)]
                row = first + pipeline.iota((ROTATION, COLUMNS), 0)
                values = step[...]
                step[...] = jnp.where((row >= start) & (row < end), values, jnp.zeros_like(values))
                plgpu.commit_smem()

        return remove


def quantize_rotated_blocks(
    x: jax.Array,
    blocks: GroupBlocks,
    length: int,
) -> tuple[jax.Array, jax.Array]:
    """Rotates, transposes and quantizes the blocks of x [m, n].

    Returns:
      Values [n, length], sqrt(ROTATION) times the rotated rows, and scales [blocks, n].
    """
    n, programs = x.shape[1], tiles.multiprocessors()
    tables = BlockTables(
        jnp.sum(blocks.counts, keepdims=True), blocks.first, blocks.start, blocks.end, blocks.to
    )

    def ragged_rotation_kernel(x, matrix, tables, values, scale, scratch):
        block = lax.axis_index("block")
        steps = 0  # see `RaggedRotation.span`
        work = RaggedRotation(
            x, matrix, None, values, scale, steps, programs, block, scratch, tables
        )
        pipeline.specialize(work.copy, work.compute)

    out = (
        jax.ShapeDtypeStruct((n, length), jnp.int8),
        jax.ShapeDtypeStruct((len(blocks.first), n), jnp.float32),
    )
    shared = rotations.shared_memory(x.dtype)
    run = pipeline.kernel(ragged_rotation_kernel, out, shared, blocks=programs)
    return run(x, rotations.matrix(x.dtype), tables)
