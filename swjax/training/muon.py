"""Muon for the weight matrices of the blocks. On a mesh each device orthogonalizes some of the layers."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

from swjax.optax import path_name

Reshard = Callable[[jax.Array], jax.Array]

MOMENTUM = 0.95
ITERATIONS = 5
SCALE = 0.2  # RMS of AdamW's updates, to which those of Muon are scaled


def muon_and_adamw(
    schedule: optax.Schedule,
    *,
    weight_decay: float,
    mask: Callable[[Any], Any],
    dtype: jax.typing.DTypeLike = jnp.float32,
    **adam: float,
) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks (Jordan et al., 2024), and AdamW for the other parameters.

    The rows or the columns of an update of Muon are nearly orthonormal. The update is scaled to the RMS of
    AdamW's updates (Liu et al., 2025, https://arxiv.org/abs/2502.16982), so both parts use one learning rate.
    Muon's momentum is 0.95.

    Args:
      schedule: step -> learning rate.
      weight_decay: decoupled weight decay of both parts.
      mask: parameters -> a tree of bools, which parameters decay.
      dtype: see `scale_by_muon`.
      **adam: b1, b2 and eps of AdamW.
    """

    def labels(params):
        is_matrix = is_matrix_of_blocks(params)
        return jax.tree.map(lambda found: "muon" if found else "adamw", is_matrix)

    def scaled(updates, _):
        return jax.tree.map(lambda x: x * (SCALE * math.sqrt(max(x.shape[1:]))), updates)

    matrices = optax.chain(
        scale_by_muon(dtype),
        optax.stateless(scaled),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )
    others = optax.adamw(schedule, weight_decay=weight_decay, mask=mask, **adam)
    return optax.partition({"muon": matrices, "adamw": others}, labels)


def is_matrix_of_blocks(params: Any) -> Any:
    """A tree of bools with the structure of `params`: which parameters Muon updates."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim == 3 and "blocks" in path_name(path).split("/"), params
    )


def scale_by_muon(dtype: jax.typing.DTypeLike) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon` for stacks of matrices, [layers, m, n].

    It differs in two ways. The operands of its products are of `dtype`. On a mesh with automatic axes the
    layers are sharded over all devices, so each device orthogonalizes whole matrices. optax's function keeps
    the sharding of the parameters: with data parallelism every device would repeat all products, and with
    FSDP XLA would gather the intermediate results of each iteration.

    Args:
      dtype: of the operands; sums are in float32. Jordan et al. use bfloat16.
    """
    reference = contrib.scale_by_muon(beta=MOMENTUM)

    def update(grads, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, MOMENTUM, 1)
        ahead = optax.tree.bias_correction(mu, MOMENTUM, optax.safe_increment(count))
        now = optax.tree.bias_correction(grads, MOMENTUM, count)
        nesterov = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, ahead, now)
        orthogonal = functools.partial(orthogonalize, coefficients=state.ns_coeffs, dtype=dtype)
        return jax.tree.map(orthogonal, nesterov), state._replace(count=count, mu=mu)

    return optax.GradientTransformation(reference.init, update)


def orthogonalize(
    x: jax.Array, coefficients: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """Moves the singular values of each matrix near 1, by five Newton-Schulz iterations.

    With optax's coefficients, singular values of at least 0.2 % of the Frobenius norm end between 0.68 and
    1.2.

    Args:
      x: [layers, m, n].
      coefficients: of the terms of degree 1, 3 and 5, [3] float32.
      dtype: of the operands of the products.

    Returns:
      [layers, m, n] float32.
    """
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    linear, cubic, quintic = coefficients
    is_wide = x.shape[1] <= x.shape[2]
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-8)
    replicate, shard = _resharding(x)
    x = shard(replicate(x.astype(dtype)))
    for _ in range(ITERATIONS):
        transposed = x.mT
        gram = product(x, transposed) if is_wide else product(transposed, x)
        operand = gram.astype(dtype)
        factor = (cubic * gram + quintic * product(operand, operand)).astype(dtype)
        added = product(factor, x) if is_wide else product(x, factor)
        x = (linear * x.astype(jnp.float32) + added).astype(dtype)
    return replicate(x).astype(jnp.float32)


def _resharding(x: jax.Array) -> tuple[Reshard, Reshard]:
    """Functions that gather an array like `x` on every device, and that shard its layers over all devices.

    An array is gathered before its layers are sharded, because XLA moves from one sharded axis to another by
    several gathers in float32.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return lambda x: x, lambda x: x
    replicated, by_layers = (NamedSharding(mesh, spec) for spec in (P(), P(mesh.axis_names)))

    def replicate(x: jax.Array) -> jax.Array:
        # Without the barrier, XLA gathers the array before it is converted to `dtype`.
        return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(x), replicated)

    return replicate, lambda x: jax.lax.with_sharding_constraint(x, by_layers)
