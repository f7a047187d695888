"""Pre-LN transformer blocks: one block, and a stack of equal blocks stored as one.

Both towers of CLIP are the same stack; `TowerConfig` says how large one is, `Options` how both compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from swjax import checkpoint_policies, recipes
from swjax.nnx import Linear
from swjax.recipes import Recipe

LINEARS = ("attn/q", "attn/k", "attn/v", "attn/out", "mlp/fc1", "mlp/fc2")  # of one block

GELUS = {
    "exact": partial(jax.nn.gelu, approximate=False),
    "tanh": partial(jax.nn.gelu, approximate=True),
    "quick": lambda x: x * jax.nn.sigmoid(1.702 * x),  # OpenAI's weights
}

REMAT = {
    # Recompute a block from its input.
    "full": jax.checkpoint_policies.nothing_saveable,
    # Keep the products XLA sees, except those of attention, whose size is quadratic in the tokens.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
} | {name: policy for name, policy in vars(checkpoint_policies).items() if callable(policy)}

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The size of one tower's stack of blocks.

    Attributes:
      width: features of a token.
      layers: blocks.
      heads: attention heads, each of width / heads features.
      mlp_ratio: hidden features of the MLP over width.
    """

    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0

    def __post_init__(self):
        if min(self.width, self.layers, self.heads) < 1:
            raise ValueError(
                f"width, layers and heads must be at least 1, "
                f"got {self.width}, {self.layers} and {self.heads}"
            )
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width, got width={self.width} and heads={self.heads}: "
                f"try heads={max(h for h in range(1, self.heads) if self.width % h == 0)}"
            )

    @property
    def mlp_width(self) -> int:
        return int(self.width * self.mlp_ratio)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the blocks compute; none of it but `layer_scale` and `qk_norm` changes the parameters.

    Attributes:
      recipe: of the linear layers: a name in `swjax.recipes.RECIPES`, a Recipe, or a mapping from
        regular expressions to these. An expression has to match the whole path of a layer, as in
        "vision/blocks/attn/q" or "text/blocks/mlp/fc1"; the first that matches counts, and layers that
        none matches are standard.
      implementation: of the recipes' kernels, see `swjax.kernels.dispatch`; None chooses.
      dtype: what activations are computed and stored in. Parameters, attention scores, softmax and
        LayerNorm are float32.
      attention: implementation of `jax.nn.dot_product_attention`: None, "xla" or "cudnn".
      token_multiple: pad the tokens to a multiple of this and mask the padding; None is 8 for cuDNN
        (which needs it) and 1 otherwise.
      gelu: "exact", "tanh" or "quick".
      layer_scale: initial value of a learned factor on each residual branch's features; None: no factor.
        0.0 keeps features small, which is what makes tensor-wise fp8 train.
      qk_norm: LayerNorm over each head's queries and keys.
      remat: what a block keeps for its backward pass: "none" (no recomputation), "full" (only its
        input), "dots", or a name in `swjax.checkpoint_policies`.
      scan_layers: run the blocks in a `jax.lax.scan`, which compiles faster, rather than unrolled,
        which runs faster.
    """

    recipe: str | Recipe | Mapping[str, str | Recipe] = "switchback"
    implementation: str | None = None
    dtype: str = "bfloat16"
    attention: str | None = None
    token_multiple: int | None = None
    gelu: str = "exact"
    layer_scale: float | None = None
    qk_norm: bool = False
    remat: str = "none"
    scan_layers: bool = False

    def __post_init__(self):
        if isinstance(self.recipe, Mapping):  # as a tuple it can be hashed
            object.__setattr__(self, "recipe", tuple(self.recipe.items()))
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("attention", self.attention, (None, "xla", "cudnn"))
        _check_choice("gelu", self.gelu, GELUS)
        _check_choice("remat", self.remat, ("none", *REMAT))
        multiple = 8 if self.attention == "cudnn" else 1
        if self.token_multiple is None:
            object.__setattr__(self, "token_multiple", multiple)
        if self.token_multiple < 1 or self.token_multiple % multiple:
            raise ValueError(
                f"token_multiple must be a positive multiple of {multiple} with "
                f"attention={self.attention!r}, got {self.token_multiple}: leave it None"
            )
        if self.attention == "cudnn" and self.dtype == "float32":
            raise ValueError(
                "attention='cudnn' computes in 16 bits, got dtype='float32': "
                "set dtype='bfloat16', or attention='xla'"
            )

    def recipes(self, towers: tuple[str, ...]) -> dict[str, Recipe]:
        """The recipe of every linear layer of the towers, by path.

        Raises:
          ValueError: there is no such recipe, or an expression matches no linear layer.
        """
        paths = [f"{tower}/blocks/{linear}" for tower in towers for linear in LINEARS]
        if not isinstance(self.recipe, tuple):
            return dict.fromkeys(paths, recipes.get(self.recipe))
        chosen = recipes.first_match(dict(self.recipe), paths)
        return {path: recipes.get(chosen.get(path, "standard")) for path in paths}


def _check_choice(name: str, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


class BlockInit(NamedTuple):
    """Initializers of a block's kernels; the biases are the same in both towers."""

    qkv: nnx.Initializer
    out: nnx.Initializer
    fc1: nnx.Initializer
    fc2: nnx.Initializer


