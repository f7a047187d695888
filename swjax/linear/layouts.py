"""How the arrays of a linear layer are sharded: `Layout` as users say it, `Spec` as plans say it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from swjax.kernels.reference import QTensor

Axes = tuple[str, ...]  # mesh axes that split one dimension of an array, the slowest first


class Spec(tuple[Axes, ...]):
    """The axes that split each dimension of an array. As a subclass of tuple it is a leaf of trees."""


TOKENS = P(("data", "fsdp"))  # where swjax's own trainer puts the batch


@dataclass(frozen=True)
class Layout:
    """Where the operands of a linear layer lie, for meshes whose axes XLA is free to use (`AxisType.Auto`).

    Such arrays do not tell while a function is traced how they are split; this does. On a mesh with explicit
    axes the types of the arrays tell, and a layout is not looked at. Axes that the mesh does not have, that
    are manual, or whose size does not divide the dimension, count as not splitting it.

    Attributes:
      w: spec of the weight [k, n] at rest.
      tokens: spec of the leading dimensions of x [..., k].
      reduce_dtype: what the gradient of w is rounded to before devices add theirs up, and added up in:
        "bfloat16" or "float16" for half of the bytes, "float32"; None: the dtype of w. It is looked at on
        every mesh, but not inside of a `jax.shard_map` of the user's, where JAX adds up.
      reduce_later: devices that hold the same of w keep what their own tokens add to its gradient, for
        stacks of layers, added up as one by `swjax.nnx.split_stack`, or `swjax.linear.planning.reduced`.

    Raises:
      ValueError: another reduce_dtype.
    """

    w: P = field(default=P())
    tokens: P = TOKENS
    reduce_dtype: str | None = None
    reduce_later: bool = False

    def __post_init__(self):
        if self.reduce_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"reduce_dtype must be 'float32', 'bfloat16', 'float16' or None, got {self.reduce_dtype!r}"
            )


def as_matrix(spec: Spec, transpose: bool) -> Spec:
    """The spec of an array whose leading dimensions have become one."""
    rows, columns = union(spec[:-1]), spec[-1]
    return Spec((columns, rows) if transpose else (rows, columns))


def specs_of(q: QTensor, spec: Spec) -> QTensor:
    """The specs of a quantized array: its scale is split where it has more than one element."""
    sizes = zip(spec, q.scale.shape)
    return QTensor(spec, Spec(axes if size != 1 else () for axes, size in sizes))


def union(spec: Iterable[Axes]) -> Axes:
    return tuple(dict.fromkeys(axis for axes in spec for axis in axes))


def partition_spec(spec: Spec) -> P:
    return P(*(axes or None for axes in spec))


def free_axes(mesh: AbstractMesh) -> Axes:
    """Those that no `jax.shard_map` around this has taken."""
    kinds = zip(mesh.axis_names, mesh.axis_types)
    return tuple(axis for axis, kind in kinds if kind != AxisType.Manual)


def device_count(mesh: AbstractMesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def fitting_spec(spec: P, shape: tuple[int, ...], mesh: AbstractMesh) -> Spec:
    """A partition spec as a `Spec` of that rank, without what the mesh lacks or does not divide."""
    entries = (*spec, *(None,) * len(shape))[: len(shape)]
    return Spec(_fit(entry, size, mesh) for entry, size in zip(entries, shape))


def _fit(entry, size: int, mesh: AbstractMesh) -> Axes:
    names = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
    axes = tuple(name for name in names if name in free_axes(mesh))
    while size % device_count(mesh, axes):
        axes = axes[:-1]
    return axes
