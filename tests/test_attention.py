"""Attention: the kernels and their specification against float64, and the layer that calls them."""

from functools import partial

import implementations
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_cases import attention_arguments, normal
from numeric import FLOOR_DB, snr_db

from swjax import attention
from swjax.kernels import reference, targets

# (queries [b, t, h, d], causal, dtype): those of the ViTs and their text towers, with and without patch
# dropout, and sizes that tiles do not divide.
CASES = [
    ((2, 257, 3, 80), False, "bfloat16"),
    ((2, 257, 2, 64), False, "float16"),
    ((3, 129, 2, 80), False, "bfloat16"),
    ((2, 77, 2, 64), True, "bfloat16"),
    ((2, 77, 2, 64), False, "float16"),
    ((2, 197, 2, 64), False, "bfloat16"),
    ((2, 197, 2, 64), True, "float16"),
    ((2, 99, 2, 64), False, "bfloat16"),
    ((3, 50, 2, 64), False, "bfloat16"),
    ((2, 320, 2, 88), False, "bfloat16"),
    ((2, 300, 1, 104), True, "bfloat16"),
    ((2, 26, 3, 32), False, "bfloat16"),
    ((1, 128, 2, 128), True, "bfloat16"),
    ((2, 7, 2, 16), True, "bfloat16"),
    ((2, 1, 1, 24), False, "bfloat16"),
    ((8, 257, 2, 80), False, "bfloat16"),  # Mosaic's forward pass takes multiples of 8 tokens
    ((8, 257, 1, 64), False, "float16"),
    ((8, 197, 3, 64), False, "bfloat16"),
    ((3, 136, 2, 80), False, "float16"),
    # Mosaic's backward pass: a single head, no tokens beyond whole tiles, many of them.
    ((9, 257, 1, 80), False, "float16"),
    ((2, 256, 3, 64), False, "bfloat16"),
    ((70, 144, 4, 64), False, "bfloat16"),
    ((2, 131, 5, 80), False, "bfloat16"),
    # The last tile of 64 tokens begins in the one before.
    ((40, 99, 12, 64), False, "bfloat16"),
    ((3, 77, 5, 80), False, "bfloat16"),
    ((2, 165, 3, 80), False, "float16"),
    ((8, 65, 1, 64), False, "float16"),
    ((2, 127, 1, 80), False, "bfloat16"),
    ((32, 77, 12, 64), True, "bfloat16"),
    ((8, 131, 3, 80), True, "float16"),
    ((8, 200, 2, 64), True, "bfloat16"),
]
XLA_CASES = CASES[3:15:4]  # XLA has no tiles, so some of the general cases suffice
# Smaller, for interpreters: with and without tokens and features that do not fill a tile. The first two, with
# and without a mask, are always tested.
SMALL_CASES = [
    ((1, 129, 1, 80), False, "bfloat16"),
    ((1, 77, 1, 64), True, "float16"),
    ((1, 193, 1, 24), False, "bfloat16"),
    ((1, 150, 1, 16), True, "float16"),
    ((2, 26, 2, 32), False, "bfloat16"),
    ((2, 7, 2, 16), True, "bfloat16"),
    ((2, 1, 1, 24), False, "float16"),
]
# The first token of an example has every remainder by 8. Four blocks of threads process several heads each.
SMALL_MOSAIC_CASES = [
    ((8, 65, 2, 64), False, "bfloat16"),
    ((8, 77, 3, 64), True, "float16"),
    ((8, 129, 2, 80), False, "bfloat16"),
    ((4, 194, 2, 64), False, "float16"),
]
# Four whole tiles and a token, one and more heads for each block; whole tiles only; 16 tokens beyond them;
# two and three tiles, where the last one overlaps the previous one.
SMALL_MOSAIC_GRADIENT_CASES = [
    ((1, 144, 1, 80), False, "bfloat16"),
    ((5, 257, 1, 80), False, "bfloat16"),
    ((1, 256, 3, 64), False, "float16"),
    ((2, 197, 3, 64), False, "bfloat16"),
    ((5, 99, 2, 64), False, "bfloat16"),
    ((2, 77, 3, 80), False, "float16"),
    ((3, 165, 2, 64), False, "bfloat16"),
    # Causal: with a last tile that begins in the one before, and with a rest.
    ((5, 77, 1, 64), True, "bfloat16"),
    ((2, 130, 2, 80), True, "float16"),
]


