"""The optimizer of a run, its learning rate, and which parameters it trains."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from swjax.models import clip
from swjax.optax import dynamic_loss_scale, path_name, per_tensor_guard, power_decay, stable_adamw
from swjax.training.config import ConfigError


def make_schedule(config: ConfigDict, total: int, warmup: int) -> optax.Schedule:
    """Linear warm-up to the peak, then cosine to 0 or constant.

    Args:
      config: the run's.
      total: steps of the run, at least 1.
      warmup: steps of the warm-up, fewer than `total`.

    Returns:
      step, from 0 -> learning rate, [] float32.

    Raises:
      ConfigError: the run has no step, or none after the warm-up.
    """
    if total < 1:
        raise ConfigError("config.train has no duration: set train.steps, epochs or examples")
    if warmup >= total:
        raise ConfigError(
            f"config.schedule warms up for {warmup} of {total} steps: "
            f"lower schedule.warmup_steps, or raise train.steps"
        )
    peak = config.optimizer.learning_rate
    pieces = [optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup, 1))]
    if config.schedule.name == "cosine":
        pieces.append(optax.cosine_decay_schedule(peak, total - warmup))
    else:
        pieces.append(optax.constant_schedule(peak))
    joined = optax.join_schedules(pieces, [warmup])
    return lambda count: joined(jnp.asarray(count, jnp.float32))  # no int meets a float


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """StableAdamW or AdamW; gradients clipped by their global norm, and unscaled, as the config says.

    Args:
      config: the run's.
      schedule: step -> learning rate.

    Returns:
      A transformation of the gradients of the scaled loss if `optimizer.loss_scaling` is set, and else of
      the loss.
    """
    c = config.optimizer
    guarded = c.loss_scaling == "per_tensor"
    shared = {"b1": c.b1, "eps": c.eps, "weight_decay": c.weight_decay}
    shared["mask"] = decay_of_blocks if guarded else clip.weight_decay_mask
    if c.name == "adamw":
        update = optax.adamw(schedule, b2=c.b2, **shared)
    else:
        update = stable_adamw(
            schedule,
            b2=power_decay(c.b2_power) if c.b2_power else c.b2,
            block_axes=None if guarded else clip.block_axes,
            clip_threshold=c.clip_threshold or math.inf,
            **shared,
        )
    clipping = optax.clip_by_global_norm(c.grad_clip_norm) if c.grad_clip_norm else None
    if guarded:
        return per_tensor_guard(update, c.loss_scale, across=clipping, block_axes=clip.block_axes)
    if clipping:
        update = optax.chain(clipping, update)
    if c.loss_scaling == "dynamic":
        return dynamic_loss_scale(update, c.loss_scale, growth_steps=c.loss_scale_growth_steps)
    return update


def decay_of_blocks(params: Any) -> Any:
    """`clip.weight_decay_mask` for `per_tensor_guard`, which shows one block and not the stack of all.

    Args:
      params: nested dict of arrays.

    Returns:
      A tree of bools like it.
    """

    def stack(path, x):
        return x[None] if "blocks" in path_name(path).split("/") else x

    return clip.weight_decay_mask(jax.tree_util.tree_map_with_path(stack, params))


def split_frozen(params: Any, patterns: Sequence[str]) -> tuple[Any, Any]:
    """Splits parameters into those that are trained and those that are frozen.

    Args:
      params: nested dict of arrays.
      patterns: regular expressions; a parameter whose path one of them finds is frozen.

    Returns:
      (trainable, frozen): trees like `params`, each with None for what the other has.

    Raises:
      ConfigError: a pattern finds no parameter, or all are frozen.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            raise ConfigError(
                f"config.optimizer.freeze={pattern!r} finds no parameter among {', '.join(paths)}"
            )
    if all(any(re.search(pattern, path) for pattern in patterns) for path in paths):
        raise ConfigError(
            f"config.optimizer.freeze={tuple(patterns)} finds every parameter, and none is left to train: "
            f"remove a pattern"
        )

    def keep(frozen):
        def leaf(path, x):
            found = any(re.search(pattern, path_name(path)) for pattern in patterns)
            return x if found == frozen else None

        return jax.tree_util.tree_map_with_path(leaf, params)

    return keep(False), keep(True)


def combine(trainable: Any, frozen: Any) -> Any:
    """The tree of all parameters; undoes `split_frozen`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None
    )


def ema_decay(decay: float, step: jax.Array) -> jax.Array:
    """min(decay, (1 + t) / (10 + t)): early in a run the average forgets sooner.

    Args:
      decay: of `train.ema_decay`.
      step: t, [] integer, from 0.

    >>> [round(float(ema_decay(0.9, jnp.int32(t))), 2) for t in (0, 10, 1000)]
    [0.1, 0.55, 0.9]
    """
    t = step.astype(jnp.float32)
    return jnp.minimum(decay, (1 + t) / (10 + t))
