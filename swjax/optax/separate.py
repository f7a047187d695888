"""An optimizer state in which every tensor has its own counts and random keys.

An optimizer that receives a single tensor, with None for the rest of its tree, has a state with two kinds of
leaves. A *common* leaf does not depend on the tensor: a count, a hyper-parameter, a random key. An *own* leaf
belongs to the tensor: a moment. The states of all tensors are stored as one state, with the structure of the
optimizer's state for the whole tree. Own leaves keep their places, and a common leaf has one entry per tensor
or block. So states with the structure of the parameters keep that structure.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from swjax.optax.tensors import TensorValues, blocks_by_name, join

Path = tuple[Any, ...]


class Tensor(NamedTuple):
    """A parameter, and the state of an optimizer that receives one of its blocks.

    Attributes:
      axes: axes of the parameter that enumerate its blocks.
      blocks: sizes along these axes.
      shape: shape of one block.
      spec: sharding of the block axes, on an explicit mesh.
      state: tree structure of the state.
      leaves: {path: shape and dtype} of the state's leaves.
      shaped: for each leaf whether it is an own leaf with the block's shape. If so, the block axes are where
        the parameter has them; otherwise they are in front.
    """

    axes: tuple[int, ...]
    blocks: tuple[int, ...]
    shape: tuple[int, ...]
    spec: jax.P
    state: Any
    leaves: dict[Path, jax.ShapeDtypeStruct]
    shaped: tuple[bool, ...]

    def placed(self, leaf: jax.Array) -> jax.Array:
        """A leaf with its block axes in front and an equal sharding, for `jax.vmap` on explicit meshes."""
        spec = (*self.spec, *[None] * (leaf.ndim - len(self.spec)))
        if not self.blocks or tuple(jax.typeof(leaf).sharding.spec) == spec:
            return leaf
        return jax.reshard(leaf, jax.P(*spec))

    def map_blocks(
        self, function: Callable, shaped: Sequence[bool], shaped_out: Sequence[bool]
    ) -> Callable:
        """Maps a function of arrays of one block over the block axes.

        Args:
          function: (*arrays) -> tuple of arrays.
          shaped: for each argument whether it has the parameter's axes; if not, block axes are in front.
          shaped_out: the same for each result.
        """
        for outer, axis in reversed(list(enumerate(self.axes))):
            ins, outs = (
                tuple(axis - outer if has else 0 for has in which) for which in (shaped, shaped_out)
            )
            function = jax.vmap(function, ins, outs)
        return function


class SeparateStates:
    """Splits a joined state into the states of single tensors, and joins such states.

    Args:
      init: the optimizer's init function.
      params: tree of arrays.
      axes: for each leaf of `params` the axes that enumerate blocks.
    """

    def __init__(self, init: Callable[[Any], Any], params: Any, axes: list[tuple[int, ...]]):
        self._treedef: jax.tree_util.PyTreeDef
        leaves, self._treedef = jax.tree.flatten(params)
        nothing = self._treedef.unflatten([None] * len(leaves))
        self._common, _ = _by_path(jax.eval_shape(init, nothing))
        whole = jax.eval_shape(init, params)
        self._paths = list(_by_path(whole)[0])
        self._structure: jax.tree_util.PyTreeDef = jax.tree.structure(whole)
        self._blocks = blocks_by_name(params, axes)
        self.tensors = [
            self._tensor(init, i, p, kept) for i, (p, kept) in enumerate(zip(leaves, axes))
        ]
        for tensor in self.tensors:
            for path in tensor.leaves:
                if path not in self._common and path not in self._paths:
                    raise ValueError(
                        "per_tensor_guard's inner optimizer must have the same state for a block as for its "
                        f"stack, got {jax.tree_util.keystr(path)} for a block alone: a function that chooses "
                        "parameters by shape sees blocks; choose by name, or pass a tree of bools"
                    )
        # Joined leaves that are a flat vector, rather than one entry of the leaf's shape per block.
        self._raveled = _paths_of_values(whole)
        for path in self._common:
            if len({t.leaves[path].shape for t in self.tensors if path in t.leaves}) > 1:
                self._raveled.add(path)

    def only(self, i: int, leaf: Any) -> Any:
        """The tree with one leaf, and None in place of the others, so that names are kept."""
        leaves = [None] * self._treedef.num_leaves
        return self._treedef.unflatten([*leaves[:i], leaf, *leaves[i + 1 :]])

    def _tensor(self, init, i: int, p, axes: tuple[int, ...]) -> Tensor:
        blocks = tuple(p.shape[axis] for axis in axes)
        shape = tuple(size for axis, size in enumerate(p.shape) if axis not in axes)
        leaves, state = _by_path(
            jax.eval_shape(init, self.only(i, jax.ShapeDtypeStruct(shape, p.dtype)))
        )
        spec = jax.P(*(jax.typeof(p).sharding.spec[axis] for axis in axes))
        shaped = tuple(x.shape == shape and path not in self._common for path, x in leaves.items())
        return Tensor(axes, blocks, shape, spec, state, leaves, shaped)

    def join(self, states: Sequence[Sequence[jax.Array]]) -> optax.OptState:
        """Joins the leaves of each tensor's state, as `split` returns them, into one state."""
        named = [dict(zip(t.leaves, leaves)) for t, leaves in zip(self.tensors, states)]
        whole = {}
        for tensor, leaves in zip(self.tensors, named):
            for (path, leaf), shaped in zip(leaves.items(), tensor.shaped):
                whole[path] = leaf if shaped else tensor.placed(leaf)
        # In the order of the state: the order of a set differs between processes, and so would the program.
        for path in filter(self._common.__contains__, self._paths):
            whole[path] = self._join(path, [leaves[path] for leaves in named])
        state = self._structure.unflatten([whole[path] for path in self._paths])
        return jax.tree.map(self._with_names, state, is_leaf=_is_values)

    def split(self, state: optax.OptState) -> list[list[jax.Array]]:
        """Returns the leaves of each tensor's state; stacked tensors keep their block axes."""
        whole, _ = _by_path(state)
        ends = dict.fromkeys(self._paths, 0)
        states = []
        for tensor in self.tensors:
            leaves = []
            for (path, leaf), shaped in zip(tensor.leaves.items(), tensor.shaped):
                x = whole[path]
                if path in self._common:
                    start = ends[path]
                    ends[path] += math.prod(tensor.blocks) * self._entries(path, leaf)
                    x = x[start : ends[path]].reshape((*tensor.blocks, *leaf.shape))
                leaves.append(x if shaped else tensor.placed(x))
            states.append(leaves)
        return states

    def _entries(self, path: Path, leaf) -> int:
        """The number of entries that one block has in the joined leaf."""
        return math.prod(leaf.shape) if path in self._raveled else 1

    def _join(self, path: Path, leaves: list[jax.Array]) -> jax.Array:
        like = self.tensors[0].leaves[path] if self.tensors else self._common[path]
        return join(leaves, () if path in self._raveled else like.shape, like.dtype)

    def _with_names(self, node):
        if not _is_values(node):
            return node
        names = {name: shape for name, shape in self._blocks.items() if name in node.blocks}
        return TensorValues(node.values, names)


def _is_values(x) -> bool:
    return isinstance(x, TensorValues)


def _by_path(tree) -> tuple[dict[Path, Any], Any]:
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    return dict(named), structure


def _paths_of_values(tree) -> set[Path]:
    """Paths of the vectors in `TensorValues`, which already have one entry per tensor."""
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_values)
    return {(*path, jax.tree_util.GetAttrKey("values")) for path, x in named if _is_values(x)}
