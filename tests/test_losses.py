"""The losses, compared with float64 loops, and over a sharded batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning

from swjax import losses
from swjax.testing import matrix_products

LABELS = {
    "own pair only": None,
    "several positives": np.array([3, 1, 3, 3, 0, 1, 7, 8], np.int32),
    "all match": np.zeros(8, np.int32),
}
LOG_SCALE = np.log(1 / 0.07)


def unit_pairs(batch=8):
    rng = np.random.default_rng(0)
    image, noise = rng.normal(size=(2, batch, 16))
    text = image + 1.5 * noise
    return [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (image, text)]


def positives(i, labels, batch):
    return [i] if labels is None else [j for j in range(batch) if labels[j] == labels[i]]


def naive_softmax(image, text, log_scale, labels):
    """Returns the cross-entropy in both directions; a row's target is uniform over its positives."""
    batch, total = len(image), 0.0
    for queries, keys in ((image, text), (text, image)):
        for i in range(batch):
            logits = np.exp(log_scale) * keys @ queries[i]
            log_p = logits - np.log(np.sum(np.exp(logits)))
            total -= np.mean([log_p[j] for j in positives(i, labels, batch)])
    return total / (2 * batch)


def naive_sigmoid(image, text, log_scale, bias, labels):
    batch, total = len(image), 0.0
    for i in range(batch):
        for j in range(batch):
            logit = np.exp(log_scale) * image[i] @ text[j] + bias
            sign = 1 if j in positives(i, labels, batch) else -1
            total += np.log1p(np.exp(-sign * logit))
    return total / batch


def naive(name, arguments, labels):
    return (naive_softmax if name == "softmax" else naive_sigmoid)(*arguments, labels)


def loss_of(name):
    return losses.softmax_contrastive if name == "softmax" else losses.sigmoid_contrastive


def arguments_of(name):
    return [*unit_pairs(), LOG_SCALE] + ([-5.0] if name == "sigmoid" else [])


