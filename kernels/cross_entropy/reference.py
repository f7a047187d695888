"""The specification of the cross-entropy of logits."""

import jax
import jax.numpy as jnp


def cross_entropy(
    logits: jax.Array, labels: jax.Array, where: jax.Array, *, gradient: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """The losses of tokens, and the gradient of their sum by the logits.

    ``losses = log sum_j exp logits_j - logits_label`` and ``gradient = softmax(logits) - one_hot(label)``,
    computed in float32.

    Args:
      logits: [..., v] float16, bfloat16 or float32.
      labels: [...] integers; one outside 0 to v - 1 makes the loss of its token NaN.
      where: [...] booleans, the tokens that count. The loss and the gradient of others are 0.
      gradient: whether to compute the gradient.

    Returns:
      The losses [...] float32, and the gradient [..., v] in the dtype of the logits, or None.

    >>> losses, gradient = cross_entropy(jnp.zeros((1, 2)), jnp.array([1]), jnp.array([True]))
    >>> losses.round(3).tolist(), gradient.tolist()
    ([0.6930000185966492], [[0.5, -0.5]])
    """
    dtype, logits = logits.dtype, logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    # Unlike a gather, a comparison needs no other pass, and v may be sharded.
    classes = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    match = labels[..., None] == classes.reshape((1,) * labels.ndim + (-1,))
    losses = lse - jnp.sum(jnp.where(match, logits, 0), axis=-1)
    losses = jnp.where(is_class(labels, logits.shape[-1]), losses, jnp.nan)
    losses = jnp.where(where, losses, 0)
    if not gradient:
        return losses, None
    slopes = jnp.exp(logits - lse[..., None]) - match.astype(jnp.float32)
    return losses, jnp.where(where[..., None], slopes, 0).astype(dtype)


def is_class(labels: jax.Array, count: int) -> jax.Array:
    """Whether labels are from 0 to count - 1."""
    return (labels >= 0) & (labels < count)
