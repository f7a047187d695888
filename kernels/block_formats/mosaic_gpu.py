"""Products of e4m3 values with a float32 scale for 128 neighbours along the sum, for Hopper."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.availability import Unavailable
from swjax.kernels.block_formats.reference import Blocks
from swjax.kernels.block_formats.tiles import TILE
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, Fold, Ref, Scratch, SumSteps
from swjax.kernels.products.mosaic_gpu.product import TiledWork, Tiling, tiling

BLOCK = LINE  # values that share a scale: those of one step
FORMAT = "float8_e4m3fn", BLOCK, "float32"
PIECE = 32  # columns written at a time
SQUARES = 32  # scales of squares in a slot: a copy has at least 128 bytes
ALIGNED = 4  # scales in 16 bytes: a copy from another address is an illegal instruction


class BlockProductRefs(NamedTuple):
    """Arrays of the product, or refs to them: a bT.

    Attributes:
      a: [m, k] e4m3.
      b: [n, k] e4m3.
      a_scale: [steps, m].
      b_scale: [steps, n], or [steps, n / BLOCK] padded to a multiple of SQUARES.
      bias: [n] float32 padded to whole tiles, or [1] if the product has no bias.
    """

    a: Ref
    b: Ref
    a_scale: Ref
    b_scale: Ref
    bias: Ref


@dataclass(frozen=True)
class BlockProductSpec(Tiling):
    """The sizes of a product.

    Attributes:
      steps: number of blocks along the contracted axis.
      squares: whether BLOCK columns share the scales of b. If so, a tile has BLOCK columns.
      bias: whether a bias is added.
    """

    steps: int
    squares: bool
    bias: bool


@dataclass(frozen=True)
class BlockProductWork(TiledWork):
    """The `pipeline.Work` of one block of threads.

    The tensor cores sum the products of one step. A thread multiplies these sums by both scales, which
    `scratch.vectors` holds, and adds them to its totals.
    """

    spec: BlockProductSpec
    inputs: BlockProductRefs
    out: Ref
    scratch: Scratch
    block: jax.Array
    columns: ClassVar[int] = TILE.columns

    def span(self, unit: jax.Array) -> tuple[int, int]:
        del unit
        return 0, self.spec.steps

    def load(self, unit: jax.Array) -> Callable:
        inputs, (row, column) = self.inputs, self.corner(unit)
        rows, columns = pl.ds(row, TILE_M), pl.ds(column, self.columns)
        if self.spec.squares:
            columns = pl.ds(column // BLOCK // ALIGNED * ALIGNED, SQUARES)

        def load_step(step, slot, full):
            self.copy_operands(inputs.a, inputs.b, (row, column), step, slot, full)
            scales = (inputs.a_scale, rows), (inputs.b_scale, columns)
            for (scale, along), ring in zip(scales, self.scratch.vectors):
                plgpu.copy_gmem_to_smem(scale.at[step, along], ring.at[slot], full)

        return load_step

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> jax.Array:
        shape = HALF, self.columns
        _, column = self.corner(unit)
        square = lax.rem(column // BLOCK, ALIGNED)  # in a slot
        a_ring, b_ring = self.scratch.vectors

        def scales(slot):
            a_scale = pipeline.load_registers(a_ring.at[slot], pl.ds(half * HALF, HALF))
            if self.spec.squares:
                return a_scale * b_ring[slot, square], None
            return a_scale, pipeline.load_registers(b_ring.at[slot], pl.ds(0, self.columns))

        def add(scales, sums, total):
            of_rows, of_columns = scales
            if of_columns is not None:
                sums = sums * lax.broadcast_in_dim(of_columns, shape, (1,))
            return total + sums * lax.broadcast_in_dim(of_rows, shape, (0,))

        fold = Fold(scales, add, pipeline.zeros(shape), TILE.chunk)
        return sum_steps(0, self.spec.steps, fold=fold)

    def store(self, unit: jax.Array, total: jax.Array, half: jax.Array) -> None:
        _, column = self.corner(unit)

        def piece(at):
            y = total[:, at : at + PIECE]
            if not self.spec.bias:
                return y
            bias = pipeline.load_registers(self.inputs.bias, pl.ds(column + at, PIECE))
            return y + lax.broadcast_in_dim(bias, y.shape, (1,))

        pipeline.store_tile(piece, self.scratch.out.at[half], self.out.at[self.area(unit, half)])


def block_matmul(
    a: Blocks,
    b: Blocks,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    *,
    out_dtype: str,
) -> jax.Array:
    """`reference.block_matmul` of e4m3 values with float32 scales for 128 of them.

    Rows are a multiple of 8, and n of 64 and above 64 (32 in float32). Sums within a block are those of the
    tensor cores, with about 14 bits; their scaled sum is in float32.
    """
    k = a.values.shape[-1]
    m, n = a.values.size // k, b.values.shape[0]
    squares = b.scales.shape[0] < n
    spec = BlockProductSpec(
        **tiling(m, n, TILE.columns, TILE),
        steps=k // BLOCK,
        squares=squares,
        bias=bias is not None,
    )

    def block_matmul_kernel(inputs, out, scratch):
        pipeline.run(BlockProductWork(spec, inputs, out, scratch, lax.axis_index("block")), scratch)

    y = pipeline.launch(
        block_matmul_kernel,
        jax.ShapeDtypeStruct((m, n), out_dtype),
        rings=[((TILE_M, LINE), a.values.dtype), ((TILE.columns, LINE), b.values.dtype)],
        stages=TILE.stages,
        blocks=spec.blocks,
        cluster=spec.cluster,
        vectors=(TILE_M, SQUARES if squares else TILE.columns),
        piece=PIECE,
    )(_inputs(spec, a, b, bias))
    y = y.reshape(*a.values.shape[:-1], n)
    if addend is None:
        return y
    return (y.astype(jnp.float32) + addend.astype(jnp.float32)).astype(out_dtype)


def _inputs(spec: BlockProductSpec, a: Blocks, b: Blocks, bias: jax.Array | None):
    """Pads the bias, which is loaded without bounds checks, and scales of squares, which TMA copies."""

    def padded(x, divisor):
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % divisor),))

    return BlockProductRefs(
        a=a.values.reshape(spec.m, -1),
        b=b.values,
        a_scale=a.scales.reshape(spec.m, spec.steps).T,
        b_scale=padded(b.scales.T, SQUARES if spec.squares else 1),
        bias=jnp.zeros(1) if bias is None else padded(bias.astype(jnp.float32), TILE.columns),
    )


def why_not(a: Blocks, b: Blocks, *_: jax.Array | None, out_dtype: str) -> Unavailable | None:
    """Why `block_matmul` cannot multiply these; None: it can."""
    for q in (a, b):
        block = q.values.shape[-1] // q.scales.shape[-1]
        kinds = q.values.dtype.name, block, q.scales.dtype.name
        if kinds != FORMAT:
            return Unavailable(f"is for {FORMAT}, got {kinds}: use 'xla'")
    k, n = a.values.shape[-1], b.values.shape[0]
    piece = pipeline.piece_of(out_dtype)
    lengths = {"rows": (a.values.size // k, 8), "k": (k, BLOCK), "n": (n, piece)}
    if reason := pipeline.why_not_multiples(lengths, remedy="xla"):
        return reason
    return pipeline.why_not_columns(n, piece, remedy="xla")


WHY_NOT = {"block_matmul": why_not}
