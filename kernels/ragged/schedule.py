"""Which rows belong to a group, and which tile of rows a program of a kernel computes.

Group sizes are values of the program, so JAX computes these tables on the device. No value of a group size
leads to a row outside of the arrays.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Copies of Mosaic kernels need rows that start at a multiple of this, because operands in shared memory are
# cut into pieces of 8 rows.
ALIGNMENT = 8


def bounds(group_sizes: jax.Array, m: int) -> jax.Array:
    """The first row of each group, and the row after its last one, within m rows.

    A negative size counts as zero. Groups end at row m if the sizes add up to more.

    Args:
      group_sizes: [e] integers.
      m: number of rows, below 2**30.

    Returns:
      int32 [2, e].

    >>> bounds(jnp.array([2, 0, 9, 1]), 5).tolist()
    [[0, 2, 2, 5], [2, 2, 5, 5]]
    """
    if group_sizes.dtype.itemsize < 4:  # which may not hold m
        group_sizes = group_sizes.astype(jnp.int32)
    sizes = jnp.clip(group_sizes, 0, m).astype(jnp.int32)
    # A sum may overflow only after one that exceeds m, of which the running maximum keeps m.
    ends = _running(jnp.max, jnp.clip(_running(jnp.sum, sizes), 0, m))
    starts = jnp.pad(ends[:-1], (1, 0))
    return jnp.stack([starts, ends])


def _running(reduce, x: jax.Array) -> jax.Array:
    """Reduces the elements up to each one, as one reduction of a matrix: XLA's scans take many kernels."""
    index = jnp.arange(len(x))
    before = index[None, :] <= index[:, None]
    return reduce(jnp.where(before, x[None, :], 0), axis=1)


def tile_count(m: int, groups: int, rows: int, alignment: int = 1) -> int:
    """An upper bound of the tiles of `rows` rows of all groups, and of the rows beyond the groups.

    Tiles start at multiples of `alignment`, so a group may have ``alignment - 1`` rows more.

    >>> tile_count(256, 1, 128)
    3
    """
    return (m + (groups + 1) * (rows + alignment - 2)) // rows


def row_tiles(group_sizes: jax.Array, m: int, rows: int) -> jax.Array:
    """The tiles of rows, in the order of the rows; a tile has rows of one group.

    Args:
      group_sizes: [e] integers, see `bounds`.
      m: number of rows.
      rows: rows of a tile.

    Returns:
      int32 [3, `tile_count`]: the group of a tile, its first row, and the row after the last one of its
      group. The group of rows beyond the groups is e. Tiles at the end of the table may have no rows; their
      group is e too.

    >>> row_tiles(jnp.array([2, 0, 5]), 8, 4).tolist()
    [[0, 2, 2, 3, 3], [0, 2, 6, 7, 8], [2, 7, 7, 8, 8]]
    """
    _, group, first, _, end = aligned_tiles(group_sizes, m, rows, alignment=1)
    return jnp.stack([group, jnp.minimum(first, m), end])


