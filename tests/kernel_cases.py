"""Shapes, formats and arrays that the tests of kernels share."""

import kernel_oracle as oracle
import numpy as np

from benchmarks.kernels import shapes
from benchmarks.kernels.shapes import LinearShape
from swjax.kernels import tiles
from swjax.kernels.block_formats.reference import Blocks
from swjax.kernels.reference import QTensor

DTYPES = ("bfloat16", "float16", "float32")
TARGETS = ("int8", "float8_e4m3fn", "float8_e5m2")
PRODUCTS = (("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"))

# The towers' layers, and shapes that tiles do not divide.
LAYERS = shapes.vit() | {
    "one row": LinearShape(1, 1280, 5120),
    "one element": LinearShape(1, 1, 1),
    "tiles past the edges": LinearShape(264, 256, 320),
    "ragged tiles": LinearShape(257, 144, 264),
    "k not a multiple of 16": LinearShape(130, 1000, 256),
    "all odd": LinearShape(77, 333, 129),
    "narrow": LinearShape(300, 48, 8),
    "one line of columns": LinearShape(264, 256, 64),
    "one line of columns in float32": LinearShape(264, 256, 32),
}
ROWS = sorted({(s.tokens, s.k) for s in LAYERS.values()} | {(3, tiles.WIDEST_ROW)})
# XLA has no tiles, so it computes few of them: a single element, odd sizes, and a layer of a model.
XLA_LAYERS = ("one element", "all odd", "ViT-B/16 out")
XLA_ROWS = ((1, 1), (77, 333), (197, 768), (3, tiles.WIDEST_ROW))
RAGGED_ROWS = (77, 333)
SMALL_RAGGED_ROWS = (7, 77)  # interpreters are slow

# {operation on rows: its static arguments}
ROW_OPERATIONS = {
    "quantize_and_sum": {},
    "layer_norm": {"epsilon": 1e-6},
    "layer_norm_backward": {"epsilon": 1e-6},
    "rms_norm": {"epsilon": 1e-6, "offset": 1.0},
    "rms_norm_backward": {"epsilon": 1e-6, "offset": 1.0},
    "gelu": {"approximate": False},
    "gelu_backward": {"approximate": False},
    "gated": {"activation": "silu"},
    "gated_backward": {"activation": "silu"},
}
# Those that can quantize their results.
QUANTIZING = tuple(
    name for name in ROW_OPERATIONS if name != "quantize_and_sum" and "norm_backward" not in name
)


def normal(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def row_arguments(operation, x):
    """Returns the arguments of a row operation on x."""
    vectors = normal((2, x.shape[-1]), seed=1)
    gradient, up = (normal(x.shape, x.dtype, seed) for seed in (2, 3))
    return {
        "layer_norm": (x, *vectors),
        "layer_norm_backward": (x, vectors[0], gradient),
        "rms_norm": (x, vectors[0]),
        "rms_norm_backward": (x, vectors[0], gradient),
        "gelu_backward": (x, gradient),
        "gated": (x, up),
        "gated_backward": (x, up, gradient),
    }.get(operation, (x,))


def cross_entropy_arguments(shape, dtype="bfloat16"):
    """Returns logits [..., v], labels and which tokens count."""
    rng = np.random.default_rng(1)
    logits = 4 * normal(shape, "float32")
    return (
        logits.astype(dtype),
        rng.integers(0, shape[-1], shape[:-1]),
        rng.random(shape[:-1]) < 0.8,
    )


def attention_arguments(operation, shape, dtype="bfloat16", causal=False):
    """Returns q, k and v [b, t, h, d]; for the backward pass also the results and the output's gradient."""
    q, k, v, gradient = (normal(shape, dtype, seed) for seed in range(4))
    if operation == "attention":
        return q, k, v
    out, lse = oracle.attention(q, k, v, causal=causal)
    return q, k, v, out.astype(dtype), lse.astype("float32"), gradient


def blocks(shape, square=False, seed=0):
    """Returns Blocks a [tokens, k] and b [n, k], quantized by the oracle, whose product is around 1."""
    tokens, k, n = shape
    rng = np.random.default_rng(seed)
    found = []
    for rows in (tokens, n):
        x = rng.standard_normal((rows, k)) * rng.uniform(0.5, 2, (rows, 1)) / k**0.25
        x[:, :128] *= 8  # blocks of different magnitude
        pair = oracle.quantize_blocks(x, -1, square=square and rows == n)
        found.append(Blocks(*pair, np.ones((1, 1), "float32")))
    return found


def operands(shape, dtypes=("int8", "int8"), a_scope="row", b_scope="tensor", seed=0):
    """Returns QTensors a [tokens, k] and b [n, k], quantized by the oracle, whose product is around 1."""
    tokens, k, n = shape
    rng = np.random.default_rng(seed)
    pairs = []
    for rows, dtype, scope in ((tokens, dtypes[0], a_scope), (n, dtypes[1], b_scope)):
        x = rng.standard_normal((rows, k)) * rng.uniform(0.5, 2, (rows, 1)) / k**0.25
        pairs.append(oracle.quantize(x, (-1,) if scope != "tensor" else (0, 1), dtype))
    return [QTensor(*pair) for pair in pairs]
