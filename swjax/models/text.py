"""The text tower of CLIP: a causal transformer that embeds a caption."""

import jax
import jax.numpy as jnp
from flax import nnx

from swjax.models.config import CLIPConfig, TextConfig
from swjax.models.transformer import BlockInit, LayerNorm, apply_blocks, stack_blocks


class TextTransformer(nnx.Module):
    """Tokens -> embedding, not yet normalised.

    Token embedding + positions -> causal blocks -> LayerNorm -> the token at the end of the text ->
    projection. With causal attention that token attends to the whole caption and not to the padding. SigLIP's
    blocks are not causal; its last position, padding or not, is projected, with a bias.

    Args:
      cfg: the whole model's configuration.
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
            width,
            cfg.embed_dim,
            use_bias=cfg.siglip,
            kernel_init=normal(width**-0.5),
            rngs=rngs,
        )

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, dict]:
        """Embeds captions.

        Args:
          tokens: int32 [b, t], t up to context_length; each row holds its end-of-text token, which is
            the largest id, and padding after it.

        Returns:
          Embeddings [b, embed_dim] float32, and {"blocks": magnitudes of each block's output,
          "pre_logits": end-of-text token [b, width] before the projection}.

        Raises:
          ValueError: tokens of another shape or dtype.
        """
        self._check(tokens)
        # The lookup comes before the cast, so that its gradient is summed in float32.
        x = self.token_embedding(tokens) + self.position_embedding[None, : tokens.shape[1]]
        x, magnitudes = apply_blocks(self.blocks, x.astype(self.cfg.dtype), self.cfg)
        if self.cfg.siglip:
            x = x[:, -1]
        else:
            end = jnp.argmax(tokens, axis=1)
            x = jnp.take_along_axis(x, end[:, None, None], axis=1).squeeze(1)
        pooled = self.ln_final(x)  # of one token: LayerNorm treats each by itself
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
    """OpenAI's: normal, with a smaller deviation on the layers that write to the residual stream."""
    normal = nnx.initializers.normal
    residual = (cfg.width * 2 * cfg.layers) ** -0.5
    return BlockInit(
        qkv=normal(cfg.width**-0.5),
        out=normal(residual),
        fc1=normal((2 * cfg.width) ** -0.5),
        fc2=normal(residual),
    )
