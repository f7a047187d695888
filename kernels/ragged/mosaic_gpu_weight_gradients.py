"""Weight gradients of groups of rows in 16 bits, on Hopper.

A step of the pipeline has rows of other groups where a group starts and ends. They are set to zero in shared
memory, in both operands, because they may be NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, TILE_N, Ref, Scratch, SumSteps
from swjax.kernels.ragged.schedule import ALIGNMENT, bounds, largest_first
from swjax.kernels.weight_gradients.mosaic_gpu import STAGES


@dataclass(frozen=True)
class GroupWork:
    """The base of the `pipeline.Work` of one block of threads. A unit is a tile of the gradient of one group.

    Attributes:
      inputs: arrays of the product.
      out: [groups, k, n].
      block, blocks: the block, and the number of those that share the tiles of all groups.
      grid: rows and columns of tiles of a group.
    """

    inputs: Any
    out: Ref
    scratch: Scratch
    block: jax.Array
    blocks: int
    grid: tuple[int, int]

    def units(self) -> jax.Array:
        rows, columns = self.grid
        total = self.out.shape[0] * rows * columns
        return pipeline.unit_count(total, self.block, self.blocks)

    def tile(self, unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The place of a tile's group in the order of the groups, and the row and column of the tile."""
        rows, columns = self.grid
        index = self.block + unit * self.blocks
        row, column = plgpu.planar_snake(lax.rem(index, rows * columns), self.grid, 1, 4)
        return lax.div(index, rows * columns), row, column


class GradientRefs(NamedTuple):
    """Arrays of the product, or refs to them.

    Attributes:
      group, start, size: [e], the largest groups first: their numbers, first rows, and numbers of rows.
      x, g: [m, k] and [m, n].
    """

    group: Ref
    start: Ref
    size: Ref
    x: Ref
    g: Ref


class RaggedGradientWork(GroupWork):
    """Multiplies rows of 16 bits; its inputs are `GradientRefs`."""

    stages: ClassVar[int] = STAGES
    columns: ClassVar[int] = TILE_N
    sum_dtype: ClassVar[jax.typing.DTypeLike] = jnp.float32

    @property
    def step_rows(self) -> int:
        """Number of rows of a step."""
        return LINE // self.scratch.a.dtype.itemsize

    def rows(self, unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The first row that a unit reads, the first row of its group, and the row after its last one."""
        place, _, _ = self.tile(unit)
        start = self.inputs.start[place]
        aligned = lax.div(start, ALIGNMENT) * ALIGNMENT
        return aligned, start, start + self.inputs.size[place]

    def span(self, unit: jax.Array) -> tuple[int, jax.Array]:
        aligned, _, end = self.rows(unit)
        steps = lax.div(end - aligned + self.step_rows - 1, self.step_rows)
        return 0, jnp.maximum(steps, 1)  # an empty group has a step without rows of its own

    def load(self, unit: jax.Array) -> Callable:
        _, row, column = self.tile(unit)
        aligned, _, _ = self.rows(unit)

        def load_step(step, slot, full):
            along = pl.ds(
                pl.multiple_of(aligned + step * self.step_rows, ALIGNMENT), self.step_rows
            )
            x = self.inputs.x.at[along, pl.ds(row * TILE_M, TILE_M)]
            plgpu.copy_gmem_to_smem(x, self.scratch.a.at[slot], full)
            g = self.inputs.g.at[along, pl.ds(column * TILE_N, TILE_N)]
            plgpu.copy_gmem_to_smem(g, self.scratch.b.at[slot], full)

        return load_step

    def multiply(self, sums: Ref, slot: jax.Array, half: jax.Array) -> None:
        x, g = self.scratch.a, self.scratch.b
        plgpu.wgmma(sums, x.at[slot, :, pl.ds(half * HALF, HALF)].T, g.at[slot])

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> jax.Array:
        aligned, start, end = self.rows(unit)

        def remove_other_groups(step, slot):
            first = aligned + step * self.step_rows
            low, high = start - first, end - first

            @pl.when((low > 0) | (high < self.step_rows))
            def _():
                x = self.scratch.a.at[slot, :, pl.ds(half * HALF, HALF)]
                pieces = [x]
                # Both warpgroups write the same values to the operand that they share, and neither releases
                # the slot before its own product has read it. The interpreter reports that as a race.
                pieces += [
                    self.scratch.b.at[slot, :, pl.ds(at, HALF)] for at in range(0, TILE_N, HALF)
                ]
                for piece in pieces:
                    row = pipeline.iota((self.step_rows, HALF), 0)
                    values = piece[...]
                    known = (row >= low) & (row < high)
                    piece[...] = jnp.where(known, values, jnp.zeros_like(values))
                plgpu.commit_smem()

        return sum_steps(0, self.span(unit)[1], before=remove_other_groups)

    def store(self, unit: jax.Array, sums: jax.Array, half: jax.Array) -> None:
        place, row, column = self.tile(unit)
        area = pl.ds(row * TILE_M + half * HALF, HALF), pl.ds(column * TILE_N, TILE_N)
        to = self.out.at[self.inputs.group[place]].at[area]
        pipeline.store_tile(sums, self.scratch.out.at[half], to)


def ragged_weight_gradient(
    x: jax.Array,
    g: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """`reference.ragged_weight_gradient` of 16-bit operands, for rows a multiple of 8, k and n of 64."""
    del precision  # the products of 16-bit numbers are exact
    (m, k), n, groups = x.shape, g.shape[1], len(group_sizes)
    grid = pl.cdiv(k, TILE_M), pl.cdiv(n, TILE_N)
    blocks = tiles.multiprocessors()
    starts, ends = bounds(group_sizes, m)
    group, start, size = largest_first(starts, ends - starts)

    def ragged_weight_gradient_kernel(inputs, out, scratch):
        block = lax.axis_index("block")
        pipeline.run(RaggedGradientWork(inputs, out, scratch, block, blocks, grid), scratch)

    step = LINE // x.dtype.itemsize
    return pipeline.launch(
        ragged_weight_gradient_kernel,
        jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        rings=[((step, TILE_M), x.dtype), ((step, TILE_N), g.dtype)],
        stages=STAGES,
        blocks=blocks,
        cluster=1,
    )(GradientRefs(group, start, size, x, g))
