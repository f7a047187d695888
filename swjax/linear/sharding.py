r"""The sharding of one linear layer: the shards of each device, and the collectives between its steps.

XLA cannot partition an opaque kernel; it would gather whole activations to run one. So each step of a layer
runs in a `jax.shard_map`, in which kernels receive the shard of one device.

The shardings of x and w determine a `Sharding`. A mesh axis that shards w has one of two roles:

================  ================================  ====================================================
mesh axis         "fsdp": also shards tokens        "tensor": shards no tokens
================  ================================  ====================================================
w                 all-gathered, quantized, before   stays sharded
                  the products
if it shards k    no other effect                   x is sharded, y is all-reduced (row parallel)
if it shards n    no other effect                   y is sharded, dx is all-reduced once for all layers
                                                    of an input (column parallel)
dw                reduce-scattered                  stays sharded
================  ================================  ====================================================

An axis that shards only tokens, "data", adds only the all-reduce of dw and of the bias gradient. In a ragged
product, an axis that shards experts also shards the rows, so it has the role "fsdp". Scales equal
those on one device, because absolute maxima are taken over all devices. Quantized values and unsharded
products are therefore the same as on one device, with three exceptions. The block quantizer of a weight
gradient uses blocks of each device's own tokens. A rotation mixes features of one device. A kernel that adds
the input gradients of several layers rounds once, and may be chosen for one device's rows but not for all
rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from swjax.kernels.formats import QTensor
from swjax.kernels.ragged.schedule import bounds
from swjax.linear import gradient_sums
from swjax.linear.layouts import (
    Axes,
    Layout,
    Spec,
    SpecTree,
    device_count,
    fit_axes,
    fitting_spec,
    free_axes,
    partition_spec,
    specs_of,
    union,
)


@dataclass(frozen=True)
class Sharding:
    """The mesh axes that shard each dimension of x, w and y; static.

    Attributes:
      mesh: the mesh; None means that nothing is sharded, and each step runs without a `jax.shard_map`.
      tokens: axes of the leading dimensions of x, y and g.
      k, n: axes of the last dimension of x and of y in the products.
      w: axes of the stored w [k, n]: k and n, each followed by the axes over which w is gathered; of
        w [e, k, n] also those of the experts, over which it is gathered.
      reduce_dtype: dtype of sums of dw over devices; None uses the dtype of dw.
      reduce_later: whether `reduced` all-reduces dw.
      mapped: explicit axes that a surrounding `jax.vmap` maps over.
    """

    mesh: AbstractMesh | None
    tokens: tuple[Axes, ...]
    k: Axes = ()
    n: Axes = ()
    w: Spec = field(default=Spec(((), ())))
    reduce_dtype: str | None = None
    reduce_later: bool = False
    mapped: Axes = ()

    @property
    def x(self) -> Spec:
        return Spec((*self.tokens, self.k))

    @property
    def y(self) -> Spec:
        return Spec((*self.tokens, self.n))

    @property
    def token_axes(self) -> Axes:
        return union(self.tokens)

    def sharded_axes(self, *dimensions: Axes) -> Axes:
        """The axes of these dimensions that have more than one device."""
        if self.mesh is None:
            return ()
        sizes = self.mesh.shape
        return tuple(axis for axis in union(dimensions) if sizes[axis] > 1)

    def place(self, array: jax.Array | None, spec: Spec) -> jax.Array | None:
        """Reshards `array` to `spec` if the mesh is explicit; on other meshes XLA reshards.

        Returns an array with this sharding unchanged, because a `jax.lax.scan` over layers copies what is not
        a slice of its own input.
        """
        if array is None or self.mesh is None or AxisType.Explicit not in self.mesh.axis_types:
            return array
        wanted = jax.NamedSharding(self.mesh, partition_spec(spec))
        same = jax.typeof(array).sharding == wanted
        return array if same else jax.reshard(array, wanted)

    def map_shards(self, step: Callable, arrays: tuple, in_specs: tuple, out_specs: Any) -> Any:
        """Runs `step` on each device's shards of the arrays.

        Args:
          step: a function of arrays, or of trees of arrays, that may use the collectives below.
          arrays: its arguments.
          in_specs: for each argument a `Spec`, or a tree of specs with the structure of the argument.
          out_specs: the same for the results.

        Returns:
          The results of `step`, as global arrays.
        """
        if self.mesh is None:
            return step(*arrays)
        in_specs, out_specs = (
            jax.tree.map(partition_spec, specs) for specs in (in_specs, out_specs)
        )
        if AxisType.Explicit in self.mesh.axis_types:
            arrays = jax.tree.map(self._reshard, in_specs, arrays)
        results = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self._manual_axes,
            check_vma=False,
        )(*arrays)
        return jax.tree.map(lambda x: _vary(x, _varying(arrays)), results)

    @property
    def _manual_axes(self) -> set[str]:
        """The axes to pass as `axis_names` to `jax.shard_map`.

        An empty set means all axes of the mesh, except those that a `jax.vmap` with `spmd_axis_name` uses.
        """
        assert self.mesh is not None, "`map_shards` enters a jax.shard_map only with a mesh"
        if not self.mesh.manual_axes and not self.mapped:
            return set()
        return set(free_axes(self.mesh)) - set(self.mapped)

    def _reshard(self, spec: P, tree):
        mesh = self.mesh
        assert mesh is not None, "`map_shards` reshards only with a mesh"
        return jax.tree.map(lambda x: jax.reshard(x, jax.NamedSharding(mesh, spec)), tree)

    # --- collectives, inside of `map_shards` ----------------------------------------------------------

    def sum(self, tree: Any, *dimensions: Axes) -> Any:
        """Sums a tree over the devices that these dimensions are sharded over."""
        axes = self.sharded_axes(*dimensions)
        return lax.psum(tree, axes) if axes else tree

    def maximum(self, x: jax.Array, *dimensions: Axes) -> jax.Array:
        """The maximum of x >= 0 over the devices that these dimensions are sharded over."""
        axes = self.sharded_axes(*dimensions)
        # A maximum over GPUs may drop a NaN. An infinity also makes scales non-finite, and is not dropped.
        return lax.pmax(jnp.where(jnp.isnan(x), jnp.inf, x), axes) if axes else x

    def once(self, x: jax.Array, *dimensions: Axes) -> jax.Array:
        """Keeps x on one of the devices that these dimensions are sharded over; returns 0 on the others."""
        axes = self.sharded_axes(*dimensions)
        return jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)) if axes else x

    def gather(self, tree: Any, specs: SpecTree) -> Any:
        """Gathers the part of a weight that this device multiplies, from its shard of each array."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda spec, w: self._gather_array(w, spec), specs, tree)

    def _gather_array(self, w: jax.Array, spec: Spec) -> jax.Array:
        dimensions = self._gathered(spec)
        # fp8 is sent as bytes, because XLA for CPUs converts it to a larger type, and older NCCL does not
        # support it.
        as_bytes = any(dimensions) and w.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
        gathered = lax.bitcast_convert_type(w, jnp.int8) if as_bytes else w
        for axis, axes in enumerate(dimensions):
            if axes:
                gathered = _gather(gathered, axes, axis)
        return lax.bitcast_convert_type(gathered, w.dtype) if as_bytes else gathered

    def own_rows(self, group_sizes: jax.Array, x: Any) -> jax.Array:
        """The number of rows of each group among the rows of this device, its shard of x [m, k]."""
        axes = self.sharded_axes(*self.tokens)
        if not axes:
            return group_sizes
        rows = jax.tree.leaves(x)[0].shape[0]
        ends = jnp.stack(bounds(group_sizes, rows * lax.axis_size(axes)))
        starts, ends = jnp.clip(ends - rows * lax.axis_index(axes), 0, rows)
        return ends - starts

    def scatter_sum(self, dw: jax.Array) -> jax.Array:
        """Sums dw [k, n] over the tokens of all devices, and returns this device's shard."""
        if self.mesh is None:
            return dw
        for axis, axes in enumerate(self._gathered(self.w)):
            if axes:
                dw = gradient_sums.reduce_scatter(dw, axes, axis, self.reduce_dtype)
        return dw if self.reduce_later else self.sum_shared(dw)

    def sum_shared(self, dw: jax.Array) -> jax.Array:
        """Sums dw over the devices that have the same shard of w, in `reduce_dtype`."""
        if not self.sharing:
            return dw
        return gradient_sums.all_reduce(dw, self.sharing, self.reduce_dtype)

    @property
    def sharing(self) -> Axes:
        """The axes that shard tokens but not w; devices along them all-reduce the gradient of w."""
        scattered = union(self._gathered(self.w))
        return self.sharded_axes(tuple(axis for axis in self.token_axes if axis not in scattered))

    def _gathered(self, spec: Spec) -> Spec:
        tokens = self.token_axes
        return Spec(self.sharded_axes(tuple(a for a in axes if a in tokens)) for axes in spec)


