"""A fixed loss scale, and steps that are skipped only for the tensors whose gradients overflow."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from swjax.optax import overflow
from swjax.optax.separate import SeparateStates
from swjax.optax.tensors import (
    TensorValues,
    as_arrays,
    blocks_by_name,
    resolve_block_axes,
)


class PerTensorGuardState(NamedTuple):
    """State of `per_tensor_guard`.

    Attributes:
      scale: [] float32, factor of the loss.
      skipped: int32, number of steps that each tensor or block has skipped; read it with `skipped_by_path`.
      across: state of the transformation of all tensors.
      inner: state of the inner optimizer. A leaf that all tensors share in that optimizer, such as a count,
        has a leading axis here, with one entry per tensor, or per block of a stacked tensor, in the order of
        the parameter tree.
    """

    scale: jax.Array
    skipped: TensorValues
    across: optax.OptState
    inner: optax.OptState


def per_tensor_guard(
    inner: optax.GradientTransformation,
    scale: float = 2.0**16,
    *,
    across: optax.GradientTransformation | None = None,
    block_axes: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales the loss by a fixed factor; only tensors with non-finite gradients skip the step.

    Every tensor has its own inner optimizer. If a gradient has an Inf or NaN, the parameters of that tensor
    do not change, nor does its inner state: the moments, and the count that determines its bias correction
    and schedule. An early layer that overflows does not affect other layers. A global scaler would skip the
    step for all tensors and halve its scale.

    Args:
      inner: any optimizer that treats tensors separately, such as `stable_adamw` or `optax.adamw`. It
        receives trees with one tensor, and None in place of the others.
      scale: factor of the loss, above 0 and finite; a power of two scales without rounding.
      across: a transformation of all tensors together, such as `optax.clip_by_global_norm`. It runs before
        `inner`, and receives unscaled gradients, with zeros in place of non-finite gradients.
      block_axes: axes that enumerate tensors stacked in one parameter, see `stable_adamw`. `inner` receives
        one block without these axes, so it needs no `block_axes` itself.

    Returns:
      An `optax.GradientTransformationExtraArgs` from gradients of the *scaled* loss to updates in the
      dtype of the parameters, or of the gradients if `update` receives no parameters.

    Raises:
      TypeError: `inner` or `across` is not a transformation.
      ValueError: the scale is not positive and finite, or a parameter lacks a block axis or a gradient.

    >>> from swjax.optax import loss_scale, skipped_by_path, stable_adamw
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
    across = across or optax.identity()
    for name, value in (("inner", inner), ("across", across)):
        overflow.require_transformation("per_tensor_guard", name, value)
    overflow.require_scale("per_tensor_guard", scale)
    inner = optax.with_extra_args_support(inner)
    across = optax.with_extra_args_support(across)

    def init(params):
        params = as_arrays(params)
        axes = resolve_block_axes(block_axes, params)
        skipped = TensorValues.zeros(blocks_by_name(params, axes), jnp.int32)
        inner_state = _init_each(inner, params, axes)
        return PerTensorGuardState(
            overflow.stored_scale(scale), skipped, across.init(params), inner_state
        )

    def update(grads, state, params=None, **extra_args):
        grads, params = as_arrays((grads, params))
        overflow.require_gradients("per_tensor_guard", grads, params)
        axes = resolve_block_axes(block_axes, grads)
        treedef: jax.tree_util.PyTreeDef
        leaves, treedef = jax.tree.flatten(grads)
        ok = [overflow.all_finite(g, kept) for g, kept in zip(leaves, axes, strict=True)]
        clean = [overflow.divided(g, state.scale, fine) for g, fine in zip(leaves, ok)]
        clean, whole = across.update(treedef.unflatten(clean), state.across, params, **extra_args)
        updates, new = _update_each(inner, clean, ok, state.inner, params, axes, extra_args)

        blocks = blocks_by_name(grads, axes)
        bad = TensorValues.of(blocks, [~fine for fine in ok], jnp.int32)
        skipped = TensorValues(state.skipped.values + bad.values, blocks)
        return updates, PerTensorGuardState(overflow.stored_scale(scale), skipped, whole, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _init_each(inner, params, axes) -> optax.OptState:
    states = SeparateStates(inner.init, params, axes)
    each = []
    for i, (tensor, p) in enumerate(zip(states.tensors, jax.tree.leaves(params))):
        init = lambda p, i=i: tuple(jax.tree.leaves(inner.init(states.only(i, p))))
        each.append(tensor.map_blocks(init, [True], tensor.shaped)(p))
    return jax.tree.map(_distinct, states.join(each))


def _update_each(inner, grads, ok, state, params, axes, extra_args):
    """Updates every block separately; blocks that are not ok, and their states, are unchanged."""
    like = grads if params is None else params
    states = SeparateStates(inner.init, like, axes)
    columns = (jax.tree.leaves(tree) for tree in (grads, ok, like))
    updates, each = [], []
    for i, (tensor, g, fine, p, old) in enumerate(
        zip(states.tensors, *columns, states.split(state), strict=True)
    ):

        def step(g, fine, p, *old, i=i, tensor=tensor):
            old = tensor.state.unflatten(old)
            given = None if params is None else states.only(i, p)
            updates, new = inner.update(states.only(i, g), old, given, **extra_args)
            (change,) = jax.tree.leaves(updates)
            kept = overflow.kept_where(fine.reshape(()), new, old)
            return jnp.where(fine, change, 0).astype(p.dtype), *jax.tree.leaves(kept)

        shaped = (True, True, True, *tensor.shaped), (True, *tensor.shaped)
        change, *new = tensor.map_blocks(step, *shaped)(g, fine, p, *old)
        updates.append(change)
        each.append(new)
    return jax.tree.unflatten(jax.tree.structure(grads), updates), states.join(each)


def _distinct(x: jax.Array) -> jax.Array:
    """Makes random keys differ between tensors."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or not x.size:
        return x
    fold = jax.vmap(jax.random.fold_in)
    return fold(x.reshape(-1), jnp.arange(x.size)).reshape(x.shape)
