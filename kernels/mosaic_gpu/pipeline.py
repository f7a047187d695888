"""The persistent, warp-specialised pipeline of the Mosaic kernels.

One block of threads stays on each multiprocessor and processes one unit of work after the other. A unit is a
tile of the output, or a slice of a tile. One warpgroup of the block copies operands into a ring of buffers in
shared memory (TMA). Two warpgroups multiply (wgmma), each half of the rows of the tile::

    full[slot]    the copies have arrived              memory warpgroup -> compute warpgroups
    empty[slot]   both warpgroups have read the slot   compute warpgroups -> memory warpgroup

The memory warpgroup copies the next unit while the others write this one. In `run_in_turns` a compute
warpgroup multiplies a whole tile. While it writes the tile, the other one multiplies the next. Past the edge
of an array TMA reads zeros and writes nothing. `why_not_columns` names an exception.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.availability import Unavailable

Ref = Any  # of an array in global or shared memory, or of barriers

# Of the output: the 64 x 256 sums of a warpgroup take 128 registers per thread.
TILE_M, TILE_N = 128, 256
HALF = TILE_M // 2
LINE = 128  # bytes of the longest swizzle: the length of a step, and of the rows of a written piece
COMPUTE = 2  # number of compute warpgroups; the one after them is the memory warpgroup


class Scratch(NamedTuple):
    """The shared memory of a block. A kernel that does not use one of its parts has None.

    Attributes:
      a, b: rings of operands, [stages, ...].
      out: [2, 2, HALF, piece], two buffers of each compute warpgroup; four if an array is added to the tiles.
      mirrored: [2, piece, HALF], a buffer of each compute warpgroup for transposes of pieces.
      full, empty: a barrier for each slot of the rings.
      addend: a barrier for each compute warpgroup: its half of the array that is added has arrived.
      edge: [2, HALF, piece], a buffer without swizzle of each compute warpgroup, of which any rows can be
        written.
      vectors: rings of float32 vectors, such as scales, [stages, length] each.
    """

    a: Ref
    b: Ref
    out: Ref
    mirrored: Ref = None
    full: Ref = None
    empty: Ref = None
    addend: Ref = None
    edge: Ref = None
    vectors: tuple[Ref, ...] = ()


class Fold(NamedTuple):
    """How to add the sums of single steps, such as with scales that change from step to step.

    Attributes:
      read: function of a slot that returns what `add` needs besides the sums.
      add: function of what `read` returned, the sums of the step and the total, that returns the new total.
      initial: the total before the first step.
      chunk: number of steps whose products overlap additions. It is 1 if registers hold one set of sums
        besides the total, and more if they hold two.
    """

    read: Callable[[jax.Array], Any]
    add: Callable[[Any, jax.Array, Any], Any]
    initial: Any
    chunk: int


# (first step of a unit, number of steps, function to call in step DURING or None, function of a step and its
# slot to call before its product or None, a `Fold` or None) -> their sums; with a `Fold` its total.
SumSteps = Callable[..., Any]
DURING = 2  # copies of the unit before have probably ended


class Work(Protocol):
    """What a kernel computes. Arguments named `unit` count the units of this block.

    Attributes:
      stages: number of slots of the rings.
      columns: number of columns of a tile of the output.
      sum_dtype: dtype of the sums in registers.
    """

    @property
    def stages(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def sum_dtype(self) -> jax.typing.DTypeLike: ...

    def units(self) -> jax.Array:
        """Returns the number of units of this block."""

    def span(self, unit: jax.Array) -> tuple[jax.Array | int, jax.Array | int]:
        """Returns the first step of a unit along the contracted axis, and the number of its steps."""

    def load(self, unit: jax.Array) -> Callable[[jax.Array, jax.Array, Ref], None]:
        """Returns a function (step, slot, barrier) that starts the copies of a step."""

    def multiply(self, sums: Ref, slot: jax.Array, half: jax.Array) -> None:
        """Adds the product of the operands in a slot, for one half of the rows of the tile."""

    def total(self, unit: jax.Array, half: jax.Array, sum_steps: SumSteps) -> Any:
        """Returns what `store` needs of one half of a unit. Calls `sum_steps` for all steps, in order."""

    def store(self, unit: jax.Array, total: Any, half: jax.Array) -> None:
        """Writes one half of the tile."""


def run(work: Work, scratch: Scratch) -> None:
    """The body of a kernel: each warpgroup processes the units of its block.

    Steps are counted over all units: step `used` is in slot `used % stages` of the rings.
    """
    units = work.units()
    specialize(
        copy=lambda: _copy_units(work, scratch, units),
        compute=lambda warpgroup: _multiply_units(work, scratch, units, warpgroup),
    )


def run_in_turns(work: Work, scratch: Scratch) -> None:
    """`run` for warpgroups that take turns: units with an even number belong to the first, odd to the second.

    So the tensor cores multiply one tile while the other is written. All units have the same number of steps.
    `scratch.full` has barriers for the slots of the first warpgroup, then for those of the second. The
    methods of the work get the number of the warpgroup in place of the half, and compute TILE_M rows.
    """
    units = work.units()
    specialize(
        copy=lambda: _copy_units(work, scratch, units, in_turns=True),
        compute=lambda warpgroup: _multiply_in_turns(work, scratch, units, warpgroup),
    )


def specialize(
    copy: Callable[[], None],
    compute: Callable[[jax.Array], None],
    registers: tuple[int, int] = (40, 232),
) -> None:
    """Runs `copy` in the memory warpgroup, and ``compute(warpgroup)`` in the others.

    `registers` are those of a thread of the memory warpgroup, and of the others.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == COMPUTE)
    def _():
        plgpu.set_max_registers(registers[0], action="decrease")
        copy()

    @pl.when(warpgroup < COMPUTE)
    def _():
        plgpu.set_max_registers(registers[1], action="increase")
        compute(warpgroup)


