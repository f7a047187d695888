"""Named scalars of the trees of a training step, computed inside the step without a host sync.

A value is a scalar, or a vector with one entry a block, which the log writes as "<name>/<block>".
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from swjax.diagnostics.names import FEATURE_MAX, FEATURE_MEAN, RMS
from swjax.optax import adamw_rms_by_path, rms_by_path


def norms(**trees: Any) -> dict[str, jax.Array]:
    """Global L2 norms, sqrt of the sum of squares of all entries of a tree.

    Args:
      **trees: by what the norm is of: grad, update, param.

    Returns:
      {"train/<name>_norm": float32 scalar}.

    >>> norms(grad={"w": jnp.array([3.0]), "b": jnp.array([4.0])})
    {'train/grad_norm': Array(5., dtype=float32)}
    """
    return {f"train/{name}_norm": _norm(tree) for name, tree in trees.items()}


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jax.tree.leaves(squares(tree)), start=jnp.float32(0)))


def squares(tree: Any) -> Any:
    """The sum of squares of each leaf, a float32 scalar: finite if the leaf is, but for overflow."""
    return jax.tree.map(lambda x: jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))), tree)


@partial(jax.tree_util.register_dataclass, data_fields=["index"], meta_fields=["names"])
@dataclass(frozen=True)
class NamedIndex:
    """One of several names, chosen on the device; a pytree whose names are static.

    Attributes:
      index: int32 scalar, a position in `names`; -1: none.
      names: what can be chosen.
    """

    index: jax.Array
    names: tuple[str, ...]


def first_nonfinite(**trees: Any) -> NamedIndex:
    """The first tensor of a step that holds a NaN or an infinity.

    Args:
      **trees: {kind: tree of arrays} in dataflow order (parameters, batch, loss, gradient), so that the
        first non-finite tensor is the origin. Integers count as finite. A tree may hold the `squares` of
        tensors instead: they are finite if the tensors are.

    Returns:
      The selection of "<kind> <path>"; index -1: all tensors are finite.

    >>> params = {"a": jnp.ones(2), "b": jnp.array([0, jnp.inf])}
    >>> found = first_nonfinite(parameter=params, loss=jnp.float32(jnp.nan))
    >>> found.names[found.index]
    'parameter b'
    """
    floats = [pair for kind, tree in trees.items() for pair in _floats(kind, tree)]
    names, leaves = zip(*floats)
    # Read unconditionally: a GPU would wait for the host to take a branch.
    # The last entry stands for "none". XLA would turn `jnp.any` into a long chain of scalars, and repeat
    # it in the fusion of every tensor that depends on the result.
    bad = jnp.stack([*(~jnp.all(jnp.isfinite(leaf)) for leaf in leaves), jnp.bool_(True)])
    first = jnp.argmax(bad).astype(jnp.int32)
    return NamedIndex(jnp.where(first < len(names), first, -1), names)


def _floats(kind: str, tree: Any) -> list[tuple[str, jax.Array]]:
    named = jax.tree_util.tree_leaves_with_path(tree)
    name = lambda path: f"{kind} {jax.tree_util.keystr(path, simple=True, separator='/')}".strip()
    return [(name(path), x) for path, x in named if jnp.issubdtype(x.dtype, jnp.floating)]


def rms(opt_state: Any) -> dict[str, jax.Array]:
    """RMS of every parameter's update as StableAdamW saw it: above 1 the second moment lags.

    Args:
      opt_state: of an optimizer with `swjax.optax.stable_adamw` anywhere in it.

    Returns:
      {"stability/rms/<path of the parameter>": scalar, or [blocks] of a stacked parameter}.
    """
    return {f"{RMS}{path}": value for path, value in rms_by_path(opt_state).items()}


def adamw_rms(opt_state: Any, grads: Any, **options: Any) -> dict[str, jax.Array]:
    """The same of plain `optax.adamw`.

    Args:
      opt_state: after the step.
      grads: of the step, as Adam was given them.
      **options: b2, eps and block_axes, see `swjax.optax.adamw_rms_by_path`.
    """
    found = adamw_rms_by_path(opt_state, grads, **options)
    return {f"{RMS}{path}": value for path, value in found.items()}


def magnitudes(x: jax.Array) -> dict[str, jax.Array]:
    """Mean and maximum of |x| as float32 scalars, without a gradient.

    >>> magnitudes(jnp.array([1.0, -3.0]))
    {'feature_mean_abs': Array(2., dtype=float32), 'feature_max_abs': Array(3., dtype=float32)}
    """
    absolute = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
    return {FEATURE_MEAN: jnp.mean(absolute), FEATURE_MAX: jnp.max(absolute)}


def feature_magnitude(outs: dict[str, dict]) -> dict[str, jax.Array]:
    """Magnitudes of each block's output.

    Args:
      outs: by tower, the intermediates that its forward pass returned; their "blocks" are vectors with
        one entry a block.

    Returns:
      {"stability/<magnitude>/<tower>": [blocks]}.

    >>> feature_magnitude({"vision": {"blocks": {"feature_mean_abs": jnp.ones(2)}}})
    {'stability/feature_mean_abs/vision': Array([1., 1.], dtype=float32)}
    """
    return {
        f"stability/{name}/{tower}": value
        for tower, out in outs.items()
        for name, value in out["blocks"].items()
    }
