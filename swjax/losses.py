"""Contrastive losses over a global batch of image-text pairs, in float32.

Under `jax.jit` with a batch sharded over devices these see the whole batch: every pair of the global batch is
compared, and XLA places the collectives.
"""

import jax
import jax.numpy as jnp


def softmax_contrastive(
    image_emb: jax.Array,
    text_emb: jax.Array,
    logit_scale: jax.Array,
    *,
    labels: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """CLIP's loss: find the text of each image among all, and the image of each text.

    With logits ``l_ij = exp(logit_scale) <image_i, text_j>`` and the pairs (i, j) that match spread evenly,
    ``p_ij = [labels_i = labels_j] / |{j: labels_i = labels_j}|``::

        loss = mean_i (log sum_j exp l_ij + log sum_j exp l_ji) / 2 - mean_i sum_j p_ij (l_ij + l_ji) / 2

    Args:
      image_emb, text_emb: [B, e] unit vectors; row i of both is a pair.
      logit_scale: scalar, the logarithm of the inverse temperature.
      labels: int [B]; pairs with equal labels all match each other. None: a pair matches itself only.

    Returns:
      The loss, and metrics, float32 scalars all: `logit_scale` (its exponential), `image_to_text_accuracy`
      and `text_to_image_accuracy`, the fractions of the batch whose best match is one.

    Raises:
      ValueError: shapes do not fit.

    >>> pairs = jnp.eye(2)
    >>> loss, metrics = softmax_contrastive(pairs, pairs, jnp.log(10.0))
    >>> float(metrics["image_to_text_accuracy"]), bool(loss < 1e-4)
    (1.0, True)

    References:
      Radford et al., "Learning transferable visual models from natural language supervision", 2021,
      https://arxiv.org/abs/2103.00020
    """
    labels = _check(image_emb, text_emb, labels)
    scale = jnp.exp(logit_scale.astype(jnp.float32))
    logits = scale * _similarity(image_emb, text_emb)
    match = _matches(labels).astype(jnp.float32)
    weight = match / jnp.sum(match, axis=1, keepdims=True)
    # One matrix serves both directions: its rows are images, its columns texts, and `weight` is symmetric.
    matched = jnp.sum(weight * logits) / jnp.float32(labels.size)
    normaliser = sum(jnp.mean(jax.nn.logsumexp(logits, axis=axis)) for axis in (0, 1)) / 2
    metrics = {
        "logit_scale": scale,
        "image_to_text_accuracy": _accuracy(logits, labels, axis=1),
        "text_to_image_accuracy": _accuracy(logits, labels, axis=0),
    }
    return normaliser - matched, metrics


def sigmoid_contrastive(
    image_emb: jax.Array,
    text_emb: jax.Array,
    logit_scale: jax.Array,
    logit_bias: jax.Array,
    *,
    labels: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """SigLIP's loss: for each image and each text, do they match?

    With ``l_ij = exp(logit_scale) <image_i, text_j> + logit_bias`` and ``z_ij`` 1 for a match, else -1::

        loss = -1/B sum_ij log sigmoid(z_ij l_ij)

    Args:
      image_emb, text_emb, logit_scale, labels: as for `softmax_contrastive`.
      logit_bias: scalar; about -10 makes a random pair no match at the start.

    Returns:
      The loss, and metrics as those of `softmax_contrastive` and `logit_bias`.

    Raises:
      ValueError: shapes do not fit.

    >>> pairs = jnp.eye(2)
    >>> loss, _ = sigmoid_contrastive(pairs, pairs, jnp.log(20.0), jnp.float32(-10.0))
    >>> bool(loss < 1e-3)
    True

    References:
      Zhai et al., "Sigmoid loss for language image pre-training", 2023, https://arxiv.org/abs/2303.15343
    """
    labels = _check(image_emb, text_emb, labels)
    scale = jnp.exp(logit_scale.astype(jnp.float32))
    bias = logit_bias.astype(jnp.float32)
    logits = scale * _similarity(image_emb, text_emb) + bias
    signed = jnp.where(_matches(labels), logits, -logits)
    loss = -jnp.sum(jax.nn.log_sigmoid(signed)) / jnp.float32(labels.size)
    metrics = {
        "logit_scale": scale,
        "logit_bias": bias,
        "image_to_text_accuracy": _accuracy(logits, labels, axis=1),
        "text_to_image_accuracy": _accuracy(logits, labels, axis=0),
    }
    return loss, metrics


def _check(image_emb, text_emb, labels) -> jax.Array:
    if image_emb.ndim != 2 or image_emb.shape != text_emb.shape:
        raise ValueError(
            f"image_emb and text_emb must both be [B, e], got {image_emb.shape} and {text_emb.shape}"
        )
    if labels is None:
        return jnp.arange(image_emb.shape[0])
    if labels.shape != image_emb.shape[:1]:
        raise ValueError(
            f"labels must be [B] with B={image_emb.shape[0]} embeddings, got {labels.shape}"
        )
    return labels


def _similarity(image_emb, text_emb) -> jax.Array:
    """All inner products [B, B], in true float32: the default may be less on a GPU."""
    image_emb, text_emb = image_emb.astype(jnp.float32), text_emb.astype(jnp.float32)
    return jnp.matmul(image_emb, text_emb.T, precision=jax.lax.Precision.HIGHEST)


def _matches(labels) -> jax.Array:
    return labels[:, None] == labels[None, :]


def _accuracy(logits, labels, axis: int) -> jax.Array:
    best = jnp.argmax(logits, axis=axis)
    return jnp.mean(labels[best] == labels, dtype=jnp.float32)
