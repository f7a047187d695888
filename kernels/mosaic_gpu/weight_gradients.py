"""The weight gradient in 16 bits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, TILE_N, Ref, Scratch, SumSteps
from swjax.kernels.mosaic_gpu.slices import Part, Schedule, Slices, best_slices


@dataclass(frozen=True)
class WeightGradientSpec:
    """The sizes of a weight gradient.

    Attributes:
      grid: rows and columns of tiles in the output [k, n].
      step_tokens: number of tokens of a step.
      schedule: assigns tiles, and slices of tiles, to blocks of threads.
    """

    grid: tuple[int, int]
    step_tokens: int
    schedule: Schedule


@dataclass(frozen=True)
class WeightGradient:
    """The `pipeline.Work` of one block of threads.

    Attributes:
      done: [tiles, 2] semaphores that count the written slices of each half of a tile; None if no tile has
        several slices.
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
        return self.spec.schedule.part_count(self.block)

    def part(self, unit: jax.Array) -> Part:
        return self.spec.schedule.part(self.block, unit)

    def corner(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first row and column of a tile."""
        row, column = plgpu.planar_snake(self.part(unit).tile, self.spec.grid, 1, 4)
        return row * TILE_M, column * self.columns

    def span(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = self.part(unit)
        return part.start, part.stop - part.start

    def load(self, unit: jax.Array) -> Callable:
        row, column = self.corner(unit)

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
        """Writes the first slice of a tile and adds the others in order, so every run computes the same sum.

        A slice waits until the slice before it is written. Most slices do not have to wait, see `Schedule`.
        """
        part, schedule = self.part(unit), self.spec.schedule
        row, column = self.corner(unit)
        piece = pipeline.piece_of(self.out.dtype)
        to = self.out.at[pl.ds(row + half * HALF, HALF), pl.ds(column, self.columns)]
        pieces, buffers = lambda at: sums[:, at : at + piece], self.scratch.out.at[half]
        write = partial(pipeline.store_tile, pieces, buffers, to, piece)
        if not schedule.adds_slices:
            write()
            return

        @pl.when(part.slice == 0)
        def _():
            write()

        @pl.when(part.slice > 0)
        def _():
            pl.semaphore_wait(self.done.at[part.tile, half], part.slice, decrement=False)
            write(reduction_op="add")

        @pl.when(part.tile >= schedule.slices.whole)
        def _():
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(self.done.at[part.tile, half])


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    out_dtype: str = "float32",
    precision: lax.PrecisionLike = None,
    slices: Slices | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`reference.weight_gradient` of 16-bit operands, for tokens a multiple of 8, k and n of 64.

    A unit of work is a `Part`: a whole tile, or one slice of a tile.

    Args:
      x: [tokens, k].
      g: [tokens, n].
      out_dtype: dtype of the result. Sums are in float32.
      precision: has no effect, because 16-bit products are exact in float32.
      slices: how the tokens are cut; None chooses.
      multiprocessors, interpret: for tests.
    """
    del precision
    (tokens, k), n = x.shape, g.shape[1]
    grid = pl.cdiv(k, TILE_M), pl.cdiv(n, TILE_N)
    blocks = multiprocessors or tiles.multiprocessors()
    step_tokens = LINE // x.dtype.itemsize
    steps = pl.cdiv(tokens, step_tokens)
    slices = slices or best_slices(
        math.prod(grid),
        tokens,
        blocks,
        largest=steps // 8,  # a slice has at least about 8 steps
        write_tokens=tiles.WEIGHT_GRADIENT_WRITE_TOKENS,
    )
    schedule = Schedule(math.prod(grid), blocks, steps, slices)
    spec = WeightGradientSpec(grid, step_tokens, schedule)

    def weight_gradient_kernel(x_ref, g_ref, out_ref, *buffers):
        block, done, scratch = lax.axis_index("block"), None, Scratch(*buffers)
        if schedule.adds_slices:
            done = pl.get_global(plgpu.SemaphoreType.REGULAR((schedule.tile_count, 2)))
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
