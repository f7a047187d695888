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
DEBUG = ""
TILE = 8  # tokens of a swizzled tile
STEP = 16  # tokens, or features, of one step of a product
SLOTS = 2  # heads whose keys and values are in shared memory
LINE = 4  # multiple of the length of a row of lse, 16 bytes
LOG2_E = math.log2(math.e)


class Piece(NamedTuple):
    """Some features of a head: the columns of a buffer in shared memory.

    Attributes:
      first: the first feature.
      width: number of features, a multiple of `line`.
      line: features of a swizzled line of the buffer: 64 or 16.
    """

    first: int
    width: int
    line: int

    def of(self, columns: jax.Array) -> pl.Slice:
        """Returns the columns of an array, for heads whose first column is given."""
        return pl.ds(columns + self.first, self.width)

    def buffer(self, *shape: int, dtype: jax.typing.DTypeLike, rows: int) -> Any:
        if rows == 1 and self.line == 16:
            return plgpu.SMEM((*shape, self.width), dtype)
        """Shared memory [*shape, width] in tiles of `rows` lines."""
        tiling: Any = plgpu.TilingTransform  # jax 0.12 types these two as abstract
        swizzle: Any = plgpu.SwizzleTransform
        transforms = (tiling((rows, self.line)), swizzle(2 * self.line))
        return plgpu.SMEM((*shape, self.width), dtype, transforms=transforms)


class Buffers(NamedTuple):
    """The shared memory of a block, in the order of the kernel's arguments.

    Attributes:
      k: [SLOTS, keys, features] of each piece of the features.
      v: [SLOTS, keys, features], the same; for lines of 64 features the number of keys is a multiple of 64.
      v_tail: [SLOTS, keys, features], the remaining keys.
      q, out: [warpgroups, ROWS, features] of each piece.
      lse: [warpgroups, ROWS].
      full, empty: barriers for each slot.
      q_full: a barrier for each compute warpgroup.
    """

    k: tuple[Ref, ...]
    v: tuple[Ref, ...]
    v_tail: tuple[Ref, ...]
    q: tuple[Ref, ...]
    out: tuple[Ref, ...]
    lse: Ref
    full: Ref
    empty: Ref
    q_full: Ref
    turn: Ref


