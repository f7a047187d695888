"""The sum of several quantized products, such as the input gradient of layers that share their input."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
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
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, Ref, Scratch, SumSteps
from swjax.kernels.products.mosaic_gpu.product import TiledWork
from swjax.kernels.products.mosaic_gpu.product import why_not as why_not_product
from swjax.kernels.products.tiles import PRODUCT_SUM_TILE, MosaicTile

# A thread holds two sums of each element, that of a product and that of all products: 80 and 80 registers.
# With 192 columns registers spill, and with 128 the kernel is 8% slower: benchmarks/notes/speed.md.
COLUMNS = 160
PIECE = 32  # columns that are written at a time; they divide COLUMNS


class ProductSumRefs(NamedTuple):
    """Refs to the operands and scales of the sum of the products a[i] b[i]T.

    Attributes:
      a: for each product, [m, k] int8 or fp8.
      b: for each product, [n, k] int8 or fp8.
      a_scale: [products, m], padded to whole tiles if m is not a multiple of HALF.
      b_scale: [products].
    """

    a: tuple[Ref, ...]
    b: tuple[Ref, ...]
    a_scale: Ref
    b_scale: Ref


@dataclass(frozen=True)
class MatmulSumSpec:
    """The sizes of a sum of products.

    Attributes:
      m: number of rows.
      steps: number of steps of each product along its contracted axis.
      grid, blocks, cluster, tile: see `product.MatmulSpec`.
    """

    m: int
    steps: tuple[int, ...]
    grid: tuple[int, int]
    blocks: int
    cluster: int
    tile: MosaicTile


@dataclass(frozen=True)
class MatmulSumWork(TiledWork):
    """The `pipeline.Work` of one block of threads.

    A unit is a tile, and its steps are those of one product after another.
    """

    spec: MatmulSumSpec
    inputs: ProductSumRefs
    out: Ref
    scratch: Scratch
    block: jax.Array
    columns: ClassVar[int] = COLUMNS

    def span(self, unit: jax.Array) -> tuple[int, int]:
        del unit
        return 0, sum(self.spec.steps)

    def load(self, unit: jax.Array) -> Callable:
        corner = self.corner(unit)

        def load_step(step, slot, full):
            first = 0
            for a, b, steps in zip(self.inputs.a, self.inputs.b, self.spec.steps):

                @pl.when((step >= first) & (step < first + steps))
                def _(a=a, b=b, first=first):
                    self.copy_operands(a, b, corner, step - first, slot, full)

                first += steps

        return load_step

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> jax.Array:
        rows = self.scale_rows(self.half_corner(unit, half)[0])
        every = self.spec.steps
        starts = tuple(itertools.accumulate(every, initial=0))

        def add_product(i, total):
            # Scales are read before the sum, which hides their latency.
            scale = pipeline.load_registers(self.inputs.a_scale.at[i], rows)
            scale = scale * self.inputs.b_scale[i]
            if len({*every}) == 1:
                first, steps = i * every[0], every[0]
            else:
                first, steps = _entry(starts, i), _entry(every, i)
            sums = sum_steps(first, steps).astype(jnp.float32)
            return total + sums * lax.broadcast_in_dim(scale, sums.shape, (0,))

        nothing = plgpu.layout_cast(jnp.zeros((HALF, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, len(self.inputs.a), add_product, nothing)

    def store(self, unit: jax.Array, total: jax.Array, half: jax.Array) -> None:
        pieces, to = lambda at: total[:, at : at + PIECE], self.out.at[self.area(unit, half)]
        pipeline.store_tile(pieces, self.scratch.out.at[half], to, PIECE)


def _entry(numbers: tuple[int, ...], i: jax.Array) -> jax.Array:
    """numbers[i] in a kernel."""
    found = jnp.int32(numbers[0])
    for at, number in enumerate(numbers[1:], 1):
        found = jnp.where(i == at, jnp.int32(number), found)
    return found


def matmul_sum(
    a: tuple[QTensor, ...],
    b: tuple[QTensor, ...],
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
    tile: MosaicTile = PRODUCT_SUM_TILE,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`reference.matmul_sum`, for rows a multiple of 8, k of 128, and n of 64 and above 64 (32 in float32).

    Args:
      a: [..., k] each, with the same rows; k may differ between products.
      b: [n, k] each, with the same n, each with one scale.
      out_dtype: dtype of the result.
      contract: see `reference.matmul`.
      tile, multiprocessors, interpret: for tests.
    """
    a, b = (
        tuple(q.T if axis == 0 else q for q in operands) for operands, axis in zip((a, b), contract)
    )
    shape = a[0].values.shape[:-1]
    m, n = math.prod(shape), b[0].values.shape[0]
    cluster = 2 if m > TILE_M else 1
    grid = pl.cdiv(m, TILE_M * cluster), pl.cdiv(n, COLUMNS)
    blocks = (multiprocessors or tiles.multiprocessors()) // cluster
    steps = tuple(pl.cdiv(q.values.shape[-1], LINE) for q in a)
    spec = MatmulSumSpec(m, steps, grid, blocks, cluster, tile)

    def matmul_sum_kernel(*refs):
        operands, (a_scale, b_scale, out, *buffers) = refs[: 2 * len(a)], refs[2 * len(a) :]
        inputs = ProductSumRefs(operands[: len(a)], operands[len(a) :], a_scale, b_scale)
        scratch = Scratch(*buffers)
        work = MatmulSumWork(spec, inputs, out, scratch, lax.axis_index("block"))
        pipeline.run(work, scratch)

    rows = grid[0] * cluster * TILE_M if m % HALF else m
    a_scale = jnp.stack([jnp.broadcast_to(q.scale.reshape(-1), (m,)) for q in a])
    y = pipeline.launch(
        matmul_sum_kernel,
        jax.ShapeDtypeStruct((m, n), out_dtype),
        rings=[((TILE_M, LINE), a[0].values.dtype), ((COLUMNS, LINE), b[0].values.dtype)],
        stages=tile.stages,
        blocks=blocks,
        cluster=cluster,
        piece=PIECE,
        interpret=interpret,
    )(
        *(q.values.reshape(m, -1) for q in a),
        *(q.values for q in b),
        jnp.pad(a_scale, ((0, 0), (0, rows - m))),
        jnp.concatenate([q.scale.reshape(-1) for q in b]),
    )
    return y.reshape(*shape, n)


def why_not(
    a: tuple[QTensor, ...],
    b: tuple[QTensor, ...],
    *,
    out_dtype: str | None = None,
    contract: tuple[int, int] = (-1, -1),
) -> Unavailable | None:
    """Why `matmul_sum` cannot multiply these; None: it can."""
    for operands, axis in zip((a, b), contract):
        axis %= operands[0].values.ndim
        kinds = {
            (*q.values.shape[:axis], *q.values.shape[axis + 1 :], str(q.values.dtype))
            for q in operands
        }
        if len(kinds) > 1:
            got = ", ".join(sorted(f"{q.values.dtype}{list(q.values.shape)}" for q in operands))
            return Unavailable(
                f"needs operands of one dtype that differ along the sum only, got {got}: use 'xla'"
            )
    for q in b:
        if q.scale.size > 1:
            return Unavailable(f"needs one scale for each b, got {q.scale.size}: use 'xla'")
    options: dict[str, Any] = {"out_dtype": out_dtype, "contract": contract, "remedy": "xla"}
    return next(filter(None, (why_not_product(*pair, **options) for pair in zip(a, b))), None)
