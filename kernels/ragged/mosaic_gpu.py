"""Products of rows that are sorted by group, on Hopper.

The first tile of a group may start in the group before, at a multiple of `schedule.ALIGNMENT`; only the
group's own rows are written.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, TILE_N, Ref, Scratch, SumSteps
from swjax.kernels.products.mosaic_gpu.product import TiledWork, fits_buffers
from swjax.kernels.products.tiles import MosaicTile
from swjax.kernels.ragged.mosaic_gpu_blocks import (
    ragged_block_weight_gradient,
    why_not_block_weight_gradient,
)
from swjax.kernels.ragged.mosaic_gpu_weight_gradients import ragged_weight_gradient
from swjax.kernels.ragged.schedule import ALIGNMENT, aligned_tiles, bounds
from swjax.kernels.ragged.tiles import mosaic_cluster, mosaic_tile
from swjax.kernels.weight_gradients.mosaic_gpu import why_not as why_not_weight_gradient

__all__ = ["WHY_NOT", "ragged_block_weight_gradient", "ragged_matmul", "ragged_weight_gradient"]


class RaggedRefs(NamedTuple):
    """Arrays of the product, or refs to them.

    Attributes:
      count, group, first, start, end: see `schedule.aligned_tiles`.
      a: [m, k].
      b: [e, n, k], or [e, k, n].
      a_scale: [m] padded by two tiles, or [1] if a has no scales.
      b_scale: [e], or [e n] with n padded to whole tiles, or [1].
      addend: [m, n], or [1] if the product has no addend.
    """

    count: Ref
    group: Ref
    first: Ref
    start: Ref
    end: Ref
    a: Ref
    b: Ref
    a_scale: Ref
    b_scale: Ref
    addend: Ref


@dataclass(frozen=True)
class RaggedSpec:
    """The sizes of a ragged product.

    Attributes:
      groups: number of groups.
      k: length of the sums.
      columns: columns of tiles of the output.
      blocks: clusters of blocks that share the tiles.
      cluster: 2 if two blocks, whose tiles are adjacent rows of a group, share their tile of b.
      tile: how the kernel cuts its work.
      out_dtype: dtype of the result.
      scaled: whether a and b have scales.
      channels: whether b has a scale for each group and column, rather than for each group.
      last: whether the last axis of b is summed over.
      addend: whether an array [m, n] is added.
      step: length of a step along k.
    """

    groups: int
    k: int
    columns: int
    blocks: int
    cluster: int
    tile: MosaicTile
    out_dtype: str
    scaled: bool
    channels: bool
    last: bool
    addend: bool
    step: int


class Place(NamedTuple):
    """Where a tile, or one half of it, is.

    Attributes:
      number: of the tile in the tables.
      row, column: its first row and column.
    """

    number: jax.Array
    row: jax.Array
    column: jax.Array


class Sums(NamedTuple):
    """The sums of one half of a tile, and what was read before them.

    Attributes:
      place: of this half.
      group: its group.
      sums: [HALF, TILE_N].
      row_scale: [HALF], the scales of a, times the scale of b if its group has one; None without scales.
    """

    place: Place
    group: jax.Array
    sums: jax.Array
    row_scale: jax.Array | None


@dataclass(frozen=True)
class RaggedWork(TiledWork):
    """The `pipeline.Work` of one block of threads."""

    spec: RaggedSpec
    inputs: RaggedRefs
    out: Ref
    scratch: Scratch
    block: jax.Array
    columns: ClassVar[int] = TILE_N

    @property
    def piece(self) -> int:
        """Number of columns that are written at a time."""
        return pipeline.piece_of(self.spec.out_dtype)

    def units(self) -> jax.Array:
        total = self.inputs.count[0] * self.spec.columns
        return pipeline.unit_count(total, self.block, self.spec.blocks)

    def span(self, unit: jax.Array) -> tuple[int, int]:
        del unit
        return 0, pl.cdiv(self.spec.k, self.spec.step)

    def place(self, unit: jax.Array) -> Place:
        spec = self.spec
        grid = self.inputs.count[0], spec.columns
        index = self.block + unit * spec.blocks
        tile, column = plgpu.planar_snake(index, grid, 1, spec.tile.width)
        rank = lax.axis_index("cluster") if spec.cluster > 1 else 0
        row = pl.multiple_of(self.inputs.first[tile], ALIGNMENT) + rank * TILE_M
        return Place(tile, row, column * self.columns)

    def group(self, place: Place) -> jax.Array:
        """The group whose matrix is read; rows beyond the groups read that of the last one."""
        return jnp.minimum(self.inputs.group[place.number], self.spec.groups - 1)

    def load(self, unit: jax.Array) -> Callable:
        place = self.place(unit)
        a, b = self.inputs.a, self.inputs.b.at[self.group(place)]
        columns = pl.ds(place.column, self.columns)

        def copy(step, slot, full):
            along = pl.ds(step * self.spec.step, self.spec.step)
            part = a.at[pl.ds(place.row, TILE_M), along]
            plgpu.copy_gmem_to_smem(part, self.scratch.a.at[slot], full)
            plgpu.copy_gmem_to_smem(
                b.at[columns, along] if self.spec.last else b.at[along, columns],
                self.scratch.b.at[slot],
                full,
                collective_axes="cluster" if self.spec.cluster > 1 else None,
            )

        return copy

    def multiply(self, sums: Ref, slot: jax.Array, half: jax.Array) -> None:
        a, b = self.scratch.a.at[slot, pl.ds(half * HALF, HALF)], self.scratch.b.at[slot]
        plgpu.wgmma(sums, a, b.T if self.spec.last else b)

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> Sums:
        place, inputs = self.place(unit), self.inputs
        place = place._replace(row=place.row + half * HALF)
        group, row_scale = self.group(place), None
        if self.spec.scaled:
            row_scale = pipeline.load_registers(inputs.a_scale, pl.ds(place.row, HALF))
            if not self.spec.channels:
                row_scale = row_scale * inputs.b_scale[group]

        def load_addend():
            addend = inputs.addend.at[self.area_of(place)]
            pipeline.load_tile(addend, self.scratch.out.at[half], self.scratch.addend.at[half])

        sums = sum_steps(0, self.span(unit)[1], load_addend if self.spec.addend else None)
        return Sums(place, group, sums, row_scale)

    def area_of(self, place: Place) -> tuple[Any, Any]:
        """The rows and the columns of one half of a tile."""
        return pl.ds(place.row, HALF), pl.ds(place.column, self.columns)

    def store(self, unit: jax.Array, total: Sums, half: jax.Array) -> None:
        del unit
        if self.spec.addend:
            plgpu.barrier_wait(self.scratch.addend.at[half])
        place, inputs = total.place, self.inputs
        start = jnp.clip(inputs.start[place.number] - place.row, 0, HALF)
        count = jnp.clip(inputs.end[place.number] - place.row, start, HALF) - start
        beyond = inputs.group[place.number] == self.spec.groups
        whole = (count == HALF) & ~beyond
        values, buffers = partial(self.scaled, total), self.scratch.out.at[half]
        to = self.out.at[self.area_of(place)]

        @pl.when(whole)
        def _():
            pipeline.store_tile(values, buffers, to, add=self.spec.addend)

        write = partial(
            pipeline.store_rows, buffer=self.scratch.edge.at[half], to=to, rows=(start, count)
        )

        @pl.when(~whole & ~beyond)
        def _():
            def piece(at):
                y = values(at)
                if self.spec.addend:
                    y = y + buffers[at // self.piece].astype(jnp.float32)
                return y

            write(piece)

        @pl.when(beyond)
        def _():
            write(lambda at: jnp.zeros((HALF, self.piece), jnp.float32))

    def scaled(self, total: Sums, at: int) -> jax.Array:
        """The columns of the product from column `at` of the tile on, in float32."""
        y = total.sums[:, at : at + self.piece].astype(jnp.float32)
        if total.row_scale is None:
            return y
        scale = lax.broadcast_in_dim(total.row_scale, y.shape, (0,))
        if self.spec.channels:
            start = total.group * (self.spec.columns * TILE_N) + total.place.column + at
            of_columns = pipeline.load_registers(self.inputs.b_scale, pl.ds(start, self.piece))
            scale = scale * lax.broadcast_in_dim(of_columns, y.shape, (1,))
        return y * scale


def ragged_matmul(
    a: jax.Array | QTensor,
    b: jax.Array | QTensor,
    group_sizes: jax.Array,
    addend: jax.Array | None = None,
    *,
    axis: int,
    out_dtype: str,
    precision: lax.PrecisionLike = None,
    tile: MosaicTile | None = None,
) -> jax.Array:
    """`reference.ragged_matmul` for operands of 8 and 16 bits. Transposes 8-bit matrices if `axis` is 1."""
    if isinstance(b, QTensor) and axis == 1:
        b, axis = QTensor(b.values.mT, b.scale.mT), 2
    values = a.values if isinstance(a, QTensor) else a
    matrices = b.values if isinstance(b, QTensor) else b
    (m, k), groups, n, dtype = values.shape, len(matrices), matrices.shape[3 - axis], values.dtype
    cluster = mosaic_cluster(m, groups)
    fused = addend is not None and fits_buffers(addend, out_dtype)
    tile = tile or mosaic_tile(n, k, dtype.itemsize)
    if fused:  # memory of a slot serves the addend
        tile = replace(tile, stages=min(tile.stages, 3))
    spec = RaggedSpec(
        groups=groups,
        k=k,
        columns=pl.cdiv(n, TILE_N),
        blocks=tiles.multiprocessors() // cluster,
        cluster=cluster,
        tile=tile,
        out_dtype=out_dtype,
        scaled=isinstance(a, QTensor),
        channels=isinstance(b, QTensor) and b.scale.size > groups,
        last=axis == 2,
        addend=fused,
        step=LINE // dtype.itemsize,
    )

    def ragged_matmul_kernel(inputs, out, scratch):
        pipeline.run(RaggedWork(spec, inputs, out, scratch, lax.axis_index("block")), scratch)

    of_b = (TILE_N, spec.step) if spec.last else (spec.step, TILE_N)
    y = pipeline.launch(
        ragged_matmul_kernel,
        jax.ShapeDtypeStruct((m, n), out_dtype),
        rings=[((TILE_M, spec.step), dtype), (of_b, matrices.dtype)],
        stages=spec.tile.stages,
        blocks=spec.blocks,
        cluster=cluster,
        addend=spec.addend,
        edge=True,
    )(_inputs(spec, a, b, group_sizes, addend if fused else None))
    if addend is None or fused:
        return y
    y = (y.astype(jnp.float32) + addend.astype(jnp.float32)).astype(out_dtype)
    inside = jnp.arange(m, dtype=jnp.int32) < bounds(group_sizes, m)[1, -1]
    return jnp.where(inside[:, None], y, jnp.zeros((), y.dtype))


def _inputs(spec: RaggedSpec, a, b, group_sizes, addend: jax.Array | None) -> RaggedRefs:
    one = jnp.zeros(1, jnp.float32)
    a_scale = b_scale = one
    if isinstance(a, QTensor):
        (a, a_scale), (b, b_scale) = a, b
        a_scale = jnp.pad(a_scale, ((0, 2 * TILE_M), (0, 0)))
        if spec.channels:  # registers are loaded without bounds checks
            b_scale = b_scale.reshape(len(b), -1)
            padding = spec.columns * TILE_N - b_scale.shape[1]
            b_scale = jnp.pad(b_scale, ((0, 0), (0, padding)))
    return RaggedRefs(
        *aligned_tiles(group_sizes, a.shape[0], TILE_M * spec.cluster, ALIGNMENT),
        a=a,
        b=b,
        a_scale=a_scale.reshape(-1),
        b_scale=b_scale.reshape(-1),
        addend=one if addend is None else addend,
    )


def why_not(
    a: jax.Array | QTensor,
    b: jax.Array | QTensor,
    *_: Any,
    axis: int,
    out_dtype: str = "bfloat16",
    **__: Any,
) -> Unavailable | None:
    """Why `ragged_matmul` cannot multiply these; None: it can."""
    values = a.values if isinstance(a, QTensor) else a
    matrices = b.values if isinstance(b, QTensor) else b
    if values.dtype.itemsize > 2:
        return Unavailable(f"is for operands of 8 and 16 bits, got {values.dtype}: use 'xla'")
    if reason := pipeline.why_not_dtypes(values.dtype, matrices.dtype, remedy="triton"):
        return reason
    m, n = values.shape[0], matrices.shape[3 - axis]
    piece = pipeline.piece_of(out_dtype)
    step = LINE // values.dtype.itemsize
    lengths = {"rows": (m, ALIGNMENT), "k": (values.shape[1], step), "n": (n, max(piece, 64))}
    if reason := pipeline.why_not_multiples(lengths, remedy="triton"):
        return reason
    return pipeline.why_not_columns(n, piece, remedy="triton")


WHY_NOT = {
    "ragged_matmul": why_not,
    "ragged_weight_gradient": why_not_weight_gradient,
    "ragged_block_weight_gradient": why_not_block_weight_gradient,
}