@implementations.each(
    "attention",
    "attention_backward",
    compiled={"xla": XLA_CASES, "triton": CASES, "mosaic_gpu": CASES},
    interpreted={"triton": SMALL_CASES, "mosaic_gpu": SMALL_MOSAIC_CASES},
    name="case",
    kept=2,
)
def test_operations_against_float64(operation, implementation, case):
    check(operation, implementation, case)


@implementations.each(
    "attention_backward",
    compiled=[],
    interpreted={"triton": [], "mosaic_gpu": SMALL_MOSAIC_GRADIENT_CASES},
    name="case",
)
def test_gradients_in_mosaic_against_float64(operation, implementation, case):
    check(operation, implementation, case)


def check(operation, implementation, case):
    shape, causal, dtype = case
    arrays = attention_arguments(operation, shape, dtype, causal)
    want = getattr(oracle, operation)(*arrays, causal=causal)
    got = implementations.run(operation, *arrays, implementation=implementation, causal=causal)
    for value, exact in zip(got, want, strict=True):
        assert value.dtype == (dtype if value.ndim == 4 else "float32")
        if np.any(exact):  # with a single key, dq and dk are 0
            assert snr_db(value, exact) > FLOOR_DB[value.dtype.name]
        else:
            assert np.max(np.abs(value.astype(jnp.float32))) < 1e-2


@pytest.mark.parametrize("operation, implementation", implementations.of("attention"))
@pytest.mark.parametrize("size", [10.0, 30.0])
def test_a_sharp_softmax_neither_overflows_nor_loses_its_maximum(operation, implementation, size):
    """With scores up to 1e4, in some rows all negative, the output is the value of the best key."""
    q, k, v = attention_arguments(operation, (8, 257, 2, 80))
    q, k = (np.asarray(x * size, "bfloat16") for x in (q, k))
    out, lse = implementations.run(operation, q, k, v, implementation=implementation)
    scores = oracle._scores(q, k, False)
    top, second = np.sort(scores, -1)[..., :-3:-1].transpose(3, 0, 1, 2)
    clear = (top - second > 20 + 1e-5 * np.abs(top)).transpose(0, 2, 1)
    best = np.take_along_axis(
        oracle.wide(v).transpose(0, 2, 1, 3), np.argmax(scores, -1)[..., None], 2
    ).transpose(0, 2, 1, 3)
    assert clear.mean() > 0.5
    np.testing.assert_allclose(np.asarray(out, np.float64)[clear], best[clear], rtol=1e-2)
    np.testing.assert_allclose(
        lse.transpose(0, 2, 1)[clear], top.transpose(0, 2, 1)[clear], rtol=1e-5
    )


# In Mosaic's interpreter the warnings come from rows of padding, which are not written.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@implementations.each(
    "attention_backward",
    compiled=[(1, 197, 1, 64)],
    interpreted={"triton": [], "mosaic_gpu": [(1, 197, 1, 64)]},
)
def test_gradients_far_from_the_maximum_stay_finite(operation, implementation, shape):
    """Padded keys have a score of 0, far above a log-sum-exp of -1e4: they must not contribute."""
    q, k = np.full(shape, 40, "bfloat16"), np.full(shape, -40, "bfloat16")
    k += normal(shape, "bfloat16")
    v, gradient = normal(shape, "bfloat16"), normal(shape, "bfloat16", seed=1)
    out, lse = jax.device_get(reference.attention(*(jnp.asarray(x) for x in (q, k, v))))
    assert np.max(lse) < -1e3
    for value in implementations.run(
        operation, q, k, v, out, lse, gradient, implementation=implementation
    ):
        assert np.isfinite(np.asarray(value, np.float32)).all()


