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
      slices: number of parts that the steps are cut into.
    """

    grid: tuple[int, int]
    blocks: int
    steps: int
    step_tokens: int
    slices: int

    @property
    def tile_count(self) -> int:
        return self.grid[0] * self.grid[1]


class Unit(NamedTuple):
    """A slice of a tile: the numbers of both, and the first row and column of the tile."""

    slice: jax.Array
    tile: jax.Array
    row: jax.Array
    column: jax.Array


@dataclass(frozen=True)
class WeightGradient:
    """The `pipeline.Work` of one block of threads.

    Attributes:
      done: [tiles, 2] semaphores that count the slices written of each half tile; None with one slice.
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
        total = self.spec.tile_count * self.spec.slices
        return pipeline.unit_count(total, self.block, self.spec.blocks)

    def unit(self, i: jax.Array) -> Unit:
        """Units are numbered slice by slice, so that blocks that run at the same time read the same tokens,
        from the L2 cache."""
        number = self.block + i * self.spec.blocks
        slice_, tile = number // self.spec.tile_count, lax.rem(number, self.spec.tile_count)
        row, column = plgpu.planar_snake(tile, self.spec.grid, 1, 4)
        return Unit(slice_, tile, row * TILE_M, column * self.columns)

    def span(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        steps, slices = self.spec.steps, self.spec.slices
        number = self.unit(unit).slice
        start = number * steps // slices
        return start, (number + 1) * steps // slices - start

    def load(self, unit: jax.Array) -> Callable:
        _, _, row, column = self.unit(unit)

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
        number, tile, row, column = self.unit(unit)
        piece = pipeline.piece_of(self.out.dtype)
        to = self.out.at[pl.ds(row + half * HALF, HALF), pl.ds(column, self.columns)]
        pieces, buffers = lambda at: sums[:, at : at + piece], self.scratch.out.at[half]
        write = partial(pipeline.store_tile, pieces, buffers, to, piece)
        if self.spec.slices == 1:
            write()
            return

        @pl.when(number == 0)
        def _():
            write()

        @pl.when(number > 0)
        def _():
            pl.semaphore_wait(self.done.at[tile, half], number, decrement=False)
            write(reduction_op="add")

        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(self.done.at[tile, half])


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    out_dtype: str = "float32",
    precision: lax.PrecisionLike = None,
    slices: int | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`reference.weight_gradient` of 16-bit operands, for tokens a multiple of 8, k and n of 64.

    The output has few tiles: 1280 x 5120 has 200, and with 132 multiprocessors the last round of whole tiles
    would be half empty. So tokens are cut into slices, and a unit of work is one slice of one tile.
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
        if slices > 1:
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
