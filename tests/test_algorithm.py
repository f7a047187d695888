"""Every implementation of the layer against Algorithm 1, the specification."""

from functools import partial

import implementations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from numeric import FLOOR_DB, snr_db

import swjax
from swjax.linear.algorithm import algorithm_1


def arrays(dtype, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    x, w, g = draw(64, 256).at[:, 3].multiply(20), draw(256, 128) / 16, draw(64, 128).at[5].set(0)
    return x.astype(dtype), w.astype("float32"), g.astype(dtype)


def output_and_gradients(layer, x, w, g):
    y, vjp = jax.vjp(layer, x, w)
    return y, *vjp(g)


@pytest.mark.parametrize("dtype", thinning.first(["bfloat16", "float32", "float16"]))
@pytest.mark.parametrize("transform", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
def test_xla_computes_the_same_bits(dtype, transform):
    args = arrays(dtype)
    want = transform(partial(output_and_gradients, algorithm_1))(*args)
    layer = partial(swjax.switchback, implementation="xla")
    got = transform(partial(output_and_gradients, layer))(*args)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("implementation", implementations.OF_LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_implementation_computes_the_algorithm(dtype, implementation):
    implementations.require(implementation)
    if implementation == "mosaic_gpu" and dtype == "float32":
        pytest.skip("mosaic_gpu computes weight gradients of 16-bit operands")
    args = arrays(dtype)
    layer = partial(swjax.switchback, implementation=implementation)
    got = jax.jit(partial(output_and_gradients, layer))(*args)
    want = jax.jit(partial(output_and_gradients, algorithm_1))(*args)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert snr_db(a, b) > FLOOR_DB[a.dtype.name]
