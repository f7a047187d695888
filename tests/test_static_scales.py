"""`fp8_static`: constant scales, so that no pass over an array finds its maximum."""

from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import swjax
import swjax.nnx
from swjax.kernels import dispatch
from swjax.linear.layer import Layer
from swjax.recipes import RECIPES, Product, Quantizer, Recipe

X, W = jnp.ones((4, 8)), jnp.ones((8, 4))
UNIT, FAN_IN = (Quantizer("float8_e4m3fn", scope) for scope in ("unit", "fan_in"))


def program(recipe):
    """The jaxpr of three layers that share memory passes, forward and backward."""

    def loss(x, w1, b1, w2, norm):
        return jnp.sum(swjax.mlp(x, w1, b1, w2, None, recipe=recipe, prologue=norm))

    norm = swjax.RMSNorm(jnp.ones(8))
    gradients = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    return str(jax.make_jaxpr(gradients)(X, W, jnp.ones(4), W.T, norm))


def test_no_pass_finds_a_maximum():
    assert "reduce_max" in program("fp8_tensorwise")
    assert "reduce_max" not in program("fp8_static")


@pytest.mark.parametrize("k", [64, 512])
def test_layers_are_initialized_with_unit_scale(k):
    """Flax's initial weight and its output have a standard deviation of about 1 in units of their scales."""
    layer = swjax.nnx.Linear(k, 256, recipe="fp8_static", use_bias=False, rngs=nnx.Rngs(0))
    w = swjax.quantize_weight(layer.kernel[...], "fp8_static")
    assert 0.7 < np.std(np.asarray(w.values, np.float32)) < 1.42
    x = jax.random.normal(jax.random.key(0), (128, k))
    assert 0.9 < np.std(layer(x)) < 1.1
    np.testing.assert_array_equal(swjax.switchback(x, w, recipe="fp8_static"), layer(x))


def test_values_beyond_the_range_are_clipped_and_what_is_not_finite_stays_visible():
    x = jnp.array([[1e4], [-1e4], [jnp.inf], [jnp.nan]])
    y = swjax.switchback(x, jnp.ones((1, 1)), recipe="fp8_static")[:, 0]
    np.testing.assert_array_equal(y, [448, -448, np.nan, np.nan])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Quantizer("int8", "unit"), "dtype must be one of .*float8_e5m2'.*, got 'int8'"),
        (lambda: Quantizer("float8_e5m2", "unit", rotation=16), "rotates nothing, got rotation=16"),
        (lambda: Product(FAN_IN, FAN_IN), "are for rhs, got fan_in and fan_in"),
        (lambda: Recipe(wgrad=Product(UNIT, FAN_IN)), "'unit' rather than 'fan_in', got 'fan_in'"),
        (
            lambda: swjax.ragged_switchback(X, W[None], jnp.array([4]), recipe="fp8_static"),
            "ragged_switchback needs a recipe that quantizes rows of x",
        ),
    ],
)
def test_errors_name_the_invariant_the_value_and_the_remedy(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("recipe", ["fp8_static", "fp8_tensorwise"])
def test_on_gpus_one_pass_makes_both_forms_of_weight_and_gradient(recipe):
    x, w = (
        jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(2, 3, 8), (8, 4)])
    )
    gradients = jax.grad(lambda *a: jnp.sum(swjax.switchback(*a, recipe=recipe) ** 2), (0, 1))
    with mock.patch.object(Layer, "reads_last_axis", True), dispatch.record() as calls:
        got = gradients(x, w)
    assert Counter(calls)["quantize_both", "xla"] == 2
    jax.tree.map(np.testing.assert_array_equal, got, gradients(x, w))


def test_the_weight_is_saved_in_fp8():
    layer = RECIPES["fp8_static"]
    assert layer.fwd.rhs == layer.dgrad.rhs
    _, vjp = jax.vjp(lambda w: swjax.switchback(X, w, recipe="fp8_static"), W)
    kinds = {(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(vjp)}
    assert ("uint8", W.shape) in kinds
