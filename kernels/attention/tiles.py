"""The tile sizes of attention in Triton."""

from dataclasses import dataclass

from swjax.kernels.tiles import power_above

# Most keys for which the scores of 64 queries fit into the registers of a program.
LONGEST_SEQUENCE = 320


@dataclass(frozen=True)
class AttentionTile:
    """The tile sizes of attention, which computes the scores of a head in products of rows x columns.

    Attributes:
      rows: queries (in the backward pass also keys) per product.
      columns: keys (in the backward pass also queries) per product.
      warps: warps of 32 threads per program.
      stages: stages of the pipeline of loads.
      registers: largest number of registers per thread; None for no limit.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


# 64 rows are 4 warps, few enough that another program computes while one waits.
BACKWARD = AttentionTile(64, 64, warps=4, stages=2)


def forward_tile(tokens: int) -> AttentionTile:
    """The tile of the forward pass, in which a program holds all scores of its rows.

    Products are the largest among those with the fewest idle columns. With at most 168 registers per thread,
    which suffice for 208 keys, three programs fit on a multiprocessor instead of two.
    """

    def covered(columns: int) -> int:
        pieces, tail = attention_pieces(tokens, columns)
        return pieces * columns + tail

    columns = min((256, 128, 64), key=covered)
    registers = 168 if covered(columns) <= 208 else None
    return AttentionTile(64, columns, warps=4, stages=2, registers=registers)


def attention_pieces(tokens: int, piece: int) -> tuple[int, int]:
    """The number of pieces that cover a sequence, and the length of the tail: 16, 32 or 0. A longer remainder
    counts as a piece.

    >>> attention_pieces(257, 64), attention_pieces(100, 64)
    ((4, 16), (2, 0))
    """
    full, rest = divmod(tokens, piece)
    if rest > 32:
        return full + 1, 0
    return full, max(16, power_above(rest)) if rest else 0
