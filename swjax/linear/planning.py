"""Creates the `Plan` for given arrays: from their types on an explicit mesh, otherwise from a `Layout`."""

from functools import partial

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from swjax.linear.layouts import Axes, Layout, Spec, device_count, fitting_spec, free_axes, union
from swjax.linear.plans import Plan


def plan_layer(x: jax.Array, w: jax.Array, layout: Layout | None) -> Plan:
    """The plan of a layer with x [..., k] and w [k, n]."""
    mesh = _mesh(x, w)
    unsharded = Plan(None, ((),) * (x.ndim - 1))
    if mesh is None:
        return unsharded
    if _is_explicit(mesh):
        x_spec, w_spec = (fitting_spec(jax.typeof(a).sharding.spec, a.shape, mesh) for a in (x, w))
    elif layout is None or not has_plan(x, layout):
        return unsharded
    else:
        x_spec = Spec((*fitting_spec(layout.tokens, x.shape[:-1], mesh), ()))
        w_spec = fitting_spec(layout.w, w.shape, mesh)
    return _plan(mesh, x_spec, w_spec, w.shape[0], layout)


def plan_next(first: Plan, w: jax.Array, layout: Layout | None) -> Plan:
    """The plan of a layer whose x is the y of the `first` plan."""
    if first.mesh is None:
        return first
    spec = jax.typeof(w).sharding.spec if _is_explicit(first.mesh) else (layout or Layout()).w
    return _plan(first.mesh, first.y, fitting_spec(spec, w.shape, first.mesh), w.shape[0], layout)


def _plan(mesh: AbstractMesh, x: Spec, w: Spec, k_size: int, layout: Layout | None) -> Plan:
    *tokens, k = x
    together = union(tokens)
    gathered = [tuple(a for a in axes if a in together) for axes in w]
    split_k, split_n = (tuple(a for a in axes if a not in together) for axes in w)
    # If x is sharded along k and w is not, slicing w like x is free.
    sliced = tuple(a for a in k if a not in split_n)
    if not split_k and k_size % device_count(mesh, sliced + gathered[0]) == 0:
        split_k = sliced
    stored = Spec((split_k + gathered[0], split_n + gathered[1]))
    reduce = (layout.reduce_dtype, layout.reduce_later) if layout else (None, False)
    return Plan(mesh, tuple(tokens), split_k, split_n, stored, *reduce, _mapped_axes(mesh))


def plan_batch(tokens: P, x: jax.Array, *others: jax.Array) -> Plan:
    """The plan for x [b, ...] whose rows have the sharding `tokens`.

    On an explicit mesh, the type of x gives the sharding. For the other arrays, only the mesh matters.
    """
    mesh = _mesh(x, *others)
    if mesh is None or (not _is_explicit(mesh) and _has_one_device(mesh)):
        return Plan(None, ((),))
    spec = jax.typeof(x).sharding.spec if _is_explicit(mesh) else tokens
    return Plan(mesh, fitting_spec(spec, x.shape[:1], mesh), mapped=_mapped_axes(mesh))


def plan_heads(q: jax.Array, layout: Layout | None) -> Plan:
    """The plan for q [b, t, h, d] from the layout of the layer that computed q; its `n` shards h.

    Each device has all tokens of its sequences.
    """
    mesh = _mesh(q)
    if mesh is None or not has_plan(q, layout):
        return Plan(None, ((),))
    if layout is None or _is_explicit(mesh):
        b, _, h, _ = fitting_spec(jax.typeof(q).sharding.spec, q.shape, mesh)
    else:
        (b,) = fitting_spec(layout.tokens, q.shape[:1], mesh)
        (h,) = fitting_spec(P(*layout.w[1:2]), q.shape[2:3], mesh)
    n = tuple(axis for axis in h if axis not in b)
    return Plan(mesh, (b,), n=n, mapped=_mapped_axes(mesh))


def has_plan(x: jax.Array, layout: Layout | None) -> bool:
    """Whether arrays like x are on a mesh, and their types or the layout give their sharding."""
    mesh = _mesh(x)
    if mesh is None:
        return False
    return _is_explicit(mesh) or (layout is not None and not _has_one_device(mesh))


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
    return _reduced(w, plan_layer(x, w[0], layout))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduced(w, plan: Plan):
    return w


def _reduce(plan, _, dw):
    def step(dw):
        return plan.sum(dw.astype(plan.reduce_dtype or dw.dtype), plan.sharing).astype(dw.dtype)

    spec = Spec(((), *plan.w))
    return (plan.run(step, (dw,), (spec,), spec) if plan.sharing else dw,)


_reduced.defvjp(lambda w, plan: (w, None), _reduce)


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

    A plan records them because the backward rule of a `jax.custom_vjp` is traced outside the `jax.vmap`,
    where a `jax.shard_map` would use all axes.
    """
    if not _is_explicit(mesh):
        return ()
    manual = []

    def look():
        manual.extend(jax.sharding.get_abstract_mesh().manual_axes)

    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=(), out_specs=None, check_vma=False))
    return tuple(axis for axis in free_axes(mesh) if axis not in manual)
