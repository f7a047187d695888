"""Shardings of the arrays of a linear layer: users pass a `Layout`, the layer computes with a `Spec`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from swjax.kernels.block_formats.reference import Blocks
from swjax.kernels.reference import QTensor

Axes = tuple[str, ...]  # mesh axes that shard one dimension of an array, major to minor


class Spec(tuple[Axes, ...]):
    """The mesh axes that shard each dimension of an array; as a tuple subclass it is a leaf of trees."""


# A tree of arrays with a `Spec` in place of each array.
SpecTree: TypeAlias = Any

REDUCE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
TOKENS = P(("data", "fsdp"))  # the sharding of the batch in swjax's trainer


@dataclass(frozen=True)
class Layout:
    """Shardings of the operands of a linear layer, on meshes with automatic axes (`AxisType.Auto`).

    During tracing, the types of such arrays do not show their sharding, but a layout does. On a mesh with
    explicit axes the types show it, and `w` and `tokens` are ignored. A dimension counts as replicated over
    axes that the mesh lacks, that are manual, or whose size does not divide the dimension.

    Attributes:
      w: PartitionSpec of the stored weight [k, n].
      tokens: PartitionSpec of the leading dimensions of x [..., k]; entries beyond these are ignored, so that
        one layout fits [b, t, k] and [b, k].
      reduce_dtype: dtype in which devices all-reduce or reduce-scatter the gradient of w: "float32",
        "bfloat16" or "float16" for half of the bytes, or "int8" or "float8_e4m3fn" for a quarter, with a
        scale for each row and sums in float32; None uses the dtype of w. It applies on every mesh, but not
        inside a user's `jax.shard_map`, where JAX sums the gradient.
      reduce_later: whether devices with the same shard of w keep the gradient of their own tokens. Use it for
        stacks of layers, whose gradients `swjax.nnx.split_stack` or `swjax.linear.sharding.reduced`
        all-reduces at once. Not for ragged products.
      experts: PartitionSpec of the axes of experts of a weight [*experts, k, n].

    Raises:
      ValueError: w, tokens or experts is not a PartitionSpec, w has more than two entries, or reduce_dtype
        has another value.

    >>> Layout(P("fsdp", "tensor"), reduce_dtype="bfloat16").tokens
    P(('data', 'fsdp'),)
    """

    w: P = field(default=P())
    tokens: P = TOKENS
    reduce_dtype: str | None = None
    reduce_later: bool = False
    experts: P = field(default=P())

    def __post_init__(self) -> None:
        specs = {"w": self.w, "tokens": self.tokens, "experts": self.experts}
        for name, spec in specs.items():
            if not isinstance(spec, P):  # the letters of a string would be unknown axes
                raise ValueError(
                    f"Layout's {name} must be a jax.sharding.PartitionSpec, got {spec!r}: pass P(...)"
                )
        if len(self.w) > 2:
            raise ValueError(
                f"Layout's w must have the entries of one weight [k, n], got {self.w}: "
                "leave out the axes of a stack"
            )
        if self.reduce_dtype not in (None, *REDUCE_DTYPES):
            raise ValueError(
                f"Layout's reduce_dtype must be None or one of {', '.join(REDUCE_DTYPES)}, got "
                f"{self.reduce_dtype!r}"
            )


def layout_of_kernel(
    spec: P, ndim: int, contracted: Sequence[int], columns: Sequence[int]
) -> Layout | None:
    """The layout of a product that reads a kernel of several axes, or one of a stack, as a matrix [k, n].

    Args:
      spec: PartitionSpec of the kernel, with or without the axes of a stack.
      ndim: number of axes of the kernel, with those of a stack.
      contracted, columns: the axes of k and of n, counted from the end, in the order of the matrix.

    Returns:
      The layout; None if no spec of a matrix says the same: an axis that is not the first of k or n is
      sharded.

    >>> layout_of_kernel(P(None, "fsdp", "tensor", None), 4, (-3,), (-2, -1)).w  # a stack [l, k, heads, h]
    P('fsdp', 'tensor')
    """
    own = len(contracted) + len(columns)
    missing = (ndim if len(spec) > own else own) - len(spec)
    entries = (*spec, *(None,) * missing)[-own:]
    groups = [[entries[axis] for axis in axes] for axes in (contracted, columns)]
    if any(entry is not None for _, *others in groups for entry in others):
        return None
    return Layout(P(*(first for first, *_ in groups)))


def known_spec(leaf: Any) -> P | None:
    """The PartitionSpec that an array, its shape or its sharding has, if its mesh has axes of type Auto.

    Args:
      leaf: an array, a `jax.ShapeDtypeStruct`, a sharding or a PartitionSpec; tracers have no sharding.

    Returns:
      The spec; None if it is unknown, or if types show it.

    >>> known_spec(P("fsdp")), known_spec(1.0)
    (P('fsdp',), None)
    """
    if isinstance(leaf, P):
        return leaf
    sharding = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
    if isinstance(leaf, Tracer) or not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    return None if mesh.size == 1 or AxisType.Explicit in mesh.axis_types else sharding.spec


# --- specs --------------------------------------------------------------------------------------------


def as_matrix(spec: Spec, transpose: bool) -> Spec:
    """The spec of an array whose leading dimensions are flattened to one."""
    rows, columns = union(spec[:-1]), spec[-1]
    return Spec((columns, rows) if transpose else (rows, columns))


def quantized_specs(values: SpecTree, scale: SpecTree) -> QTensor:
    """A QTensor of specs. `SpecTree` lets type checkers accept specs in place of its arrays."""
    return QTensor(values, scale)


def specs_of(q: QTensor | Blocks, spec: Spec) -> QTensor | Blocks:
    """The specs of a quantized array; the scale is replicated along dimensions of length 1."""
    if isinstance(q, Blocks):
        return block_specs(spec)
    sizes = zip(spec, q.scale.shape)
    return quantized_specs(spec, Spec(axes if size != 1 else () for axes, size in sizes))


def block_specs(spec: SpecTree) -> Blocks:
    """A Blocks of specs: each device has blocks of its own."""
    none: SpecTree = Spec()
    return Blocks(spec, spec, none)


def union(spec: Iterable[Axes]) -> Axes:
    """The axes of all dimensions, without duplicates."""
    return tuple(dict.fromkeys(axis for axes in spec for axis in axes))


def partition_spec(spec: Spec) -> P:
    """Converts a spec to a `PartitionSpec`."""
    return P(*(axes or None for axes in spec))


def fitting_spec(spec: P, shape: tuple[int, ...], mesh: AbstractMesh) -> Spec:
    """Converts a partition spec to a `Spec` of this rank, without axes that are missing or do not divide."""
    entries = (*spec, *(None,) * len(shape))[: len(shape)]
    return Spec(fit_axes(entry, size, mesh) for entry, size in zip(entries, shape))


def fit_axes(entry: Any, size: int, mesh: AbstractMesh) -> Axes:
    """The mesh axes of one entry of a PartitionSpec that can shard a dimension of this size."""
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
