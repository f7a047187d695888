"""The tile sizes of ragged products."""

from dataclasses import replace

from swjax.kernels import tiles
from swjax.kernels.products.tiles import LARGE_MEMORY, MosaicTile, TritonTile


def product_tile(m: int, n: int, k: int, groups: int, itemsize: int) -> TritonTile:
    """The tile of the product of m rows with `groups` matrices [n, k], of elements of `itemsize` bytes."""
    entry = tiles.tuned("ragged", f"{n}x{k}x{itemsize}") if m >= 128 * groups else None
    return TritonTile(**entry) if entry else product_rule(m, groups, itemsize)


def product_rule(m: int, groups: int, itemsize: int) -> TritonTile:
    """The tiles of `products.tiles.triton_rule`, with steps of as many bytes. A group of few rows leaves most
    rows of a large tile unused, so tiles have at most twice the rows of an average group."""
    mean = m // groups
    rows = 128 if mean > 64 else 64 if mean > 16 else 32
    capability = tiles.compute_capability()
    step = (128 if capability in LARGE_MEMORY else 64) // itemsize
    warps = 4 if rows < 128 or capability in LARGE_MEMORY[1:] else 8
    return TritonTile(rows, 128, step, warps, stages=3, group=8)


def weight_gradient_tile(k: int, n: int) -> TritonTile:
    """The tile of the weight gradient [k, n] of a group; `k` of a tile is its number of tokens in a step."""
    entry = tiles.tuned("ragged", f"weight_gradient {k}x{n}")
    return TritonTile(**entry) if entry else weight_gradient_rule()


def weight_gradient_rule() -> TritonTile:
    """128 x 128 sums, and steps of 64 tokens: three stages of 32 KiB."""
    tile = TritonTile(128, 128, 64, warps=8, stages=3, group=8)
    large = tiles.compute_capability() in LARGE_MEMORY
    return tile if large else replace(tile, k=32)


# Three stages of 48 KiB leave room for the buffers of the output and of edges in 227 KiB.
MOSAIC_RULE = MosaicTile(stages=3, width=8)


def mosaic_tile(n: int, k: int, itemsize: int) -> MosaicTile:
    """The tile of Mosaic's product with matrices [n, k], of elements of `itemsize` bytes."""
    entry = tiles.tuned("ragged_mosaic_gpu", f"{n}x{k}x{itemsize}")
    return MosaicTile(**entry) if entry else MOSAIC_RULE


def mosaic_cluster(m: int, groups: int) -> int:
    """Two thread blocks share a tile of b and have 256 rows of one group. On average half of the last 256
    rows of a group are not needed: with 2,048 rows a group 6% of the products."""
    return 2 if m >= 2048 * groups else 1
