"""The optimizer of a run, its learning-rate schedule, and the choice of trained parameters."""

import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from swjax.kernels import targets
from swjax.models import clip, lora
from swjax.optax import (
    StableAdamWState,
    dynamic_loss_scale,
    eight_bit_moments,
    muon,
    path_name,
    per_tensor_guard,
    power_decay,
    stable_adamw,
)
from swjax.training.config import ConfigError

# The parameters of a tower that precede its blocks.
BEFORE_BLOCKS = (
    "patch_embed/",
    "class_embedding",
    "position_embedding",
    "token_embedding/",
    "ln_pre/",
)


def make_schedule(config: ConfigDict, total: int, warmup: int) -> optax.Schedule:
    """Linear warm-up to the peak, then the schedule that `config.schedule.name` names.

    =========  ===========================================================================================
    cosine     half a cosine, down to `floor` times the peak
    linear     a line, down to `floor` times the peak
    constant   the peak
    wsd        the peak; in the last share `decay` of the run, 1 - sqrt down to `floor` times the peak
               (Hägele et al., 2024, https://arxiv.org/abs/2405.18392)
    rsqrt      peak sqrt(warm-up / step); in the last share `decay` of the run, a line down to `floor` times
               the value without decay (Zhai et al., 2022, https://arxiv.org/abs/2106.04560)
    =========  ===========================================================================================

    Args:
      config: the config of the run.
      total: number of steps of the run, at least 1.
      warmup: number of warm-up steps, fewer than `total`.

    Returns:
      A function: step, from 0 -> learning rate, [] float32.

    Raises:
      ConfigError: the run has no steps, no steps after the warm-up, or decays before the warm-up ends.
    """
    if total < 1:
        raise ConfigError("config.train has no duration: set train.steps, epochs or examples")
    if warmup >= total:
        raise ConfigError(
            f"config.schedule warms up for {warmup} of {total} steps: "
            "lower schedule.warmup_steps, warmup_epochs or warmup_examples, or train longer"
        )
    c, peak = config.schedule, config.optimizer.learning_rate
    decay = max(1, round(c.decay * total))
    if c.name in ("wsd", "rsqrt") and warmup + decay > total:
        raise ConfigError(
            f"config.schedule.decay={c.decay} decays in the last {decay} of {total} steps, but {warmup} warm "
            f"up: lower schedule.decay or the warm-up"
        )

    def decayed(step: jax.Array, shape: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """A factor that falls from 1 to the floor in the last steps."""
        done = jnp.clip((step - (total - decay)) / decay, 0.0, 1.0)
        return 1.0 - (1.0 - c.floor) * shape(done)

    after_warmup = {
        "cosine": optax.cosine_decay_schedule(peak, total - warmup, alpha=c.floor),
        "linear": optax.linear_schedule(peak, c.floor * peak, total - warmup),
        "constant": optax.constant_schedule(peak),
        "wsd": lambda step: peak * decayed(step + warmup, jnp.sqrt),
        "rsqrt": lambda step: (
            peak
            * jnp.sqrt(max(warmup, 1) / jnp.maximum(step + warmup, max(warmup, 1)))
            * decayed(step + warmup, lambda done: done)
        ),
    }
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup, 1))
    joined = optax.join_schedules([rise, after_warmup[c.name]], [warmup])
    return lambda count: joined(jnp.asarray(count, jnp.float32))  # avoids mixing int and float


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer of `optimizer.name`, with the gradient clipping and loss scaling that the config sets.

    Args:
      config: the config of the run.
      schedule: step -> learning rate.

    Returns:
      A gradient transformation. Its input is the gradient of the scaled loss if `optimizer.loss_scaling` is
      set, and the gradient of the loss otherwise.

    Raises:
      ConfigError: the name has no branch here.
    """
    c = config.optimizer
    shared = {"b1": c.b1, "eps": c.eps, "weight_decay": c.weight_decay}
    shared["mask"] = clip.weight_decay_mask
    if c.name == "muon":
        shared["block_axes"] = clip.block_axes
        shared["dtype"] = dtype_of_muon(config.model.dtype)
        shared["coefficients"] = c.coefficients
        update = muon(schedule, is_matrix_of_blocks, b2=c.b2, **shared)
    elif c.name == "adamw":
        update = optax.adamw(schedule, b2=c.b2, **shared)
    elif c.name == "stable_adamw":
        update = stable_adamw(
            schedule,
            b2=power_decay(c.b2_power) if c.b2_power else c.b2,
            block_axes=clip.block_axes,
            clip_threshold=c.clip_threshold or math.inf,
            **shared,
        )
    else:
        raise ConfigError(
            f"config.optimizer.name={c.name!r} has no branch in make_optimizer: add one"
        )
    if c.layer_decay < 1:
        m = config.model
        blocks = {
            tower: m[tower].layers or getattr(clip.CONFIGS[m.name], tower).layers
            for tower in ("vision", "text")
        }
        update = optax.chain(update, scale_by_depth(c.layer_decay, blocks))
    if c.grad_clip_norm:
        update = optax.chain(optax.clip_by_global_norm(c.grad_clip_norm), update)
    if c.loss_scaling == "per_tensor":
        update = per_tensor_guard(update, c.loss_scale, block_axes=clip.block_axes)
    if c.eight_bit_moments:
        update = eight_bit_moments(update)
    if c.loss_scaling == "dynamic":
        return dynamic_loss_scale(update, c.loss_scale, growth_steps=c.loss_scale_growth_steps)
    return update


def scale_by_depth(decay: float, blocks: dict[str, int]) -> optax.GradientTransformation:
    """Multiplies the updates of a CLIP by decay^d, where d is the distance of a layer from the output.

    In a tower of L blocks, d is L - i for block i from 0, L + 1 for what precedes the blocks, and 0 for what
    follows them, as in BEiT. It scales the learning rate, and with it decoupled weight decay.

    Args:
      decay: the learning rate of a layer divided by that of the next layer, in (0, 1].
      blocks: number of blocks of each tower, {"vision": L, "text": L}.

    References:
      Bao et al., "BEiT: BERT pre-training of image transformers", 2022, https://arxiv.org/abs/2106.08254
    """

    def leaf(path, update):
        tower, _, name = path_name(path).partition("/")
        if name.startswith("blocks/"):
            factors = decay ** jnp.arange(blocks[tower], 0, -1, dtype=jnp.float32)
            return update * factors.reshape(-1, *(1,) * (update.ndim - 1))
        return update * decay ** (blocks[tower] + 1) if name.startswith(BEFORE_BLOCKS) else update

    each = jax.tree_util.tree_map_with_path
    return optax.stateless(lambda updates, params: each(leaf, updates))


def dtype_of_muon(dtype: str) -> str:
    """The dtype of Muon's products for a model of this dtype.

    For 16 bits it is float16, whose errors are smaller than those of bfloat16. TPUs multiply bfloat16.

    >>> dtype_of_muon("float32")
    'float32'
    """
    if dtype == "float32":
        return dtype
    return "bfloat16" if targets.platform() == "tpu" else "float16"


def is_matrix_of_blocks(params: Any) -> Any:
    """A tree of bools with the structure of `params`: which parameters Muon updates."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim == 3 and "blocks" in path_name(path).split("/"), params
    )


