"""The weight gradient in 16 bits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, TILE_N, Ref, Scratch, SumSteps


@dataclass(frozen=True)
class WeightGradientSpec:
    """The sizes of a weight gradient.

    Attributes:
      grid: rows and columns of tiles in the output [k, n].
      blocks: number of blocks of threads that share the units.
      steps: number of steps along the tokens.
      step_tokens: number of tokens of a step.
      slices: how the steps are cut.
    """

    grid: tuple[int, int]
    blocks: int
    steps: int
    step_tokens: int
    slices: tiles.Slices

    @property
    def tile_count(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def cut_count(self) -> int:
        """Number of tiles that are cut."""
        return self.tile_count - self.slices.whole

    @property
    def early_steps(self) -> int:
        return min(round(self.slices.early * self.steps), self.steps - self.slices.count)

    @property
    def early_blocks(self) -> int:
        return self.cut_count if self.early_steps else 0

    @property
    def chained(self) -> bool:
        """Whether slices of a tile are added to each other."""
        return self.slices.count > (0 if self.early_steps else 1)


class Unit(NamedTuple):
    """A tile, or a slice of a tile.

    Attributes:
      slice: the number of the slice; 0 for a whole tile.
      start, stop: its first step, and the step after its last one.
      tile: the number of the tile.
      row, column: the first row and column of the tile.
    """

    slice: jax.Array
    start: jax.Array
    stop: jax.Array
    tile: jax.Array
    row: jax.Array
    column: jax.Array


@dataclass(frozen=True)
class WeightGradient:
    """The `pipeline.Work` of one block of threads.

    Attributes:
      done: [tiles, 2] semaphores that count the slices written of each half tile; None without slices.
    """

    spec: WeightGradientSpec
    x: Ref
    g: Ref
    out: Ref
    scratch: Scratch
    block: jax.Array
    done: Ref

    stages: ClassVar[int] = tiles.WEIGHT_GRADIENT_STAGES
    columns: ClassVar[int] = TILE_N
    sum_dtype: ClassVar[jax.typing.DTypeLike] = jnp.float32

    def units(self) -> jax.Array:
        spec, rounds = self.spec, self.spec.slices.whole // self.spec.blocks
        late = pipeline.unit_count(
            spec.cut_count * spec.slices.count,
            self.block - spec.early_blocks,
            spec.blocks - spec.early_blocks,
        )
        return rounds + jnp.where(self.block < spec.early_blocks, 1, late)

    def unit(self, i: jax.Array) -> Unit:
        """The units of a block are::

            early blocks    the early slice of a cut tile, whole tiles
            other blocks    whole tiles, late slices of cut tiles

        Late slices are numbered slice by slice. So blocks that run at the same time read the same tokens,
        from the L2 cache, and slices of a tile seldom end at the same time.
        """
        spec, steps = self.spec, self.spec.steps
        whole, _, count = spec.slices
        is_early = self.block < spec.early_blocks
        late_block, late_blocks = self.block - spec.early_blocks, spec.blocks - spec.early_blocks
        round_ = i - is_early.astype(jnp.int32)
        is_whole = (round_ >= 0) & (round_ < whole // spec.blocks)

        cut_count = max(spec.cut_count, 1)
        late = jnp.maximum(late_block + (i - whole // spec.blocks) * late_blocks, 0)
        cut = jnp.where(is_early, self.block, lax.rem(late, cut_count))
        tile = jnp.where(is_whole, self.block + round_ * spec.blocks, whole + cut)
        row, column = plgpu.planar_snake(tile, spec.grid, 1, 4)

        def late_start(number):
            return spec.early_steps + number * (steps - spec.early_steps) // max(count, 1)

        number = late // cut_count
        start = jnp.where(is_whole | is_early, 0, late_start(number))
        stop = jnp.where(is_early, spec.early_steps, late_start(number + 1))
        slice_ = jnp.where(is_whole | is_early, 0, number + min(spec.early_blocks, 1))
        stop = jnp.where(is_whole, steps, stop)
        return Unit(slice_, start, stop, tile, row * TILE_M, column * self.columns)

    def span(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, start, stop, *_ = self.unit(unit)
        return start, stop - start

    def load(self, unit: jax.Array) -> Callable:
        *_, row, column = self.unit(unit)

        def load_step(step, slot, full):
            along = pl.ds(step * self.spec.step_tokens, self.spec.step_tokens)
            for source, columns, ring in (
                (self.x, pl.ds(row, TILE_M), self.scratch.a),
                (self.g, pl.ds(column, TILE_N), self.scratch.b),
            ):
                plgpu.copy_gmem_to_smem(source.at[along, columns], ring.at[slot], full)

        return load_step

    def multiply(self, sums: Ref, slot: jax.Array, half: jax.Array) -> None:
        x, g = self.scratch.a, self.scratch.b
        plgpu.wgmma(sums, x.at[slot, :, pl.ds(half * HALF, HALF)].T, g.at[slot])

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> jax.Array:
        del half
        return sum_steps(0, self.span(unit)[1])

    def store(self, unit: jax.Array, sums: jax.Array, half: jax.Array) -> None:
        """Writes the first slice and adds the others in order, so that every run computes the same sum.

        Each slice waits for the slice before it, which has nearly always finished.
        """
        number, _, _, tile, row, column = self.unit(unit)
        piece = pipeline.piece_of(self.out.dtype)
        to = self.out.at[pl.ds(row + half * HALF, HALF), pl.ds(column, self.columns)]
        pieces, buffers = lambda at: sums[:, at : at + piece], self.scratch.out.at[half]
        write = partial(pipeline.store_tile, pieces, buffers, to, piece)
        if not self.spec.chained:
            write()
            return

        @pl.when(number == 0)
        def _():
            write()

        @pl.when(number > 0)
        def _():
            pl.semaphore_wait(self.done.at[tile, half], number, decrement=False)
            write(reduction_op="add")

        @pl.when(tile >= self.spec.slices.whole)
        def _():
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(self.done.at[tile, half])


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    out_dtype: str = "float32",
    precision: lax.PrecisionLike = None,
    slices: tiles.Slices | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`reference.weight_gradient` of 16-bit operands, for tokens a multiple of 8, k and n of 64.

    The output has few tiles: 1280 x 5120 has 200, and with 132 multiprocessors the second round of whole
    tiles would be half empty. So the tokens of its tiles are cut into slices, and a unit of work is a whole
    tile or one slice of a tile.
    """
    del precision  # 16-bit products are exact in fp32
    (tokens, k), n = x.shape, g.shape[1]
    grid = pl.cdiv(k, TILE_M), pl.cdiv(n, TILE_N)
    blocks = multiprocessors or tiles.multiprocessors()
    step_tokens = LINE // x.dtype.itemsize
    steps = pl.cdiv(tokens, step_tokens)
    slices = slices or tiles.weight_gradient_slices(
        grid[0] * grid[1],
        tokens,
        blocks,
        largest=steps // 8,
        write_tokens=tiles.WEIGHT_GRADIENT_WRITE_TOKENS,
    )
    spec = WeightGradientSpec(grid, blocks, steps, step_tokens, slices)

    def weight_gradient_kernel(x_ref, g_ref, out_ref, *buffers):
        block, done, scratch = lax.axis_index("block"), None, Scratch(*buffers)
        if spec.chained:
            done = pl.get_global(plgpu.SemaphoreType.REGULAR((spec.tile_count, 2)))
        pipeline.run(WeightGradient(spec, x_ref, g_ref, out_ref, scratch, block, done), scratch)

    dw = pipeline.launch(
        weight_gradient_kernel,
        jax.ShapeDtypeStruct((k, n), jnp.float32),
        rings=[((step_tokens, TILE_M), x.dtype), ((step_tokens, TILE_N), g.dtype)],
        stages=WeightGradient.stages,
        blocks=blocks,
        cluster=1,
        interpret=interpret,
    )(x, g)
    return dw.astype(out_dtype)


def why_not(x: jax.Array, g: jax.Array, **_: Any) -> Unavailable | None:
    """Why `weight_gradient` cannot multiply these; None: it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"is for 16-bit operands, got {x.dtype}: use 'xla'")
    lengths = {"tokens": (x.shape[0], 8), "k": (x.shape[1], 64), "n": (g.shape[1], 64)}
    return pipeline.why_not_multiples(lengths, remedy="xla")
