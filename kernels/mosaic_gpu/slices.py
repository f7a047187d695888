"""How the tokens of weight gradients are cut into slices, and which block of threads computes which slice.

A weight gradient has few tiles: 1280 x 5120 has 200. With 132 multiprocessors and whole tiles only, half of
the multiprocessors would be idle in the second round. So the tiles that fill whole rounds are computed whole.
The other tiles are cut along the tokens into slices, which keep all multiprocessors busy for about equally
long.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MOST_SLICES = 16


class Slices(NamedTuple):
    """How the tokens of a weight gradient are cut.

    Attributes:
      whole: number of tiles that are not cut, a multiple of the number of blocks of threads. The other tiles
        are cut.
      early: length of the first slice of each cut tile, as a fraction of all tokens. A block computes at most
        one such slice, before its whole tiles. 0: there are no early slices.
      late: number of equal slices of the remaining tokens of a cut tile. Blocks without an early slice
        compute them, after their whole tiles.
    """

    whole: int
    early: float
    late: int


def best_slices(
    tile_count: int, tokens: int, blocks: int, *, largest: int, write_tokens: int
) -> Slices:
    """The slices with the shortest predicted time.

    The prediction adds the tokens that the busiest block multiplies, and the time of its writes. Slices of a
    tile are added in order, so slices that end at the same time wait for each other's writes.

    Args:
      tile_count: number of output tiles.
      tokens: length of the sum.
      blocks: number of blocks that run at the same time.
      largest: largest allowed number of late slices. More than `MOST_SLICES` are never chosen.
      write_tokens: number of tokens multiplied in the time of writing a slice.

    >>> best_slices(50, 32768, blocks=132, largest=16, write_tokens=600)
    Slices(whole=0, early=0.0, late=5)
    >>> best_slices(150, 32768, blocks=132, largest=16, write_tokens=600)
    Slices(whole=132, early=0.14285714285714285, late=6)
    """
    rounds, cut = divmod(tile_count, blocks)
    if cut == 0:
        return Slices(tile_count, 0.0, 0)

    def candidate(count: int) -> tuple[float, Slices]:
        """The predicted time of `count` late slices, in tokens."""
        late_blocks = blocks - cut if rounds else blocks
        late_units = -(-cut * count // late_blocks)  # of the busiest block
        # Both groups of blocks take equally long if early = (1 - early) * late_units / count.
        early = late_units / (late_units + count) if rounds else 0.0
        duration = rounds + (early or late_units / count)
        writes = late_units
        if rounds:
            # Slices of a tile that end at the same time.
            at_once = min(count, -(-late_blocks // cut))
            writes = rounds + max(late_units, at_once)
        slices = Slices(rounds * blocks, early, count)
        return duration * tokens + writes * write_tokens, slices

    return min(map(candidate, range(1, max(1, min(MOST_SLICES, largest)) + 1)))[1]


class Part(NamedTuple):
    """A tile, or a slice of a tile.

    Attributes:
      tile: the number of the tile.
      slice: the number of the slice in its tile; 0 for a whole tile.
      start, stop: its first step along the tokens, and the step after its last one.
    """

    tile: jax.Array
    slice: jax.Array
    start: jax.Array
    stop: jax.Array


@dataclass(frozen=True)
class Schedule:
    """The parts that each block of threads computes, in this order::

        early blocks    the early slice of a cut tile, whole tiles
        late blocks     whole tiles, late slices of cut tiles

    The late blocks take turns at the late slices: first the first late slice of every cut tile, then the
    second one of every cut tile, and so on. So blocks that run at the same time read the same tokens, which
    the L2 cache holds, and slices of a tile seldom end at the same time.

    A slice waits until the slice before it in its tile is written. No slice waits forever: all blocks run at
    the same time, an early slice is the first part of its block, and a late slice waits for an earlier turn.

    Attributes:
      tile_count: number of output tiles.
      blocks: number of blocks of threads; all run at the same time.
      steps: number of steps along the tokens.
      slices: how the tokens are cut.

    Raises:
      ValueError: the slices would not cover every tile.
    """

    tile_count: int
    blocks: int
    steps: int
    slices: Slices

    def __post_init__(self) -> None:
        whole, early, late = self.slices
        if whole % self.blocks or not 0 <= whole <= self.tile_count:
            raise ValueError(
                f"whole must be a multiple of the {self.blocks} blocks and at most {self.tile_count}, "
                f"the number of tiles; got {whole}"
            )
        if self.cut_count and not 1 <= late <= self.steps:
            raise ValueError(f"late must be 1 to {self.steps}, the number of steps; got {late}")
        if early and self.cut_count >= self.blocks:
            raise ValueError(
                f"early slices need fewer cut tiles than blocks; got {self.cut_count} cut tiles and "
                f"{self.blocks} blocks"
            )

    @property
    def cut_count(self) -> int:
        """Number of tiles that are cut."""
        return self.tile_count - self.slices.whole

    @property
    def early_steps(self) -> int:
        """Length of an early slice. Each late slice keeps at least one step."""
        return min(round(self.slices.early * self.steps), self.steps - self.slices.late)

    @property
    def early_blocks(self) -> int:
        """Number of blocks with an early slice. They come first."""
        return self.cut_count if self.early_steps else 0

    def written_dtype(self, out_dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
        """The dtype in which a kernel writes gradients of `out_dtype`: slices are added in float32."""
        return "float32" if self.adds_slices else out_dtype

    @property
    def adds_slices(self) -> bool:
        """Whether a tile has several slices, which are added."""
        return self.slices.late + min(self.early_steps, 1) > 1

    def part_count(self, block: jax.Array) -> jax.Array:
        """The number of parts of a block."""
        late_blocks, first = self.blocks - self.early_blocks, block - self.early_blocks
        late = (self.cut_count * self.slices.late - first + late_blocks - 1) // late_blocks
        return self.slices.whole // self.blocks + jnp.where(block < self.early_blocks, 1, late)

    def part(self, block: jax.Array, i: jax.Array) -> Part:
        """Part `i` of a block."""
        rounds, early = self.slices.whole // self.blocks, self.early_steps
        cut_count, late_slices = max(self.cut_count, 1), max(self.slices.late, 1)

        def start(number):  # of a slice
            late = number - min(early, 1)
            return jnp.where(late < 0, 0, early + late * (self.steps - early) // late_slices)

        is_early = block < self.early_blocks
        round_ = i - is_early.astype(jnp.int32)
        late_blocks = self.blocks - self.early_blocks
        # The position among the late slices of all cut tiles.
        turn = jnp.maximum(block - self.early_blocks + (i - rounds) * late_blocks, 0)
        number = jnp.where(is_early, 0, turn // cut_count + min(early, 1))
        tile = self.slices.whole + jnp.where(is_early, block, lax.rem(turn, cut_count))
        is_whole = (round_ >= 0) & (round_ < rounds)
        return Part(
            tile=jnp.where(is_whole, block + round_ * self.blocks, tile),
            slice=jnp.where(is_whole, 0, number),
            start=jnp.where(is_whole, 0, start(number)),
            stop=jnp.where(is_whole, self.steps, start(number + 1)),
        )
