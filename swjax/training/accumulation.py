"""Computes the loss and gradient of a batch in one pass, or in micro-batches to save memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = Any
Batch = dict[str, jax.Array]
Embeddings = Any


class Seen(NamedTuple):
    """Measurements of a forward pass, grouped by how the values of equal micro-batches combine.

    Attributes:
      means: {name: array}; averaged over micro-batches.
      maxima: {name: array}; the maximum over micro-batches is kept.
    """

    means: dict[str, jax.Array]
    maxima: dict[str, jax.Array]

    def combined(self) -> "Seen":
        """Combines values of micro-batches, stacked along axis 0, into the values of the batch."""
        means, maxima = self
        return Seen(
            {name: jnp.mean(x, 0) for name, x in means.items()},
            {name: jnp.max(x, 0) for name, x in maxima.items()},
        )


class LossAndGrad(NamedTuple):
    """Loss and gradient of a batch.

    Attributes:
      loss: [] float32, the loss.
      metrics: {name: scalar or vector}.
      grads: tree with the structure of the parameters.
    """

    loss: jax.Array
    metrics: dict[str, jax.Array]
    grads: Params


Embed = Callable[[Params, Batch, jax.Array], tuple[Embeddings, Seen]]
LossOf = Callable[[Embeddings, Params], tuple[jax.Array, dict[str, jax.Array]]]


def at_once(
    embed: Embed, loss_of: LossOf, params: Params, batch: Batch, key: jax.Array
) -> LossAndGrad:
    """Computes the loss and gradient of the whole batch in one pass.

    Args:
      embed: (params, batch, key) -> (embeddings, `Seen`).
      loss_of: (embeddings, params) -> (loss, metrics).
      params: tree of arrays.
      batch: arrays with the batch size as leading dimension.
      key: random key.
    """

    def loss_fn(params):
        embeddings, seen = embed(params, batch, key)
        loss, metrics = loss_of(embeddings, params)
        return loss, metrics | seen.means | seen.maxima

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return LossAndGrad(loss, metrics, grads)


def accumulated(
    embed: Embed, loss_of: LossOf, params: Params, batch: Batch, key: jax.Array, *, parts: int
) -> LossAndGrad:
    """Computes the same as `at_once`, with the activation memory of one micro-batch.

    The loss still contrasts every row with the whole batch. First, all micro-batches are embedded without
    gradient, and the loss gives the gradient with respect to the embeddings. Then each micro-batch is
    embedded again with the same random key, and its rows of that gradient are backpropagated to the
    parameters.

    Args:
      embed, loss_of, params, batch, key: see `at_once`.
      parts: number of micro-batches; divides the batch size.

    References:
      Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021,
      https://arxiv.org/abs/2101.06983
    """

    # A micro-batch takes every `parts`-th row, so that it is sharded as evenly as the batch.
    def split(x):
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    micro = (jax.tree.map(split, batch), jax.random.split(key, parts))
    embeddings, seen = jax.lax.map(lambda part: embed(params, *part), micro)
    (loss, metrics), (at_embeddings, grads) = jax.value_and_grad(
        lambda e, p: loss_of(jax.tree.map(join, e), p), argnums=(0, 1), has_aux=True
    )(embeddings, params)

    def add(grads, part):
        (batch, key), cotangents = part
        _, pull_back = jax.vjp(lambda p: embed(p, batch, key)[0], params)
        return jax.tree.map(jnp.add, grads, *pull_back(cotangents)), None

    grads, _ = jax.lax.scan(add, grads, (micro, at_embeddings))
    seen = seen.combined()
    return LossAndGrad(loss, metrics | seen.means | seen.maxima, grads)
