"""`dot_general`: the linear layer with the signature of `jax.lax.dot_general` or `jnp.einsum`, for Flax."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import opt_einsum
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from swjax import recipes
from swjax.kernels import dispatch
from swjax.kernels.reference import QTensor
from swjax.linear.api import switchback
from swjax.linear.interception import intercepted
from swjax.linear.layouts import Layout
from swjax.linear.sharding import map_experts
from swjax.recipes import Recipe

Dimensions = tuple[int, ...]
DimensionNumbers = tuple[tuple[Dimensions, Dimensions], tuple[Dimensions, Dimensions]]


@dataclass(frozen=True)
class DotGeneral:
    """A `jax.lax.dot_general` that follows a recipe; the function `dot_general` creates it.

    Objects with equal attributes are equal, and they pickle.

    Attributes:
      recipe: recipe of the products.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      layout: shardings of both operands as matrices; see `swjax.Layout`.
    """

    recipe: Recipe
    implementation: str | None = None
    layout: Layout | None = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array | QTensor,
        dimension_numbers: DimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: NamedSharding | P | None = None,
    ) -> jax.Array:
        """Like `jax.lax.dot_general`; `rhs` may also be a QTensor, as `swjax.quantize_weight` returns it.

        Without `preferred_element_type` the result has the dtype of `lhs`, whatever that of `rhs`. The values
        of a QTensor must be [*batch, *columns, *contracted]; `dimension_numbers` gives the numbers of axes.

        Raises:
          ValueError: see `swjax.switchback`; or, on a mesh with explicit axes, the operands are sharded along
            different contracted dimensions.
          TypeError: the contracted or the batch dimensions of the operands differ.
        """
        options: dict[str, Any] = {"precision": precision}
        options["preferred_element_type"] = preferred_element_type
        product = lambda: self.multiply(lhs, rhs, dimension_numbers, **options)
        y = intercepted("dot_general", product, rhs, lhs, rhs, dimension_numbers, **options)
        return y if out_sharding is None else jax.reshard(y, out_sharding)

    def multiply(
        self,
        lhs: jax.Array,
        rhs: jax.Array | QTensor,
        dimension_numbers: DimensionNumbers,
        *,
        precision: jax.lax.PrecisionLike,
        preferred_element_type: jax.typing.DTypeLike | None,
    ) -> jax.Array:
        """The product of `__call__` and `einsum`, which no other library intercepts."""
        x, w, columns, order = as_linear(lhs, rhs, dimension_numbers)
        linear: Callable[..., Any] = partial(
            switchback,
            recipe=self.recipe,
            out_dtype=preferred_element_type,
            precision=precision,
            implementation=self.implementation,
            layout=self.layout,
        )
        _, (batch, _) = dimension_numbers
        for _ in batch:
            linear = jax.vmap(linear)
        rows = x.shape[:-1]
        y = map_experts(linear, x, w, self.layout) if batch else linear(x, w)
        y = y.reshape(*rows, *columns)
        return y.transpose(*range(len(rows)), *(len(rows) + axis for axis in order))

    def einsum(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array,
        *,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: NamedSharding | P | None = None,
        optimize: Any = "optimal",
    ) -> jax.Array:
        """Like `jax.numpy.einsum` of an activation and a weight, for `einsum_op=` of `flax.nnx.Einsum`.

        Without `preferred_element_type` the result has the dtype of `lhs`, whatever that of `rhs`. `optimize`
        changes nothing: two operands have one order.

        Indices of both operands and the output, such as those of experts, are batch dimensions: each has its
        own product.

        Raises:
          ValueError: an operand repeats an index, or has one that neither the other operand nor the output
            has; or see `swjax.switchback`.
          TypeError: an index has two sizes.

        >>> import jax.numpy as jnp
        >>> x, w = jnp.ones((2, 6, 3)), jnp.ones((4, 3, 5))
        >>> dot_general("switchback").einsum("btd,ndh->btnh", x, w).shape
        (2, 6, 4, 5)
        """
        del optimize
        options: dict[str, Any] = {"precision": precision}
        options["preferred_element_type"] = preferred_element_type
        dimension_numbers, order = einsum_dimensions(equation, lhs, rhs)
        product = lambda: self.multiply(lhs, rhs, dimension_numbers, **options).transpose(order)
        y = intercepted("einsum", product, rhs, equation, lhs, rhs, **options)
        return y if out_sharding is None else jax.reshard(y, out_sharding)


def as_linear(
    lhs: jax.Array, rhs: jax.Array | QTensor, dimension_numbers: DimensionNumbers
) -> tuple[jax.Array, jax.Array | QTensor, Dimensions, Dimensions]:
    """Converts the operands of a `jax.lax.dot_general` to those of a linear layer.

    On meshes with explicit axes a reshape merges dimensions only if the sharded ones come first.

    Args:
      lhs, rhs, dimension_numbers: see `DotGeneral`.

    Returns:
      x [*batch, *rows, k], w [*batch, k, n], the column dimensions of w, whose product is n, and the
      transposition of these dimensions to those of the result.

    Raises:
      ValueError: the operands are sharded along different contracted dimensions.
      TypeError: the contracted or the batch dimensions differ; the message is that of `jax.lax.dot_general`.

    >>> import jax.numpy as jnp
    >>> x, w, columns, order = as_linear(jnp.ones((2, 3)), jnp.ones((3, 4, 5)), (((1,), (0,)), ((), ())))
    >>> x.shape, w.shape, columns, order
    ((2, 3), (3, 20), (4, 5), (0, 1))
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    values = rhs.values if isinstance(rhs, QTensor) else rhs
    batch = _shape(lhs, lhs_batch)
    if isinstance(rhs, QTensor):  # [*batch, *columns, *contracted]
        rhs_contract = tuple(range(values.ndim - len(rhs_contract), values.ndim))
        rhs_batch = tuple(range(len(rhs_batch)))
    _check_equal("contracting dimensions", _shape(lhs, lhs_contract), _shape(values, rhs_contract))
    of_both = "lhs batch dimensions and rhs batch dimensions"
    _check_equal(of_both, batch, _shape(values, rhs_batch))

    in_lhs, in_rhs = _sharded(lhs, lhs_contract), _sharded(values, rhs_contract)
    if in_lhs and in_rhs and in_lhs != in_rhs:
        specs = " and ".join(str(jax.typeof(x).sharding.spec) for x in (lhs, values))
        raise ValueError(
            f"a recipe needs operands that are sharded along the same contracted dimensions, got {specs}: "
            "reshard one of them with jax.reshard"
        )
    contracted = _first(in_lhs or in_rhs, len(lhs_contract))
    lhs_contract, rhs_contract = (
        tuple(axes[i] for i in contracted) for axes in (lhs_contract, rhs_contract)
    )
    lhs_free = _remaining(lhs, lhs_contract, lhs_batch)
    rhs_free = _remaining(values, rhs_contract, rhs_batch)
    places = _first(_sharded(values, rhs_free), len(rhs_free))
    rhs_free = tuple(rhs_free[i] for i in places)
    order = tuple(places.index(i) for i in range(len(places)))

    k = math.prod(_shape(lhs, lhs_contract))
    x = lhs.transpose(*lhs_batch, *lhs_free, *lhs_contract).reshape(
        *_shape(lhs, (*lhs_batch, *lhs_free)), k
    )
    columns = _shape(values, rhs_free)
    if isinstance(rhs, QTensor):  # to [*batch, n, k]
        scale, axes = rhs.scale, (*rhs_batch, *rhs_free, *rhs_contract)
        if scale.ndim == values.ndim:  # otherwise each matrix has one scale
            scale = scale.transpose(axes)
        q = QTensor(values.transpose(axes).reshape(*batch, -1, k), scale.reshape(*batch, -1, 1))
        return x, q, columns, order
    w = rhs.transpose(*rhs_batch, *rhs_contract, *rhs_free)
    return x, w.reshape(*batch, k, math.prod(columns)), columns, order


