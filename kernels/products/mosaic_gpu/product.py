"""The quantized product."""

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
from swjax.kernels.products.tiles import MosaicTile, mosaic_tile


class ProductRefs(NamedTuple):
    """Arrays of the product, or refs to them: a bT.

    Attributes:
      a: [m, k] int8 or fp8.
      b: [n, k] int8 or fp8.
      a_scale: [m], padded to whole tiles if m is not a multiple of HALF.
      b_scale: [1], or [n] padded to whole tiles.
      bias: [n] padded to whole tiles, or [1] if the product has no bias.
      addend: [m, n], or [1] if the product has no addend.
    """

    a: Ref
    b: Ref
    a_scale: Ref
    b_scale: Ref
    bias: Ref
    addend: Ref


@dataclass(frozen=True)
class Tiling:
    """How blocks of threads share the tiles of a product [m, n].

    Attributes:
      m: number of rows.
      grid: rows and columns of tiles in the output; the tiles of a cluster count as one.
      blocks: clusters of blocks that share the tiles.
      cluster: 2 if two blocks, whose tiles are adjacent rows, share their tile of b: the cluster loads it
        once (multicast).
      tile: how the kernel cuts its work.
    """

    m: int
    grid: tuple[int, int]
    blocks: int
    cluster: int
    tile: Any


def tiling(m: int, n: int, columns: int, tile: Any) -> dict[str, Any]:
    """The fields of the `Tiling` of a product [m, n], whose tiles have some columns."""
    cluster = 2 if m > TILE_M else 1
    return {
        "m": m,
        "grid": (pl.cdiv(m, TILE_M * cluster), pl.cdiv(n, columns)),
        "blocks": tiles.multiprocessors() // cluster,
        "cluster": cluster,
        "tile": tile,
    }


@dataclass(frozen=True)
class MatmulSpec(Tiling):
    """The sizes of a product.

    Attributes:
      k: length of the sums.
      out_dtype: dtype of the result.
      per_tensor: whether b has one scale.
      bias: whether a bias is added.
      addend: whether an array [m, n] is added.
    """

    k: int
    out_dtype: str
    per_tensor: bool
    bias: bool
    addend: bool


