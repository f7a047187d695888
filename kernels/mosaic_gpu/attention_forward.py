"""Attention over short sequences, forward.

One block of threads stays on each multiprocessor and processes one head of one example after the other. One
warpgroup copies keys and values of the next head into shared memory while the others compute. A compute
warpgroup processes tiles of ROWS queries: all scores of a tile are in registers, so the softmax needs no running
correction, and its weights are multiplied by the values from registers. While one warpgroup computes exponentials,
another one multiplies.

Tiled copies start at a multiple of TILE tokens. A head does not, so keys and values come with up to TILE - 1 tokens
of the example before, and with tokens of the next one. Scores of those tokens are masked.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import Ref

ROWS = 64  # queries of a tile: the rows of a product of one warpgroup
TILE = 8  # tokens of a swizzled tile
STEP = 16  # tokens, or features, of one step of a product
SLOTS = 2  # heads whose keys and values are in shared memory
LINE = 4  # multiple of the length of a row of lse, 16 bytes
LOG2_E = math.log2(math.e)


class Buffers(NamedTuple):
    """The shared memory of a block, in the order of the kernel's arguments.

    Attributes:
      k, v: [SLOTS, keys, d].
      q, out: [warpgroups, ROWS, d].
      lse: [warpgroups, ROWS].
      full, empty: barriers for each slot.
      q_full: a barrier for each compute warpgroup.
    """

    k: Ref
    v: Ref
    q: Ref
    out: Ref
    lse: Ref
    full: Ref
    empty: Ref
    q_full: Ref


@dataclass(frozen=True)
class Attention:
    """The work of one block of threads.

    Attributes:
      q, k, v: [b * t, h * d].
      out: [b, t, h * d].
      lse: [b * h, t rounded up].
      heads: h.
      warpgroups: number of compute warpgroups.
      columns: the keys of each product of scores.
      block: number of this block of threads.
      blocks: number of blocks.
      buffers: its shared memory.
    """

    q: Ref
    k: Ref
    v: Ref
    out: Ref
    lse: Ref
    heads: int
    warpgroups: int
    columns: tuple[int, ...]
    block: jax.Array
    blocks: int
    buffers: Buffers

    @property
    def tokens(self) -> int:
        return self.out.shape[1]

    @property
    def width(self) -> int:
        return self.out.shape[2] // self.heads

    @property
    def tiles(self) -> int:
        """Tiles of a head."""
        return pl.cdiv(self.tokens, ROWS)

    @property
    def keys(self) -> int:
        return sum(self.columns)

    def units(self) -> jax.Array:
        return pipeline.unit_count(self.lse.shape[0], self.block, self.blocks)

    def place(self, unit: jax.Array) -> tuple[jax.Array, pl.Slice]:
        """Returns the example of a unit, and its columns."""
        head = self.block + unit * self.blocks
        return head // self.heads, pl.ds(lax.rem(head, self.heads) * self.width, self.width)

    def shift(self, example: jax.Array) -> jax.Array:
        """Returns the number of copied keys before the first key of an example."""
        return jnp.bitwise_and(example * self.tokens, TILE - 1) if self.tokens % TILE else 0

    def copy(self) -> None:
        """Copies keys and values of all units: the memory warpgroup."""

        def copy_unit(unit, _):
            slot = lax.rem(unit, SLOTS)
            pipeline.wait_for_slot(self.buffers.empty, unit, SLOTS)
            example, columns = self.place(unit)
            start = pl.multiple_of(example * self.tokens - self.shift(example), TILE)
            for source, ring in ((self.k, self.buffers.k), (self.v, self.buffers.v)):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(start, self.keys), columns],
                    ring.at[slot],
                    self.buffers.full.at[slot],
                )

        units = self.units()
        lax.fori_loop(0, units, copy_unit, None)
        empty = lambda s, _: pipeline.wait_for_slot(self.buffers.empty, units + s, SLOTS)
        lax.fori_loop(0, SLOTS, empty, None)

    def copy_queries(self, warpgroup: jax.Array, number: jax.Array) -> None:
        """Copies the queries of a tile, if there is one; `number` counts the tiles of all units."""
        unit = number // self.tiles

        @pl.when(unit < self.units())
        def _():
            example, columns = self.place(unit)
            start = example * self.tokens + lax.rem(number, self.tiles) * ROWS
            plgpu.copy_gmem_to_smem(
                self.q.at[pl.ds(start, ROWS), columns],
                self.buffers.q.at[warpgroup],
                self.buffers.q_full.at[warpgroup],
            )

    def compute(self, warpgroup: jax.Array) -> None:
        """Computes every tile whose number, counted over all units, is `warpgroup` modulo the warpgroups."""
        self.copy_queries(warpgroup, warpgroup)

        def compute_unit(unit, _):
            slot = lax.rem(unit, SLOTS)
            first = lax.rem(warpgroup + unit * (-self.tiles % self.warpgroups), self.warpgroups)
            count = (self.tiles - first + self.warpgroups - 1) // self.warpgroups
            plgpu.barrier_wait(self.buffers.full.at[slot])

            def compute_tile(i, _):
                tile = first + i * self.warpgroups
                plgpu.barrier_wait(self.buffers.q_full.at[warpgroup])
                q = plgpu.load(
                    self.buffers.q.at[warpgroup], layout=plgpu.Layout.WGMMA, optimized=False
                )
                plgpu.commit_smem()
                self.copy_queries(warpgroup, unit * self.tiles + tile + self.warpgroups)
                out, lse = self.attend(q, slot, self.shift(self.place(unit)[0]))
                self.store(warpgroup, unit, tile, out, lse)

            lax.fori_loop(0, count, compute_tile, None)
            plgpu.barrier_arrive(self.buffers.empty.at[slot])

        lax.fori_loop(0, self.units(), compute_unit, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def attend(
        self, q: jax.Array, slot: jax.Array, shift: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of a tile, [ROWS, d], and the log-sum-exp of its rows."""
        scale = self.width**-0.5
        scores, largest = self.scores(q, slot, shift)

        def multiply(out):
            total = None
            for s, (first, count) in zip(scores, self.products()):
                shifted = s * (scale * LOG2_E) - lax.broadcast_in_dim(
                    largest * (scale * LOG2_E), s.shape, (0,)
                )
                weights = jnp.exp2(shifted)
                part = jnp.sum(weights, axis=1)
                total = part if total is None else total + part
                values = self.buffers.v.at[slot, pl.ds(first, count)]
                plgpu.wgmma(out, weights.astype(self.v.dtype), values)
            return out[...], total

        out, total = pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((ROWS, self.width), jnp.float32)
        )
        out = out * lax.broadcast_in_dim(1.0 / total, out.shape, (0,))
        return out, largest * scale + jnp.log(total)

    def products(self) -> list[tuple[int, int]]:
        """Returns the first key of each product of scores, and the number of its keys."""
        firsts = [sum(self.columns[:i]) for i in range(len(self.columns))]
        return list(zip(firsts, self.columns))

    def scores(
        self, q: jax.Array, slot: jax.Array, shift: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Returns the scores of a tile, in pieces [ROWS, columns], and the largest score of each row."""

        def multiply(*accumulators):
            for scores, (first, count) in zip(accumulators, self.products()):
                plgpu.wgmma(scores, q, self.buffers.k.at[slot, pl.ds(first, count)].T)
            largest, pieces = None, []
            for i, (first, count) in enumerate(self.products()):
                behind = len(self.columns) - 1 - i
                scores = plgpu.wgmma_accumulator_load(accumulators[i], wait_n=behind)
                scores = self.mask(scores, first, count, shift)
                part = jnp.max(scores, axis=1)
                largest = part if largest is None else jnp.maximum(largest, part)
                pieces.append(scores)
            return pieces, largest

        accumulators = (
            plgpu.WGMMAAccumulatorRef((ROWS, count), jnp.float32) for count in self.columns
        )
        return pl.run_scoped(multiply, *accumulators)

    def mask(self, scores: jax.Array, first: int, count: int, shift: jax.Array) -> jax.Array:
        """Replaces the scores of tokens of other examples by minus infinity."""
        before = first == 0 and self.tokens % TILE
        after = first + count > self.tokens
        if not before and not after:
            return scores
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        masked = jnp.full(scores.shape, -jnp.inf, jnp.float32)
        if before:
            scores = jnp.where(key >= shift, scores, masked)
        if after:
            scores = jnp.where(key < shift + (self.tokens - first), scores, masked)
        return scores

    def store(
        self,
        warpgroup: jax.Array,
        unit: jax.Array,
        tile: jax.Array,
        out: jax.Array,
        lse: jax.Array,
    ) -> None:
        """Writes the rows of a tile; TMA does not write past the last token."""
        example, columns = self.place(unit)
        rows = pl.ds(lax.shift_left(tile, int(math.log2(ROWS))), ROWS)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.buffers.out[warpgroup] = out.astype(self.out.dtype)
        self.buffers.lse[warpgroup] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            self.buffers.out.at[warpgroup], self.out.at[example, rows, columns]
        )
        plgpu.copy_smem_to_gmem(
            self.buffers.lse.at[warpgroup], self.lse.at[self.block + unit * self.blocks, rows]
        )


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    warpgroups: int = 2,
    products: int = 2,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attention`, not causal.

    Args:
      warpgroups: number of compute warpgroups.
      products: number of products that compute the scores of a tile.
      multiprocessors, interpret: for tests.
    """
    del causal
    batch, tokens, heads, width = q.shape
    blocks = multiprocessors or tiles.multiprocessors()
    columns = split(tokens, products)
    keys = sum(columns)

    def attention_forward_kernel(q, k, v, out, lse, *buffers):
        warpgroup = lax.axis_index("warpgroup")
        work = Attention(
            q, k, v, out, lse, heads, warpgroups, columns, lax.axis_index("block"), blocks,
            Buffers(*buffers),
        )  # fmt: skip

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(40 if warpgroups == 2 else 32, action="decrease")
            work.copy()

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(232 if warpgroups == 2 else 160, action="increase")
            work.compute(warpgroup)

    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((TILE, STEP)), swizzle(2 * STEP))
    buffers = Buffers(
        k=plgpu.SMEM((SLOTS, keys, width), q.dtype, transforms=swizzled),
        v=plgpu.SMEM((SLOTS, keys, width), q.dtype, transforms=swizzled),
        q=plgpu.SMEM((warpgroups, ROWS, width), q.dtype),
        out=plgpu.SMEM((warpgroups, ROWS, width), q.dtype),
        lse=plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=SLOTS),
        q_full=plgpu.Barrier(num_barriers=warpgroups),
    )
    run = plgpu.kernel(
        attention_forward_kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, tokens, heads * width), q.dtype),
            jax.ShapeDtypeStruct((batch * heads, pl.cdiv(tokens, LINE) * LINE), jnp.float32),
        ),
        scratch_types=list(buffers),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        interpret=interpret,
    )
    out, lse = run(*(x.reshape(batch * tokens, heads * width) for x in (q, k, v)))
    return out.reshape(q.shape), lse[:, :tokens].reshape(batch, heads, tokens)


def split(tokens: int, products: int) -> tuple[int, ...]:
    """Splits the keys of a head, with those that are copied around them, into products of equal numbers.

    >>> split(257, 2), split(129, 1), split(256, 2)
    ((144, 128), (144,), (128, 128))
    """
    steps = pl.cdiv(tokens + (TILE - 1 if tokens % TILE else 0), STEP)
    each, more = divmod(steps, products)
    return tuple(STEP * (each + (i < more)) for i in range(products))
