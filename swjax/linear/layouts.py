"""How the arrays of a linear layer are sharded: users pass a `Layout`, plans compute with a `Spec`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from swjax.kernels.reference import QTensor

Axes = tuple[str, ...]  # mesh axes that shard one dimension of an array, the slowest first


class Spec(tuple[Axes, ...]):
    """The mesh axes that shard each dimension of an array. As a subclass of tuple it is a leaf of trees."""


# A tree of arrays, with a `Spec` in place of each array.
SpecTree: TypeAlias = Any

TOKENS = P(("data", "fsdp"))  # how swjax's own trainer shards the batch


@dataclass(frozen=True)
class Layout:
    """How the operands of a linear layer are sharded, on meshes with automatic axes (`AxisType.Auto`).

    While a function is traced the types of such arrays do not show their sharding; a layout does. On a mesh
    with explicit axes the types show it, and `w` and `tokens` are not read. A dimension counts as not sharded
    over axes that the mesh lacks, that are manual, or whose size does not divide it.

    Attributes:
      w: spec of the stored weight [k, n].
      tokens: spec of the leading dimensions of x [..., k].
      reduce_dtype: dtype in which devices all-reduce or reduce-scatter the gradient of w: "float32", or
        "bfloat16" or "float16" for half of the bytes; None: the dtype of w. It is read on every mesh, but
        not inside of a `jax.shard_map` of the user's, where JAX sums the gradient.
      reduce_later: devices with the same shard of w keep the gradient from their own tokens. For stacks of
        layers, whose gradient `swjax.nnx.split_stack` or `swjax.linear.planning.reduced` all-reduces at once.

    Raises:
      ValueError: another reduce_dtype.

    >>> Layout(P("fsdp", "tensor"), reduce_dtype="bfloat16").tokens
    P(('data', 'fsdp'),)
    """

    w: P = field(default=P())
    tokens: P = TOKENS
    reduce_dtype: str | None = None
    reduce_later: bool = False

    def __post_init__(self) -> None:
        if self.reduce_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"reduce_dtype must be 'float32', 'bfloat16', 'float16' or None, got {self.reduce_dtype!r}"
            )


# --- specs --------------------------------------------------------------------------------------------


def as_matrix(spec: Spec, transpose: bool) -> Spec:
    """The spec of an array whose leading dimensions are reshaped to one."""
    rows, columns = union(spec[:-1]), spec[-1]
    return Spec((columns, rows) if transpose else (rows, columns))


def quantized_specs(values: SpecTree, scale: SpecTree) -> QTensor:
    """The specs of a QTensor."""
    return QTensor(values, scale)


def specs_of(q: QTensor, spec: Spec) -> QTensor:
    """The specs of a quantized array; those of its scale are empty along dimensions of length 1."""
    sizes = zip(spec, q.scale.shape)
    return quantized_specs(spec, Spec(axes if size != 1 else () for axes, size in sizes))


def union(spec: Iterable[Axes]) -> Axes:
    """The axes of all dimensions, each once."""
    return tuple(dict.fromkeys(axis for axes in spec for axis in axes))


def partition_spec(spec: Spec) -> P:
    """The same for JAX."""
    return P(*(axes or None for axes in spec))


def fitting_spec(spec: P, shape: tuple[int, ...], mesh: AbstractMesh) -> Spec:
    """A partition spec as a `Spec` of that rank, without axes that the mesh lacks or that do not divide."""
    entries = (*spec, *(None,) * len(shape))[: len(shape)]
    return Spec(_fit(entry, size, mesh) for entry, size in zip(entries, shape))


def _fit(entry, size: int, mesh: AbstractMesh) -> Axes:
    names = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
    axes = tuple(name for name in names if name in free_axes(mesh))
    while size % device_count(mesh, axes):
        axes = axes[:-1]
    return axes


# --- meshes -------------------------------------------------------------------------------------------


def free_axes(mesh: AbstractMesh) -> Axes:
    """The axes that no surrounding `jax.shard_map` has made manual."""
    kinds = zip(mesh.axis_names, mesh.axis_types)
    return tuple(axis for axis, kind in kinds if kind != AxisType.Manual)


def device_count(mesh: AbstractMesh, axes: Axes) -> int:
    """The number of devices along these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)