class TiledWork:
    """The base of works on tiles of a product: finds tiles, copies their operands, multiplies.

    Attributes:
      spec: a `Tiling`.
      columns: number of columns of a tile.
    """

    spec: Any
    scratch: Scratch
    block: jax.Array
    columns: ClassVar[int]

    @property
    def stages(self) -> int:
        return self.spec.tile.stages

    @property
    def sum_dtype(self) -> jax.typing.DTypeLike:
        return jnp.int32 if self.scratch.a.dtype == jnp.int8 else jnp.float32

    def units(self) -> jax.Array:
        rows, columns = self.spec.grid
        return pipeline.unit_count(rows * columns, self.block, self.spec.blocks)

    def corner(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first row and column of a tile."""
        spec = self.spec
        row, column = plgpu.planar_snake(
            self.block + unit * spec.blocks, spec.grid, 1, spec.tile.width
        )
        rank = lax.axis_index("cluster") if spec.cluster > 1 else 0
        return (row * spec.cluster + rank) * TILE_M, column * self.columns

    def half_corner(self, unit: jax.Array, half: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first row and column of one half of a tile."""
        row, column = self.corner(unit)
        return row + half * HALF, column

    def area(self, unit: jax.Array, half: jax.Array) -> tuple[Any, Any]:
        """The rows and the columns of one half of a tile."""
        row, column = self.half_corner(unit, half)
        return pl.ds(row, HALF), pl.ds(column, self.columns)

    def scale_rows(self, row: jax.Array) -> Any:
        """The rows of one half of a tile, as an index of their scales.

        Rows past the edge are not written, so their scale does not matter.
        """
        padded = self.spec.m % HALF > 0
        return pl.ds(row if padded else jnp.minimum(row, self.spec.m - HALF), HALF)

    def copy_operands(
        self, a: Ref, b: Ref, corner: tuple[Any, Any], step: jax.Array, slot: jax.Array, full: Ref
    ) -> None:
        """Starts the copies of a step of the product a bT."""
        (row, column), along = corner, pl.ds(step * LINE, LINE)
        plgpu.copy_gmem_to_smem(a.at[pl.ds(row, TILE_M), along], self.scratch.a.at[slot], full)
        plgpu.copy_gmem_to_smem(
            b.at[pl.ds(column, self.columns), along],
            self.scratch.b.at[slot],
            full,
            collective_axes="cluster" if self.spec.cluster > 1 else None,
        )

    def multiply(self, sums: Ref, slot: jax.Array, half: jax.Array) -> None:
        a, b = self.scratch.a, self.scratch.b
        plgpu.wgmma(sums, a.at[slot, pl.ds(half * HALF, HALF)], b.at[slot].T)


class Sums(NamedTuple):
    """The sums of one half of a tile, and vectors that were read before them, which hides their latency.

    Attributes:
      sums: [HALF, TILE_N] int32 or float32.
      row_scale: [HALF], the scales of a, times the scale of b if b has one scale.
      bias: one vector for each written piece; None if there is no bias, or if `store` reads it.
    """

    sums: jax.Array
    row_scale: jax.Array
    bias: list[jax.Array] | None


@dataclass(frozen=True)
class MatmulWork(TiledWork):
    """The `pipeline.Work` of one block of threads."""

    spec: MatmulSpec
    inputs: ProductRefs
    out: Ref
    scratch: Scratch
    block: jax.Array
    columns: ClassVar[int] = TILE_N

    @property
    def piece(self) -> int:
        """Number of columns that are written at a time."""
        return pipeline.piece_of(self.spec.out_dtype)

    def span(self, unit: jax.Array) -> tuple[int, int]:
        del unit
        return 0, pl.cdiv(self.spec.k, LINE)

    def load(self, unit: jax.Array) -> Callable:
        return partial(self.copy_operands, self.inputs.a, self.inputs.b, self.corner(unit))

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> Sums:
        spec, inputs = self.spec, self.inputs
        row, column = self.half_corner(unit, half)
        row_scale, bias = pipeline.load_registers(inputs.a_scale, self.scale_rows(row)), None
        if spec.per_tensor:
            row_scale = row_scale * inputs.b_scale[0]
            if spec.bias:
                bias = [self.columns_of(inputs.bias, column + at) for at in self.pieces()]

        def load_addend():
            pipeline.load_tile(
                inputs.addend.at[self.area(unit, half)],
                self.scratch.out.at[half],
                self.scratch.addend.at[half],
            )

        sums = sum_steps(0, self.span(unit)[1], load_addend if spec.addend else None)
        return Sums(sums, row_scale, bias)

    def pieces(self) -> range:
        return range(0, self.columns, self.piece)

    def columns_of(self, vector: Ref, column: jax.Array) -> jax.Array:
        """The elements of a vector for the columns of a written piece."""
        return pipeline.load_registers(vector, pl.ds(column, self.piece))

    def store(self, unit: jax.Array, total: Sums, half: jax.Array) -> None:
        if self.spec.addend:
            plgpu.barrier_wait(self.scratch.addend.at[half])
        pipeline.store_tile(
            partial(self.scaled, unit, total),
            self.scratch.out.at[half],
            self.out.at[self.area(unit, half)],
            add=self.spec.addend,
        )

    def scaled(self, unit: jax.Array, total: Sums, at: int) -> jax.Array:
        """The columns of the product from column `at` of the tile on, in float32."""
        _, column = self.corner(unit)
        y = total.sums[:, at : at + self.piece].astype(jnp.float32)
        scale = lax.broadcast_in_dim(total.row_scale, y.shape, (0,))
        if not self.spec.per_tensor:
            b_scale = self.columns_of(self.inputs.b_scale, column + at)
            scale = scale * lax.broadcast_in_dim(b_scale, y.shape, (1,))
        y = y * scale
        if self.spec.bias:
            if total.bias is None:
                bias = self.columns_of(self.inputs.bias, column + at)
            else:
                bias = total.bias[at // self.piece]
            y = y + lax.broadcast_in_dim(bias.astype(jnp.float32), y.shape, (1,))
        return y


def matmul(
    a: QTensor,
    b: QTensor,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
    tile: MosaicTile | None = None,
) -> jax.Array:
    """`reference.matmul`, for rows a multiple of 8, k of 128, and n of 64 and above 64 (32 in float32)."""
    a, b = (q.T if axis == 0 else q for q, axis in zip((a, b), contract))
    k = a.values.shape[-1]
    m, n = a.values.size // k, b.values.shape[0]
    # The kernel adds arrays of 16 bits with the dtype of the result, through the same buffers.
    fused = addend if addend is not None and fits_buffers(addend, out_dtype) else None
    tile = tile or mosaic_tile(n, k)
    if fused is not None:  # memory of a slot serves the addend
        tile = replace(tile, stages=min(tile.stages, 3))
    spec = MatmulSpec(
        **tiling(m, n, TILE_N, tile),
        k=k,
        out_dtype=out_dtype,
        per_tensor=b.scale.size == 1,
        bias=bias is not None,
        addend=fused is not None,
    )

    def matmul_kernel(inputs, out, scratch):
        pipeline.run(MatmulWork(spec, inputs, out, scratch, lax.axis_index("block")), scratch)

    y = pipeline.launch(
        matmul_kernel,
        jax.ShapeDtypeStruct((m, n), out_dtype),
        rings=[((TILE_M, LINE), a.values.dtype), ((TILE_N, LINE), b.values.dtype)],
        stages=spec.tile.stages,
        blocks=spec.blocks,
        cluster=spec.cluster,
        addend=spec.addend,
    )(_inputs(spec, a, b, bias, fused))
    y = y.reshape(*a.values.shape[:-1], n)
    if addend is None or fused is not None:
        return y
    return (y.astype(jnp.float32) + addend.astype(jnp.float32)).astype(out_dtype)


def fits_buffers(addend: jax.Array, out_dtype: str) -> bool:
    """Whether a kernel can read an addend through the buffers of its output."""
    return addend.dtype == out_dtype and addend.dtype.itemsize == 2


def _inputs(
    spec: MatmulSpec,
    a: QTensor,
    b: QTensor,
    bias: jax.Array | None,
    addend: jax.Array | None,
) -> ProductRefs:
    """Pads scales and bias to whole tiles, because registers are loaded without bounds checks."""

    def padded(vector, length):
        return jnp.pad(vector.reshape(-1), (0, length - vector.size))

    rows, columns = spec.grid[0] * spec.cluster * TILE_M, spec.grid[1] * TILE_N
    a_scale = jnp.broadcast_to(a.scale.reshape(-1), (spec.m,))
    return ProductRefs(
        a=a.values.reshape(spec.m, spec.k),
        b=b.values,
        a_scale=padded(a_scale, rows if spec.m % HALF else spec.m),
        b_scale=b.scale.reshape(-1) if spec.per_tensor else padded(b.scale, columns),
        bias=jnp.zeros(1) if bias is None else padded(bias, columns),
        addend=jnp.zeros(1) if addend is None else addend.reshape(spec.m, -1),
    )


def why_not(
    a: QTensor,
    b: QTensor,
    *_: jax.Array | None,
    out_dtype: str | None = None,
    contract: tuple[int, int] = (-1, -1),
    remedy: str = "triton",
) -> Unavailable | None:
    """Why `matmul` cannot multiply these; None: it can. `remedy` is the implementation to name instead."""
    if reason := pipeline.why_not_dtypes(a.values.dtype, b.values.dtype, remedy=remedy):
        return reason
    k, n = a.values.shape[contract[0]], b.values.size // b.values.shape[contract[1]]
    piece = pipeline.piece_of(out_dtype or "bfloat16")
    lengths = {"rows": (a.values.size // k, 8), "k": (k, 128), "n": (n, piece)}
    multiples = pipeline.why_not_multiples(lengths, remedy)
    return multiples or pipeline.why_not_columns(n, piece, remedy)
