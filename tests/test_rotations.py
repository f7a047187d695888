"""Rotations of features: `swjax.kernels.rotations`, and the recipe `int8_hadamard`."""

from functools import partial

import implementations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric import snr_db

import swjax
from swjax.kernels.reference import dequantize
from swjax.kernels.rotations.reference import rotation_matrix
from swjax.recipes import RECIPES, Product, Quantizer, Recipe

RECIPE = "int8_hadamard"


def with_outliers(gain):
    """Returns x with three channels `gain` times as large, w, g, and which channels are ordinary."""
    random = np.random.default_rng(0)
    x, w, g = (random.normal(size=shape) for shape in ((128, 256), (256, 192), (128, 192)))
    ordinary = np.ones(256, bool)
    ordinary[[5, 77, 200]] = False
    x[:, ~ordinary] *= gain
    return x, w, g, ordinary


def as_float32(*arrays):
    return [jnp.asarray(array, "float32") for array in arrays]


@implementations.each(
    "quantize_rotated",
    compiled=[(300, 4096), (77, 1024), (5, 14_336), (64, 1280), (1, 128)],
    interpreted=[(3, 384)],
    options=("dtype, rotation", [("bfloat16", 128), ("float16", 32), ("float32", 128)]),
    few_options=[("bfloat16", 128)],
)
def test_rows_are_rotated_and_quantized(operation, implementation, shape, dtype, rotation):
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), dtype)
    q = implementations.run(operation, x, implementation=implementation, rotation=rotation)
    matrix = rotation_matrix(rotation) / np.sqrt(rotation)
    exact = np.asarray(x.astype("float32"), np.float64).reshape(*shape[:-1], -1, rotation)
    exact = (exact @ matrix.T).reshape(shape)
    assert snr_db(q.scale, np.abs(exact).max(-1, keepdims=True) / 127) > 45
    assert snr_db(dequantize(q), exact) > 37
    assert np.all(np.abs(q.values).max(-1) == 127)


@pytest.mark.parametrize("gain, bound", [(1, 0.015), (30, 0.045), (100, 0.13)])
def test_large_channels_spoil_the_others_little(gain, bound):
    """Without the rotation the error is three times as large or more."""
    x, w, g, ordinary = with_outliers(gain)
    signal = np.linalg.norm(x[:, ordinary] @ w[ordinary])
    errors = {}
    for recipe in (RECIPE, "switchback_hadamard"):
        y, vjp = jax.vjp(partial(swjax.switchback, recipe=recipe), *as_float32(x, w))
        dx, dw = vjp(*as_float32(g))
        errors[recipe] = np.linalg.norm(np.asarray(y) - x @ w) / signal
        assert snr_db(dx, g @ w.T) > 36 and snr_db(dw[ordinary], (x.T @ g)[ordinary]) > 36
    assert errors[RECIPE] < bound
    assert gain == 1 or errors["switchback_hadamard"] > 2.5 * errors[RECIPE]


def test_layers_of_one_input_have_their_own_rotations():
    """The input gradient of each rotates its own features: 192 = 3 x 64, 96 = 3 x 32, 7 not at all."""
    x, w, g, _ = with_outliers(1)
    widths = (192, 96, 7)
    outputs = lambda x, w: swjax.switchback(x, tuple(w[:, :n] for n in widths), recipe=RECIPE)
    ys, vjp = jax.vjp(outputs, *as_float32(x, w))
    gs = [g[:, :n] for n in widths]
    dx, _ = vjp(tuple(as_float32(*gs)))
    assert all(snr_db(y, x @ w[:, :n]) > 36 for y, n in zip(ys, widths))
    assert snr_db(dx, sum(g @ w[:, :n].T for g, n in zip(gs, widths))) > 36


@pytest.mark.parametrize("constants", [(True,), (True, False), (True, True)])
def test_gradients_of_quantized_weights_are_rotated_back(constants):
    """Also of layers that share an input, and second derivatives, which treat products as exact."""
    x, w, g = as_float32(*with_outliers(1)[:3])
    widths = (192, 96)[: len(constants)]
    exact = tuple(w[:, :n] for n in widths)
    ws = tuple(
        swjax.quantize_weight(w, RECIPE) if constant else w for constant, w in zip(constants, exact)
    )
    layer = lambda ws, x: swjax.switchback(x, ws, recipe=RECIPE)
    np.testing.assert_array_equal(layer(ws, x)[0], layer(exact, x)[0])
    gs = tuple(g[:, :n] for n in widths)
    gradient = lambda ws, x: jax.vjp(partial(layer, ws), x)[1](gs)[0]
    assert snr_db(gradient(ws, x), sum(g @ w.T for g, w in zip(gs, exact))) > 36
    square = lambda ws, x: sum(jnp.sum(y**2) for y in layer(ws, x))
    second = lambda ws: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(square, 1)(ws, x) * x)))(x)
    assert snr_db(second(ws), 4 * sum(x @ w @ w.T for w in exact)) > 30


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Quantizer("int8", "row", rotation=3), "rotation must be one of"),
        (
            lambda: Product(Quantizer("int8", "row", rotation=2), Quantizer("int8", "row")),
            "the same rotation for both operands, got 2 and 1",
        ),
        (
            lambda: Recipe(RECIPES[RECIPE].fwd, RECIPES[RECIPE].dgrad, save_quantized=True),
            "cannot rotate features, got rotation=128",
        ),
        (lambda: Recipe(wgrad=RECIPES[RECIPE].fwd), "rotates tokens in blocks only"),
    ],
)
def test_rotations_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()
