"""The gradients of lookups on GPUs, for batches that are sharded over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import TOKENS, WHOLE, compiled, draw, make_mesh, put

from swjax.kernels import targets
from swjax.models.embeddings import first_rows, lookup
from swjax.testing import collectives

pytestmark = pytest.mark.eight_devices


@pytest.fixture(autouse=True)
def as_on_gpus():
    with targets.compiling_for("H100"):
        yield


def loss(look, table, tokens):
    return jnp.sum(jnp.sin(look(table, tokens)) ** 2)


OURS = partial(loss, partial(lookup, gradient_dtype="float32"))
ARGUMENTS = draw(40, 6), np.random.default_rng(0).integers(0, 40, (16, 9), np.int32)
WANT = jax.grad(partial(loss, lambda table, tokens: table[tokens]))(*ARGUMENTS)


def check(gradient, arguments, want):
    mesh = make_mesh((4, 2, 1))
    with jax.set_mesh(mesh):
        placed = [put(a, mesh, spec) for a, spec in zip(arguments, (WHOLE, TOKENS))]
        fn = compiled(gradient, *placed)
        np.testing.assert_allclose(fn(*placed), want, rtol=1e-5, atol=1e-5)
        found = {op for op, _, _ in collectives(fn)}
    assert found == {"all-reduce"}, "rows and their gradients are not gathered"


def test_each_device_sums_its_own_tokens():
    check(jax.grad(OURS), ARGUMENTS, WANT)


def test_each_device_sums_its_own_rows():
    order = np.argsort(np.random.default_rng(1).random((16, 9)), axis=1)
    exact = partial(loss, lambda table, order: table[order[:, :4]])
    ours = partial(loss, lambda table, order: first_rows(table, order, 4, "float32"))
    arguments = draw(9, 6), order
    check(jax.grad(ours), arguments, jax.grad(exact)(*arguments))


def test_a_users_shard_map_sums_over_devices():
    mesh = make_mesh((8, 1, 1))
    summed = lambda *args: jax.lax.psum(OURS(*args), "data")
    each = jax.shard_map(summed, mesh=mesh, in_specs=(WHOLE, jax.P("data")), out_specs=WHOLE)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(each))(*ARGUMENTS)
    np.testing.assert_allclose(got, WANT, rtol=1e-5, atol=1e-5)
