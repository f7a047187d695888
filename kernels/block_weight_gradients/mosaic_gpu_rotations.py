"""Rotated tokens in int8, transposed, with a scale for each column and block of tokens.

One block of threads stays on each multiprocessor. A unit of work is COLUMNS columns of one block of tokens,
cut into steps of ROTATION tokens. One warpgroup copies steps into a ring in shared memory. Two warpgroups
compute; one processes the even steps, the other the odd steps::

    first pass    rotates each step, and keeps the largest magnitude of each column
    exchange      takes the larger magnitude of both warpgroups, which gives the scale
    second pass   rotates each step again, quantizes it, writes it, and releases its slot

A block of rotated tokens fits neither into registers nor next to the ring, so it is computed twice. The
tensor cores have time for that: the kernel waits for memory, which it reads once.

Tokens that are not present are multiplied by zero in the ring, in the first pass. Only blocks that have such
tokens pay for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.formats import INVERSE, LARGEST, SMALLEST_ABSMAX
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import Ref
from swjax.kernels.rotations.reference import rotation_matrix

ROTATION = 128  # tokens
COLUMNS = 64  # rows of a product of one warpgroup
STAGES = 10  # even, so that a slot always belongs to the same compute warpgroup
# Added to |x| < 2**22, it leaves the nearest integer, ties to even, in the low bits of the sum.
ROUNDER = 1.5 * 2.0**23


class RotationScratch(NamedTuple):
    """The shared memory of a block.

    Attributes:
      ring: [STAGES, ROTATION, COLUMNS], steps of x.
      matrix: [ROTATION, ROTATION], the rotation; axes are token and rotated token.
      values: [2, COLUMNS, ROTATION], the quantized step of each compute warpgroup.
      largest: [2, 2, COLUMNS], the magnitudes that they exchange.
      scale: [COLUMNS], the scales of the unit.
      full, empty: a barrier for each slot of the ring.
      matrix_full: barrier for the copy of the matrix.
      exchange: barrier at which both compute warpgroups wait for each other.
    """

    ring: Ref
    matrix: Ref
    values: Ref
    largest: Ref
    scale: Ref
    full: Ref
    empty: Ref
    matrix_full: Ref
    exchange: Ref


class Turns(NamedTuple):
    """The steps of a unit that one compute warpgroup processes: every second step.

    Attributes:
      used: number of steps of all units before, of both warpgroups.
      first: first step of this warpgroup in the unit.
      total: number of its steps.
    """

    used: jax.Array
    first: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, warpgroup: jax.Array, used: jax.Array, steps: jax.Array | int) -> "Turns":
        """Counted over all units, the steps of warpgroup 0 are even, and those of warpgroup 1 are odd."""
        first = lax.rem(used + warpgroup, 2)
        return cls(used, first, (steps + 1 - first) // 2)

    def step(self, i: jax.Array) -> jax.Array:
        """Step number of turn i, counted from the beginning of the unit."""
        return self.first + 2 * i

    def slot(self, i: jax.Array) -> jax.Array:
        return lax.rem(self.used + self.step(i), STAGES)


@dataclass(frozen=True)
class Rotation:
    """The work of one block of threads.

    Attributes:
      x: [tokens, n].
      matrix: [ROTATION, ROTATION].
      present: [blocks of tokens * length] factors of the tokens, and absent [blocks of tokens] int32, whether
        a factor of the block is 0; None: all factors are 1.
      values: [n, blocks of tokens * length].
      scale: [blocks of tokens, n].
      steps: number of steps of a block of tokens.
      blocks: number of blocks of threads that share the units.
      block: number of this block of threads.
      scratch: its shared memory.
    """

    x: Ref
    matrix: Ref
    present: tuple[Ref, Ref] | None
    values: Ref
    scale: Ref
    steps: int
    blocks: int
    block: jax.Array
    scratch: RotationScratch

    def count(self) -> jax.Array | int:
        """Returns the number of blocks of tokens."""
        return self.scale.shape[0]

    def span(self, number: jax.Array) -> tuple[jax.Array, jax.Array | int, jax.Array]:
        """Returns the first token of a block, the number of its steps, and the place of its first value."""
        first = number * self.steps * ROTATION
        return first, self.steps, first

    def units(self) -> jax.Array:
        across = pl.cdiv(self.scale.shape[1], COLUMNS)
        return pipeline.unit_count(self.count() * across, self.block, self.blocks)

    def place(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the block of tokens of a unit, and its first column."""
        number, across = self.block + unit * self.blocks, pl.cdiv(self.scale.shape[1], COLUMNS)
        return number // across, lax.rem(number, across) * COLUMNS

    def copy(self) -> None:
        """Copies all steps: the memory warpgroup."""
        plgpu.copy_gmem_to_smem(self.matrix, self.scratch.matrix, self.scratch.matrix_full)

        def copy_unit(unit, used):
            number, column = self.place(unit)
            first, steps, _ = self.span(number)

            def copy_step(s, used):
                pipeline.wait_for_slot(self.scratch.empty, used, STAGES)
                slot = lax.rem(used, STAGES)
                tokens = pl.ds(first + s * ROTATION, ROTATION)
                source = self.x.at[tokens, pl.ds(column, COLUMNS)]
                plgpu.copy_gmem_to_smem(
                    source, self.scratch.ring.at[slot], self.scratch.full.at[slot]
                )
                return used + 1

            return lax.fori_loop(0, steps, copy_step, used)

        used = lax.fori_loop(0, self.units(), copy_unit, 0)
        pipeline.wait_for_readers(self.scratch.empty, used, STAGES)

    def compute(self, warpgroup: jax.Array) -> None:
        """Quantizes and writes the steps of one compute warpgroup."""
        plgpu.barrier_wait(self.scratch.matrix_full)

        def compute_unit(unit, used):
            _, steps, _ = self.span(self.place(unit)[0])
            turns = Turns.of(warpgroup, used, steps)
            absmax = self.exchange(warpgroup, lax.rem(unit, 2), self.find_largest(unit, turns))
            self.write_scale(warpgroup, unit, absmax)
            self.write_values(warpgroup, unit, turns, LARGEST["int8"] / absmax)
            return used + steps

        lax.fori_loop(0, self.units(), compute_unit, 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def rotated(self, slot: jax.Array) -> jax.Array:
        """Returns the tokens of a slot, rotated: float32 [COLUMNS, ROTATION]."""

        def multiply(out):
            plgpu.wgmma(out, self.scratch.ring.at[slot].T, self.scratch.matrix)
            plgpu.wgmma_wait(0)
            return out[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((COLUMNS, ROTATION), jnp.float32))

    def find_largest(self, unit: jax.Array, turns: Turns) -> jax.Array:
        """Returns the largest magnitude in the steps of this warpgroup: [COLUMNS]."""
        remove_absent = self.remover(unit, turns)

        def turn(i, largest):
            slot = turns.slot(i)
            plgpu.barrier_wait(self.scratch.full.at[slot])
            remove_absent(i)
            return jnp.maximum(largest, jnp.max(jnp.abs(self.rotated(slot)), axis=1))

        smallest = jnp.full((COLUMNS,), SMALLEST_ABSMAX, jnp.float32)
        smallest = plgpu.layout_cast(smallest, plgpu.Layout.WGMMA.reduce(1))
        return lax.fori_loop(0, turns.total, turn, smallest)

    def remover(self, unit: jax.Array, turns: Turns) -> Callable[[jax.Array], None]:
        """Returns a function that multiplies the tokens of a turn by their factors, in the ring."""
        if self.present is None:
            return lambda i: None
        present, absent = self.present
        number, _ = self.place(unit)
        some = absent[number] > 0

        def remove(i):
            @pl.when(some)
            def _():
                step = self.scratch.ring.at[turns.slot(i)]
                tokens = pl.ds((number * self.steps + turns.step(i)) * ROTATION, ROTATION)
                factors = pipeline.load_registers(present, tokens)
                x = plgpu.layout_cast(step[...], plgpu.Layout.WGMMA)
                step[...] = x * lax.broadcast_in_dim(factors, x.shape, (0,))
                plgpu.commit_smem()

        return remove

    def exchange(self, warpgroup: jax.Array, parity: jax.Array, largest: jax.Array) -> jax.Array:
        """Returns the larger magnitude of both warpgroups: [COLUMNS].

        Units alternate between two places: a warpgroup may still read one while the other has gone on to the
        next unit.
        """
        at = self.scratch.largest.at[parity]
        at[warpgroup] = largest
        plgpu.barrier_arrive(self.scratch.exchange)
        plgpu.barrier_wait(self.scratch.exchange)
        return jnp.maximum(largest, pipeline.load_registers(at, 1 - warpgroup))

    def write_scale(self, warpgroup: jax.Array, unit: jax.Array, absmax: jax.Array) -> None:
        number, column = self.place(unit)

        @pl.when(warpgroup == 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.scratch.scale[...] = absmax * INVERSE["int8"]
            plgpu.commit_smem()
            to = self.scale.at[number, pl.ds(column, COLUMNS)]
            plgpu.copy_smem_to_gmem(self.scratch.scale, to)

    def write_values(
        self, warpgroup: jax.Array, unit: jax.Array, turns: Turns, factor: jax.Array
    ) -> None:
        """Quantizes and writes the steps of this warpgroup."""
        number, column = self.place(unit)
        _, _, to = self.span(number)
        factor = lax.broadcast_in_dim(factor, (COLUMNS, ROTATION), (0,))

        def turn(i, _):
            slot = turns.slot(i)
            rounded = self.rotated(slot) * factor + ROUNDER
            plgpu.barrier_arrive(self.scratch.empty.at[slot])
            values = lax.bitcast_convert_type(rounded, jnp.int32).astype(jnp.int8)
            buffer = self.scratch.values.at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = values
            plgpu.commit_smem()
            tokens = pl.ds(to + turns.step(i) * ROTATION, ROTATION)
            plgpu.copy_smem_to_gmem(buffer, self.values.at[pl.ds(column, COLUMNS), tokens])

        lax.fori_loop(0, turns.total, turn, None)


def quantize_rotated_blocks(
    x: jax.Array,
    present: jax.Array | None = None,
    *,
    count: int,
    length: int,
) -> tuple[jax.Array, jax.Array]:
    """Rotates, transposes and quantizes x. The result is sqrt(ROTATION) times the rotated tokens.

    Args:
      x: [tokens, n] bfloat16 or float16; tokens is a multiple of 8, and n of COLUMNS.
      present: [tokens] in the dtype of x, the factors 0 or 1 of the tokens; None: all are 1.
      count: number of blocks of tokens.
      length: number of tokens of a block, a multiple of ROTATION. Tokens past the last of x are zeros.

    Returns:
      Values [n, count * length] and scales [count, n].
    """
    n = x.shape[1]
    blocks = tiles.multiprocessors()
    factors = None if present is None else _by_block(present, count, length)

    def weight_gradient_rotation_kernel(x, matrix, factors, values, scale, scratch):
        block, steps = lax.axis_index("block"), length // ROTATION
        work = Rotation(x, matrix, factors, values, scale, steps, blocks, block, scratch)
        pipeline.specialize(work.copy, work.compute)

    out = (
        jax.ShapeDtypeStruct((n, count * length), jnp.int8),
        jax.ShapeDtypeStruct((count, n), jnp.float32),
    )
    run = pipeline.kernel(
        weight_gradient_rotation_kernel,
        out,
        shared_memory(x.dtype),
        blocks=blocks,
    )
    return run(x, matrix(x.dtype), factors)


def shared_memory(dtype: jax.typing.DTypeLike) -> RotationScratch:
    """The shared memory of a kernel for an x of this dtype."""
    return RotationScratch(
        ring=pipeline.buffer((STAGES, ROTATION, COLUMNS), dtype),
        matrix=pipeline.buffer((ROTATION, ROTATION), dtype),
        values=pipeline.buffer((2, COLUMNS, ROTATION), jnp.int8),
        largest=plgpu.SMEM((2, 2, COLUMNS), jnp.float32),
        scale=plgpu.SMEM((COLUMNS,), jnp.float32),
        full=plgpu.Barrier(num_barriers=STAGES),
        empty=plgpu.Barrier(num_barriers=STAGES),
        matrix_full=plgpu.Barrier(),
        exchange=plgpu.Barrier(num_arrivals=2),
    )


def matrix(dtype: jax.typing.DTypeLike) -> jax.Array:
    """The rotation matrix that the kernels read."""
    return jnp.asarray(rotation_matrix(ROTATION).T, dtype)


def _by_block(present: jax.Array, count: int, length: int) -> tuple[jax.Array, jax.Array]:
    """The factors [count * length] of all tokens, and whether a block has a factor of 0, int32 [count]."""
    padded = jnp.pad(present, (0, count * length - len(present)), constant_values=1)
    return padded, jnp.any(padded.reshape(count, length) == 0, axis=1).astype(jnp.int32)
