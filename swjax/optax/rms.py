"""The RMS values in a StableAdamW state: one flat vector, and the names that belong to it."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


class Layout(tuple):
    """(path, shape of the blocks) of every tensor, in the order of the parameter tree.

    It is static: reading RMS values by name inside a compiled function costs nothing. The empty layout
    equals every other, because `optax.tree.map_params` compares the state with that of a placeholder
    that has no tensors; their vectors differ in length, so a compilation cache never confuses them.
    """

    def __eq__(self, other):
        return not self or not other or super().__eq__(other)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(Layout)

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape in self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TensorRMS:
    """The RMS of every tensor, or of every block of a stacked one.

    One vector, not a tree like the parameters: functions over parameter trees (shardings, decay) would
    take a tree of scalars for parameters.

    Attributes:
      values: [n] float32.
      layout: static; which of the n belong to which path.
    """

    values: jax.Array
    layout: Layout = field(metadata={"static": True})

    @classmethod
    def zeros(cls, params, axes: list[tuple[int, ...]]) -> "TensorRMS":
        """The state before the first step.

        Args:
          params: tree of arrays.
          axes: for each of its leaves, the axes that enumerate blocks.
        """
        layout = layout_of(params, axes)
        return cls(jnp.zeros(layout.size, jnp.result_type(float)), layout)

    def replace(self, values: list[jax.Array]) -> "TensorRMS":
        """The same layout with the values of each tensor in turn."""
        flat = [_replicate(x).reshape(-1).astype(self.values.dtype) for x in values]
        return TensorRMS(jnp.concatenate(flat) if flat else self.values, self.layout)

    def by_path(self) -> dict[str, jax.Array]:
        """The values by name, each a scalar or of the shape of the blocks."""
        return split_by_path(self.values, self.layout)


def layout_of(params, axes: list[tuple[int, ...]]) -> Layout:
    """The layout of one value for each tensor, or for each of its blocks; see `TensorRMS.zeros`."""
    named = jax.tree_util.tree_leaves_with_path(params)
    return Layout(
        (path_name(path), tuple(p.shape[axis] for axis in kept))
        for (path, p), kept in zip(named, axes, strict=True)
    )


def split_by_path(values: jax.Array, layout: Layout) -> dict[str, jax.Array]:
    """A vector's values by name. Leading axes, which `jax.vmap` over an optimizer gives, stay in front."""
    named, start = {}, 0
    for path, shape in layout:
        stop = start + math.prod(shape)
        named[path] = values[..., start:stop].reshape(*values.shape[:-1], *shape)
        start = stop
    return named


def rms_by_path(opt_state) -> dict[str, jax.Array]:
    """The RMS of every tensor at the last step, from any optimizer state that contains StableAdamW's.

    Works inside and outside jit, and does not wait for the device.

    Args:
      opt_state: the state of `stable_adamw`, or of a chain or wrapper around it.

    Returns:
      "path/of/the/parameter" -> RMS: a scalar, or [blocks] where `block_axes` makes blocks.

    Raises:
      ValueError: there is no StableAdamW state in it.

    >>> from swjax.optax import stable_adamw
    >>> params = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    >>> optimizer = stable_adamw(1e-3)
    >>> _, state = optimizer.update(params, optimizer.init(params), params)
    >>> {path: float(rms) for path, rms in rms_by_path(state).items()}
    {'layer/bias': 1.0, 'layer/kernel': 1.0}
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, TensorRMS))
    found = [node.by_path() for node in nodes if isinstance(node, TensorRMS)]
    if not found:
        raise ValueError(
            "opt_state holds no StableAdamW state, so no RMS: pass the state of swjax.optax.stable_adamw"
        )
    return {path: rms for named in found for path, rms in named.items()}


def path_name(path) -> str:
    """Keys joined by "/", without the ".value" that a flax.nnx Variable adds to its own path."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _replicate(x: jax.Array) -> jax.Array:
    """One layer's RMS follows its layer's sharding; explicit meshes concatenate only like with like."""
    return x if jax.typeof(x).sharding.is_fully_replicated else jax.reshard(x, jax.P())
