"""Heads of attention in shared memory.

A tiled copy starts at a multiple of TILE tokens. A head of an example does not, so its keys and values come
with up to TILE - 1 tokens of the example before, and with tokens of the next one. Scores of these tokens are
masked, and their values have weight 0, so they must be finite. Queries and outputs are copied row by row, and
start at any token. Outside of the arrays TMA reads zeros and writes nothing.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.mosaic_gpu.pipeline import Ref

ROWS = 64  # queries of a tile: the rows of a product of one warpgroup
TILE = 8  # tokens of a swizzled tile
STEP = 16  # keys of the shortest product with values
SLOTS = 2  # heads whose keys and values are in shared memory
WARPGROUPS = 2  # that compute


class Buffers(NamedTuple):
    """The shared memory of a block, in the order of the kernel's arguments.

    Attributes:
      k: [SLOTS, keys, d].
      v: [SLOTS, keys, d], a buffer for each of `value_pieces`.
      q, out: [WARPGROUPS, ROWS, d].
      lse: [WARPGROUPS, ROWS].
      full, empty: barriers for each slot.
      q_full: a barrier for each compute warpgroup.
      turn: a barrier for each compute warpgroup.
    """

    k: Ref
    v: tuple[Ref, ...]
    q: Ref
    out: Ref
    lse: Ref
    full: Ref
    empty: Ref
    q_full: Ref
    turn: Ref


def allocate(tokens: int, width: int, dtype: jax.typing.DTypeLike) -> Buffers:
    """Describes the buffers for heads of `width` features."""
    keys = copied_keys(tokens)
    pieces = value_pieces(keys, width)
    return Buffers(
        k=buffer((SLOTS, keys, width), dtype, (TILE, line(width))),
        v=tuple(buffer((SLOTS, n, width), dtype, (TILE, length)) for _, n, length in pieces),
        q=row_buffer(width, dtype),
        out=row_buffer(width, dtype),
        lse=plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
        full=plgpu.Barrier(num_arrivals=1 + len(pieces), num_barriers=SLOTS),
        empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=SLOTS),
        q_full=plgpu.Barrier(num_barriers=WARPGROUPS),
        turn=plgpu.Barrier(num_barriers=WARPGROUPS),
    )


def copied_keys(tokens: int) -> int:
    """Number of keys that are copied for a head, tokens of other examples included.

    >>> copied_keys(257), copied_keys(256)
    (272, 256)
    """
    return pl.cdiv(tokens + (TILE - 1 if tokens % TILE else 0), STEP) * STEP


def line(width: int) -> int:
    """Features of a line of the buffers of keys and values: 64, which is faster to copy, or STEP."""
    return 64 if width == 64 else STEP


def value_pieces(keys: int, width: int) -> list[tuple[int, int, int]]:
    """Returns the buffers of values: (first key, number of keys, features of a line).

    With lines of n features, a product sums a multiple of n keys, so other keys have shorter lines.

    >>> value_pieces(272, 64), value_pieces(272, 80)
    ([(0, 256, 64), (256, 16, 16)], [(0, 272, 16)])
    """
    rest = keys % line(width)
    pieces = [(0, keys - rest, line(width)), (keys - rest, rest, STEP)]
    return [piece for piece in pieces if piece[1]]


def buffer(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, tile: tuple[int, int]) -> Any:
    """Shared memory in swizzled tiles."""
    tiling: Any = plgpu.TilingTransform  # jax 0.12 types these two as abstract
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling(tile), swizzle(2 * tile[1])))


def row_buffer(width: int, dtype: jax.typing.DTypeLike) -> Any:
    """Shared memory for a tile of queries or outputs of each warpgroup; they start at any token."""
    shape = (WARPGROUPS, ROWS, width)
    if line(width) == width:
        return buffer(shape, dtype, (1, width))
    return plgpu.SMEM(shape, dtype)


def row_columns(head: jax.Array, width: int) -> slice | pl.Slice:
    """The columns of a head, for copies of queries and outputs, which are not tiled along tokens.

    If Mosaic sees that columns start at a multiple of STEP, it copies them STEP at a time, which takes
    longer than whole rows. It does not see through a shift.
    """
    if line(width) == width:
        return pl.ds(head * width, width)
    return pl.ds(lax.shift_left(head * (width // STEP), int(math.log2(STEP))), width)
