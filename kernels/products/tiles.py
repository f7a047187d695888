"""The tile sizes of products."""

from dataclasses import dataclass

from swjax.kernels import tiles


@dataclass(frozen=True)
class TritonTile:
    """The tile sizes of Triton's product.

    Attributes:
      m, n: rows and columns of the output tile of a program.
      k: length of a step along the contracted axis.
      warps: warps of 32 threads per program.
      stages: stages of the pipeline of loads.
      group: rows of tiles that run at the same time, and share columns of b in the L2 cache.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int


@dataclass(frozen=True)
class MosaicTile:
    """The tile sizes of Mosaic's product.

    Attributes:
      stages: slots of the ring buffer of operands.
      width: columns of tiles that run at the same time, and share rows of a in the L2 cache.
    """

    stages: int
    width: int


def triton_tile(m: int, n: int, k: int) -> TritonTile:
    """The tile of Triton's product [m, k] [n, k]T."""
    entry = tiles.tuned("triton", f"{n}x{k}") if m >= 1024 else None
    return TritonTile(**entry) if entry else triton_rule(m)


# GPUs with 164 KiB of shared memory or more: A100, Hopper, B200 and B300. Those after the first multiply in
# units that read operands from shared memory.
LARGE_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))


def triton_rule(m: int) -> TritonTile:
    """128 x 128 x 128: two programs of 96 KiB fit on a Hopper multiprocessor, and one multiplies while the
    other writes. GPUs with 100 KiB of shared memory use half the step; few rows use a smaller tile. wgmma
    reads operands from shared memory. Other GPUs hold them in registers, which would spill with 4 warps."""
    capability = tiles.compute_capability()
    rows, step = 128 if m > 64 else 64, 128 if capability in LARGE_MEMORY else 64
    warps = 4 if rows == 64 or capability in LARGE_MEMORY[1:] else 8
    return TritonTile(rows, 128, step, warps, stages=3, group=8)


# Four stages of 48 KiB leave room for the output's buffers in 227 KiB.
MOSAIC_RULE = MosaicTile(stages=4, width=8)
# Five stages of 36 KiB. Four were as fast: benchmarks/notes/speed.md.
PRODUCT_SUM_TILE = MosaicTile(stages=5, width=8)


def mosaic_tile(n: int, k: int) -> MosaicTile:
    """The tile of Mosaic's product [m, k] [n, k]T."""
    entry = tiles.tuned("mosaic_gpu", f"{n}x{k}")
    return MosaicTile(**entry) if entry else MOSAIC_RULE
