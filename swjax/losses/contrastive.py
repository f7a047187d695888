"""Contrastive losses over a global batch of image-text pairs, in float32.

Every pair of the global batch is compared, even if its rows are on different devices. No device holds the
matrix of all similarities, because `swjax.losses.ring` provides one block at a time. The gradient is exact
and computed together with the loss, so the backward pass needs no saved array of size B x B.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from swjax.linear.layouts import TOKENS, Spec
from swjax.linear.sharding import sharding_of_batch, vary_alike
from swjax.losses.ring import Ring, make_ring

# Similarities that a device holds at once: 1 GiB. For larger batches, the softmax loss computes them twice:
# one product in addition to three.
PAIRS = 2**28
# Numbers of other devices' embeddings that a device holds at once: 256 MiB.
NUMBERS = 2**26


def softmax_contrastive(
    image_emb: jax.Array,
    text_emb: jax.Array,
    logit_scale: jax.Array,
    *,
    labels: jax.Array | None = None,
    tokens: P = TOKENS,
    pairs: int = PAIRS,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """CLIP's loss: classifies the text of each image among all texts, and the image of each text.

    With logits ``l_ij = exp(logit_scale) <image_i, text_j>`` and equal weights for the matching pairs (i, j),
    ``p_ij = [labels_i = labels_j] / |{j: labels_i = labels_j}|``::

        loss = mean_i (log sum_j exp l_ij + log sum_j exp l_ji) / 2 - mean_i sum_j p_ij (l_ij + l_ji) / 2

    Args:
      image_emb, text_emb: [B, e] unit vectors; row i of both is a pair.
      logit_scale: scalar, the logarithm of the inverse temperature.
      labels: int [B]; pairs with equal labels all match each other. None: a pair matches only itself.
      tokens: PartitionSpec of B on a mesh with automatic axes; explicit axes are read from the types.
      pairs: largest number of pairs in memory per device, but at least one row times one other row.

    Returns:
      The loss, and metrics, all float32 scalars: `logit_scale` (its exponential), `image_to_text_accuracy`
      and `text_to_image_accuracy`, the fractions of the batch whose most similar candidate matches. A tie
      with a candidate that does not match counts as wrong. Only the loss has a gradient.

    Raises:
      ValueError: shapes or dtypes do not fit.

    >>> pairs = jnp.eye(2)
    >>> loss, metrics = softmax_contrastive(pairs, pairs, jnp.log(10.0))
    >>> float(metrics["image_to_text_accuracy"]), bool(loss < 1e-4)
    (1.0, True)

    References:
      Radford et al., "Learning transferable visual models from natural language supervision", 2021,
      https://arxiv.org/abs/2103.00020
    """
    return _contrast(_softmax, image_emb, text_emb, (logit_scale,), labels, tokens, pairs)


def sigmoid_contrastive(
    image_emb: jax.Array,
    text_emb: jax.Array,
    logit_scale: jax.Array,
    logit_bias: jax.Array,
    *,
    labels: jax.Array | None = None,
    tokens: P = TOKENS,
    pairs: int = PAIRS,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """SigLIP's loss: classifies each pair of an image and a text as a match or not.

    With ``l_ij = exp(logit_scale) <image_i, text_j> + logit_bias``, and ``z_ij`` 1 for a match and -1
    otherwise::

        loss = -1/B sum_ij log sigmoid(z_ij l_ij)

    Args:
      image_emb, text_emb, logit_scale, labels, tokens, pairs: see `softmax_contrastive`.
      logit_bias: scalar; an initial value of about -10 classifies a random pair as no match.

    Returns:
      The loss, and the metrics of `softmax_contrastive` and `logit_bias`.

    Raises:
      ValueError: shapes or dtypes do not fit.

    >>> pairs = jnp.eye(2)
    >>> loss, _ = sigmoid_contrastive(pairs, pairs, jnp.log(20.0), jnp.float32(-10.0))
    >>> bool(loss < 1e-3)
    True

    References:
      Zhai et al., "Sigmoid loss for language image pre-training", 2023, https://arxiv.org/abs/2303.15343
    """
    scalars = (logit_scale, logit_bias)
    loss, metrics = _contrast(_sigmoid, image_emb, text_emb, scalars, labels, tokens, pairs)
    return loss, metrics | {"logit_bias": jnp.asarray(logit_bias, jnp.float32)}


def _contrast(local: Callable, images, texts, scalars, labels, tokens: P, pairs: int):
    """Checks the arguments, plans the sharding, and runs a loss; `local` is `_softmax` or `_sigmoid`."""
    if images.ndim != 2 or images.shape != texts.shape or not images.size:
        raise ValueError(
            "image_emb and text_emb must both be [B, e] and not empty, "
            f"got {images.shape} and {texts.shape}"
        )
    if jnp.iscomplexobj(images) or jnp.iscomplexobj(texts):  # the cast would drop an imaginary part
        raise ValueError(
            f"image_emb and text_emb must be real, got {images.dtype} and {texts.dtype}: pass their parts as "
            "features"
        )
    labels = jnp.arange(images.shape[0]) if labels is None else jnp.asarray(labels)
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"labels must be [B] with B={images.shape[0]} embeddings, got {labels.shape}"
        )
    if jnp.issubdtype(labels.dtype, jnp.inexact):  # a NaN matches nothing, not even its own pair
        raise ValueError(f"labels must be integers, got {labels.dtype}: give each class an integer")
    scalars = tuple(map(jnp.asarray, scalars))
    if shapes := [x.shape for x in scalars if x.shape]:
        raise ValueError(f"logit_scale and logit_bias must be scalars, got the shape {shapes[0]}")
    sharding = sharding_of_batch(tokens, images, texts, *scalars)
    around = make_ring(sharding, *images.shape, pairs=pairs, numbers=NUMBERS)
    spec = Spec((*sharding.tokens, ()))
    images, texts = (sharding.place(x.astype(jnp.float32), spec) for x in (images, texts))
    scalars = tuple(x.astype(jnp.float32) for x in scalars)
    images, texts, scalars = vary_alike(images, texts, scalars)
    loss, metrics = _loss((local, around, sharding), images, texts, scalars, labels)
    return loss, metrics | {"logit_scale": jnp.exp(scalars[0])}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(how: tuple, images, texts, scalars, labels):
    return _run(how, images, texts, scalars, labels, gradient=False)[0]


def _forward(how, images, texts, scalars, labels):
    return _run(how, images, texts, scalars, labels, gradient=True)


def _backward(how, gradients, cotangents):
    g, _ = cotangents  # cotangents of the loss and of the metrics
    return *jax.tree.map(lambda x: g * x, gradients), None


_loss.defvjp(_forward, _backward)


def _run(how, images, texts, scalars, labels, *, gradient: bool):
    """Returns ((loss, metrics), gradient of the loss by images, texts and scalars, or None)."""
    local, around, sharding = how
    rows, scalar = Spec((*sharding.tokens, ())), Spec()
    scalar_specs = (scalar,) * len(scalars)
    metric_specs = dict.fromkeys(("image_to_text_accuracy", "text_to_image_accuracy"), scalar)
    return sharding.map_shards(
        partial(local, around, gradient),
        (images, texts, scalars, labels),
        (rows, rows, scalar_specs, Spec(sharding.tokens)),
        ((scalar, metric_specs), (rows, rows, scalar_specs) if gradient else None),
    )


# --- computation of each device on its rows -----------------------------------------------------------

# Statistics of the logits of each row: the function that merges two blocks, and the one that reduces a block.
_MERGE: dict[str, tuple[Callable, Callable]] = {
    "lse": (jnp.logaddexp, jax.nn.logsumexp),  # log sum_j exp l_ij
    "match": (jnp.maximum, jnp.max),  # largest matching logit
    "other": (jnp.maximum, jnp.max),  # largest other logit
    "matched": (jnp.add, jnp.sum),  # sum of matching logits
    "count": (jnp.add, jnp.sum),  # number of matching logits
}
_NONE = {"lse": -jnp.inf, "match": -jnp.inf, "other": -jnp.inf, "matched": 0.0, "count": 0.0}


def _softmax(around: Ring, gradient: bool, images, texts, scalars, labels):
    scale = jnp.exp(scalars[0])
    size = images.shape[0] * around.devices
    visiting, there = around.start((texts, labels))

    def look(rows, block):
        text, label, columns = block
        logits, match = scale * _similarity(images, text), labels[:, None] == label[None]
        columns = _merge(columns, _summary(logits, match, axis=0))
        return _merge(rows, _summary(logits, match, axis=1)), (text, label, columns)

    block = (visiting, there, _nothing(visiting))
    rows, (_, _, columns) = around.visit(look, _nothing(images), block)
    columns = {name: _MERGE[name][1](x, axis=0) for name, x in around.home(columns).items()}
    parts = (rows["lse"] + columns["lse"]) / 2 - rows["matched"] / rows["count"]
    out = around.sum(jnp.sum(parts)) / size, _accuracies(around, rows, columns, size)
    if not gradient:
        return out, None

    def pull(d_images, block):
        text, label, lse, d_text = block
        # The same product as in the first pass. If that pass held all pairs, XLA reuses it.
        logits, match = scale * _similarity(images, text), labels[:, None] == label[None]
        exp_rows, exp_columns = jnp.exp(logits - rows["lse"][:, None]), jnp.exp(logits - lse[None])
        weight = match.astype(jnp.float32) / rows["count"][:, None]
        d_logits = ((exp_rows + exp_columns) / 2 - weight) * (scale / size)
        d_text = d_text + _product(d_logits.T, images)
        return d_images + _product(d_logits, text), (text, label, lse, d_text)

    start = (visiting, there, around.start(columns["lse"]), jnp.zeros_like(visiting))
    d_images, (*_, d_text) = around.visit(pull, jnp.zeros_like(images), start)
    # l_ij is linear in image_i and in exp(logit_scale).
    d_scale = around.sum(jnp.sum(images * d_images))
    return out, (d_images, jnp.sum(around.home(d_text), axis=0), (d_scale,))


def _sigmoid(around: Ring, gradient: bool, images, texts, scalars, labels):
    scale, bias = jnp.exp(scalars[0]), scalars[1]
    size = images.shape[0] * around.devices
    visiting, there = around.start((texts, labels))

    def look(own, block):
        rows, loss, d_images, d_bias = own
        text, label, columns, d_text = block
        logits = scale * _similarity(images, text) + bias
        match = labels[:, None] == label[None]
        best = partial(_summary, logits, match, names=("match", "other"))
        rows, columns = _merge(rows, best(axis=1)), _merge(columns, best(axis=0))
        signed = jnp.where(match, logits, -logits)
        loss = loss - jnp.sum(jax.nn.log_sigmoid(signed), axis=1)
        if gradient:
            miss = jax.nn.sigmoid(-signed) / size
            d_logits = jnp.where(match, -miss, miss)
            d_images = d_images + scale * _product(d_logits, text)
            d_text = d_text + scale * _product(d_logits.T, images)
            d_bias = d_bias + jnp.sum(d_logits, axis=1)
        return (rows, loss, d_images, d_bias), (text, label, columns, d_text)

    zeros = jnp.zeros_like(images[:, 0])
    nothing = partial(_nothing, names=("match", "other"))
    # Arguments without a gradient are skipped.
    start = jnp.zeros_like(images) if gradient else None
    own = nothing(images), zeros, start, zeros
    block = visiting, there, nothing(visiting), jnp.zeros_like(visiting) if gradient else None
    own, (_, _, columns, d_text) = around.visit(look, own, block)
    rows, loss, d_images, d_bias = own
    columns = {name: jnp.max(x, axis=0) for name, x in around.home(columns).items()}
    out = around.sum(jnp.sum(loss)) / size, _accuracies(around, rows, columns, size)
    if not gradient:
        return out, None
    sums = around.sum((jnp.sum(images * d_images), jnp.sum(d_bias)))
    return out, (d_images, jnp.sum(around.home(d_text), axis=0), sums)


def _product(a, b) -> jax.Array:
    """A matrix product in true float32, because the default precision on GPUs may be lower."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _similarity(images, texts) -> jax.Array:
    return _product(images, texts.T)