def numeric_gradient(name, arguments, labels, which):
    step = 1e-6
    point = np.asarray(arguments[which], np.float64)
    gradient = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        ends = []
        for sign in (1, -1):
            moved = point.copy()
            moved[index] += sign * step
            ends.append(naive(name, [*arguments[:which], moved, *arguments[which + 1 :]], labels))
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize(
    "case, name", thinning.thinned(list(LABELS), ["softmax", "sigmoid"], full=[])
)
def test_value_and_gradient_equal_the_naive_ones(case, name):
    labels = LABELS[case]
    arguments = arguments_of(name)
    loss = lambda *xs: loss_of(name)(*xs, labels=None if labels is None else jnp.asarray(labels))[0]
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=range(len(arguments))))(
        *(jnp.asarray(x, jnp.float32) for x in arguments)
    )
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, naive(name, arguments, labels), rtol=1e-5)
    for which in range(len(arguments)):
        expected = numeric_gradient(name, arguments, labels, which)
        np.testing.assert_allclose(gradients[which], expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    "pairs, name", thinning.thinned([8 * 16, 16, 3], ["softmax", "sigmoid"], full=[])
)
def test_blocks_of_pairs_give_the_whole(name, pairs):
    """Blocks of any number of pairs, also smaller than a row, give the loss of the whole matrix."""
    arguments = [*unit_pairs(16), LOG_SCALE] + ([-5.0] if name == "sigmoid" else [])
    arguments = [jnp.asarray(x, jnp.float32) for x in arguments]
    labels = jnp.arange(16) // 2
    which = range(len(arguments))
    whole, parts = (
        jax.jit(jax.value_and_grad(partial(loss_of(name), labels=labels, **options), which, True))
        for options in ({}, {"pairs": pairs})
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        parts(*arguments), whole(*arguments),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_one_block_costs_no_more_than_the_matrix(name):
    """A gradient takes three products (similarities and two gradients), a loss alone takes one."""
    arguments = [jnp.asarray(x, jnp.float32) for x in arguments_of(name)]
    loss = lambda *xs: loss_of(name)(*xs)[0]
    count = lambda fn: sum(matrix_products(fn, *arguments).values())
    assert count(loss) == 1
    assert count(jax.grad(loss, argnums=range(len(arguments)))) == 3
    assert count(jax.grad(lambda *xs: loss_of(name)(*xs, pairs=16)[0], argnums=(0, 1))) == (
        4 if name == "softmax" else 3  # softmax recomputes the similarities
    )


def test_ties_are_no_hits():
    same = jnp.ones((4, 2)) / np.sqrt(2).astype(np.float32)
    metrics = losses.softmax_contrastive(same, same, jnp.float32(0))[1]
    assert float(metrics["image_to_text_accuracy"]) == 0
    assert float(metrics["text_to_image_accuracy"]) == 0


def test_half_precision_embeddings_are_compared_in_float32():
    image, text = (jnp.asarray(x, jnp.bfloat16) for x in unit_pairs())
    loss, metrics = losses.softmax_contrastive(image, text, jnp.float32(LOG_SCALE))
    exact = naive_softmax(*(np.asarray(x, np.float64) for x in (image, text)), LOG_SCALE, None)
    np.testing.assert_allclose(loss, exact, rtol=1e-5)
    assert {value.dtype for value in metrics.values()} == {jnp.dtype("float32")}


def test_metrics_count_any_positive_as_a_hit():
    image = jnp.eye(4)
    text = image[jnp.array([1, 0, 2, 3])]  # the first two captions are swapped
    loss = jax.jit(losses.softmax_contrastive)
    hits = lambda labels: loss(image, text, jnp.float32(1), labels=labels)[1]
    assert float(hits(None)["image_to_text_accuracy"]) == 0.5
    together = hits(jnp.array([5, 5, 6, 7]))
    assert float(together["image_to_text_accuracy"]) == 1.0
    assert float(together["text_to_image_accuracy"]) == 1.0
    assert float(together["logit_scale"]) == pytest.approx(np.e)


def test_the_directions_differ_when_one_text_fits_every_image():
    image = jnp.eye(3)
    text = jnp.stack([jnp.array([0.61, 0.6, 0.6]), 0.1 * image[1], 0.1 * image[2]])
    metrics = jax.jit(losses.softmax_contrastive)(image, text, jnp.float32(0))[1]
    assert float(metrics["image_to_text_accuracy"]) == pytest.approx(1 / 3)
    assert float(metrics["text_to_image_accuracy"]) == 1.0


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
@pytest.mark.parametrize("log_scale", [-80.0, np.log(100.0)])
def test_extreme_logits_stay_finite(name, log_scale):
    image = jnp.asarray(unit_pairs()[0], jnp.float32)
    extras = [jnp.float32(log_scale)] + ([jnp.float32(-10)] if name == "sigmoid" else [])
    value, gradient = jax.jit(jax.value_and_grad(lambda x: loss_of(name)(x, -x, *extras)[0]))(image)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_wrong_shapes_are_one_line():
    x = jnp.ones((4, 8))
    with pytest.raises(ValueError, match=r"must both be \[B, e\] .*, got \(4, 8\) and \(3, 8\)"):
        losses.softmax_contrastive(x, x[:3], jnp.float32(0))
    with pytest.raises(ValueError, match=r"not empty, got \(0, 8\) and \(0, 8\)"):
        losses.softmax_contrastive(x[:0], x[:0], jnp.float32(0))
    with pytest.raises(ValueError, match=r"must be scalars, got the shape \(4,\)"):
        losses.softmax_contrastive(x, x, jnp.zeros(4))  # it would scale each text by its own
    with pytest.raises(ValueError, match=r"must be scalars, got the shape \(1,\)"):
        losses.sigmoid_contrastive(x, x, jnp.float32(0), jnp.zeros(1))
    with pytest.raises(ValueError, match=r"labels must be \[B\] with B=4 embeddings, got \(3,\)"):
        losses.sigmoid_contrastive(
            x, x, jnp.float32(0), jnp.float32(0), labels=jnp.zeros(3, jnp.int32)
        )
    with pytest.raises(ValueError, match="labels must be integers, got float32: give each"):
        losses.softmax_contrastive(x, x, jnp.float32(0), labels=jnp.full(4, jnp.nan))
    with pytest.raises(ValueError, match="must be real, got complex64 and float32"):
        losses.softmax_contrastive(x.astype(jnp.complex64), x, jnp.float32(0))
    losses.softmax_contrastive(x, x, jnp.float32(0), labels=[0, 1, 1, 2])


def test_scalars_may_be_python_numbers():
    x = jnp.eye(4)
    numbers, arrays = (1.0, -10.0), (jnp.float32(1), jnp.float32(-10))
    got, want = (losses.sigmoid_contrastive(x, x, *scalars) for scalars in (numbers, arrays))
    jax.tree.map(np.testing.assert_array_equal, got, want)
