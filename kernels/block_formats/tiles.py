"""The tiles of products of blocks."""

from typing import NamedTuple


class BlockTile(NamedTuple):
    """The tile sizes of Mosaic's product of blocks.

    Attributes:
      columns: columns of the output tile.
      chunk: see `swjax.kernels.mosaic_gpu.pipeline.Fold`.
      stages: slots of the ring buffer of operands.
      width: columns of tiles that run at the same time, and share rows of a in the L2 cache.
    """

    columns: int
    chunk: int
    stages: int
    width: int


# The fastest of those in benchmarks/notes/speed.md. A thread holds two sets of 64 sums and 64 totals, and the
# columns of a tile share a scale of a square.
TILE = BlockTile(columns=128, chunk=2, stages=4, width=16)
