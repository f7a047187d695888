"""Loss scaling for float16: tensors guarded one by one, or one dynamic scale for all.

float16 gradients below 6e-8 are 0. So the loss is multiplied by a scale, and gradients are divided by it
before the update; what then exceeds 65504 becomes infinite, and its update has to be left out.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from swjax.optax.rms import Layout, layout_of, split_by_path
from swjax.optax.stable_adamw import _block_axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SkippedSteps:
    """How many steps each tensor, or each block of a stacked one, has been left out of.

    Attributes:
      values: [n] int32.
      layout: static; which of the n belong to which path.
    """

    values: jax.Array
    layout: Layout = field(metadata={"static": True})


class PerTensorGuardState(NamedTuple):
    """State of `per_tensor_guard`.

    Attributes:
      scale: [] float32, of the loss.
      skipped: see `SkippedSteps`; read it with `skipped_by_path`.
      across: state of the transformation of all tensors.
      tensors: the inner state of each tensor, in the order of the parameter tree. Of a stacked one every
        array has leading axes that enumerate its blocks.
    """

    scale: jax.Array
    skipped: SkippedSteps
    across: optax.OptState
    tensors: tuple[optax.OptState, ...]


def per_tensor_guard(
    inner: optax.GradientTransformation,
    scale: float = 2.0**16,
    *,
    across: optax.GradientTransformation | None = None,
    block_axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """A fixed loss scale; a tensor whose gradient is not finite sits out the step, alone.

    Every tensor has an inner optimizer of its own. Where a gradient has an Inf or NaN, that tensor's
    parameters stay, and so does its inner state: moments and count, which its bias correction and its
    schedule go by. One early layer that overflows costs the others nothing, where a global scaler would
    skip the step for all and halve its scale.

    Args:
      inner: any optimizer that treats tensors separately, such as `stable_adamw` or `optax.adamw`. What
        it is shown of a tree is one tensor, the rest being None.
      scale: what the loss is multiplied by, > 0; a power of two rounds nothing.
      across: what looks at all tensors together, as `optax.clip_by_global_norm`. It comes before `inner`,
        and sees unscaled gradients, zeros for those that are not finite.
      block_axes: as for `stable_adamw`: axes that enumerate tensors stacked in one parameter. `inner` is
        shown one block, without these axes, so that it needs no `block_axes` itself.

    Returns:
      An `optax.GradientTransformationExtraArgs` from gradients of the *scaled* loss to updates.

    Raises:
      ValueError: a scale that is not positive, or a block axis that a parameter lacks.

    >>> from swjax.optax import loss_scale, stable_adamw
    >>> params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    >>> optimizer = per_tensor_guard(stable_adamw(0.1, weight_decay=0.0), scale=1024.0)
    >>> state = optimizer.init(params)
    >>> float(loss_scale(state))  # multiply the loss by it
    1024.0
    >>> grads = {"a": jnp.array([1024.0, jnp.inf]), "b": jnp.array([1024.0, -1024.0])}
    >>> updates, state = optimizer.update(grads, state, params)
    >>> updates["a"].tolist(), updates["b"].round(3).tolist()
    ([0.0, 0.0], [-0.10000000149011612, 0.10000000149011612])
    >>> {path: int(count) for path, count in skipped_by_path(state).items()}
    {'a': 1, 'b': 0}

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models", 2023,
      https://arxiv.org/abs/2304.13013, section 3.6.
    """
    _require_positive("per_tensor_guard", "scale", scale)
    inner = optax.with_extra_args_support(inner)
    across = optax.with_extra_args_support(across or optax.identity())

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        axes = _block_axes(block_axes, params)
        layout = layout_of(params, axes)
        tensors = tuple(
            _over_blocks(lambda p, i=i: inner.init(_only(i, p, treedef)), kept)(p)
            for i, (p, kept) in enumerate(zip(leaves, axes, strict=True))
        )
        skipped = SkippedSteps(jnp.zeros(layout.size, jnp.int32), layout)
        return PerTensorGuardState(_scale(scale), skipped, across.init(params), tensors)

    def update(grads, state, params=None, **extra_args):
        leaves, treedef = jax.tree.flatten(grads)
        axes = _block_axes(block_axes, grads)
        good = [_finite(g, kept) for g, kept in zip(leaves, axes, strict=True)]
        clean = [
            jnp.where(ok, _wide(g) / state.scale, 0) for g, ok in zip(leaves, good, strict=True)
        ]
        clean, whole = across.update(treedef.unflatten(clean), state.across, params, **extra_args)

        def step(i, g, ok, tensor, p):
            p = None if params is None else _only(i, p, treedef)
            updates, new = inner.update(_only(i, g, treedef), tensor, p, **extra_args)
            (change,) = jax.tree.leaves(updates)
            return jnp.where(ok, change, 0), _select(ok, new, tensor)

        columns = (treedef.flatten_up_to(clean), good, state.tensors)
        ps = [None] * len(leaves) if params is None else treedef.flatten_up_to(params)
        steps = [
            _over_blocks(lambda *args, i=i: step(i, *args), kept)(*args)
            for i, (kept, *args) in enumerate(zip(axes, *columns, ps, strict=True))
        ]
        updates, tensors = zip(*steps) if steps else ((), ())
        bad = jnp.concatenate([~ok.reshape(-1) for ok in good]) if good else jnp.zeros(0, bool)
        skipped = SkippedSteps(state.skipped.values + bad.astype(jnp.int32), state.skipped.layout)
        state = PerTensorGuardState(_scale(scale), skipped, whole, tuple(tensors))
        return treedef.unflatten(updates), state

    return optax.GradientTransformationExtraArgs(init, update)


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
      scale: [] float32, of the loss.
      good_steps: [] int32, since the scale last changed.
      skipped: [] int32, steps left out.
      inner: state of the inner transformation.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    inner: optax.OptState


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    scale: float = 2.0**16,
    *,
    growth_steps: int = 2000,
    factor: float = 2.0,
) -> optax.GradientTransformationExtraArgs:
    """One loss scale for all: a step with any gradient that is not finite is skipped whole.

    The scale is divided by `factor` then, down to 1, and multiplied by it after `growth_steps` good steps
    in a row. It is the common scheme, kept to compare `per_tensor_guard` with: one layer that overflows again
    and again starves all others of precision.

    Args:
      inner: any transformation.
      scale: at first, at least 1; a power of two rounds nothing, and neither does such a factor.
      growth_steps: at least 1.
      factor: above 1.

    Returns:
      An `optax.GradientTransformationExtraArgs` from gradients of the *scaled* loss to updates.

    Raises:
      ValueError: a number out of its range.

    >>> from swjax.optax import loss_scale
    >>> params = {"a": jnp.ones(2)}
    >>> optimizer = dynamic_loss_scale(optax.sgd(1.0), scale=8.0, growth_steps=2)
    >>> state, scales = optimizer.init(params), []
    >>> for g in (8.0, 8.0, jnp.inf, 8.0):
    ...     updates, state = optimizer.update({"a": jnp.full(2, g)}, state, params)
    ...     scales.append(float(loss_scale(state)))
    >>> scales
    [8.0, 16.0, 8.0, 8.0]

    References:
      Micikevicius et al., "Mixed precision training", 2018, https://arxiv.org/abs/1710.03740
    """
    for name, value, least in (("scale", scale, 1), ("growth_steps", growth_steps, 1)):
        if value < least:
            raise ValueError(f"dynamic_loss_scale's {name} must be at least {least}, got {value}")
    if factor <= 1:
        raise ValueError(f"dynamic_loss_scale's factor must be above 1, got {factor}")
    inner = optax.with_extra_args_support(inner)

    def init(params):
        zero = jnp.zeros([], jnp.int32)
        return DynamicLossScaleState(_scale(scale), zero, zero, inner.init(params))

    def update(grads, state, params=None, **extra_args):
        ok = jnp.all(jnp.array([_finite(g, ()).squeeze() for g in jax.tree.leaves(grads)]))
        clean = jax.tree.map(lambda g: jnp.where(ok, _wide(g) / state.scale, 0), grads)
        updates, new = inner.update(clean, state.inner, params, **extra_args)
        updates = jax.tree.map(lambda change: jnp.where(ok, change, 0), updates)

        good_steps = jnp.where(ok, state.good_steps + 1, 0)
        grown = state.scale * jnp.float32(factor)
        grows = (good_steps == growth_steps) & jnp.isfinite(grown)
        shrunk = jnp.maximum(state.scale / jnp.float32(factor), 1)
        return updates, DynamicLossScaleState(
            scale=jnp.where(ok, jnp.where(grows, grown, state.scale), shrunk),
            good_steps=good_steps % growth_steps,
            skipped=state.skipped + (~ok).astype(jnp.int32),
            inner=_select(ok, new, state.inner),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale(opt_state) -> jax.Array:
    """What to multiply the next loss by: [] float32, from any state that holds a scale of this module.

    Raises:
      ValueError: there is none.
    """
    return _find(opt_state, PerTensorGuardState, DynamicLossScaleState).scale


def skipped_by_path(opt_state) -> dict[str, jax.Array]:
    """How many steps `per_tensor_guard` has left each tensor out of: int32, a scalar or [blocks].

    Raises:
      ValueError: the state holds no guard.
    """
    skipped = _find(opt_state, PerTensorGuardState).skipped
    return split_by_path(skipped.values, skipped.layout)


def unscale(grads, scale: jax.Array):
    """Gradients of the loss from those of the scaled loss; 0 for entries that are not finite."""
    return jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), _wide(g) / scale, 0), grads)


def _find(opt_state, *kinds):
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds))
    for node in nodes:
        if isinstance(node, kinds):
            return node
    raise ValueError(
        f"opt_state holds no {' or '.join(kind.__name__ for kind in kinds)}: wrap the optimizer in "
        f"swjax.optax.{'per_tensor_guard' if len(kinds) == 1 else 'per_tensor_guard or dynamic_loss_scale'}"
    )


def _over_blocks(function, axes: tuple[int, ...]):
    """Maps a function of (gradient, ...) over block axes.

    Arrays with the parameter's shape lose these axes; those of a state have them in front.
    """
    for outer, axis in reversed(list(enumerate(axes))):
        function = _mapped(function, axis - outer)
    return function


def _mapped(function, axis: int):
    def call(*args):
        if len(args) == 1:  # init: the parameter
            return jax.vmap(function, axis, 0)(*args)
        g, ok, tensor, p = args
        return jax.vmap(function, (axis, axis, 0, axis), (axis, 0))(g, ok, tensor, p)

    return call


def _only(i: int, leaf, treedef):
    """The tree with one leaf, and None for the others: names stay."""
    return treedef.unflatten([None] * i + [leaf] + [None] * (treedef.num_leaves - i - 1))


def _finite(g, axes: tuple[int, ...]) -> jax.Array:
    """Whether each block is finite: bool, with 1 in place of the sizes of all other axes."""
    reduced = tuple(axis for axis in range(g.ndim) if axis not in axes)
    return jnp.all(jnp.isfinite(g), axis=reduced, keepdims=True)


def _select(ok, new, old):
    return jax.tree.map(lambda a, b: jnp.where(ok.reshape(()), a.astype(b.dtype), b), new, old)


def _wide(g):
    return g if jnp.finfo(g.dtype).bits >= 32 else g.astype(jnp.float32)


def _scale(scale) -> jax.Array:
    return jnp.asarray(scale, jnp.float32)


def _require_positive(function: str, name: str, value):
    if not value > 0:
        raise ValueError(f"{function}'s {name} must be positive, got {value}")
