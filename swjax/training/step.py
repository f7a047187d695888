"""One optimizer step as a pure function: loss and gradient, update, and what is measured on the way."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from swjax import data, diagnostics, losses
from swjax.diagnostics import Packer, taps
from swjax.models import clip, sharding
from swjax.optax import (
    dynamic_loss_scale,
    loss_scale,
    per_tensor_guard,
    power_decay,
    skipped_by_path,
    stable_adamw,
    unscale,
)
from swjax.training.config import ConfigError


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
        trainable, frozen = partition(state["params"], config.optimizer.freeze)
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


class Health:
    """Quantization health every `diagnostics.every_steps` steps, on the batch and parameters of the step.

    It is a program of its own, so that the train step is the same with and without it, and one that compiles
    fast rather than runs fast: blocks are scanned.

    Args:
      config: the run's.
      graphdef: of the model.
      params: of the model, or ShapeDtypeStructs like them, with shardings.
      steps: of the run.
    """

    def __init__(self, config, graphdef, params, *, steps: int):
        self._every, self._packer, self._pending = config.diagnostics.every_steps, Packer(), {}
        model = nnx.merge(graphdef, params)
        if self._every > steps or not taps.quantized_layers(model):
            self._every = 0
        if not self._every:
            return
        for module in (model, model.vision, model.text):
            module.cfg = dataclasses.replace(module.cfg, scan_layers=True)
        tapped, zeros = nnx.split(taps.insert(model))
        loss_and_grad = make_loss_and_grad(config, tapped)

        def measure(state, batch):
            key = jax.random.fold_in(jax.random.key(config.train.seed), state["step"])
            inserted, frozen = _beside(nnx.to_pure_dict(zeros), state["params"])
            _, _, sums = loss_and_grad(inserted, frozen, batch, key)
            return self._packer.pack(taps.read(sums))

        mesh = jax.tree.leaves(params)[0].sharding.mesh
        everywhere = NamedSharding(mesh, P())  # so that every process can read it
        self._measure, self._compiled = jax.jit(measure, out_shardings=everywhere), None

    def compile(self, state, batch):
        """The program (state, batch) -> measurements as one vector."""
        return self._measure.lower(state, batch).compile()

    def before(self, step: int, state, batch) -> None:
        """Measures, if the step with this number is one of those; it takes `state` afterwards."""
        if not self._every:
            return
        if self._compiled is None:  # at the first step, like the train step: not in mid-run
            self._compiled = self.compile(state, batch)
        if step % self._every == 0:
            self._pending[step] = self._compiled(state, batch)

    def records(self, last: int) -> dict[int, dict]:
        """{step: its measurements} since the last call, up to a step."""
        done = [step for step in self._pending if step <= last]
        fetched = jax.device_get({step: self._pending.pop(step) for step in done})
        return {record["step"]: record for record in self._packer.records(fetched)}


def _beside(all_variables, params):
    """Two trees like `all_variables`: taps, with None for parameters, and parameters, with None for taps."""
    named = {sharding.path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}

    def lookup(path, _):
        return named.get(sharding.path_name(path))

    def tap(path, x):
        return None if sharding.path_name(path) in named else jnp.zeros(x.shape, x.dtype)

    each = jax.tree_util.tree_map_with_path
    return each(tap, all_variables), each(lookup, all_variables)


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


def at_once(embed, loss_of, params, batch, key):
    """Loss and gradient of the whole batch in one pass.

    Args:
      embed: (params, batch, key) -> (embeddings, outs).
      loss_of: (embeddings, params) -> (loss, metrics).

    Returns:
      (loss, metrics), outs, gradient.
    """

    def loss_fn(params):
        embeddings, outs = embed(params, batch, key)
        loss, measured = loss_of(embeddings, params)
        return loss, (measured, outs)

    (loss, (measured, outs)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return (loss, measured), outs, grads


def accumulated(embed, loss_of, params, batch, key, *, parts: int):
    """The same as `at_once`, with the memory of one of several micro-batches.

    Every row is still contrasted with the whole batch: all micro-batches are embedded without
    gradient, the loss gives the gradient at the embeddings, and each micro-batch, embedded again with
    the same randomness, turns its rows of that into a gradient of the parameters.

    References:
      Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021,
      https://arxiv.org/abs/2101.06983
    """

    # A micro-batch is every parts-th row, so that it lies on the devices as evenly as the batch does.
    def split(x):
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    micro = (jax.tree.map(split, batch), jax.random.split(key, parts))
    embeddings, outs = jax.lax.map(lambda part: embed(params, *part), micro)
    (loss, measured), (at_embeddings, grads) = jax.value_and_grad(
        lambda e, p: loss_of(jax.tree.map(join, e), p), argnums=(0, 1), has_aux=True
    )(embeddings, params)

    def add(grads, part):
        (batch, key), cotangents = part
        _, pull_back = jax.vjp(lambda p: embed(p, batch, key)[0], params)
        return jax.tree.map(jnp.add, grads, *pull_back(cotangents)), None

    grads, _ = jax.lax.scan(add, grads, (micro, at_embeddings))
    outs = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.max(x, 0) if "max" in path[-1].key else jnp.mean(x, 0), outs
    )
    return (loss, measured), outs, grads


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
    """StableAdamW or AdamW; gradients clipped by their global norm, and unscaled, as the config says."""
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


def decay_of_blocks(params):
    """`clip.weight_decay_mask` of parameters that `per_tensor_guard` shows: one block, not their stack."""

    def stack(path, x):
        return x[None] if "blocks" in sharding.path_name(path).split("/") else x

    return clip.weight_decay_mask(jax.tree_util.tree_map_with_path(stack, params))


def partition(params, patterns):
    """Splits parameters into (trainable, frozen) trees, each with None for what the other has.

    Args:
      params: nested dict of arrays.
      patterns: regular expressions; a parameter whose path one of them finds is frozen.

    Raises:
      ConfigError: a pattern finds no parameter, or all are frozen.
    """
    paths = [sharding.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
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
