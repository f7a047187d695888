"""The tiles of products of blocks."""

from typing import NamedTuple


class BlockTile(NamedTuple):
    """The tile sizes of Mosaic's product of blocks.

    Attributes:
      columns: columns of the output tile, a multiple of the 128 that a thread sums at a time.
      stages: slots of the ring buffer of operands.
      width: columns of tiles that run at the same time, and share rows of a in the L2 cache.
    """

    columns: int
    stages: int
    width: int


# The fastest of those in benchmarks/notes/speed.md whose GPU tests were run.
TILE = BlockTile(columns=256, stages=4, width=8)
