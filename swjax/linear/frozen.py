"""Weights that are quantized once, because they are not trained: the base of LoRA in `swjax.quantized`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

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
      values: int8 or fp8 [*stack, n, k], the transpose of each matrix.
      scale: float32 [*stack, 1, 1], or [*stack, n, 1] if the recipe has one scale per output channel.
      shape, dtype: of the parameter.
      recipe: recipe of the product.
      reading: how the program makes matrices of the parameter, see `reading_of`.
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


def reading_of(moves: Sequence[Any], contracted: Sequence[int]) -> str:
    """Describes the moves of a parameter to its product, which sums over these axes of the result."""
    described = [
        m if m is SLICE else f"{m.primitive.name}{sorted((k, str(v)) for k, v in m.params.items())}"
        for m in moves
    ]
    return "; ".join([*described, f"contracted {tuple(contracted)}"])


def freeze(
    w: jax.Array, moves: Sequence[core.JaxprEqn | str], contracted: Sequence[int], recipe: Recipe
) -> FrozenWeight:
    """Quantizes a parameter for its product.

    Args:
      w: the parameter.
      moves: the equations that move its elements, and `SLICE`s.
      contracted: the axes that the product sums over, after the moves, in the order of k.
      recipe: recipe of the product.

    Raises:
      ValueError: the recipe's forward product reads the weight itself, see `swjax.quantize_weight`.
    """

    def matrix(w):
        columns = [axis for axis in range(w.ndim) if axis not in contracted]
        k = [w.shape[axis] for axis in contracted]
        w = w.transpose(*contracted, *columns).reshape(math.prod(k), -1)
        return quantize_weight(w, recipe)

    q = jax.jit(partial(_after, moves, matrix))(w)
    like = tuple(w.shape), jnp.dtype(w.dtype)
    return FrozenWeight(q.values, q.scale, *like, recipe, reading_of(moves, contracted))


def _after(moves: Sequence[Any], then: Callable, w: jax.Array) -> Any:
    """Applies moves and a function to each matrix of a stack."""
    for i, move in enumerate(moves):
        if move is SLICE:
            return jax.vmap(partial(_after, moves[i + 1 :], then))(w)
        bound = move.primitive.get_bind_params(move.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        w = move.primitive.bind(*functions, w, **params)
    return then(w)
