"""The Flax layers, which have Flax's parameters, and the conversion of existing models."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from flax import linen as nn
from flax import nnx
from numeric import snr_db

import swjax
import swjax.linen
import swjax.nnx
import swjax.serving
from swjax.recipes import RECIPES
from swjax.testing import implementations, matrix_products

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6, 16)), jnp.float32)


def same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.parametrize(
    "kwargs", [{}, {"use_bias": False}, {"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}]
)
def test_nnx_linear_interchanges_with_flax(kwargs):
    ours = swjax.nnx.Linear(16, 8, recipe="standard", rngs=nnx.Rngs(0), **kwargs)
    flax = nnx.Linear(16, 8, rngs=nnx.Rngs(0), **kwargs)
    same(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(flax)))
    nnx.update(ours, nnx.state(flax))
    nnx.update(flax, nnx.state(ours))
    x = X.astype(kwargs.get("param_dtype", X.dtype))
    assert ours(x).dtype == flax(x).dtype
    np.testing.assert_array_equal(ours(x), flax(x))
    int8 = swjax.nnx.Linear(16, 8, rngs=nnx.Rngs(0), **kwargs)
    assert int8(x).dtype == flax(x).dtype
    assert 30 < snr_db(int8(x), flax(x)) < 60


@pytest.mark.parametrize("kwargs", [{}, {"use_bias": False}, {"dtype": jnp.bfloat16}])
def test_linen_dense_interchanges_with_flax(kwargs):
    flax, ours = nn.Dense(8, **kwargs), swjax.linen.Dense(8, recipe="standard", **kwargs)
    params = flax.init(jax.random.key(0), X)
    same(params, ours.init(jax.random.key(0), X))
    np.testing.assert_array_equal(ours.apply(params, X), flax.apply(params, X))
    int8 = swjax.linen.Dense(8, **kwargs).apply(params, X)
    assert int8.dtype == flax.apply(params, X).dtype
    assert 30 < snr_db(int8, flax.apply(params, X)) < 60


@pytest.mark.parametrize(
    "layer, dtype", thinning.thinned(["nnx", "linen"], ["complex64", "float64"], full=[])
)
def test_standard_takes_inputs_of_more_than_the_parameters_dtype(layer, dtype):
    """As in Flax, float32 parameters are promoted to the dtype of such inputs, and so are gradients."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x = X.astype(dtype) * (1 + 2j if dtype == "complex64" else 1)
        if layer == "nnx":
            options = {"recipe": "standard", "rngs": nnx.Rngs(0)}
            models = swjax.nnx.Linear(16, 8, **options), nnx.Linear(16, 8, rngs=nnx.Rngs(0))
            grad = nnx.grad(lambda model: jnp.sum(jnp.abs(model(x)) ** 2))
            got, want = ((model(x), nnx.to_pure_dict(grad(model))) for model in models)
        else:
            models = swjax.linen.Dense(8, recipe="standard"), nn.Dense(8)
            params = models[0].init(jax.random.key(0), x)
            same(params, models[1].init(jax.random.key(0), x))
            loss = lambda p, model: jnp.sum(jnp.abs(model.apply(p, x)) ** 2)
            got, want = ((m.apply(params, x), jax.grad(loss)(params, m)) for m in models)
        assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("name", thinning.kept(RECIPES, ["standard", *thinning.RECIPES]))
def test_every_recipe_trains_in_both_apis(name):
    layer = swjax.nnx.Linear(16, 8, recipe=name, rngs=nnx.Rngs(0))
    grads = nnx.jit(nnx.grad(lambda layer: jnp.mean(layer(X) ** 2)))(layer)
    dense = swjax.linen.Dense(8, recipe=name)
    params = {"params": nnx.to_pure_dict(nnx.state(layer))}
    linen_grads = jax.jit(jax.grad(lambda p: jnp.mean(dense.apply(p, X) ** 2)))(params)["params"]
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(grads), linen_grads)
    assert np.any(linen_grads["kernel"])


DOUBLED = {"promote_dtype": lambda arrays, **_: tuple(None if a is None else 2 * a for a in arrays)}


