"""Attention over short sequences, forward.

One block of threads stays on each multiprocessor. A unit of work is a head of one example, whose queries are
cut into tiles of ROWS. One warpgroup copies keys and values into shared memory, up to SLOTS units ahead. Two
warpgroups compute. Tiles are counted over the units of the block; one warpgroup processes the even tiles,
the other the odd ones. For each tile a warpgroup

1. computes the scores with all keys, in registers, so that the softmax needs no running correction;
2. waits for its turn, which the other warpgroup passes after step 4 of the previous tile;
3. computes the weights, exponentials that stay in registers;
4. issues the product of weights and values, and passes the turn;
5. writes the output and lse.

With turns, one warpgroup computes exponentials while the other one multiplies.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.attention.mosaic_gpu import forward_scratch
from swjax.kernels.attention.mosaic_gpu.forward_scratch import (
    LOG2_E,
    ROWS,
    SLOTS,
    SWIZZLE_TOKENS,
    ForwardScratch,
)
from swjax.kernels.availability import Unavailable
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import COMPUTE, Ref

# {causal: (shortest, longest sequence)}. For 265 tokens the kernel copies 272 keys: the most whose scores fit
# into registers, and whose buffers fit into shared memory. With a causal mask registers spill at 257 tokens.
# For shorter sequences Triton's kernel is faster, which skips tiles of hidden scores.
LENGTHS = {False: (96, 265), True: (128, 200)}


class Tile(NamedTuple):
    """A tile of queries.

    Attributes:
      warpgroup: the compute warpgroup that processes it.
      unit: number of its unit, counted over the units of this block of threads.
      number: number of the tile in its unit.
      turn: number of the tile, counted over the tiles of the units of this block of threads.
      slot: the slot of its keys and values.
    """

    warpgroup: jax.Array
    unit: jax.Array
    number: jax.Array
    turn: jax.Array
    slot: jax.Array


@dataclass(frozen=True)
class ForwardWork:
    """The work of one block of threads.

    Attributes:
      q, k, v: [b * t, h * d], 16 bits.
      out: [b, t, h * d], the dtype of q.
      lse: float32, [b * h * t].
      heads: h.
      block: number of this block of threads.
      blocks: number of blocks of threads that share the units.
      scratch: its shared memory.
      causal: whether a query sees only its own key and those before it.
    """

    q: Ref
    k: Ref
    v: Ref
    out: Ref
    lse: Ref
    heads: int
    block: jax.Array
    blocks: int
    scratch: ForwardScratch
    causal: bool

    @property
    def tokens(self) -> int:
        return self.out.shape[1]

    @property
    def width(self) -> int:
        return self.out.shape[2] // self.heads

    @property
    def tiles(self) -> int:
        """Number of tiles of a unit."""
        return pl.cdiv(self.tokens, ROWS)

    @property
    def products(self) -> list[tuple[int, int]]:
        """(first key, number of keys) of each of the two products of scores: together all copied keys."""
        keys = forward_scratch.copied_keys(self.tokens)
        middle = pl.cdiv(keys // ROWS, 2) * ROWS
        return [(0, middle), (middle, keys - middle)]

    def units(self) -> jax.Array:
        """Returns the number of units of this block of threads."""
        return pipeline.unit_count(self.out.shape[0] * self.heads, self.block, self.blocks)

    def place(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the example of a unit, and its head."""
        number = self.block + unit * self.blocks
        return number // self.heads, lax.rem(number, self.heads)

    def shift(self, example: jax.Array) -> jax.Array | int:
        """Returns the number of copied keys before the first key of an example."""
        return (
            jnp.bitwise_and(example * self.tokens, SWIZZLE_TOKENS - 1)
            if self.tokens % SWIZZLE_TOKENS
            else 0
        )

    def copy(self) -> None:
        """Copies keys and values of all units: the memory warpgroup. Returns when all have been read."""

        def copy_unit(unit, _):
            slot = lax.rem(unit, SLOTS)
            pipeline.wait_for_slot(self.scratch.empty, unit, SLOTS)
            example, head = self.place(unit)
            start = example * self.tokens - self.shift(example)

            def copy_rows(source, first, ring):
                rows = pl.ds(pl.multiple_of(start + first, SWIZZLE_TOKENS), ring.shape[1])
                source = source.at[rows, pl.ds(head * self.width, self.width)]
                plgpu.copy_gmem_to_smem(source, ring.at[slot], self.scratch.full.at[slot])

            copy_rows(self.k, 0, self.scratch.k)
            for first, ring in self.values():
                copy_rows(self.v, first, ring)

        units = self.units()
        lax.fori_loop(0, units, copy_unit, None)
        pipeline.wait_for_readers(self.scratch.empty, units, SLOTS)

    def values(self) -> list[tuple[int, Ref]]:
        """Returns (first key, buffer [SLOTS, keys, d]) of each buffer of values."""
        pieces = forward_scratch.value_pieces(forward_scratch.copied_keys(self.tokens), self.width)
        return [(first, ring) for (first, _, _), ring in zip(pieces, self.scratch.v)]

    def compute(self, warpgroup: jax.Array) -> None:
        """Computes the tiles of one compute warpgroup."""
        self.copy_queries(warpgroup, warpgroup)

        def compute_unit(unit, _):
            slot = lax.rem(unit, SLOTS)
            first = lax.rem(warpgroup + unit * self.tiles, COMPUTE)
            plgpu.barrier_wait(self.scratch.full.at[slot])

            def compute_tile(i, _):
                number = first + i * COMPUTE
                self.compute_tile(Tile(warpgroup, unit, number, unit * self.tiles + number, slot))

            lax.fori_loop(0, (self.tiles - first + COMPUTE - 1) // COMPUTE, compute_tile, None)
            plgpu.barrier_arrive(self.scratch.empty.at[slot])

        lax.fori_loop(0, self.units(), compute_unit, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy_queries(self, warpgroup: jax.Array, turn: jax.Array) -> None:
        """Copies the queries of a tile, if there is one; `turn` is that of `Tile`."""
        unit = turn // self.tiles

        @pl.when(unit < self.units())
        def _():
            example, head = self.place(unit)
            rows = pl.ds(example * self.tokens + lax.rem(turn, self.tiles) * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                self.q.at[rows, forward_scratch.row_columns(head, self.width)],
                self.scratch.q.at[warpgroup],
                self.scratch.q_full.at[warpgroup],
            )

    def compute_tile(self, tile: Tile) -> None:
        """Computes and writes the outputs of a tile, and starts the copy of this warpgroup's next queries."""
        # Otherwise the compiler computes addresses before the loop over tiles, and spills them.
        tile = lax.optimization_barrier(tile)
        plgpu.barrier_wait(self.scratch.q_full.at[tile.warpgroup])
        q = pipeline.load_as(self.scratch.q.at[tile.warpgroup])
        # Mosaic starts the copy once all threads have loaded.
        self.copy_queries(tile.warpgroup, tile.turn + COMPUTE)
        scores = self.scores(q, tile.slot)

        @pl.when(tile.turn > 0)
        def wait_for_turn():
            plgpu.barrier_wait(self.scratch.turn.at[tile.warpgroup])

        example, _ = self.place(tile.unit)
        weights, largest, total = self.softmax(
            lax.optimization_barrier(scores), self.shift(example), tile.number * ROWS
        )
        out = self.weighted_values(tile, weights, 1.0 / total)
        self.store(tile, out, largest * self.width**-0.5 + jnp.log(total))

    def scores(self, q: jax.Array, slot: jax.Array) -> list[jax.Array]:
        """Returns the unscaled scores of a tile, float32 [ROWS, keys] for each of `products`.

        Args:
          q: queries of the tile, [ROWS, d].
          slot: the slot of its keys.
        """

        def multiply(*accumulators):
            for scores, (first, count) in zip(accumulators, self.products):
                plgpu.wgmma(scores, q, self.scratch.k.at[slot, pl.ds(first, count)].T)
            return [scores[...] for scores in accumulators]

        accumulators = (
            plgpu.WGMMAAccumulatorRef((ROWS, count), jnp.float32) for _, count in self.products
        )
        return pl.run_scoped(multiply, *accumulators)

    def softmax(
        self, scores: list[jax.Array], shift: jax.Array | int, row: jax.Array
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """Returns unnormalized weights, and for each row the largest score and the sum of weights.

        Args:
          scores: unscaled scores, float32 [ROWS, keys] for each of `products`.
          shift: see `shift`.
          row: number of the first query.

        Returns:
          (weights [ROWS, keys] in the dtype of v for each of `products`, largest unscaled score [ROWS], sum
          of the float32 weights [ROWS]).
        """
        scores = [self.mask(s, first, shift, row) for s, (first, _) in zip(scores, self.products)]
        largest = jnp.maximum(*(jnp.max(s, axis=1) for s in scores))
        scale = self.width**-0.5 * LOG2_E
        most = largest * scale
        weights = [jnp.exp2(s * scale - lax.broadcast_in_dim(most, s.shape, (0,))) for s in scores]
        total = jnp.sum(weights[0], axis=1) + jnp.sum(weights[1], axis=1)
        return lax.optimization_barrier(([w.astype(self.v.dtype) for w in weights], largest, total))

    def mask(
        self, scores: jax.Array, first: int, shift: jax.Array | int, row: jax.Array
    ) -> jax.Array:
        """Replaces the scores of keys that a query does not see by minus infinity.

        Tokens of other examples can be among the first SWIZZLE_TOKENS copied keys, and among the last ones.

        Args:
          scores: of one product, [ROWS, keys].
          first: number of its first key among the copied keys.
          shift: see `shift`.
          row: number of the first query.
        """
        columns = scores.shape[1]
        before = SWIZZLE_TOKENS if first == 0 and self.tokens % SWIZZLE_TOKENS else 0
        after = min(max(self.tokens // SWIZZLE_TOKENS * SWIZZLE_TOKENS - first, 0), columns)

        def visible(start, stop, condition):
            shape = (ROWS, stop - start)
            key = pipeline.iota(shape, 1) + (first + start)
            hidden = jnp.full(shape, -jnp.inf, jnp.float32)
            return jnp.where(condition(key), scores[:, start:stop], hidden)

        if self.causal:
            query = pipeline.iota(scores.shape, 0) + (row + shift)
            return visible(0, columns, lambda key: (key >= shift) & (key <= query))
        pieces = []
        if before:
            pieces.append(visible(0, before, lambda key: key >= shift))
        if before < after:
            pieces.append(scores[:, before:after])
        if after < columns:
            pieces.append(visible(after, columns, lambda key: key - self.tokens < shift))
        return lax.concatenate(pieces, 1) if len(pieces) > 1 else pieces[0]

    def weighted_values(self, tile: Tile, weights: list[jax.Array], factor: jax.Array) -> jax.Array:
        """Returns weights times values, float32 [ROWS, d], with rows multiplied by `factor`, [ROWS]."""

        def multiply(out):
            for w, (start, count) in zip(weights, self.products):
                for first, ring in self.values():
                    low, high = max(start, first), min(start + count, first + ring.shape[1])
                    if low < high:
                        values = ring.at[tile.slot, pl.ds(low - first, high - low)]
                        plgpu.wgmma(out, w[:, low - start : high - start], values)

            @pl.when(tile.turn + 1 < self.units() * self.tiles)
            def pass_the_turn():
                plgpu.barrier_arrive(self.scratch.turn.at[1 - tile.warpgroup])

            return out[...] * lax.broadcast_in_dim(factor, out.shape, (0,))

        shape = (ROWS, self.width)
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def store(self, tile: Tile, out: jax.Array, lse: jax.Array) -> None:
        """Writes out [ROWS, d] and lse [ROWS] of a tile, except rows beyond the last token.

        Copies to contiguous memory would write these rows too. So registers write lse, and `why_not` refuses
        contiguous outputs.
        """
        example, head = self.place(tile.unit)
        rows = tile.number * ROWS
        buffer = self.scratch.out.at[tile.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = out.astype(self.out.dtype)
        plgpu.commit_smem()
        to = self.out.at[example, pl.ds(rows, ROWS), forward_scratch.row_columns(head, self.width)]
        plgpu.copy_smem_to_gmem(buffer, to)

        start = (example * self.heads + head) * self.tokens + rows
        whole, rest = divmod(self.tokens, ROWS)

        @pl.when(tile.number < whole)
        def _():
            self.lse[pl.ds(start, ROWS)] = lse

        if rest:

            @pl.when(tile.number == whole)
            def _():
                buffer = self.scratch.lse.at[tile.warpgroup]
                buffer[...] = lse

                def write(i, _):
                    self.lse[start + i] = buffer[i]

                lax.fori_loop(0, rest, write, None)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`reference.attention`, for the arrays that `why_not` accepts.

    An infinity or NaN in v can also make outputs of the examples before and after its own NaN: see
    `forward_scratch`.
    """
    batch, tokens, heads, width = q.shape
    blocks = tiles.multiprocessors()

    def attention_forward_kernel(q, k, v, out, lse, scratch):
        block = lax.axis_index("block")
        work = ForwardWork(q, k, v, out, lse, heads, block, blocks, scratch, causal)
        pipeline.specialize(work.copy, work.compute)

    buffers = forward_scratch.allocate(tokens, width, q.dtype)
    types = (
        jax.ShapeDtypeStruct((batch, tokens, heads * width), q.dtype),
        jax.ShapeDtypeStruct((batch * heads * tokens,), jnp.float32),
    )
    run = pipeline.kernel(
        attention_forward_kernel,
        types,
        buffers,
        blocks=blocks,
        compiler={"approx_math": True},
    )
    out, lse = run(*(x.reshape(batch * tokens, heads * width) for x in (q, k, v)))
    return out.reshape(q.shape), lse.reshape(batch, heads, tokens)


def why_not(q: jax.Array, *_: Any, causal: bool = False, **__: Any) -> Unavailable | None:
    """Why the kernel does not take 16-bit queries [b, t, h, d] of a known width; None: it does."""
    batch, tokens, heads, width = q.shape
    shortest, longest = LENGTHS[causal]
    if not shortest <= tokens <= longest:
        return Unavailable(
            f"supports {'causal ' * causal}sequences of {shortest} to {longest} tokens, got {tokens}: use "
            "'triton'"
        )
    if heads == 1 and width != forward_scratch.line(width) and tokens % ROWS:
        return Unavailable(f"supports several heads of {width} features, got one: use 'triton'")
    return pipeline.why_not_multiples({"b * t": (batch * tokens, SWIZZLE_TOKENS)}, "triton")