# --- collectives of one array --------------------------------------------------------------------------


def _gather(x: jax.Array, axes: tuple[str, ...], axis: int) -> jax.Array:
    """Concatenates the x of all devices along `axis`.

    XLA for GPUs gathers along the outermost dimension in memory. Along another dimension, and for kernels
    that read rows, it transposes operand and result element by element. This function copies whole segments
    of rows instead. XLA handles 16-bit operands well, because its products also read columns.
    """
    if axis == 0 or x.dtype.itemsize > 1:
        return lax.all_gather(x, axes, axis=axis, tiled=True)
    parts = jnp.moveaxis(lax.all_gather(x, axes), 0, axis)
    return parts.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def gathered_over_mapped_axes(tree: Any) -> Any:
    """Gathers arrays over the explicit axes that a surrounding `jax.vmap` maps over.

    Their types keep these axes if the `jax.vmap` does not map them, such as a weight from an outer scope.
    """

    def gather(array):
        mesh, spec = jax.typeof(array).sharding.mesh, jax.typeof(array).sharding.spec
        if mesh.empty or not any(spec):
            return array
        whole, mapped = fitting_spec(spec, array.shape, mesh), _mapped_axes(mesh)
        kept = Spec(tuple(axis for axis in axes if axis not in mapped) for axes in whole)
        return array if kept == whole else jax.reshard(array, partition_spec(kept))

    return jax.tree.map(gather, tree)


