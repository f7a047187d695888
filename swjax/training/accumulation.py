"""Loss and gradient of a batch in one pass, or with the memory of one micro-batch."""

import jax
import jax.numpy as jnp


def at_once(embed, loss_of, params, batch, key):
    """Loss and gradient of the whole batch in one pass.

    Args:
      embed: (params, batch, key) -> (embeddings, outs).
      loss_of: (embeddings, params) -> (loss, metrics).

    Returns:
      (loss, metrics), outs, gradient.
    """

    def loss_fn(params):
        embeddings, outs = embed(params, batch, key)
        loss, measured = loss_of(embeddings, params)
        return loss, (measured, outs)

    (loss, (measured, outs)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return (loss, measured), outs, grads


def accumulated(embed, loss_of, params, batch, key, *, parts: int):
    """The same as `at_once`, with the memory of one of several micro-batches.

    Every row is still contrasted with the whole batch: all micro-batches are embedded without
    gradient, the loss gives the gradient at the embeddings, and each micro-batch, embedded again with
    the same randomness, turns its rows of that into a gradient of the parameters.

    References:
      Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021,
      https://arxiv.org/abs/2101.06983
    """

    # A micro-batch is every parts-th row, so that it lies on the devices as evenly as the batch does.
    def split(x):
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    micro = (jax.tree.map(split, batch), jax.random.split(key, parts))
    embeddings, outs = jax.lax.map(lambda part: embed(params, *part), micro)
    (loss, measured), (at_embeddings, grads) = jax.value_and_grad(
        lambda e, p: loss_of(jax.tree.map(join, e), p), argnums=(0, 1), has_aux=True
    )(embeddings, params)

    def add(grads, part):
        (batch, key), cotangents = part
        _, pull_back = jax.vjp(lambda p: embed(p, batch, key)[0], params)
        return jax.tree.map(jnp.add, grads, *pull_back(cotangents)), None

    grads, _ = jax.lax.scan(add, grads, (micro, at_embeddings))
    outs = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.max(x, 0) if "max" in path[-1].key else jnp.mean(x, 0), outs
    )
    return (loss, measured), outs, grads
