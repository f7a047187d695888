"""How one linear layer is spread over devices: what each device holds, and every collective in between.

XLA cannot cut an opaque kernel in pieces: it would gather whole activations to run one. So the layer cuts
itself: every step of it runs in a `jax.shard_map` of its own, in which kernels see what one device holds.
Steps stay separate so that `jax.checkpoint` can keep what lies between them.

A `Plan` follows from where x and w lie. A mesh axis that splits w plays one of two parts:

==================  ================================  ==================================================
the axis            splits tokens too: "fsdp"         splits no tokens: "tensor"
==================  ================================  ==================================================
in the products     w is gathered over it, narrow     w stays split
of w's rows k       ..                                x is split too, and y is summed (row parallel)
of w's columns n    ..                                y is split too, and dx is summed (column parallel),
                                                      once for all layers of one input
dw                  summed and scattered over it      stays split
==================  ================================  ==================================================

An axis that splits tokens alone, "data", costs nothing but the sum of dw and the bias's gradient. Scales span
what they span on one device: their absolute maxima are maxima over devices, a scalar for one scale a tensor.
So int8 values are those of one device, and so are the products that no axis cuts along their sum.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
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
        stacks of layers, added up as one by `swjax.nnx.split_stack`, or `swjax.linear.plans.reduced`.

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


class Plan(NamedTuple):
    """Which mesh axes split which dimension; static.

    Attributes:
      mesh: None: nothing is split, and each step is just called.
      tokens: of the leading dimensions of x, y and g.
      k, n: of the width of x and of y in the products.
      w: of w [k, n] at rest: k, n and after them the axes that it is gathered over.
      reduce_dtype: of sums of dw; None: its own.
      reduce_later: whether `reduced` sums dw over devices that hold all of it.
    """

    mesh: AbstractMesh | None
    tokens: tuple[Axes, ...]
    k: Axes = ()
    n: Axes = ()
    w: Spec = Spec(((), ()))
    reduce_dtype: str | None = None
    reduce_later: bool = False

    @property
    def x(self) -> Spec:
        return Spec((*self.tokens, self.k))

    @property
    def y(self) -> Spec:
        return Spec((*self.tokens, self.n))

    @property
    def token_axes(self) -> Axes:
        return _union(self.tokens)

    def splits(self, *dimensions: Axes) -> Axes:
        """Those of the axes that have more than one device."""
        axes = _union(dimensions)
        return tuple(axis for axis in axes if self.mesh and self.mesh.shape[axis] > 1)

    def place(self, array: jax.Array | None, spec: Spec) -> jax.Array | None:
        """An array of an explicit mesh, moved where this plan wants it; XLA moves the others itself."""
        if array is None or self.mesh is None or AxisType.Explicit not in self.mesh.axis_types:
            return array
        return jax.reshard(array, jax.NamedSharding(self.mesh, _partition_spec(spec)))

    def run(self, step: Callable, arrays: tuple, in_specs: tuple, out_specs):
        """`step` of what each device holds of the arrays.

        Args:
          step: a function of arrays, or of trees of them, that may use the collectives below.
          arrays: its arguments.
          in_specs: for each a `Spec`, or a tree of them with that structure.
          out_specs: the same for the results.
        """
        if self.mesh is None:
            return step(*arrays)
        in_specs, out_specs = (
            jax.tree.map(_partition_spec, specs) for specs in (in_specs, out_specs)
        )
        if AxisType.Explicit in self.mesh.axis_types:
            arrays = jax.tree.map(self._reshard, in_specs, arrays)
        results = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            # No names stand for all axes but those that an outer vmap maps over.
            axis_names=set(_free_axes(self.mesh)) if self.mesh.manual_axes else set(),
            check_vma=False,
        )(*arrays)
        return jax.tree.map(lambda x: _vary(x, _varying(arrays)), results)

    def _reshard(self, spec: P, tree):
        return jax.tree.map(lambda x: jax.reshard(x, jax.NamedSharding(self.mesh, spec)), tree)

    # --- collectives, inside of `run` -----------------------------------------------------------------

    def sum(self, tree, *dimensions: Axes):
        """The sum over the devices that split these dimensions."""
        axes = self.splits(*dimensions)
        return lax.psum(tree, axes) if axes else tree

    def maximum(self, x: jax.Array, *dimensions: Axes) -> jax.Array:
        """The maximum of x >= 0 over the devices that split these dimensions."""
        axes = self.splits(*dimensions)
        # A maximum over GPUs may drop a NaN; an infinity makes scales non-finite as well, and stays.
        return lax.pmax(jnp.where(jnp.isnan(x), jnp.inf, x), axes) if axes else x

    def once(self, x: jax.Array, *dimensions: Axes) -> jax.Array:
        """x on one of the devices that split these dimensions, zeros on the others."""
        axes = self.splits(*dimensions)
        return jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)) if axes else x

    def gather(self, w, spec):
        """What this device's products need of an array that lies at rest as `spec` says, or a QTensor."""
        if isinstance(w, QTensor):
            return QTensor(self.gather(w.values, spec.values), self.gather(w.scale, spec.scale))
        # fp8 moves as bytes: XLA for CPUs would widen it on the way, and older NCCL does not know it.
        moved = lax.bitcast_convert_type(w, jnp.int8) if w.dtype.itemsize == 1 else w
        for axis, axes in enumerate(self._gathered(spec)):
            if axes:
                moved = _gather(moved, axes, axis)
        return lax.bitcast_convert_type(moved, w.dtype)

    def scatter_sum(self, dw: jax.Array) -> jax.Array:
        """What this device holds at rest of dw [k, n], summed over everybody's tokens."""
        for axis, axes in enumerate(self._gathered(self.w)):
            if axes:
                dw = _scatter_sum(dw, axes, axis)
        return dw if self.reduce_later else self.sum(dw, self.sharing)

    @property
    def sharing(self) -> Axes:
        """The axes that split tokens and not w: their devices hold the same of w, and sum its gradient."""
        scattered = _union(self._gathered(self.w))
        return self.splits(tuple(axis for axis in self.token_axes if axis not in scattered))

    def _gathered(self, spec: Spec) -> Spec:
        tokens = self.token_axes
        return Spec(self.splits(tuple(a for a in axes if a in tokens)) for axes in spec)