def _summary(logits, match, *, axis: int, names=tuple(_MERGE)) -> dict[str, jax.Array]:
    """Statistics of a block's rows (axis 1) or columns (axis 0); see `_MERGE`."""
    of = {
        "lse": lambda: jax.nn.logsumexp(logits, axis=axis),
        "match": lambda: jnp.max(jnp.where(match, logits, -jnp.inf), axis=axis),
        "other": lambda: jnp.max(jnp.where(match, -jnp.inf, logits), axis=axis),
        "matched": lambda: jnp.sum(jnp.where(match, logits, 0.0), axis=axis),
        "count": lambda: jnp.sum(match, axis=axis, dtype=jnp.float32),
    }
    return {name: of[name]() for name in names}


def _nothing(rows, names=tuple(_MERGE)) -> dict[str, jax.Array]:
    """The statistics of zero logits per row, the neutral element of `_MERGE`."""
    return {name: jnp.full_like(rows[:, 0], _NONE[name]) for name in names}


def _merge(a: dict, b: dict) -> dict:
    return {name: _MERGE[name][0](a[name], b[name]) for name in a}


def _accuracies(around: Ring, rows: dict, columns: dict, size: int) -> dict[str, jax.Array]:
    hits = {
        name: jnp.sum(seen["match"] > seen["other"], dtype=jnp.float32)
        for name, seen in (("image_to_text_accuracy", rows), ("text_to_image_accuracy", columns))
    }
    return {name: hit / size for name, hit in around.sum(hits).items()}
