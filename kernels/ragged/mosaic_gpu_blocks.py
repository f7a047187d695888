"""The int8 weight gradients of groups of rotated rows, on Hopper.

The rotated rows of a group are a multiple of 128, so the pipeline's steps are steps of one group.
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
from swjax.kernels.availability import Unavailable
from swjax.kernels.block_weight_gradients.mosaic_gpu import COLUMNS, PIECE, STAGES, sum_blocks
from swjax.kernels.block_weight_gradients.mosaic_gpu import why_not as why_not_blocks
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, Ref, SumSteps
from swjax.kernels.ragged.mosaic_gpu_rotations import quantize_rotated_blocks
from swjax.kernels.ragged.mosaic_gpu_weight_gradients import GroupWork
from swjax.kernels.ragged.schedule import (
    GroupBlocks,
    blocks_of_groups,
    largest_first,
    padded_length,
)


class BlockRefs(NamedTuple):
    """Arrays of the product, or refs to them.

    Attributes:
      group, first_block, block_count: [e], the groups with the most blocks first.
      first_step, step_count: [e], the steps of LINE rows of these groups.
      a, b: [k, rows] and [n, rows] int8.
      a_scale, b_scale: [blocks, k] and [blocks, n], padded to whole tiles.
    """

    group: Ref
    first_block: Ref
    block_count: Ref
    first_step: Ref
    step_count: Ref
    a: Ref
    b: Ref
    a_scale: Ref
    b_scale: Ref


@dataclass(frozen=True)
class RaggedBlocksWork(GroupWork):
    """Multiplies blocks of rows of 8 bits; its inputs are `BlockRefs`.

    Attributes:
      block_steps: number of steps of a block of rows; the last block of a group may have fewer.
    """

    block_steps: int

    stages: ClassVar[int] = STAGES
    columns: ClassVar[int] = COLUMNS
    sum_dtype: ClassVar[jax.typing.DTypeLike] = jnp.int32

    def place(self, unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The place of a unit's group in the tables, and the first row and column of its tile."""
        place, row, column = self.tile(unit)
        return place, row * TILE_M, column * COLUMNS

    def span(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        number, _, _ = self.place(unit)
        return self.inputs.first_step[number], self.inputs.step_count[number]

    def load(self, unit: jax.Array) -> Callable:
        _, row, column = self.place(unit)

        def load_step(step, slot, full):
            along = pl.ds(step * LINE, LINE)
            a = self.inputs.a.at[pl.ds(row, TILE_M), along]
            plgpu.copy_gmem_to_smem(a, self.scratch.a.at[slot], full)
            b = self.inputs.b.at[pl.ds(column, COLUMNS), along]
            plgpu.copy_gmem_to_smem(b, self.scratch.b.at[slot], full)

        return load_step

    def multiply(self, sums: Ref, slot: jax.Array, half: jax.Array) -> None:
        a, b = self.scratch.a, self.scratch.b
        plgpu.wgmma(sums, a.at[slot, pl.ds(half * HALF, HALF)], b.at[slot].T)

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> jax.Array:
        number, row, column = self.place(unit)
        first, steps = self.inputs.first_block[number], self.inputs.step_count[number]

        def sum_block(i):
            count = jnp.minimum(steps - i * self.block_steps, self.block_steps)
            return sum_steps(i * self.block_steps, count)

        count = self.inputs.block_count[number]
        scales = self.inputs.a_scale, self.inputs.b_scale
        return sum_blocks(sum_block, first, count, scales, (row, column), half)

    def store(self, unit: jax.Array, sums: jax.Array, half: jax.Array) -> None:
        number, row, column = self.place(unit)
        area = pl.ds(row + half * HALF, HALF), pl.ds(column, COLUMNS)
        to = self.out.at[self.inputs.group[number]].at[area]
        pipeline.store_tile(sums, self.scratch.out.at[half], to)


def ragged_block_weight_gradient(
    x: jax.Array,
    gs: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    dtypes: tuple[str, str],
    block: int,
    rotation: int,
    out_dtype: str,
) -> tuple[jax.Array, ...]:
    """`reference.ragged_block_weight_gradient` for 16-bit operands in int8, with rotations of 128 tokens.

    x is rotated once for all gs. The rotated arrays have at most 134 rows a group more than x and g.
    """
    del dtypes  # int8
    m, groups = x.shape[0], len(group_sizes)
    blocks = blocks_of_groups(group_sizes, m, block, rotation)
    length = padded_length(m, groups, rotation)
    (a, a_scale), *of_gs = (quantize_rotated_blocks(each, blocks, length) for each in (x, *gs))
    a_scale /= rotation  # exact: both operands are sqrt(rotation) too large
    tables = _tables(blocks, block)

    def product(b, b_scale):
        k, n = len(a), len(b)
        grid = pl.cdiv(k, TILE_M), pl.cdiv(n, COLUMNS)
        programs = tiles.multiprocessors()

        def ragged_blocks_kernel(inputs, out, scratch):
            index = lax.axis_index("block")
            work = RaggedBlocksWork(inputs, out, scratch, index, programs, grid, block // LINE)
            pipeline.run(work, scratch)

        of_rows, of_columns = (
            jnp.pad(scale, ((0, 0), (0, count * tile - scale.shape[1])))
            for scale, count, tile in zip((a_scale, b_scale), grid, (TILE_M, COLUMNS))
        )
        return pipeline.launch(
            ragged_blocks_kernel,
            jax.ShapeDtypeStruct((groups, k, n), out_dtype),
            rings=[((TILE_M, LINE), a.dtype), ((COLUMNS, LINE), b.dtype)],
            stages=STAGES,
            blocks=programs,
            cluster=1,
            piece=PIECE,
        )(BlockRefs(**tables, a=a, b=b, a_scale=of_rows, b_scale=of_columns))

    return tuple(product(*of_g) for of_g in of_gs)


def _tables(blocks: GroupBlocks, block: int) -> dict[str, jax.Array]:
    """The tables of `BlockRefs`."""
    group, first, count = largest_first(blocks.first_block, blocks.counts)
    last = jnp.maximum(first + count - 1, 0)
    # All blocks but the last one have `block` rows.
    last_steps = (blocks.end[last] - blocks.first[last] + LINE - 1) // LINE
    steps = jnp.where(count > 0, (count - 1) * (block // LINE) + last_steps, 0)
    return {
        "group": group,
        "first_block": first,
        "block_count": count,
        "first_step": blocks.to[first] // LINE,
        "step_count": steps,
    }


def why_not_block_weight_gradient(
    x: jax.Array, gs: tuple[jax.Array, ...], *_: Any, **options: Any
) -> Unavailable | None:
    """Why `ragged_block_weight_gradient` cannot multiply these; None: it can."""
    return next(filter(None, (why_not_blocks(x, g, **options) for g in gs)), None)