def _sharded(array: jax.Array, axes: Dimensions) -> Dimensions:
    """The places in `axes` of dimensions that are sharded, on a mesh with explicit axes."""
    spec = jax.typeof(array).sharding.spec
    return tuple(place for place, axis in enumerate(axes) if spec[axis] is not None)


def _first(places: Dimensions, count: int) -> Dimensions:
    """The numbers below `count`, those of `places` first."""
    return (*places, *(place for place in range(count) if place not in places))


def _check_equal(dimensions: str, of_lhs: tuple[int, ...], of_rhs: tuple[int, ...]) -> None:
    if of_lhs != of_rhs:
        raise TypeError(
            f"dot_general requires {dimensions} to have the same shape, got {of_lhs} and {of_rhs}."
        )


def einsum_dimensions(
    equation: str, lhs: jax.Array, rhs: jax.Array
) -> tuple[DimensionNumbers, Dimensions]:
    """The dimension numbers of an einsum of two operands, and the transposition of its `dot_general`.

    Raises:
      ValueError: see `DotGeneral.einsum`.

    >>> import jax.numpy as jnp
    >>> einsum_dimensions("btd,ndh->bnth", jnp.ones((2, 6, 3)), jnp.ones((4, 3, 5)))
    ((((2,), (1,)), ((), ())), (0, 2, 1, 3))
    """
    operands, output, _ = opt_einsum.parser.parse_einsum_input((equation, lhs, rhs))
    left, right = operands.split(",")
    for operand, other in ((left, right), (right, left)):
        for index in operand:
            if operand.count(index) > 1 or index not in other + output:
                raise ValueError(
                    "a recipe applies to an einsum that multiplies an activation with a weight, but in "
                    f"{equation!r} the index {index!r} is repeated or summed in one operand: "
                    "exclude the layer from the recipes"
                )
    contracted = [index for index in left if index in right and index not in output]
    batch = [index for index in left if index in right and index in output]
    rows = [index for index in left if index not in right]
    columns = [index for index in right if index not in left]
    axes = lambda operand, indices: tuple(map(operand.index, indices))
    dimension_numbers = (
        (axes(left, contracted), axes(right, contracted)),
        (axes(left, batch), axes(right, batch)),
    )
    return dimension_numbers, axes([*batch, *rows, *columns], output)


