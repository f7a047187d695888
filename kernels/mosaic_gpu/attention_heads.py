"""What the attention kernels share: heads in shared memory, their copies, and the kernel around them.

A block of threads stays on each multiprocessor and processes one head after the other. One warpgroup copies,
and the others compute, each every second tile of ROWS tokens, or every third. Past the end of a sequence TMA
reads zeros and writes nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Ref = Any  # of an array in global or shared memory, or of barriers

ROWS = 64  # of a product
GROUP = 8  # rows of a swizzled tile
STEP = 16  # tokens, or features, of one step of a product
LOG2_E = math.log2(math.e)
REGISTERS = {2: (24, 240), 3: (32, 160)}  # per thread, of the memory and the compute warpgroups


@dataclass(frozen=True)
class Heads:
    """The heads of one block of threads.

    Attributes:
      shape: (b, t, h, d).
      blocks, block: number of blocks of threads, and the number of this one.
      compute: number of compute warpgroups.
      interpreted: whether Pallas's interpreter runs the kernel.
    """

    shape: tuple[int, ...]
    blocks: int
    block: jax.Array
    compute: int
    interpreted: bool

    @property
    def tokens(self) -> int:
        return self.shape[1]

    @property
    def width(self) -> int:
        return self.shape[3]

    @property
    def span(self) -> int:
        return span(self.tokens)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.span, ROWS)

    @property
    def tail(self) -> int:
        """Rows of the last tile that no other tile has."""
        return self.span - (self.tiles - 1) * ROWS

    def count(self) -> jax.Array:
        """The number of heads of this block."""
        total = self.shape[0] * self.shape[2]
        return (total - self.block + self.blocks - 1) // self.blocks

    def place(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The example of a head, and its number in the example."""
        number, heads = self.block + head * self.blocks, self.shape[2]
        return number // heads, lax.rem(number, heads)

    def first_row(self, tile: jax.Array) -> jax.Array:
        """The last tile begins early enough to have ROWS rows; the tile before has the first of them too."""
        return jnp.minimum(tile * ROWS, self.span - ROWS)

    def copy_rows(
        self,
        source: Ref,
        head: jax.Array,
        row: int,
        rows: int,
        piece: "Piece",
        to: Ref,
        slot: jax.Array,
        full: Ref,
    ) -> None:
        """Copies rows of a piece of the features to shared memory.

        Args:
          source: [b, t, h, d].
          head, row: where the rows begin.
          rows: number of rows, at most ROWS and a multiple of GROUP.
          piece: the features.
          to: [slots, span, features], swizzled.
          slot: place of the head.
          full: barrier, at which `copies(piece)` copies arrive.
        """
        example, number = self.place(head)
        columns = pl.ds(piece.first, piece.width)

        def copy(group, groups):
            tokens = pl.ds(group * GROUP, groups * GROUP)
            view = self.lines(to, piece, slot, group, groups)
            plgpu.copy_gmem_to_smem(source.at[example, tokens, number, columns], view, full)

        first = row // GROUP + 0 * head
        if copies(piece) == 1:
            copy(first, rows // GROUP)
            return
        lax.fori_loop(0, rows // GROUP, lambda i, _: copy(first + i, 1), None)
        for _ in range(rows // GROUP, copies(piece)):
            plgpu.barrier_arrive(full)

    def lines(
        self, ref: Ref, piece: "Piece", slot: jax.Array, group: jax.Array, groups: int
    ) -> Ref:
        """Some rows of swizzled memory as the destination of a copy that does not tile rows.

        A copy that tiles rows would need a whole number of tiles in the sequence.
        """
        if self.interpreted:
            return ref.at[slot, pl.ds(group * GROUP, groups * GROUP)]
        swizzle: Any = plgpu.SwizzleTransform
        tiling: Any = plgpu.TilingTransform
        unswizzle = swizzle(2 * piece.line).undo(None)
        if piece.width == piece.line:
            view = ref.ref.at[slot, pl.ds(group, groups)]  # [groups, 1, GROUP, line]
            view = view.reshape(groups * GROUP, piece.line)
            return dataclasses.replace(view, transforms=(*view.transforms, unswizzle))
        view = ref.ref.at[slot, group]  # [width / line, GROUP, line]
        view = dataclasses.replace(view, transforms=(*view.transforms, unswizzle))
        view = view.transpose((1, 0, 2))
        untile = tiling((piece.line,)).undo(None)
        return dataclasses.replace(view, transforms=(*view.transforms, untile))

    def store(
        self,
        values: Sequence[jax.Array],
        pieces: Sequence["Piece"],
        buffer: Ref,
        to: Ref,
        head: jax.Array,
        tile: jax.Array,
    ) -> None:
        """Writes a tile [ROWS, d], given in pieces, to [b, t, h, d], through a buffer."""
        example, number = self.place(head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for piece, value in zip(pieces, values):
            buffer[:, pl.ds(piece.first, piece.width)] = value.astype(to.dtype)
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


class Piece(NamedTuple):
    """Some features of a head.

    Attributes:
      first: the first feature.
      width: number of features, a multiple of `line`.
      line: features of a swizzled line in shared memory: 64 or 16.
    """

    first: int
    width: int
    line: int

    def buffer(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
        """Shared memory [*shape, width] for operands of products."""
        tiling: Any = plgpu.TilingTransform  # jax 0.12 types these two as abstract
        swizzle: Any = plgpu.SwizzleTransform
        transforms = (tiling((GROUP, self.line)), swizzle(2 * self.line))
        return plgpu.SMEM((*shape, self.width), dtype, transforms=transforms)


def pieces(width: int, line: int) -> tuple[Piece, ...]:
    """Cuts the features of a head into lines of 64, and a rest with lines of 16.

    >>> pieces(80, 64)
    (Piece(first=0, width=64, line=64), Piece(first=64, width=16, line=16))
    >>> pieces(80, 16)
    (Piece(first=0, width=80, line=16),)
    """
    whole = width // 64 * 64 if line == 64 else 0
    lines = [Piece(first, 64, 64) for first in range(0, whole, 64)]
    return (*lines, *([Piece(whole, width - whole, STEP)] if whole < width else []))


def copies(piece: Piece) -> int:
    """Number of copies of ROWS rows."""
    return 1 if piece.width == piece.line else ROWS // GROUP


def load(ref: Ref, layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    """Loads an array from shared memory into registers."""
    read: Callable[..., jax.Array] = plgpu.load  # of another signature before jax 0.11
    return read(ref, layout=layout, optimized=False)


def span(tokens: int) -> int:
    """Tokens of a head in shared memory, with zeros."""
    return max(ROWS, -(-tokens // STEP) * STEP)


def padded(tokens: int) -> int:
    """Length of a vector over the tokens of a head, which is copied in steps of 128 bytes."""
    return -(-span(tokens) // 32) * 32


def specialize(compute: int, copy: Callable[[], None], work: Callable[[jax.Array], None]) -> None:
    """Runs `copy` in the memory warpgroup, and ``work(warpgroup)`` in the compute warpgroups."""
    warpgroup = lax.axis_index("warpgroup")
    few, many = REGISTERS.get(compute, (None, None))

    @pl.when(warpgroup == compute)
    def _():
        if few:
            plgpu.set_max_registers(few, action="decrease")
        copy()

    @pl.when(warpgroup < compute)
    def _():
        if many:
            plgpu.set_max_registers(many, action="increase")
        work(warpgroup)


def kernel(
    body: Callable, out: Any, scratch: Sequence[Any], *, blocks: int, compute: int, interpret: Any
) -> Callable:
    """Builds a kernel of compute warpgroups and a memory warpgroup, as a function of its inputs."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=list(scratch),
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
