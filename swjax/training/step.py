"""One optimizer step as a pure function: loss and gradient, update, and what is measured on the way."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from swjax import data, diagnostics, losses
from swjax.diagnostics import Packer
from swjax.models import clip, sharding
from swjax.optax import loss_scale, skipped_by_path, unscale
from swjax.training.accumulation import accumulated, at_once
from swjax.training.optimizer import combine, ema_decay, split_frozen


def make_train_step(config, graphdef, optimizer, schedule, packer: Packer):
    """Returns a function (state, batch) -> (state, metrics as one vector), to be compiled.

    Args:
      config: the run's.
      graphdef: of the model.
      optimizer, schedule: of the trainable parameters.
      packer: learns the names of metrics and tensors.
    """
    loss_and_grad = make_loss_and_grad(config, graphdef)

    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.key(config.train.seed), state["step"])
        trainable, frozen = split_frozen(state["params"], config.optimizer.freeze)
        scaling = config.optimizer.loss_scaling
        scale = loss_scale(state["opt_state"]) if scaling else 1.0
        loss, aux, grads = loss_and_grad(trainable, frozen, batch, key, scale)
        updates, opt_state = optimizer.update(grads, state["opt_state"], trainable)
        if scaling:
            aux, grads = aux | measure_scaling(scaling, opt_state), unscale(grads, scale)
        updated = optax.apply_updates(trainable, updates)
        params = clip.clamp_logit_scale(combine(updated, frozen))
        new = {"params": params, "opt_state": opt_state}
        metrics = aux | {"train/loss": loss, "train/learning_rate": schedule(state["step"])}
        metrics |= diagnostics.norms(grad=grads)
        if config.diagnostics.norms:
            metrics |= diagnostics.norms(update=updates)
        # In the order in which one makes the next: the first is where it began. The gradient is known by
        # the sums that its norm needs anyway, and so is the update; without its norm the parameters that
        # it leaves tell, for a quarter of the bytes.
        bad, packer.tensors = diagnostics.first_nonfinite(
            parameter=diagnostics.squares(state["params"]),
            batch={"image": aux["train/image_mean"]},
            feature=aux,
            loss=loss,
            gradient=diagnostics.squares(grads),
            update=diagnostics.squares(updates if config.diagnostics.norms else updated),
        )
        metrics["train/nonfinite"] = bad
        if config.diagnostics.rms:
            metrics |= rms(config.optimizer, opt_state, grads)
        if config.train.ema_decay:
            rate = 1 - ema_decay(config.train.ema_decay, state["step"])
            new["ema"] = optax.incremental_update(params, state["ema"], rate)
        if config.train.nan_policy == "skip":
            good = (bad < 0) & jnp.isfinite(metrics["train/grad_norm"])
            new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, {k: state[k] for k in new})
            metrics["train/skipped"] = 1 - good.astype(jnp.float32)
        return new | {"step": state["step"] + 1}, packer.pack(metrics)

    return train_step


def measure_scaling(kind: str, opt_state) -> dict[str, jax.Array]:
    """The loss scale that the step leaves, and the steps skipped so far: of each tensor, or of all."""
    measured = {"train/loss_scale": loss_scale(opt_state)}
    if kind == "dynamic":
        return measured | {"train/scaling_skipped": opt_state.skipped}
    skipped = skipped_by_path(opt_state)
    return measured | {f"stability/skipped/{path}": count for path, count in skipped.items()}


def rms(c, opt_state, grads) -> dict[str, jax.Array]:
    """The RMS of every tensor's update, whichever of the two optimizers made it.

    Args:
      c: config.optimizer.
      opt_state: after the step.
      grads: of the step, not yet clipped.
    """
    if c.name == "stable_adamw":
        return diagnostics.rms(opt_state)
    if c.loss_scaling == "per_tensor":
        return {}  # each tensor has an Adam of its own; stable_adamw with clip_threshold=0 measures it
    if c.grad_clip_norm:  # what AdamW was given; XLA computes it once
        grads, _ = optax.clip_by_global_norm(c.grad_clip_norm).update(grads, optax.EmptyState())
    return diagnostics.adamw_rms(opt_state, grads, b2=c.b2, eps=c.eps, block_axes=clip.block_axes)


def make_loss_and_grad(config, graphdef):
    """Returns a function (trainable, frozen, batch, key, scale) -> (loss, metrics, scale x gradient).

    Args:
      config: the run's.
      graphdef: of the model.
    """
    parts = config.train.accumulation
    embed, contrast = make_embed(config, graphdef), make_contrast(config)

    def loss_and_grad(trainable, frozen, batch, key, scale=1.0):
        def embed_trainable(trainable, batch, key):
            return embed(combine(trainable, frozen), batch, key)

        def loss_of(embeddings, trainable):
            loss, measured = contrast(embeddings, combine(trainable, frozen), batch["label"])
            return loss * scale, measured

        compute = at_once if parts == 1 else functools.partial(accumulated, parts=parts)
        (loss, measured), outs, grads = compute(embed_trainable, loss_of, trainable, batch, key)
        measured["image_mean"] = outs["vision"]["image_mean"]
        measured = {f"train/{name}": value for name, value in measured.items()}
        if config.diagnostics.features:
            measured |= diagnostics.feature_magnitude(outs)
        return loss / scale, measured, grads

    return loss_and_grad


def make_embed(config, graphdef):
    """Returns a function (params, batch, key) -> ((image, text embeddings), magnitudes by tower)."""

    def embed(params, batch, key):
        model = nnx.merge(graphdef, sharding.gather_params(params))
        augment_key, dropout_key = jax.random.split(key)
        images = data.preprocess(
            batch["image"], augment_key if config.data.augment else None, config.data.image_size
        )
        image, seen = model.encode_image(images, deterministic=False, dropout_key=dropout_key)
        text, read = model.encode_text(batch["text"])
        outs = {
            "vision": {"image_mean": jnp.mean(images), "blocks": seen["blocks"]},
            "text": {"blocks": read["blocks"]},
        }
        return (image, text), outs

    return embed


def make_contrast(config):
    """Returns a function (embeddings, params, labels) -> (loss, metrics)."""

    def contrast(embeddings, params, labels):
        if config.train.loss == "softmax":
            return losses.softmax_contrastive(*embeddings, params["logit_scale"], labels=labels)
        scale_and_bias = params["logit_scale"], params["logit_bias"]
        return losses.sigmoid_contrastive(*embeddings, *scale_and_bias, labels=labels)

    return contrast
