"""The shared memory of the forward pass of attention: the operands of a head of one example.

Keys and values are copied in swizzled tiles of SWIZZLE_TOKENS tokens, so a copy starts at a multiple of
SWIZZLE_TOKENS. An example may start at any token. Its copy therefore begins with up to SWIZZLE_TOKENS - 1
tokens of the example before, and ends with tokens of the next one. The kernel masks the scores of these
tokens. Their values have weight 0, and must be finite, because 0 times infinity is NaN. Queries and outputs
are copied without tiles along tokens, and start at any token. Outside of the arrays TMA reads zeros and
writes nothing.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swjax.kernels.mosaic_gpu.pipeline import COMPUTE, Ref, swizzled

ROWS = 64  # queries that a warpgroup computes at a time: the rows of a wgmma product
SWIZZLE_TOKENS = 8  # tokens of a swizzled tile of keys or values
STEP = 16  # length of a wgmma product of 16 bits along its contracted axis
LOG2_E = math.log2(math.e)
SLOTS = 2  # number of heads whose keys and values are in shared memory


class ForwardScratch(NamedTuple):
    """The shared memory of a block.

    Attributes:
      k: keys, [SLOTS, `copied_keys`, d].
      v: values, a buffer [SLOTS, n, d] for each (first key, n, features of a line) of `value_pieces`.
      q, out: queries and outputs, [COMPUTE, ROWS, d].
      lse: float32, [COMPUTE, ROWS].
      full: a barrier for each slot; the copies of keys and values have arrived.
      empty: a barrier for each slot; both compute warpgroups have read the slot.
      q_full: a barrier for each compute warpgroup; its queries have arrived.
      turn: a barrier for each compute warpgroup; it may compute exponentials.
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


def allocate(tokens: int, width: int, dtype: jax.typing.DTypeLike) -> ForwardScratch:
    """Describes the buffers for sequences of `tokens` tokens and heads of `width` features."""
    keys = copied_keys(tokens)
    pieces = value_pieces(keys, width)
    return ForwardScratch(
        k=swizzled((SLOTS, keys, width), dtype, (SWIZZLE_TOKENS, line(width))),
        v=tuple(
            swizzled((SLOTS, n, width), dtype, (SWIZZLE_TOKENS, length)) for _, n, length in pieces
        ),
        q=row_buffer(width, dtype),
        out=row_buffer(width, dtype),
        lse=plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
        full=plgpu.Barrier(num_arrivals=1 + len(pieces), num_barriers=SLOTS),
        empty=plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=SLOTS),
        q_full=plgpu.Barrier(num_barriers=COMPUTE),
        turn=plgpu.Barrier(num_barriers=COMPUTE),
    )


def copied_keys(tokens: int) -> int:
    """Returns the number of keys that are copied for a head, tokens of other examples included.

    >>> copied_keys(257), copied_keys(256)
    (272, 256)
    """
    return pl.cdiv(tokens + (SWIZZLE_TOKENS - 1 if tokens % SWIZZLE_TOKENS else 0), STEP) * STEP


def line(width: int) -> int:
    """Returns the number of features per line, a row of a swizzled tile.

    Lines of 64 features (128 bytes) are the fastest to copy. They need heads that start at a multiple of 64
    features; heads of 80 features start at a multiple of STEP.
    """
    return 64 if width == 64 else STEP


def value_pieces(keys: int, width: int) -> list[tuple[int, int, int]]:
    """Returns the buffers of values: (first key, number of keys, number of features per line).

    From lines of n features, a product sums a multiple of n keys. The remaining keys have lines of STEP
    features.

    >>> value_pieces(272, 64), value_pieces(272, 80)
    ([(0, 256, 64), (256, 16, 16)], [(0, 272, 16)])
    """
    rest = keys % line(width)
    pieces = [(0, keys - rest, line(width)), (keys - rest, rest, STEP)]
    return [piece for piece in pieces if piece[1]]


def row_buffer(width: int, dtype: jax.typing.DTypeLike) -> Any:
    """Describes shared memory for ROWS tokens of each warpgroup, which start at any token."""
    shape = (COMPUTE, ROWS, width)
    if line(width) == width:
        return swizzled(shape, dtype, (1, width))
    return plgpu.SMEM(shape, dtype)


def row_columns(head: jax.Array, width: int) -> slice | pl.Slice:
    """Returns the columns of a head in [b * t, h * d], for copies of queries and outputs.

    Where Mosaic can prove that columns start at a multiple of STEP, it copies STEP columns at a time, which
    takes longer than a copy of whole rows. The shift hides the multiple from Mosaic.
    """
    if line(width) == width:
        return pl.ds(head * width, width)
    return pl.ds(lax.shift_left(head * (width // STEP), int(math.log2(STEP))), width)
