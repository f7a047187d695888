"""The plan for the arrays at hand: from their types on an explicit mesh, else from a `Layout`."""

from functools import partial

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from swjax.linear.layouts import Axes, Layout, Spec, device_count, fitting_spec, free_axes, union
from swjax.linear.plans import Plan


def plan_layer(x: jax.Array, w: jax.Array, layout: Layout | None) -> Plan:
    """The plan for x [..., k] and w [k, n], from their types on an explicit mesh, else from the layout."""
    mesh = mesh_of(x, w)
    whole = Plan(None, ((),) * (x.ndim - 1))
    if mesh is None:
        return whole
    if AxisType.Explicit in mesh.axis_types:
        x_spec, w_spec = (fitting_spec(jax.typeof(a).sharding.spec, a.shape, mesh) for a in (x, w))
    elif not cuts_itself(x, layout):
        return whole
    else:
        x_spec = Spec((*fitting_spec(layout.tokens, x.shape[:-1], mesh), ()))
        w_spec = fitting_spec(layout.w, w.shape, mesh)
    return _plan(mesh, x_spec, w_spec, w.shape[0], layout)


def plan_next(first: Plan, w: jax.Array, layout: Layout | None) -> Plan:
    """The plan of a layer whose x is the y of the first one."""
    if first.mesh is None:
        return first
    explicit = AxisType.Explicit in first.mesh.axis_types
    w_spec = jax.typeof(w).sharding.spec if explicit else (layout or Layout()).w
    return _plan(first.mesh, first.y, fitting_spec(w_spec, w.shape, first.mesh), w.shape[0], layout)


def _plan(mesh: AbstractMesh, x: Spec, w: Spec, k_size: int, layout: Layout | None) -> Plan:
    *tokens, k = x
    together = union(tokens)
    gathered = [tuple(a for a in axes if a in together) for axes in w]
    split_k, split_n = (tuple(a for a in axes if a not in together) for axes in w)
    # Where w is whole along k and x is not, w is cut like x: that costs nothing.
    cut = tuple(a for a in k if a not in split_n)
    if not split_k and k_size % device_count(mesh, cut + gathered[0]) == 0:
        split_k = cut
    at_rest = Spec((split_k + gathered[0], split_n + gathered[1]))
    reduce = (layout.reduce_dtype, layout.reduce_later) if layout else (None, False)
    return Plan(mesh, tuple(tokens), split_k, split_n, at_rest, *reduce, mapped_axes(mesh))


def plan_batch(tokens: P, x: jax.Array, *others: jax.Array) -> Plan:
    """The plan for x [b, ...] whose rows are split: as its type says on an explicit mesh, else as `tokens`.

    The others are looked at for the mesh alone.
    """
    mesh = mesh_of(x, *others)
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    if mesh is None or (not explicit and all(mesh.shape[axis] == 1 for axis in free_axes(mesh))):
        return Plan(None, ((),))
    spec = jax.typeof(x).sharding.spec if explicit else tokens
    return Plan(mesh, fitting_spec(spec, x.shape[:1], mesh), mapped=mapped_axes(mesh))


def cuts_itself(x: jax.Array, layout: Layout | None) -> bool:
    """Whether it can be told how arrays like x are split, where they are."""
    mesh = mesh_of(x)
    if mesh is None:
        return False
    alone = all(mesh.shape[axis] == 1 for axis in free_axes(mesh))
    return AxisType.Explicit in mesh.axis_types or (layout is not None and not alone)


def plan_heads(q: jax.Array, layout: Layout | None) -> Plan:
    """The plan for q [b, t, h, d] by the layout of the layer that made it: of b, and `n` of h.

    Tokens of a sequence are not split.
    """
    if not cuts_itself(q, layout):
        return Plan(None, ((),))
    mesh = mesh_of(q)
    if AxisType.Explicit in mesh.axis_types:
        b, _, h, _ = fitting_spec(jax.typeof(q).sharding.spec, q.shape, mesh)
    else:
        (b,) = fitting_spec(layout.tokens, q.shape[:1], mesh)
        (h,) = fitting_spec(P(*layout.w[1:2]), q.shape[2:3], mesh)
    n = tuple(axis for axis in h if axis not in b)
    return Plan(mesh, (b,), n=n, mapped=mapped_axes(mesh))


def reduced(w: jax.Array, x: jax.Array, layout: Layout | None) -> jax.Array:
    """A stack of weights [layers, k, n] whose layers, called with x [..., k], may reduce later.

    So what devices add to the gradient is summed once, of the whole stack, and not layer by layer: XLA need
    not copy parts of it side by side to send them together, and no layer computes beside the sum.
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


def mesh_of(*arrays: jax.Array) -> AbstractMesh | None:
    """The mesh in context, or else that of the arrays; None: there is nothing to shard over."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(a).sharding.mesh for a in arrays)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    return mesh if mesh is not None and set(free_axes(mesh)) - set(mapped_axes(mesh)) else None


def mapped_axes(mesh: AbstractMesh) -> Axes:
    """The explicit axes that a surrounding `jax.vmap` maps over: a `jax.shard_map` cannot take these.

    The backward rule of a `custom_vjp` runs outside of the `jax.vmap`, and cannot find out.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return ()
    taken = []

    def look():
        taken.extend(jax.sharding.get_abstract_mesh().manual_axes)

    step = jax.shard_map(look, mesh=mesh, in_specs=(), out_specs=None, check_vma=False)
    jax.eval_shape(step)
    return tuple(axis for axis in free_axes(mesh) if axis not in taken)
