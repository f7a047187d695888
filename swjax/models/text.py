"""The text tower of CLIP: a causal transformer that embeds a caption."""

import jax
import jax.numpy as jnp
from flax import nnx

from swjax.models.config import CLIPConfig, TextConfig
from swjax.models.embeddings import lookup
from swjax.models.transformer import BlockInit, LayerNorm, apply_blocks, stack_blocks


class TextTransformer(nnx.Module):
    """Computes the embedding of a caption, not yet normalized.

    Token embedding + positions -> causal blocks -> LayerNorm -> the token at the end of the text ->
    projection. With causal attention, the end token attends to the whole caption but not to the padding.
    SigLIP's blocks are not causal. SigLIP projects the last position, even if it is padding, and its
    projection has a bias.

    Args:
      cfg: the configuration of the whole model.
    """

    def __init__(self, cfg: CLIPConfig, *, rngs: nnx.Rngs):
        tower, width = cfg.text, cfg.text.width
        normal = nnx.initializers.normal
        self.cfg = cfg
        self.token_embedding = nnx.Embed(
            tower.vocab_size, width, embedding_init=normal(0.02), rngs=rngs
        )
        self.position_embedding = nnx.Param(
            normal(0.01)(rngs.params(), (tower.context_length, width))
        )
        self.blocks = stack_blocks(
            tower, cfg, cfg.recipes("text"), block_init(tower), causal=not cfg.siglip, rngs=rngs
        )
        self.ln_final = LayerNorm(width, cfg.epsilon)
        self.projection = nnx.Linear(
            width, cfg.embed_dim, use_bias=cfg.siglip, kernel_init=normal(width**-0.5), rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, dict]:
        """Embeds captions.

        Args:
          tokens: int32 [b, t], with t up to context_length. Each row contains its end token, which has the
            largest id, followed by padding.

        Returns:
          Embeddings [b, embed_dim] float32, and {"blocks": magnitudes of each block's output, "pre_logits":
          end token [b, width] before the projection}.

        Raises:
          ValueError: tokens have another shape or dtype.
        """
        self._check(tokens)
        dtype = self.cfg.dtype
        x = lookup(self.token_embedding.embedding[...], tokens, gradient_dtype=dtype)
        # The sum precedes the cast, so that the gradient of the positions is summed in float32.
        x = (x + self.position_embedding[None, : tokens.shape[1]]).astype(dtype)
        x, magnitudes = apply_blocks(self.blocks, x, self.cfg)
        if self.cfg.siglip:
            x = x[:, -1]
        else:
            end = jnp.argmax(tokens, axis=1)
            x = jnp.take_along_axis(x, end[:, None, None], axis=1).squeeze(1)
        # Applied to one token only, because LayerNorm treats tokens independently.
        pooled = self.ln_final(x)
        embedding = self.projection(pooled.astype(jnp.float32))
        return embedding, {"blocks": magnitudes, "pre_logits": pooled}

    def _check(self, tokens):
        longest = self.cfg.text.context_length
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= longest:
            raise ValueError(
                f"tokens must be [batch, 1 to {longest}], got {tokens.shape}: "
                f"tokenize with context_length={longest}"
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")


def block_init(cfg: TextConfig) -> BlockInit:
    """OpenAI's initializers: normal, with a smaller deviation where layers write to the residual stream."""
    normal = nnx.initializers.normal
    residual = (cfg.width * 2 * cfg.layers) ** -0.5
    return BlockInit(
        qkv=normal(cfg.width**-0.5),
        out=normal(residual),
        fc1=normal((2 * cfg.width) ** -0.5),
        fc2=normal(residual),
    )