def vary_alike(*trees: Any) -> Any:
    """Marks arrays as varying over all axes of a surrounding `jax.shard_map` that any of them varies over.

    A `jax.custom_vjp` returns gradients with the types of its arguments. So the transpose of this function
    sums a weight's gradient over devices with other tokens, as JAX does for its own products.
    """
    return jax.tree.map(lambda x: _vary(x, _varying(trees)), trees)


def _varying(tree) -> Axes:
    return union(tuple(sorted(_varying_axes(x))) for x in jax.tree.leaves(tree))


def _vary(x: jax.Array, axes: Axes) -> jax.Array:
    varying = _varying_axes(x)
    missing = tuple(a for a in axes if a not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def _varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual axes that x varies over. JAX does not document this attribute of types."""
    try:
        return jax.typeof(x).manual_axis_type.varying
    except AttributeError as error:
        raise RuntimeError(
            f"swjax needs a jax whose array types have manual_axis_type, got {jax.__version__}: install "
            "the jax of requirements/constraints.txt"
        ) from error


# --- the sharding of given arrays: from their types on an explicit mesh, otherwise from a `Layout` ----


def sharding_of_layer(x: jax.Array, w: jax.Array, layout: Layout | None) -> Sharding:
    """The sharding of a layer with x [..., k] and w [k, n], or of experts with x [m, k] and w [e, k, n]."""
    mesh = _mesh(x, w)
    unsharded = Sharding(None, ((),) * (x.ndim - 1), w=Spec(((),) * w.ndim))
    if mesh is None:
        return unsharded
    if _is_explicit(mesh):
        x_spec, w_spec = (fitting_spec(jax.typeof(a).sharding.spec, a.shape, mesh) for a in (x, w))
    elif layout is None or not is_sharded(x, layout):
        return unsharded
    else:
        x_spec = Spec((*fitting_spec(layout.tokens, x.shape[:-1], mesh), ()))
        experts = (*layout.experts, None)[: w.ndim - 2]
        w_spec = fitting_spec(P(*experts, *layout.w), w.shape, mesh)
    if w.ndim > 2:  # the axes that shard experts shard rows too
        (rows, k), (experts, *matrix) = x_spec, w_spec
        more = tuple(axis for axis in experts if axis not in (*rows, *k))
        rows = fit_axes((*rows, *more), len(x), mesh)
        experts = tuple(axis for axis in experts if axis in rows)
        x_spec, w_spec = Spec((rows, k)), Spec((experts, *matrix))
    return _of_specs(mesh, x_spec, w_spec, w.shape[-2], layout)


def map_experts(linear: Callable, x: jax.Array, w: Any, layout: Layout | None) -> jax.Array:
    """``linear(x, w)`` of x [*experts, ..., k] and w [*experts, k, n], on each device with its own experts.

    Explicit meshes need no layout: a `jax.vmap` knows the axes that it maps over.
    """
    mesh = _mesh(x, *jax.tree.leaves(w))
    if mesh is None or layout is None or _is_explicit(mesh):
        return linear(x, w)
    spec = fitting_spec(layout.experts, x.shape[: len(layout.experts)], mesh)
    axes, specs = union(spec), partition_spec(spec)
    if not axes:
        return linear(x, w)
    mapped = jax.shard_map(
        linear, mesh=mesh, in_specs=specs, out_specs=specs, axis_names={*axes}, check_vma=False
    )
    return _vary(mapped(x, w), _varying((x, w)))


def sharding_of_next(first: Sharding, w: jax.Array, layout: Layout | None) -> Sharding:
    """The sharding of a layer whose x is the y of a layer with the sharding `first`."""
    if first.mesh is None:
        return first
    spec = jax.typeof(w).sharding.spec if _is_explicit(first.mesh) else (layout or Layout()).w
    return _of_specs(
        first.mesh, first.y, fitting_spec(spec, w.shape, first.mesh), w.shape[0], layout
    )


def _of_specs(mesh: AbstractMesh, x: Spec, w: Spec, k_size: int, layout: Layout | None) -> Sharding:
    *tokens, k = x
    together = union(tokens)
    *experts, gathered_k, gathered_n = [tuple(a for a in axes if a in together) for axes in w]
    split_k, split_n = (tuple(a for a in axes if a not in together) for axes in w[-2:])
    # If x is sharded along k and w is not, slicing w like x is free.
    sliced = tuple(a for a in k if a not in split_n)
    if not split_k and k_size % device_count(mesh, sliced + gathered_k) == 0:
        split_k = sliced
    stored = Spec((*experts, split_k + gathered_k, split_n + gathered_n))
    reduce = (layout.reduce_dtype, layout.reduce_later) if layout else (None, False)
    return Sharding(mesh, tuple(tokens), split_k, split_n, stored, *reduce, _mapped_axes(mesh))


def sharding_of_batch(tokens: P, x: jax.Array, *others: jax.Array) -> Sharding:
    """The sharding of x [b, ...] whose rows have the sharding `tokens`.

    On an explicit mesh, the type of x gives the sharding. For the other arrays, only the mesh matters.
    """
    mesh = _mesh(x, *others)
    if mesh is None or (not _is_explicit(mesh) and _has_one_device(mesh)):
        return Sharding(None, ((),))
    spec = jax.typeof(x).sharding.spec if _is_explicit(mesh) else tokens
    return Sharding(mesh, fitting_spec(spec, x.shape[:1], mesh), mapped=_mapped_axes(mesh))


def sharding_of_heads(q: jax.Array, layout: Layout | None) -> Sharding:
    """The sharding of q [b, t, h, d] from the layout of the layer that computed q; its `n` shards h.

    Each device has all tokens of its sequences.
    """
    mesh = _mesh(q)
    if mesh is None or not is_sharded(q, layout):
        return Sharding(None, ((),))
    if layout is None or _is_explicit(mesh):
        b, _, h, _ = fitting_spec(jax.typeof(q).sharding.spec, q.shape, mesh)
    else:
        (b,) = fitting_spec(layout.tokens, q.shape[:1], mesh)
        (h,) = fitting_spec(P(*layout.w[1:2]), q.shape[2:3], mesh)
    n = tuple(axis for axis in h if axis not in b)
    return Sharding(mesh, (b,), n=n, mapped=_mapped_axes(mesh))


def is_sharded(x: jax.Array, layout: Layout | None) -> bool:
    """Whether arrays like x are on a mesh, and their types or the layout give their sharding."""
    mesh = _mesh(x)
    if mesh is None:
        return False
    return _is_explicit(mesh) or (layout is not None and not _has_one_device(mesh))


def placed_weight(w: Any, bias: jax.Array | None, sharding: Sharding) -> tuple[Any, Any]:
    """A weight, which may be quantized, and its bias, resharded as `Sharding.place` does."""
    bias = sharding.place(bias, Spec((sharding.n,)))
    if not isinstance(w, QTensor):
        return sharding.place(w, sharding.w), bias
    *experts, k, n = sharding.w
    specs = specs_of(w, Spec((*experts, n, k)))
    return QTensor(*(sharding.place(a, spec) for a, spec in zip(w, specs))), bias  # type: ignore[arg-type]  # no None


# --- gradients of stacks ------------------------------------------------------------------------------


def reduced(w: jax.Array, x: jax.Array, layout: Layout | None) -> jax.Array:
    """Returns w, whose gradient is all-reduced as a whole if `layout.reduce_later`.

    Devices all-reduce the gradient of a stack once instead of layer by layer. So XLA does not concatenate the
    layers' gradients, and no layer's computation competes with the all-reduce.

    Args:
      w: [layers, k, n], a stack of weights.
      x: [..., k], the input of a layer.
      layout: layout of each layer.

    Returns:
      w.
    """
    if layout is None or not layout.reduce_later:
        return w
    return _reduced(w, sharding_of_layer(x, w[0], layout))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduced(w, sharding: Sharding):
    return w


def _reduce(sharding, _, dw):
    def step(dw):
        return sharding.sum_shared(dw).astype(dw.dtype)

    spec = Spec(((), *sharding.w))
    return (sharding.map_shards(step, (dw,), (spec,), spec) if sharding.sharing else dw,)


_reduced.defvjp(lambda w, sharding: (w, None), _reduce)


# --- meshes -------------------------------------------------------------------------------------------


def _mesh(*arrays: jax.Array) -> AbstractMesh | None:
    """The mesh in context, otherwise the mesh of the arrays; None if it has no axis to shard over."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(a).sharding.mesh for a in arrays)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    return mesh if mesh is not None and set(free_axes(mesh)) - set(_mapped_axes(mesh)) else None


def _is_explicit(mesh: AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _has_one_device(mesh: AbstractMesh) -> bool:
    return all(mesh.shape[axis] == 1 for axis in free_axes(mesh))


def _mapped_axes(mesh: AbstractMesh) -> Axes:
    """The explicit axes that a surrounding `jax.vmap` maps over; no `jax.shard_map` may use them.

    A `Sharding` records them because the backward rule of a `jax.custom_vjp` is traced outside the
    `jax.vmap`, where a `jax.shard_map` would use all axes.
    """
    if not _is_explicit(mesh):
        return ()
    manual = []

    def look():
        manual.extend(jax.sharding.get_abstract_mesh().manual_axes)

    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=(), out_specs=None, check_vma=False))
    return tuple(axis for axis in free_axes(mesh) if axis not in manual)