def symmetric_uniform(limit: float) -> nnx.Initializer:
    """U(-limit, limit); with limit 1 / sqrt(fan-in) it is what PyTorch's layers start from."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis, in float32 whatever the dtype of its input.

    Args:
      width: the size of that axis.
    """

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _layer_norm(x, self.scale[...], self.bias[...])


@jax.checkpoint  # for the backward pass it keeps x and nothing in float32
def _layer_norm(x, scale, bias):
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(variance + 1e-5)
    y = normalised * jnp.broadcast_to(scale, x.shape) + jnp.broadcast_to(bias, x.shape)
    return y.astype(x.dtype)


class LayerScale(nnx.Module):
    """``x gamma``, a learned factor for each feature; with gamma 0 the block starts as the identity."""

    def __init__(self, width: int, init: float):
        self.gamma = nnx.Param(jnp.full(width, init, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.broadcast_to(self.gamma[...].astype(x.dtype), x.shape)


class Attention(nnx.Module):
    """Multi-head self-attention; q, k, v and out are separate linear layers."""

    def __init__(
        self,
        cfg: TowerConfig,
        options: Options,
        recipes: dict[str, Recipe],
        init: BlockInit,
        *,
        causal: bool,
        rngs: nnx.Rngs,
    ):
        self.heads, self.causal, self.implementation = cfg.heads, causal, options.attention
        linear = partial(
            Linear,
            cfg.width,
            cfg.width,
            dtype=jnp.dtype(options.dtype),
            implementation=options.implementation,
            rngs=rngs,
        )
        self.q = linear(recipe=recipes["attn/q"], kernel_init=init.qkv)
        self.k = linear(recipe=recipes["attn/k"], kernel_init=init.qkv)
        self.v = linear(recipe=recipes["attn/v"], kernel_init=init.qkv)
        self.out = linear(recipe=recipes["attn/out"], kernel_init=init.out)
        self.ln_q = LayerNorm(cfg.width // cfg.heads) if options.qk_norm else None
        self.ln_k = LayerNorm(cfg.width // cfg.heads) if options.qk_norm else None

    def __call__(self, x: jax.Array, length: int) -> jax.Array:
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (linear(x).reshape(heads) for linear in (self.q, self.k, self.v))
        if self.ln_q is not None:
            q, k = self.ln_q(q), self.ln_k(k)
        lengths = None if length == tokens else jnp.full(batch, length, jnp.int32)
        mixed = jax.nn.dot_product_attention(  # scores and softmax in float32
            q,
            k,
            v,
            is_causal=self.causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation=self.implementation,
        )
        return self.out(mixed.reshape(x.shape))


class Mlp(nnx.Module):
    """``fc2(gelu(fc1(x)))``."""

    def __init__(
        self,
        cfg: TowerConfig,
        options: Options,
        recipes: dict[str, Recipe],
        init: BlockInit,
        *,
        rngs: nnx.Rngs,
    ):
        def linear(name, fan_in, fan_out, kernel_init):
            return Linear(
                fan_in,
                fan_out,
                recipe=recipes[name],
                implementation=options.implementation,
                dtype=jnp.dtype(options.dtype),
                kernel_init=kernel_init,
                bias_init=symmetric_uniform(fan_in**-0.5),
                rngs=rngs,
            )

        self.fc1 = linear("mlp/fc1", cfg.width, cfg.mlp_width, init.fc1)
        self.fc2 = linear("mlp/fc2", cfg.mlp_width, cfg.width, init.fc2)
        self.gelu = options.gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(_gelu(self.fc1(x), self.gelu))


@partial(jax.checkpoint, static_argnums=1)  # autodiff alone would keep five arrays of this size
def _gelu(x, form: str):
    return GELUS[form](x.astype(jnp.float32)).astype(x.dtype)


class Block(nnx.Module):
    """``x = x + ls_1(attn(ln_1(x)))``, then ``x = x + ls_2(mlp(ln_2(x)))``."""

    def __init__(
        self,
        cfg: TowerConfig,
        options: Options,
        recipes: dict[str, Recipe],
        init: BlockInit,
        *,
        causal: bool,
        rngs: nnx.Rngs,
    ):
        self.ln_1 = LayerNorm(cfg.width)
        self.attn = Attention(cfg, options, recipes, init, causal=causal, rngs=rngs)
        self.ln_2 = LayerNorm(cfg.width)
        self.mlp = Mlp(cfg, options, recipes, init, rngs=rngs)
        scale = options.layer_scale
        self.ls_1 = None if scale is None else LayerScale(cfg.width, scale)
        self.ls_2 = None if scale is None else LayerScale(cfg.width, scale)

    def __call__(self, x: jax.Array, length: int) -> jax.Array:
        """x [b, t, w] -> [b, t, w]; tokens from `length` on are padding that no other token sees."""
        branch = self.attn(self.ln_1(x), length)
        x = x + (branch if self.ls_1 is None else self.ls_1(branch))
        branch = self.mlp(self.ln_2(x))
        return x + (branch if self.ls_2 is None else self.ls_2(branch))


def stack_blocks(
    cfg: TowerConfig,
    options: Options,
    recipes: dict[str, Recipe],
    init: BlockInit,
    *,
    causal: bool,
    rngs: nnx.Rngs,
) -> Block:
    """`cfg.layers` blocks as one `Block` whose every parameter has a leading axis of that size."""

    @nnx.split_rngs(splits=cfg.layers)
    @nnx.vmap
    def stack(rngs):
        return Block(cfg, options, recipes, init, causal=causal, rngs=rngs)

    return stack(rngs)


def apply_blocks(
    blocks: Block, x: jax.Array, options: Options
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs the stack that `stack_blocks` made.

    Args:
      blocks: the stack, L blocks.
      x: [b, t, w] tokens.
      options: token_multiple, remat and scan_layers are what counts here.

    Returns:
      The tokens after the last block, [b, t, w], and the magnitude of every block's output, float32
      [L] each: `feature_mean_abs`, `feature_max_abs`.
    """
    graph, stacked = nnx.split(blocks)
    length = x.shape[1]
    x = _pad_tokens(x, options.token_multiple)

    def step(x, parameters):
        y = nnx.merge(graph, parameters)(x, length)
        return y, feature_magnitude(y[:, :length])

    if options.remat != "none":
        # Inside a scan nothing can merge the recomputation with the forward pass, so XLA needs no barrier.
        step = jax.checkpoint(
            step, policy=REMAT[options.remat], prevent_cse=not options.scan_layers
        )
    run = jax.lax.scan if options.scan_layers else _unrolled
    x, magnitudes = run(step, x, stacked)
    return x[:, :length], magnitudes


def feature_magnitude(x: jax.Array) -> dict[str, jax.Array]:
    """Mean and maximum of |x| as float32 scalars that no gradient flows through."""
    magnitude = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
    return {"feature_mean_abs": jnp.mean(magnitude), "feature_max_abs": jnp.max(magnitude)}


def _pad_tokens(x: jax.Array, multiple: int) -> jax.Array:
    """Zero tokens at the end of [b, t, w], up to the next multiple."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0)))


def _unrolled(step: Callable, carry, stacked):
    """`jax.lax.scan` as straight-line code."""
    # lax.split transposes to one concatenate; indexing would to a padded copy of the stack per layer.
    leaves, treedef = jax.tree.flatten(stacked)
    layers = leaves[0].shape[0]
    slices = zip(*(jax.lax.split(leaf, (1,) * layers) for leaf in leaves), strict=True)
    outputs = []
    for layer in slices:
        carry, output = step(carry, treedef.unflatten([leaf.squeeze(0) for leaf in layer]))
        outputs.append(output)
    return carry, jax.tree.map(lambda *values: jnp.stack(values), *outputs)
