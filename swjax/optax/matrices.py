"""Which parameters are matrices, and along which axes: guessed from names and from Flax's metadata."""

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax

from swjax.kept import kept_kind_among
from swjax.optax.tensors import path_name

# Names that Flax's metadata gives the axes of stacks.
_STACKS = {"layers", "layer", "blocks", "block", "stack", "scan", "experts", "expert", "exp"}

# What the last axes of a kernel are, by the end of its path: rows, columns, or blocks with one matrix each.
_FAMILIES = {
    r"(query|key|value|[qkv]_proj)/(kernel|w)": "rcc",  # [width, heads, head]
    r"(out|o_proj|out_proj|attn_vec_einsum)/(kernel|w)": "rrc",  # [heads, head, width]
    r"q_einsum/w": "crc",  # [heads, width, head]
    r"q?kv_einsum/w": "bcrc",  # [keys and values, heads, width, head]
}


class MatrixAxes(NamedTuple):
    """The axes of a parameter that is one matrix [m, n], or a stack of matrices.

    Attributes:
      blocks: axes that enumerate matrices.
      rows, columns: axes that together are m and n.
    """

    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of_blocks(cls, blocks: tuple[int, ...], ndim: int) -> "MatrixAxes":
        """The axes of matrices [m, n], without those of blocks; (): all axes but the last two are blocks."""
        blocks = blocks or tuple(range(ndim - 2))
        m, n = (axis for axis in range(ndim) if axis not in blocks)
        return cls(blocks, (m,), (n,))

    def as_stack(self, x: jax.Array) -> jax.Array:
        """[*blocks, m, n].

        >>> MatrixAxes((), (0,), (1, 2)).as_stack(jax.numpy.ones((8, 2, 3))).shape
        (8, 6)
        """
        sizes = [x.shape[axis] for axis in self.blocks]
        m, n = (math.prod(x.shape[axis] for axis in axes) for axes in self[1:])
        return x.transpose(*self.blocks, *self.rows, *self.columns).reshape(*sizes, m, n)

    def restore(self, stack: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `as_stack`, for a parameter of this shape."""
        order = (*self.blocks, *self.rows, *self.columns)
        x = stack.reshape([shape[axis] for axis in order])
        return x.transpose([order.index(axis) for axis in range(len(shape))])


def guess_matrices(params: Any) -> list[MatrixAxes | None]:
    """The axes of each parameter; None for one that is no matrix of a hidden layer.

    Vectors, biases, norms, embeddings, heads and routers are none, see `swjax.KEPT_IN_LLMS`. The axes of a
    stack are those that Flax's metadata calls "layers" or "experts"; without metadata they are the first axes
    of a module in which a norm's scale has them and all parameters begin with them, else the axis before the
    matrix. Attention's kernels of three axes are matrices [width, heads * head], by their names in Flax,
    MaxText, Gemma and tunix. Prints once what is guessed of kernels with more than two axes.

    Args:
      params: tree of arrays, or of Flax's variables or boxes.

    >>> guess_matrices({"mlp": {"kernel": jax.numpy.ones((3, 4, 5))}, "norm": jax.numpy.ones(3)})
    swjax guesses matrices: mlp/kernel (3, 4, 5) is 3 of 4 x 5
    [MatrixAxes(blocks=(0,), rows=(1,), columns=(2,)), None]
    """
    found: list[MatrixAxes | None] = []
    guesses: dict[str, None] = {}  # an ordered set
    named = jax.tree_util.tree_leaves_with_path(params, is_leaf=_has_names)
    names = [path_name(path) for path, _ in named]
    for name, (_, leaf), stack in zip(names, named, _stacks(named)):
        arrays = jax.tree.leaves(leaf)
        if len(arrays) != 1:
            found += [None] * len(arrays)
            continue
        shape = arrays[0].shape
        axes = None if kept_kind_among(name, names) else _axes_of(name, shape, stack)
        found.append(axes)
        if axes is not None and len(shape) > 2:
            *blocks, m, n = jax.eval_shape(axes.as_stack, arrays[0]).shape
            of = f"{' x '.join(map(str, blocks))} of " if blocks else ""
            guesses[f"{re.sub(r'(?<![^/])[0-9]+(?=/)', '*', name)} {shape} is {of}{m} x {n}"] = None
    if guesses:
        _print_once("swjax guesses matrices: " + "; ".join(guesses))
    return found


def stacked_axes(params: Any) -> Any:
    """The axes of each parameter that enumerate the tensors of a stack, for `block_axes` of an optimizer.

    They are those that Flax's metadata names, and those that `guess_matrices` finds.

    Args:
      params: see `guess_matrices`.

    Returns:
      A tree like the parameters, of tuples of axes.

    >>> stacked_axes({"mlp": {"kernel": jax.numpy.ones((2, 4, 5))}, "norm": jax.numpy.ones(3)})
    swjax guesses matrices: mlp/kernel (2, 4, 5) is 2 of 4 x 5
    {'mlp': {'kernel': (0,)}, 'norm': ()}
    """
    named, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_has_names)
    guesses, axes = iter(guess_matrices(params)), []
    for (_, leaf), blocks in zip(named, _stacks(named)):
        arrays = jax.tree.leaves(leaf)
        guessed = [next(guesses) for _ in arrays]
        blocks = blocks or (guessed[0].blocks if len(guessed) == 1 and guessed[0] else ())
        axes.append(jax.tree.unflatten(jax.tree.structure(leaf), [blocks] * len(arrays)))
    return jax.tree.unflatten(structure, axes)


def _stacks(named: Sequence[tuple[tuple[Any, ...], Any]]) -> list[tuple[int, ...]]:
    """The axes of each leaf that enumerate layers, if metadata or a stacked norm tell them, otherwise ().

    A norm's scale with more than one axis is stacked, and with it the module that holds the norm, if all of
    the module's parameters begin with the same axes.
    """
    unnamed = ((path, jax.tree.leaves(leaf)) for path, leaf in named if not _names(leaf))
    shapes = {path: arrays[0].shape for path, arrays in unnamed if len(arrays) == 1}
    within = lambda path, module: path[: len(module)] == module
    modules = {
        path[:-2]: shape[:-1]
        for path, shape in shapes.items()
        if len(shape) > 1 and path_name(path[-1:]) == "scale"
    }
    stacked = {
        module: axes
        for module, axes in modules.items()
        if all(shape[: len(axes)] == axes for path, shape in shapes.items() if within(path, module))
    }
    found = []
    for path, leaf in named:
        of_modules = (len(axes) for module, axes in stacked.items() if within(path, module))
        axes = tuple(range(max(of_modules, default=0))) if path in shapes else ()
        found.append(tuple(i for i, axis in enumerate(_names(leaf)) if axis in _STACKS) or axes)
    return found


def _has_names(leaf: Any) -> bool:
    """Whether a node is a variable or box of Flax, which may name axes."""
    return hasattr(leaf, "get_metadata") or hasattr(leaf, "names")


def _names(leaf: Any) -> Sequence[Any]:
    """The names of the axes in Flax's metadata; () if there are none."""
    if hasattr(leaf, "get_metadata"):
        return leaf.get_metadata("out_sharding", None) or ()
    return getattr(leaf, "names", ())


def _axes_of(name: str, shape: tuple[int, ...], blocks: tuple[int, ...]) -> MatrixAxes | None:
    ndim = len(shape)
    if ndim < 2 or re.fullmatch(r"(.*[/_])?(bias|scale)(_table)?", name):
        return None
    rest = [axis for axis in range(ndim) if axis not in blocks]
    known = [kinds for end, kinds in _FAMILIES.items() if re.search(rf"(^|/){end}$", name)]
    kinds = known[0] if known and len(rest) >= len(known[0]) else "rc"
    if len(rest) - len(kinds) > 1 or len(rest) < 2:  # a convolution, or a stack of vectors
        return None
    kinds = kinds.rjust(len(rest), "b")
    of = lambda kind: tuple(axis for axis, each in zip(rest, kinds) if each == kind)
    axes = MatrixAxes(tuple(sorted((*blocks, *of("b")))), of("r"), of("c"))
    sizes = (math.prod(shape[axis] for axis in side) for side in axes[1:])
    return None if 1 in sizes else axes


@cache
def _print_once(message: str) -> None:
    print(message)
