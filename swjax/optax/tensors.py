"""The tensors in a parameter tree: their names, the blocks of stacked tensors, and one value per tensor."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# {name of a tensor: sizes of its axes that enumerate blocks, () for a single block}. A size is the length
# of a tuple: code that traverses named tuples itself, as in big_vision, would take an int for a leaf.
Blocks = dict[str, tuple[tuple[tuple[()], ...], ...]]


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf: its keys joined by "/".

    Args:
      path: keys, as in `jax.tree_util.tree_leaves_with_path`. The ".value" at the end, which a flax.nnx
        Variable adds, is dropped.

    >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({"layers": [{"kernel": 0}]})
    >>> path_name(path)
    'layers/0/kernel'
    """
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def nodes_of(tree: Any, *kinds: type) -> list[Any]:
    """The nodes of some types in a tree, such as the state of an optimizer; not those inside of others.

    >>> nodes_of([{"a": 1}, 2], dict)
    [{'a': 1}]
    """
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def as_arrays(tree: Any) -> Any:
    """The tree with Python and NumPy scalars converted to arrays; shapes without values are unchanged."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)


def bools_like(name: str, tree: Any, params: Any) -> Any:
    """Returns a tree of bools like the parameters.

    Args:
      name: of the argument, for the error.
      tree: such a tree, a prefix of it, or a function from the parameters to one of these.
      params: the parameters.

    Raises:
      ValueError: the tree is a single bool, and the parameters are more than one array; or it has other
        leaves than bools.
    """
    if not jax.tree.leaves(params):  # as the placeholders of optax.tree.map_params
        return params
    is_leaf = jax.tree_util.all_leaves
    if _is_function(tree):
        tree = tree(params)
    elif is_leaf([tree]) and not is_leaf([params]):
        raise ValueError(
            f"{name} must be a tree of bools like the parameters, or a function, got {tree}: under "
            f"optax.inject_hyperparams add {name!r} to static_args, or optax calls it as a schedule"
        )
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, bool) and getattr(leaf, "dtype", None) != np.bool_:
            raise ValueError(
                f"{name} must be a tree of bools like the parameters, got the leaf {leaf!r}"
            )
    return jax.tree.broadcast(tree, params)


def resolve_mask(mask: Any | Callable[[Any], Any] | None, params: Any) -> list[bool]:
    """Whether each parameter decays: one bool per leaf; see `bools_like`. None means all."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    return jax.tree.leaves(bools_like("mask", mask, params))


def require_shapes(optimizer: str, params: Any, trees: dict[str, Any]) -> None:
    """Raises an error for other trees or shapes than those of the parameters, because arithmetic broadcasts.

    Args:
      optimizer: name of the optimizer, for the error.
      params: the parameters.
      trees: {what the arrays are: a tree like the parameters}.
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(params)
    remedy = "pass the gradients and the state of these parameters"
    for kind, tree in trees.items():
        try:
            leaves = structure.flatten_up_to(tree)
        except ValueError as error:
            raise ValueError(
                f"{optimizer} needs a {kind} of each parameter, got another tree ({error}): {remedy}"
            ) from error
        for (path, p), x in zip(named, leaves, strict=True):
            shape = getattr(x, "shape", x)  # None and placeholders stay
            if shape != p.shape:
                raise ValueError(
                    f"{optimizer} needs a {kind} of shape {p.shape} for parameter {path_name(path)!r}, got "
                    f"{shape}: {remedy}"
                )


def _is_function(tree: Any) -> bool:
    """Whether it is a function of the parameters; a tree may be callable too, such as a flax.nnx.Module."""
    return callable(tree) and jax.tree_util.all_leaves([tree])


def cast_like(tree: Any, other: Any) -> Any:
    """Casts each array of a tree to the dtype of the array in the same place of another tree."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype), tree, other)


