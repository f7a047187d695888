"""CLIP: an image and a text tower with embeddings in one space.

The architectures are open_clip's; the options (`Options`) are what the paper varies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
from flax import nnx

from swjax.models.text import TextConfig, TextTransformer
from swjax.models.transformer import LINEARS, Options, TowerConfig
from swjax.models.vit import VisionConfig, VisionTransformer

TOWERS = ("vision", "text")
MAX_LOG_SCALE = math.log(100)


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(Options):
    """A CLIP model: two towers and how both compute (`Options`).

    Attributes:
      vision, text: the size of the towers.
      embed_dim: features of the common space.
      patch_dropout: fraction of the image patches left out in training.
      init_logit_scale: initial logarithm of the logits' scale.
      init_logit_bias: initial logit bias for the sigmoid loss; None: no such parameter.
    """

    vision: VisionConfig
    text: TextConfig
    embed_dim: int
    patch_dropout: float = 0.0
    init_logit_scale: float = math.log(1 / 0.07)
    init_logit_bias: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.embed_dim < 1:
            raise ValueError(f"embed_dim must be at least 1, got {self.embed_dim}")
        if not 0 <= self.patch_dropout < 1:
            raise ValueError(f"patch_dropout must be in [0, 1), got {self.patch_dropout}")
        self.recipes(TOWERS)  # a recipe that does not exist fails here


def _clip(embed_dim: int, vision: tuple, text: tuple, patch_size: int) -> CLIPConfig:
    (vw, vl, vh), (tw, tl, th) = vision, text
    return CLIPConfig(
        vision=VisionConfig(width=vw, layers=vl, heads=vh, patch_size=patch_size),
        text=TextConfig(width=tw, layers=tl, heads=th),
        embed_dim=embed_dim,
    )


CONFIGS = {
    # For two CPU cores, which compute bfloat16 slowly.
    "tiny": CLIPConfig(
        vision=VisionConfig(width=128, layers=4, heads=4, patch_size=16, image_size=64),
        text=TextConfig(width=128, layers=2, heads=4, context_length=16),
        embed_dim=128,
        dtype="float32",
    ),
    "vit_b32": _clip(512, vision=(768, 12, 12), text=(512, 12, 8), patch_size=32),
    "vit_b16": _clip(512, vision=(768, 12, 12), text=(512, 12, 8), patch_size=16),
    "vit_l14": _clip(768, vision=(1024, 24, 16), text=(768, 12, 12), patch_size=14),
    "vit_h14": _clip(1024, vision=(1280, 32, 16), text=(1024, 24, 16), patch_size=14),
}


def config(name: str, **overrides) -> CLIPConfig:
    """The configuration of that name with some fields replaced.

    Args:
      name: a key of `CONFIGS`.
      **overrides: fields of `CLIPConfig`; `vision` and `text` may be mappings of fields of these.

    Raises:
      ValueError: there is no such name or field, or a value does not fit.

    >>> config("tiny", remat="full", vision={"patch_size": 8}).vision.patches
    64
    """
    if name not in CONFIGS:
        raise ValueError(f"model must be one of {', '.join(CONFIGS)}, got {name!r}")
    return _replace(CONFIGS[name], overrides)


def _replace(base, overrides: Mapping):
    names = [field.name for field in fields(base)]
    for name in overrides:
        if name not in names:
            raise ValueError(f"{type(base).__name__} has no field {name!r}: it has {', '.join(names)}")
    nested = {
        name: _replace(getattr(base, name), value)
        for name, value in overrides.items()
        if name in TOWERS and isinstance(value, Mapping)
    }
    return replace(base, **{**overrides, **nested})


class CLIP(nnx.Module):
    """Images and captions as unit vectors; a matching pair has a large inner product.

    Args:
      cfg: see `CLIPConfig`, `CONFIGS`, `config`.
      rngs: a "params" stream.

    >>> model = CLIP(config("tiny"), rngs=nnx.Rngs(0))
    >>> embedding, out = model.encode_text(jnp.array([[49406, 320, 49407]]))
    >>> embedding.shape, sorted(out), out["blocks"]["feature_max_abs"].shape
    ((1, 128), ['blocks', 'pre_logits'], (2,))

    References:
      Radford et al., "Learning transferable visual models from natural language supervision", 2021,
      https://arxiv.org/abs/2103.00020
    """

    def __init__(self, cfg: CLIPConfig, *, rngs: nnx.Rngs):
        recipes = cfg.recipes(TOWERS)
        vision, text = (
            {name: recipes[f"{tower}/blocks/{name}"] for name in LINEARS} for tower in TOWERS
        )
        self.cfg = cfg
        self.vision = VisionTransformer(
            cfg.vision, cfg.embed_dim, cfg, vision, patch_dropout=cfg.patch_dropout, rngs=rngs
        )
        self.text = TextTransformer(cfg.text, cfg.embed_dim, cfg, text, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.asarray(cfg.init_logit_scale, jnp.float32))
        if cfg.init_logit_bias is not None:
            self.logit_bias = nnx.Param(jnp.asarray(cfg.init_logit_bias, jnp.float32))

    def encode_image(
        self,
        images: jax.Array,
        *,
        deterministic: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, dict]:
        """Unit vectors [b, embed_dim] float32 and intermediates, see `VisionTransformer`."""
        embedding, out = self.vision(images, deterministic=deterministic, dropout_key=dropout_key)
        return normalise(embedding), out

    def encode_text(self, tokens: jax.Array) -> tuple[jax.Array, dict]:
        """Unit vectors [b, embed_dim] float32 and intermediates, see `TextTransformer`."""
        embedding, out = self.text(tokens)
        return normalise(embedding), out


def normalise(x: jax.Array) -> jax.Array:
    """Rows of [b, e] at length 1; a zero row stays zero, and its gradient finite."""
    squared = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squared, 1e-24))


def block_axes(params):
    """Which axis of each parameter enumerates blocks: 0 for stacked ones, None for the others.

    For `stable_adamw(block_axes=...)`, which keeps one RMS a block.

    Args:
      params: the parameters of a CLIP, `nnx.state(model, nnx.Param)`, or a tree with the same names.

    Returns:
      A tree like `params` of 0 and None.
    """
    return _map_names(lambda names, _: 0 if "blocks" in names else None, params)


def weight_decay_mask(params):
    """True for the parameters that weight decay applies to.

    It does not to vectors and scalars (of one block, if stacked): biases, LayerNorms, layer-scale, the
    class embedding, the logit scale; nor to position embeddings.

    Args:
      params: as for `block_axes`.

    Returns:
      A tree like `params` of bool.
    """

    def decays(names, parameter):
        return parameter.ndim - ("blocks" in names) >= 2 and "position_embedding" not in names

    return _map_names(decays, params)


def clamp_logit_scale(params):
    """`params` with the logarithm of the logits' scale clamped to [0, ln 100].

    Args:
      params: as for `block_axes`.
    """

    def clamp(names, parameter):
        if "logit_scale" not in names:
            return parameter
        return jnp.clip(parameter, 0.0, MAX_LOG_SCALE)

    return _map_names(clamp, params)


def _map_names(function, params):
    """Maps (names on the path to a parameter, parameter) over a tree."""

    def call(path, parameter):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return function(names, parameter)

    return jax.tree_util.tree_map_with_path(call, params)


def flops_per_example(cfg: CLIPConfig, *, training: bool = True) -> int:
    """Floating-point operations of one image's and one caption's forward pass, matrix products only.

    A multiplication and an addition are two. Attention counts every pair of tokens, causal or not;
    padding does not count, and neither do the logits, whose cost depends on the batch. A training step
    without recomputation costs three times this.

    Args:
      cfg: the model.
      training: with patch dropout.

    >>> round(flops_per_example(CONFIGS["vit_b32"]) / 1e9, 2)
    14.78
    """
    vision, text = cfg.vision, cfg.text
    patches = vision.kept_patches(cfg.patch_dropout) if training else vision.patches
    embed_patches = 2 * vision.patches * 3 * vision.patch_size**2 * vision.width
    project = 2 * (vision.width + text.width) * cfg.embed_dim
    towers = _blocks_flops(vision, patches + 1) + _blocks_flops(text, text.context_length)
    return embed_patches + towers + project


def _blocks_flops(cfg: TowerConfig, tokens: int) -> int:
    linears = 4 * cfg.width**2 + 2 * cfg.width * cfg.mlp_width
    return 2 * cfg.layers * tokens * (linears + 2 * tokens * cfg.width)