@dataclass(frozen=True)
class Attention:
    """The work of one block of threads.

    Attributes:
      q, k, v: [b * t, h * d].
      out: [b, t, h * d].
      lse: [b * h * t].
      heads: h.
      pieces: of the features of q, k and out.
      v_pieces: of the features of v.
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
    pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]
    warpgroups: int
    columns: tuple[int, ...]
    ahead: bool
    order: int
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

    def units(self) -> jax.Array:
        return pipeline.unit_count(self.out.shape[0] * self.heads, self.block, self.blocks)

    def place(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the example of a unit, and its first column."""
        head = self.block + unit * self.blocks * ("l2" not in DEBUG)
        return head // self.heads, lax.rem(head, self.heads) * self.width

    def shift(self, example: jax.Array) -> jax.Array:
        """Returns the number of copied keys before the first key of an example."""
        return jnp.bitwise_and(example * self.tokens, TILE - 1) if self.tokens % TILE else 0

    def copy(self) -> None:
        """Copies keys and values of all units: the memory warpgroup."""

        def copy_unit(unit, _):
            slot = lax.rem(unit, SLOTS)
            pipeline.wait_for_slot(self.buffers.empty, unit, SLOTS)
            example, column = self.place(unit)
            start = example * self.tokens - self.shift(example)

            def copy_rows(source, ring, first, piece):
                rows = pl.ds(pl.multiple_of(start + first, TILE), ring.shape[1])
                source = source.at[rows, piece.of(column)]
                plgpu.copy_gmem_to_smem(source, ring.at[slot], self.buffers.full.at[slot])

            for piece, ring in zip(self.pieces, self.buffers.k):
                copy_rows(self.k, ring, 0, piece)
            for piece, ring in zip(self.v_pieces, self.buffers.v):
                copy_rows(self.v, ring, 0, piece)
            for piece, ring in zip(self.v_pieces, self.buffers.v_tail):
                copy_rows(self.v, ring, self.buffers.v[0].shape[1], piece)

        units = self.units()
        lax.fori_loop(0, units, copy_unit, None)
        empty = lambda s, _: pipeline.wait_for_slot(self.buffers.empty, units + s, SLOTS)
        lax.fori_loop(0, SLOTS, empty, None)

    def copy_queries(self, warpgroup: jax.Array, number: jax.Array) -> None:
        """Copies the queries of a tile, if there is one; `number` counts the tiles of all units."""
        unit = number // self.tiles

        @pl.when(unit < self.units())
        def _():
            example, column = self.place(unit)
            rows = pl.ds(example * self.tokens + lax.rem(number, self.tiles) * ROWS, ROWS)
            for piece, buffer in zip(self.pieces, self.buffers.q):
                if piece.line == 16:
                    column = lax.shift_left(column // 16, 4)
                plgpu.copy_gmem_to_smem(
                    self.q.at[rows, piece.of(column)],
                    buffer.at[warpgroup],
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
                layout = plgpu.Layout.WGMMA
                q = [
                    plgpu.load(buffer.at[warpgroup], layout=layout, optimized=False)
                    for buffer in self.buffers.q
                ]
                plgpu.commit_smem()
                self.copy_queries(warpgroup, unit * self.tiles + tile + self.warpgroups)
                if "memory" in DEBUG:
                    out = [x.astype(jnp.float32) for x in q]
                    lse = jnp.max(out[0], axis=1)
                else:
                    out, lse = self.attend(q, slot, self.shift(self.place(unit)[0]), warpgroup, unit * self.tiles + tile)
                self.store(warpgroup, unit, tile, out, lse)

            lax.fori_loop(0, count, compute_tile, None)
            plgpu.barrier_arrive(self.buffers.empty.at[slot])

        lax.fori_loop(0, self.units(), compute_unit, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def attend(
        self, q: list[jax.Array], slot: jax.Array, shift: jax.Array, warpgroup, number
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of a tile, [ROWS, d], and the log-sum-exp of its rows."""
        scale = self.width**-0.5
        scores, largest = self.scores(q, slot, shift, warpgroup, number)
        if self.order == 1:
            return self.ordered(scores, largest, slot, warpgroup, number)

        def multiply(*accumulators):
            total = None
            most = largest * (scale * LOG2_E)
            for i, (first, _) in enumerate(self.products()):
                s = scores[i]
                if self.ahead and i:
                    s, most = lax.optimization_barrier((s, most))
                weights = (lambda x: x if "noexp" in DEBUG else jnp.exp2(x))(
                    s * (scale * LOG2_E) - lax.broadcast_in_dim(most, s.shape, (0,))
                )
                part = jnp.sum(weights, axis=1)
                total = part if total is None else total + part
                self.add_product(accumulators, weights.astype(self.v.dtype), slot, first)
            factor = 1.0 / total
            outs = [
                o[...] * lax.broadcast_in_dim(factor, o.shape, (0,)) for o in accumulators
            ]
            return outs, total

        outs, total = pl.run_scoped(
            multiply,
            *(
                plgpu.WGMMAAccumulatorRef((ROWS, piece.width), jnp.float32)
                for piece in self.v_pieces
            ),
        )
        return outs, largest * scale + jnp.log(total)

    def ordered(self, scores, largest, slot, warpgroup, number):
        scale = self.width**-0.5
        most = largest * (scale * LOG2_E)
        total, weights = None, []
        for s in scores:
            w = jnp.exp2(s * (scale * LOG2_E) - lax.broadcast_in_dim(most, s.shape, (0,)))
            part = jnp.sum(w, axis=1)
            total = part if total is None else total + part
            weights.append(w.astype(self.v.dtype))
        weights, total, largest = lax.optimization_barrier((weights, total, largest))

        def multiply(*accumulators):
            for w, (first, _) in zip(weights, self.products()):
                self.add_product(accumulators, w, slot, first)

            @pl.when(number + 1 < self.units() * self.tiles)
            def _():
                plgpu.barrier_arrive(self.buffers.turn.at[lax.rem(warpgroup + 1, self.warpgroups)])
            factor = 1.0 / total
            return [o[...] * lax.broadcast_in_dim(factor, o.shape, (0,)) for o in accumulators]

        outs = pl.run_scoped(
            multiply,
            *(
                plgpu.WGMMAAccumulatorRef((ROWS, piece.width), jnp.float32)
                for piece in self.v_pieces
            ),
        )
        return outs, largest * scale + jnp.log(total)

    def add_product(
        self, accumulators: tuple, weights: jax.Array, slot: jax.Array, first: int
    ) -> None:
        """Adds the product of weights and values, for keys from `first` on."""
        for i, (out, values) in enumerate(zip(accumulators, self.buffers.v)):
            count = min(values.shape[1] - first, weights.shape[1])
            if count:
                main = weights if count == weights.shape[1] else weights[:, :count]
                plgpu.wgmma(out, main, values.at[slot, pl.ds(first, count)])
            if count < weights.shape[1]:
                rows = pl.ds(first + count - values.shape[1], weights.shape[1] - count)
                plgpu.wgmma(out, weights[:, count:], self.buffers.v_tail[i].at[slot, rows])

    def products(self) -> list[tuple[int, int]]:
        """Returns the first key of each product of scores, and the number of its keys."""
        firsts = [sum(self.columns[:i]) for i in range(len(self.columns))]
        return list(zip(firsts, self.columns))

    def scores(
        self, q: list[jax.Array], slot: jax.Array, shift: jax.Array, warpgroup, number
    ) -> tuple[list[jax.Array], jax.Array]:
        """Returns the scores of a tile, in pieces [ROWS, columns], and the largest score of each row."""

        def multiply(*accumulators):
            for scores, (first, count) in zip(accumulators, self.products()):
                for queries, keys in zip(q, self.buffers.k):
                    plgpu.wgmma(scores, queries, keys.at[slot, pl.ds(first, count)].T)
            largest, pieces = None, []
            if self.order == 1:
                loaded = [plgpu.wgmma_accumulator_load(a, wait_n=0) for a in accumulators]

                @pl.when(number > 0)
                def _():
                    plgpu.barrier_wait(self.buffers.turn.at[warpgroup])

                loaded = lax.optimization_barrier(loaded)
            for i, (first, count) in enumerate(self.products()):
                behind = (len(self.columns) - 1 - i) * len(q)
                if self.order == 1:
                    scores = loaded[i]
                else:
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
        """Replaces the scores of tokens of other examples by minus infinity.

        Only the first TILE columns and those from the number of tokens on can belong to other examples.
        """
        before = TILE if first == 0 and self.tokens % TILE else 0
        after = min(max(self.tokens // TILE * TILE - first, 0), count)
        pieces = []
        if before:
            key = self.key(before)
            pieces.append(jnp.where(key >= shift, scores[:, :before], self.nothing(before)))
        if before < after:
            pieces.append(scores[:, before:after])
        if after < count:
            key = self.key(count - after) + (first + after - self.tokens)
            pieces.append(jnp.where(key < shift, scores[:, after:], self.nothing(count - after)))
        return lax.concatenate(pieces, 1) if len(pieces) > 1 else pieces[0]

    def key(self, count):
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, count), 1, layout=plgpu.Layout.WGMMA)

    def nothing(self, count):
        return jnp.full((ROWS, count), -jnp.inf, jnp.float32)

    def store(
        self,
        warpgroup: jax.Array,
        unit: jax.Array,
        tile: jax.Array,
        outs: list[jax.Array],
        lse: jax.Array,
    ) -> None:
        """Writes the rows of a tile; TMA does not write past the last token."""
        example, column = self.place(unit)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out = outs[0] if len(outs) == 1 else None
        for i, (piece, buffer) in enumerate(zip(self.pieces, self.buffers.out)):
            if len(outs) == len(self.pieces):
                part = outs[i]
            else:
                part = out[:, piece.first : piece.first + piece.width]
            buffer[warpgroup] = part.astype(self.out.dtype)
        self.buffers.lse[warpgroup] = lse
        plgpu.commit_smem()
        # The lines of `out` do not start at a multiple of TILE tokens.
        for piece, buffer in zip(self.pieces, self.buffers.out):
            if piece.line == 16:
                column = lax.shift_left(column // 16, 4)
            plgpu.copy_smem_to_gmem(
                buffer.at[warpgroup], self.out.at[example, pl.ds(lax.shift_left(tile, 6), ROWS), piece.of(column)]
            )
        start = (self.block + unit * self.blocks) * self.tokens + tile * ROWS
        whole = self.tokens // ROWS

        @pl.when(tile < whole)
        def _():
            self.lse[pl.ds(start, ROWS)] = lse

        if self.tokens % ROWS:

            @pl.when(tile == whole)
            def _():
                def write(i, _):
                    self.lse[start + i] = self.buffers.lse[warpgroup, i]

                lax.fori_loop(0, self.tokens % ROWS, write, None)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    warpgroups: int = 2,
    products: int = 2,
    whole_v: bool = False,
    lines: int = 64,
    ahead: bool = False,
    order: int = 1,
    debug: str = "",
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
    global DEBUG
    DEBUG = debug
    batch, tokens, heads, width = q.shape
    blocks = multiprocessors or tiles.multiprocessors()
    keys = STEP * pl.cdiv(tokens + (TILE - 1 if tokens % TILE else 0), STEP)
    columns = split(keys, products)
    pieces = cut(width, lines)
    v_pieces = (Piece(0, width, STEP),) if whole_v else pieces

    def attention_forward_kernel(q, k, v, out, lse, *buffers):
        warpgroup = lax.axis_index("warpgroup")
        work = Attention(
            q, k, v, out, lse, heads, pieces, v_pieces, warpgroups, columns, ahead, order,
            lax.axis_index("block"), blocks, Buffers(*buffers),
        )  # fmt: skip

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(40 if warpgroups == 2 else 32, action="decrease")
            work.copy()

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(232 if warpgroups == 2 else 160, action="increase")
            work.compute(warpgroup)

    def rows(piece):
        return keys if piece.line == STEP else keys // piece.line * piece.line

    dtype = q.dtype
    v_tail = [(p, keys - rows(p)) for p in v_pieces if keys > rows(p)]
    copies = len(pieces) + len(v_pieces) + len(v_tail)
    buffers = Buffers(
        k=tuple(p.buffer(SLOTS, keys, dtype=dtype, rows=TILE) for p in pieces),
        v=tuple(p.buffer(SLOTS, rows(p), dtype=dtype, rows=TILE) for p in v_pieces),
        v_tail=tuple(
            p._replace(line=STEP).buffer(SLOTS, n, dtype=dtype, rows=TILE) for p, n in v_tail
        ),
        q=tuple(p.buffer(warpgroups, ROWS, dtype=dtype, rows=1) for p in pieces),
        out=tuple(p.buffer(warpgroups, ROWS, dtype=dtype, rows=1) for p in pieces),
        lse=plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
        empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=SLOTS),
        q_full=plgpu.Barrier(num_arrivals=len(pieces), num_barriers=warpgroups),
        turn=plgpu.Barrier(num_barriers=warpgroups),
    )
    run = plgpu.kernel(
        attention_forward_kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, tokens, heads * width), q.dtype),
            jax.ShapeDtypeStruct((batch * heads * tokens,), jnp.float32),
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
    return out.reshape(q.shape), lse.reshape(batch, heads, tokens)


def cut(width: int, line: int = 64) -> tuple[Piece, ...]:
    if width % line:
        line = STEP
    return (Piece(0, width, line),)


def split(keys: int, products: int) -> tuple[int, ...]:
    """Splits the keys of a head into products of multiples of 64 keys, the last one with the remaining keys.

    >>> split(272, 2), split(144, 1), split(208, 2)
    ((128, 144), (144,), (128, 80))
    """
    each, more = divmod(keys // 64, products)
    columns = [64 * (each + (i < more)) for i in range(products)]
    columns[-1] += keys % 64
    return tuple(columns)
