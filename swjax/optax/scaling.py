"""Loss scaling for float16: after an overflow, a tensor or the whole step is skipped.

float16 gradients below 6e-8 are 0. So the loss is multiplied by a scale, and gradients are divided by it
before the update. A gradient that then exceeds 65504 becomes infinite: `per_tensor_guard` skips the update of
that tensor, `dynamic_loss_scale` the whole step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from swjax.optax.checks import require_number, require_transformation
from swjax.optax.codes import has_eight_bits
from swjax.optax.tensors import (
    TensorValues,
    as_arrays,
    blocks_by_name,
    nodes_of,
    require_shapes,
    resolve_block_axes,
)

_LEAST, _LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


class PerTensorGuardState(NamedTuple):
    """State of `per_tensor_guard`.

    Attributes:
      scale: [] float32, factor of the loss.
      skipped: int32, number of steps that each tensor or block has skipped; read it with `skipped_by_path`.
      inner: state of the inner optimizer.
    """

    scale: jax.Array
    skipped: TensorValues
    inner: optax.OptState


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


def per_tensor_guard(
    inner: optax.GradientTransformation,
    scale: float = 2.0**16,
    *,
    block_axes: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales the loss by a fixed factor; only tensors with non-finite gradients skip the step.

    If a gradient has an Inf or NaN, the parameters of that tensor do not change, nor do its moments. An early
    layer that overflows does not affect other layers. A global scaler would skip the step for all tensors and
    halve its scale.

    `inner` receives zeros in place of non-finite gradients, so `optax.clip_by_global_norm` in a chain leaves
    them out. What all tensors share in its state, such as the count of a schedule, advances if any tensor is
    updated.

    Args:
      inner: an optimizer whose moments have the shapes of the parameters, such as `stable_adamw`, `muon` or
        `optax.adamw`.
      scale: factor of the loss, above 0 and finite; a power of two scales without rounding.
      block_axes: axes that enumerate tensors stacked in one parameter, see `stable_adamw`. Each block is
        skipped separately.

    Returns:
      An `optax.GradientTransformationExtraArgs` from gradients of the *scaled* loss to updates in the
      dtype of the parameters, or of the gradients if `update` receives no parameters.

    Raises:
      TypeError: `inner` is not a transformation.
      ValueError: the scale is not positive and finite, a parameter lacks a block axis or a gradient, or a
        moment of a stack lacks the block axes.

    >>> from swjax.optax import stable_adamw
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
    inner = _checked("per_tensor_guard", inner, scale, _LEAST)

    def init(params):
        params = as_arrays(params)
        blocks = blocks_by_name(params, resolve_block_axes(block_axes, params))
        state = inner.init(params)
        if has_eight_bits(state):
            raise ValueError(
                "per_tensor_guard restores moments tensor by tensor, which must not be in 8 bits: wrap "
                "eight_bit_moments around it"
            )
        return PerTensorGuardState(_stored(scale), TensorValues.zeros(blocks, jnp.int32), state)

    def update(grads, state, params=None, **extra_args):
        grads, params = _arrays("per_tensor_guard", grads, params)
        axes = resolve_block_axes(block_axes, grads)
        treedef: jax.tree_util.PyTreeDef
        leaves, treedef = jax.tree.flatten(grads)
        each = [_is_finite(g, kept) for g, kept in zip(leaves, axes, strict=True)]
        finite = treedef.unflatten(each)
        any_finite = jnp.array([jnp.any(ok) for ok in each], bool).any()
        updates, new = _update(inner, grads, state, params, finite, extra_args)
        where = optax.tree.map_params(
            inner,
            _of_moment,
            state.inner,
            finite,
            transform_non_params=lambda _: any_finite,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        new = jax.tree.map(_select, new, state.inner, where)
        bad = TensorValues.of(blocks_by_name(grads, axes), [~ok for ok in each], jnp.int32)
        skipped = TensorValues(state.skipped.values + bad.values, bad.blocks)
        return updates, PerTensorGuardState(_stored(scale), skipped, new)

    return optax.GradientTransformationExtraArgs(init, update)


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
    inner = _checked("dynamic_loss_scale", inner, scale, 1.0)
    # Under optax.inject_hyperparams growth_steps is a float.
    is_whole = lambda x: isinstance(x, jax.Array) or float(x).is_integer()
    steps = lambda x: 1 <= float(x) < 2**31 and is_whole(x)
    rule = "a whole number from 1 to 2147483647"
    require_number("dynamic_loss_scale", "growth_steps", growth_steps, steps, rule)
    grows = lambda x: 1 + 2.0**-24 < float(x) <= _LARGEST  # 1 + 2^-24 rounds to 1
    rule = "above 1 and finite in float32"
    require_number("dynamic_loss_scale", "factor", factor, grows, rule)

    def init(params):
        good_steps, skipped = (jnp.zeros([], jnp.int32) for _ in range(2))
        return DynamicLossScaleState(
            _stored(scale), good_steps, skipped, inner.init(as_arrays(params))
        )

    def update(grads, state, params=None, **extra_args):
        grads, params = _arrays("dynamic_loss_scale", grads, params)
        ok = jnp.array([_is_finite(g) for g in jax.tree.leaves(grads)], bool).all()
        finite = jax.tree.map(lambda _: ok, grads)
        updates, new = _update(inner, grads, state, params, finite, extra_args)
        kept = jax.tree.map(lambda new, old: _select(new, old, ok), new, state.inner)
        return updates, adjusted(state, ok, kept)

    def adjusted(state, ok, inner):
        good = jnp.where(ok, state.good_steps + 1, 0)
        enough = good >= jnp.asarray(growth_steps, jnp.int32)
        ratio = jnp.asarray(factor, jnp.float32)
        grown, shrunk = state.scale * ratio, jnp.maximum(state.scale / ratio, 1)
        grown = jnp.where(enough & jnp.isfinite(grown), grown, state.scale)
        skipped = state.skipped + (~ok).astype(jnp.int32)
        return DynamicLossScaleState(
            jnp.where(ok, grown, shrunk), jnp.where(enough, 0, good), skipped, inner
        )

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale(opt_state: optax.OptState) -> jax.Array:
    """The factor of the next loss, [] float32.

    Args:
      opt_state: state of `per_tensor_guard` or `dynamic_loss_scale`, or of a chain or wrapper around one.

    Raises:
      ValueError: `opt_state` contains no scale, or several.
    """
    return _find(opt_state, PerTensorGuardState, DynamicLossScaleState).scale


def skipped_by_path(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """The number of steps that each tensor has skipped in `per_tensor_guard`: int32, a scalar or [blocks].

    Args:
      opt_state: state of `per_tensor_guard`, or of a chain or wrapper around it.

    Raises:
      ValueError: `opt_state` contains no guard, or several.
    """
    return _find(opt_state, PerTensorGuardState).skipped.by_path()


def unscale(grads: optax.Updates, scale: jax.typing.ArrayLike) -> optax.Updates:
    """Divides gradients by the loss scale; non-finite entries become 0.

    Args:
      grads: tree of arrays.
      scale: [], see `loss_scale`.

    Returns:
      A tree with the structure of `grads`, in float32 if a gradient has 16 bits.

    Raises:
      ValueError: a gradient is an integer.

    >>> unscale(jnp.array([4.0, jnp.inf]), jnp.float32(2.0))
    Array([2., 0.], dtype=float32)
    """
    return jax.tree.map(lambda g: _divided(g, scale, jnp.isfinite(g)), as_arrays(grads))


def _divided(g: jax.Array, scale: jax.typing.ArrayLike, ok: jax.Array) -> jax.Array:
    """g / scale in at least float32, and 0 where not `ok`, which broadcasts to g."""
    if not jnp.issubdtype(g.dtype, jnp.inexact):
        raise ValueError(
            f"gradients must be real or complex, got {g.dtype}: cast it, or "
            f"exclude it with optax.masked"
        )
    g = g if jnp.finfo(g.dtype).bits >= 32 else g.astype(jnp.float32)
    return jnp.where(ok, g / jnp.asarray(scale, g.dtype), 0)


def _is_finite(g: jax.Array, block_axes: tuple[int, ...] = ()) -> jax.Array:
    """Whether a gradient is finite: [], or each block along axes, with size 1 along the other axes."""
    reduced = tuple(axis for axis in range(g.ndim) if axis not in block_axes)
    return jnp.all(jnp.isfinite(g), axis=reduced, keepdims=bool(block_axes))


def _update(
    inner, grads, state, params, finite, extra_args
) -> tuple[optax.Updates, optax.OptState]:
    """Updates by unscaled gradients, 0 where not finite, and the inner state as if none were skipped."""
    clean = jax.tree.map(lambda g, ok: _divided(g, state.scale, ok), grads, finite)
    updates, new = inner.update(clean, state.inner, params, **extra_args)
    like = grads if params is None else params
    kept = lambda u, ok, p: jnp.where(ok, u, 0).astype(p.dtype)
    return jax.tree.map(kept, updates, finite, like), new


def _of_moment(moment: Any, ok: jax.Array) -> Any:
    """Whether each block of a moment is updated."""
    if isinstance(moment, optax.MaskedNode) or not ok.ndim:
        return moment if isinstance(moment, optax.MaskedNode) else ok
    if moment.ndim != ok.ndim or any(n not in (1, m) for n, m in zip(ok.shape, moment.shape)):
        raise ValueError(
            f"per_tensor_guard's inner optimizer must store moments with the block axes of the parameters, "
            f"got a moment of shape {moment.shape}: set block_axes of this parameter to None"
        )
    return ok


def _select(new: jax.Array, old: jax.Array, ok: jax.Array) -> jax.Array:
    """Selects `new` where ok, in the dtype and sharding of `old`."""
    new = new if new.dtype == old.dtype else new.astype(old.dtype)
    sharding = jax.typeof(old).sharding
    # They differ only on an explicit mesh. An array that the same program created has no mesh.
    if not sharding.mesh.empty and jax.typeof(new).sharding != sharding:
        new = jax.reshard(new, sharding)
    return jnp.where(ok, new, old)


def _stored(scale: jax.typing.ArrayLike) -> jax.Array:
    """The scale for a state: a [] float32 copy, because the caller may donate the state."""
    return jnp.array(scale, jnp.float32, copy=True)


def _checked(
    function: str, inner: Any, scale: Any, least: float
) -> optax.GradientTransformationExtraArgs:
    inner = require_transformation(function, "inner", inner)
    rule = f"a number of at least {least:g} that is finite in float32"
    require_number(function, "scale", scale, lambda x: least <= float(x) <= _LARGEST, rule)
    return inner


def _arrays(function: str, grads: optax.Updates, params: optax.Params | None) -> tuple[Any, Any]:
    grads, params = as_arrays((grads, params))
    if params is not None:
        require_shapes(function, params, {"gradient": grads})
    return grads, params


def _find(opt_state, *kinds):
    found = _all(opt_state, kinds)
    if len(found) == 1:
        return found[0]
    wrappers = "per_tensor_guard" if len(kinds) == 1 else "per_tensor_guard or dynamic_loss_scale"
    raise ValueError(
        f"opt_state must contain one {' or '.join(kind.__name__ for kind in kinds)}, got {len(found)}: wrap "
        f"the whole optimizer once, in swjax.optax.{wrappers}"
    )


def _all(opt_state, kinds) -> list:
    own = nodes_of(opt_state, *kinds)
    return own + [inner for node in own for inner in _all(node.inner, kinds)]