def dot_general(
    recipe: str | Recipe = "switchback",
    *,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> DotGeneral:
    """Returns a `jax.lax.dot_general` that follows `recipe`, for modules with such an argument.

    It fits `dot_general=` of `flax.nnx.Linear`, `LinearGeneral`, `MultiHeadAttention` (`qkv_dot_general=`,
    `out_dot_general=`) and their linen counterparts; its method `einsum` fits `einsum_op=` of
    `flax.nnx.Einsum`. The left operand is the activation, the right operand the weight. Flax first casts the
    weight to the compute dtype, whereas `swjax.nnx.Linear` and `swjax.linen.Dense` quantize the fp32
    parameter itself.

    Args:
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      layout: shardings of both operands as matrices; see `swjax.Layout`.

    Returns:
      A callable with the signature of `jax.lax.dot_general`; equal arguments give equal, hashable objects.

    Raises:
      ValueError: the recipe or the implementation does not exist.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = nnx.Linear(3, 4, dot_general=dot_general("switchback"), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """
    dispatch.check(implementation)
    return DotGeneral(recipes.get(recipe), implementation, layout)


def keywords_of(replaced: Any) -> dict[str, Any]:
    """The options that the product of a layer has as a `functools.partial`; a recipe's product keeps them.

    >>> import jax.numpy as jnp
    >>> keywords_of(partial(jax.lax.dot_general, preferred_element_type=jnp.float32))
    {'preferred_element_type': <class 'jax.numpy.float32'>}
    """
    given = replaced.keywords if isinstance(replaced, partial) else {}
    return {name: given[name] for name in ("precision", "preferred_element_type") if name in given}


def _remaining(array, *used: Dimensions) -> Dimensions:
    return tuple(axis for axis in range(array.ndim) if not any(axis in axes for axes in used))


def _shape(array, axes: Dimensions) -> tuple[int, ...]:
    return tuple(array.shape[axis] for axis in axes)
