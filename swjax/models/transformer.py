"""Pre-LN transformer blocks: one block, and a stack of equal blocks stored as one module."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from swjax import attention
from swjax.checkpoint_policies import finish_gradients
from swjax.diagnostics.values import magnitudes
from swjax.kernels import targets
from swjax.linear import prologues
from swjax.models.config import POLICIES, CLIPConfig, TowerConfig
from swjax.nnx import Linear, linears, mlp, split_stack
from swjax.recipes import Recipe


class BlockInit(NamedTuple):
    """Initializers of a block's kernels; the biases are the same in both towers."""

    qkv: nnx.Initializer
    out: nnx.Initializer
    fc1: nnx.Initializer
    fc2: nnx.Initializer


def symmetric_uniform(limit: float) -> nnx.Initializer:
    """U(-limit, limit); the limit 1 / sqrt(fan-in) gives the initialization of PyTorch's layers."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis, computed in float32 for every input dtype.

    Args:
      width: size of the last axis.
      epsilon: added to the variance.
    """

    def __init__(self, width: int, epsilon: float = 1e-5):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _layer_norm(x, self.scale[...], self.bias[...], self.epsilon)

    def prologue(self) -> prologues.LayerNorm:
        """The same LayerNorm as a prologue of the linear layers that read its output."""
        return prologues.LayerNorm(self.scale[...], self.bias[...], self.epsilon)


