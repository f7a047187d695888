"""Outputs and gradients of each linear layer of a CLIP, and their relative errors between two precisions."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from swjax.diagnostics import taps
from swjax.models import clip
from swjax.models.config import LINEARS, TOWERS
from swjax.training import step as step_lib

PROBE = "probe"


def _call(self, call: Callable, *args, **kwargs):
    y = call(self, *args, **kwargs)
    return taps.report(_output_and_gradient, y, getattr(self, PROBE)[...], jax.lax.stop_gradient(y))


def _output_and_gradient(y, g):
    return jnp.stack([y, g]).astype(jnp.float32)


def probed(cfg: clip.CLIPConfig, batch: int, *, seed: int) -> tuple[nnx.GraphDef, dict]:
    """A model with a tap in every linear layer of its blocks.

    Its gradient, [blocks, 2, batch, tokens, features], is the layer's output and the gradient there.

    Args:
      cfg: the model; it holds the outputs of all layers, so that blocks are best scanned.
      batch: rows that it will be given.
      seed: of the parameters.

    Returns:
      (graph definition, parameters and taps as one nested dict).
    """
    model = clip.CLIP(cfg, rngs=nnx.Rngs(seed))
    tokens = {
        "vision": cfg.vision.kept_patches(cfg.patch_dropout) + 1,
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


def observe(
    config: ConfigDict, cfg: clip.CLIPConfig, batch: dict, *, scale: float = 1.0
) -> dict[str, jax.Array]:
    """One forward and backward pass.

    Args:
      config: of a run: its loss, augmentation and seed.
      cfg: the model.
      batch: of the loader.
      scale: of the loss, for float16; gradients are divided by it.

    Returns:
      {"output/<layer>", "gradient/<layer>" (at its output), "weight/<parameter>"}: float32, of layers and
      parameters of blocks with a leading axis that counts the blocks.
    """
    graphdef, params = probed(cfg, len(batch["text"]), seed=config.train.seed)
    nothing = jax.tree.map(lambda _: None, params)
    loss_and_grad = step_lib.make_loss_and_grad(config, graphdef)
    key = jax.random.key(config.train.seed)
    _, _, grads = jax.jit(loss_and_grad)(params, nothing, batch, key, jnp.float32(scale))
    found = {}
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("attn/k/bias") and not cfg.qk_norm:
            continue  # softmax does not see it: its gradient is 0 but for rounding
        if not name.endswith(f"/{PROBE}"):
            found[f"weight/{name}"] = g / scale
            continue
        layer = name.removesuffix(f"/{PROBE}")
        found[f"output/{layer}"], found[f"gradient/{layer}"] = g[:, 0], g[:, 1] / scale
    return found


def errors(reference: dict, other: dict) -> dict[str, list[float]]:
    """The relative error of each array, ||other - reference|| / ||reference||; of blocks one each.

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
    tiny = jnp.finfo(jnp.float32).tiny  # a gradient that is 0 in both has no error
    return jnp.atleast_1d(jnp.sqrt(square(b - a) / jnp.maximum(square(a), tiny)))