# XLA for GPUs gathers and scatters along the dimension that is outermost in memory. Along another one it
# transposes operand and result, element by element, for kernels that take rows. Here whole runs of a row are
# copied instead. Operands of 16 bits are left to XLA, whose products take columns as well.


def _gather(x: jax.Array, axes: tuple[str, ...], axis: int) -> jax.Array:
    """Everybody's x, side by side along `axis`."""
    if axis == 0 or x.dtype.itemsize > 1:
        return lax.all_gather(x, axes, axis=axis, tiled=True)
    parts = jnp.moveaxis(lax.all_gather(x, axes), 0, axis)
    return parts.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _scatter_sum(x: jax.Array, axes: tuple[str, ...], axis: int) -> jax.Array:
    """This device's part along `axis` of the sum of everybody's x."""
    if axis == 0:
        return lax.psum_scatter(x, axes, tiled=True)
    parts = x.reshape(*x.shape[:axis], lax.axis_size(axes), -1, *x.shape[axis + 1 :])
    return lax.psum_scatter(jnp.moveaxis(parts, axis, 0), axes)


def vary_alike(*trees):
    """Inside of a `jax.shard_map` of the user's: the arrays as varying over its axes where any of them does.

    A `jax.custom_vjp` wants gradients of the types of its arguments. So the sum of a weight's gradient over
    devices with other tokens happens here, in the transpose of this, as for JAX's own products.
    """
    return jax.tree.map(lambda x: _vary(x, _varying(trees)), trees)


def _varying(tree) -> Axes:
    return _union(sorted(jax.typeof(x).manual_axis_type.varying) for x in jax.tree.leaves(tree))


def _vary(x: jax.Array, axes: Axes) -> jax.Array:
    missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def as_matrix(spec: Spec, transpose: bool) -> Spec:
    """The spec of an array whose leading dimensions have become one."""
    rows, columns = _union(spec[:-1]), spec[-1]
    return Spec((columns, rows) if transpose else (rows, columns))


def plan(x: jax.Array, w: jax.Array, layout: Layout | None) -> Plan:
    """The plan for x [..., k] and w [k, n], from their types on an explicit mesh, else from the layout."""
    mesh = _mesh(x, w)
    whole = Plan(None, ((),) * (x.ndim - 1))
    if mesh is None:
        return whole
    if AxisType.Explicit in mesh.axis_types:
        x_spec, w_spec = (_spec(jax.typeof(a).sharding.spec, a.shape, mesh) for a in (x, w))
    elif not cuts_itself(x, layout):
        return whole
    else:
        x_spec = Spec((*_spec(layout.tokens, x.shape[:-1], mesh), ()))
        w_spec = _spec(layout.w, w.shape, mesh)
    return _plan(mesh, x_spec, w_spec, w.shape[0], layout)


def batch_plan(tokens: P, x: jax.Array, *others: jax.Array) -> Plan:
    """The plan for x [b, ...] whose rows are split: as its type says on an explicit mesh, else as `tokens`.

    The others are looked at for the mesh alone.
    """
    mesh = _mesh(x, *others)
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    if mesh is None or (not explicit and all(mesh.shape[axis] == 1 for axis in _free_axes(mesh))):
        return Plan(None, ((),))
    spec = jax.typeof(x).sharding.spec if explicit else tokens
    return Plan(mesh, _spec(spec, x.shape[:1], mesh))


