"""How the tokens of weight gradients are cut into slices, and which block of threads computes which slice.

A weight gradient has few tiles: 1280 x 5120 has 200, and with 132 multiprocessors the second round of whole
tiles would be half empty. So tiles that fill whole rounds are computed whole, and the others in slices of
their tokens, which fill the rounds.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Slices(NamedTuple):
    """How the tokens of a weight gradient are cut.

    Attributes:
      whole: number of tiles that are not cut.
      early: length of the first slice of each other tile, as a fraction of all tokens. As many blocks as
        there are such tiles compute these slices before their whole tiles. 0: there is no such slice.
      late: number of equal slices of the remaining tokens. The other blocks compute them after their whole
        tiles.
    """

    whole: int
    early: float
    late: int


def best_slices(
    tile_count: int, tokens: int, blocks: int, *, largest: int, write_tokens: int
) -> Slices:
    """The slices with the shortest predicted time.

    The prediction counts the tokens that the busiest block multiplies, and its writes. Slices of a tile are
    added in order, so those that end at the same time wait for each other's writes.

    Args:
      tile_count: number of output tiles.
      tokens: length of the sum.
      blocks: number of blocks that run at the same time.
      largest: largest allowed number of slices.
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
        late_blocks = blocks - cut if rounds else blocks
        late_units = -(-cut * count // late_blocks)  # of the busiest block
        # Both groups of blocks take equally long if early = (1 - early) * late_units / count.
        early = late_units / (late_units + count) if rounds else 0.0
        duration = rounds + (early or late_units / count)
        writes = late_units
        if rounds:
            writes = rounds + max(late_units, min(count, -(-late_blocks // cut)))
        slices = Slices(rounds * blocks, early, count)
        return duration * tokens + writes * write_tokens, slices

    return min(map(candidate, range(1, max(1, min(16, largest)) + 1)))[1]


class Part(NamedTuple):
    """A tile, or a slice of a tile.

    Attributes:
      tile: the number of the tile.
      slice: the number of the slice; 0 for a whole tile.
      start, stop: its first step along the tokens, and the step after its last one.
    """

    tile: jax.Array
    slice: jax.Array
    start: jax.Array
    stop: jax.Array


@dataclass(frozen=True)
class Schedule:
    """The parts that each block computes, in this order::

        early blocks    the early slice of a cut tile, whole tiles
        late blocks     whole tiles, late slices of cut tiles

    Late slices are numbered slice by slice. So blocks that run at the same time read the same tokens, from
    the L2 cache, and slices of a tile seldom end at the same time.

    Attributes:
      tile_count: number of output tiles.
      blocks: number of blocks of threads.
      steps: number of steps along the tokens.
      slices: how the tokens are cut.
    """

    tile_count: int
    blocks: int
    steps: int
    slices: Slices

    @property
    def cut_count(self) -> int:
        """Number of tiles that are cut."""
        return self.tile_count - self.slices.whole

    @property
    def early_steps(self) -> int:
        return min(round(self.slices.early * self.steps), self.steps - self.slices.late)

    @property
    def early_blocks(self) -> int:
        return self.cut_count if self.early_steps else 0

    @property
    def adds(self) -> bool:
        """Whether a tile has several slices."""
        return self.slices.late + min(self.early_steps, 1) > 1

    def parts(self, block: jax.Array) -> jax.Array:
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
        late = jnp.maximum(block - self.early_blocks + (i - rounds) * late_blocks, 0)
        number = jnp.where(is_early, 0, late // cut_count + min(early, 1))
        tile = self.slices.whole + jnp.where(is_early, block, lax.rem(late, cut_count))
        is_whole = (round_ >= 0) & (round_ < rounds)
        return Part(
            tile=jnp.where(is_whole, block + round_ * self.blocks, tile),
            slice=jnp.where(is_whole, 0, number),
            start=jnp.where(is_whole, 0, start(number)),
            stop=jnp.where(is_whole, self.steps, start(number + 1)),
        )
