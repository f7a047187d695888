"""CLIP: an image tower and a text tower that embed into one space.

The architectures are those of open_clip. `swjax.models.config` defines the options, `vit` and `text` the
towers, and `transformer` the blocks of both.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from swjax.models import lora
from swjax.models.config import CONFIGS, CLIPConfig, TowerConfig, config
from swjax.models.text import TextTransformer
from swjax.models.vit import VisionTransformer

__all__ = [
    "CLIP",
    "CONFIGS",
    "CLIPConfig",
    "block_axes",
    "clamp_logit_scale",
    "config",
    "flops_per_example",
    "weight_decay_mask",
]

MAX_LOG_SCALE = math.log(100)


class CLIP(nnx.Module):
    """Embeds images and captions as unit vectors; a matching pair has a large inner product.

    Args:
      cfg: one of `CONFIGS`, or `config(name, **overrides)`.
      rngs: random streams with a "params" stream.

    >>> model = nnx.eval_shape(lambda: CLIP(config("vit_b32"), rngs=nnx.Rngs(0)))  # shapes only
    >>> sum(parameter.size for parameter in jax.tree.leaves(nnx.state(model)))
    151277313

    References:
      Radford et al., "Learning transferable visual models from natural language supervision", 2021,
      https://arxiv.org/abs/2103.00020
    """

    def __init__(self, cfg: CLIPConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.vision = VisionTransformer(cfg, rngs=rngs)
        self.text = TextTransformer(cfg, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.asarray(cfg.init_logit_scale, jnp.float32))
        if cfg.init_logit_bias is not None:
            self.logit_bias = nnx.Param(jnp.asarray(cfg.init_logit_bias, jnp.float32))
        if cfg.lora is not None:
            lora.adapt(self, cfg.lora, rngs)

    def encode_image(
        self, images: jax.Array, *, deterministic: bool = True, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, dict]:
        """Returns unit vectors [b, embed_dim] float32 and intermediates, see `VisionTransformer`."""
        embedding, out = self.vision(images, deterministic=deterministic, dropout_key=dropout_key)
        return normalize(embedding), out

    def encode_text(self, tokens: jax.Array) -> tuple[jax.Array, dict]:
        """Returns unit vectors [b, embed_dim] float32 and intermediates, see `TextTransformer`."""
        embedding, out = self.text(tokens)
        return normalize(embedding), out


def normalize(x: jax.Array) -> jax.Array:
    """Normalizes the rows of x [b, e] to length 1; a zero row stays zero, with a finite gradient."""
    squared = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squared, 1e-24))


def block_axes(params: Any) -> Any:
    """The axis of each parameter that enumerates blocks: 0 for stacked parameters, None for the others.

    `stable_adamw(block_axes=...)` uses it to keep one RMS per block.

    Args:
      params: the parameters of a CLIP, `nnx.state(model, nnx.Param)`, or a tree with the same names.

    Returns:
      A tree with the structure of `params`, whose leaves are 0 or None.
    """
    return _map_names(lambda names, _: 0 if "blocks" in names else None, params)


def weight_decay_mask(params: Any) -> Any:
    """A mask that is True for the parameters with weight decay.

    It excludes vectors and scalars (per block, if stacked): biases, LayerNorms, layer-scale, the class
    embedding and the logit scale. It also excludes position embeddings and the query of attention pooling.

    Args:
      params: see `block_axes`.

    Returns:
      A tree of bools with the structure of `params`.
    """

    def decays(names, parameter):
        return parameter.ndim - ("blocks" in names) >= 2 and not {"position_embedding", "probe"} & {
            *names
        }

    return _map_names(decays, params)


def clamp_logit_scale(params: Any) -> Any:
    """Clamps the logarithm of the logits' scale in `params` to [0, ln 100].

    Args:
      params: see `block_axes`.
    """

    def clamp(names, parameter):
        if "logit_scale" not in names:
            return parameter
        return jnp.clip(parameter, 0.0, MAX_LOG_SCALE)

    return _map_names(clamp, params)


def _map_names(function, params):
    """Maps a function of (names on the path to a parameter, parameter) over a tree."""

    def call(path, parameter):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return function(names, parameter)

    return jax.tree_util.tree_map_with_path(call, params)


def flops_per_example(cfg: CLIPConfig, *, training: bool = True) -> int:
    """Counts the FLOPs of the matrix products in the forward pass of one image and one caption.

    A multiplication and an addition count as two. Attention counts every pair of tokens, causal or not.
    Padding is excluded, and so are the logits, whose cost depends on the batch. A training step without
    recomputation costs three times as much.

    Args:
      cfg: the model configuration.
      training: whether patch dropout applies.

    >>> round(flops_per_example(CONFIGS["vit_b32"]) / 1e9, 2)
    14.78
    """
    vision, text = cfg.vision, cfg.text
    patches = vision.kept_patches(cfg.patch_dropout) if training else vision.patches
    embed_patches = 2 * patches * 3 * vision.patch_size**2 * vision.width
    project = 2 * (vision.width * (not cfg.siglip) + text.width) * cfg.embed_dim
    if cfg.siglip:
        project += _pool_flops(vision, patches)
    tokens = patches + (not cfg.siglip)
    towers = _blocks_flops(vision, tokens) + _blocks_flops(text, text.context_length)
    return embed_patches + towers + project


def _pool_flops(cfg: TowerConfig, tokens: int) -> int:
    keys_and_values = tokens * (4 * cfg.width**2 + 4 * cfg.width)
    return keys_and_values + 4 * cfg.width**2 + 4 * cfg.width * cfg.mlp_width


def _blocks_flops(cfg: TowerConfig, tokens: int) -> int:
    linears = 4 * cfg.width**2 + 2 * cfg.width * cfg.mlp_width
    return 2 * cfg.layers * tokens * (linears + 2 * tokens * cfg.width)
