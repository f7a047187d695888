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
from swjax.kernels.mosaic_gpu.pipeline import LINE, TILE_M, Ref, Scratch, SumSteps

STEP = LINE // 2  # elements of a step along the contracted axis
PIECE = LINE // 2  # rows and columns that are written at a time
TILE = TILE_M  # rows and columns of a tile
PIECES = (TILE // PIECE) ** 2  # of a tile, row by row
# Blocks per cluster. They compute two tiles at a time, which share columns of b if they can.
CLUSTER = 2


class Sums(NamedTuple):
    """The sums of a tile, and the factors of `reference.symmetric_product`.

    The factors are read before the sums, which hides their latency.
    """

    sums: jax.Array
    product: jax.Array
    added: jax.Array
    identity: jax.Array


class Place(NamedTuple):
    """Where the tile of a block is.

    Attributes:
      matrix: number in the batch.
      row, column: its first ones.
      shares: whether the other block of the cluster has the same columns.
    """

    matrix: jax.Array
    row: jax.Array
    column: jax.Array
    shares: jax.Array


@dataclass(frozen=True)
class SymmetricWork:
    """The `pipeline.Work` of one block of threads, whose warpgroups take turns.

    A unit is two tiles on or below the diagonal, one for each block of a cluster. First come all units whose
    tiles are one above the other, then those of the tiles that remain: every other tile on the diagonal.

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

    columns: ClassVar[int] = TILE
    sum_dtype: ClassVar[jax.typing.DTypeLike] = jnp.float32

    @property
    def rows(self) -> int:
        """Pairs of rows of tiles in a matrix."""
        return pl.cdiv(self.out.shape[1], 2 * TILE)

    @property
    def pairs(self) -> int:
        """Units whose tiles are one above the other: 1, 3, 5, ... in the pairs of rows of each matrix."""
        return self.out.shape[0] * self.rows**2

    def units(self) -> jax.Array:
        remaining = pl.cdiv(self.out.shape[0] * self.rows, 2)
        return pipeline.unit_count(self.pairs + remaining, self.block, self.clusters)

    def place(self, unit: jax.Array) -> Place:
        number, rank = self.block + unit * self.clusters, lax.axis_index("cluster")
        shares = number < self.pairs
        # Row i of pairs starts at number i^2.
        within = lax.rem(number, self.rows**2)
        starts = (i**2 for i in range(1, self.rows))
        row = sum(((within >= start).astype(jnp.int32) for start in starts), jnp.int32(0))
        pair = (number // self.rows**2, 2 * row + rank, within - row * row)
        # The last unit may have one tile only. The other block then has a tile past the edge.
        last = self.out.shape[0] * self.rows - 1
        number = 2 * (number - self.pairs) + rank
        past = jnp.where(number > last, 2 * self.rows, 0)
        number = jnp.minimum(number, last)
        on_diagonal = 2 * lax.rem(number, self.rows) + 1
        single = (number // self.rows, on_diagonal + past, on_diagonal)
        matrix, row, column = (jnp.where(shares, *both) for both in zip(pair, single))
        return Place(matrix, row * TILE, column * TILE, shares)

    def span(self, unit: jax.Array) -> tuple[int, int]:
        del unit
        return 0, pl.cdiv(self.a.shape[1 if self.by_columns else 2], STEP)

    def load(self, unit: jax.Array) -> Callable:
        matrix, row, column, shares = self.place(unit)

        def load_step(step, slot, full):
            along = pl.ds(step * STEP, STEP)

            def copy(x: Ref, at: jax.Array, to: Ref, axes: str | None = None) -> None:
                lines = pl.ds(at, TILE)
                index = (along, lines) if self.by_columns else (lines, along)
                part = x.at[matrix, *index]
                plgpu.copy_gmem_to_smem(part, to.at[slot], full, collective_axes=axes)

            copy(self.a, row, self.scratch.a)
            copy_b = partial(copy, self.b, column, self.scratch.b)
            pl.when(shares)(partial(copy_b, "cluster"))
            pl.when(jnp.logical_not(shares))(copy_b)

        return load_step

    def multiply(self, sums: Ref, slot: jax.Array, warpgroup: jax.Array) -> None:
        del warpgroup
        a, b = self.scratch.a.at[slot], self.scratch.b.at[slot]
        plgpu.wgmma(sums, *((a.T, b) if self.by_columns else (a, b.T)))

    def total(self, unit: jax.Array, warpgroup: jax.Array, sum_steps: SumSteps) -> Sums:
        matrix, row, column, _ = self.place(unit)
        factors = [self.factors[matrix, i] for i in range(3)]

        def load_addend():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
            for number in range(PIECES):
                piece = self.addend.at[matrix, *self.piece(number, row, column)]
                buffer = self.scratch.out.at[warpgroup, number]
                plgpu.copy_gmem_to_smem(piece, buffer, self.scratch.addend.at[warpgroup])

        sums = sum_steps(0, self.span(unit)[1], load_addend if self.has_addend else None)
        return Sums(sums, *factors)

    @staticmethod
    def piece(number: int, row: Any, column: Any) -> tuple[Any, Any]:
        """The rows and columns of a piece of the tile at this row and column."""
        i, j = divmod(number, TILE // PIECE)
        return pl.ds(row + i * PIECE, PIECE), pl.ds(column + j * PIECE, PIECE)

    @property
    def has_addend(self) -> bool:
        return len(self.addend.shape) == 3

    def store(self, unit: jax.Array, total: Sums, warpgroup: jax.Array) -> None:
        """Writes the pieces on and below the diagonal, and their transposes."""
        matrix, row, column, _ = self.place(unit)
        if self.has_addend:
            plgpu.barrier_wait(self.scratch.addend.at[warpgroup])
        buffers = [self.scratch.out.at[warpgroup, i] for i in range(self.scratch.out.shape[1])]
        for number in range(PIECES):
            i, j = divmod(number, TILE // PIECE)
            sums = total.sums[i * PIECE : (i + 1) * PIECE, j * PIECE : (j + 1) * PIECE]
            # The transpose is written from the buffer of the piece before, if there are several.
            buffer, mirrored = buffers[number % len(buffers)], self.scratch.mirrored.at[warpgroup]
            if number and self.has_addend:
                mirrored = buffers[number - 1]
            place = matrix, row + i * PIECE, column + j * PIECE
            write = partial(self.write, total._replace(sums=sums), buffer, mirrored, place)
            is_below = row > column
            if i == j:
                pl.when(row == column)(partial(write, on_diagonal=True))
            elif i > j:
                is_below = row >= column
            pl.when(is_below)(partial(write, on_diagonal=False))

    def write(
        self,
        piece: Sums,
        buffer: Ref,
        mirrored: Ref,
        place: tuple[jax.Array, jax.Array, jax.Array],
        *,
        on_diagonal: bool,
    ) -> None:
        """Writes a piece and its transpose. On the diagonal they are one piece.

        Args:
          piece: its sums are [PIECE, PIECE].
          buffer: of the piece; it holds that of the addend.
          mirrored: the buffer of the transpose.
          place: the matrix, and the piece's first row and column.
          on_diagonal: whether row and column are equal.
        """
        matrix, row, column = place
        rows, columns = pl.ds(row, PIECE), pl.ds(column, PIECE)
        # Copies of pieces and transposes take turns. All but these last ones have read their buffers.
        under_way = 2 if self.has_addend else 1
        y = piece.sums * piece.product
        if self.has_addend:
            y = y + piece.added * buffer[...].astype(jnp.float32)
        if on_diagonal:
            i, j = (pipeline.iota(y.shape, axis) for axis in range(2))
            y = (y + jnp.where(i == j, piece.identity, 0.0)).astype(buffer.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mirrored.T[...] = y
            plgpu.commit_smem()
            y = jnp.where(i >= j, y, mirrored[...])
            plgpu.commit_smem()
        else:
            y = y.astype(buffer.dtype)
            if not self.has_addend:
                plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
            buffer[...] = y
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, self.out.at[matrix, rows, columns])
            plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
        mirrored.T[...] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mirrored, self.out.at[matrix, columns, rows])


def symmetric_product(
    a: jax.Array,
    b: jax.Array,
    addend: jax.Array | None = None,
    factors: jax.Array | None = None,
    *,
    contract: int = -1,
) -> jax.Array:
    """`reference.symmetric_product` for 16-bit operands, for m above 64; see `why_not`."""
    by_columns = contract == -2
    batch, m = a.shape[0], a.shape[2 if by_columns else 1]
    if factors is None:
        factors = jnp.broadcast_to(jnp.float32([1, 1, 0]), (batch, 3))
    clusters = tiles.multiprocessors() // CLUSTER
    stages, pieces = (6, 1) if addend is None else (4, PIECES)

    def symmetric_kernel(a, b, addend, factors, result, scratch):
        inputs, block = (a, b, addend, factors, result), lax.axis_index("block")
        work = SymmetricWork(*inputs, scratch, by_columns, stages, block, clusters)
        pipeline.run_in_turns(work, scratch)

    ring = (stages, STEP, TILE) if by_columns else (stages, TILE, STEP)
    empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=1, num_barriers=stages)
    scratch = Scratch(
        a=pipeline.buffer(ring, a.dtype),
        b=pipeline.buffer(ring, a.dtype),
        out=pipeline.buffer((2, pieces, PIECE, PIECE), a.dtype),
        mirrored=pipeline.buffer((2, PIECE, PIECE), a.dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=2 * stages),
        empty=empty,
        addend=plgpu.Barrier(num_arrivals=pieces, num_barriers=2),
    )
    return pipeline.kernel(
        symmetric_kernel,
        jax.ShapeDtypeStruct((batch, m, m), a.dtype),
        scratch,
        blocks=clusters,
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
