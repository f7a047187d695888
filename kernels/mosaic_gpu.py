"""Pallas Mosaic GPU kernels for Hopper: the narrow product, and the 16-bit weight gradient.

Both are persistent and warp-specialised. One block of threads stays on each multiprocessor and walks over
output tiles; in it one warpgroup copies operands into a ring of buffers in shared memory (TMA), and two
multiply (wgmma), each half of the tile's rows::

    full[slot]    the copies have arrived           memory warpgroup -> compute warpgroups
    empty[slot]   both are done reading the slot    compute warpgroups -> memory warpgroup

The memory warpgroup runs ahead into the next tile while the others write this one out. Past the edge of an
array TMA reads zeros and writes nothing.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels import tiles
from swjax.kernels.reference import QTensor

TILE_M, TILE_N = 128, 256  # of the output: a warpgroup's 64 x 256 sums take 128 registers a thread
HALF = TILE_M // 2
LINE = 128  # bytes of the widest swizzle: the length of a step, and of a written piece's rows
MEMORY = 2  # the index of the memory warpgroup


def matmul(
    a: QTensor,
    b: QTensor,
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
    tile: tiles.MosaicTile | None = None,
    multiprocessors: int | None = None,
    interpret=None,
) -> jax.Array:
    """`reference.matmul`, for rows a multiple of 8, k of 128, and n of 64 (of 32 in float32)."""
    a, b = (q.T if axis == 0 else q for q, axis in zip((a, b), contract))
    k = a.values.shape[-1]
    m, n = a.values.size // k, b.values.shape[0]
    tile = tile or tiles.mosaic(n, k)
    # Two blocks one above the other share their tile of b: a cluster loads it once (multicast).
    cluster = 2 if m > TILE_M else 1
    grid = pl.cdiv(m, TILE_M * cluster), pl.cdiv(n, TILE_N)
    blocks = (multiprocessors or tiles.multiprocessors()) // cluster
    piece = LINE // jnp.dtype(out_dtype).itemsize
    per_tensor, ragged = b.scale.size == 1, m % HALF > 0

    def matmul_kernel(
        a_ref, b_ref, a_scale_ref, b_scale_ref, bias_ref, out_ref, a_ring, b_ring, *scratch
    ):
        block = lax.axis_index("block")

        def corner(i):
            row, column = plgpu.planar_snake(block + i * blocks, grid, 1, tile.width)
            rank = lax.axis_index("cluster") if cluster > 1 else 0
            return (row * cluster + rank) * TILE_M, column * TILE_N

        def load(i):
            row, column = corner(i)

            def step(at, slot, full):
                along = pl.ds(at * LINE, LINE)
                plgpu.copy_gmem_to_smem(a_ref.at[pl.ds(row, TILE_M), along], a_ring.at[slot], full)
                plgpu.copy_gmem_to_smem(
                    b_ref.at[pl.ds(column, TILE_N), along],
                    b_ring.at[slot],
                    full,
                    collective_axes="cluster" if cluster > 1 else None,
                )

            return step

        def multiply(total, slot, half):
            plgpu.wgmma(total, a_ring.at[slot, pl.ds(half * HALF, HALF)], b_ring.at[slot].T)

        def store(i, total, half, out_ring):
            row, column = corner(i)
            row += half * HALF
            # Rows past the edge are not written, so whatever they are scaled by.
            a_scale = _load(a_scale_ref, pl.ds(row if ragged else jnp.minimum(row, m - HALF), HALF))
            if per_tensor:
                a_scale = a_scale * b_scale_ref[0]

            def scaled(at):
                here = pl.ds(column + at, piece)
                y = total[:, at : at + piece].astype(jnp.float32)
                scale = lax.broadcast_in_dim(a_scale, y.shape, (0,))
                if not per_tensor:
                    b_scale = _load(b_scale_ref, here)
                    scale = scale * lax.broadcast_in_dim(b_scale, y.shape, (1,))
                y = y * scale
                if bias is not None:
                    shift = _load(bias_ref, here).astype(jnp.float32)
                    y = y + lax.broadcast_in_dim(shift, y.shape, (1,))
                return y.astype(out_dtype)

            _write(scaled, out_ring, out_ref.at[pl.ds(row, HALF), pl.ds(column, TILE_N)], piece)

        units = (grid[0] * grid[1] - block + blocks - 1) // blocks
        steps = pl.cdiv(k, LINE)
        dtype = jnp.int32 if a_ref.dtype == jnp.int8 else jnp.float32
        _pipeline(units, lambda i: (0, steps), load, multiply, store, dtype, tile.stages, *scratch)

    def padded(scale, length):
        """One element for each row of each tile: registers are loaded without bounds."""
        return jnp.pad(scale.reshape(-1), (0, length - scale.size))

    columns = grid[1] * TILE_N
    a_scale = jnp.broadcast_to(a.scale.reshape(-1), (m,))
    y = _launch(
        matmul_kernel,
        jax.ShapeDtypeStruct((m, n), out_dtype),
        rings=[((TILE_M, LINE), a.values.dtype), ((TILE_N, LINE), b.values.dtype)],
        stages=tile.stages,
        blocks=blocks,
        cluster=cluster,
        interpret=interpret,
    )(
        a.values.reshape(m, k),
        b.values,
        padded(a_scale, grid[0] * cluster * TILE_M if ragged else m),
        b.scale.reshape(-1) if per_tensor else padded(b.scale, columns),
        jnp.zeros(1) if bias is None else padded(bias, columns),
    )
    return y.reshape(*a.values.shape[:-1], n)


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    out_dtype: str = "float32",
    precision=None,
    slices: int | None = None,
    multiprocessors: int | None = None,
    interpret=None,
) -> jax.Array:
    """`reference.weight_gradient` of 16-bit operands, for tokens a multiple of 8, k and n of 64.

    The output has few tiles (1280 x 5120 has 200, for 132 multiprocessors), so that whole tiles leave the
    last round half empty. Tokens are cut into slices, one unit of work is one slice of one tile, and units
    run slice by slice: blocks at work at the same time read the same tokens, from the L2 cache. A tile's
    slices are added in order, each waiting for the one before (which is nearly always done), so that
    every run gives the same sum.
    """
    del precision  # 16-bit products are exact in fp32
    (tokens, k), n = x.shape, g.shape[1]
    grid = pl.cdiv(k, TILE_M), pl.cdiv(n, TILE_N)
    tile_count = grid[0] * grid[1]
    blocks = multiprocessors or tiles.multiprocessors()
    step_tokens = LINE // x.dtype.itemsize
    steps = pl.cdiv(tokens, step_tokens)
    slices = slices or tiles.weight_gradient_slices(tile_count, steps, blocks)
    piece = LINE // 4

    def weight_gradient_kernel(x_ref, g_ref, out_ref, x_ring, g_ring, *scratch):
        block = lax.axis_index("block")
        if slices > 1:
            done = pl.get_global(plgpu.SemaphoreType.REGULAR((tile_count, 2)))

        def unit(i):
            which = block + i * blocks
            slice_, tile = which // tile_count, lax.rem(which, tile_count)
            row, column = plgpu.planar_snake(tile, grid, 1, 4)
            return slice_, tile, row * TILE_M, column * TILE_N

        def span(i):
            slice_, *_ = unit(i)
            start = slice_ * steps // slices
            return start, (slice_ + 1) * steps // slices - start

        def load(i):
            _, _, row, column = unit(i)

            def step(at, slot, full):
                along = pl.ds(at * step_tokens, step_tokens)
                plgpu.copy_gmem_to_smem(x_ref.at[along, pl.ds(row, TILE_M)], x_ring.at[slot], full)
                plgpu.copy_gmem_to_smem(
                    g_ref.at[along, pl.ds(column, TILE_N)], g_ring.at[slot], full
                )

            return step

        def multiply(total, slot, half):
            plgpu.wgmma(total, x_ring.at[slot, :, pl.ds(half * HALF, HALF)].T, g_ring.at[slot])

        def store(i, total, half, out_ring):
            slice_, tile, row, column = unit(i)
            to = out_ref.at[pl.ds(row + half * HALF, HALF), pl.ds(column, TILE_N)]
            write = partial(_write, lambda at: total[:, at : at + piece], out_ring, to, piece)
            if slices == 1:
                write()
                return

            @pl.when(slice_ == 0)
            def _():
                write()

            @pl.when(slice_ > 0)
            def _():
                pl.semaphore_wait(done.at[tile, half], slice_, decrement=False)
                write(reduction_op="add")

            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(done.at[tile, half])

        units = (tile_count * slices - block + blocks - 1) // blocks
        stages = tiles.WEIGHT_GRADIENT_STAGES
        _pipeline(units, span, load, multiply, store, jnp.float32, stages, *scratch)

    dw = _launch(
        weight_gradient_kernel,
        jax.ShapeDtypeStruct((k, n), jnp.float32),
        rings=[((step_tokens, TILE_M), x.dtype), ((step_tokens, TILE_N), g.dtype)],
        stages=tiles.WEIGHT_GRADIENT_STAGES,
        blocks=blocks,
        cluster=1,
        interpret=interpret,
    )(x, g)
    return dw.astype(out_dtype)


def _pipeline(
    units: jax.Array,
    span: Callable,
    load: Callable,
    multiply: Callable,
    store: Callable,
    total_dtype: jnp.dtype,
    stages: int,
    out_ring,
    full,
    empty,
):
    """What each warpgroup does: for each of its `units`, steps `start` to `start + count`, then `store`.

    `used` counts the steps over all units: step `used` lives in slot `used % stages` of the ring.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == MEMORY)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def wait_for_slot(used):
            @pl.when(used >= stages)
            def _():
                plgpu.barrier_wait(empty.at[lax.rem(used, stages)])

        def unit(i, used):
            start, count = span(i)
            copy = load(i)

            def step(s, used):
                wait_for_slot(used)
                slot = lax.rem(used, stages)
                copy(start + s, slot, full.at[slot])
                return used + 1

            return lax.fori_loop(0, count, step, used)

        used = lax.fori_loop(0, units, unit, 0)
        # A block that ends while its neighbour still signals it would leave the cluster in error.
        lax.fori_loop(0, stages, lambda s, _: wait_for_slot(used + s), None)

    @pl.when(warpgroup < MEMORY)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def unit(i, used):
            _, count = span(i)

            @partial(pl.run_scoped, total=plgpu.ACC((HALF, TILE_N), total_dtype))
            def _(total):
                def step(s, _):
                    slot = lax.rem(used + s, stages)
                    plgpu.barrier_wait(full.at[slot])
                    multiply(total, slot, warpgroup)
                    plgpu.wgmma_wait(1)  # the step before this one is done

                    @pl.when(s > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[lax.rem(used + s - 1, stages)])

                lax.fori_loop(0, count, step, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[lax.rem(used + count - 1, stages)])
                store(i, total[...], warpgroup, out_ring.at[warpgroup])

            return used + count

        lax.fori_loop(0, units, unit, 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load(ref, index):
    """A few numbers for each row or column, straight into registers."""
    if jax.__version_info__ < (0, 11):
        return plgpu.load(ref, index, optimized=False)
    return plgpu.load(ref.at[index], optimized=False)


def _write(values: Callable, ring, to, piece: int, **options):
    """Copies HALF x TILE_N values to `to`, `piece` columns at a time, through two buffers."""
    for number, at in enumerate(range(0, TILE_N, piece)):
        y = values(at)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        ring[number % 2] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ring.at[number % 2], to.at[:, pl.ds(at, piece)], **options)


def _launch(body, out, *, rings, stages, blocks, cluster, interpret):
    def buffer(shape, dtype):
        tiling = plgpu.TilingTransform((8, LINE // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(LINE)))

    piece = LINE // jnp.dtype(out.dtype).itemsize
    arrivals = dict(num_arrivals=2, num_barriers=stages)
    empty = plgpu.Barrier(**arrivals)
    in_clusters = {}
    if cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)
        in_clusters = dict(cluster=(cluster,), cluster_names=("cluster",))
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[
            *(buffer((stages, *shape), dtype) for shape, dtype in rings),
            buffer((2, 2, HALF, piece), out.dtype),
            plgpu.Barrier(**arrivals),
            empty,
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=MEMORY + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        **in_clusters,
    )