def attend_with(name):
    if name == "fused":  # also where no kernel can run
        return attention.with_kernels
    return partial(attention.dot_product_attention, implementation=name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fused", "xla", pytest.param("cudnn", marks=pytest.mark.gpu)])
def test_the_layer_is_jax_own(name, causal):
    """On a CPU the kernels' specification runs, with the derivative that the kernels have."""
    q, k, v = (jnp.asarray(normal((2, 24, 3, 32), "bfloat16", seed)) for seed in range(3))
    gradient = jnp.asarray(normal(q.shape, "bfloat16", 3))

    def both(attend, *arrays):
        out, vjp = jax.vjp(attend, *arrays)
        return out, *vjp(gradient.astype(out.dtype))

    attend = partial(attend_with(name), is_causal=causal)
    with jax.numpy_dtype_promotion("strict" if name == "fused" else "standard"):
        got = jax.jit(partial(both, attend))(q, k, v)
    with jax.numpy_dtype_promotion("standard"):
        own = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla")
        want = both(own, *(x.astype(jnp.float32) for x in (q, k, v)))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16 and snr_db(a, b) > 36


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["xla", pytest.param("cudnn", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("segmented", [False, True])
def test_grouped_queries_and_segments_against_float64(segmented, name, causal):
    """The oracle repeats keys and values, and computes one text of a sequence at a time."""
    b, t, h, hk, d = 2, 21, 6, 2, 32
    q, k, v = (normal((b, t, n, d), "bfloat16", i) for i, n in enumerate((h, hk, hk)))
    gradient = normal(q.shape, "bfloat16", 3)
    ids = np.array([[7] * 5 + [0] * 10 + [7] * 6, [0] * 20 + [3]]) if segmented else None
    attend = partial(attention.dot_product_attention, segment_ids=ids, implementation=name)

    @jax.jit
    def both(*arrays):
        out, vjp = jax.vjp(partial(attend, is_causal=causal), *arrays)
        return out, *vjp(jnp.asarray(gradient))

    with jax.numpy_dtype_promotion("standard"):  # for JAX's own backward pass
        got = both(q, k, v)

    want = [np.zeros(x.shape) for x in (q, q, k, v)]
    for row in range(b):
        for number in np.unique(ids[row]) if segmented else [0]:
            own = np.flatnonzero(ids[row] == number) if segmented else np.arange(t)
            q1, k1, v1, g1 = (x[row][None, own] for x in (q, k, v, gradient))
            k1, v1 = (np.repeat(x, h // hk, axis=2) for x in (k1, v1))
            exact = oracle.attention(q1, k1, v1, causal=causal)
            grads = oracle.attention_backward(q1, k1, v1, *exact, g1, causal=causal)
            for array, part in zip(want, (exact[0], *grads)):
                array[row][own] = part[0].reshape(len(own), array.shape[2], -1, d).sum(2)
    for value, exact in zip(got, want, strict=True):
        assert value.dtype == "bfloat16" and snr_db(value, exact) > 36


@pytest.mark.parametrize("name", [None, pytest.param("cudnn", marks=pytest.mark.gpu)])
def test_padding_of_segments(name):
    q, k, v = (jnp.asarray(normal((2, 21, 4, 16), "bfloat16", i)) for i in range(3))
    ids = jnp.arange(42).reshape(2, 21) // 6
    attend = partial(attention.dot_product_attention, implementation=name)
    want = attend(*(x[:, :13] for x in (q, k, v)), segment_ids=ids[:, :13])
    nan = (x.at[:, 13:].set(jnp.nan) for x in (q, k, v))
    got = attend(*nan, segment_ids=ids, length=13)
    np.testing.assert_array_equal(got[:, :13], want)
    assert not np.any(got[:, 13:])


@pytest.mark.parametrize(
    "k, v",
    [
        (jnp.ones((2, 5, 3, 8)), None),
        (jnp.ones((2, 4, 3, 8), jnp.bfloat16), None),
        (jnp.ones((2, 4, 2, 8)), None),
        (jnp.ones((2, 4, 3, 8)), jnp.ones((2, 4, 1, 8))),
        (jnp.ones((2, 4, 0, 8)), None),
    ],
)
def test_other_keys_are_refused(k, v):
    q = jnp.ones((2, 4, 3, 8))
    with pytest.raises(ValueError, match=r"where hk > 0 divides h, got float32\[2, 4, 3, 8\], "):
        attention.dot_product_attention(q, k, k if v is None else v)


def test_other_segments_are_refused():
    q = jnp.ones((2, 4, 3, 8))
    for ids in (jnp.zeros((2, 4)), jnp.zeros(4, int)):
        with pytest.raises(ValueError, match=r"segment_ids must be integers \[2, 4\] .*, got "):
            attention.dot_product_attention(q, q, q, segment_ids=ids)
    with pytest.raises(ValueError, match="attention 'fused' .* grouped queries and no segments"):
        attention.dot_product_attention(q, q[:, :, :1], q[:, :, :1], implementation="fused")


def test_integers_are_refused():
    x = jnp.ones((1, 2, 1, 4), jnp.int32)
    with pytest.raises(ValueError, match="must have a floating dtype, got int32: cast them first"):
        attention.dot_product_attention(x, x, x)


@pytest.mark.parametrize("name", [None, "xla", "fused"])
def test_padding_is_seen_by_nobody(name):
    q, k, v = (jnp.asarray(normal((2, 16, 3, 8), seed=seed)) for seed in range(3))
    exact = attention.dot_product_attention(*(x[:, :13] for x in (q, k, v)))
    padded = attend_with(name)(q, k, v, length=13)
    np.testing.assert_allclose(padded[:, :13], exact, atol=1e-6)
    assert not np.any(padded[:, 13:])
    assert attention.pad_tokens(q[:, :13]).shape == q.shape


@pytest.mark.parametrize("name", [None, "xla"])
def test_padding_may_hold_nan(name):
    q, k, v = (jnp.asarray(normal((2, 16, 3, 8), seed=seed)) for seed in range(3))
    attend = partial(attention.dot_product_attention, length=13, implementation=name)
    want = attend(q, k, v)
    np.testing.assert_array_equal(attend(*(x.at[:, 13:].set(jnp.nan) for x in (q, k, v))), want)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, length", [((8, 264, 4, 80), 257), ((8, 80, 4, 64), 77)])
def test_padding_is_seen_by_no_kernel(shape, length):
    q, k, v = (jnp.asarray(normal(shape, "bfloat16", seed)) for seed in range(3))
    padded = attention.dot_product_attention(q, k, v, length=length, implementation="fused")
    exact = attention.dot_product_attention(*(x[:, :length] for x in (q, k, v)))
    np.testing.assert_array_equal(padded[:, :length], exact)
    assert not np.any(padded[:, length:])


@pytest.mark.parametrize("length", [0, -1, 6])
def test_lengths_out_of_range_are_refused(length):
    x = jnp.ones((2, 5, 3, 8))
    with pytest.raises(
        ValueError, match=f"length must be from 1 to the 5 tokens of q, got {length}"
    ):
        attention.dot_product_attention(x, x, x, length=length)


@pytest.mark.parametrize("length", [jnp.array([3, 4]), 3.5])
def test_lengths_in_arrays_are_refused(length):
    x = jnp.ones((2, 5, 3, 8))
    attend = partial(attention.dot_product_attention, x, x, x)
    with pytest.raises(ValueError, match="length must be an int, one for all sequences, got a "):
        attend(length=length)
    with pytest.raises(ValueError, match="length must be an int, .*, got a .*Tracer: "):
        jax.jit(lambda length: attend(length=length))(3)


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_do_not_divide_the_width_are_refused(heads):
    with pytest.raises(ValueError, match=f"must divide the 8 features of x, got {heads}: try"):
        attention.choose(jnp.ones((1, 3, 8)), heads)


@pytest.mark.parametrize("name", ["flash", "mosaic_gpu"])
def test_unknown_implementations_are_refused(name):
    x = jnp.ones((2, 5, 3, 8))
    with pytest.raises(ValueError, match=f"one of xla, cudnn, fused or None .*, got '{name}'"):
        attention.dot_product_attention(x, x, x, implementation=name)
    with pytest.raises(ValueError, match=f"got '{name}'"):
        attention.choose(x[..., 0], 3, name)


def test_what_the_kernel_cannot_do_is_said():
    x = jnp.ones((2, 5, 64), jnp.bfloat16)
    assert attention.choose(x, 4, "cudnn") == "cudnn"
    if jax.default_backend() != "gpu":
        with pytest.raises(ValueError, match="attention 'fused' needs an NVIDIA GPU, .* use 'xla'"):
            attention.choose(x, 4, "fused")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_only_16_bits_run_in_kernels(dtype):
    with targets.compiling_for("H200"):
        assert attention.choose(jax.ShapeDtypeStruct((2, 5, 64), dtype), 4) == "xla"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dtype, heads, chosen",
    [
        ((2, 257, 1280), "bfloat16", 16, "fused"),
        ((2, 77, 512), "float16", 8, "fused"),
        ((2, 577, 1024), "bfloat16", 16, "cudnn"),
        ((2, 257, 2048), "bfloat16", 8, "cudnn"),
    ],
)
def test_none_chooses(shape, dtype, heads, chosen):
    implementations.require("triton")
    if jax.device_count() > 1:
        pytest.skip("several devices: outside shard_map everything runs through XLA")
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert attention.choose(x, heads) == chosen
