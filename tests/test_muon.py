"""swjax.optax.muon: optax's updates, stacks, bad input. test_sharded_collectives.py has meshes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from swjax.optax import muon
from swjax.optax.orthogonal import scale_by_muon


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-6), ("bfloat16", 0.03)])
def test_muon_is_that_of_optax(dtype, atol):
    axes = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    params = {"wide": jnp.zeros((3, 16, 24)), "tall": jnp.zeros((3, 40, 16))}
    ours = scale_by_muon(dtype=dtype)
    theirs = contrib.scale_by_muon(
        weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: axes, updates)
    )
    own, other = ours.init(params), theirs.init(params)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        for key in jax.random.split(jax.random.key(0), 3):
            grads = jax.tree.map(lambda p, key=key: jax.random.normal(key, p.shape), params)
            got, own = ours.update(grads, own)
            want, other = theirs.update(grads, other)
            assert_close = partial(np.testing.assert_allclose, atol=atol)
            jax.tree.map(assert_close, (got, own), (want, other))


def test_a_matrix_is_a_stack_of_one():
    stack = {"w": jax.random.normal(jax.random.key(0), (1, 6, 4))}
    matrix = {"w": stack["w"][0]}
    (one, _), (other, _) = (
        optimizer.update(grads, optimizer.init(grads))
        for optimizer, grads in ((scale_by_muon(), stack), (scale_by_muon(), matrix))
    )
    np.testing.assert_array_equal(one["w"][0], other["w"])


def test_both_parts_decay_and_follow_the_schedule():
    params = {"w": jnp.ones((4, 3)), "embedding": jnp.ones((5, 3)), "bias": jnp.ones(3)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    kinds = {"w": True, "embedding": False, "bias": False}
    decay = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    optimizer = muon(lambda step: 0.1 / (1.0 + step), kinds, weight_decay=0.5, mask=decay)
    state = optimizer.init(params)
    for rate in (0.1, 0.05):
        updates, state = optimizer.update(zeros, state, params)
        want = {"w": -0.5 * rate, "embedding": -0.5 * rate, "bias": 0.0}
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), updates, want)


def test_an_array_that_is_no_matrix_is_one_line():
    params = {"attention": {"kernel": jnp.ones((2, 3, 4, 5))}}
    optimizer = muon(0.1, lambda params: jax.tree.map(lambda _: True, params))
    with pytest.raises(
        ValueError, match=r"got attention/kernel of shape \(2, 3, 4, 5\): set it to False"
    ):
        optimizer.init(params)


def test_it_minimizes():
    target = jax.random.normal(jax.random.key(0), (8, 6))
    loss = lambda params: jnp.mean((params["w"] - target) ** 2)
    optimizer = muon(optax.linear_schedule(0.3, 0.0, 100), {"w": True}, weight_decay=0.0)
    params = {"w": jnp.zeros((8, 6))}

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=100)
    assert loss(params) < 0.01 * loss({"w": 0 * target})
