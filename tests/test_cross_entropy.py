"""The cross-entropy of a head in chunks, compared with float64."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import normal
from numeric import EPS, snr_db

from swjax.losses import linear_cross_entropy

SHAPE = 3, 13, 16, 37  # sequences, length, width, vocabulary


def arguments(b, t, d, v, dtype="float32"):
    rng = np.random.default_rng(0)
    x, w = normal((b, t, d), dtype), 0.7 * normal((d, v), "float32", 1)
    return x, np.float32(w), rng.integers(0, v, (b, t)), rng.random((b, t)) < 0.6


def exact(x, w, labels, where):
    """Returns the loss and its gradients by x and w in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    logits = x @ w
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    own = np.eye(w.shape[1])[labels]
    d = (p - own) * where[..., None] / where.sum()
    loss = -np.sum(np.log(np.sum(p * own, -1)) * where) / where.sum()
    return loss, d @ w.T, np.einsum("btd,btv->dv", x, d)


def differentiate(loss):
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


@pytest.mark.parametrize("dtype, chunk", [("float32", 4), ("bfloat16", 13), ("bfloat16", 1)])
def test_loss_and_gradients_are_exact(dtype, chunk):
    x, w, labels, where = arguments(*SHAPE, dtype)
    loss = lambda x, w: linear_cross_entropy(x, w, labels, chunk=chunk, where=where)
    value, (dx, dw) = differentiate(loss)(jnp.asarray(x), jnp.asarray(w))
    want, *gradients = exact(x, w, labels, where)
    assert dx.dtype == dtype and dw.dtype == "float32"
    np.testing.assert_allclose([value, loss(jnp.asarray(x), w)], want, rtol=2 * EPS[dtype])
    floor = -20 * np.log10(EPS[dtype]) - 12  # products of two rounded arrays
    assert all(snr_db(a, b) > floor for a, b in zip((dx, dw), gradients))


def test_second_derivatives():
    x, w, labels, _ = arguments(2, 3, 4, 5)

    def plain(x, w, labels, **_):
        logits = x @ w
        own = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - own)

    def second(loss):
        first = jax.grad(partial(loss, labels=labels, chunk=2))
        return jax.jit(jax.grad(lambda x: jnp.sum(first(x, w) ** 2)))(jnp.asarray(x))

    np.testing.assert_allclose(second(linear_cross_entropy), second(plain), atol=1e-6)


def test_tokens_that_do_not_count_have_no_effect():
    x, w, labels, where = arguments(*SHAPE)
    loss = differentiate(lambda x, w, labels: linear_cross_entropy(x, w, labels, where=where))
    want = loss(x, w, labels)
    x[~where], labels[~where] = np.nan, -100
    jax.tree.map(np.testing.assert_array_equal, loss(x, w, labels), want)
    none = linear_cross_entropy(jnp.asarray(x), w, labels, where=np.zeros_like(where))
    assert none == 0
    labels[where] = -100
    assert np.isnan(loss(x, w, labels)[0])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16"])
def test_labels_of_few_bits_name_classes_of_a_large_vocabulary(dtype):
    x, w, labels, _ = arguments(2, 3, 4, 300)
    loss = jax.value_and_grad(linear_cross_entropy)
    of = lambda kind: loss(x, w, jnp.asarray(labels % 100, kind))
    jax.tree.map(np.testing.assert_array_equal, of(dtype), of("int32"))


def test_no_array_has_all_logits():
    b, t, d, v = 2, 64, 8, 1024
    arrays = (jnp.ones((b, t, d), jnp.bfloat16), jnp.ones((d, v)), jnp.zeros((b, t), jnp.int32))
    for loss in (linear_cross_entropy, jax.grad(linear_cross_entropy, (0, 1))):
        text = str(jax.make_jaxpr(partial(loss, chunk=8))(*arrays))
        sizes = [np.prod(list(map(int, s.split(",")))) for s in re.findall(r"\[([\d,]+)\]", text)]
        assert b * 8 * v <= max(sizes) < b * t * v


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"labels": jnp.zeros((2, 3), int)}, r"labels \[..., t\], got \(2, 4, 3\) and \(2, 3\)"),
        ({"labels": jnp.zeros((2, 4))}, "labels must be integers, got float32: cast"),
        ({"where": jnp.ones((2, 4))}, r"where must be booleans \[2, 4\] .*got float32\[2, 4\]"),
        ({"chunk": 0}, "chunk must be at least 1 position, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    good = {"x": jnp.ones((2, 4, 3)), "w": jnp.ones((3, 5)), "labels": jnp.zeros((2, 4), int)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**good | changes)