@pytest.mark.parametrize("other", [{"param_dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16}, DOUBLED])
@pytest.mark.parametrize("other_first", [True, False])
def test_layers_computed_together_equal_their_calls(other, other_first):
    options = (other, {}) if other_first else ({}, other)
    a, b = (swjax.nnx.Linear(16, 16, rngs=nnx.Rngs(0), **each) for each in options)
    x = X.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # as Flax's layers of several dtypes need
        together = (*swjax.nnx.linears((a, b), x), swjax.nnx.mlp(a, b, x))
        alone = a(x), b(x), b(a(x), prologue=swjax.Gelu())
    for got, want in zip(together, alone):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_layers_of_flax_are_computed_together_once_converted():
    """Also prequantized ones, and beside a subclass with code of its own."""

    class Doubled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    make = lambda kind, seed: kind(16, 16, use_bias=False, rngs=nnx.Rngs(seed))
    layers = nnx.List([make(nnx.Linear, 0), make(nnx.Linear, 1), make(Doubled, 2)])
    with pytest.raises(TypeError, match="converted by quantize_model, got a Linear of flax.nnx"):
        swjax.nnx.linears(layers[:2], X)
    swjax.nnx.quantize_model(layers, {".*": "switchback"})
    quantize = lambda fn: implementations(fn, X)["quantize", "xla"]
    together = lambda x: swjax.nnx.linears(layers[:2], x)
    assert quantize(together) == quantize(lambda x: [layer(x) for layer in layers[:2]]) - 1
    want = [layer(X) for layer in layers]
    pairs = [*zip(together(X), want), *zip(swjax.nnx.linears(layers, X), want)]
    pairs.append((swjax.nnx.mlp(*layers[:2], X), layers[1](nnx.gelu(want[0], approximate=False))))
    swjax.serving.prequantize(layers)
    pairs += zip(together(X), want)
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


class PlainGatedMLP(nnx.Module):
    """As in tunix and Bonsai."""

    def __init__(self, rngs):
        for name, sizes in {"gate": (16, 32), "up": (16, 32), "down": (32, 16)}.items():
            setattr(self, f"{name}_proj", nnx.Linear(*sizes, use_bias=False, rngs=rngs))

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("recipes", [{}, {".*": "switchback"}, {".*down_proj": "llm_int8"}])
def test_gated_mlps_are_drop_in_modules(recipes):
    """They compute what a plain model computes, also if only some of their layers have a recipe."""
    plain = PlainGatedMLP(nnx.Rngs(0))
    ours = swjax.nnx.GatedMLP(16, 32, recipe="standard", rngs=nnx.Rngs(1))
    nnx.update(ours, nnx.state(plain))
    params = {"params": nnx.to_pure_dict(nnx.state(plain))}
    in_linen = swjax.linen.GatedMLP(32, recipe="standard")
    same(jax.eval_shape(in_linen.init, jax.random.key(0), X), jax.eval_shape(lambda: params))
    for model in (plain, ours):
        swjax.nnx.quantize_model(model, recipes)
    norm = swjax.RMSNorm(jnp.linspace(0.5, 2, 16))
    y = plain(norm.forward(X, quantize_to=None, implementation="xla")[0])
    context = swjax.linen.quantized(recipes) if recipes else contextlib.nullcontext()
    with context as conversion:
        linen_y = in_linen.apply(params, X, prologue=norm, add_input=True)
    assert not recipes or str(conversion).startswith("gate_proj  Projection.kernel")
    for got in (ours(X, prologue=norm, add_input=True), linen_y):
        np.testing.assert_allclose(got, y + X, rtol=1e-5, atol=1e-5)


def attention(**kwargs):
    return nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **kwargs)


def test_attention_takes_dot_general():
    product = swjax.dot_general("switchback")
    quantized = attention(qkv_dot_general=product, out_dot_general=product)
    assert 20 < snr_db(quantized(X), attention()(X)) < 60
    assert matrix_products(lambda x: quantized(x), X)["s8", "s8"] == 4


def test_kernels_count_as_products(monkeypatch):
    """A program for GPUs, with the names that JAX gives the calls of our kernels."""
    program = """
ENTRY %main {
  %a = s8[8,32]{1,0} parameter(0)
  %b = s8[16,32]{1,0} parameter(1)
  %x = bf16[8,32]{1,0} parameter(2)
  %q = s8[8,32]{1,0} custom-call(%x), metadata={op_name="jit(f)/jit(swjax_quantize)/c"}
  %y = bf16[8,16]{1,0} custom-call(%q, %b), metadata={op_name="jit(f)/jit(swjax_matmul)/c"}
  %z = bf16[8,16]{1,0} custom-call(%a, %q, %b, %b), metadata={op_name="jit(f)/jit(swjax_matmul_sum)/c"}
  %w = (f32[32,32]) custom-call(%x, %x), metadata={op_name="jit(f)/jit(swjax_weight_gradient_group)/c"}
}
"""
    monkeypatch.setattr(swjax.testing, "_compiled", lambda *_: program)
    assert matrix_products(None) == {("s8", "s8"): 2, ("bf16", "bf16"): 1}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(16, 32, rngs=rngs),
            nnx.gelu,
            swjax.nnx.Linear(32, 16, recipe="standard", rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


@pytest.mark.parametrize(
    "rules, count",
    [
        ({".*mlp.*": "switchback"}, 2),
        ({r"attn/\w+": "llm_int8"}, 4),
        ({"attn/out": "standard", ".*": "switchback"}, 5),
    ],
)
def test_quantize_model_by_path(rules, count):
    plain, model = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    assert swjax.nnx.quantize_model(model, rules) is model
    same(nnx.to_pure_dict(nnx.state(plain)), nnx.to_pure_dict(nnx.state(model)))
    assert matrix_products(lambda x: plain(x), X)["s8", "s8"] == 0
    assert matrix_products(lambda x: model(x), X)["s8", "s8"] == count
    assert 20 < snr_db(model(X), plain(X)) < 80


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4, name="attn")(x)
        return nn.Dense(16, name="head")(nn.gelu(nn.Dense(32, name="mlp")(x)))


@pytest.mark.parametrize(
    "rules, count",
    thinning.first(
        [({r"attn/\w+": "switchback", "head": "llm_int8"}, 5), ({"mlp": "switchback"}, 1)]
    ),
)
def test_linen_interceptor(rules, count):
    model = LinenModel()
    params = jax.jit(model.init)(jax.random.key(0), X)
    before = model.apply(params, X)

    def quantized(params, x):
        with swjax.linen.quantized(rules):
            return model.apply(params, x)

    assert matrix_products(model.apply, params, X)["s8", "s8"] == 0
    assert matrix_products(quantized, params, X)["s8", "s8"] == count
    assert 20 < snr_db(quantized(params, X), before) < 80
    grads = jax.jit(jax.grad(lambda p: quantized(p, X).sum()))(params)
    assert jnp.any(grads["params"]["mlp"]["kernel"])
    same(model.apply(params, X), before)


def test_an_earlier_pattern_may_take_every_layer_of_a_later_one():
    params = LinenModel().init(jax.random.key(0), X)
    rules = {".*": "switchback", "mlp": "llm_int8"}
    with swjax.linen.quantized(rules) as conversion:
        LinenModel().apply(params, X)
    assert "llm_int8" not in str(conversion)
    swjax.nnx.quantize_model(Block(nnx.Rngs(0)), {".*": "switchback", "mlp/.*": "llm_int8"})


def test_pattern_without_a_layer():
    with pytest.raises(ValueError, match="pattern 'ffn' matches no linear layer.* 'attn/query'"):
        swjax.nnx.quantize_model(Block(nnx.Rngs(0)), {"ffn": "switchback"})
    params = LinenModel().init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="pattern 'ffn' matches no linear layer.* 'attn/key'"):
        with swjax.linen.quantized({"ffn": "switchback"}):
            LinenModel().apply(params, X)


def test_a_pattern_that_is_no_regular_expression():
    message = r"pattern '\*mlp\*' is not a regular expression: nothing to repeat .*; '\.\*' matches"
    with pytest.raises(ValueError, match=message):
        swjax.nnx.quantize_model(Block(nnx.Rngs(0)), {"*mlp*": "switchback"})
    with pytest.raises(ValueError, match=message):
        with swjax.linen.quantized({"*mlp*": "switchback"}):
            pass


def test_a_recipe_and_a_dot_general_exclude_each_other():
    with pytest.raises(ValueError, match="takes no dot_general"):
        swjax.nnx.Linear(2, 2, dot_general=jax.lax.dot_general, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="takes no dot_general"):
        swjax.linen.Dense(2, dot_general=jax.lax.dot_general).init(jax.random.key(0), X)
