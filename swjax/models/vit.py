"""The vision tower of CLIP: a ViT that embeds an image."""

import jax
import jax.numpy as jnp
from flax import nnx

from swjax.models.config import CLIPConfig, VisionConfig
from swjax.models.embeddings import first_rows
from swjax.models.transformer import (
    BlockInit,
    LayerNorm,
    apply_blocks,
    gelu,
    stack_blocks,
    symmetric_uniform,
)


class PatchEmbed(nnx.Module):
    """A convolution whose stride equals its kernel size: one linear map per patch.

    The kernel has a convolution's layout, [patch, patch, 3, width]. Only SigLIP's patch embedding has a bias.
    """

    def __init__(self, cfg: VisionConfig, dtype: str, *, use_bias: bool, rngs: nnx.Rngs):
        patch = cfg.patch_size
        init = symmetric_uniform((3 * patch * patch) ** -0.5)
        self.kernel = nnx.Param(init(rngs.params(), (patch, patch, 3, cfg.width)))
        self.bias = nnx.Param(jnp.zeros(cfg.width, jnp.float32)) if use_bias else None
        self.dtype = dtype

    def __call__(self, images: jax.Array, chosen: jax.Array | None = None) -> jax.Array:
        """Maps [b, h, w, 3] to [b, patches, width] float32, with patches in row-major order.

        With `chosen`, integers [b, n], it maps only these patches of each image, to [b, n, width].
        """
        kernel = self.kernel[...].astype(self.dtype)
        patch, _, channels, width = kernel.shape
        batch, rows, columns = (images.shape[0], *(side // patch for side in images.shape[1:3]))
        x = images.astype(self.dtype).reshape(batch, rows, patch, columns, patch, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)
        if chosen is not None:
            x = jnp.take_along_axis(x, chosen[..., None], axis=1)
        y = (x @ kernel.reshape(-1, width)).astype(jnp.float32)
        return y if self.bias is None else y + self.bias[...][None, None]


class VisionTransformer(nnx.Module):
    """Computes the embedding of an image, not yet normalized.

    Patch dropout in training -> patch embedding + positions -> class token -> LayerNorm -> blocks ->
    LayerNorm of the class token -> projection. SigLIP's tower has no class token, no LayerNorm before the
    blocks and no projection; it pools the patches by attention.

    Args:
      cfg: the configuration of the whole model.
    """

    def __init__(self, cfg: CLIPConfig, *, rngs: nnx.Rngs):
        tower, width = cfg.vision, cfg.vision.width
        normal = nnx.initializers.normal(width**-0.5)
        self.cfg = cfg
        self.patch_embed = PatchEmbed(tower, cfg.dtype, use_bias=cfg.siglip, rngs=rngs)
        if not cfg.siglip:
            self.class_embedding = nnx.Param(normal(rngs.params(), (width,)))
        self.position_embedding = nnx.Param(normal(rngs.params(), (cfg.vision_tokens, width)))
        if not cfg.siglip:
            self.ln_pre = LayerNorm(width)
        self.blocks = stack_blocks(
            tower, cfg, cfg.recipes("vision"), block_init(tower), causal=False, rngs=rngs
        )
        self.ln_post = LayerNorm(width, cfg.epsilon)
        if cfg.siglip:
            self.pool = AttentionPool(cfg, rngs=rngs)
            return
        self.projection = nnx.Linear(
            width, cfg.embed_dim, use_bias=False, kernel_init=normal, rngs=rngs
        )

    def __call__(
        self, images: jax.Array, *, deterministic: bool = True, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, dict]:
        """Embeds images.

        Args:
          images: [b, image_size, image_size, 3], normalized, floating-point.
          deterministic: whether to disable patch dropout, for evaluation.
          dropout_key: PRNG key of patch dropout, required in training.

        Returns:
          Embeddings [b, embed_dim] float32, and {"blocks": magnitudes of each block's output, "pre_logits":
          class token [b, width] before the projection, or the pooled patches}.

        Raises:
          ValueError: images have another shape or an integer dtype, or patch dropout has no key.
        """
        self._check(images)
        # Sums with parameters are in float32, so that their gradients are summed over the batch in float32.
        position = self.position_embedding[...]
        patches = position[-self.cfg.vision.patches :]
        if self.cfg.patch_dropout > 0 and not deterministic:
            keep = self.cfg.vision.kept_patches(self.cfg.patch_dropout)
            order = random_order(dropout_key, images.shape[0], self.cfg.vision.patches)
            x = self.patch_embed(images, order[:, :keep])
            x = x + first_rows(patches, order, keep, gradient_dtype=self.cfg.dtype)
        else:
            x = self.patch_embed(images) + patches[None]
        x = x.astype(self.cfg.dtype)
        if self.cfg.siglip:
            x, magnitudes = apply_blocks(self.blocks, x, self.cfg)
            pooled = self.pool(self.ln_post(x))
            return pooled, {"blocks": magnitudes, "pre_logits": pooled}
        first = self.class_embedding[...] + position[0]
        first = jnp.broadcast_to(first, (x.shape[0], 1, first.size)).astype(x.dtype)
        x = self.ln_pre(jnp.concatenate([first, x], axis=1))
        x, magnitudes = apply_blocks(self.blocks, x, self.cfg)
        pooled = self.ln_post(x[:, 0])
        embedding = self.projection(pooled.astype(jnp.float32))
        return embedding, {"blocks": magnitudes, "pre_logits": pooled}

    def _check(self, images):
        side = self.cfg.vision.image_size
        if images.ndim != 4 or images.shape[1:] != (side, side, 3):
            raise ValueError(f"images must be [batch, {side}, {side}, 3], got {images.shape}")
        if not jnp.issubdtype(images.dtype, jnp.floating):
            raise ValueError(
                f"images must be floating, got {images.dtype}: normalize them with swjax.data.preprocess"
            )


class AttentionPool(nnx.Module):
    """MAP pooling: a learned query attends to all patches, and an MLP follows.

    ``y + mlp(ln(y))`` with ``y = attention(probe, x)``. Its layers are not quantized.

    Args:
      cfg: the configuration of the whole model.

    References:
      Zhai et al., "Scaling vision transformers", 2022, https://arxiv.org/abs/2106.04560
    """

    def __init__(self, cfg: CLIPConfig, *, rngs: nnx.Rngs):
        tower, width = cfg.vision, cfg.vision.width
        xavier = nnx.initializers.xavier_uniform()
        self.heads, self.gelu = tower.heads, cfg.gelu
        self.probe = nnx.Param(xavier(rngs.params(), (1, 1, width)))

        def linear(fan_in, fan_out, dtype="float32"):
            return nnx.Linear(
                fan_in, fan_out, kernel_init=xavier, dtype=jnp.dtype(dtype), rngs=rngs
            )

        self.q, self.out = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, width, cfg.dtype), linear(width, width, cfg.dtype)
        self.ln = LayerNorm(width, cfg.epsilon)
        self.fc1 = linear(width, tower.mlp_width)
        self.fc2 = linear(tower.mlp_width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [b, patches, width] to [b, width] float32."""
        batch, tokens, width = x.shape
        split = (batch, tokens, self.heads, width // self.heads)
        k, v = (layer(x).astype(jnp.float32).reshape(split) for layer in (self.k, self.v))
        q = self.q(self.probe[...]).reshape(self.heads, -1)
        scores = jnp.einsum("hd,bthd->bht", q, k) * (width // self.heads) ** -0.5
        mixed = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores), v)
        y = self.out(mixed.reshape(batch, width))
        return y + self.fc2(gelu(self.fc1(self.ln(y)), self.gelu))


def random_order(key: jax.Array | None, batch: int, patches: int) -> jax.Array:
    """Returns a random permutation of the patches for each image.

    Args:
      key: PRNG key.
      batch: number of images.
      patches: number of patches of an image.

    Returns:
      Integers [batch, patches].

    Raises:
      ValueError: the key is missing.
    """
    if key is None:
        raise ValueError(
            "patch dropout needs dropout_key in training: pass one, or deterministic=True"
        )
    return jnp.argsort(jax.random.uniform(key, (batch, patches)), axis=1)


def block_init(cfg: VisionConfig) -> BlockInit:
    """open_clip's initializers: PyTorch's defaults, but Xavier-uniform for q, k and v as one matrix."""
    return BlockInit(
        qkv=symmetric_uniform((6 / (cfg.width + 3 * cfg.width)) ** 0.5),
        out=symmetric_uniform(cfg.width**-0.5),
        fc1=symmetric_uniform(cfg.width**-0.5),
        fc2=symmetric_uniform(cfg.mlp_width**-0.5),
    )
