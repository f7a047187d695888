"""The report of `swjax.quantized`: every product of a traced program."""

import re
import string
from dataclasses import dataclass
from typing import Any

from swjax.linear.conversion import recipe_name
from swjax.recipes import Recipe


@dataclass(frozen=True)
class TracedProduct:
    """A product of a traced program, or another use of a parameter.

    Attributes:
      path: the parameter; "" if no operand is one, several are joined by " + ".
      equation: the product as an einsum, or the name of the operation.
      shapes: shapes of the operands.
      flops: floating-point operations of all repetitions, forward; 0 if unknown.
      recipe: recipe of the product, or None if it is not converted.
      reason: why there is no recipe; "" if there is one.
      quantized: whether the forward product has 8-bit operands.
    """

    path: str
    equation: str
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    recipe: Recipe | None = None
    reason: str = ""
    quantized: bool = False


class ProgramReport(list[TracedProduct]):
    """Every `TracedProduct` of a function; prints as a table with one row for numbered layers.

    All branches of a condition count, and one iteration of a loop of unknown length.
    """

    @property
    def share(self) -> float:
        """The share of the FLOPs of forward products that have 8-bit operands."""
        return sum(p.flops for p in self if p.quantized) / max(sum(p.flops for p in self), 1)

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], list[int]] = {}
        for p in self:
            path = re.sub(r"(?<![^\W_])\d+(?=/)", "*", p.path) or "-"
            shapes = ", ".join("x".join(map(str, shape)) for shape in p.shapes)
            row = path, p.equation, shapes, recipe_name(p.recipe), p.reason
            rows.setdefault(row, []).append(p.flops)
        table = [
            (*row[:3], f"{len(flops)} x", f"{sum(flops):.3g} FLOPs", *row[3:])
            for row, flops in rows.items()
        ]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        total = sum(p.flops for p in self)
        return "\n".join([*lines, f"{self.share:.1%} of {total:.3g} forward FLOPs in 8 bits"])


def equation_of(
    dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int, groups: tuple[int, ...] = ()
) -> str:
    """The einsum of a `dot_general`; `groups` are the axes of rhs from which each row takes one entry.

    >>> equation_of((((2,), (0,)), ((), ())), 3, 2)
    'abc,cd->abd'
    """
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    lhs, letters = string.ascii_letters[:lhs_ndim], iter(string.ascii_letters[lhs_ndim:])
    shared = dict(zip((*rhs_contracted, *rhs_batch), (*lhs_contracted, *lhs_batch)))
    rhs = "".join(lhs[shared[i]] if i in shared else next(letters) for i in range(rhs_ndim))
    rows, columns = (
        [index for index in one if index not in other] for one, other in ((lhs, rhs), (rhs, lhs))
    )
    columns = [index for index in columns if rhs.index(index) not in groups]
    return f"{lhs},{rhs}->{''.join([*(lhs[i] for i in lhs_batch), *rows, *columns])}"


def unsupported(product: TracedProduct, why: object) -> ValueError:
    """The error for a product that no recipe supports."""
    return ValueError(
        f"no recipe supports the product {product.equation} with the parameter {product.path!r}: {why}; "
        f"keep it by a first rule {{{re.escape(product.path)!r}: 'standard'}}"
    )
