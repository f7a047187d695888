"""Handles gradients that overflow, for `per_tensor_guard` and `dynamic_loss_scale`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from swjax.optax.tensors import as_arrays, path_name

_LEAST, LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


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
    return jax.tree.map(lambda g: divided(g, scale, jnp.isfinite(g)), as_arrays(grads))


def divided(g: jax.Array, scale: jax.typing.ArrayLike, ok: jax.Array) -> jax.Array:
    """g / scale in at least float32, and 0 where not `ok`, which broadcasts to g."""
    if not jnp.issubdtype(g.dtype, jnp.inexact):
        raise ValueError(
            f"gradients must be real or complex, got {g.dtype}: cast it, or "
            f"exclude it with optax.masked"
        )
    g = g if jnp.finfo(g.dtype).bits >= 32 else g.astype(jnp.float32)
    return jnp.where(ok, g / jnp.asarray(scale, g.dtype), 0)


def all_finite(g: jax.Array, axes: tuple[int, ...] = ()) -> jax.Array:
    """Whether each block along `axes` is finite: bool, with size 1 along all other axes."""
    reduced = tuple(axis for axis in range(g.ndim) if axis not in axes)
    return jnp.all(jnp.isfinite(g), axis=reduced, keepdims=True)


def kept_where(ok: jax.Array, new: Any, old: Any) -> Any:
    """Selects `new` if ok ([] bool), otherwise `old`, in the dtypes and shardings of `old`."""

    def leaf(new, old):
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        sharding = jax.typeof(old).sharding
        # They differ only on an explicit mesh. An array that the same program created has no mesh.
        if not sharding.mesh.empty and jax.typeof(new).sharding != sharding:
            new = jax.reshard(new, sharding)
        return jnp.where(ok, new, old)

    return jax.tree.map(leaf, new, old)


def stored_scale(scale: jax.typing.ArrayLike) -> jax.Array:
    """The scale for a state: a [] float32 copy, because the caller may donate the state."""
    return jnp.array(scale, jnp.float32, copy=True)


def require_transformation(function: str, name: str, value: Any) -> None:
    """Checks that an argument is a gradient transformation."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise TypeError(
            f"{function}'s {name} must be an optax.GradientTransformation, got {value!r}: pass an optimizer, "
            "such as swjax.optax.stable_adamw(1e-3)"
        )


def require_scale(function: str, scale: jax.Array | float, least: float = 0.0) -> None:
    """Checks a concrete scale, which a state stores in float32; a traced scale is not checked."""
    if isinstance(scale, jax.core.Tracer):
        return
    if not isinstance(scale, int | float) and not (
        hasattr(scale, "dtype") and jnp.ndim(scale) == 0
    ):
        raise ValueError(f"{function}'s scale must be one number, got {scale!r}: pass a float")
    number = float(scale)
    if not max(least, _LEAST) <= number <= LARGEST:
        rule = f"at least {least:g}" if least else "positive"
        raise ValueError(f"{function}'s scale must be {rule} and finite in float32, got {number}")


def require_gradients(function: str, grads: optax.Updates, params: optax.Params | None) -> None:
    """Raises an error unless each parameter has a gradient of its shape, and each gradient a parameter."""
    if params is None:
        return
    given, known = (
        [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (grads, params)
    )
    if missing := [name for name in known if name not in set(given)]:
        raise ValueError(
            f"{function} needs a gradient for each parameter, got none for {missing[0]!r}: "
            "pass zeros, or exclude the parameter with optax.masked"
        )
    if extra := [name for name in given if name not in set(known)]:
        raise ValueError(
            f"{function} needs a parameter for each gradient, got none for {extra[0]!r}: "
            "pass the gradients of these parameters"
        )
    for name, g, p in zip(known, jax.tree.leaves(grads), jax.tree.leaves(params)):
        if given == known and jnp.shape(g) != jnp.shape(p):
            raise ValueError(
                f"{function} needs a gradient of shape {jnp.shape(p)} for parameter {name!r}, got "
                f"{jnp.shape(g)}: pass the gradients of these parameters"
            )
