"""One optimizer step as a pure function: loss and gradient, update, and what is measured on the way."""

import math
import re

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from swjax import data, diagnostics, losses, sharding
from swjax.config import ConfigError
from swjax.metrics import Packer
from swjax.models import clip
from swjax.optax import stable_adamw


def make_train_step(config, graphdef, optimizer, schedule, packer: Packer):
    """Returns a function (state, batch) -> (state, metrics as one vector), to be compiled.

    Args:
      config: the run's.
      graphdef: of the model.
      optimizer, schedule: of the trainable parameters.
      packer: learns the metrics' names.
    """
    loss_and_grad = make_loss_and_grad(config, graphdef)

    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.key(config.train.seed), state["step"])
        trainable, frozen = partition(state["params"], config.optimizer.freeze)
        loss, aux, grads = loss_and_grad(trainable, frozen, batch, key)
        updates, opt_state = optimizer.update(grads, state["opt_state"], trainable)
        params = clip.clamp_logit_scale(combine(optax.apply_updates(trainable, updates), frozen))
        new = {"params": params, "opt_state": opt_state}
        metrics = aux | {"train/loss": loss, "train/learning_rate": schedule(state["step"])}
        metrics |= diagnostics.norms(grad=grads, update=updates)
        if config.optimizer.name == "stable_adamw":
            metrics |= diagnostics.rms(opt_state)
        if config.train.ema_decay:
            rate = 1 - ema_decay(config.train.ema_decay, state["step"])
            new["ema"] = optax.incremental_update(params, state["ema"], rate)
        if config.train.nan_policy == "skip":
            good = jnp.isfinite(loss) & jnp.isfinite(metrics["train/grad_norm"])
            new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, {k: state[k] for k in new})
            metrics["train/skipped"] = 1 - good.astype(jnp.float32)
        return new | {"step": state["step"] + 1}, packer.pack(metrics)

    return train_step


def make_loss_and_grad(config, graphdef):
    """Returns a function (trainable, frozen, batch, key) -> (loss, metrics, gradient).

    With accumulation over micro-batches the loss still contrasts the whole batch: all are embedded
    without gradient, the loss gives the gradient at the embeddings, and each micro-batch, embedded
    again with the same randomness, turns its part into a gradient of the parameters.

    References:
      Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021,
      https://arxiv.org/abs/2101.06983
    """
    micro_batches = config.train.accumulation

    def embed(params, batch, key):
        model = nnx.merge(graphdef, params)
        augment_key, dropout_key = jax.random.split(key)
        images = data.preprocess(
            batch["image"], augment_key if config.data.augment else None, config.data.image_size
        )
        image, seen = model.encode_image(images, deterministic=False, dropout_key=dropout_key)
        text, read = model.encode_text(batch["text"])
        outs = {"vision": seen, "text": read}
        return (image, text), {name: {"blocks": out["blocks"]} for name, out in outs.items()}

    def contrast(embeddings, params, labels):
        image, text = embeddings
        if config.train.loss == "sigmoid":
            return losses.sigmoid_contrastive(
                image, text, params["logit_scale"], params["logit_bias"], labels=labels
            )
        return losses.softmax_contrastive(image, text, params["logit_scale"], labels=labels)

    def at_once(trainable, frozen, batch, key):
        def loss_fn(trainable):
            params = combine(trainable, frozen)
            embeddings, magnitudes = embed(params, batch, key)
            loss, aux = contrast(embeddings, params, batch["label"])
            return loss, (aux, magnitudes)

        (loss, (aux, magnitudes)), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        return loss, name_metrics(aux, magnitudes), grads

    def accumulated(trainable, frozen, batch, key):
        # Every micro_batches-th row, so that each micro-batch lies evenly on the devices.
        def split(x):
            return x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1)

        def join(x):
            return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

        micro = (jax.tree.map(split, batch), jax.random.split(key, micro_batches))
        params = combine(trainable, frozen)
        embeddings, magnitudes = jax.lax.map(lambda part: embed(params, *part), micro)

        def loss_fn(embeddings, trainable):
            return contrast(
                jax.tree.map(join, embeddings), combine(trainable, frozen), batch["label"]
            )

        (loss, aux), (cotangents, grads) = jax.value_and_grad(
            loss_fn, argnums=(0, 1), has_aux=True
        )(embeddings, trainable)

        def add(grads, part):
            (batch, key), cotangent = part
            _, vjp = jax.vjp(lambda p: embed(combine(p, frozen), batch, key)[0], trainable)
            return jax.tree.map(jnp.add, grads, vjp(cotangent)[0]), None

        grads, _ = jax.lax.scan(add, grads, (micro, cotangents))
        magnitudes = jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.max(x, 0) if "max" in path[-1].key else jnp.mean(x, 0), magnitudes
        )
        return loss, name_metrics(aux, magnitudes), grads

    return accumulated if micro_batches > 1 else at_once


def name_metrics(aux: dict, outs: dict) -> dict:
    """train/<metric of the loss>, stability/<magnitude>/<tower>."""
    named = {f"train/{name}": value for name, value in aux.items()}
    return named | diagnostics.feature_magnitude(outs)


def make_schedule(config, total: int, warmup: int) -> optax.Schedule:
    """Linear warm-up to the peak, then cosine to 0 or constant."""
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


def make_optimizer(config, schedule: optax.Schedule) -> optax.GradientTransformation:
    """StableAdamW, or AdamW; with the gradient's global norm clipped where the config says so."""
    c = config.optimizer
    shared = {"b1": c.b1, "b2": c.b2, "eps": c.eps, "weight_decay": c.weight_decay}
    if c.name == "adamw":
        update = optax.adamw(schedule, mask=clip.weight_decay_mask, **shared)
    else:
        update = stable_adamw(
            schedule,
            mask=clip.weight_decay_mask,
            block_axes=clip.block_axes,
            clip_threshold=c.clip_threshold or math.inf,
            **shared,
        )
    if c.grad_clip_norm:
        return optax.chain(optax.clip_by_global_norm(c.grad_clip_norm), update)
    return update


def partition(params, patterns):
    """Splits parameters into (trainable, frozen) trees, each with None for what the other has.

    Args:
      params: nested dict of arrays.
      patterns: regular expressions; a parameter whose path one of them finds is frozen.

    Raises:
      ConfigError: a pattern finds no parameter.
    """
    paths = [sharding.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            raise ConfigError(
                f"config.optimizer.freeze={pattern!r} finds no parameter among {', '.join(paths)}"
            )

    def keep(frozen):
        def leaf(path, x):
            found = any(re.search(pattern, sharding.path_name(path)) for pattern in patterns)
            return x if found == frozen else None

        return jax.tree_util.tree_map_with_path(leaf, params)

    return keep(False), keep(True)


def combine(trainable, frozen):
    """Undoes `partition`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None
    )


def ema_decay(decay: float, step) -> jax.Array:
    """min(decay, (1 + t) / (10 + t)): while few parameters have been seen, the average forgets sooner."""
    t = step.astype(jnp.float32)
    return jnp.minimum(decay, (1 + t) / (10 + t))
