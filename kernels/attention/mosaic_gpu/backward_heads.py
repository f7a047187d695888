"""How the backward pass of attention cuts a head into tiles, and copies them to shared memory.

A head has `whole` tiles of ROWS tokens, followed by a rest of at most STEP tokens. A longer rest becomes
another whole tile, which consists of the last ROWS tokens of the head and so overlaps the tile before it. As
rows of a product the overlapping tokens are computed twice, with equal results; as columns each token is used
once. A copy into shared memory reads zeros past the end of a sequence. A copy to global memory writes nothing
there, unless the array is contiguous over sequences: Mosaic clips copies at the end of an array only.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.attention.mosaic_gpu.forward_scratch import ROWS, STEP, SWIZZLE_TOKENS, line
from swjax.kernels.mosaic_gpu import pipeline
from swjax.kernels.mosaic_gpu.pipeline import COMPUTE, Ref

Rows = slice | pl.Slice


@dataclass(frozen=True)
class Heads:
    """The heads of one block of threads.

    Attributes:
      shape: (b, t, h, d).
      blocks, block: number of blocks of threads, and the number of this one.
    """

    shape: tuple[int, ...]
    blocks: int
    block: jax.Array

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
        return cut(self.tokens)[0]

    @property
    def rest(self) -> int:
        return cut(self.tokens)[1]

    @property
    def tiles(self) -> int:
        """Number of tiles, with that of the rest."""
        return self.whole + (self.rest > 0)

    @property
    def overlap(self) -> bool:
        """Whether the last whole tile begins in the tile before."""
        return self.whole * ROWS > self.span

    @property
    def line(self) -> int:
        return line(self.width)

    def rows(self, tile: jax.Array | int) -> Rows:
        """The rows of a tile. That of the rest has ROWS rows too: it begins in the tile before."""
        return pl.ds(jnp.minimum(tile * ROWS, self.span - ROWS), ROWS)

    def columns(self, tile: int) -> tuple[int, int]:
        """The first column of a tile, and the number of its columns."""
        return tile * ROWS, min(ROWS, self.span - tile * ROWS)

    def count(self) -> jax.Array:
        """The number of heads of this block."""
        return pipeline.unit_count(self.shape[0] * self.shape[2], self.block, self.blocks)

    def place(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The example of a head, and its number in the example."""
        number, heads = self.block + head * self.blocks, self.shape[2]
        return number // heads, lax.rem(number, heads)

    def copy_tile(
        self, source: Ref, head: jax.Array, tile: int, to: Ref, slot: jax.Array, full: Ref
    ) -> None:
        """Copies a tile of tokens to shared memory.

        Args:
          source: [b, t, h, d].
          head: the head.
          tile: number of the tile.
          to: `operand`.
          slot: place of the head in it.
          full: barrier, at which `copies(d)` copies arrive.
        """
        example, number = self.place(head)

        def copy(group, groups):
            tokens = pl.ds(group * SWIZZLE_TOKENS, groups * SWIZZLE_TOKENS)
            view = self._lines(to, slot, group, groups)
            plgpu.copy_gmem_to_smem(source.at[example, tokens, number], view, full)

        first = tile * (ROWS // SWIZZLE_TOKENS) + 0 * head
        groups = self.columns(tile)[1] // SWIZZLE_TOKENS
        if self.line == self.width:
            copy(first, groups)
            return
        lax.fori_loop(0, groups, lambda i, _: copy(first + i, 1), None)
        for _ in range(groups, copies(self.width)):
            plgpu.barrier_arrive(full)

    def _lines(self, ref: Ref, slot: jax.Array, group: jax.Array, groups: int) -> Ref:
        """Some rows of swizzled memory as the destination of a copy that does not tile rows.

        A copy that tiles rows would need a whole number of tiles in the sequence.
        """
        swizzle: Any = plgpu.SwizzleTransform
        tiling: Any = plgpu.TilingTransform
        unswizzle = swizzle(2 * self.line).undo(None)
        if self.line == self.width:
            view = ref.ref.at[slot, pl.ds(group, groups)]  # [groups, 1, SWIZZLE_TOKENS, line]
            view = view.reshape(groups * SWIZZLE_TOKENS, self.line)
            return dataclasses.replace(view, transforms=(*view.transforms, unswizzle))
        view = ref.ref.at[slot, group]  # [width / line, SWIZZLE_TOKENS, line]
        view = dataclasses.replace(view, transforms=(*view.transforms, unswizzle))
        view = view.transpose((1, 0, 2))
        untile = tiling((self.line,)).undo(None)
        return dataclasses.replace(view, transforms=(*view.transforms, untile))


def copies(width: int) -> int:
    """Number of copies of a tile."""
    return 1 if line(width) == width else ROWS // SWIZZLE_TOKENS


def features(width: int) -> list[int]:
    """The first feature of each block of 64 features; the last block may overlap the one before."""
    return sorted({0, width - 64})


def store(ref: Ref, value: jax.Array) -> None:
    """Stores registers in shared or global memory, without Mosaic's checks for an efficient store.

    Since jax 0.12 an assignment fails where threads store less than 4 bytes in global memory, and avoids bank
    conflicts in shared memory at the cost of stmatrix instructions.
    """
    if write := getattr(plgpu, "store", None):  # since jax 0.12
        write(ref, value, optimized=False)
    else:
        ref[...] = value


def cut(tokens: int) -> tuple[int, int]:
    """The number of whole tiles of a head, at least COMPUTE, and the number of tokens of its rest.

    >>> cut(257), cut(99), cut(160)
    ((4, 1), (2, 0), (3, 0))
    """
    whole, rest = divmod(tokens, ROWS)
    return (whole, rest) if whole >= COMPUTE and rest <= STEP else (-(-tokens // ROWS), 0)


def span(tokens: int) -> int:
    """Tokens of a head in shared memory, with zeros."""
    return -(-tokens // STEP) * STEP


def padded(tokens: int) -> int:
    """Length of a vector over the tokens of a head, which is copied in steps of 128 bytes."""
    return -(-span(tokens) // 32) * 32