def wait_for_slot(empty: Ref, used: jax.Array, stages: int) -> None:
    """Waits until the slot for step `used` of a ring is empty; at first all slots are."""

    @pl.when(used >= stages)
    def _():
        plgpu.barrier_wait(empty.at[lax.rem(used, stages)])


def wait_for_readers(empty: Ref, used: jax.Array, stages: int) -> None:
    """Waits until all slots of a ring are empty, after the copies of `used` steps.

    A block that ends while its neighbour still signals it would leave the cluster in error.
    """
    lax.fori_loop(0, stages, lambda s, _: wait_for_slot(empty, used + s, stages), None)


def _full(work: Work, scratch: Scratch, slot: jax.Array, turn: jax.Array | None) -> Ref:
    """The barrier in `scratch.full` of a slot, for the warpgroup whose turn it is."""
    return scratch.full.at[slot if turn is None else turn * work.stages + slot]


def _copy_units(work: Work, scratch: Scratch, units: jax.Array, *, in_turns: bool = False) -> None:
    """Copies the operands of all units: the memory warpgroup."""

    def copy_unit(unit, used):
        start, count = work.span(unit)
        copy = work.load(unit)
        turn = lax.rem(unit, 2) if in_turns else None

        def step(s, used):
            wait_for_slot(scratch.empty, used, work.stages)
            slot = lax.rem(used, work.stages)
            copy(start + s, slot, _full(work, scratch, slot, turn))
            return used + 1

        return lax.fori_loop(0, count, step, used)

    used = lax.fori_loop(0, units, copy_unit, 0)
    wait_for_readers(scratch.empty, used, work.stages)


