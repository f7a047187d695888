"""The heads of attention backward: their places in shared and in global memory.

A head has `whole` tiles of ROWS tokens, and a rest of at most STEP tokens. Copies into shared memory read
zeros past the end of a sequence. Only whole tiles are copied back, because Mosaic clips a copy to contiguous
memory at the end of the array, not of the sequence.

The features of a head are cut into pieces, each of which fills a swizzled line. Lines of 128 bytes are the
fastest to copy: 80 features are a line of 64 and one of 16, not five of 16.
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
Rows = slice | pl.Slice

ROWS = 64  # of a product
GROUP = 8  # rows of a swizzled tile
STEP = 16  # tokens, or features, of one step of a product
WIDE = 64  # features of the first piece of a head
COMPUTE = 2  # number of compute warpgroups
LOG2_E = math.log2(math.e)
REGISTERS = (24, 240)  # per thread, of the memory and the compute warpgroups


class Piece(NamedTuple):
    """Some features of a head: `width` of them, from the first one. They fill a line of shared memory."""

    first: int
    width: int


@dataclass(frozen=True)
class Heads:
    """The heads of one block of threads.

    Attributes:
      shape: (b, t, h, d).
      blocks, block: number of blocks of threads, and the number of this one.
      interpreted: whether Pallas's interpreter runs the kernel.
    """

    shape: tuple[int, ...]
    blocks: int
    block: jax.Array
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
    def whole(self) -> int:
        return self.tokens // ROWS

    @property
    def rest(self) -> int:
        return self.tokens % ROWS

    @property
    def tiles(self) -> int:
        """Number of tiles, with that of the rest."""
        return self.whole + (self.rest > 0)

    @property
    def scale(self) -> float:
        return self.width**-0.5

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return pieces(self.width)

    def rows(self, tile: jax.Array | int) -> Rows:
        """The rows of a tile. That of the rest has ROWS rows too: it begins in the tile before."""
        return pl.ds(jnp.minimum(tile * ROWS, self.span - ROWS), ROWS)

    def count(self) -> jax.Array:
        """The number of heads of this block."""
        total = self.shape[0] * self.shape[2]
        return (total - self.block + self.blocks - 1) // self.blocks

    def place(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The example of a head, and its number in the example."""
        number, heads = self.block + head * self.blocks, self.shape[2]
        return number // heads, lax.rem(number, heads)

    def copy_tile(
        self,
        source: Ref,
        head: jax.Array,
        tile: int,
        to: tuple[Ref, ...],
        slot: jax.Array,
        full: Ref,
    ) -> None:
        """Copies a tile of tokens to shared memory.

        Args:
          source: [b, t, h, d].
          head: the head.
          tile: number of the tile.
          to: an operand, see `operand`.
          slot: place of the head in it.
          full: barrier, at which a copy of each piece arrives.
        """
        example, number = self.place(head)
        first, count = tile * ROWS, ROWS if tile < self.whole else STEP
        tokens = pl.ds(first + 0 * head, count)
        for piece, ref in zip(self.pieces, to):
            view = self._lines(ref, piece.width, slot, first, count)
            features = source.at[example, tokens, number, pl.ds(*piece)]
            plgpu.copy_gmem_to_smem(features, view, full)

    def _lines(self, ref: Ref, width: int, slot: jax.Array, first: int, count: int) -> Ref:
        """Some rows of swizzled memory as the destination of a copy that does not tile rows.

        A copy that tiles rows would need a whole number of tiles in the sequence.
        """
        if self.interpreted:
            return ref.at[slot, pl.ds(first, count)]
        groups = pl.ds(first // GROUP, count // GROUP)
        view = ref.ref.at[slot, groups].reshape(count, width)  # of [groups, 1, GROUP, width]
        swizzle: Any = plgpu.SwizzleTransform
        unswizzle = swizzle(2 * width).undo(None)
        return dataclasses.replace(view, transforms=(*view.transforms, unswizzle))


def pieces(width: int) -> tuple[Piece, ...]:
    """Cuts the features of a head into lines of 128 bytes and of 32.

    >>> pieces(80)
    (Piece(first=0, width=64), Piece(first=64, width=16))
    """
    return (Piece(0, WIDE), Piece(WIDE, STEP))[: 1 + (width > WIDE)]


def operand(shape: tuple[int, int], width: int, dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Shared memory [*shape, features] of each piece of the features, for operands of products."""
    return tuple(swizzled((*shape, p.width), GROUP, p.width, dtype) for p in pieces(width))


def swizzled(shape: tuple[int, ...], rows: int, line: int, dtype: jax.typing.DTypeLike) -> Any:
    """Shared memory in tiles [rows, line]; with rows = GROUP it holds operands of products."""
    tiling: Any = plgpu.TilingTransform  # jax 0.12 types these two as abstract
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((rows, line)), swizzle(2 * line)))


def rows_of(width: int, dtype: jax.typing.DTypeLike) -> Any:
    """Shared memory for ROWS rows of each compute warpgroup, which are copied at once."""
    shape = (COMPUTE, ROWS, width)
    return swizzled(shape, 1, width, dtype) if width == WIDE else plgpu.SMEM(shape, dtype)


def load(ref: Ref, layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    """Loads an array from shared memory into registers."""
    read: Callable[..., jax.Array] = plgpu.load  # of another signature before jax 0.11
    return read(ref, layout=layout, optimized=False)


def store(ref: Ref, value: jax.Array) -> None:
    """Stores registers in shared or global memory, without Mosaic's checks for an efficient store.

    Since jax 0.12 an assignment fails where threads store less than 4 bytes in global memory, and avoids bank
    conflicts in shared memory at the cost of stmatrix instructions.
    """
    if write := getattr(plgpu, "store", None):  # since jax 0.12
        write(ref, value, optimized=False)
    else:
        ref[...] = value


def span(tokens: int) -> int:
    """Tokens of a head in shared memory, with zeros."""
    return -(-tokens // STEP) * STEP


def padded(tokens: int) -> int:
    """Length of a vector over the tokens of a head, which is copied in steps of 128 bytes."""
    return -(-span(tokens) // 32) * 32


def specialize(copy: Callable[[], None], work: Callable[[jax.Array], None]) -> None:
    """Runs `copy` in the memory warpgroup, and ``work(warpgroup)`` in the compute warpgroups."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == COMPUTE)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="decrease")
        copy()

    @pl.when(warpgroup < COMPUTE)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        work(warpgroup)


def kernel(
    body: Callable, out: Any, scratch: Sequence[Any], *, blocks: int, interpret: Any
) -> Callable:
    """Builds a kernel of compute warpgroups and a memory warpgroup, as a function of its inputs."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=list(scratch),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # all sums are those of a warp
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )
