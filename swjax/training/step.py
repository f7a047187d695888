"""One optimizer step as a pure function that computes the gradient, the update and the metrics.

A train state is {"params", "opt_state", "step"}, and "ema" if the config averages parameters. A batch is
{"image": uint8 [b, h, w, 3], "text": int32 [b, t], "label": int32 [b]}.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from swjax import data, diagnostics, losses
from swjax.diagnostics import NamedIndex
from swjax.diagnostics.names import FEATURE_MAX, FEATURE_MEAN, SKIPPED
from swjax.models import clip, sharding
from swjax.optax import loss_scale, path_name, skipped_by_path, unscale
from swjax.training.accumulation import LossAndGrad, Seen, accumulated, at_once
from swjax.training.log.packed import PackedMetrics, pack
from swjax.training.optimizer import combine, ema_decay, split_frozen, updates_made

State = dict[str, Any]
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def make_train_step(
    config: ConfigDict,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> Callable[[State, Batch], tuple[State, PackedMetrics]]:
    """Returns a function (state, batch) -> (state after one step, metrics), to be compiled by the caller.

    Args:
      config: the config of the run.
      graphdef: graph definition of the model.
      optimizer: optimizer of the trainable parameters; it contains the loss scale if `optimizer.loss_scaling`
        is set.
      schedule: number of updates so far -> learning rate, for the log.
    """
    loss_and_grad = make_loss_and_grad(config, graphdef)
    scaling = config.optimizer.loss_scaling

    def train_step(state: State, batch: Batch) -> tuple[State, PackedMetrics]:
        step, before = state["step"], state["opt_state"]
        trainable, frozen = split_frozen(state["params"], config.optimizer.freeze)
        scale = factor_of_loss(config, state)
        loss, seen, grads = loss_and_grad(trainable, frozen, batch, step_key(config, step), scale)
        updates, opt_state = optimizer.update(grads, before, trainable)
        updated = limit_logit_scale(config, optax.apply_updates(trainable, updates))
        if scaling:
            grads = unscale(grads, jnp.asarray(scale, jnp.float32))

        params = combine(updated, frozen)
        new = {"params": params, "opt_state": opt_state, "step": step + 1}
        if config.train.ema_decay:
            weight = 1 - ema_decay(config.train.ema_decay, step)
            average, _ = split_frozen(state["ema"], config.optimizer.freeze)
            new["ema"] = combine(optax.incremental_update(updated, average, weight), frozen)

        rate = schedule(updates_made(before))
        metrics = seen | {"train/loss": loss, "train/learning_rate": rate}
        metrics |= diagnostics.norms(grad=grads)
        if config.diagnostics.norms:
            metrics |= diagnostics.norms(update=updates)
        if config.diagnostics.rms:
            metrics |= rms(config.optimizer, opt_state, grads)
        if scaling:
            metrics |= measure_scaling(scaling, opt_state)
            metrics["train/skipped"] = skipped_by_scaling(scaling, before, opt_state, trainable)
        # Without norms, the check for non-finite values reads the updated parameters: a quarter of the bytes.
        update = updates if config.diagnostics.norms else updated
        bad = locate_nonfinite(state["params"], seen, loss, grads, update)
        if config.train.nan_policy == "skip":
            good = (bad.index < 0) & jnp.isfinite(metrics["train/grad_norm"])
            new = chosen(good, new, state) | {"step": step + 1}
            skipped = metrics.get("train/skipped", jnp.float32(0))
            metrics["train/skipped"] = jnp.where(good, skipped, 1)
        return new, pack(metrics | {"train/nonfinite": bad})

    return train_step


def factor_of_loss(config: ConfigDict, state: State) -> jax.typing.ArrayLike:
    """The factor of the loss in the next step: the loss scale, or 1 without loss scaling."""
    return loss_scale(state["opt_state"]) if config.optimizer.loss_scaling else 1.0


def limit_logit_scale(config: ConfigDict, trainable: Any) -> Any:
    """Clamps a trained logit scale to [1, 100] with the softmax loss; the sigmoid loss has no limit."""
    return clip.clamp_logit_scale(trainable) if config.train.loss == "softmax" else trainable


def step_key(config: ConfigDict, step: jax.Array) -> jax.Array:
    """The random key of a step, for augmentation and dropout."""
    return jax.random.fold_in(jax.random.key(config.train.seed), step)


def chosen(good: jax.Array, new: State, old: State) -> State:
    """Selects the new state if `good` ([] bool) is true, and the old state otherwise."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, {name: old[name] for name in new})


def locate_nonfinite(
    params: Any, seen: Metrics, loss: jax.Array, grads: Any, update: Any
) -> NamedIndex:
    """Locates the first non-finite tensor of a step.

    Tensors are listed in dataflow order, so the first non-finite entry is the origin. Large tensors are
    checked through their sums of squares. The norms use most of these sums too.
    """
    return diagnostics.first_nonfinite(
        parameter=diagnostics.squares(params),
        batch={"image": seen["train/image_mean"]},
        feature=seen,
        loss=loss,
        gradient=diagnostics.squares(grads),
        update=diagnostics.squares(update),
    )