def cuts_itself(x: jax.Array, layout: Layout | None) -> bool:
    """Whether it can be told how arrays like x are split, where they are."""
    mesh = _mesh(x)
    if mesh is None:
        return False
    alone = all(mesh.shape[axis] == 1 for axis in _free_axes(mesh))
    return AxisType.Explicit in mesh.axis_types or (layout is not None and not alone)


def heads_plan(q: jax.Array, layout: Layout | None) -> Plan:
    """The plan for q [b, t, h, d] by the layout of the layer that made it: of b, and `n` of h.

    Tokens of a sequence are not split.
    """
    if not cuts_itself(q, layout):
        return Plan(None, ((),))
    mesh = _mesh(q)
    if AxisType.Explicit in mesh.axis_types:
        b, _, h, _ = _spec(jax.typeof(q).sharding.spec, q.shape, mesh)
    else:
        (b,) = _spec(layout.tokens, q.shape[:1], mesh)
        (h,) = _spec(P(*layout.w[1:2]), q.shape[2:3], mesh)
    return Plan(mesh, (b,), n=tuple(axis for axis in h if axis not in b))


def reduced(w: jax.Array, x: jax.Array, layout: Layout | None) -> jax.Array:
    """A stack of weights [layers, k, n] whose layers, called with x [..., k], may reduce later.

    So what devices add to the gradient is summed once, of the whole stack, and not layer by layer: XLA need
    not copy parts of it side by side to send them together, and no layer computes beside the sum.
    """
    if layout is None or not layout.reduce_later:
        return w
    return _reduced(w, plan(x, w[0], layout))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduced(w, plan: Plan):
    return w


def _reduce(plan, _, dw):
    def step(dw):
        return plan.sum(dw.astype(plan.reduce_dtype or dw.dtype), plan.sharing).astype(dw.dtype)

    spec = Spec(((), *plan.w))
    return (plan.run(step, (dw,), (spec,), spec) if plan.sharing else dw,)


_reduced.defvjp(lambda w, plan: (w, None), _reduce)


def next_plan(first: Plan, w: jax.Array, layout: Layout | None) -> Plan:
    """The plan of a layer whose x is the y of the first one."""
    if first.mesh is None:
        return first
    explicit = AxisType.Explicit in first.mesh.axis_types
    w_spec = jax.typeof(w).sharding.spec if explicit else (layout or Layout()).w
    return _plan(first.mesh, first.y, _spec(w_spec, w.shape, first.mesh), w.shape[0], layout)


def _plan(mesh: AbstractMesh, x: Spec, w: Spec, k_size: int, layout: Layout | None) -> Plan:
    *tokens, k = x
    together = _union(tokens)
    gathered = [tuple(a for a in axes if a in together) for axes in w]
    split_k, split_n = (tuple(a for a in axes if a not in together) for axes in w)
    # Where w is whole along k and x is not, w is cut like x: that costs nothing.
    cut = tuple(a for a in k if a not in split_n)
    if not split_k and k_size % _devices(mesh, cut + gathered[0]) == 0:
        split_k = cut
    at_rest = Spec((split_k + gathered[0], split_n + gathered[1]))
    reduce = (layout.reduce_dtype, layout.reduce_later) if layout else ()
    return Plan(mesh, tuple(tokens), split_k, split_n, at_rest, *reduce)


def _mesh(*arrays: jax.Array) -> AbstractMesh | None:
    """The mesh in context, or else that of the arrays; None: there is nothing to split over."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(a).sharding.mesh for a in arrays)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    return mesh if mesh is not None and _free_axes(mesh) else None


def _free_axes(mesh: AbstractMesh) -> Axes:
    """Those that no `jax.shard_map` around this has taken."""
    kinds = zip(mesh.axis_names, mesh.axis_types)
    return tuple(axis for axis, kind in kinds if kind != AxisType.Manual)


def _spec(spec: P, shape: tuple[int, ...], mesh: AbstractMesh) -> Spec:
    """A partition spec as a `Spec` of that rank, without what the mesh lacks or does not divide."""
    entries = (*spec, *(None,) * len(shape))[: len(shape)]
    return Spec(_fit(entry, size, mesh) for entry, size in zip(entries, shape))


def _fit(entry, size: int, mesh: AbstractMesh) -> Axes:
    names = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
    axes = tuple(name for name in names if name in _free_axes(mesh))
    while size % _devices(mesh, axes):
        axes = axes[:-1]
    return axes


def _devices(mesh: AbstractMesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _union(spec: Iterable[Axes]) -> Axes:
    return tuple(dict.fromkeys(axis for axes in spec for axis in axes))


def _partition_spec(spec: Spec) -> P:
    return P(*(axes or None for axes in spec))


def specs_of(q: QTensor, spec: Spec) -> QTensor:
    """The specs of a quantized array: its scale is split where it has more than one element."""
    sizes = zip(spec, q.scale.shape)
    return QTensor(spec, Spec(axes if size != 1 else () for axes, size in sizes))