def updates_made(opt_state: Any) -> jax.Array:
    """The number of updates that the optimizer has made, to which it applies its schedule.

    Steps that all tensors skip do not count.

    Args:
      opt_state: state of the optimizer from `make_optimizer`.

    Returns:
      [] int32.
    """
    kinds = StableAdamWState, optax.ScaleByAdamState
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds))
    (count,) = (node.count for node in nodes if isinstance(node, kinds))
    return count


def split_frozen(params: Any, patterns: Sequence[str]) -> tuple[Any, Any]:
    """Splits parameters into trainable and frozen ones.

    Args:
      params: nested dict of arrays. If they have matrices of LoRA, all other parameters are frozen, except
        for the logits' scale and bias.
      patterns: regular expressions; a parameter is frozen if one of them matches a part of its path.

    Returns:
      (trainable, frozen): trees with the structure of `params`, each with None for the parameters of the
      other.

    Raises:
      ConfigError: a pattern matches no parameter, or all parameters are frozen, or all matrices of LoRA.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            nearest = ", ".join(difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0))
            raise ConfigError(
                f"config.optimizer.freeze={pattern!r} matches none of {len(paths)} parameters; the nearest "
                f"are {nearest}: docs/fine_tuning.md shows how to list all"
            )
    of_lora = [path for path in paths if path.endswith(lora.MATRICES)]

    def is_trained(path):
        adapted = not of_lora or path.startswith("logit_") or path.endswith(lora.MATRICES)
        return adapted and not any(re.search(pattern, path) for pattern in patterns)

    if not any(map(is_trained, of_lora or paths)):
        what = "matrix of LoRA" if of_lora else "parameter"
        raise ConfigError(
            f"config.optimizer.freeze={tuple(patterns)} matches every {what}, so none is trained: "
            f"remove a pattern"
        )

    def keep(trained):
        def leaf(path, x):
            return x if is_trained(path_name(path)) == trained else None

        return jax.tree_util.tree_map_with_path(leaf, params)

    return keep(True), keep(False)


def combine(trainable: Any, frozen: Any) -> Any:
    """Combines the two trees of `split_frozen` into the tree of all parameters."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None
    )


def ema_decay(decay: float, step: jax.Array) -> jax.Array:
    """min(decay, (1 + t) / (10 + t)), which shortens the average early in a run.

    Args:
      decay: value of `train.ema_decay`.
      step: t, [] integer, from 0.

    >>> [round(float(ema_decay(0.9, jnp.int32(t))), 2) for t in (0, 10, 1000)]
    [0.1, 0.55, 0.9]
    """
    t = step.astype(jnp.float32)
    return jnp.minimum(decay, (1 + t) / (10 + t))
