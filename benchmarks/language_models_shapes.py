"""Shapes of language models that language_models.py and language_models_torch.py measure.

PyTorch's process imports this file too, so it uses the standard library only.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Shape(NamedTuple):
    """A stack of blocks and its batch; with a vocabulary, a whole model.

    A block has RMSNorm, causal attention with grouped queries, and SwiGLU, without biases. A whole model also
    has an embedding, whose transpose is the head if they are tied, and rotary positions.

    Attributes:
      width, hidden: of the stream and of SwiGLU.
      heads, kv_heads, head_width: of attention.
      layers: number of blocks.
      batch, length: sequences, and tokens in each.
      vocabulary: 0 for blocks alone.
      tied: whether the head is the embedding.
      qk_norm: whether queries and keys have an RMSNorm.
    """

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    layers: int
    batch: int
    length: int
    vocabulary: int = 0
    tied: bool = True
    qk_norm: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def weights(self) -> int:
        """Elements of the matrices of a block."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_width
        return self.width * (attention + 3 * self.hidden)

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products, forward and backward, without recomputation.

        A causal mask halves attention's products. A multiplication and an addition count as two.
        """
        linears = 6 * self.tokens * (self.layers * self.weights + self.width * self.vocabulary)
        attention = 6 * self.tokens * self.length * self.layers * self.heads * self.head_width
        return linears + attention


# {kind: {model: shape}}, the most important first. Blocks fit on any GPU that has 80 GB.
SHAPES = {
    "blocks": {
        "llama-3-8b": Shape(4096, 14336, 32, 8, 128, 2, 4, 4096),
        "llama-3.2-1b": Shape(2048, 8192, 32, 8, 64, 4, 8, 4096),
        "qwen3-0.6b": Shape(1024, 3072, 16, 8, 128, 8, 8, 4096),
        "tiny": Shape(64, 128, 4, 2, 16, 1, 2, 64),
    },
    "step": {
        "llama-3.2-1b": Shape(2048, 8192, 32, 8, 64, 16, 8, 4096, 128_256),
        "qwen3-0.6b": Shape(1024, 3072, 16, 8, 128, 28, 8, 4096, 151_936, qk_norm=True),
        "tiny": Shape(64, 128, 4, 2, 16, 1, 2, 64, 100, tied=False, qk_norm=True),
    },
}
KINDS = tuple(SHAPES)
MODELS = tuple(dict.fromkeys(model for shapes in SHAPES.values() for model in shapes))
MEASURED = MODELS[:-1]  # all but "tiny"
CHUNK = 512  # positions of each sequence whose logits exist at a time
EPSILON, ROPE_BASE = 1e-6, 5e5
LEARNING_RATE, B2, WEIGHT_DECAY = 3e-4, 0.95, 0.1  # of AdamW


def parse(argv: list[str] | None, arms: Iterable[str]) -> argparse.Namespace:
    """The flags of either program, which has these arms."""
    parser = argparse.ArgumentParser(description="Times language models; see the top of the file.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MEASURED)
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    parser.add_argument("--batch", type=int, help="sequences, in place of each shape's")
    parser.add_argument("--remat", action="store_true", help="recompute each block's forward pass")
    parser.add_argument("--seconds", type=float, default=540, help="no case starts after this")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every row")
    return parser.parse_args(argv)
