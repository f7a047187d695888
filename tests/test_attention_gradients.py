"""The prototype of attention's backward pass in Mosaic, which `dispatch` does not choose, against float64."""

from functools import partial

import interpreters
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_cases import attention_arguments, normal
from numeric import FLOOR_DB, snr_db

from swjax.kernels import mosaic_gpu, reference

# (queries [b, t, h, d], dtype): rests of 0, 1, 5 and 16 tokens; one or two heads in shared memory; one or
# several heads; lines of 16 and of 64 features.
CASES = [
    ((5, 257, 2, 80), "bfloat16"),
    ((9, 129, 2, 80), "float16"),
    ((2, 197, 1, 64), "bfloat16"),
    ((9, 197, 3, 64), "bfloat16"),
    ((9, 257, 1, 80), "float16"),
    ((3, 256, 3, 64), "float16"),
    ((1, 144, 1, 128), "bfloat16"),
    ((2, 131, 5, 96), "bfloat16"),
]
RUNS = [
    pytest.param(
        partial(mosaic_gpu.attention_backward, multiprocessors=4),
        marks=pytest.mark.gpu,
        id="compiled",
    ),
    pytest.param(
        partial(interpreters.run, "mosaic_gpu", "attention_backward"),
        marks=interpreters.SKIPS["mosaic_gpu"],
        id="interpreted",
    ),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape, dtype", CASES)
def test_gradients_against_float64(run, shape, dtype):
    check(run, shape, dtype)


def check(run, shape, dtype):
    arrays = attention_arguments("attention_backward", shape, dtype)
    for value, exact in zip(run(*arrays), oracle.attention_backward(*arrays), strict=True):
        assert value.dtype == dtype
        if np.any(exact):  # with a single key, dq and dk are 0
            assert snr_db(value, exact) > FLOOR_DB[value.dtype.name]
        else:
            assert np.max(np.abs(value.astype(jnp.float32))) < 1e-2


# The warnings come from rows of padding, which are not written.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("run", RUNS)
def test_gradients_far_from_the_maximum_stay_finite(run):
    """Padded keys have a score of 0, far above a log-sum-exp of -1e4: they must not contribute."""
    shape = (1, 197, 1, 64)
    q = np.full(shape, 40, "bfloat16")
    k = np.full(shape, -40, "bfloat16") + normal(shape, "bfloat16")
    v, gradient = normal(shape, "bfloat16"), normal(shape, "bfloat16", seed=1)
    q, k, v, gradient = (jnp.asarray(x) for x in (q, k, v, gradient))
    out, lse = jax.block_until_ready(reference.attention(q, k, v))
    assert jnp.max(lse) < -1e3
    for value in run(q, k, v, out, lse, gradient):
        assert np.isfinite(np.asarray(value, np.float32)).all()


@pytest.mark.parametrize(
    "shape, dtype, options, reason",
    [
        ((2, 257, 2, 80), "bfloat16", {}, None),
        ((2, 257, 2, 80), "float32", {}, "16-bit dtype"),
        ((2, 257, 2, 80), "bfloat16", {"causal": True}, "no causal mask"),
        ((2, 257, 2, 88), "bfloat16", {}, "a multiple of 16"),
        ((2, 50, 2, 64), "bfloat16", {}, "at least 2 tiles"),
        ((2, 145, 2, 64), "bfloat16", {}, "up to 16 tokens more, got 145"),
        ((2, 257, 2, 112), "bfloat16", {}, "257 tokens of 112 features exceed"),
        ((2, 577, 2, 64), "bfloat16", {}, "577 tokens of 64 features exceed"),
    ],
)
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")
def test_what_it_cannot_do_is_said(shape, dtype, options, reason):
    q = jax.ShapeDtypeStruct(shape, dtype)
    said = mosaic_gpu.why_not("attention_backward", q, **options)
    assert said is None if reason is None else reason in str(said)