def measure_scaling(kind: str, opt_state: Any) -> Metrics:
    """The loss scale after a step, and the number of skipped steps so far.

    Args:
      kind: `optimizer.loss_scaling`, "dynamic" or "per_tensor".
      opt_state: state of the optimizer after the step.

    Returns:
      {"train/loss_scale": [], "train/scaling_skipped": []} for "dynamic", or {"stability/skipped/<path>": []
      or [blocks]} for each tensor for "per_tensor".
    """
    measured = {"train/loss_scale": loss_scale(opt_state)}
    if kind == "dynamic":
        return measured | {"train/scaling_skipped": opt_state.skipped}
    skipped = skipped_by_path(opt_state)
    return measured | {f"{SKIPPED}{path}": count for path, count in skipped.items()}


def skipped_by_scaling(kind: str, before: Any, after: Any, params: Any) -> jax.Array:
    """The share of parameter elements that a step did not update because their gradients overflowed.

    Args:
      kind: `optimizer.loss_scaling`, "dynamic" or "per_tensor".
      before, after: states of the optimizer before and after the step.
      params: tree of the trainable parameters.

    Returns:
      [] float32, from 0 to 1.
    """
    if kind == "dynamic":
        return (after.skipped - before.skipped).astype(jnp.float32)
    old, new = skipped_by_path(before), skipped_by_path(after)
    left_out = {path: jnp.mean((new[path] - old[path]).astype(jnp.float32)) for path in new}
    named = jax.tree_util.tree_leaves_with_path(params)
    sizes = {path_name(path): x.size for path, x in named}
    return sum(left_out[path] * (size / sum(sizes.values())) for path, size in sizes.items())


def rms(c: ConfigDict, opt_state: Any, grads: Any) -> Metrics:
    """The RMS of every tensor's update by StableAdamW or AdamW; not of the matrices that Muon updates.

    Args:
      c: the section config.optimizer.
      opt_state: state of the optimizer after the step.
      grads: gradients of the step before clipping.

    Returns:
      {"stability/rms/<path>": [] or [blocks]}.
    """
    if c.name != "adamw":
        return diagnostics.rms(opt_state)
    if c.loss_scaling == "per_tensor":
        # Skipped tensors keep an older v; stable_adamw with clip_threshold=0 measures the RMS instead.
        return {}
    if c.grad_clip_norm:  # as in AdamW's chain; XLA deduplicates the two
        grads, _ = optax.clip_by_global_norm(c.grad_clip_norm).update(grads, optax.EmptyState())
    return diagnostics.adamw_rms(opt_state, grads, b2=c.b2, eps=c.eps, block_axes=clip.block_axes)


def make_loss_and_grad(config: ConfigDict, graphdef: nnx.GraphDef) -> Callable[..., LossAndGrad]:
    """Returns a function (trainable, frozen, batch, key, scale=1.0) -> `LossAndGrad`.

    `trainable` and `frozen` are trees of parameters, each with None for the parameters of the other. The
    gradient is that of `scale` times the loss with respect to `trainable`; the returned loss is unscaled.

    Args:
      config: the config of the run.
      graphdef: graph definition of the model.
    """
    parts = config.train.accumulation
    compute = at_once if parts == 1 else partial(accumulated, parts=parts)
    embed, contrast = make_embed(config, graphdef), make_contrast(config)

    def loss_and_grad(trainable, frozen, batch, key, scale=1.0):
        def embed_trainable(trainable, batch, key):
            return embed(combine(trainable, frozen), batch, key)

        def scaled_loss(embeddings, trainable):
            loss, measured = contrast(embeddings, combine(trainable, frozen), batch["label"])
            return loss * scale, {f"train/{name}": value for name, value in measured.items()}

        scaled, metrics, grads = compute(embed_trainable, scaled_loss, trainable, batch, key)
        return LossAndGrad(scaled / scale, metrics, grads)

    return loss_and_grad


def make_embed(
    config: ConfigDict, graphdef: nnx.GraphDef
) -> Callable[[Any, Batch, jax.Array], tuple[tuple[jax.Array, jax.Array], Seen]]:
    """Returns a function (params, batch, key) -> ((image, text embeddings [b, e]), magnitudes).

    Args:
      config: the config of the run.
      graphdef: graph definition of the model.
    """

    def embed(params, batch, key):
        model = nnx.merge(graphdef, sharding.gather_params(params))
        augment_key, dropout_key = jax.random.split(key)
        images = data.preprocess(
            batch["image"],
            augment_key if config.data.augment.drawings else None,
            config.data.image_size,
        )
        image, vision = model.encode_image(images, deterministic=False, dropout_key=dropout_key)
        text, read = model.encode_text(batch["text"])
        means, maxima = {"train/image_mean": jnp.mean(images)}, {}
        if config.diagnostics.features:
            for tower, out in (("vision", vision), ("text", read)):
                means[f"stability/{FEATURE_MEAN}/{tower}"] = out["blocks"][FEATURE_MEAN]
                maxima[f"stability/{FEATURE_MAX}/{tower}"] = out["blocks"][FEATURE_MAX]
        return (image, text), Seen(means, maxima)

    return embed


def make_contrast(config: ConfigDict) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Returns a function (embeddings, params, labels [b]) -> (loss, metrics).

    Args:
      config: the config of the run.
    """

    def contrast(embeddings, params, labels):
        (image, text), scale = embeddings, params["logit_scale"]
        if config.train.loss == "softmax":
            return losses.softmax_contrastive(image, text, scale, labels=labels)
        return losses.sigmoid_contrastive(image, text, scale, params["logit_bias"], labels=labels)

    return contrast
