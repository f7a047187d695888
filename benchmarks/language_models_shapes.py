"""Shapes of language models that language_models.py and language_models_torch.py measure.

PyTorch's process imports this file too, so it uses the standard library only.
"""

import argparse
import itertools
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
      experts, chosen: number of experts in place of the SwiGLU, each of width `hidden`, and of those that a
        token is sent to; 0 for none.
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
    experts: int = 0
    chosen: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def weights_of(self, experts: int) -> int:
        """Elements of the matrices of a block with this number of experts, or with its SwiGLU."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_width
        return self.width * (attention + self.experts + 3 * self.hidden * (experts or 1))

    @property
    def weights(self) -> int:
        """Elements of the matrices of a block that a token is multiplied by."""
        return self.weights_of(self.chosen)

    @property
    def state_bytes(self) -> int:
        """Bytes of fp32 parameters, their gradients and AdamW's moments."""
        vocabulary = self.width * self.vocabulary * (1 if self.tied else 2)
        return 16 * (self.layers * self.weights_of(self.experts) + vocabulary)

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
        "qwen3-30b-a3b": Shape(
            2048, 768, 32, 4, 128, 2, 4, 4096, qk_norm=True, experts=128, chosen=8
        ),
        "tiny": Shape(64, 128, 4, 2, 16, 1, 2, 64),
        "tiny-moe": Shape(64, 32, 4, 2, 16, 1, 2, 64, experts=8, chosen=2),
    },
    "step": {
        "llama-3-8b": Shape(4096, 14336, 32, 8, 128, 32, 1, 8192, 128_256, tied=False),
        "llama-3.2-1b": Shape(2048, 8192, 32, 8, 64, 16, 8, 4096, 128_256),
        "qwen3-0.6b": Shape(1024, 3072, 16, 8, 128, 28, 8, 4096, 151_936, qk_norm=True),
        "tiny": Shape(64, 128, 4, 2, 16, 1, 2, 64, 128, tied=False, qk_norm=True),
    },
}
KINDS = tuple(SHAPES)
MODELS = tuple(dict.fromkeys(model for shapes in SHAPES.values() for model in shapes))
MEASURED = tuple(model for model in MODELS if not model.startswith("tiny"))
EPSILON, ROPE_BASE = 1e-6, 5e5
MESH = "devices that share a whole step; the batch is that of each. Several: each in turn"
LEARNING_RATE, B2, WEIGHT_DECAY = 3e-4, 0.95, 0.1


def parser(doc: str, arms: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of the flags that all programs share; `arms` are the choices of --arms."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MEASURED)
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    parser.add_argument("--batch", type=int, help="sequences, in place of each shape's")
    parser.add_argument("--remat", action="store_true", help="recompute each block's forward pass")
    parser.add_argument("--seconds", type=float, default=540, help="no case starts after this")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every row")
    return parser


def with_kinds(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Adds the flags of programs that time blocks and whole steps, and parses all."""
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--layers", type=int, help="blocks, in place of each shape's")
    parser.add_argument(
        "--mesh", nargs="+", type=mesh_size, default=[1], metavar="fsdp=N", help=MESH
    )
    parser.add_argument(
        "--reduce_dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="dtype in which devices sum the gradients of matrices",
    )
    args = parser.parse_args(argv)
    if max(args.mesh) > 1 and args.kinds != ["step"]:
        parser.error("several devices run whole steps only: add --kinds step")
    return args


def mesh_size(text: str) -> int:
    """The number of devices in "fsdp=N"."""
    axis, _, size = text.partition("=")
    if axis != "fsdp" or not size.isdecimal() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"a mesh is fsdp=N with N from 1, got {text!r}")
    return int(size)


def selected(args: argparse.Namespace) -> Iterable[tuple[str, str, str, int, Shape]]:
    """The chosen (kind, model, arm, devices, shape); the batch of the shape is that of all devices."""
    for kind, model, arm, devices in itertools.product(
        args.kinds, args.models, args.arms, args.mesh
    ):
        if shape := SHAPES[kind].get(model):
            batch = devices * (args.batch or shape.batch)
            yield (
                kind,
                model,
                arm,
                devices,
                shape._replace(batch=batch, layers=args.layers or shape.layers),
            )


def chunk(batch: int) -> int:
    """Positions of each of `batch` sequences whose logits exist at a time: 4,096 tokens, 1 GB for Llama-3."""
    return max(1, 4096 // batch)


def check_memory(shape: Shape, devices: int, available: int) -> None:
    """Raises a ValueError if parameters, gradients and moments need more than the bytes of a device."""
    if (needed := shape.state_bytes / devices) > available:
        raise ValueError(
            f"parameters, gradients and moments need {needed / 2**30:.0f} GiB a device, it has "
            f"{available / 2**30:.0f}: use more devices or fewer --layers"
        )
