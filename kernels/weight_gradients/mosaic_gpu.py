"""Weight gradients in 16 bits, of one layer or of several layers that share their input."""

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

# Slots of the rings, and the time of writing a slice, measured on an H200.
STAGES, WRITE_TOKENS = 4, 600


@dataclass(frozen=True)
class WeightGradientSpec:
    """The sizes of a weight gradient.

    Attributes:
      grid: rows and columns of tiles, where the outputs [k, n] of all layers are side by side.
      step_tokens: number of tokens of a step.
      schedule: assigns tiles, and slices of tiles, to blocks of threads.
    """

    grid: tuple[int, int]
    step_tokens: int
    schedule: Schedule


@dataclass(frozen=True)
class WeightGradientWork:
    """The `pipeline.Work` of one block of threads.

    Attributes:
      gs, outs: the output gradient of each layer, and its weight gradient.
      done: [tiles, 2] semaphores that count the written slices of each half of a tile; None if no tile has
        several slices.
    """

    spec: WeightGradientSpec
    x: Ref
    gs: tuple[Ref, ...]
    outs: tuple[Ref, ...]
    scratch: Scratch
    block: jax.Array
    done: Ref

    stages: ClassVar[int] = STAGES
    columns: ClassVar[int] = TILE_N
    sum_dtype: ClassVar[jax.typing.DTypeLike] = jnp.float32

    def units(self) -> jax.Array:
        return self.spec.schedule.part_count(self.block)

    def part(self, unit: jax.Array) -> Part:
        return self.spec.schedule.part(self.block, unit)

    def corner(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first row and column of a tile in its layer's gradient."""
        row, column, _ = self.position(unit)
        return row * TILE_M, column * self.columns

    @property
    def layer_columns(self) -> int:
        """Number of columns of tiles in the gradient of one layer."""
        return self.spec.grid[1] // len(self.outs)

    def position(self, unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The row and the column of a tile in its layer's gradient, and the number of the layer."""
        row, column = plgpu.planar_snake(self.part(unit).tile, self.spec.grid, 1, 4)
        return row, lax.rem(column, self.layer_columns), column // self.layer_columns

    def for_layer(self, layer: jax.Array, function: Callable[[Ref, Ref], None]) -> None:
        """Calls ``function(g, out)`` with the arrays of a layer."""
        if len(self.outs) == 1:
            function(self.gs[0], self.outs[0])
            return
        for number, arrays in enumerate(zip(self.gs, self.outs)):
            pl.when(layer == number)(partial(function, *arrays))

    def span(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = self.part(unit)
        return part.start, part.stop - part.start

    def load(self, unit: jax.Array) -> Callable:
        (row, column), layer = self.corner(unit), self.position(unit)[2]

        def load_step(step, slot, full):
            along = pl.ds(step * self.step_tokens, self.step_tokens)

            def load_gradient(g: Ref, out: Ref) -> None:
                del out
                part = self.operand(g, along, pl.ds(column, self.columns))
                plgpu.copy_gmem_to_smem(part, self.scratch.b.at[slot], full)

            part = self.operand(self.x, along, pl.ds(row, TILE_M))
            plgpu.copy_gmem_to_smem(part, self.scratch.a.at[slot], full)
            self.for_layer(layer, load_gradient)

        return load_step

    @property
    def step_tokens(self) -> int:
        """Number of tokens of a step of the pipeline."""
        return self.spec.step_tokens

    @staticmethod
    def operand(array: Ref, tokens: Any, features: Any) -> Ref:
        """Some tokens and features of x or of a gradient."""
        return array.at[tokens, features]

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
        (row, column), layer = self.corner(unit), self.position(unit)[2]
        area = pl.ds(row + half * HALF, HALF), pl.ds(column, self.columns)

        def write(**options):
            def store(g: Ref, out: Ref) -> None:
                del g
                pipeline.store_tile(sums, self.scratch.out.at[half], out.at[area], **options)

            self.for_layer(layer, store)

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


def weight_gradient(x: jax.Array, g: jax.Array, **options: Any) -> jax.Array:
    """`reference.weight_gradient` of 16-bit operands; see `weight_gradient_group`."""
    return weight_gradient_group(x, (g,), **options)[0]


def weight_gradient_group(
    x: jax.Array,
    gs: tuple[jax.Array, ...],
    *,
    out_dtype: str = "float32",
    precision: lax.PrecisionLike = None,
    slices: Slices | None = None,
) -> tuple[jax.Array, ...]:
    """`reference.weight_gradient_group` of 16-bit operands, for tokens a multiple of 8, k and n of 64.

    A unit of work is a `Part`: a whole tile, or one slice of a tile. The layers share one schedule, so fewer
    tiles are cut than by one kernel for each layer.

    Args:
      x: [tokens, k].
      gs: [tokens, n] each.
      out_dtype: dtype of the result. Sums are in float32.
      precision: has no effect, because 16-bit products are exact in float32.
      slices: how the tokens are cut; None chooses.
    """
    del precision
    (tokens, k), n, layers = x.shape, gs[0].shape[1], len(gs)
    grid = pl.cdiv(k, TILE_M), pl.cdiv(n, TILE_N) * layers
    blocks = tiles.multiprocessors()
    step_tokens = LINE // x.dtype.itemsize
    steps = pl.cdiv(tokens, step_tokens)
    slices = slices or best_slices(
        math.prod(grid),
        tokens,
        blocks,
        largest=steps // 8,  # a slice has at least about 8 steps
        write_tokens=WRITE_TOKENS,
    )
    schedule = Schedule(math.prod(grid), blocks, steps, slices)
    spec = WeightGradientSpec(grid, step_tokens, schedule)

    def weight_gradient_kernel(x, gs, *refs):
        *outs, scratch = refs
        block, done = lax.axis_index("block"), None
        if schedule.adds_slices:
            done = pl.get_global(plgpu.SemaphoreType.REGULAR((schedule.tile_count, 2)))
        pipeline.run(WeightGradientWork(spec, x, gs, tuple(outs), scratch, block, done), scratch)

    dws = pipeline.launch(
        weight_gradient_kernel,
        (jax.ShapeDtypeStruct((k, n), schedule.written_dtype(out_dtype)),) * layers,
        rings=[((step_tokens, TILE_M), x.dtype), ((step_tokens, TILE_N), x.dtype)],
        stages=WeightGradientWork.stages,
        blocks=blocks,
        cluster=1,
    )(x, gs)
    return tuple(dw.astype(out_dtype) for dw in dws)


def why_not_group(x: jax.Array, gs: tuple[jax.Array, ...], **_: Any) -> Unavailable | None:
    """Why `weight_gradient_group` cannot multiply these; None: it can."""
    return why_not_alike(x, gs) or why_not(x, gs[0])


def why_not_alike(x: jax.Array, gs: tuple[jax.Array, ...]) -> Unavailable | None:
    """Why a kernel for a group of layers cannot take these arrays together; None: it can."""
    if len(widths := sorted({g.shape[1] for g in gs})) > 1:
        return Unavailable(f"needs equal n, got {widths}: use 'xla'")
    if len(dtypes := sorted({str(array.dtype) for array in (x, *gs)})) > 1:
        return Unavailable(f"needs x and g of one dtype, got {', '.join(dtypes)}: use 'xla'")
    return None


def why_not(x: jax.Array, g: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Why `weight_gradient` cannot multiply these; None: it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"is for 16-bit operands, got {x.dtype}: use 'xla'")
    lengths = {"tokens": (x.shape[0], 8), "k": (x.shape[1], 64), "n": (g.shape[1], 64)}
    return pipeline.why_not_multiples(lengths, remedy="xla")


WHY_NOT = {"weight_gradient": why_not, "weight_gradient_group": why_not_group}
