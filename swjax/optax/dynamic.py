"""One loss scale for all tensors, adjusted during training."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from swjax.optax import overflow
from swjax.optax.tensors import as_arrays


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
      scale: [] float32, factor of the loss.
      good_steps: [] int32, number of finite steps since the scale last changed.
      skipped: [] int32, number of skipped steps.
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
    """One loss scale for all tensors: a step with any non-finite gradient is skipped for all of them.

    A skipped step divides the scale by `factor`, down to 1. `growth_steps` consecutive finite steps multiply
    the scale by `factor`. This common scheme is a baseline for `per_tensor_guard`: a layer that overflows
    repeatedly lowers the scale, and so the precision, of all other layers.

    Args:
      inner: any transformation.
      scale: initial scale, at least 1 and finite; powers of two (also for `factor`) scale without rounding.
      growth_steps: number of finite steps before the scale grows, from 1 to 2^31 - 1.
      factor: factor of a change of the scale, above 1 and finite in float32.

    Returns:
      An `optax.GradientTransformationExtraArgs` from gradients of the *scaled* loss to updates in the
      dtype of the parameters, or of the gradients if `update` receives no parameters.

    Raises:
      TypeError: `inner` is not a transformation.
      ValueError: a number is out of range, or a parameter has no gradient.

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
    overflow.require_transformation("dynamic_loss_scale", "inner", inner)
    overflow.require_scale("dynamic_loss_scale", scale, least=1)
    _check_growth(growth_steps, factor)
    inner = optax.with_extra_args_support(inner)

    def init(params):
        good_steps, skipped = (jnp.zeros([], jnp.int32) for _ in range(2))
        return DynamicLossScaleState(
            overflow.stored_scale(scale), good_steps, skipped, inner.init(as_arrays(params))
        )

    def update(grads, state, params=None, **extra_args):
        grads, params = as_arrays((grads, params))
        overflow.require_gradients("dynamic_loss_scale", grads, params)
        ok = jnp.all(jnp.array([overflow.all_finite(g).squeeze() for g in jax.tree.leaves(grads)]))
        clean = jax.tree.map(lambda g: overflow.divided(g, state.scale, ok), grads)
        updates, new = inner.update(clean, state.inner, params, **extra_args)
        dtypes = grads if params is None else params
        updates = jax.tree.map(lambda u, p: jnp.where(ok, u, 0).astype(p.dtype), updates, dtypes)
        return updates, adjusted(state, ok, overflow.kept_where(ok, new, state.inner))

    def adjusted(state, ok, inner):
        good_steps = jnp.where(ok, state.good_steps + 1, 0)
        enough = good_steps >= jnp.asarray(growth_steps, jnp.int32)
        grown = state.scale * jnp.asarray(factor, jnp.float32)
        grows = enough & jnp.isfinite(grown)
        shrunk = jnp.maximum(state.scale / jnp.asarray(factor, jnp.float32), 1)
        return DynamicLossScaleState(
            scale=jnp.where(ok, jnp.where(grows, grown, state.scale), shrunk),
            good_steps=jnp.where(enough, 0, good_steps),
            skipped=state.skipped + (~ok).astype(jnp.int32),
            inner=inner,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_growth(growth_steps, factor) -> None:
    """Checks the concrete values in the dtypes that the state has; traced ones are not checked."""
    if not isinstance(growth_steps, jax.core.Tracer):
        steps = float(growth_steps)  # under optax.inject_hyperparams an array, of a schedule or not
        whole = isinstance(growth_steps, jax.Array) or steps.is_integer()
        if not 1 <= steps < 2**31 or not whole:
            raise ValueError(
                "dynamic_loss_scale's growth_steps must be a whole number from 1 to 2147483647, got "
                f"{growth_steps}: pass the largest for a scale that never grows"
            )
    above_1 = 1 + 2.0**-24  # rounds to 1
    if not isinstance(factor, jax.core.Tracer) and not above_1 < float(factor) <= overflow.LARGEST:
        raise ValueError(
            f"dynamic_loss_scale's factor must be above 1 and finite in float32, got {factor}: pass 2"
        )
