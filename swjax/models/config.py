"""The configuration of a CLIP model: tower sizes, block options and the named models."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from swjax import attention, auto, checkpoint_policies, recipes
from swjax.fitting import Fitting
from swjax.recipes import Recipe

ARCHITECTURES = ("clip", "siglip")
TOWERS = ("vision", "text")
# Linear layers of a block.
LINEARS = ("attn/q", "attn/k", "attn/v", "attn/out", "mlp/fc1", "mlp/fc2")

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = (None, *attention.NAMES)
GELUS = ("exact", "tanh", "quick")
POLICIES = {
    "full": checkpoint_policies.save_weights,
    # The policy works by name: JAX's own would save int32 accumulators, and does not recognize opaque
    # kernels.
    "dots": checkpoint_policies.save_outputs,
    "save_quantized": checkpoint_policies.save_quantized,
    "save_linear": checkpoint_policies.save_linear,
}
REMAT = ("none", *POLICIES)


def _check_choice(name: str, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _divisor(width: int, most: int) -> int:
    """The largest divisor of `width` up to `most`, found within a thousand trials, or their common divisor.

    >>> _divisor(768, 7), _divisor(10**9 + 7, 10**9)
    (6, 1)
    """
    near = range(min(width, most), max(most - 1000, 0), -1)
    return next((heads for heads in near if width % heads == 0), math.gcd(width, most))


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The size of the stack of blocks in one tower.

    Attributes:
      width: features per token.
      layers: number of blocks.
      heads: attention heads, with width / heads features each.
      mlp_ratio: ratio of the MLP's hidden features to width.
    """

    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads) < 1:
            raise ValueError(
                f"width, layers and heads must be at least 1, "
                f"got {self.width}, {self.layers} and {self.heads}"
            )
        if not 1 <= self.width * self.mlp_ratio < math.inf:
            raise ValueError(
                f"mlp_ratio must be finite and give at least 1 feature, got {self.mlp_ratio}"
            )
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width, got width={self.width} and heads={self.heads}: "
                f"try heads={_divisor(self.width, self.heads)}"
            )

    @property
    def mlp_width(self) -> int:
        return int(self.width * self.mlp_ratio)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(k, n) of the weights of a block, those of `LINEARS`."""
        attention, hidden = ((self.width, self.width),) * 4, (self.width, self.mlp_width)
        return (*attention, hidden, hidden[::-1])


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TowerConfig):
    """The size of the vision tower.

    Attributes:
      image_size: side of the square image, in pixels.
      patch_size: side of a patch, in pixels.
      resize_mode, interpolation, fill_color: how pictures become squares, see `swjax.data.Fitting`.
    """

    image_size: int = 224
    patch_size: int
    resize_mode: str = "shortest"
    interpolation: str = "bicubic"
    fill_color: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        Fitting.of(self)  # checks them
        if self.patch_size < 1 or self.image_size % self.patch_size:
            size, patch = self.image_size, self.patch_size
            remedy = f": try image_size={max(patch, size - size % patch)}" if patch > 0 else ""
            raise ValueError(
                f"patch_size must divide image_size, got image_size={size} and patch_size={patch}{remedy}"
            )

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def kept_patches(self, dropout: float) -> int:
        """The number of patches that patch dropout keeps in training, at least one."""
        return max(1, int(self.patches * (1 - dropout)))


@dataclass(frozen=True, kw_only=True)
class TextConfig(TowerConfig):
    """The size of the text tower.

    Attributes:
      context_length: largest number of tokens per caption, including the start and end tokens.
      vocab_size: number of token ids; the end token has the largest id.
    """

    context_length: int = 77
    vocab_size: int = 49408

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.context_length, self.vocab_size) < 1:
            raise ValueError(
                f"context_length and vocab_size must be at least 1, "
                f"got {self.context_length} and {self.vocab_size}"
            )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the blocks. Only `layer_scale` and `qk_norm` change the parameters.

    Attributes:
      recipe: recipe of the linear layers: a name in `swjax.recipes.RECIPES`, "auto", which `swjax.auto`
        replaces by the best name for the device and the widths, a Recipe, or a mapping from
        regular expressions to these. An expression must match the whole path of a layer, such as
        "vision/blocks/attn/q" or "text/blocks/mlp/fc1". The first match applies, and layers without a match
        use "standard".
      implementation: implementation of the recipes' kernels, see `swjax.kernels.dispatch`; None chooses.
      dtype: dtype of the activations, for compute and storage. Parameters, attention scores, softmax and
        LayerNorm are float32.
      attention: "fused", swjax's kernels for up to 320 tokens in 16 bits; "cudnn", which pads tokens to
        a multiple of 8; or "xla". None chooses, see `swjax.attention.choose`.
      gelu: "exact", "tanh" or "quick".
      layer_scale: initial value of a learned per-feature factor on each residual branch; None has no factor.
        0.0 keeps features small, which permits higher learning rates, in fp8 and in bf16.
      qk_norm: whether LayerNorm applies to each head's queries and keys.
      remat: what a block saves for its backward pass in addition to quantized weights: "none" (everything,
        no recomputation), "full" (only its input), "dots" (the outputs of its linear layers too),
        "save_quantized" or "save_linear" of `swjax.checkpoint_policies`.
      scan_layers: run the blocks in a `jax.lax.scan`, which compiles faster, rather than unrolled,
        which runs faster.
    """

    recipe: str | Recipe | Mapping[str, str | Recipe] | tuple[tuple[str, str | Recipe], ...] = (
        "switchback"
    )
    implementation: str | None = None
    dtype: str = "bfloat16"
    attention: str | None = None
    gelu: str = "exact"
    layer_scale: float | None = None
    qk_norm: bool = False
    remat: str = "none"
    scan_layers: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.recipe, Mapping):  # a tuple is hashable
            object.__setattr__(self, "recipe", tuple(self.recipe.items()))
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("attention", self.attention, ATTENTION)
        _check_choice("gelu", self.gelu, GELUS)
        _check_choice("remat", self.remat, REMAT)
        if self.attention in ("cudnn", "fused") and self.dtype == "float32":
            raise ValueError(
                f"attention={self.attention!r} needs a 16-bit dtype, got dtype='float32': "
                "set dtype='bfloat16', or attention='xla'"
            )
        for tower in TOWERS:
            self.recipes(tower)  # raises an error for an unknown recipe

    def recipes(self, tower: str) -> dict[str, Recipe]:
        """The recipe of each linear layer of a tower's blocks: {"attn/q": ..., ...}.

        Raises:
          ValueError: a recipe does not exist, or an expression matches no linear layer of either tower.
        """
        if isinstance(self.recipe, str | Recipe):
            return dict.fromkeys(LINEARS, recipes.get(self.recipe))
        paths = [f"{name}/blocks/{linear}" for name in TOWERS for linear in LINEARS]
        chosen = recipes.first_match(dict(self.recipe), paths)
        return {
            linear: recipes.get(chosen.get(f"{tower}/blocks/{linear}", "standard"))
            for linear in LINEARS
        }


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adaptation: the kernels of all blocks are frozen, and chosen ones change by ``scale a b``.

    Attributes:
      rank: columns of a and rows of b.
      alpha: scale times rank; 0 means rank, so the scale is 1.
      pattern: regular expression that matches a part of the paths of the layers to adapt, such as
        "vision/blocks/attn/q"; "" adapts all linear layers of the blocks.

    >>> LoRA(rank=8, alpha=16.0, pattern="attn/[qv]").adapts("text/blocks/attn/k")
    False
    """

    rank: int
    alpha: float = 0.0
    pattern: str = ""

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, got {self.rank!r}")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be finite and at least 0, got {self.alpha!r}")
        paths = [f"{tower}/blocks/{linear}" for tower in TOWERS for linear in LINEARS]
        try:
            matched = any(map(self.adapts, paths))
        except re.error as error:
            raise ValueError(
                f"pattern={self.pattern!r} is not a regular expression: {error}; '' matches all layers"
            ) from error
        if not matched:
            raise ValueError(
                f"pattern={self.pattern!r} matches no linear layer of the blocks: they are "
                f"{{{','.join(TOWERS)}}}/blocks/{{{','.join(LINEARS)}}}"
            )

    def adapts(self, path: str) -> bool:
        """Whether the layer at a path has a low-rank product."""
        return re.search(self.pattern, path) is not None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.alpha else 1.0


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(Options):
    """The configuration of a CLIP model: two towers, and options for the blocks of both (`Options`).

    Attributes:
      vision, text: sizes of the towers.
      embed_dim: features of the shared embedding space.
      patch_dropout: fraction of the image patches that are dropped in training.
      init_logit_scale: initial logarithm of the logits' scale.
      init_logit_bias: initial logit bias for the sigmoid loss; None omits the parameter.
      architecture: "clip", or "siglip": no class token, attention (MAP) pooling of the patches, a text tower
        without causal mask whose embedding is the last position, LayerNorm with epsilon 1e-6.
      lora: low-rank adaptation of the blocks, or None.
    """

    vision: VisionConfig
    text: TextConfig
    embed_dim: int
    patch_dropout: float = 0.0
    init_logit_scale: float = math.log(1 / 0.07)
    init_logit_bias: float | None = None
    architecture: str = "clip"
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        if self.recipe == auto.NAME:  # a model keeps its recipe, also on another device
            towers = [tower for tower in (self.vision, self.text) for _ in range(tower.layers)]
            shapes = [shape for tower in towers for shape in tower.matrices]
            object.__setattr__(self, "recipe", auto.choose(*shapes))
        super().__post_init__()
        _check_choice("architecture", self.architecture, ARCHITECTURES)
        if self.siglip and self.embed_dim != self.vision.width:
            raise ValueError(
                f"embed_dim must be vision.width={self.vision.width} with architecture='siglip', whose image "
                f"tower has no projection, got {self.embed_dim}"
            )
        if self.embed_dim < 1:
            raise ValueError(f"embed_dim must be at least 1, got {self.embed_dim}")
        if not 0 <= self.patch_dropout < 1:
            raise ValueError(f"patch_dropout must be in [0, 1), got {self.patch_dropout}")

    @property
    def siglip(self) -> bool:
        return self.architecture == "siglip"

    @property
    def epsilon(self) -> float:
        """The epsilon of LayerNorm: PyTorch's default for CLIP, Flax's default for SigLIP."""
        return 1e-6 if self.siglip else 1e-5

    @property
    def vision_tokens(self) -> int:
        """Tokens per image without patch dropout: the patches, and for CLIP the class token."""
        return self.vision.patches + (not self.siglip)


def _clip(embed_dim: int, vision: tuple, text: tuple, patch_size: int) -> CLIPConfig:
    (vw, vl, vh), (tw, tl, th) = vision, text
    return CLIPConfig(
        vision=VisionConfig(width=vw, layers=vl, heads=vh, patch_size=patch_size),
        text=TextConfig(width=tw, layers=tl, heads=th),
        embed_dim=embed_dim,
    )


CONFIGS = {
    # Sized for two CPU cores, on which bfloat16 is slow.
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


def config(name: str | CLIPConfig, **overrides: Any) -> CLIPConfig:
    """Looks up a named configuration and replaces some of its fields.

    Args:
      name: a key of `CONFIGS`, or a configuration.
      **overrides: fields of `CLIPConfig`; `vision`, `text` and `lora` may be mappings of their fields.

    Raises:
      ValueError: the name or a field does not exist, or a value is invalid.

    >>> config("tiny", remat="full", vision={"patch_size": 8}).vision.patches
    64
    """
    if isinstance(name, CLIPConfig):
        return _replace(name, overrides)
    if name not in CONFIGS:
        raise ValueError(f"model must be one of {', '.join(CONFIGS)}, got {name!r}")
    return _replace(CONFIGS[name], overrides)


def _replace(base, overrides: Mapping):
    _check_fields(type(base), overrides)
    nested = {
        name: _replace(getattr(base, name), value)
        for name, value in overrides.items()
        if name in TOWERS and isinstance(value, Mapping)
    }
    if isinstance(adaptation := overrides.get("lora"), Mapping):
        _check_fields(LoRA, adaptation)
        nested["lora"] = LoRA(**{"rank": None, **adaptation})
    return replace(base, **{**overrides, **nested})


def _check_fields(kind: type, names: Iterable[str]) -> None:
    known = [field.name for field in fields(kind)]
    for name in names:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}: it has {', '.join(known)}")