def aligned_tiles(
    group_sizes: jax.Array, m: int, rows: int, alignment: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """The tiles of rows, whose first rows are multiples of `alignment`: they may start in the group before.

    Args:
      group_sizes: [e] integers, see `bounds`.
      m: number of rows.
      rows: rows of a tile, a multiple of `alignment`.
      alignment: see above.

    Returns:
      int32 arrays: the number of tiles [1]; for each tile, up to an upper bound of their number, its group,
      which is e for rows beyond the groups, its first row, and the first row and the row after the last one
      of its group.

    >>> count, *tiles = aligned_tiles(jnp.array([3, 10]), 16, 8, 4)
    >>> [each[:int(count[0])].tolist() for each in tiles]
    [[0, 1, 1, 2], [0, 0, 8, 12], [0, 3, 3, 13], [3, 13, 13, 16]]
    """
    groups = len(group_sizes)
    starts, ends = bounds(group_sizes, m)
    last = ends[-1:]
    starts, ends = jnp.append(starts, last), jnp.append(ends, jnp.full_like(last, m))
    aligned = starts // alignment * alignment
    counts = jnp.where(ends > starts, (ends - aligned + rows - 1) // rows, 0)
    tile_ends = _running(jnp.sum, counts)
    tile = jnp.arange(tile_count(m, groups, rows, alignment), dtype=jnp.int32)
    group = jnp.sum((tile_ends[None, :] <= tile[:, None]).astype(jnp.int32), axis=1)
    group = jnp.minimum(group, groups)
    first = aligned[group] + (tile - (tile_ends - counts)[group]) * rows
    return tile_ends[-1:], group, first, starts[group], ends[group]


def group_of_rows(group_sizes: jax.Array, m: int) -> jax.Array:
    """The group of each row: int32 [m]; e for rows beyond the groups.

    >>> group_of_rows(jnp.array([2, 0, 1]), 4).tolist()
    [0, 0, 2, 3]
    """
    _, ends = bounds(group_sizes, m)
    return jnp.searchsorted(ends, jnp.arange(m, dtype=ends.dtype), side="right")


class GroupBlocks(NamedTuple):
    """The rows of each group in blocks, which start at multiples of ALIGNMENT, and their places in an array
    of padded groups.

    A group's first block may start in the group before, and its last one may end in the group after. The
    other rows of a block are all of the group. The places of rows of other groups are for zeros.

    Attributes:
      group: int32 [blocks], the group of a block; e for blocks at the end of the table, which have no rows.
      first, start, end: int32 [blocks], the first row of a block, and the first row and the row after the
        last one that are of the group.
      to: int32 [blocks], the place of row `first` among the padded rows, a multiple of `rotation`.
      first_block, counts: int32 [e], the first block of a group, and the number of its blocks.
    """

    group: jax.Array
    first: jax.Array
    start: jax.Array
    end: jax.Array
    to: jax.Array
    first_block: jax.Array
    counts: jax.Array


def padded_length(m: int, groups: int, rotation: int) -> int:
    """An upper bound of the padded rows of all groups; see `blocks_of_groups`.

    >>> padded_length(300, 2, 128)
    512
    """
    return (m + groups * (rotation + ALIGNMENT - 2)) // rotation * rotation


def blocks_of_groups(
    group_sizes: jax.Array, m: int, block: int, rotation: int, alignment: int = ALIGNMENT
) -> GroupBlocks:
    """Cuts the rows of each group into blocks, and places the blocks in an array of padded groups.

    Args:
      group_sizes: [e] integers, see `bounds`.
      m: number of rows.
      block: largest number of rows of a block, a multiple of `rotation`.
      rotation: the padded rows of a group are a multiple of it.
      alignment: blocks start at its multiples; it divides `rotation`.

    >>> blocks = blocks_of_groups(jnp.array([5, 3]), 8, 4, 2, alignment=2)
    >>> [each[:4].tolist() for each in blocks[:5]]
    [[0, 0, 1, 2], [0, 4, 4, 8], [0, 4, 5, 8], [4, 5, 8, 8], [0, 4, 6, 0]]
    >>> blocks.first_block.tolist(), blocks.counts.tolist()
    ([0, 2], [2, 1])
    """
    _, group, first, start, end = aligned_tiles(group_sizes, m, block, alignment)
    starts, ends = bounds(group_sizes, m)
    aligned = starts // alignment * alignment
    length = jnp.where(ends > starts, ends - aligned, 0)
    padded = (length + rotation - 1) // rotation * rotation
    offsets = _running(jnp.sum, padded) - padded
    known, inside = group < len(starts), jnp.minimum(group, len(starts) - 1)
    end = jnp.where(known, jnp.minimum(first + block, end), first)
    to = jnp.where(known, offsets[inside] + first - aligned[inside], 0)
    count = (length + block - 1) // block
    return GroupBlocks(
        jnp.where(known, group, len(starts)),
        first,
        jnp.where(known, jnp.maximum(first, start), first),
        end,
        to,
        _running(jnp.sum, count) - count,
        count,
    )


def largest_first(first: jax.Array, count: jax.Array) -> jax.Array:
    """Puts the longest sums first, so that none of them starts when all others have ended.

    Args:
      first, count: int32 [e], where the sum of a group starts, and its length.

    Returns:
      int32 [3, e]: the groups in their new order, and their `first` and `count`.

    >>> largest_first(jnp.array([0, 2, 2]), jnp.array([2, 0, 7])).tolist()
    [[2, 0, 1], [2, 0, 2], [7, 2, 0]]
    """
    order = jnp.argsort(-count).astype(jnp.int32)
    return jnp.stack([order, first[order], count[order]])
