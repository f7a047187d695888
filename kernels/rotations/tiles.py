"""The tiles of the kernel that rotates rows."""

from swjax.kernels import tiles


def rotation_tile(width: int) -> tiles.RowTile:
    """The tuned tile, or that of the rule."""
    entry = tiles.tuned("rows", "rotated", width)
    return tiles.RowTile(**entry) if entry else rotation_rule(width)


def rotation_rule(width: int) -> tiles.RowTile:
    """Chunks of at least 16 groups of 128 features, as tensor cores need."""
    sizes = (chunk for chunk in (2048, 1024, 512, 256) if -width % chunk * 8 <= width)
    chunk = next(sizes, 128)
    rows = 2048 // chunk
    warps = min(max(tiles.power_above(rows * width // 40) // 32, 4), 16)
    return tiles.RowTile(rows, chunk, warps)