def resolve_block_axes(
    block_axes: Any | Callable[[Any], Any] | None, params: Any
) -> list[tuple[int, ...]]:
    """The axes of each parameter that enumerate blocks, non-negative and ascending.

    Args:
      block_axes: the argument of `stable_adamw`.
      params: tree of arrays.

    Returns:
      One tuple of axes per leaf of `params`.

    Raises:
      ValueError: a parameter lacks an axis, or an axis is no int.

    >>> resolve_block_axes({"blocks": -3, "head": None}, {"blocks": jnp.ones((2, 4, 3)), "head": jnp.ones(3)})
    [(0,), ()]
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    if block_axes is None or not named:  # placeholders of optax.tree.map_params have no leaves
        return [()] * len(named)

    def is_axes(x):
        return x is None or (isinstance(x, tuple) and all(isinstance(axis, int) for axis in x))

    def as_set(axes):  # makes a leaf, unlike None and tuples
        numbers = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        is_number = lambda x: isinstance(x, int | np.integer) and not isinstance(x, bool)
        if not all(map(is_number, numbers)):
            raise ValueError(
                f"block_axes must be None, an int or a tuple of ints, got {axes!r}: under "
                "optax.inject_hyperparams add 'block_axes' to static_args"
            )
        return frozenset(numbers)

    tree = block_axes(params) if _is_function(block_axes) else block_axes
    sets = jax.tree.broadcast(jax.tree.map(as_set, tree, is_leaf=is_axes), params)
    return [_ascending(s, path, p) for s, (path, p) in zip(jax.tree.leaves(sets), named)]


def _ascending(axes, path, p) -> tuple[int, ...]:
    outside = [axis for axis in axes if not -p.ndim <= axis < p.ndim]
    if outside:
        raise ValueError(
            f"block_axes={outside[0]} is not an axis of parameter {path_name(path)!r} of shape {p.shape}: "
            f"give an axis that it has, or None for one RMS"
        )
    return tuple(sorted({axis % p.ndim for axis in axes}))


class TensorValues(NamedTuple):
    """One value per tensor, or per block of a stacked tensor, as part of an optimizer's state.

    JAX sees one leaf, `values`. Names and shapes are static, so reading a value by name inside a compiled
    function is free. Functions that shard or decay parameters would mistake a tree like the parameters for
    parameters. For Flax and pickle it is a named tuple of standard containers.

    Attributes:
      values: [..., n], with tensors in the order of the parameter tree. `jax.vmap` over an optimizer adds the
        leading axes.
      blocks: static; the blocks of each tensor, from `blocks_by_name`.
    """

    values: jax.Array
    blocks: Blocks

    @classmethod
    def zeros(cls, blocks: Blocks, dtype: jax.typing.DTypeLike) -> "TensorValues":
        """Zeros for the blocks that `blocks_by_name` finds."""
        size = sum(math.prod(map(len, sizes)) for sizes in blocks.values())
        return cls(jnp.zeros(size, dtype), blocks)

    @classmethod
    def of(
        cls, blocks: Blocks, values: Sequence[jax.Array], dtype: jax.typing.DTypeLike
    ) -> "TensorValues":
        """Concatenates the values of the tensors, each with the shape of its blocks."""
        return cls(join([x.astype(dtype) for x in values], dtype), blocks)

    def by_path(self) -> dict[str, jax.Array]:
        """The values by name, each a scalar or an array with the shape of the blocks.

        Raises:
          ValueError: the names are unknown, as in the state of a placeholder.
        """
        if not self.blocks and self.values.size:
            raise ValueError(
                f"the names of {self.values.size} values are unknown: read a state from `init` or `update`"
            )
        named, start = {}, 0
        for path, sizes in self.blocks.items():
            shape = tuple(map(len, sizes))
            stop = start + math.prod(shape)
            named[path] = self.values[..., start:stop].reshape((*self.values.shape[:-1], *shape))
            start = stop
        return named


class _Layout:
    """`TensorValues.blocks` with a comparison for JAX.

    `optax.tree.map_params` compares a state with that of a placeholder without tensors, whose blocks are
    unknown, and returns the latter's structure. Unknown blocks equal any others, and become these.
    """

    def __init__(self, blocks: Blocks):
        self.blocks = blocks

    def __eq__(self, other):
        self.blocks, other.blocks = self.blocks or other.blocks, other.blocks or self.blocks
        return list(self.blocks.items()) == list(other.blocks.items())

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(_Layout)


jax.tree_util.register_pytree_with_keys(
    TensorValues,
    lambda x: (((jax.tree_util.GetAttrKey("values"), x.values),), _Layout(x.blocks)),
    lambda layout, children: TensorValues(next(iter(children)), layout.blocks),
    lambda x: ((x.values,), _Layout(x.blocks)),
)


def blocks_by_name(params: Any, axes: list[tuple[int, ...]]) -> Blocks:
    """The blocks of each parameter along the axes from `resolve_block_axes`.

    >>> blocks_by_name({"blocks": jnp.ones((2, 4, 3)), "head": jnp.ones(3)}, [(0,), ()])
    {'blocks': (((), ()),), 'head': ()}
    """
    named = leaves_by_name(params).items()
    return {
        name: tuple(((),) * p.shape[axis] for axis in kept)
        for (name, p), kept in zip(named, axes, strict=True)
    }


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their different names."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        named[jax.tree_util.keystr(path) if name in named else name] = leaf  # "a/b" and ["a"]["b"]
    return named


def join(arrays: Sequence[jax.Array], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Concatenates the elements of arrays of this dtype.

    The result is replicated, because explicit meshes concatenate only arrays with equal sharding.
    """
    flat = [_replicate(x).reshape(-1) for x in arrays]
    return jnp.concatenate(flat) if flat else jnp.zeros(0, dtype)


def _replicate(x: jax.Array) -> jax.Array:
    return x if jax.typeof(x).sharding.is_fully_replicated else jax.reshard(x, jax.P())