def _multiply_units(work: Work, scratch: Scratch, units: jax.Array, half: jax.Array) -> None:
    """Multiplies and writes one half of each unit: a compute warpgroup."""

    def multiply_unit(unit, used):
        def sum_steps(first, count, during=None, before=None, fold=None):
            if fold:
                return _fold_steps(work, scratch, used + first, count, half, fold)
            return _sum_steps(work, scratch, used + first, count, half, during, before)

        work.store(unit, work.total(unit, half, sum_steps), half)
        return used + work.span(unit)[1]

    lax.fori_loop(0, units, multiply_unit, 0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _multiply_in_turns(
    work: Work, scratch: Scratch, units: jax.Array, warpgroup: jax.Array
) -> None:
    """Multiplies and writes every other unit: a compute warpgroup of `run_in_turns`."""

    def multiply_unit(turn, _):
        unit = 2 * turn + warpgroup

        def sum_steps(first, count, during=None):
            used = unit * count + first
            return _sum_steps(work, scratch, used, count, warpgroup, during, None, in_turns=True)

        work.store(unit, work.total(unit, warpgroup, sum_steps), warpgroup)

    lax.fori_loop(0, pl.cdiv(units - warpgroup, 2), multiply_unit, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sum_steps(
    work: Work,
    scratch: Scratch,
    used: jax.Array,
    count: jax.Array | int,
    half: jax.Array,
    during: Callable[[], None] | None,
    before: Callable[[jax.Array, jax.Array], None] | None,
    *,
    in_turns: bool = False,
) -> jax.Array:
    """Sums `count` steps from step `used` on; releases each slot once the next product is issued."""
    turn = half if in_turns else None

    def multiply_steps(sums):
        def step(s, _):
            slot = lax.rem(used + s, work.stages)
            plgpu.barrier_wait(_full(work, scratch, slot, turn))
            if before:
                before(s, slot)
            work.multiply(sums, slot, half)
            plgpu.wgmma_wait(1)  # the previous step has finished

            @pl.when(s > 0)
            def release():
                plgpu.barrier_arrive(scratch.empty.at[lax.rem(used + s - 1, work.stages)])

            if during:
                pl.when(s == jnp.minimum(DURING, count - 1))(during)

        lax.fori_loop(0, count, step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.empty.at[lax.rem(used + count - 1, work.stages)])
        return sums[...]

    rows = TILE_M if in_turns else HALF
    sums = plgpu.WGMMAAccumulatorRef((rows, work.columns), jnp.dtype(work.sum_dtype))
    return pl.run_scoped(multiply_steps, sums=sums)


def _fold_steps(
    work: Work,
    scratch: Scratch,
    used: jax.Array,
    count: int,
    half: jax.Array,
    fold: Fold,
) -> Any:
    """Adds the sums of each of `count` steps from step `used` on; see `Fold`.

    While a thread adds the sums of a step, the tensor cores multiply the next step of the same chunk.
    """
    accumulator = plgpu.WGMMAAccumulatorRef((HALF, work.columns), jnp.dtype(work.sum_dtype))

    def add_chunk(first, length, total):
        def add(slot, sums, total, *, in_flight):
            finished = plgpu.wgmma_accumulator_load(sums, wait_n=in_flight)
            known = fold.read(slot)
            plgpu.commit_smem()  # all warps have read, before one thread releases the slot
            plgpu.barrier_arrive(scratch.empty.at[slot])
            return fold.add(known, finished, total)

        def multiply(i, before, total):
            slot = lax.rem(used + first + i, work.stages)
            plgpu.barrier_wait(scratch.full.at[slot])

            def with_sums(sums):
                work.multiply(sums, slot, half)
                added = total
                if before:
                    slot_before, sums_before = before
                    added = add(slot_before, sums_before, total, in_flight=1)
                if i + 1 < length:
                    return multiply(i + 1, (slot, sums), added)
                return add(slot, sums, added, in_flight=0)

            return pl.run_scoped(with_sums, sums=accumulator)

        return multiply(0, None, total)

    whole, rest = divmod(count, fold.chunk)
    chunk = lambda i, total: add_chunk(i * fold.chunk, fold.chunk, total)
    total = lax.fori_loop(0, whole, chunk, fold.initial)
    return add_chunk(whole * fold.chunk, rest, total) if rest else total


def unit_count(total: int, block: jax.Array, blocks: int) -> jax.Array:
    """The units of a block; unit `i` is number ``block + i * blocks`` of the total."""
    return (total - block + blocks - 1) // blocks


_load: Callable[..., jax.Array] = plgpu.load  # of another signature before jax 0.11


def load_registers(ref: Ref, index: slice | pl.Slice | jax.Array) -> jax.Array:
    """Loads a vector from global or shared memory into registers."""
    if jax.__version_info__ < (0, 11):
        return _load(ref, index, optimized=False)
    return _load(ref.at[index], optimized=False)


def load_as(ref: Ref, layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    """Loads an array from shared memory into registers with a layout; needs jax 0.11."""
    return _load(ref, layout=layout, optimized=False)


def zeros(shape: tuple[int, ...]) -> jax.Array:
    """Zeros in registers with the layout of a product's sums."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The indices along an axis, in registers with the layout of a product's sums."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def load_tile(tile: Ref, buffers: Ref, barrier: Ref) -> None:
    """Starts the copies of one half of a tile from global memory to the buffers of `store_tile`."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
    count, _, piece = buffers.shape
    for number in range(count):
        columns = pl.ds(number * piece, piece)
        plgpu.copy_gmem_to_smem(tile.at[:, columns], buffers.at[number], barrier)


def store_tile(
    values: jax.Array | Callable[[int], jax.Array],
    buffers: Ref,
    to: Ref,
    *,
    add: bool = False,
    **options: Any,
) -> None:
    """Copies one half of a tile to global memory, through buffers.

    Args:
      values: [HALF, columns], or a function (first column of a piece) -> the piece.
      buffers: [number, HALF, piece] in shared memory.
      to: [HALF, columns] in global memory.
      add: whether to add what the buffers hold, one for each piece.
      **options: options of `plgpu.copy_smem_to_gmem`.
    """
    piece = buffers.shape[-1]
    starts = range(0, to.shape[1], piece)
    for number, at in enumerate(starts):
        y = values(at) if callable(values) else values[:, at : at + piece]
        slot = number % buffers.shape[0]
        if add:
            y = y + buffers[slot].astype(jnp.float32)
        else:
            # The buffers take turns. With an odd number of pieces the last one of the tile before is in
            # buffer 0, and a unit without steps takes no time in which its copy would end.
            same = number == 0 and len(starts) % buffers.shape[0]
            plgpu.wait_smem_to_gmem(0 if same else 1, wait_read_only=True)
        buffers[slot] = y.astype(buffers.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffers.at[slot], to.at[:, pl.ds(at, piece)], **options)


def store_rows(
    values: Callable[[int], jax.Array],
    buffer: Ref,
    to: Ref,
    rows: tuple[jax.Array, jax.Array],
) -> None:
    """Copies some rows of one half of a tile to global memory, in parts whose lengths are powers of two.

    Args:
      values: function (first column of a piece) -> the piece.
      buffer: [HALF, piece] in shared memory without swizzle.
      to: [HALF, columns] in global memory.
      rows: the first row, and the number of rows.
    """
    piece = buffer.shape[1]
    for at in range(0, to.shape[1], piece):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = values(at).astype(buffer.dtype)
        plgpu.commit_smem()
        start, count = rows
        length = buffer.shape[0]
        while length:

            @pl.when(count & length != 0)
            def _(start=start, length=length, at=at):
                part = to.at[pl.ds(start, length), pl.ds(at, piece)]
                plgpu.copy_smem_to_gmem(buffer.at[pl.ds(start, length)], part)

            start = start + (count & length)
            length //= 2


def buffer(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """Swizzled shared memory whose rows have at most LINE bytes, or are cut into pieces of LINE bytes."""
    return swizzled(shape, dtype, (8, min(shape[-1], piece_of(dtype))))


def swizzled(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, tile: tuple[int, int]) -> Any:
    """Shared memory in tiles of rows and columns; tiles of 8 rows hold operands of products."""
    tiling: Callable = plgpu.TilingTransform  # jax 0.12 types these two as abstract
    swizzle: Callable = plgpu.SwizzleTransform
    line = tile[1] * jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiling(tile), swizzle(line)))


def piece_of(dtype: jax.typing.DTypeLike) -> int:
    """Returns the number of columns of a written piece, which fill a line."""
    return LINE // jnp.dtype(dtype).itemsize


def launch(
    body: Callable,
    out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    *,
    rings: list[tuple[tuple[int, int], jnp.dtype]],
    stages: int,
    blocks: int,
    cluster: int,
    addend: bool = False,
    edge: bool = False,
    vectors: tuple[int, ...] = (),
    piece: int | None = None,
) -> Callable:
    """Builds a product kernel of `blocks` clusters of blocks, as a function of its inputs.

    Args:
      body: see `kernel`; its scratch is a `Scratch`.
      out: shape and dtype of the output, or of outputs of one dtype.
      rings: shape and dtype of a slot of each ring.
      stages: number of slots of the rings.
      blocks: number of clusters of blocks.
      cluster: number of blocks of a cluster.
      addend: whether an array is added to the tiles.
      edge: whether `store_rows` writes some of the tiles.
      vectors: lengths of the rings of vectors.
      piece: number of columns written at a time; None: they fill a line.
    """
    arrivals: dict[str, Any] = dict(num_arrivals=2, num_barriers=stages)
    full = plgpu.Barrier(num_arrivals=len(rings) + len(vectors), num_barriers=stages)
    empty: plgpu.Barrier | plgpu.ClusterBarrier = plgpu.Barrier(**arrivals)
    in_clusters: dict[str, Any] = {}
    if cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)
        in_clusters = dict(cluster=(cluster,), cluster_names=("cluster",))
    a, b = (buffer((stages, *shape), dtype) for shape, dtype in rings)
    assert not (addend and piece), "the buffers of an addend are those of a tile of TILE_N columns"
    dtype = jax.tree.leaves(out)[0].dtype
    piece = piece or piece_of(dtype)
    pieces = TILE_N // piece
    scratch = Scratch(
        a=a,
        b=b,
        out=buffer((2, pieces if addend else 2, HALF, piece), dtype),
        full=full,
        empty=empty,
        addend=plgpu.Barrier(num_arrivals=pieces, num_barriers=2) if addend else None,
        edge=plgpu.SMEM((2, HALF, piece), dtype) if edge else None,
        vectors=tuple(plgpu.SMEM((stages, length), jnp.float32) for length in vectors),
    )
    return kernel(body, out, scratch, blocks=blocks, **in_clusters)


def kernel(
    body: Callable,
    out: Any,
    scratch: NamedTuple,
    *,
    blocks: int,
    compiler: dict[str, Any] | None = None,
    **in_clusters: Any,
) -> Callable:
    """Builds a kernel of two compute warpgroups and the memory warpgroup, as a function of its inputs.

    Args:
      body: function of refs: of the inputs, of each output, and of the scratch. Inputs and scratch have the
        structure in which they are given, such as that of a NamedTuple.
      out: shapes and dtypes of the outputs.
      scratch: shared memory and barriers, allocated in this order.
      blocks: number of clusters of blocks.
      compiler: parameters of `plgpu.CompilerParams`. With `approx_math`, exponentials use the GPU's
        approximate instruction (relative error about 2**-22).
      **in_clusters: `cluster` and `cluster_names` of `plgpu.kernel`.
    """
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[scratch],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            **{"lowering_semantics": plgpu.LoweringSemantics.Warpgroup, **(compiler or {})}
        ),
        **in_clusters,
    )


def why_not_dtypes(*dtypes: Any, remedy: str) -> Unavailable | None:
    """Why a kernel cannot multiply operands of these dtypes; None: it can."""
    if len(set(dtypes)) > 1 and jax.__version_info__ < (0, 11):
        return Unavailable(
            f"needs jax 0.11 for operands of two types, got {' and '.join(map(str, dtypes))} "
            f"with jax {jax.__version__}: update jax, or use {remedy!r}"
        )
    return None


def why_not_columns(n: int, piece: int, remedy: str) -> Unavailable | None:
    """Why a kernel cannot write n columns in pieces; None: it can.

    Mosaic drops dimensions of size 1 from a copy, with their index. So if the result has one piece, those
    past its edge would overwrite it instead of being clipped.
    """
    return None if n > piece else Unavailable(f"needs n above {piece}, got {n}: use {remedy!r}")


def why_not_multiples(lengths: dict[str, tuple[int, int]], remedy: str) -> Unavailable | None:
    """Why a kernel cannot take arrays of these sizes, {name: (length, divisor)}; None: it can."""
    for name, (length, divisor) in lengths.items():
        if length % divisor:
            return Unavailable(
                f"needs {name} to be a multiple of {divisor}, got {length}: use {remedy!r}"
            )
    return None
