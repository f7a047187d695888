"""Small CLIP models for tests, and CLIP's forward pass in float64 NumPy, one example at a time."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swjax import interop
from swjax.models import clip

SMALL = dict(
    embed_dim=24,
    dtype="float32",
    recipe="standard",
    vision=dict(width=32, layers=3, heads=4, image_size=32, patch_size=8),
    text=dict(width=24, layers=2, heads=2, context_length=9, vocab_size=60),
)  # fmt: skip


def small_config(**overrides):
    return clip.config("tiny", **{**SMALL, **overrides})


def write_weights(folder) -> None:
    """Writes a small model with CLIP's vocabulary as open_clip would, into a folder that is created."""
    cfg = small_config(text={**SMALL["text"], "vocab_size": 49408})
    interop.save(folder, nnx.merge(*random_model(cfg)))


@functools.cache
def abstract(cfg):
    """Returns the model's structure and the shapes of its parameters; allocates and compiles nothing."""
    return nnx.split(nnx.eval_shape(lambda: clip.CLIP(cfg, rngs=nnx.Rngs(0))))


def shapes(cfg):
    """Returns {path such as "text/ln_final/bias": shape} of every parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(abstract(cfg)[1]))
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): leaf.shape for path, leaf in leaves}


def compiled(function, *args):
    """Returns `function` compiled under strict dtype promotion, with most optimizations disabled."""
    traced = jax.jit(function).trace(*args)
    with jax.numpy_dtype_promotion("standard"):  # JAX's lowering of 16-bit attention promotes
        return traced.lower().compile({"xla_backend_optimization_level": 0})


def random_model(cfg):
    """Returns the model's structure, and random parameters: no bias is 0 and no scale is 1."""
    graph, params = abstract(cfg)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = rng.normal(size=leaf.shape)
        if "kernel" in str(path):
            values /= math.sqrt(leaf.shape[-2])
        elif "logit" in str(path):
            values += 2
        else:
            values = 0.3 * values + ("scale" in str(path) or "gamma" in str(path))
        return jnp.asarray(values, leaf.dtype)

    return graph, jax.tree_util.tree_map_with_path(draw, params)


def inputs(cfg, batch=3):
    """Returns normalised images, and captions of all lengths: each ends in the largest id, then zeros."""
    rng = np.random.default_rng(1)
    side, context, vocab = cfg.vision.image_size, cfg.text.context_length, cfg.text.vocab_size
    tokens = rng.integers(1, vocab - 1, (batch, context))
    for row, length in zip(tokens, np.linspace(2, context, batch).astype(int), strict=True):
        row[length - 1], row[length:] = vocab - 1, 0
    images = rng.normal(size=(batch, side, side, 3))
    return jnp.asarray(images, jnp.float32), jnp.asarray(tokens, jnp.int32)


def float64(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(params))


def encode_image(p, cfg, image):
    """Returns the embedding [e] of an image [h, w, 3], and the output of each block."""
    v, size = p["vision"], cfg.vision.patch_size
    tokens = [v["class_embedding"] + v["position_embedding"][0]]
    for i in range(0, image.shape[0], size):
        for j in range(0, image.shape[1], size):
            patch = np.einsum(
                "hwc,hwcd->d", image[i : i + size, j : j + size], v["patch_embed"]["kernel"]
            )
            tokens.append(patch + v["position_embedding"][len(tokens)])
    x = _layer_norm(np.stack(tokens), v["ln_pre"])
    x, blocks = _blocks(x, v["blocks"], cfg, cfg.vision, causal=False)
    return _unit(_layer_norm(x[0], v["ln_post"]) @ v["projection"]["kernel"]), blocks


def encode_text(p, cfg, tokens):
    """Returns the embedding [e] of a caption [t], and the output of each block."""
    t = p["text"]
    x = np.stack([t["token_embedding"]["embedding"][token] for token in tokens])
    x = x + t["position_embedding"][: len(tokens)]
    x, blocks = _blocks(x, t["blocks"], cfg, cfg.text, causal=True)
    x = _layer_norm(x, t["ln_final"])[list(tokens).index(max(tokens))]
    return _unit(x @ t["projection"]["kernel"]), blocks


def _blocks(x, stacked, cfg, tower, causal):
    outputs = []
    for layer in range(tower.layers):
        block = jax.tree.map(lambda leaf: leaf[layer], stacked)  # noqa: B023
        branch = _attention(_layer_norm(x, block["ln_1"]), block["attn"], cfg, tower.heads, causal)
        x = x + branch * (block["ls_1"]["gamma"] if cfg.layer_scale is not None else 1)
        hidden = _gelu(_linear(_layer_norm(x, block["ln_2"]), block["mlp"]["fc1"]), cfg.gelu)
        branch = _linear(hidden, block["mlp"]["fc2"])
        x = x + branch * (block["ls_2"]["gamma"] if cfg.layer_scale is not None else 1)
        outputs.append(x)
    return x, outputs


def _attention(x, p, cfg, heads, causal):
    tokens, width = x.shape
    q, k, v = (_linear(x, p[name]) for name in "qkv")
    mixed = np.zeros_like(x)
    for head in np.split(np.arange(width), heads):
        qh, kh = q[:, head], k[:, head]
        if cfg.qk_norm:
            qh, kh = _layer_norm(qh, p["ln_q"]), _layer_norm(kh, p["ln_k"])
        for i in range(tokens):
            seen = slice(0, i + 1 if causal else tokens)
            scores = kh[seen] @ qh[i] / math.sqrt(len(head))
            weights = np.exp(scores - scores.max())
            mixed[i, head] = weights / weights.sum() @ v[seen, head]
    return _linear(mixed, p["out"])


def _linear(x, p):
    return x @ p["kernel"] + p["bias"]


def _layer_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def _gelu(x, form):
    if form == "quick":
        return x / (1 + np.exp(-1.702 * x))
    if form == "tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _unit(x):
    return x / np.linalg.norm(x)
