"""The shapes that benchmarks time: linear layers ``y = x w``, x [tokens, k] and w [k, n]."""

from typing import NamedTuple


class LinearShape(NamedTuple):
    tokens: int
    k: int
    n: int


# Number of tokens in the paper's timings: 256 images of 256 patches.
TOKENS = 65_536

# {model: (tokens of an image with the class token, width)} of the image towers.
WIDTHS = {"ViT-B/16": 768, "ViT-L/14": 1024, "ViT-H/14": 1280}
IMAGE_TOKENS = {"ViT-B/16": 197, "ViT-L/14": 257, "ViT-H/14": 257}

# (queries [b, t, h, d], causal) of the towers: whole images, half of the patches, texts.
HEADS = {
    "ViT-H/14": ((128, 257, 16, 80), False),
    "ViT-H/14, patch dropout": ((256, 129, 16, 80), False),
    "ViT-L/14": ((128, 257, 16, 64), False),
    "ViT-B/16": ((256, 197, 12, 64), False),
    "ViT-B/16, patch dropout": ((256, 99, 12, 64), False),
    "ViT-B/32": ((1024, 50, 12, 64), False),
    "text of ViT-H/14": ((256, 77, 16, 64), True),
}

# (tokens, causal) of sequences that no tower has; 12 heads of 64 features.
TOKENS_OF_HEADS = [
    *((tokens, False) for tokens in (65, 77, 112, 128, 160, 176, 240)),
    *((tokens, True) for tokens in (99, 128, 160, 197, 257)),
]

# {language model: the (k, n) of the linear layers of its block}: q and o, k and v, gate and up, down.
LANGUAGE_MODELS = {
    "Llama-3-8B": [(4096, 4096), (4096, 1024), (4096, 14_336), (14_336, 4096)],
    "Llama-3.2-1B": [(2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)],
    "Qwen3-0.6B": [(1024, 2048), (2048, 1024), (1024, 1024), (1024, 3072), (3072, 1024)],
}
VOCABULARY = 128_256  # of Llama 3
LANGUAGE_TOKENS = 16_384  # four sequences of 4,096 tokens


class ExpertShape(NamedTuple):
    """The MLP of a mixture of experts: experts, experts of a token, width, width between its layers."""

    experts: int
    chosen: int
    width: int
    hidden: int


EXPERTS = {
    "Qwen3-30B-A3B": ExpertShape(128, 8, 2048, 768),
    "DeepSeek-V2-Lite": ExpertShape(64, 6, 2048, 1408),
    "Mixtral-8x7B": ExpertShape(8, 2, 4096, 14_336),
}


def block(width: int, tokens: int = TOKENS) -> dict[str, LinearShape]:
    """Returns the linear layers of a transformer block.

    >>> block(1280)["fc1"]
    LinearShape(tokens=65536, k=1280, n=5120)
    """
    return {
        "qkv": LinearShape(tokens, width, 3 * width),
        "out": LinearShape(tokens, width, width),
        "fc1": LinearShape(tokens, width, 4 * width),
        "fc2": LinearShape(tokens, 4 * width, width),
    }


def vit(tokens: int | None = None) -> dict[str, LinearShape]:
    """Returns the linear layers of every tower by name; `tokens` None: those of one image.

    >>> vit()["ViT-B/16 out"]
    LinearShape(tokens=197, k=768, n=768)
    """
    return {
        f"{model} {layer}": shape
        for model, width in WIDTHS.items()
        for layer, shape in block(width, tokens or IMAGE_TOKENS[model]).items()
    }
