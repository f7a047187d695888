"""Gradient clipping that adapts to a run, for the studies: AdaGC and ZClip as optax transformations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AdaGCState(NamedTuple):
    """State of `adagc`.

    Attributes:
      count: number of steps, int32 [].
      norms: moving average of each tensor's clipped gradient norm: a tree like the parameters, with axes of
        length 1 except along blocks.
    """

    count: jax.Array
    norms: Any


def adagc(
    relative: float = 1.05,
    decay: float = 0.985,
    warmup: int = 100,
    absolute: float = 1.0,
    block_axes: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """AdaGC: clips each tensor's gradient to a multiple of the moving average of its own norms.

    During `warmup` steps all gradients are clipped together to a norm of `absolute`, and a tensor's average
    is the smallest norm so far. Defaults are those of the paper, arXiv 2502.11034.

    Args:
      relative: largest norm, in units of the moving average.
      decay: share of the average that is kept in a step.
      warmup: number of steps.
      absolute: largest norm of all gradients during the warm-up.
      block_axes: params -> the axis of each tensor that enumerates blocks, or None; each block is a tensor.
    """

    def axes_of(params):
        if block_axes is None:
            return jax.tree.map(lambda p: tuple(range(p.ndim)), params)
        blocks = block_axes(params)
        leaves, tree = jax.tree.flatten(params)
        of_leaf = jax.tree.leaves(blocks, is_leaf=lambda axis: axis is None)
        axes = [
            tuple(i for i in range(p.ndim) if i != b) for p, b in zip(leaves, of_leaf, strict=True)
        ]
        return jax.tree.unflatten(tree, axes)

    def norms_of(grads):
        return jax.tree.map(
            lambda g, axes: jnp.sqrt(jnp.sum(jnp.square(g), axis=axes, keepdims=True)),
            grads,
            axes_of(grads),
        )

    def init(params):
        infinite = jax.tree.map(lambda n: jnp.full_like(n, jnp.inf), norms_of(params))
        return AdaGCState(jnp.zeros((), jnp.int32), infinite)

    def update(grads, state, params=None):
        del params
        warm = state.count < warmup
        together = jnp.minimum(1.0, absolute / optax.tree.norm(grads))
        norms = norms_of(grads)
        factors = jax.tree.map(
            lambda n, mean: jnp.where(
                warm, together, jnp.minimum(1.0, relative * mean / jnp.maximum(n, 1e-30))
            ),
            norms,
            state.norms,
        )
        clipped = jax.tree.map(jnp.multiply, norms, factors)
        means = jax.tree.map(
            lambda mean, n: jnp.where(warm, jnp.minimum(mean, n), decay * mean + (1 - decay) * n),
            state.norms,
            clipped,
        )
        return jax.tree.map(jnp.multiply, grads, factors), AdaGCState(state.count + 1, means)

    return optax.GradientTransformation(init, update)


class ZClipState(NamedTuple):
    """State of `zclip`.

    Attributes:
      count: number of steps, int32 [].
      mean, variance: moving mean and variance of the gradient norms, float32 [].
      first: gradient norms of the warm-up, float32 [warmup].
    """

    count: jax.Array
    mean: jax.Array
    variance: jax.Array
    first: jax.Array


def zclip(decay: float = 0.97, z: float = 2.5, warmup: int = 25) -> optax.GradientTransformation:
    """ZClip: clips all gradients together if their norm is an outlier among the norms before.

    A norm that is `distance` > `z` moving standard deviations above the moving mean is reduced to
    ``mean + z**2 / distance * deviation``, so that larger outliers become smaller. Defaults are those of the
    paper, arXiv 2504.02507.

    Args:
      decay: share of the mean and the variance that is kept in a step.
      z: smallest distance of an outlier.
      warmup: number of steps that give the first mean and variance; they are not clipped.
    """

    def init(params):
        del params
        zero = jnp.zeros(())
        return ZClipState(jnp.zeros((), jnp.int32), zero, zero, jnp.zeros(warmup))

    def update(grads, state, params=None):
        del params
        norm, warm = optax.tree.norm(grads), state.count < warmup
        deviation = jnp.sqrt(state.variance)
        distance = (norm - state.mean) / (deviation + 1e-6)
        outlier = ~warm & (distance > z)
        kept = jnp.where(outlier, state.mean + z**2 * deviation / distance, norm)
        mean = decay * state.mean + (1 - decay) * kept
        variance = decay * state.variance + (1 - decay) * jnp.square(kept - mean)
        at = jnp.minimum(state.count, warmup - 1)
        first = jnp.where(warm, state.first.at[at].set(norm), state.first)
        mean = jnp.where(warm, jnp.mean(first), mean)
        variance = jnp.where(warm, jnp.var(first), variance)
        factor = jnp.where(outlier, kept / norm, 1.0)
        clipped = jax.tree.map(lambda g: g * factor, grads)
        return clipped, ZClipState(state.count + 1, mean, variance, first)

    return optax.GradientTransformation(init, update)
