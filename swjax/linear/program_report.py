"""The report of `swjax.quantized`: every product of a traced program."""

import os
import re
import string
import sys
from dataclasses import dataclass, field
from typing import Any

from swjax.linear.conversion import recipe_name
from swjax.recipes import Recipe


def _is_of_library(file: str) -> bool:
    """Whether a file is of JAX, a library of layers, or Python's own."""
    folder_of = lambda module: os.path.join(os.path.dirname(module.__file__), "")
    names = ("jax", "flax", "opt_einsum", "equinox", "haliax", "swjax")
    if file.startswith(
        tuple(folder_of(sys.modules[name]) for name in names if name in sys.modules)
    ):
        return True
    return file.startswith(folder_of(os)) and "site-packages" not in file


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
      frozen: whether the parameter is stored in 8 bits, and so has no gradient.
      traceback: of the code that multiplies.
    """

    path: str
    equation: str
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    recipe: Recipe | None = None
    reason: str = ""
    quantized: bool = False
    frozen: bool = False
    traceback: Any = field(default=None, compare=False, repr=False)

    @property
    def site(self) -> str:
        """The "file:line" of the innermost code that is not of JAX or a library of layers; "" if unknown."""
        for frame in self.traceback.frames if self.traceback else ():
            if not _is_of_library(frame.file_name):
                return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
        return ""


class ProgramReport(list[TracedProduct]):
    """Every `TracedProduct` of a function; prints as a table with one row for numbered layers.

    A product of two activations has the call site in place of the parameter. All branches of a condition
    count, and one iteration of a loop of unknown length.

    Attributes:
      remedy: printed at the end.
    """

    remedy = ""

    @property
    def share(self) -> float:
        """The share of the FLOPs of forward products that have 8-bit operands."""
        return sum(p.flops for p in self if p.quantized) / max(sum(p.flops for p in self), 1)

    @property
    def input_gradient_share(self) -> float:
        """The share of the FLOPs of input gradients in 8 bits.

        Each product counts as much as its forward product, also that of a first layer, and a product of two
        activations twice. Layers whose recipe is unknown count as not quantized.
        """
        flops = lambda p: p.flops if p.path else 2 * p.flops
        done = sum(p.flops for p in self if p.recipe and p.recipe.dgrad)
        return done / max(sum(map(flops, self)), 1)

    @property
    def weight_gradient_share(self) -> float:
        """The share of the FLOPs of weight gradients in 8 bits; see `input_gradient_share`."""
        trained = [p for p in self if p.path and not p.frozen]
        done = sum(p.flops for p in trained if p.recipe and p.recipe.wgrad)
        return done / max(sum(p.flops for p in trained), 1)

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], list[TracedProduct]] = {}
        for p in self:
            path = re.sub(r"(?<![^\W_])\d+(?=/)", "*", p.path) or p.site or "-"
            shapes = ", ".join("x".join(map(str, shape)) for shape in p.shapes)
            row = path, p.equation, shapes, recipe_name(p.recipe), p.reason
            rows.setdefault(row, []).append(p)
        total = sum(p.flops for p in self)
        share_of = lambda products: sum(p.flops for p in products) / max(total, 1)
        table = [
            (
                products[0].path or path if len(products) == 1 else path,
                *row[:2],
                f"{len(products)} x",
                f"{share_of(products):.1%}",
                *row[2:],
            )
            for (path, *row), products in rows.items()
        ]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        gradients = (
            f"{self.input_gradient_share:.1%} of input gradients, "
            f"{self.weight_gradient_share:.1%} of weight gradients"
        )
        lines.append(f"in 8 bits: {self.share:.1%} of {total:.3g} forward FLOPs, {gradients}")
        return "\n".join([*lines, self.remedy]).rstrip()


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
