"""The vision tower of CLIP: a ViT that embeds an image."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from swjax.models.transformer import (
    BlockInit,
    LayerNorm,
    Options,
    TowerConfig,
    apply_blocks,
    stack_blocks,
    symmetric_uniform,
)
from swjax.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TowerConfig):
    """The size of the vision tower.

    Attributes:
      image_size: side of the square image, in pixels.
      patch_size: side of a patch, in pixels.
    """

    image_size: int = 224
    patch_size: int

    def __post_init__(self):
        super().__post_init__()
        if self.patch_size < 1 or self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size must divide image_size, "
                f"got image_size={self.image_size} and patch_size={self.patch_size}"
            )

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def kept_patches(self, dropout: float) -> int:
        """Patches that patch dropout leaves in training: at least one."""
        return max(1, int(self.patches * (1 - dropout)))


class PatchEmbed(nnx.Module):
    """A convolution without bias whose stride is its size: one linear map per patch.

    Its kernel has the layout of a convolution, [patch, patch, 3, width].
    """

    def __init__(self, cfg: VisionConfig, dtype: str, *, rngs: nnx.Rngs):
        patch = cfg.patch_size
        init = symmetric_uniform((3 * patch * patch) ** -0.5)
        self.kernel = nnx.Param(init(rngs.params(), (patch, patch, 3, cfg.width)))
        self.dtype = dtype

    def __call__(self, images: jax.Array) -> jax.Array:
        """[b, h, w, 3] -> [b, patches, width], patches row by row."""
        kernel = self.kernel[...].astype(self.dtype)
        patch, _, channels, width = kernel.shape
        batch, rows, columns = images.shape[0], *(side // patch for side in images.shape[1:3])
        x = images.astype(self.dtype).reshape(batch, rows, patch, columns, patch, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)
        return x @ kernel.reshape(-1, width)


class VisionTransformer(nnx.Module):
    """Image -> embedding, not yet normalised.

    Patches -> class token + positions -> patch dropout -> LayerNorm -> blocks -> LayerNorm of the class
    token -> projection.

    Args:
      cfg: its size.
      embed_dim: features of the embedding.
      options: how the blocks compute.
      recipes: the recipe of each linear layer of a block, by name.
      patch_dropout: fraction of the patches left out in training; the class token always stays.
    """

    def __init__(
        self,
        cfg: VisionConfig,
        embed_dim: int,
        options: Options,
        recipes: dict[str, Recipe],
        *,
        patch_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.options, self.patch_dropout = cfg, options, patch_dropout
        normal = nnx.initializers.normal(cfg.width**-0.5)
        self.patch_embed = PatchEmbed(cfg, options.dtype, rngs=rngs)
        self.class_embedding = nnx.Param(normal(rngs.params(), (cfg.width,)))
        self.position_embedding = nnx.Param(normal(rngs.params(), (cfg.patches + 1, cfg.width)))
        self.ln_pre = LayerNorm(cfg.width)
        self.blocks = stack_blocks(
            cfg, options, recipes, block_init(cfg), causal=False, rngs=rngs
        )
        self.ln_post = LayerNorm(cfg.width)
        self.projection = nnx.Linear(
            cfg.width, embed_dim, use_bias=False, kernel_init=normal, rngs=rngs
        )

    def __call__(
        self,
        images: jax.Array,
        *,
        deterministic: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, dict]:
        """Embeds images.

        Args:
          images: [b, image_size, image_size, 3] normalised, floating.
          deterministic: no patch dropout: evaluation.
          dropout_key: PRNG key of patch dropout, needed in training.

        Returns:
          Embeddings [b, embed_dim] float32, and {"blocks": magnitudes of each block's output,
          "pre_logits": class token [b, width] before the projection}.

        Raises:
          ValueError: images of another shape or integer images; patch dropout without a key.
        """
        self._check(images)
        x = self.patch_embed(images)
        position = self.position_embedding[...].astype(x.dtype)
        x = x + position[None, 1:]
        if self.patch_dropout > 0 and not deterministic:
            x = drop_patches(x, self.cfg.kept_patches(self.patch_dropout), dropout_key)
        first = self.class_embedding[...].astype(x.dtype) + position[0]
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, first.size)), x], axis=1)
        x, magnitudes = apply_blocks(self.blocks, self.ln_pre(x), self.options)
        pooled = self.ln_post(x[:, 0])
        embedding = self.projection(pooled.astype(jnp.float32))
        return embedding, {"blocks": magnitudes, "pre_logits": pooled}

    def _check(self, images):
        side = self.cfg.image_size
        if images.ndim != 4 or images.shape[1:] != (side, side, 3):
            raise ValueError(f"images must be [batch, {side}, {side}, 3], got {images.shape}")
        if not jnp.issubdtype(images.dtype, jnp.floating):
            raise ValueError(
                f"images must be floating, got {images.dtype}: normalise them with swjax.data.preprocess"
            )


def drop_patches(x: jax.Array, keep: int, key: jax.Array | None) -> jax.Array:
    """A uniformly random subset of each image's patches.

    Args:
      x: [b, patches, width].
      keep: patches left, a static number.
      key: PRNG key.

    Returns:
      [b, keep, width].

    Raises:
      ValueError: no key.
    """
    if key is None:
        raise ValueError("patch dropout needs dropout_key in training: pass one, or deterministic=True")
    chosen = jnp.argsort(jax.random.uniform(key, x.shape[:2]), axis=1)[:, :keep]
    return jnp.take_along_axis(x, chosen[..., None], axis=1)


def block_init(cfg: VisionConfig) -> BlockInit:
    """open_clip leaves this tower at PyTorch's defaults; q, k and v are Xavier-uniform as one matrix."""
    return BlockInit(
        qkv=symmetric_uniform((6 / (cfg.width + 3 * cfg.width)) ** 0.5),
        out=symmetric_uniform(cfg.width**-0.5),
        fc1=symmetric_uniform(cfg.width**-0.5),
        fc2=symmetric_uniform(cfg.mlp_width**-0.5),
    )
