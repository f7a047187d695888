"""The RMS that StableAdamW would clip, for runs of plain `optax.adamw`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from swjax.optax.rms import TensorRMS
from swjax.optax.stable_adamw import _block_axes, one_minus_power


def adamw_rms_by_path(
    opt_state,
    grads,
    *,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    block_axes: Any | Callable[[optax.Params], Any] | None = None,
) -> dict[str, jax.Array]:
    r"""The RMS of every tensor's update at the last step of `optax.adam` or `optax.adamw`.

    With the second moment debiased, :math:`\hat v = v / (1 - \beta_2^t)`,
    :math:`\mathrm{RMS} = \sqrt{\mathrm{mean}(|g|^2 / \max(\hat v, \epsilon^2))}`: what `stable_adamw` has in
    its state. Works inside and outside jit, and does not wait for the device.

    Args:
      opt_state: the state after the step, with one `optax.ScaleByAdamState` in it: of `optax.adamw`, or a
        chain or wrapper around it.
      grads: the gradient that Adam was given at this step, after clipping where that precedes it.
      b2, eps: of the optimizer; the defaults are optax's.
      block_axes: of parameters that stack several tensors, see `stable_adamw`.

    Returns:
      "path/of/the/parameter" -> RMS: a scalar, or [blocks] where `block_axes` makes blocks.

    Raises:
      ValueError: there is no such state, or it is of other parameters than the gradient.

    >>> params = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    >>> optimizer = optax.adamw(1e-3)
    >>> with jax.numpy_dtype_promotion("standard"):  # where a test is stricter
    ...     _, state = optimizer.update(params, optimizer.init(params), params)
    >>> {path: round(float(rms), 6) for path, rms in adamw_rms_by_path(state, params).items()}
    {'layer/bias': 1.0, 'layer/kernel': 1.0}
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
    states = [node for node in nodes if isinstance(node, optax.ScaleByAdamState)]
    leaves = jax.tree.leaves(grads)
    sizes = [jnp.shape(g) for g in leaves]
    if len(states) != 1 or [jnp.shape(v) for v in jax.tree.leaves(states[0].nu)] != sizes:
        raise ValueError(
            f"opt_state must hold one optax.ScaleByAdamState, of the {len(leaves)} tensors of grads, "
            f"found {len(states)}: pass the state of optax.adamw and the whole gradient"
        )
    correction = one_minus_power(b2, jnp.asarray(states[0].count))
    axes = _block_axes(block_axes, grads)
    values = [
        _rms(g, v, correction, eps, kept)
        for g, v, kept in zip(leaves, jax.tree.leaves(states[0].nu), axes, strict=True)
    ]
    return TensorRMS.zeros(grads, axes).replace(values).by_path()


def _rms(g, v, correction, eps, blocks: tuple[int, ...]) -> jax.Array:
    reduced = tuple(axis for axis in range(g.ndim) if axis not in blocks)
    size = max(1, math.prod(g.shape[axis] for axis in reduced))
    squared, v = jnp.square(jnp.abs(g).astype(jnp.float32)), v.astype(jnp.float32) / correction
    floor = max(float(eps) ** 2, float(jnp.finfo(jnp.float32).tiny))  # the square may underflow
    return jnp.sqrt(jnp.sum(squared / jnp.maximum(v, floor), reduced) / size)
