"""Converted models under Flax's own transformations, copies and files."""

import copy
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from flax import linen as nn
from flax import nnx

import swjax.linen
import swjax.nnx
from swjax.recipes import RECIPES

X = jax.random.normal(jax.random.key(0), (4, 16))
RULES = {".*up": "switchback"}


# --- Linen: the context converts calls inside it, and no others ----------------------------------------


class Mlp(nn.Module):
    """Two layers; `lift` transforms each, for example `nn.remat`."""

    lift: object = staticmethod(lambda module: module)

    @nn.compact
    def __call__(self, x):
        dense = self.lift(nn.Dense)
        return dense(16, name="down")(nn.relu(dense(32, name="up")(x)))


LIFTED = {
    "plain": lambda module: module,
    "nn.jit": nn.jit,
    "nn.remat": nn.remat,
    "nn.jit of nn.remat": lambda module: nn.jit(nn.remat(module)),
}
CALLED = {
    "eager": lambda model: model.apply,
    "jax.jit": lambda model: jax.jit(model.apply),
    "jax.grad": lambda model: jax.jit(jax.grad(lambda *args: jnp.sum(model.apply(*args) ** 2), 1)),
}


@pytest.mark.parametrize(
    "how, inside_first",
    thinning.thinned(
        [
            ("plain", "jax.jit"),
            ("plain", "jax.grad"),
            ("nn.jit", "eager"),
            ("nn.jit", "jax.jit"),
            ("nn.remat", "jax.jit"),
            ("nn.jit of nn.remat", "eager"),
        ],
        [True, False],
        full=[],
    ),
)
def test_a_linen_model_has_the_recipes_of_where_it_is_called(how, inside_first):
    """A call inside the context is quantized and one outside is not, even if the other was traced before."""
    lift, call = how
    model = Mlp(LIFTED[lift])
    params = model.init(jax.random.key(1), X)
    function = CALLED[call](model)

    def inside():
        with swjax.linen.quantized(RULES):
            return function(params, X)

    def outside():
        return function(params, X)

    first, second = (inside, outside) if inside_first else (outside, inside)
    a, b, again = first(), second(), first()
    np.testing.assert_array_equal(a, again)
    assert not np.array_equal(a, b)
    exact = CALLED["eager" if call != "jax.grad" else call](Mlp())(params, X)
    np.testing.assert_allclose(b if inside_first else a, exact, rtol=1e-6, atol=1e-6)


def test_linen_contexts_do_not_nest():
    """JAX's caches would know the inner recipes alone, and use the program of both for a later call."""
    with swjax.linen.quantized(RULES):
        with pytest.raises(ValueError, match="runs inside another .*: give all expressions to one"):
            with swjax.linen.quantized({".*down": "switchback"}):
                pass
    with swjax.linen.quantized(RULES):  # the first has ended
        pass


def test_a_model_class_under_nn_jit():
    model = nn.jit(Mlp)()
    params = model.init(jax.random.key(1), X)
    before = model.apply(params, X)
    with swjax.linen.quantized(RULES):
        converted = model.apply(params, X)
    assert jnp.any(converted != before)
    np.testing.assert_array_equal(model.apply(params, X), before)


# --- NNX: transformations, copies and files of a converted model ----------------------------------------


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def network(recipe="switchback"):
    return swjax.nnx.quantize_model(Network(nnx.Rngs(0)), {"up|down": recipe})


def merged(model):
    return nnx.merge(*nnx.split(model))


COPIES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "copy.deepcopy": copy.deepcopy,
    "nnx.clone": nnx.clone,
    "nnx.split and merge": merged,
}


@pytest.mark.parametrize(
    "name, recipe", thinning.thinned(list(COPIES), RECIPES, full=["switchback"])
)
def test_a_copy_computes_the_same(name, recipe):
    model = network(recipe)
    other = COPIES[name](model)
    np.testing.assert_array_equal(other(X), model(X))
    assert str(swjax.nnx.describe_model(other)) == str(swjax.nnx.describe_model(model))


def test_files_of_a_converted_model_are_those_of_the_model():
    plain, converted = (
        nnx.to_pure_dict(nnx.state(model)) for model in (Network(nnx.Rngs(0)), network())
    )
    assert flax.serialization.to_bytes(converted) == flax.serialization.to_bytes(plain)


TRANSFORMED = {
    "nnx.jit": nnx.jit(lambda model, x: model(x)),
    "nnx.remat": nnx.remat(lambda model, x: model(x)),
    "nnx.vmap": nnx.vmap(lambda model, x: model(x), in_axes=(None, 0)),
    "nnx.cond": lambda model, x: nnx.cond(True, lambda m: m(x), lambda m: m(x) * 0, model),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_converted_model_transforms(name):
    model = network()
    np.testing.assert_allclose(TRANSFORMED[name](model, X), model(X), rtol=1e-5, atol=1e-5)


def test_layers_that_are_scanned():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return nnx.Linear(16, 16, rngs=rngs)

    layers = swjax.nnx.quantize_model(stack(nnx.Rngs(0)), {".*": "switchback"})
    scanned = nnx.scan(lambda x, layer: (layer(x), None), in_axes=(nnx.Carry, 0))
    want = X
    for i in range(3):
        layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0), dot_general=swjax.dot_general("switchback"))
        layer.kernel[...], layer.bias[...] = layers.kernel[i], layers.bias[i]
        want = layer(want)
    np.testing.assert_allclose(scanned(X, layers)[0], want, rtol=1e-5, atol=1e-5)


# --- inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["nnx", "linen"])
def test_lists_are_taken_as_flax_takes_them(layer):
    rows = [[1.0] * 16] * 2
    if layer == "nnx":
        call = swjax.nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    else:
        model = swjax.linen.Dense(8)
        params = model.init(jax.random.key(0), X)
        call = lambda x: model.apply(params, x)
    np.testing.assert_array_equal(call(rows), call(jnp.array(rows)))
    np.testing.assert_array_equal(call(np.array(rows, np.float32)), call(jnp.array(rows)))