@partial(jax.checkpoint, static_argnums=3)  # saves x for the backward pass, and no float32 array
def _layer_norm(x, scale, bias, epsilon):
    exact = x.astype(jnp.float32)
    centered = exact - jnp.mean(exact, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    normalized = centered * jax.lax.rsqrt(variance + epsilon)
    y = normalized * jnp.broadcast_to(scale, x.shape) + jnp.broadcast_to(bias, x.shape)
    return y.astype(x.dtype)


class LayerScale(nnx.Module):
    """``x gamma``, a learned factor per feature; with gamma 0 the block is initially the identity."""

    def __init__(self, width: int, init: float):
        self.gamma = nnx.Param(jnp.full(width, init, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _layer_scale(x, self.gamma[...])


@jax.checkpoint
def _layer_scale(x, gamma):
    return (x.astype(jnp.float32) * jnp.broadcast_to(gamma, x.shape)).astype(x.dtype)


def _linear(k: int, n: int, *, recipe: Recipe, options: CLIPConfig, **kwargs: Any) -> Linear:
    """A layer [..., k] -> [..., n] of a block; `kwargs` are other arguments of `Linear`."""
    named = recipe.implementation(options.implementation)
    dtype = jnp.dtype(options.dtype)
    return Linear(k, n, recipe=recipe, implementation=named, dtype=dtype, **kwargs)


class Attention(nnx.Module):
    """Multi-head self-attention on the output of a LayerNorm; q, k, v and out are separate linear layers."""

    def __init__(
        self,
        cfg: TowerConfig,
        options: CLIPConfig,
        recipes: dict[str, Recipe],
        init: BlockInit,
        *,
        causal: bool,
        rngs: nnx.Rngs,
    ):
        self.heads, self.causal = cfg.heads, causal
        self.requested = options.attention  # implementation; None chooses

        linear = partial(_linear, cfg.width, cfg.width, options=options, rngs=rngs)
        self.q, self.k, self.v = (
            linear(recipe=recipes[f"attn/{name}"], kernel_init=init.qkv) for name in "qkv"
        )
        # Attention saves its output for its own backward pass, so an 8-bit copy would need additional memory.
        out = replace(recipes["attn/out"], save_quantized=False)
        self.out = linear(recipe=out, kernel_init=init.out)
        self.ln_q = LayerNorm(cfg.width // cfg.heads, options.epsilon) if options.qk_norm else None
        self.ln_k = LayerNorm(cfg.width // cfg.heads, options.epsilon) if options.qk_norm else None

    def implementation(self, x: jax.Array, length: int) -> str:
        """The implementation of `swjax.attention` for x [b, t, w] with `length` tokens before the padding."""
        return attention.choose(x, self.heads, self.requested, length=length, layout=self.q.layout)

    def __call__(
        self, x: jax.Array, norm: LayerNorm, scale: LayerScale | None, length: int
    ) -> jax.Array:
        """Returns x plus the scaled branch."""
        implementation = self.implementation(x, length)
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.heads, width // self.heads)
        qkv, x = linears((self.q, self.k, self.v), x, prologue=norm.prologue(), residual=True)
        q, k, v = (y.reshape(heads) for y in qkv)
        if self.ln_q is not None and self.ln_k is not None:
            q, k = self.ln_q(q), self.ln_k(k)
        if x.dtype == jnp.float16 and targets.platform() == "cpu":
            # JAX requests float16 products with float32 sums, which XLA does not support on CPUs.
            q, k, v = (head.astype(jnp.float32) for head in (q, k, v))
        mixed = attention.dot_product_attention(
            q,
            k,
            v,
            is_causal=self.causal,
            length=length,
            implementation=implementation,
            layout=self.q.layout,
        )
        return _add_to(x, self.out, mixed.reshape(x.shape).astype(x.dtype), scale)


class Mlp(nnx.Module):
    """``fc2(gelu(fc1(norm(x))))``."""

    def __init__(
        self,
        cfg: TowerConfig,
        options: CLIPConfig,
        recipes: dict[str, Recipe],
        init: BlockInit,
        *,
        rngs: nnx.Rngs,
    ):
        def linear(name, k, n, kernel_init):
            inits = {"kernel_init": kernel_init, "bias_init": symmetric_uniform(k**-0.5)}
            return _linear(k, n, recipe=recipes[name], options=options, rngs=rngs, **inits)

        self.fc1 = linear("mlp/fc1", cfg.width, cfg.mlp_width, init.fc1)
        self.fc2 = linear("mlp/fc2", cfg.mlp_width, cfg.width, init.fc2)
        self.gelu = options.gelu

    def __call__(self, x: jax.Array, norm: LayerNorm, scale: LayerScale | None) -> jax.Array:
        """Returns x plus the scaled branch."""
        prologue = norm.prologue()
        if self.gelu == "quick":
            (hidden,), x = linears((self.fc1,), x, prologue=prologue, residual=True)
            return _add_to(x, self.fc2, _quick_gelu(hidden), scale)
        options: dict[str, Any] = {"prologue": prologue, "approximate": self.gelu == "tanh"}
        if scale is None:
            y = mlp(self.fc1, self.fc2, x, add_input=True, **options)
            assert isinstance(y, jax.Array), "without residual there is one output"
            return y
        branch, x = mlp(self.fc1, self.fc2, x, residual=True, **options)
        return x + scale(branch)


def _add_to(x: jax.Array, layer: Linear, inputs: jax.Array, scale: LayerScale | None) -> jax.Array:
    """``x + scale(layer(inputs))``; without scale, the layer's kernel adds x."""
    return layer(inputs, addend=x) if scale is None else x + scale(layer(inputs))


def gelu(x: jax.Array, form: str) -> jax.Array:
    """GELU of float32 x: "exact", "tanh" or "quick"."""
    return _quick_gelu(x) if form == "quick" else jax.nn.gelu(x, approximate=form == "tanh")


@jax.checkpoint  # autodiff alone would save several arrays of this size
def _quick_gelu(x):
    exact = x.astype(jnp.float32)
    return (exact * jax.nn.sigmoid(1.702 * exact)).astype(x.dtype)


class Block(nnx.Module):
    """``x = x + ls_1(attn(ln_1(x)))``, then ``x = x + ls_2(mlp(ln_2(x)))``."""

    def __init__(
        self,
        cfg: TowerConfig,
        options: CLIPConfig,
        recipes: dict[str, Recipe],
        init: BlockInit,
        *,
        causal: bool,
        rngs: nnx.Rngs,
    ):
        self.ln_1 = LayerNorm(cfg.width, options.epsilon)
        self.attn = Attention(cfg, options, recipes, init, causal=causal, rngs=rngs)
        self.ln_2 = LayerNorm(cfg.width, options.epsilon)
        self.mlp = Mlp(cfg, options, recipes, init, rngs=rngs)
        scale = options.layer_scale
        self.ls_1 = None if scale is None else LayerScale(cfg.width, scale)
        self.ls_2 = None if scale is None else LayerScale(cfg.width, scale)

    def __call__(self, x: jax.Array, length: int) -> jax.Array:
        """Maps x [b, t, w] to [b, t, w]; tokens from `length` on are padding, which no token attends to."""
        x = self.attn(x, self.ln_1, self.ls_1, length)
        return self.mlp(x, self.ln_2, self.ls_2)


def stack_blocks(
    cfg: TowerConfig,
    options: CLIPConfig,
    recipes: dict[str, Recipe],
    init: BlockInit,
    *,
    causal: bool,
    rngs: nnx.Rngs,
) -> Block:
    """Creates `cfg.layers` blocks as one `Block`, whose parameters have a leading axis of that size."""

    @nnx.split_rngs(splits=cfg.layers)
    @nnx.vmap
    def stack(rngs):
        return Block(cfg, options, recipes, init, causal=causal, rngs=rngs)

    return stack(rngs)


def apply_blocks(
    blocks: Block, x: jax.Array, options: CLIPConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Applies a stack of `stack_blocks`.

    Args:
      blocks: the stack of L blocks.
      x: [b, t, w] tokens.
      options: the function reads `remat` and `scan_layers`.

    Returns:
      The tokens after the last block, [b, t, w], and magnitudes of every block's output: `feature_mean_abs`
      and `feature_max_abs`, float32 [L] each.
    """
    length = x.shape[1]
    if blocks.attn.implementation(x, length) == "cudnn":
        x = attention.pad_tokens(x)
    graph, stacked = split_stack(blocks, x)

    def step(x, parameters):
        y = nnx.merge(graph, parameters)(x, length)
        return y, magnitudes(y[:, :length])

    run = jax.lax.scan if options.scan_layers else _unrolled
    x, found = run(_rematerialized(step, options), x, stacked)
    return x[:, :length], found


def _rematerialized(step: Callable, options: CLIPConfig) -> Callable:
    """Wraps `step` so that it saves only the residuals that `options.remat` names."""
    if options.remat == "none":
        return step
    # XLA cannot merge the recomputation with the forward pass across a scan, so a scan needs no barrier.
    return jax.checkpoint(step, policy=POLICIES[options.remat], prevent_cse=not options.scan_layers)


def _unrolled(step: Callable, carry, stacked):
    """Runs `jax.lax.scan` as straight-line code."""
    # lax.split transposes to one concatenate. Indexing would transpose to a padded copy of the stack per
    # layer.
    leaves, treedef = jax.tree.flatten(stacked)
    layers = leaves[0].shape[0]
    slices = list(zip(*(jax.lax.split(leaf, (1,) * layers) for leaf in leaves), strict=True))
    outputs, several = [], targets.device_count() > 1
    for i, layer in enumerate(slices):
        if several and i + 1 < layers:
            slices[i + 1], carry = finish_gradients(slices[i + 1], carry)
        carry, output = step(
            carry, jax.tree.unflatten(treedef, [leaf.squeeze(0) for leaf in layer])
        )
        outputs.append(output)
    return carry, jax.tree.map(lambda *values: jnp.stack(values), *outputs)
