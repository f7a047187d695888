"""Outputs and gradients of each linear layer of a CLIP model, and their relative errors."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from swjax.diagnostics import taps
from swjax.models import clip, sharding
from swjax.models.config import LINEARS, TOWERS
from swjax.training import step as step_lib
from swjax.training.setup import check_config
from swjax.training.state.initialization import first_parameters

PROBE = "probe"


def _call(self, call: Callable, *args, addend: jax.Array | None = None, **kwargs):
    """Reports the output of a `swjax.nnx.Linear` without its addend, which has the errors of other layers."""
    product = y = call(self, *args, **kwargs)
    if addend is not None:
        y = call(self, *args, addend=addend, **kwargs)
    product = jax.lax.stop_gradient(product)
    return taps.report(_output_and_gradient, y, getattr(self, PROBE)[...], product)


def _output_and_gradient(y, g):
    return jnp.stack([y, g]).astype(jnp.float32)


def probed(
    cfg: clip.CLIPConfig, batch: int, *, seed: int, init_from: str = ""
) -> tuple[nnx.GraphDef, dict]:
    """Builds a model with a tap in every linear layer of its blocks.

    The gradient of a tap, [blocks, 2, batch, tokens, features], is the layer's output and its gradient.

    Args:
      cfg: the model configuration. A pass keeps the outputs of all layers, so scanned blocks save memory.
      batch: batch size of the inputs.
      seed: seed of the parameters.
      init_from: where the parameters come from, as `checkpoint.init_from`; "": the seed.

    Returns:
      (graph definition, parameters and taps as one nested dict).
    """
    model = clip.CLIP(cfg, rngs=nnx.Rngs(seed))
    if init_from:
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, _weights(init_from, cfg, nnx.to_pure_dict(state)))
        nnx.update(model, state)
    tokens = {
        "vision": cfg.vision.kept_patches(cfg.patch_dropout) + (not cfg.siglip),
        "text": cfg.text.context_length,
    }
    for tower in TOWERS:
        blocks = getattr(model, tower).blocks
        for name in LINEARS:
            part, linear = name.split("/")
            layer = getattr(getattr(blocks, part), linear)
            depth, _, width = layer.kernel.shape
            taps.attach(layer, _call, PROBE, (depth, 2, batch, tokens[tower], width))
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def _weights(address: str, cfg: clip.CLIPConfig, params: dict) -> dict:
    """The weights at an address, in place of the parameters."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    sharded = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    return jax.tree.map(jnp.asarray, jax.device_get(first_parameters(address, cfg, sharded)))


def observe(config: ConfigDict, batch: dict) -> dict[str, jax.Array]:
    """Runs one forward and backward pass, and collects outputs and gradients.

    Args:
      config: the config of a run; the pass uses its model, loss, augmentation, loss scale and seed. The
        returned gradients are divided by the scale.
      batch: a batch of the loader.

    Returns:
      {"output/<layer>", "gradient/<layer>" (of the output), "weight/<parameter>"}: float32 arrays. Layers and
      parameters of blocks have the number of blocks as leading axis.
    """
    _, cfg = check_config(config)
    scale = config.optimizer.loss_scale if config.optimizer.loss_scaling else 1.0
    seed, init_from = config.train.seed, config.checkpoint.init_from
    graphdef, params = probed(cfg, len(batch["text"]), seed=seed, init_from=init_from)
    nothing = jax.tree.map(lambda _: None, params)
    loss_and_grad = step_lib.make_loss_and_grad(config, graphdef)
    key = jax.random.key(seed)
    loss_and_grad = jax.jit(loss_and_grad, compiler_options=sharding.compiler_options())
    _, _, grads = loss_and_grad(params, nothing, batch, key, jnp.float32(scale))
    found = {}
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        cancelled = "pool/k/bias" if cfg.qk_norm else ("attn/k/bias", "pool/k/bias")
        if name.endswith(cancelled):
            continue  # softmax cancels this bias: its gradient is 0 up to rounding
        if not name.endswith(f"/{PROBE}"):
            found[f"weight/{name}"] = g / scale
            continue
        layer = name.removesuffix(f"/{PROBE}")
        found[f"output/{layer}"], found[f"gradient/{layer}"] = g[:, 0], g[:, 1] / scale
    return found


def errors(reference: dict, other: dict) -> dict[str, list[float]]:
    """The relative error of each array, ||other - reference|| / ||reference||, per block of a stack.

    >>> errors({"weight/w": jnp.array([3.0, 4.0])}, {"weight/w": jnp.array([3.0, 4.625])})
    {'weight/w': [0.125]}
    """
    return {
        name: _relative(reference[name], other[name], "blocks" in name.split("/")).tolist()
        for name in reference
    }


@partial(jax.jit, static_argnums=2)
def _relative(a, b, stacked: bool):
    axes = tuple(range(int(stacked), a.ndim))
    square = lambda x: jnp.sum(jnp.square(x), axis=axes)
    tiny = jnp.finfo(jnp.float32).tiny  # the error of a gradient that is 0 in both is 0
    return jnp.atleast_1d(jnp.sqrt(square(b - a) / jnp.maximum(square(a), tiny)))
