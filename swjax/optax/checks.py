"""Checks of an optimizer's arguments. Each raises an error of one line with the rule and the value."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def require_number(
    optimizer: str, name: str, value: Any, holds: Callable[[Any], bool], rule: str
) -> None:
    """Raises a ValueError unless a hyper-parameter is traced, or a number for which `holds` is true."""
    if isinstance(value, jax.core.Tracer):
        return
    number = isinstance(value, int | float) or (hasattr(value, "dtype") and np.ndim(value) == 0)
    if not number or not holds(value):
        raise ValueError(f"{optimizer}'s {name} must be {rule}, got {value!r}")


def require_learning_rate(optimizer: str, learning_rate: Any) -> None:
    """Raises a ValueError unless the learning rate is a schedule, an array or a number of at least 0."""
    # Under optax.inject_hyperparams an array may be the value of a schedule, rounded below 0.
    if not callable(learning_rate) and not isinstance(learning_rate, jax.Array):
        rule = "a schedule, or a finite number that is at least 0"
        holds = lambda x: 0 <= x < math.inf
        require_number(optimizer, "learning_rate", learning_rate, holds, rule)


def rate_at(
    optimizer: str, learning_rate: optax.ScalarOrSchedule, count: jax.Array
) -> jax.typing.ArrayLike:
    """Returns the learning rate after `count` steps.

    Raises:
      ValueError: it is not a scalar, and would broadcast along the last axes of each parameter.
    """
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    if jnp.ndim(rate):
        raise ValueError(
            f"{optimizer}'s learning_rate must be a scalar, got the shape {jnp.shape(rate)}"
        )
    return rate


def require_transformation(
    function: str, name: str, optimizer: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that takes extra arguments; raises a TypeError for other objects."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"{function}'s {name} must be an optax.GradientTransformation, got {optimizer!r}: pass an "
            "optimizer, such as swjax.optax.stable_adamw(1e-3)"
        )
    return optax.with_extra_args_support(optimizer)


def require_dtype(
    optimizer: str, name: str, dtype: Any, kind: Any = jnp.floating, bits: int = 8
) -> None:
    """Raises a ValueError unless `dtype` is a dtype of a kind, such as `jnp.inexact`, with enough bits."""
    if isinstance(dtype, jax.Array):
        raise ValueError(
            f"{optimizer}'s {name} must be a dtype, got the array {dtype}: under "
            f"optax.inject_hyperparams add {name!r} to static_args"
        )
    if dtype is None or not jnp.issubdtype(dtype, kind) or jnp.finfo(dtype).bits < bits:
        raise ValueError(
            f"{optimizer}'s {name} must be a floating-point dtype of at least {bits} bits, got {dtype!r}"
        )
