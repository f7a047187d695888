"""Weight gradients in int8, of rotated tokens with a scale for each column and block of tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.block_weight_gradients import mosaic_gpu_rotations as rotations
from swjax.kernels.block_weight_gradients.reference import cut_into_blocks
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, Ref, SumSteps
from swjax.kernels.mosaic_gpu.slices import Schedule, Slices, best_slices
from swjax.kernels.weight_gradients.mosaic_gpu import (
    WeightGradientSpec,
    WeightGradientWork,
    why_not_alike,
)

# A thread holds two sums of each element, that of a block in int32 and that of all blocks in float32: 80 and
# 80 registers. Other tiles were 15 to 40% slower: benchmarks/notes/int8_weight_gradients.md.
COLUMNS = 160
PIECE = 32  # columns written at a time, for any dtype
# Slots of the rings, and the time of writing a slice, measured on an H200.
STAGES, WRITE_TOKENS = 5, 1500


@dataclass(frozen=True)
class BlockWeightGradientWork(WeightGradientWork):
    """The `pipeline.Work` of one block of threads.

    x and g are [features, tokens]. A step of the schedule is a block of tokens, whose elements of a feature
    share a scale. A step of the pipeline is LINE tokens.

    Attributes:
      x_scale: [blocks of tokens, features], padded to whole tiles.
      g_scale: the same for the g of all layers, side by side.
    """

    x_scale: Ref
    g_scale: Ref

    stages: ClassVar[int] = STAGES
    columns: ClassVar[int] = COLUMNS
    sum_dtype: ClassVar[jax.typing.DTypeLike] = jnp.int32

    @property
    def block_steps(self) -> int:
        """Number of the pipeline's steps in a block of tokens."""
        return self.spec.step_tokens // LINE

    def span(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, count = super().span(unit)
        return first * self.block_steps, count * self.block_steps

    @property
    def step_tokens(self) -> int:
        return LINE

    @staticmethod
    def operand(array: Ref, tokens: Any, features: Any) -> Ref:
        return array.at[features, tokens]

    def multiply(self, sums: Ref, slot: jax.Array, half: jax.Array) -> None:
        x, g = self.scratch.a, self.scratch.b
        plgpu.wgmma(sums, x.at[slot, pl.ds(half * HALF, HALF)], g.at[slot].T)

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> jax.Array:
        first, count = super().span(unit)
        row, column, layer = self.position(unit)
        row, column = row * TILE_M, (column + layer * self.layer_columns) * COLUMNS

        def sum_block(i):
            return sum_steps(i * self.block_steps, self.block_steps)

        scales = self.x_scale, self.g_scale
        return sum_blocks(sum_block, first, count, scales, (row, column), half)


def sum_blocks(
    sum_block: Callable[[jax.Array], jax.Array],
    first: jax.Array,
    count: jax.Array,
    scales: tuple[Ref, Ref],
    corner: tuple[jax.Array, jax.Array],
    half: jax.Array,
) -> jax.Array:
    """Adds the sums of blocks of tokens for one half of a tile, multiplied by their scales: [HALF, COLUMNS].

    Args:
      sum_block: function of the place of a block among these, that returns its sums.
      first, count: number of the first block, and of blocks.
      scales: of rows and of columns, [blocks, length] each.
      corner: the first row and column of the tile.
      half: of the rows of the tile.
    """
    row, column = corner

    def add_block(i, total):
        # Scales are read before the sum, which hides their latency.
        of_rows, of_columns = (
            pipeline.load_registers(scale.at[first + i], pl.ds(at, length))
            for scale, at, length in zip(scales, (row + half * HALF, column), (HALF, COLUMNS))
        )
        sums = sum_block(i).astype(jnp.float32)
        scaled = sums * lax.broadcast_in_dim(of_columns, sums.shape, (1,))
        return total + scaled * lax.broadcast_in_dim(of_rows, sums.shape, (0,))

    return lax.fori_loop(0, count, add_block, pipeline.zeros((HALF, COLUMNS)))


def block_weight_gradient(
    x: jax.Array, g: jax.Array, present: jax.Array | None = None, **options: Any
) -> jax.Array:
    """`reference.block_weight_gradient`; see `block_weight_gradient_group`."""
    return block_weight_gradient_group(x, (g,), present, **options)[0]


def block_weight_gradient_group(
    x: jax.Array,
    gs: tuple[jax.Array, ...],
    present: jax.Array | None = None,
    *,
    dtypes: tuple[str, str],
    block: int,
    rotation: int,
    out_dtype: str,
    slices: Slices | None = None,
) -> tuple[jax.Array, ...]:
    """`reference.block_weight_gradient_group` of 16-bit operands in int8, for rotations of 128 tokens.

    Tokens are a multiple of 8, k and n of 64.
    """
    del dtypes  # int8
    count, length = cut_into_blocks(x.shape[0], block, rotation)
    (x, x_scale), *of_gs = (
        rotations.quantize_rotated_blocks(operand, present, count=count, length=length)
        for operand in (x, *gs)
    )
    x_scale /= rotation  # exact: both operands are sqrt(rotation) too large
    return _block_products((x, x_scale), of_gs, out_dtype, slices)


def _block_products(
    of_x: tuple[jax.Array, jax.Array],
    of_gs: list[tuple[jax.Array, jax.Array]],
    out_dtype: str,
    slices: Slices | None,
) -> tuple[jax.Array, ...]:
    """For each g, the sum of the scaled products of the blocks of tokens.

    `of_x` is int8 x [k, tokens] and its scales [blocks, k], and so are those of each g with n.
    """
    (x, x_scale), (gs, g_scales) = of_x, zip(*of_gs)
    (k, tokens), n, count, layers = x.shape, len(gs[0]), len(x_scale), len(gs)
    columns = pl.cdiv(n, COLUMNS)
    grid = pl.cdiv(k, TILE_M), columns * layers
    blocks = tiles.multiprocessors()
    slices = slices or best_slices(
        math.prod(grid), tokens, blocks, largest=count, write_tokens=WRITE_TOKENS
    )
    schedule = Schedule(math.prod(grid), blocks, count, slices)
    spec = WeightGradientSpec(grid, tokens // count, schedule)

    def weight_gradient_blocks_kernel(x, gs, x_scale, g_scale, *refs):
        *outs, scratch = refs
        block, done = lax.axis_index("block"), None
        if schedule.adds_slices:
            done = pl.get_global(plgpu.SemaphoreType.REGULAR((schedule.tile_count, 2)))
        work = BlockWeightGradientWork(
            spec, x, gs, tuple(outs), scratch, block, done, x_scale, g_scale
        )
        pipeline.run(work, scratch)

    def padded(scale, length):
        return jnp.pad(scale, ((0, 0), (0, length - scale.shape[1])))

    dws = pipeline.launch(
        weight_gradient_blocks_kernel,
        (jax.ShapeDtypeStruct((k, n), schedule.written_dtype(out_dtype)),) * layers,
        rings=[((TILE_M, LINE), x.dtype), ((COLUMNS, LINE), x.dtype)],
        stages=BlockWeightGradientWork.stages,
        blocks=blocks,
        cluster=1,
        piece=PIECE,
    )(
        x,
        gs,
        padded(x_scale, grid[0] * TILE_M),
        jnp.concatenate([padded(scale, columns * COLUMNS) for scale in g_scales], axis=1),
    )
    return tuple(dw.astype(out_dtype) for dw in dws)


def why_not_group(
    x: jax.Array, gs: tuple[jax.Array, ...], present: jax.Array | None = None, **options: Any
) -> Unavailable | None:
    """Why `block_weight_gradient_group` cannot multiply these; None: it can."""
    return why_not_alike(x, gs) or why_not(x, gs[0], present, **options)


def why_not(
    x: jax.Array,
    g: jax.Array,
    present: jax.Array | None = None,
    *,
    dtypes: tuple[str, str],
    rotation: int,
    **_: Any,
) -> Unavailable | None:
    """Why `block_weight_gradient` cannot multiply these; None: it can."""
    del present  # in the dtype of x
    if dtypes != ("int8", "int8") or rotation != rotations.ROTATION:
        return Unavailable(
            f"is for int8 and rotation={rotations.ROTATION}, got {dtypes} and rotation={rotation}: "
            "use 'xla'"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"is for 16-bit operands, got {x.dtype}: use 'xla'")
    lengths = {"tokens": (x.shape[0], 8), "k": (x.shape[1], 64), "n": (g.shape[1], 64)}
    return pipeline.why_not_multiples(lengths, remedy="triton")


WHY_NOT = {"block_weight_gradient": why_not, "block_weight_gradient_group": why_not_group}
