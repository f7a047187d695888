"""The sum of several quantized products, such as the input gradient of layers that share their input."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import HALF, LINE, TILE_M, Ref, Scratch, SumSteps
from swjax.kernels.products.mosaic_gpu.product import TiledWork, Tiling, tiling
from swjax.kernels.products.mosaic_gpu.product import why_not as why_not_product
from swjax.kernels.products.tiles import PRODUCT_SUM_TILE

# A thread holds two sums of each element, that of a product and that of all products: 80 and 80 registers.
# With 192 columns registers spill, and with 128 the kernel is 8% slower: benchmarks/notes/speed.md.
COLUMNS = 160
PIECE = 32  # columns that are written at a time; they divide COLUMNS


class ProductSumRefs(NamedTuple):
    """Arrays of the sum of the products a[i] b[i]T, or refs to them.

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
class MatmulSumSpec(Tiling):
    """The sizes of a sum of products.

    Attributes:
      steps: number of steps of one product along the contracted axis.
    """

    steps: int


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
        return 0, len(self.inputs.a) * self.spec.steps

    def load(self, unit: jax.Array) -> Callable:
        corner = self.corner(unit)

        def load_step(step, slot, full):
            for i, (a, b) in enumerate(zip(self.inputs.a, self.inputs.b)):

                @pl.when(step // self.spec.steps == i)
                def _(a=a, b=b, first=i * self.spec.steps):
                    self.copy_operands(a, b, corner, step - first, slot, full)

        return load_step

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> jax.Array:
        rows = self.scale_rows(self.half_corner(unit, half)[0])

        def add_product(i, total):
            # Scales are read before the sum, which hides their latency.
            scale = pipeline.load_registers(self.inputs.a_scale.at[i], rows)
            scale = scale * self.inputs.b_scale[i]
            sums = sum_steps(i * self.spec.steps, self.spec.steps).astype(jnp.float32)
            return total + sums * lax.broadcast_in_dim(scale, sums.shape, (0,))

        return lax.fori_loop(0, len(self.inputs.a), add_product, pipeline.zeros((HALF, COLUMNS)))

    def store(self, unit: jax.Array, total: jax.Array, half: jax.Array) -> None:
        pipeline.store_tile(total, self.scratch.out.at[half], self.out.at[self.area(unit, half)])


def matmul_sum(
    a: tuple[QTensor, ...],
    b: tuple[QTensor, ...],
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
) -> jax.Array:
    """`reference.matmul_sum`, for rows a multiple of 8, k of 128, and n of 64 and above 64 (32 in float32).

    Each of a, and each of b, has the same shape, and each b one scale.
    """
    a, b = (
        tuple(q.T if axis == 0 else q for q in operands) for operands, axis in zip((a, b), contract)
    )
    shape, k = a[0].values.shape[:-1], a[0].values.shape[-1]
    m, n = math.prod(shape), b[0].values.shape[0]
    of_tiles = tiling(m, n, COLUMNS, PRODUCT_SUM_TILE)
    spec = MatmulSumSpec(**of_tiles, steps=pl.cdiv(k, LINE))

    def matmul_sum_kernel(inputs, out, scratch):
        pipeline.run(MatmulSumWork(spec, inputs, out, scratch, lax.axis_index("block")), scratch)

    rows = spec.grid[0] * spec.cluster * TILE_M if m % HALF else m
    a_scale = jnp.stack([jnp.broadcast_to(q.scale.reshape(-1), (m,)) for q in a])
    inputs = ProductSumRefs(
        a=tuple(q.values.reshape(m, k) for q in a),
        b=tuple(q.values for q in b),
        a_scale=jnp.pad(a_scale, ((0, 0), (0, rows - m))),
        b_scale=jnp.concatenate([q.scale.reshape(-1) for q in b]),
    )
    y = pipeline.launch(
        matmul_sum_kernel,
        jax.ShapeDtypeStruct((m, n), out_dtype),
        rings=[((TILE_M, LINE), a[0].values.dtype), ((COLUMNS, LINE), b[0].values.dtype)],
        stages=spec.tile.stages,
        blocks=spec.blocks,
        cluster=spec.cluster,
        piece=PIECE,
    )(inputs)
    return y.reshape(*shape, n)


def why_not(
    a: tuple[QTensor, ...],
    b: tuple[QTensor, ...],
    *,
    out_dtype: str | None = None,
    contract: tuple[int, int] = (-1, -1),
) -> Unavailable | None:
    """Why `matmul_sum` cannot multiply these; None: it can."""
    for operands in (a, b):
        kinds = {(q.values.shape, str(q.values.dtype)) for q in operands}
        if len(kinds) > 1:
            got = ", ".join(sorted(f"{dtype}{list(shape)}" for shape, dtype in kinds))
            return Unavailable(f"needs operands of one shape and dtype, got {got}: use 'xla'")
    for q in b:
        if q.scale.size > 1:
            return Unavailable(f"needs one scale for each b, got {q.scale.size}: use 'xla'")
    return why_not_product(a[0], b[0], out_dtype=out_dtype, contract=contract, remedy="xla")
