"""Second and third derivatives, compared with JAX's for the same layers without quantization."""

import functools
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numeric import snr_db

import swjax
from swjax import Gelu, LayerNorm, Layout, RMSNorm
from swjax.linear import rules
from swjax.linear.rules import differentiated_as
from swjax.recipes import RECIPES

K, H, N = 8, 16, 4
# Lowest SNR in dB: second derivatives are compared with those of exact products.
FLOOR_DB = {"standard": 90, "switchback": 25, "switchback_m": 25, "switchback_q": 25}
FLOOR_DB |= dict.fromkeys(
    ("llm_int8", "llm_int8_outlier6", "switchback_hadamard", "int8_hadamard"), 25
)
FLOOR_DB |= dict.fromkeys(
    ("fp8_switchback", "fp8_tensorwise", "fp8_static", "fp8_hadamard", "fp8_block128", "mxfp8"), 15
)
FLOOR_DB |= {"nvfp4": 6, "fp4_dge": 6}


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


ARGUMENTS = {
    "x": draw(2, 3, K),
    "w": draw(K, H, seed=1) / 3,
    "b": draw(H, seed=2),
    "w2": draw(H, N, seed=3) / 4,
    "b2": draw(N, seed=4),
    "scale": 1 + draw(K, seed=5) / 4,
    "shift": draw(K, seed=6) / 4,
}


def norm(a):
    return LayerNorm(a["scale"], a["shift"])


