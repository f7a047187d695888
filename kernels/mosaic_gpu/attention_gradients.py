"""Attention backward of short sequences, for Hopper.

One block of threads stays on each multiprocessor and processes one head after the other. Queries, keys,
values and gradients of a head stay in shared memory, in tiles of ROWS tokens. First the rows of products are
queries, then they are keys; each row loops over all columns. So every sum stays in registers and has a fixed
order::

    queries    s = q k^T, dp = g v^T, ds = exp(s - lse) (dp - delta), dq += ds k
    keys       the same, transposed; dv += exp(s - lse)^T g, dk += ds^T q

One warpgroup copies. The others compute; each processes every second tile, or every third::

    keys_full[tile], queries_full[tile]      copies have arrived           memory -> compute warpgroups
    keys_empty[tile], queries_empty[tile]    all have read the tile        compute -> memory warpgroup
    out_full[warpgroup], out_empty[...]      the same for tiles of out, which only delta needs
    exchange                                 all have written their delta  compute -> compute warpgroups

Past the end of a sequence TMA reads zeros and writes nothing.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles

Ref = Any  # of an array in global or shared memory, or of barriers

ROWS = 64  # of a product
GROUP = 8  # rows of a swizzled tile
PIECE = 16  # columns of a swizzled tile
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Variant:
    """How a block of threads divides its work.

    Attributes:
      compute: number of compute warpgroups.
      columns: number of columns of a product of scores.
      ahead: whether the scores of the next columns are multiplied before those of the current ones are used,
        with queries as rows.
    """

    compute: int = 2
    columns: int = 64
    ahead: bool = False


class Buffers(NamedTuple):
    """The shared memory of a block, in the order of the kernel's arguments.

    Attributes:
      q, k, v, g: [span, d], one head.
      out, results: [compute warpgroups, ROWS, d].
      lse, delta: [2, span], of heads with even and odd numbers.
      keys_full, queries_full, keys_empty, queries_empty: a barrier for each tile.
      lse_full: two barriers.
      out_full, out_empty: a barrier for each compute warpgroup.
      exchange: a barrier at which the compute warpgroups wait for each other.
    """

    q: Ref
    k: Ref
    v: Ref
    g: Ref
    out: Ref
    results: Ref
    lse: Ref
    delta: Ref
    keys_full: Ref
    queries_full: Ref
    keys_empty: Ref
    queries_empty: Ref
    lse_full: Ref
    out_full: Ref
    out_empty: Ref
    exchange: Ref
    operands: Ref | None


@dataclass(frozen=True)
class Backward:
    """The work of one block of threads.

    Attributes:
      q, k, v, out, g, dq, dk, dv: [b, t, h, d].
      lse: [b, h, span], times LOG2_E; infinite past the end of the sequence.
      buffers: shared memory.
      variant: see there.
      blocks, block: number of blocks of threads, and the number of this one.
      interpreted: whether Pallas's interpreter runs the kernel.
    """

    q: Ref
    k: Ref
    v: Ref
    out: Ref
    g: Ref
    lse: Ref
    dq: Ref
    dk: Ref
    dv: Ref
    buffers: Buffers
    variant: Variant
    blocks: int
    block: jax.Array
    interpreted: bool

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def width(self) -> int:
        return self.q.shape[3]

    @property
    def span(self) -> int:
        return self.buffers.q.shape[0]

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.span, ROWS)

    @property
    def tail(self) -> int:
        """Rows of the last tile that no other tile has."""
        return self.span - (self.tiles - 1) * ROWS

    def heads(self) -> jax.Array:
        """The number of heads of this block."""
        total = self.q.shape[0] * self.q.shape[2]
        return (total - self.block + self.blocks - 1) // self.blocks

    def place(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The example of a head, and its number in the example."""
        number, heads = self.block + head * self.blocks, self.q.shape[2]
        return number // heads, lax.rem(number, heads)

    # --- Copies ---------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Copies all heads: the memory warpgroup."""

        def copy_head(head, _):
            queries = lambda tile: self.copy_tile(head, tile, keys=False)
            keys = lambda tile: self.copy_tile(head, tile, keys=True)
            out = lambda tile: self.copy_out(head, tile)
            early = min(self.tiles, self.variant.compute)
            for tile in range(self.tiles - early):
                keys(tile)
            for tile in range(early):
                queries(tile)
                if tile == 0:
                    self.copy_lse(head)
                out(tile)
            for tile in range(self.tiles - early, self.tiles):
                keys(tile)
            for tile in range(early, self.tiles):
                queries(tile)
            for tile in range(early, self.tiles):
                out(tile)

        lax.fori_loop(0, self.heads(), copy_head, None)

        @pl.when(self.heads() > 0)
        def _():
            b = self.buffers
            for empty in (b.keys_empty, b.queries_empty, b.out_empty):
                for i in range(min(empty.shape[0], self.tiles)):
                    plgpu.barrier_wait(empty.at[i])

    def copy_tile(self, head: jax.Array, tile: int, keys: bool) -> None:
        """Copies a tile of k and v, or of q and g, in groups of rows."""
        example, number = self.place(head)
        b = self.buffers
        sources = ((self.k, b.k), (self.v, b.v)) if keys else ((self.q, b.q), (self.g, b.g))
        full, empty = (b.keys_full, b.keys_empty) if keys else (b.queries_full, b.queries_empty)
        groups = (self.tail if tile == self.tiles - 1 else ROWS) // GROUP

        @pl.when(head > 0)
        def _():
            plgpu.barrier_wait(empty.at[tile])

        for source, to in sources:

            def copy_group(i, _):
                group = tile * (ROWS // GROUP) + i
                rows = pl.ds(group * GROUP, GROUP)
                plgpu.copy_gmem_to_smem(
                    source.at[example, rows, number], self.group(to, group), full.at[tile]
                )

            lax.fori_loop(0, groups, copy_group, None)
            for _ in range(groups, ROWS // GROUP):
                plgpu.barrier_arrive(full.at[tile])

    def group(self, ref: Ref, group: jax.Array) -> Ref:
        """A group of rows, [GROUP, d]: as many swizzled tiles side by side.

        TMA tiles only multiples of the tile's rows. So a group is copied without tiling its rows.
        """
        if self.interpreted:
            return ref.at[pl.ds(group * GROUP, GROUP)]
        stored = ref.ref.at[group]  # [d / PIECE, GROUP, PIECE]
        unswizzle = plgpu.SwizzleTransform(2 * PIECE).undo(None)
        untile = plgpu.TilingTransform((PIECE,)).undo(None)
        view = dataclasses.replace(stored, transforms=(*stored.transforms, unswizzle))
        view = view.transpose((1, 0, 2))
        return dataclasses.replace(view, transforms=(*view.transforms, untile))

    def copy_lse(self, head: jax.Array) -> None:
        example, number = self.place(head)
        parity = lax.rem(head, 2)
        plgpu.copy_gmem_to_smem(
            self.lse.at[example, number],
            self.buffers.lse.at[parity],
            self.buffers.lse_full.at[parity],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def copy_out(self, head: jax.Array, tile: int) -> None:
        example, number = self.place(head)
        warpgroup = tile % self.variant.compute

        def wait():
            plgpu.barrier_wait(self.buffers.out_empty.at[warpgroup])

        wait() if tile >= self.variant.compute else pl.when(head > 0)(wait)
        rows = pl.ds(self.first_row(tile + 0 * head), ROWS)
        plgpu.copy_gmem_to_smem(
            self.out.at[example, rows, number],
            self.buffers.out.at[warpgroup],
            self.buffers.out_full.at[warpgroup],
        )

    # --- Products -------------------------------------------------------------------------------------

    def compute(self, warpgroup: jax.Array) -> None:
        """Computes the gradients of the tiles of one warpgroup, of all heads."""
        b, count, step = self.buffers, self.tiles, self.variant.compute
        wait_queries = lambda tile, _: plgpu.barrier_wait(b.queries_full.at[tile])
        wait_keys = lambda tile, _: plgpu.barrier_wait(b.keys_full.at[tile])
        free_queries = lambda tile, _: plgpu.barrier_arrive(b.queries_empty.at[tile])
        free_keys = lambda tile, _: plgpu.barrier_arrive(b.keys_empty.at[tile])

        def compute_head(head, _):
            parity = lax.rem(head, 2)

            def query_tile(i, waited):
                tile = warpgroup + step * i
                lax.fori_loop(waited, tile + 1, wait_queries, None)
                self.query_rows(head, parity, tile, warpgroup)
                return tile + 1

            def key_tile(i, freed):
                tile = lax.rem(warpgroup + step - count % step, step) + step * i
                self.key_rows(head, parity, tile, warpgroup)
                lax.fori_loop(freed, tile + 1, free_keys, None)
                return tile + 1

            turns = lambda first: (count - first + step - 1) // step
            lax.fori_loop(0, count, wait_keys, None)
            plgpu.barrier_wait(b.lse_full.at[parity])
            waited = lax.fori_loop(0, turns(warpgroup), query_tile, jnp.int32(0))
            lax.fori_loop(waited, count, wait_queries, None)
            plgpu.barrier_arrive(b.exchange)
            plgpu.barrier_wait(b.exchange)
            first = lax.rem(warpgroup + step - count % step, step)
            freed = lax.fori_loop(0, turns(first), key_tile, jnp.int32(0))
            lax.fori_loop(freed, count, free_keys, None)
            lax.fori_loop(0, count, free_queries, None)

        lax.fori_loop(0, self.heads(), compute_head, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def first_row(self, tile: jax.Array) -> jax.Array:
        """The last tile begins early enough to have ROWS rows; those of the tile before are unused."""
        return jnp.minimum(tile * ROWS, self.span - ROWS)

    def column_blocks(self) -> list[tuple[int, int]]:
        """(first column, number of columns) of each product."""
        length = self.variant.columns
        return [(at, min(length, self.span - at)) for at in range(0, self.span, length)]

    def sweep(self, issue: Callable, finish: Callable, ahead: bool) -> None:
        """Processes all blocks of columns.

        Args:
          issue: function (block, s, dp) that starts two products.
          finish: function (block, s, dp, later) that uses them; `later` products were issued after them.
          ahead: whether the products of a block are issued before the previous one is finished.
        """
        blocks = self.column_blocks()
        sums = lambda columns: [plgpu.ACC((ROWS, columns), jnp.float32)] * 2

        def block(i, s, dp):
            def next_block(next_s, next_dp):
                issue(blocks[i + 1], next_s, next_dp)
                if ahead:
                    finish(blocks[i], s, dp, 2)
                block(i + 1, next_s, next_dp)

            last = i + 1 == len(blocks)
            if last or not ahead:
                finish(blocks[i], s, dp, 0)
            if not last:
                pl.run_scoped(next_block, *sums(blocks[i + 1][1]))

        def first_block(s, dp):
            issue(blocks[0], s, dp)
            block(0, s, dp)

        pl.run_scoped(first_block, *sums(blocks[0][1]))

    def find_delta(self, parity: jax.Array, row: jax.Array, warpgroup: jax.Array) -> jax.Array:
        """The inner products of a tile of outputs and their gradients: [ROWS]."""
        b = self.buffers
        plgpu.barrier_wait(b.out_full.at[warpgroup])
        out = plgpu.load(b.out.at[warpgroup], layout=plgpu.Layout.WGMMA, optimized=False)
        g = plgpu.load(b.g.at[pl.ds(row, ROWS)], layout=plgpu.Layout.WGMMA, optimized=False)
        delta = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=1)
        plgpu.barrier_arrive(b.out_empty.at[warpgroup])
        b.delta[parity, pl.ds(row, ROWS)] = delta
        return delta

    def query_rows(self, head, parity, tile, warpgroup) -> None:
        """Computes and writes dq of a tile."""
        b, row = self.buffers, self.first_row(tile)
        rows = pl.ds(row, ROWS)
        delta = self.find_delta(parity, row, warpgroup)
        lse = plgpu.load(b.lse.at[parity, rows], layout=plgpu.Layout.WGMMA.reduce(1))

        def issue(block, s, dp):
            columns = pl.ds(*block)
            plgpu.wgmma(s, b.q.at[rows], b.k.at[columns].T)
            plgpu.wgmma(dp, b.g.at[rows], b.v.at[columns].T)

        def sum_up(dq):
            def finish(block, s, dp, later):
                weights = self.weights(plgpu.wgmma_accumulator_load(s, wait_n=1 + later), lse, 0)
                if sum(block) > self.tokens:
                    column = plgpu.broadcasted_iota(
                        jnp.int32, weights.shape, 1, layout=plgpu.Layout.WGMMA
                    )
                    weights = jnp.where(column < self.tokens - block[0], weights, 0.0)
                dp = plgpu.wgmma_accumulator_load(dp, wait_n=later)
                ds = weights * (dp - lax.broadcast_in_dim(delta, dp.shape, (0,)))
                self.multiply(dq, ds, b.k.at[pl.ds(*block)], warpgroup)

            self.sweep(issue, finish, self.variant.ahead)
            return plgpu.wgmma_accumulator_load(dq, wait_n=0)

        dq = pl.run_scoped(sum_up, plgpu.ACC((ROWS, self.width), jnp.float32))
        self.store(dq * self.width**-0.5, self.dq, head, tile, warpgroup)

    def key_rows(self, head, parity, tile, warpgroup) -> None:
        """Computes and writes dk and dv of a tile."""
        b, rows = self.buffers, pl.ds(self.first_row(tile), ROWS)

        def issue(block, s, dp):
            columns = pl.ds(*block)
            plgpu.wgmma(s, b.k.at[rows], b.q.at[columns].T)
            plgpu.wgmma(dp, b.v.at[rows], b.g.at[columns].T)

        def sum_up(dk, dv):
            def finish(block, s, dp, later):
                lse, delta = (
                    plgpu.load(x.at[parity, pl.ds(*block)], layout=plgpu.Layout.WGMMA.reduce(0))
                    for x in (b.lse, b.delta)
                )
                columns = pl.ds(*block)
                weights = self.weights(plgpu.wgmma_accumulator_load(s, wait_n=1 + later), lse, 1)
                self.multiply(dv, weights, b.g.at[columns], warpgroup)
                dp = plgpu.wgmma_accumulator_load(dp, wait_n=1)
                ds = weights * (dp - lax.broadcast_in_dim(delta, dp.shape, (1,)))
                self.multiply(dk, ds, b.q.at[columns], warpgroup)

            self.sweep(issue, finish, False)
            return tuple(plgpu.wgmma_accumulator_load(x, wait_n=0) for x in (dk, dv))

        sums = plgpu.ACC((ROWS, self.width), jnp.float32)
        dk, dv = pl.run_scoped(sum_up, sums, sums)
        self.store(dk * self.width**-0.5, self.dk, head, tile, warpgroup)
        self.store(dv, self.dv, head, tile, warpgroup)

    def multiply(self, sums: Ref, a: jax.Array, b: Ref, warpgroup: jax.Array) -> None:
        """Adds the product of registers a and shared memory b."""
        a = a.astype(self.q.dtype)
        if self.interpreted:  # the interpreter multiplies only what is in shared memory
            operand = self.buffers.operands.at[warpgroup, :, pl.ds(0, a.shape[1])]
            operand[...] = a
            a = operand
        plgpu.wgmma(sums, a, b)

    def weights(self, scores: jax.Array, lse: jax.Array, axis: int) -> jax.Array:
        """The softmax of scores, whose `axis` is that of lse."""
        factor = self.width**-0.5 * LOG2_E
        return jnp.exp2(scores * factor - lax.broadcast_in_dim(lse, scores.shape, (axis,)))

    def store(self, values, to, head, tile, warpgroup) -> None:
        """Writes a tile of a gradient."""
        example, number = self.place(head)
        buffer = self.buffers.results.at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = values.astype(to.dtype)
        plgpu.commit_smem()

        @pl.when(tile < self.tiles - 1)
        def _():
            rows = pl.ds(tile * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(buffer, to.at[example, rows, number])

        @pl.when(tile == self.tiles - 1)
        def _():
            rows = pl.ds(tile * ROWS, self.tail)
            last = buffer.at[pl.ds(ROWS - self.tail, self.tail)]
            plgpu.copy_smem_to_gmem(last, to.at[example, rows, number])


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    gradient: jax.Array,
    *,
    causal: bool = False,
    variant: Variant = Variant(),
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.attention_backward` without a causal mask."""
    del causal
    _, tokens, _, width = q.shape
    blocks = multiprocessors or tiles.multiprocessors()
    span = max(ROWS, -(-tokens // PIECE) * PIECE)
    count = pl.cdiv(span, ROWS)
    compute = variant.compute
    padded = -(-span // 32) * 32

    def attention_backward_kernel(*refs):
        inputs, buffers = refs[:9], Buffers(*refs[9:25], *refs[25:] or (None,))
        block = lax.axis_index("block")
        work = Backward(
            *inputs, buffers, variant, blocks, block, interpreted=interpret is not None
        )
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == compute)
        def _():
            plgpu.set_max_registers(40 if compute == 2 else 32, action="decrease")
            work.copy()

        @pl.when(warpgroup < compute)
        def _():
            plgpu.set_max_registers(232 if compute == 2 else 160, action="increase")
            work.compute(warpgroup)

    swizzled = plgpu.SMEM(
        (span, width),
        q.dtype,
        transforms=(plgpu.TilingTransform((GROUP, PIECE)), plgpu.SwizzleTransform(2 * PIECE)),
    )
    tile = plgpu.SMEM((compute, ROWS, width), q.dtype)
    full = plgpu.Barrier(num_barriers=count, num_arrivals=2 * ROWS // GROUP)
    empty = plgpu.Barrier(num_barriers=count, num_arrivals=compute)
    buffers = Buffers(
        *[swizzled] * 4,
        out=tile,
        results=tile,
        lse=plgpu.SMEM((2, padded), jnp.float32),
        delta=plgpu.SMEM((2, span), jnp.float32),
        keys_full=full,
        queries_full=full,
        keys_empty=empty,
        queries_empty=empty,
        lse_full=plgpu.Barrier(num_barriers=2),
        out_full=plgpu.Barrier(num_barriers=compute),
        out_empty=plgpu.Barrier(num_barriers=compute),
        exchange=plgpu.Barrier(num_arrivals=compute),
        operands=plgpu.SMEM((compute, ROWS, variant.columns), q.dtype) if interpret else None,
    )
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    run = plgpu.kernel(
        attention_backward_kernel,
        out_type=(like_q,) * 3,
        scratch_types=[x for x in buffers if x is not None],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=compute + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )
    padding = ((0, 0), (0, 0), (0, padded - tokens))
    lse = jnp.pad(lse * jnp.float32(LOG2_E), padding, constant_values=jnp.inf)
    return run(q, k, v, out, gradient, lse)
