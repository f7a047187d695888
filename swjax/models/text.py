"""The text tower of CLIP: a causal transformer that embeds a caption."""

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
)
from swjax.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class TextConfig(TowerConfig):
    """The size of the text tower.

    Attributes:
      context_length: most tokens of a caption, start and end included.
      vocab_size: token ids; the end of text has the largest.
    """

    context_length: int = 77
    vocab_size: int = 49408

    def __post_init__(self):
        super().__post_init__()
        if min(self.context_length, self.vocab_size) < 1:
            raise ValueError(
                f"context_length and vocab_size must be at least 1, "
                f"got {self.context_length} and {self.vocab_size}"
            )


class TextTransformer(nnx.Module):
    """Tokens -> embedding, not yet normalised.

    Token embedding + positions -> causal blocks -> LayerNorm -> the token at the end of the text ->
    projection. Being causal, that token sees the whole caption and none of the padding behind it.

    Args:
      cfg: its size.
      embed_dim: features of the embedding.
      options: how the blocks compute.
      recipes: the recipe of each linear layer of a block, by name.
    """

    def __init__(
        self,
        cfg: TextConfig,
        embed_dim: int,
        options: Options,
        recipes: dict[str, Recipe],
        *,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.options = cfg, options
        normal = nnx.initializers.normal
        self.token_embedding = nnx.Embed(
            cfg.vocab_size, cfg.width, embedding_init=normal(0.02), rngs=rngs
        )
        self.position_embedding = nnx.Param(
            normal(0.01)(rngs.params(), (cfg.context_length, cfg.width))
        )
        self.blocks = stack_blocks(cfg, options, recipes, block_init(cfg), causal=True, rngs=rngs)
        self.ln_final = LayerNorm(cfg.width)
        self.projection = nnx.Linear(
            cfg.width, embed_dim, use_bias=False, kernel_init=normal(cfg.width**-0.5), rngs=rngs
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
        x, magnitudes = apply_blocks(self.blocks, x.astype(self.options.dtype), self.options)
        end = jnp.argmax(tokens, axis=1)
        x = jnp.take_along_axis(x, end[:, None, None], axis=1).squeeze(1)
        pooled = self.ln_final(x)  # of one token: LayerNorm treats each by itself
        embedding = self.projection(pooled.astype(jnp.float32))
        return embedding, {"blocks": magnitudes, "pre_logits": pooled}

    def _check(self, tokens):
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= self.cfg.context_length:
            raise ValueError(
                f"tokens must be [batch, at most {self.cfg.context_length}], got {tokens.shape}: "
                f"tokenize with context_length={self.cfg.context_length}"
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")


def block_init(cfg: TextConfig) -> BlockInit:
    """OpenAI's: normal, with less on the layers that write to the residual stream as these get more."""
    normal = nnx.initializers.normal
    residual = (cfg.width * 2 * cfg.layers) ** -0.5
    return BlockInit(
        qkv=normal(cfg.width**-0.5),
        out=normal(residual),
        fc1=normal((2 * cfg.width) ** -0.5),
        fc2=normal(residual),
    )
