"""Language models in Flax NNX, and the ways in which language_models.py quantizes their blocks."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import swjax
import swjax.nnx
from benchmarks.language_models_shapes import EPSILON, ROPE_BASE, Shape, chunk
from swjax.losses import linear_cross_entropy
from swjax.models.embeddings import lookup

DTYPE = jnp.bfloat16  # of activations; parameters are in float32
Rotation = tuple[jax.Array, jax.Array]  # cosines and sines [t, d / 2] of rotary positions


class Block(nnx.Module):
    """A block as a user of Flax writes it: ``x + o(attention(norm(x)))``, then ``x + SwiGLU(norm(x))``."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        norm = partial(
            nnx.RMSNorm, epsilon=EPSILON, dtype=DTYPE, param_dtype=jnp.float32, rngs=rngs
        )
        linear = partial(nnx.Linear, use_bias=False, dtype=DTYPE, rngs=rngs)
        width, hidden = shape.width, shape.hidden
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.q_proj, self.o_proj = linear(width, queries), linear(queries, width)
        self.k_proj, self.v_proj = linear(width, keys), linear(width, keys)
        self.experts = Experts(shape, rngs) if shape.experts else None
        if self.experts is None:
            self.gate_proj, self.up_proj = linear(width, hidden), linear(width, hidden)
            self.down_proj = linear(hidden, width)
        self.q_norm = norm(shape.head_width) if shape.qk_norm else None
        self.k_norm = norm(shape.head_width) if shape.qk_norm else None
        self.head_width = shape.head_width

    def __call__(self, x: jax.Array, rotation: Rotation | None) -> jax.Array:
        y = self.attention_norm(x)
        x = x + self.o_proj(self.attend(self.q_proj(y), self.k_proj(y), self.v_proj(y), rotation))
        return x + self.mlp(self.mlp_norm(x))

    def mlp(self, y: jax.Array) -> jax.Array:
        if self.experts is not None:
            return self.experts(y)
        return self.down_proj(nnx.silu(self.gate_proj(y)) * self.up_proj(y))

    def attend(self, q, k, v, rotation):
        """Causal attention: [b, t, heads x head_width] -> the same."""
        q, k, v = (y.reshape(*y.shape[:2], -1, self.head_width) for y in (q, k, v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        attention = partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=implementation
        )
        if not (mesh := jax.typeof(q).sharding.mesh).empty:  # each device has whole sequences
            shards = P(mesh.axis_names)
            attention = jax.shard_map(attention, in_specs=shards, out_specs=shards, check_vma=False)
        y = attention(q, k, v)
        return y.reshape(*y.shape[:2], -1)


class FusedBlock(Block):
    """The same block in swjax's fused operations."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs, recipe: str):
        super().__init__(shape, rngs)
        self.recipe = recipe
        self.layout: swjax.Layout | None = None  # on several devices: how they sum gradients

    def __call__(self, x: jax.Array, rotation: Rotation | None) -> jax.Array:
        options = {"recipe": self.recipe, "layout": self.layout}
        norms = (self.attention_norm, self.mlp_norm)
        norm, norm2 = (swjax.RMSNorm(norm.scale[...], EPSILON) for norm in norms)
        attention = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        *qkv, out = (layer.kernel[...] for layer in attention)
        ys, x = swjax.switchback(x, tuple(qkv), prologue=norm, residual=True, **options)
        x = swjax.switchback(self.attend(*ys, rotation), out, addend=x, **options)
        if self.experts is not None:
            return x + self.experts(self.mlp_norm(x))
        mlp = (layer.kernel[...] for layer in (self.gate_proj, self.up_proj, self.down_proj))
        options = {"recipe": self.recipe, "layouts": (self.layout, self.layout)}
        return swjax.gated_mlp(x, *mlp, prologue=norm2, add_input=True, **options)


class Experts(nnx.Module):
    """A mixture of SwiGLU experts: the router sends each token to its top `chosen` experts and drops none.

    Without a recipe the products are `jax.lax.ragged_dot`.
    """

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        sizes = (shape.experts, shape.width, shape.hidden)
        init = nnx.initializers.lecun_normal(batch_axis=(0,))
        weight = lambda *sizes: nnx.Param(init(rngs.params(), sizes, jnp.float32))
        self.router = nnx.Linear(shape.width, shape.experts, use_bias=False, dtype=DTYPE, rngs=rngs)
        self.gate, self.up = weight(*sizes), weight(*sizes)
        self.down = weight(shape.experts, shape.hidden, shape.width)
        self.chosen, self.recipe = shape.chosen, None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, t, width] -> the same."""
        logits = self.router(x).reshape(-1, self.gate.shape[0]).astype(jnp.float32)
        factors, ids = jax.lax.top_k(jax.nn.softmax(logits), self.chosen)
        factors /= jnp.sum(factors, axis=-1, keepdims=True)
        order = jnp.argsort(ids.reshape(-1))
        inverse = jnp.argsort(order)
        ends = jnp.searchsorted(ids.reshape(-1)[order], jnp.arange(logits.shape[1] + 1))
        sizes = jnp.diff(ends).astype(jnp.int32)
        copies = jnp.repeat(x.reshape(-1, x.shape[-1]), self.chosen, axis=0)
        y = permuted(self.swiglu(permuted(copies, order, inverse), sizes), inverse, order)
        y = y.reshape(-1, self.chosen, x.shape[-1]) * factors[..., None].astype(y.dtype)
        return jnp.sum(y, axis=1).reshape(x.shape)

    def swiglu(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        ws = (self.gate[...], self.up[...], self.down[...])
        if self.recipe is not None:
            return swjax.gated_ragged_mlp(rows, *ws, sizes, recipe=self.recipe)
        gate, up, down = (w.astype(rows.dtype) for w in ws)
        product = partial(jax.lax.ragged_dot, group_sizes=sizes)
        return product(nnx.silu(product(rows, gate)) * product(rows, up), down)


@jax.custom_vjp
def permuted(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """x [n, d] in another order of rows; a gather's own derivative would add by atomic operations."""
    return x[order]


permuted.defvjp(
    lambda x, *orders: (x[orders[0]], orders), lambda orders, g: (g[orders[1]], None, None)
)


class Blocks(nnx.Module):
    """A stack of blocks: [b, t, width] -> the same.

    `remat` recomputes each block in the backward pass; `in_8_bits` stores in int8 what a block saves;
    `finish` computes weight gradients at most one block later than input gradients.
    """

    def __init__(self, make: Callable[[nnx.Rngs], Block], shape: Shape, remat: bool):
        self.layers = nnx.List([make(nnx.Rngs(i)) for i in range(shape.layers)])
        self.remat, self.in_8_bits, self.finish = remat, False, False

    def __call__(self, x: jax.Array, rotation: Rotation | None) -> jax.Array:
        graphs, params = map(list, zip(*map(nnx.split, self.layers)))
        for i, graph in enumerate(graphs):
            if self.finish and i + 1 < len(graphs):
                params[i + 1], x = swjax.checkpoint_policies.finish_gradients(params[i + 1], x)
            x = self.call(nnx.merge(graph, params[i]), x, rotation)
        return x

    def call(self, layer: Block, x: jax.Array, rotation: Rotation | None) -> jax.Array:
        if not (self.remat or self.in_8_bits):
            return layer(x, rotation)
        graph, params = nnx.split(layer)
        call = lambda params, x, rotation: nnx.merge(graph, params)(x, rotation)
        call = jax.checkpoint(call) if self.remat else call
        if self.in_8_bits:
            call = swjax.checkpoint_policies.store_in_8_bits(call)
        return call(params, x, rotation)


class LanguageModel(nnx.Module):
    """Embedding, blocks, norm and head in bfloat16: tokens [b, t + 1] -> the mean loss of the next tokens."""

    def __init__(self, blocks: nnx.Module, shape: Shape):
        rngs, size = nnx.Rngs(shape.layers), (shape.vocabulary, shape.width)
        init = nnx.initializers.normal(shape.width**-0.5)
        self.embedding = nnx.Param(init(rngs(), size, jnp.float32))
        self.head = None if shape.tied else nnx.Param(init(rngs(), size[::-1], jnp.float32))
        self.blocks = blocks
        self.norm = nnx.RMSNorm(shape.width, epsilon=EPSILON, dtype=DTYPE, rngs=rngs)
        self.head_width = shape.head_width

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.embedding[...]
        x = lookup(table, tokens[:, :-1], DTYPE.dtype.name).astype(DTYPE)
        x = self.norm(self.blocks(x, rotation(x.shape[1], self.head_width)))
        head = table.T if self.head is None else self.head[...]
        options = {"chunk": chunk(len(x)), "logits_dtype": DTYPE}
        return linear_cross_entropy(x, head, tokens[:, 1:], **options)


def rotation(length: int, width: int) -> Rotation:
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), ROPE_BASE**-exponents)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotary positions of x [b, t, h, d]: turns the pairs (x_i, x_{i + d/2})."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = cosines[None, :, None], sines[None, :, None]
    turned = (a * cosines - b * sines, b * cosines + a * sines)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


# --- arms: functions (shape, remat) -> blocks ----------------------------------------------------------


def plain(shape: Shape, remat: bool) -> nnx.Module:
    return Blocks(lambda rngs: Block(shape, rngs), shape, remat)


def converted(recipe: str, shape: Shape, remat: bool) -> nnx.Module:
    blocks = with_experts(recipe, plain(shape, remat))
    return swjax.nnx.quantize_model(blocks, {"(?!.*/router$).*": recipe})


def fused(recipe: str, shape: Shape, remat: bool) -> nnx.Module:
    blocks = Blocks(lambda rngs: FusedBlock(shape, rngs, recipe), shape, remat)
    return with_experts(recipe, blocks)


def with_experts(recipe: str, blocks: nnx.Module) -> nnx.Module:
    for _, module in nnx.iter_modules(blocks):
        if isinstance(module, Experts):
            module.recipe = recipe
    return blocks


def in_8_bits(arm: Callable[[Shape, bool], nnx.Module], shape: Shape, remat: bool) -> nnx.Module:
    blocks = arm(shape, remat)
    blocks.in_8_bits = True
    return blocks


def qwix(dtype: str, shape: Shape, remat: bool) -> nnx.Module:
    """Qwix with all three products quantized, as in its documentation of training."""
    import qwix

    rule = qwix.QtRule(module_path=".*_proj", weight_qtype=dtype, act_qtype=dtype, bwd_qtype=dtype)
    x = jnp.zeros((1, 8, shape.width), DTYPE)
    return qwix.quantize_model(plain(shape, remat), qwix.QtProvider([rule]), x, None)


def flax_fp8(shape: Shape, remat: bool) -> nnx.Module:
    blocks = plain(shape, remat)
    for _, module in list(nnx.iter_modules(blocks)):
        if isinstance(module, nnx.Linear):
            module.dot_general = nnx.data(Fp8Product())
    return blocks


class Fp8State(nnx.Param):
    """A scale or a history of maxima of Flax's fp8 products. Its gradient is its next value."""


class Fp8Product(nnx.Module):
    """Flax's fp8 product with delayed scales, which Flax has as a Linen module, with its state in NNX."""

    def __init__(self):
        state = {"scale": jnp.ones(1), "amax_history": jnp.zeros(1024)}
        operands = ("lhs", "rhs", "grad")
        self.state = nnx.Dict(
            {f"{of}_{name}": Fp8State(x) for of in operands for name, x in state.items()}
        )

    def __call__(self, lhs, rhs, dimension_numbers, **_) -> jax.Array:
        from flax.linen import fp8_ops

        state = {name: variable[...] for name, variable in self.state.items()}
        options = {"preferred_element_type": lhs.dtype, "quantize_compute_type": lhs.dtype}
        return fp8_ops.fp8_scaled_dot_general(lhs, rhs, dimension_numbers, **state, **options)


ARMS: dict[str, Callable[[Shape, bool], nnx.Module]] = {
    "flax": plain,
    "switchback_hadamard+fused": partial(fused, "switchback_hadamard"),
    "switchback_hadamard+fused+8_bits": partial(in_8_bits, partial(fused, "switchback_hadamard")),
    "int8_hadamard+fused+8_bits": partial(in_8_bits, partial(fused, "int8_hadamard")),
    "flax+8_bits": partial(in_8_bits, plain),
    "switchback_hadamard": partial(converted, "switchback_hadamard"),
    "int8_hadamard": partial(converted, "int8_hadamard"),
    "int8_hadamard+fused": partial(fused, "int8_hadamard"),
    "switchback+fused": partial(fused, "switchback"),
    "switchback": partial(converted, "switchback"),
    "standard": partial(converted, "standard"),
    "standard+fused": partial(fused, "standard"),
    "fp8_switchback": partial(converted, "fp8_switchback"),
    "flax_fp8": flax_fp8,
    "qwix_int8": partial(qwix, "int8"),
    "qwix_fp8": partial(qwix, "float8_e4m3fn"),
}
