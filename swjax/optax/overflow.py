"""Gradients that overflow, as `per_tensor_guard` and `dynamic_loss_scale` treat them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def unscale(grads: optax.Updates, scale: jax.typing.ArrayLike) -> optax.Updates:
    """Gradients of the loss from those of the scaled loss; 0 for entries that are not finite.

    Args:
      grads: tree of arrays.
      scale: [], see `loss_scale`.

    Returns:
      A tree like `grads`, in float32 where a gradient has 16 bits.

    Raises:
      ValueError: a gradient is an integer.

    >>> unscale(jnp.array([4.0, jnp.inf]), jnp.float32(2.0))
    Array([2., 0.], dtype=float32)
    """
    return jax.tree.map(lambda g: divided(g, scale, jnp.isfinite(g)), grads)


def divided(g: jax.Array, scale: jax.typing.ArrayLike, ok: jax.Array) -> jax.Array:
    """g / scale in at least float32, and 0 where not `ok`, which broadcasts to g."""
    if not jnp.issubdtype(g.dtype, jnp.inexact):
        raise ValueError(
            f"a gradient that is unscaled must be real or complex, got {g.dtype}: cast it, or leave it "
            f"out by optax.masked"
        )
    g = g if jnp.finfo(g.dtype).bits >= 32 else g.astype(jnp.float32)
    return jnp.where(ok, g / jnp.asarray(scale, g.dtype), 0)


def all_finite(g: jax.Array, axes: tuple[int, ...] = ()) -> jax.Array:
    """Whether each block along `axes` is finite: bool, with 1 in place of the sizes of all other axes."""
    reduced = tuple(axis for axis in range(g.ndim) if axis not in axes)
    return jnp.all(jnp.isfinite(g), axis=reduced, keepdims=True)


def kept_where(ok: jax.Array, new: Any, old: Any) -> Any:
    """The new state where ok, [] bool, and else the old one, in the old one's dtypes and shardings."""

    def leaf(new, old):
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        sharding = jax.typeof(old).sharding
        if jax.typeof(new).sharding != sharding:  # on an explicit mesh
            new = jax.reshard(new, sharding)
        return jnp.where(ok, new, old)

    return jax.tree.map(leaf, new, old)


def stored_scale(scale: jax.typing.ArrayLike) -> jax.Array:
    """The scale as a state holds it: [] float32, a copy, since the state may be donated."""
    return jnp.array(scale, jnp.float32, copy=True)


def require_at_least(function: str, name: str, value: jax.Array | float, least: float) -> None:
    """Checks a number that is known now; a traced one is not checked."""
    if not isinstance(value, jax.core.Tracer) and not value >= least:
        raise ValueError(f"{function}'s {name} must be at least {least}, got {value}")
