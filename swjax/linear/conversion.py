"""The report of `quantize_model`: for every matrix of a model its recipe, or why it has none."""

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from swjax.kept import kept_kind
from swjax.recipes import Product, Recipe

UNMATCHED = "no expression matches its path"
TAKES_NONE = "takes no dot_general"
NO_LAYOUT = "no layout: XLA multiplies on meshes of type Auto"
MAY_IGNORE = "unless its own code ignores dot_general"
NOT_RUN = "its code did not run: unused, or compiled before"
_KEPT = ("head", "output", "router", "gate", "embedding")  # see `warn_if_only_kept`
_VECTORS = ("bias", "scale")  # never matrices, even with several axes


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter that is, or may be, multiplied with activations.

    Attributes:
      path: path of its module, which expressions match.
      kind: class name of its module; "" if its code did not run.
      name: the parameter's name in the module.
      shape: shape of the parameter.
      recipe: recipe of its products, or None if they are not converted.
      reason: why there is no recipe, or why kernels do not compute it; "" otherwise.
      own_code: whether the module is not one of Flax, so that code of the model may multiply the matrix.
    """

    path: str
    kind: str
    name: str
    shape: tuple[int, ...]
    recipe: Recipe | None
    reason: str = ""
    own_code: bool = False

    @property
    def parameter(self) -> tuple[str, str, tuple[int, ...]]:
        """Path, name and shape."""
        return self.path, self.name, self.shape


class Conversion(list[Matrix]):
    """Every `Matrix` of a model; prints as a table, a summary and the products of the recipes.

    >>> from swjax.recipes import RECIPES
    >>> conversion = Conversion()
    >>> conversion.note("mlp/fc1", "Linear", {"kernel": (64, 256)}, RECIPES["switchback"])
    >>> conversion.note("embed", "Embed", {"embedding": (100, 64)}, None, "takes no dot_general")
    >>> print(conversion)
    mlp/fc1  Linear.kernel    64 x 256  switchback
    embed    Embed.embedding  100 x 64  -           takes no dot_general
    1 of 2 matrices converted, 16,384 of 22,784 elements (72%)
    switchback: fwd int8 row x int8 tensor, dgrad int8 row x int8 tensor, wgrad not quantized

    Attributes:
      if_empty: printed after the summary if no matrix was noted.
      line: code that applies `swjax.quantized`, printed if code of the model may multiply other matrices.
      fused: paths of the gated MLPs whose layers share memory passes.
    """

    if_empty = ""
    line = 'swjax.quantized(fn, "llm")'

    def __init__(self, matrices: Iterable[Matrix] = ()) -> None:
        super().__init__(matrices)
        self.fused: list[str] = []

    def note(
        self,
        path: str,
        kind: str,
        shapes: Mapping[str, tuple[int, ...]],
        recipe: Recipe | None,
        reason: str = "",
        own_code: bool = False,
    ) -> None:
        """Adds the parameters of a module that are matrices, each once.

        Modules that share a scope have the same parameters; the row is that of the first, the innermost.

        Args:
          path, kind, recipe, reason, own_code: see `Matrix`.
          shapes: {name: shape} of the module's own parameters.
        """
        for name, shape in shapes.items():
            if len(shape) < 2 or name in _VECTORS:
                continue
            matrix = Matrix(path, kind, name, tuple(shape), recipe, reason, own_code)
            known = [
                number for number, other in enumerate(self) if other.parameter == matrix.parameter
            ]
            if known and self[known[0]].reason == NOT_RUN:
                del self[known.pop()]
            if not known:
                self.append(matrix)

    @property
    def unreached(self) -> list[Matrix]:
        """The matrices that code of the model may multiply, which only `swjax.quantized` converts."""
        own = [matrix for matrix in self if matrix.own_code and matrix.reason == TAKES_NONE]
        return [matrix for matrix in own if not kept_kind(f"{matrix.path}/{matrix.name}")]

    def __str__(self) -> str:
        rows = [
            (
                m.path or ".",
                f"{m.kind}.{m.name}".lstrip("."),
                " x ".join(map(str, m.shape)),
                recipe_name(m.recipe),
                m.reason,
            )
            for m in self
        ]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        converted = [matrix for matrix in self if matrix.recipe not in (None, Recipe())]
        part, whole = elements(converted), elements(self)
        share = f"{part:,} of {whole:,} elements ({part / max(whole, 1):.0%})"
        lines.append(f"{len(converted)} of {len(self)} matrices converted, {share}")
        recipes = dict.fromkeys(m.recipe for m in self if m.recipe is not None)
        if self.fused:
            lines.append(f"fused gated MLPs: {', '.join(path or '.' for path in self.fused)}")
        if not self and self.if_empty:
            lines.append(self.if_empty)
        lines += map(_products, recipes)
        if own := self.unreached:
            kinds = ", ".join(dict.fromkeys(m.kind for m in own))
            lines.append(f"{len(own)} that {kinds} may multiply: only {self.line} converts them")
        return "\n".join(lines)


def elements(matrices: Iterable[Matrix]) -> int:
    """The number of elements of matrices."""
    return sum(math.prod(matrix.shape) for matrix in matrices)


def warn_if_only_kept(paths: Sequence[str], report: str) -> None:
    """Warns if only routers, embeddings and heads are converted; `report` is code that prints the rest.

    Models whose other layers `paths` does not reach are the usual cause.
    """
    if paths and all(kept_kind(path) in _KEPT for path in paths):
        message = f"rules quantize only {paths[0]!r}, a router, an embedding or a head; {report}"
        warnings.warn(message, stacklevel=4)


def recipe_name(recipe: Recipe | None) -> str:
    """The name of a recipe; "-" for None, "a Recipe" for one that has none."""
    return "-" if recipe is None else recipe.name or "a Recipe"


def _products(recipe: Recipe) -> str:
    """Describes the products of a recipe as "name: fwd ..., dgrad ..., wgrad ..."."""
    products = {"fwd": recipe.fwd, "dgrad": recipe.dgrad, "wgrad": recipe.wgrad}
    described = ", ".join(f"{name} {_operands(product)}" for name, product in products.items())
    return f"{recipe_name(recipe)}: {described}"


def _operands(product: Product | None) -> str:
    if product is None:
        return "not quantized"
    lhs, rhs = product.lhs, product.rhs
    described = f"{lhs.dtype} {lhs.scope} x {rhs.dtype} {rhs.scope}"
    if lhs.block and product.in_blocks:
        described += f" (blocks of {lhs.block}, scales {lhs.scale})"
    if lhs.scope != "block" and lhs.rotation > 1:
        described += f" (rotation {lhs.rotation})"
    if lhs.scope == "block":  # both operands have equal blocks
        described += f" ({lhs.block} tokens, rotation {lhs.rotation})"
    if product.outlier_threshold:
        described += f" (features from {product.outlier_threshold:g} not quantized)"
    if product.outlier_quantile:
        described += f" (beyond the quantile {product.outlier_quantile:g} not quantized)"
    return described


def refuse_dot_general_cls(path: str, module: Any) -> None:
    """Raises a ValueError if a layer would ignore its `dot_general`."""
    if getattr(module, "dot_general_cls", None) is not None:
        raise ValueError(
            f"the layer {path!r} has a dot_general_cls, which overrides any dot_general: "
            f"build it without a dot_general_cls, or exclude it from the expressions"
        )


def warn_of_own_product(path: str, replaced: Any) -> None:
    """Warns if a recipe replaces a product that is not JAX's: its code does not run anymore."""
    function = replaced.func if isinstance(replaced, partial) else replaced
    module = getattr(function, "__module__", None) or ""
    if function is not None and module.split(".")[0] not in ("jax", "flax", "swjax"):
        name = getattr(function, "__name__", type(function).__name__)
        warnings.warn(
            f"the recipe of the layer {path!r} replaces its product {name!r} of {module}, whose options are "
            "lost: exclude the layer, or give it a functools.partial of jax.lax.dot_general",
            stacklevel=4,
        )
