"""Lookups in tables, and their gradients on GPUs, which the CPU computes here."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from numeric import snr_db

from swjax.kernels import targets
from swjax.models.embeddings import CHUNK, first_rows, lookup, sum_by_token

COUNT, WIDTH = 40, 6


@pytest.fixture
def as_on_gpus():
    with targets.compiling_for("H100"):
        yield


def captions(*shape, seed=0):
    """Returns random tokens. The last two thirds of each row are padding, as in captions."""
    tokens = jax.random.randint(jax.random.key(seed), shape, 1, COUNT)
    return tokens.at[..., shape[-1] // 3 :].set(0)


def weighted(look, table, tokens):
    return jnp.sum(jnp.sin(look(table, tokens)) ** 2)


def draw(*shape):
    return jax.random.normal(jax.random.key(1), shape)


TABLE = jax.random.normal(jax.random.key(9), (COUNT, WIDTH))
EXACT = partial(weighted, lambda table, tokens: jnp.take(table, tokens, axis=0))
OURS = partial(weighted, partial(lookup, gradient_dtype="float32"))
SUMS = jax.jit(sum_by_token, static_argnums=2)


@pytest.mark.parametrize(
    "n, dtype",
    thinning.thinned([1, CHUNK, 5 * CHUNK + 1, 2000], ["float32", "bfloat16", "float16"], full=[]),
)
def test_sums_are_those_of_each_token(n, dtype):
    rows = jax.random.normal(jax.random.key(n), (n, WIDTH)).astype(dtype)
    got = SUMS(rows, captions(n), COUNT)
    want = np.zeros((COUNT, WIDTH))
    np.add.at(want, np.asarray(captions(n)), np.asarray(rows, np.float64))
    assert got.dtype == jnp.float32
    assert snr_db(got, want) > 120


def test_tokens_count_from_the_end_and_unknown_tokens_are_dropped():
    rows = jnp.arange(1.0, 7.0)[:, None]
    got = SUMS(rows, jnp.array([-1, 2, 3, -4, 0, -2]), 3)
    np.testing.assert_array_equal(got, [[5.0], [6.0], [3.0]])


def test_small_integers_and_no_tokens():
    tokens = jnp.array([44, 255, 44], jnp.uint8)
    got = np.asarray(SUMS(np.ones((3, 1), "float32"), tokens, 300))
    assert got[44] == 2 and got[255] == 1 and got.sum() == 3
    assert not np.any(SUMS(np.ones((0, 2), "float32"), tokens[:0], 3))


def assert_same_derivatives(ours, exact, table, indices):
    """Compares derivatives of two losses of a table and indices."""

    @partial(jax.jit, static_argnums=0)
    def derivatives(loss):
        first = jax.grad(loss)
        return [
            first(table, indices),
            jax.grad(lambda table: jnp.sum(first(table, indices) ** 2))(table),
            jax.vmap(first, (None, 0))(table, indices[:, None]),
            jax.vmap(first, (0, None))(jnp.stack([table, 2 * table]), indices),
        ]

    for got, want in zip(derivatives(ours), derivatives(exact), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", thinning.first([captions(7, 9), captions(300, 3)]))
def test_derivatives_are_those_of_take(as_on_gpus, tokens):
    assert_same_derivatives(OURS, EXACT, TABLE, tokens)


def test_gradients_are_rounded_to_the_dtype(as_on_gpus):
    look = partial(lookup, gradient_dtype="bfloat16")
    loss = lambda table: jnp.sum(look(table, jnp.zeros(1, int)) * 1.001)
    gradient = jax.jit(jax.grad(loss))(TABLE)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient[0], np.ones(WIDTH))


@pytest.mark.parametrize("count", thinning.first([5, 1, 9]))
def test_gradients_of_first_rows(as_on_gpus, count):
    order = jnp.argsort(jax.random.uniform(jax.random.key(0), (4, 9)), axis=1)
    table = TABLE[:9]

    def weighted(first, table, order):
        return jnp.sum(jnp.sin(first(table, order)) ** 2)

    exact = partial(weighted, lambda table, order: table[order[:, :count]])
    ours = partial(weighted, lambda table, order: first_rows(table, order, count, "float32"))

    assert_same_derivatives(ours, exact, table, order)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_the_same_in_every_run(dtype):
    tokens, order = captions(512, 77), jnp.argsort(draw(512, 77), axis=1)
    of_tokens = lambda table, tokens: lookup(table, tokens, dtype)
    of_rows = lambda table, order: first_rows(table, order, 32, dtype)
    for look, indices, rows in (
        (of_tokens, tokens, (tokens, COUNT)),
        (of_rows, order, (order[:, :32], 77)),
    ):
        chosen, count = rows
        table, g = jnp.zeros((count, 512)), draw(*chosen.shape, 512).astype(dtype)

        @jax.jit  # of arguments, which XLA cannot sort while it compiles
        def gradient(table, indices, g, look=look):
            return jax.vjp(lambda table: look(table, indices), table)[1](g.astype("float32"))[0]

        first = gradient(table, indices, g)
        assert all(jnp.array_equal(gradient(table, indices, g), first) for _ in range(5))
        want = np.zeros(table.shape)
        np.add.at(want, np.asarray(chosen), np.asarray(g, np.float64))
        assert snr_db(first, want) > 100
