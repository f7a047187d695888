"""Symmetric products in Pallas, for Hopper: one triangle of tiles is computed, and written to both."""

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

STEP = LINE // 2  # elements of a step along the contracted axis
PIECE = LINE // 2  # rows and columns that are written at a time
PIECES = TILE_N // PIECE  # of one half of a tile
# Blocks per cluster. They compute vertically adjacent tiles, TILE_N rows in all, and load columns of b once.
CLUSTER = 2


class Tile(NamedTuple):
    """One half of a tile of the result, in registers.

    Attributes:
      pieces: [HALF, PIECE] each, of the dtype of the result.
      matrix, row, column: its place, rows in units of HALF and columns in units of TILE_N, so that Mosaic
        knows what divides them.
    """

    pieces: tuple[jax.Array, ...]
    matrix: jax.Array
    row: jax.Array
    column: jax.Array


@dataclass(frozen=True)
class SymmetricWork:
    """The `pipeline.Work` of one block of threads.

    A unit is a tile of a cluster, TILE_N x TILE_N, on or below the diagonal.

    Attributes:
      a, b, addend, factors, out: arguments and result of `reference.symmetric_product`.
      by_columns: whether a and b are [batch, k, m].
      stages: number of slots of the rings.
      block: the number of the cluster, of `clusters`.
    """

    a: Ref
    b: Ref
    addend: Ref
    factors: Ref
    out: Ref
    scratch: Scratch
    by_columns: bool
    stages: int
    block: jax.Array
    clusters: int

    columns: ClassVar[int] = TILE_N
    sum_dtype: ClassVar[jax.typing.DTypeLike] = jnp.float32

    @property
    def rows(self) -> int:
        """Rows of clusters' tiles in a matrix."""
        return pl.cdiv(self.out.shape[1], TILE_N)

    @property
    def tiles(self) -> int:
        """Tiles of clusters on and below the diagonal of a matrix."""
        return self.rows * (self.rows + 1) // 2

    def units(self) -> jax.Array:
        return pipeline.unit_count(self.out.shape[0] * self.tiles, self.block, self.clusters)

    def corner(self, unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The matrix of a tile, and its first row and column."""
        number = self.block + unit * self.clusters
        matrix, number = number // self.tiles, lax.rem(number, self.tiles)
        # Tiles are numbered row by row; row i starts at number i (i + 1) / 2.
        starts = (i * (i + 1) // 2 for i in range(1, self.rows))
        row = sum(((number >= start).astype(jnp.int32) for start in starts), jnp.int32(0))
        column = number - row * (row + 1) // 2
        return matrix, row * TILE_N + lax.axis_index("cluster") * TILE_M, column * TILE_N

    def span(self, unit: jax.Array) -> tuple[int, int]:
        del unit
        return 0, pl.cdiv(self.a.shape[1 if self.by_columns else 2], STEP)

    def load(self, unit: jax.Array) -> Callable:
        matrix, row, column = self.corner(unit)

        def load_step(step, slot, full):
            along = pl.ds(step * STEP, STEP)

            def part(x: Ref, at: jax.Array, length: int) -> Ref:
                index = (
                    (along, pl.ds(at, length)) if self.by_columns else (pl.ds(at, length), along)
                )
                return x.at[matrix, *index]

            plgpu.copy_gmem_to_smem(part(self.a, row, TILE_M), self.scratch.a.at[slot], full)
            plgpu.copy_gmem_to_smem(
                part(self.b, column, TILE_N),
                self.scratch.b.at[slot],
                full,
                collective_axes="cluster",
            )

        return load_step

    def multiply(self, sums: Ref, slot: jax.Array, half: jax.Array) -> None:
        a, b, rows = self.scratch.a, self.scratch.b, pl.ds(half * HALF, HALF)
        if self.by_columns:
            plgpu.wgmma(sums, a.at[slot, :, rows].T, b.at[slot])
        else:
            plgpu.wgmma(sums, a.at[slot, rows], b.at[slot].T)

    def nothing(self) -> Tile:
        """A tile of which no piece is on or below the diagonal."""
        empty = jnp.zeros((HALF, PIECE), self.out.dtype)
        return Tile((empty,) * PIECES, jnp.int32(0), jnp.int32(-1), jnp.int32(0))

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps, before: Tile) -> Tile:
        """Multiplies one half of a unit while it writes that of the unit before."""
        matrix, row, column = self.corner(unit)
        row = row + half * HALF
        product, added, identity = (self.factors[matrix, i] for i in range(3))

        def load_addend():
            tile = self.addend.at[matrix, pl.ds(row, HALF), pl.ds(column, TILE_N)]
            pipeline.load_tile(tile, self.scratch.out.at[half], self.scratch.addend.at[half])

        during = [partial(self.write, before, half, number) for number in range(PIECES)]
        sums = sum_steps(0, self.span(unit)[1], during + [load_addend] * self.has_addend)
        if self.has_addend:
            plgpu.barrier_wait(self.scratch.addend.at[half])
        i, j = (pipeline.iota((HALF, PIECE), axis) for axis in range(2))

        def piece(number):
            y = sums[:, number * PIECE : (number + 1) * PIECE] * product
            if self.has_addend:
                y = y + added * self.scratch.out.at[half, number][...].astype(jnp.float32)
            on_diagonal = i - j == column + number * PIECE - row
            return (y + jnp.where(on_diagonal, identity, 0.0)).astype(self.out.dtype)

        return Tile(tuple(map(piece, range(PIECES))), matrix, row // HALF, column // TILE_N)

    @property
    def has_addend(self) -> bool:
        return len(self.addend.shape) == 3

    def store(self, tile: Tile, half: jax.Array) -> None:
        for number in range(PIECES):
            self.write(tile, half, number)

    def write(self, tile: Tile, half: jax.Array, number: int) -> None:
        """Writes a piece and its transpose, if it is on or below the diagonal."""
        row, at = tile.row * HALF, tile.column * TILE_N + number * PIECE
        pl.when(at < row)(partial(self._write, tile, half, number, on_diagonal=False))
        pl.when(at == row)(partial(self._write, tile, half, number, on_diagonal=True))

    def _write(self, tile: Tile, half: jax.Array, number: int, *, on_diagonal: bool) -> None:
        buffers = [self.scratch.out.at[half, i] for i in range(self.scratch.out.shape[1])]
        # The transpose is written from the buffer of the piece before, if there are several.
        buffer, mirrored = buffers[number % len(buffers)], self.scratch.mirrored.at[half]
        if number and self.has_addend:
            mirrored = buffers[number - 1]
        rows = pl.ds(tile.row * HALF, HALF)
        columns = pl.ds(tile.column * TILE_N + number * PIECE, PIECE)
        # Copies of pieces and transposes take turns. All but these last ones have read their buffers.
        under_way = 2 if self.has_addend else 1
        y = tile.pieces[number]
        if on_diagonal:  # a piece and its transpose are one
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mirrored.T[...] = y
            plgpu.commit_smem()
            i, j = (pipeline.iota(y.shape, axis) for axis in range(2))
            y = jnp.where(i >= j, y, mirrored[...])
            plgpu.commit_smem()
        else:
            if not self.has_addend:
                plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
            buffer[...] = y
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, self.out.at[tile.matrix, rows, columns])
            plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
        mirrored.T[...] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mirrored, self.out.at[tile.matrix, columns, rows])


def symmetric_product(
    a: jax.Array,
    b: jax.Array,
    addend: jax.Array | None = None,
    factors: jax.Array | None = None,
    *,
    contract: int = -1,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`reference.symmetric_product` for 16-bit operands, for m above 64; see `why_not`.

    Args:
      a, b, addend, factors, contract: see `reference.symmetric_product`.
      multiprocessors, interpret: for tests.
    """
    by_columns = contract == -2
    batch, m = a.shape[0], a.shape[2 if by_columns else 1]
    if factors is None:
        factors = jnp.broadcast_to(jnp.float32([1, 1, 0]), (batch, 3))
    clusters = (multiprocessors or tiles.multiprocessors()) // CLUSTER
    stages, pieces = (4, 1) if addend is None else (3, PIECES)

    def symmetric_kernel(a, b, addend, factors, result, *refs):
        a_ring, b_ring, pieces, mirrored, full, empty, arrived = refs
        scratch = Scratch(a_ring, b_ring, pieces, full, empty, arrived, mirrored=mirrored)
        inputs, block = (a, b, addend, factors, result), lax.axis_index("block")
        work = SymmetricWork(*inputs, scratch, by_columns, stages, block, clusters)
        pipeline.run_late_writes(work, scratch)

    arrivals: dict[str, Any] = dict(num_arrivals=2, num_barriers=stages)
    ring = lambda length: (stages, STEP, length) if by_columns else (stages, length, STEP)
    scratch = (
        pipeline.buffer(ring(TILE_M), a.dtype),
        pipeline.buffer(ring(TILE_N), a.dtype),
        pipeline.buffer((2, pieces, HALF, PIECE), a.dtype),
        pipeline.buffer((2, PIECE, HALF), a.dtype),
        plgpu.Barrier(**arrivals),
        plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=2),
    )
    return pipeline.kernel(
        symmetric_kernel,
        jax.ShapeDtypeStruct((batch, m, m), a.dtype),
        scratch,
        blocks=clusters,
        interpret=interpret,
        cluster=(CLUSTER,),
        cluster_names=("cluster",),
    )(a, b, jnp.zeros(1, a.dtype) if addend is None else addend, factors)


def why_not(a: jax.Array, *_: Any, contract: int = -1, **__: Any) -> Unavailable | None:
    """Why the kernel cannot multiply these operands; None: it can."""
    if jax.__version_info__ < (0, 11):
        return Unavailable(f"needs jax 0.11, got {jax.__version__}: update jax, or use 'triton'")
    if a.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"is for 16-bit operands, got {a.dtype}: use 'xla'")
    m, k = a.shape[1:] if contract == -1 else a.shape[:0:-1]
    # Mosaic drops dimensions of size 1 from a copy, with their index: a single piece would be overwritten.
    if m <= PIECE:
        return Unavailable(f"needs m above {PIECE}, got {m}: use 'triton'")
    lengths = {"m": (m, PIECE), "k": (k, STEP if contract == -1 else 8)}
    return pipeline.why_not_multiples(lengths, remedy="triton")


WHY_NOT = {"symmetric_product": why_not}
