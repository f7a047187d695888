"""A Llama in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no biases.

`swjax.nnx.quantize_model(model, {LINEAR_LAYERS: "switchback"})` converts it in place.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

LINEAR_LAYERS = r"blocks/\d+/(attention|mlp)/\w+"


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes:
      width: features of a token between blocks.
      hidden: features inside the MLP.
      heads, kv_heads: heads of the queries, and of the keys and values; kv_heads divides heads.
      layers: number of blocks.
      vocabulary: number of token ids.
      dtype: dtype of activations and products; parameters are float32.
      init: standard deviation of the first matrices.
    """

    width: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int = 256
    dtype: str = "bfloat16"
    init: float = 0.02

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"Config needs a width divisible by 2 x heads, and heads divisible by kv_heads, got {self}"
            )


SIZES = {
    "tiny": Config(128, 384, heads=4, kv_heads=2, layers=4, init=0.08),
    "124m": Config(1024, 2816, heads=16, kv_heads=4, layers=11),
    "350m": Config(1536, 4096, heads=24, kv_heads=8, layers=14),
}


class Llama(nnx.Module):
    """Token ids [b, t] -> logits [b, t, vocabulary] in float32."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.dtype, self.vocabulary = config.dtype, config.vocabulary
        shape = (config.vocabulary, config.width)
        self.embedding = nnx.Param(nnx.initializers.normal(config.init)(rngs.params(), shape))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = norm(config, rngs)
        self.head = linear(config, config.width, config.vocabulary, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # The gradient of a lookup adds rows into a table. On GPUs a product is faster for a small table.
        chosen = jax.nn.one_hot(tokens, self.vocabulary, dtype=self.dtype)
        x = chosen @ self.embedding[...].astype(self.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


class Block(nnx.Module):
    """[b, t, width] -> the same shape: attention and MLP, each added to its input."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.attention_norm, self.mlp_norm = norm(config, rngs), norm(config, rngs)
        self.attention, self.mlp = Attention(config, rngs), MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nnx.Module):
    """Causal attention: groups of heads / kv_heads query heads share a key and a value head."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.head_width = config.width // config.heads
        shared = config.kv_heads * self.head_width
        self.q = linear(config, config.width, config.width, rngs)
        self.k, self.v = (linear(config, config.width, shared, rngs) for _ in range(2))
        self.o = linear(config, config.width, config.width, rngs, depth=config.layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (
            layer(x).reshape(*x.shape[:2], -1, self.head_width)
            for layer in (self.q, self.k, self.v)
        )
        fused = jax.default_backend() == "gpu" and x.dtype != jnp.float32
        y = jax.nn.dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, implementation="cudnn" if fused else None
        )
        return self.o(y.reshape(x.shape))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.gate, self.up = (linear(config, config.width, config.hidden, rngs) for _ in range(2))
        self.down = linear(config, config.hidden, config.width, rngs, depth=config.layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def linear(config: Config, inputs: int, outputs: int, rngs: nnx.Rngs, depth: int = 0) -> nnx.Linear:
    """A linear layer; `depth` is the number of blocks if its output is added to the residual stream."""
    init = nnx.initializers.normal(config.init / (2 * depth) ** 0.5 if depth else config.init)
    return nnx.Linear(
        inputs, outputs, use_bias=False, dtype=config.dtype, kernel_init=init, rngs=rngs
    )


def norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)


def rotate(x: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotary position embedding of [b, t, heads, head width].

    Angles and products are in float32: bfloat16 cannot tell apart the positions above 256.
    """
    t, half = x.shape[1], x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(t, dtype=jnp.float32)[:, None] * frequency[None]
    cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
