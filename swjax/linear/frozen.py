"""Weights that are quantized once, because they are not trained: the base of LoRA in `swjax.quantized`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from swjax.kernels.reference import QTensor
from swjax.linear.api import quantize_weight
from swjax.recipes import Recipe

SLICE = "a slice of a stack, in each iteration of a scan"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale"],
    meta_fields=["shape", "dtype", "recipe", "reading"],
)
@dataclass(frozen=True)
class FrozenWeight:
    """A parameter as the matrix that its only kind of product reads; `swjax.quantized(...).freeze` makes it.

    Attributes:
      values: int8 or fp8 [*stack, *experts, n, k], the transpose of each matrix.
      scale: float32 [..., 1, 1], or [..., n, 1] if the recipe has one scale per output channel.
      shape, dtype: of the parameter.
      recipe: recipe of the product.
      reading: how the program makes matrices of the parameter: `str` of a `Reading`.
    """

    values: jax.Array
    scale: jax.Array
    shape: tuple[int, ...]
    dtype: Any
    recipe: Recipe
    reading: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the parameter."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def matrix(self) -> QTensor:
        """The quantized transpose, as `swjax.quantize_weight` returns it."""
        return QTensor(self.values, self.scale)


class Reading(NamedTuple):
    """How a product reads a parameter.

    Attributes:
      moves: the equations that move its elements, and `SLICE`s.
      contracted: the axes that the product sums over, after the moves, in the order of k.
      batch: the axes of experts, each of which has a matrix.
    """

    moves: tuple[Any, ...]
    contracted: tuple[int, ...]
    batch: tuple[int, ...]

    def __str__(self) -> str:
        """Equal for readings that make the same matrices."""
        moves = [
            str(m)
            if m is SLICE
            else f"{m.primitive.name}{sorted((k, str(v)) for k, v in m.params.items())}"
            for m in self.moves
        ]
        return "; ".join([*moves, f"contracted {self.contracted}, batch {self.batch}"])


def freeze(w: jax.Array, reading: Reading, recipe: Recipe) -> FrozenWeight:
    """Quantizes a parameter for its product.

    Raises:
      ValueError: the recipe's forward product reads the weight itself, see `swjax.quantize_weight`.
    """
    _, contracted, batch = reading

    def matrices(w):
        columns = [axis for axis in range(w.ndim) if axis not in {*contracted, *batch}]
        sizes = [w.shape[axis] for axis in (*batch, *contracted)]
        k = math.prod(sizes[len(batch) :])
        w = w.transpose(*batch, *contracted, *columns).reshape(*sizes[: len(batch)], k, -1)
        quantize: Callable = partial(quantize_weight, recipe=recipe)
        for _ in batch:
            quantize = jax.vmap(quantize)
        return quantize(w)

    q = jax.jit(partial(_after, reading.moves, matrices))(w)
    return FrozenWeight(q.values, q.scale, tuple(w.shape), w.dtype, recipe, str(reading))


def _after(moves: Sequence[Any], then: Callable, w: jax.Array) -> Any:
    """Applies moves and a function to each matrix of a stack."""
    for i, move in enumerate(moves):
        if move is SLICE:
            return jax.vmap(partial(_after, moves[i + 1 :], then))(w)
        bound = move.primitive.get_bind_params(move.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        w = move.primitive.bind(*functions, w, **params)
    return then(w)
