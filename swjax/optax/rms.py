"""The RMS of every tensor's update by name, for `stable_adamw` and for plain `optax.adamw`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from swjax.optax.eight_bits import decoded_moments
from swjax.optax.stable import StableAdamWState, one_minus_power, rms_of
from swjax.optax.tensors import (
    TensorValues,
    blocks_by_name,
    leaves_by_name,
    nodes_of,
    resolve_block_axes,
)


def rms_by_path(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """The RMS of every tensor at the last step, from any optimizer state that contains a StableAdamW state.

    The function works inside and outside jit, and does not wait for the device.

    Args:
      opt_state: the state of `stable_adamw`, or of a chain or wrapper around it.

    Returns:
      {"path/of/the/parameter": RMS}, each a scalar, or [blocks] if `block_axes` defines blocks.

    Raises:
      ValueError: `opt_state` contains no StableAdamW state, or several with a parameter of the same name.

    >>> from swjax.optax import stable_adamw
    >>> params = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    >>> optimizer = stable_adamw(1e-3)
    >>> _, state = optimizer.update(params, optimizer.init(params), params)
    >>> {path: float(rms) for path, rms in rms_by_path(state).items()}
    {'layer/bias': 1.0, 'layer/kernel': 1.0}
    """
    found = [state.rms.by_path() for state in nodes_of(opt_state, StableAdamWState)]
    if not found:
        raise ValueError(
            "opt_state contains no StableAdamW state, so no RMS: pass the state of swjax.optax.stable_adamw"
        )
    merged: dict[str, jax.Array] = {}
    for named in found:
        if shared := sorted(merged.keys() & named.keys()):
            raise ValueError(
                f"opt_state must have one RMS for each name, got several for {shared[0]!r}: "
                "pass the state of one optimizer at a time"
            )
        merged |= named
    return merged


def adamw_rms_by_path(
    opt_state: optax.OptState,
    grads: optax.Updates,
    *,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    block_axes: Any | Callable[[optax.Params], Any] | None = None,
) -> dict[str, jax.Array]:
    """The RMS of every tensor's update at the last step of `optax.adam` or `optax.adamw`.

    This is sqrt(mean(|g|^2 / max(v / (1 - b2^t), eps^2))), with the second moment debiased, and equals the
    value in the state of `stable_adamw`. The function works inside and outside jit, and does not wait for the
    device.

    Args:
      opt_state: the state after the step, with `optax.ScaleByAdamState`s: the state of `optax.adamw`, or of a
        chain or wrapper around it. Parameters that `optax.masked` or `optax.partition` keep from it have no
        RMS.
      grads: the gradients passed to Adam at this step, so after clipping if that comes first.
      b2, eps: values of the optimizer; the defaults are optax's.
      block_axes: block axes of parameters that stack several tensors, see `stable_adamw`.

    Returns:
      {"path/of/the/parameter": RMS}, each a scalar, or [blocks] if `block_axes` defines blocks.

    Raises:
      ValueError: there is no such state, it belongs to other parameters than the gradient, several have a
        parameter of the same name, or it is that of an ensemble, with several counts.

    >>> params = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    >>> optimizer = optax.adamw(1e-3)
    >>> with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
    ...     _, state = optimizer.update(params, optimizer.init(params), params)
    >>> {path: round(float(rms), 6) for path, rms in adamw_rms_by_path(state, params).items()}
    {'layer/bias': 1.0, 'layer/kernel': 1.0}
    """
    states = nodes_of(decoded_moments(opt_state), optax.ScaleByAdamState)
    if not states:
        raise ValueError(
            "opt_state must contain an optax.ScaleByAdamState, got none: pass the state of optax.adamw"
        )
    axes, named = resolve_block_axes(block_axes, grads), leaves_by_name(grads)
    shapes, blocks = {name: jnp.shape(g) for name, g in named.items()}, dict(zip(named, axes))
    values: dict[str, jax.Array] = {}
    for state in states:
        if jnp.ndim(state.count):
            raise ValueError(
                f"opt_state must have a single step count, got {jnp.shape(state.count)}: read the states "
                "of an ensemble under jax.vmap"
            )
        correction = one_minus_power(b2, jnp.asarray(state.count))
        for name, v in leaves_by_name(state.nu).items():
            if name in values or jnp.shape(v) != shapes.get(name):
                raise ValueError(
                    f"opt_state must have one moment like each gradient, got one of the shape {jnp.shape(v)} "
                    f"for {name!r}, whose gradient has the shape {shapes.get(name)}"
                    f"{' and another moment' if name in values else ''}: pass the state of one model and its "
                    "whole gradient"
                )
            values[name] = _rms(named[name], v, correction, eps, blocks[name])
    found = {name: of for name, of in blocks_by_name(grads, axes).items() if name in values}
    return TensorValues.of(
        found, [values[name] for name in found], jnp.result_type(float)
    ).by_path()


def _rms(g, v, correction, eps, blocks: tuple[int, ...]) -> jax.Array:
    reduced = tuple(axis for axis in range(g.ndim) if axis not in blocks)
    correction, eps = (jnp.asarray(x, jnp.float32) for x in (correction, eps))
    squared, v = jnp.square(jnp.abs(g).astype(jnp.float32)), v.astype(jnp.float32) / correction
    return jnp.squeeze(rms_of(squared, v, eps, reduced), reduced)