def exact_norm(a):
    x = a["x"] - jnp.mean(a["x"], -1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return x * a["scale"][None, None] + a["shift"][None, None]


def exact_rms_norm(a):
    mean = jnp.mean(a["x"] ** 2, -1, keepdims=True)
    return a["x"] / jnp.sqrt(mean + 1e-6) * a["scale"][None, None]


def dense(x, w, b):
    return jnp.matmul(x, w, precision="highest") + b.reshape(1, 1, -1)


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


# {name: (layer of swjax, the same in JAX)}, as functions of `ARGUMENTS`
LAYERS = {
    "layer": (
        lambda layer, _, a: layer(a["x"], a["w"], a["b"]),
        lambda a: dense(a["x"], a["w"], a["b"]),
    ),
    "layer_norm": (
        lambda layer, _, a: layer(a["x"], a["w"], a["b"], prologue=norm(a)),
        lambda a: dense(exact_norm(a), a["w"], a["b"]),
    ),
    "gelu": (
        lambda layer, _, a: layer(a["x"], a["w"], a["b"], prologue=Gelu()),
        lambda a: dense(exact_gelu(a["x"]), a["w"], a["b"]),
    ),
    "several_with_residual": (
        lambda layer, _, a: several(layer, a),
        lambda a: (
            dense(exact_norm(a), a["w"], a["b"]) * dense(exact_norm(a), a["w"][::-1], 0 * a["b"])
            + jnp.sum(a["x"], -1, keepdims=True)
        ),
    ),
    "addend": (
        lambda layer, _, a: layer(a["x"], a["w"], a["b"], addend=squares(a["x"])),
        lambda a: dense(a["x"], a["w"], a["b"]) + squares(a["x"]),
    ),
    "mlp_and_input": (
        lambda _, mlp, a: mlp_and_input(mlp, a),
        lambda a: (
            dense(exact_gelu(dense(exact_norm(a), a["w"], a["b"])), a["w2"], 0 * a["b2"])
            @ jnp.eye(N, K)
            + a["x"]
        ),
    ),
    "gated_mlp": (
        lambda _, mlp, a: gated_mlp(mlp, a),
        lambda a: (
            (
                jax.nn.silu(dense(exact_rms_norm(a), a["w"], 0 * a["b"]))
                * dense(exact_rms_norm(a), a["w"][::-1], 0 * a["b"])
            )
            @ a["w2"]
            @ jnp.eye(N, K)
            + a["x"]
        ),
    ),
    "mlp": (
        lambda _, mlp, a: mlp_with_residual(mlp, a),
        lambda a: (
            dense(exact_gelu(dense(exact_norm(a), a["w"], a["b"])), a["w2"], a["b2"])
            + a["x"][..., :N]
        ),
    ),
}


def several(layer, a):
    ws, biases = (a["w"], a["w"][::-1]), (a["b"], None)
    (y, z), x = layer(a["x"], ws, biases, prologue=norm(a), residual=True)
    return y * z + jnp.sum(x, -1, keepdims=True)


def mlp_with_residual(mlp, a):
    y, x = mlp(a["x"], a["w"], a["b"], a["w2"], a["b2"], prologue=norm(a), residual=True)
    return y + x[..., :N]


def squares(x):
    return jnp.concatenate([x**2, x**3], -1)


def mlp_and_input(mlp, a):
    w2 = a["w2"] @ jnp.eye(N, K)
    return mlp(a["x"], a["w"], a["b"], w2, None, prologue=norm(a), add_input=True)


def gated_mlp(mlp, a):
    weights = a["w"], a["w"][::-1], a["w2"] @ jnp.eye(N, K)
    options = {"prologue": RMSNorm(a["scale"]), "add_input": True} | mlp.keywords
    return swjax.gated_mlp(a["x"], *weights, **options)


def loss(layer, a):
    return jnp.sum(jnp.sin(layer(a)))


def products(forward_over_reverse, fn, a):
    """Returns the product of fn's Hessian and a vector."""
    v = jax.tree.map(jnp.cos, a)
    if forward_over_reverse:
        return jax.jvp(jax.grad(fn), (a,), (v,))[1]
    dot = lambda a, b: jnp.sum(a * b)
    inner = lambda a: sum(jax.tree.leaves(jax.tree.map(dot, jax.grad(fn)(a), v)))
    return jax.grad(inner)(a)


def of_swjax(name, recipe, **options):
    layer, mlp = (partial(f, recipe=recipe, **options) for f in (swjax.switchback, swjax.mlp))
    return partial(LAYERS[name][0], layer, mlp)


def assert_close(got, want, recipe):
    for name in want:
        if jnp.any(want[name]):
            assert snr_db(got[name], want[name]) > FLOOR_DB[recipe], name
        else:
            assert not jnp.any(got[name]), name


@functools.cache
def exact_products(name):
    return jax.jit(partial(products, True, partial(loss, LAYERS[name][1])))(ARGUMENTS)


@pytest.mark.parametrize(
    "case, recipe",
    thinning.thinned(
        list(itertools.product(LAYERS, [True, False])),
        ["standard", "switchback", "switchback_m", "fp8_tensorwise"],
        full=[],
    ),
)
def test_second_derivatives_are_straight_through(case, recipe):
    name, forward_over_reverse = case
    want = exact_products(name)
    fn = partial(loss, of_swjax(name, recipe))
    got = jax.jit(partial(products, forward_over_reverse, fn))(ARGUMENTS)
    assert_close(got, want, recipe)


@pytest.mark.parametrize("recipe", ["standard", "switchback_m"])
def test_eager_second_derivatives(recipe):
    fn = partial(loss, of_swjax("layer", recipe))
    assert_close(products(True, fn, ARGUMENTS), exact_products("layer"), recipe)


@pytest.mark.parametrize("recipe", thinning.kept(RECIPES, thinning.RECIPES))
def test_checkpointed_and_mapped_second_derivatives(recipe):
    want = exact_products("layer")
    fn = partial(loss, of_swjax("layer", recipe))
    remat = jax.checkpoint(fn, policy=swjax.checkpoint_policies.save_linear)
    assert_close(jax.jit(partial(products, True, remat))(ARGUMENTS), want, recipe)
    twice = jax.tree.map(lambda a: jnp.stack([a, a]), ARGUMENTS)
    got = jax.jit(jax.vmap(partial(products, False, fn)))(twice)
    assert_close(jax.tree.map(lambda a: a[1], got), want, recipe)


@pytest.mark.parametrize("prologue", [None, Gelu()])
def test_a_quantized_weight_is_a_constant(prologue):
    x, w = {"x": ARGUMENTS["x"]}, ARGUMENTS["w"]
    q, before = swjax.quantize_weight(w), exact_gelu if prologue else lambda x: x
    layer = lambda a: swjax.switchback(a["x"], q, prologue=prologue)
    exact = lambda a: jnp.matmul(before(a["x"]), w)
    got, want = (products(True, partial(loss, fn), x) for fn in (layer, exact))
    assert snr_db(got["x"], want["x"]) > 25


# Eager calls take the same rules, so one suffices.
@pytest.mark.parametrize(
    "name, recipe, transform",
    [
        ("layer", "fp8_tensorwise", jax.jit),
        ("layer_norm", "switchback_m", jax.jit),
        ("mlp", "switchback", jax.jit),
        ("layer_norm", "switchback_m", lambda fn: fn),
    ],
)
def test_only_the_gradient_of_the_output_depends_on_what_is_differentiated(name, recipe, transform):
    """The derivative with respect to `factor`, on which the layers' operands do not depend."""

    def weighted(fn, factor):
        grads = jax.grad(lambda a: factor * jnp.sum(jnp.sin(fn(a))))(ARGUMENTS)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    got = transform(jax.grad(partial(weighted, of_swjax(name, recipe))))(jnp.float32(2))
    want = jax.jit(jax.grad(partial(weighted, LAYERS[name][1])))(jnp.float32(2))
    np.testing.assert_allclose(got, want, rtol=0.2 if "fp8" in recipe else 0.05)


def test_third_derivatives():
    fn = lambda f, w: jnp.sum(f(ARGUMENTS["x"][0], w) ** 4)
    third = lambda f: jax.grad(lambda w: jnp.sum(jax.hessian(partial(fn, f))(w) ** 2))
    w = ARGUMENTS["w"][:, :2]
    got, want = (jax.jit(third(multiply))(w) for multiply in (swjax.switchback, jnp.matmul))
    assert snr_db(got, want) > 20


def test_gradient_penalty():
    """The first gradient is quantized by the recipe; the penalty's is the straight-through estimate."""

    def penalty(multiply, w):
        dx = jax.grad(lambda x: jnp.sum(jnp.sin(multiply(x, w))))(ARGUMENTS["x"])
        return jnp.sum(dx**2)

    got, want = (
        jax.jit(jax.grad(partial(penalty, f)))(ARGUMENTS["w"])
        for f in (swjax.switchback, jnp.matmul)
    )
    assert snr_db(got, want) > 25


@pytest.mark.parametrize(
    "name, kind",
    thinning.thinned(["layer", "mlp", "gated_mlp"], [AxisType.Auto, AxisType.Explicit], full=[]),
)
def test_second_derivatives_of_sharded_arrays(name, kind):
    """The batch and the weights are sharded over the same two devices, so weights are gathered."""
    fn = partial(loss, of_swjax(name, "switchback"))
    want = jax.jit(partial(products, True, fn))(ARGUMENTS)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    specs = {"x": P("data"), "w": P("data"), "w2": P(None, "data")}
    layouts = [Layout(specs["w"], P("data")), Layout(specs["w2"], P("data"))]
    options = {"layout": layouts[0]} if name == "layer" else {"layouts": tuple(layouts)}
    layer, mlp = partial(swjax.switchback, **options), partial(swjax.mlp, **options)
    sharded = partial(loss, partial(LAYERS[name][0], layer, mlp))
    with jax.set_mesh(mesh):
        place = lambda key, a: jax.device_put(a, NamedSharding(mesh, specs.get(key, P())))
        args = {key: place(key, a) for key, a in ARGUMENTS.items()}
        for forward_over_reverse in (True, False):
            got = jax.jit(partial(products, forward_over_reverse, sharded))(args)
            assert_close(got, jax.tree.map(np.asarray, want), "standard")


def without_higher_derivatives(monkeypatch):
    """Saves only what the backward pass reads."""
    monkeypatch.setattr(rules, "may_be_differentiated", lambda tree: False)
    monkeypatch.setattr(rules, "differentiated_as", lambda exact, value, *operands: value)
    jax.clear_caches()  # of rules that were traced with it


# Recipes whose rules save different values: operands, quantized arrays, maxima, rotated tokens.
FIRST = [
    ("layer", "mxfp8"),
    ("layer_norm", "switchback_m"),
    ("gelu", "switchback_hadamard"),
    ("several_with_residual", "fp8_static"),
    ("mlp_and_input", "llm_int8"),
    ("gated_mlp", "switchback"),
]


@pytest.mark.parametrize(
    "name, recipe", thinning.kept(itertools.product(LAYERS, RECIPES), few=FIRST)
)
def test_first_derivatives_pay_nothing(name, recipe, monkeypatch):
    """The compiled operations of first derivatives are the same when support for second ones is removed."""

    def program():
        fn = jax.value_and_grad(partial(loss, of_swjax(name, recipe)))
        text = jax.jit(fn).lower(ARGUMENTS).compile().as_text()
        return sorted(re.findall(r" = (\S+ [\w-]+\()", text))  # types and names

    given = program()
    without_higher_derivatives(monkeypatch)
    assert given == program()


@pytest.mark.parametrize(
    "recipe", thinning.first(["switchback", "switchback_m", "standard", "fp8_switchback"], 2)
)
def test_first_derivatives_of_stacked_layers_need_no_more_memory(recipe, monkeypatch):
    """`lax.scan` stacks the residuals of its layers. Tested with and without `jax.checkpoint`."""
    ws = jnp.stack([draw(32, 32, seed=seed) for seed in range(3)])

    def memory(wrap):
        step = wrap(lambda x, w: jnp.tanh(swjax.switchback(x, w, recipe=recipe)))
        fn = lambda x, ws: jnp.sum(jax.lax.scan(lambda x, w: (step(x, w), None), x, ws)[0])
        compiled = jax.jit(jax.grad(fn, (0, 1))).lower(draw(16, 32), ws).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    kinds = [lambda f: f, jax.checkpoint]
    given = [memory(wrap) for wrap in kinds]
    without_higher_derivatives(monkeypatch)
    assert given == [memory(wrap) for wrap in kinds]


def test_a_value_with_the_derivative_of_another_function():
    step = lambda x: differentiated_as(jnp.sin, jnp.sign(jax.lax.stop_gradient(x)), x)
    assert float(step(2.0)) == 1.0
    np.testing.assert_allclose(jax.grad(step)(2.0), np.cos(2.0), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.grad(step))(2.0), -np.sin(2.0), rtol=1e-6)
