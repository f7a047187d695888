"""StableAdamW with sharded parameters."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import thinning
from eight_devices import KINDS, draw, make_mesh, put
from jax.sharding import PartitionSpec as P

from swjax.optax import rms_by_path, stable_adamw

pytestmark = pytest.mark.eight_devices


@pytest.mark.parametrize(
    "kind, sizes, spec",
    thinning.first(
        [
            ("explicit", (2, 2, 2), P("fsdp", "tensor")),
            ("auto", (1, 8, 1), P(None, "fsdp")),
            ("auto", (8, 1, 1), P()),
            ("explicit", (1, 8, 1), P("fsdp")),
            ("auto", (2, 2, 2), P("tensor", "fsdp")),
            ("explicit", (1, 2, 4), P(("tensor", "fsdp"))),
        ],
        2,
    ),
    ids=str,
)
def test_stable_adamw_has_the_rms_of_whole_tensors(sizes, spec, kind):
    """Gradients surge in the shards of a few devices; every layer of a stack has one RMS over all devices."""
    params = {"blocks": draw(3, 16, 24), "head": draw(16, 24, seed=1), "bias": draw(24, seed=2)}
    specs = {"blocks": P(None, *spec), "head": spec, "bias": P(*spec[1:])}
    grads = [jax.tree.map(lambda p, t=t: 0.1 * jnp.cos(3.0**t * p), params) for t in range(4)]
    grads[-1]["blocks"] = grads[-1]["blocks"].at[1, :8, :12].multiply(1000)
    grads[-1]["head"] = grads[-1]["head"].at[:8, :12].multiply(1000)
    optimizer = stable_adamw(0.05, block_axes={"blocks": 0, "head": None, "bias": None})

    def train(params, grads):
        state = optimizer.init(params)
        for g in grads:
            updates, state = optimizer.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params, rms_by_path(state)

    want, want_rms = jax.jit(train)(params, grads)
    assert want_rms["head"] > 1.1 and want_rms["blocks"][1] > 1.1 > want_rms["blocks"][0]
    mesh = make_mesh(sizes, KINDS[kind])
    place = lambda tree: {name: put(x, mesh, specs[name]) for name, x in tree.items()}
    with jax.set_mesh(mesh):
        got, rms = jax.jit(train)(place(params), [place(g) for g in grads])
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, rms, want_rms)
    jax.tree.map(close, got, want)
    assert got["head"].sharding.is_equivalent_to(place(params)["head"].sharding, 2)
