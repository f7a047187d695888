"""`swjax.checkpoint_policies`: bytes, errors and transformations of `store_in_8_bits`; `finish_gradients`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import swjax
from swjax.checkpoint_policies import finish_gradients, store_in_8_bits

SHAPE = (2, 64, 96)  # groups of 32 features


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def layer(params, x, offset):
    """An activation that stores two arrays, a product, and an integer argument."""
    h = jnp.tanh(x) * jax.nn.sigmoid(x)
    return x + h @ params["w"] + offset.astype(x.dtype), jnp.sum(x)


PARAMS, OFFSET = {"w": draw(96, 96, seed=1) / 10}, jnp.int32(1)


def loss(layer, params, x):
    y, total = layer(params, x, OFFSET)
    return jnp.sum(jnp.sin(y)) + total


def relative(a, b):
    a, b = (jax.tree.map(lambda t: np.asarray(t, np.float64), t) for t in (a, b))
    errors = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), a, b)
    return max(jax.tree.leaves(errors))


def test_activations_are_stored_in_int8_and_parameters_as_they_are():
    x = draw(*SHAPE, dtype="bfloat16")
    params = jax.tree.map(lambda w: w.astype("bfloat16"), PARAMS)
    residuals = lambda layer: jax.tree.leaves(jax.vjp(layer, params, x, OFFSET)[1])
    whole, stored = residuals(layer), residuals(store_in_8_bits(layer))
    assert {a.dtype.name for a in whole if a.shape == SHAPE} == {"bfloat16"}
    assert not [a for a in stored if a.shape == SHAPE]
    kinds = {(a.shape, a.dtype.name) for a in stored if a.shape[:2] == SHAPE[:2]}
    assert kinds == {((2, 64, 3, 32), "int8"), ((2, 64, 3, 1), "float32")}
    assert any(a is params["w"] for a in stored)
    size = lambda arrays: sum(a.nbytes for a in {id(a): a for a in arrays}.values())
    assert size(stored) - params["w"].nbytes < 0.6 * (size(whole) - params["w"].nbytes)


def test_values_are_the_same_and_gradients_are_rounded():
    x, stored = draw(*SHAPE), store_in_8_bits(layer)
    (value, want), (same, got) = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: loss(f, *a), (0, 1)))(PARAMS, x)
        for f in (layer, stored)
    )
    assert value == same and 0 < relative(got, want) < 0.01
    assert relative(jax.grad(lambda x: loss(stored, PARAMS, x))(x), want[1]) < 0.01
    by_name = lambda params, x, offset: stored(params, offset=offset, x=x)  # was refused
    assert relative(jax.grad(lambda x: loss(by_name, PARAMS, x))(x), want[1]) < 0.01
    bad = jax.grad(lambda w: loss(stored, {"w": w}, x.at[0, 5, 7].set(jnp.nan)))(PARAMS["w"])
    assert not np.isfinite(bad[7]).any()


def test_scan_remat_vmap_and_layers_of_swjax():
    xs, ws = draw(3, *SHAPE), {"w": draw(4, 96, 96, seed=2) / 10}

    def quantized(params, x, offset):
        return swjax.switchback(x, params["w"]) + offset.astype(x.dtype), 0.0

    def run(wrap, layer, ws, x):
        step = lambda x, w: (wrap(layer)({"w": w}, x, OFFSET)[0], None)
        return jnp.sum(lax.scan(step, x, ws["w"])[0])

    def gradients(wrap, layer):
        gradient = jax.grad(lambda ws, x: run(wrap, layer, ws, x), (0, 1))
        return jax.jit(jax.vmap(gradient, (None, 0)))(ws, xs)

    dots = jax.checkpoint_policies.dots_saveable
    for each in (layer, jax.checkpoint(layer, policy=dots), quantized):
        want, got = (gradients(wrap, each) for wrap in (lambda f: f, store_in_8_bits))
        assert relative(got, want) < 0.02


def test_a_weight_is_no_activation_of_as_many_tokens():
    """Both are [96, 96]; also while JAX traces."""
    x = draw(96, 96, seed=3)
    residuals = lambda params, x: jax.tree.leaves(
        jax.vjp(store_in_8_bits(layer), params, x, OFFSET)[1]
    )
    for stored in (residuals(PARAMS, x), jax.eval_shape(residuals, PARAMS, x)):
        kinds = [(a.shape, a.dtype.name) for a in stored]
        assert kinds.count(((96, 96), "float32")) == 1 and ((96, 3, 32), "int8") in kinds
    assert any(a is PARAMS["w"] for a in residuals(PARAMS, x))


def test_a_group_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="group must be at least 16 features, got 8: pass 128"):
        store_in_8_bits(layer, group=8)


def test_a_loss_is_refused():
    """Its residuals are activations and parameters alike; a cast of the weight was rounded to int8."""
    stored = store_in_8_bits(lambda w: jnp.sum(w.astype("bfloat16") ** 2))
    with pytest.raises(ValueError, match=r"result is \[\*tokens, n\], got \(\): wrap the blocks"):
        jax.grad(stored)(PARAMS["w"])


def test_a_model_with_a_random_counter_is_refused():
    """The counter stayed at its value, so every step dropped the same elements."""
    block = nnx.Sequential(nnx.Linear(96, 96, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
    call = store_in_8_bits(lambda block, rngs, x: block(x, rngs=rngs))
    with pytest.raises(TypeError, match="changes no variable .* a RngCount: pass random numbers"):
        call(block, nnx.Rngs(0), draw(*SHAPE))
    block.eval()
    gradient = nnx.grad(lambda block, x: jnp.sum(call(block, nnx.Rngs(0), x)))(block, draw(*SHAPE))
    assert gradient["layers"][0]["kernel"].shape == (96, 96)


@pytest.mark.parametrize("call", [layer, jax.checkpoint(layer)])
def test_gradients_finish_one_block_later(call):
    """The gradients of block i + 1 and that of the input of block i pass one barrier, and keep their bits."""

    def total(finish, blocks, x):
        blocks = [(block, OFFSET) for block in blocks]
        for i in range(3):
            if finish and i < 2:
                blocks[i + 1], x = finish_gradients(blocks[i + 1], x)
            x, _ = call(blocks[i][0], x, blocks[i][1])
        return jnp.sum(x)

    arrays = [{"w": draw(96, 96, seed=i) / 10} for i in range(3)], draw(*SHAPE, seed=3)
    gradients = lambda finish: jax.jit(jax.grad(lambda *args: total(finish, *args), argnums=(0, 1)))
    jax.tree.map(np.testing.assert_array_equal, *(gradients(f)(*arrays) for f in (True, False)))
    program = str(jax.make_jaxpr(gradients(True))(*arrays))
    barriers = re.findall(r"(.*) = optimization_barrier", program)
    shapes = [re.findall(r"f32\[([\d,]+)\]", line) for line in barriers]
    assert shapes.count(["96,96", "2,64,96"]) == 2
