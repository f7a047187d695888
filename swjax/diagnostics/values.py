"""Trees of a training step as scalars by name, to be computed inside the step: no host sync.

A value is a scalar, or a vector with one entry a block, which the log writes as "<name>/<block>".
"""

import jax
import jax.numpy as jnp

from swjax.optax import adamw_rms_by_path, rms_by_path


def norms(**trees) -> dict[str, jax.Array]:
    """Global L2 norms, sqrt of the sum of squares of all entries of a tree.

    Args:
      **trees: by what the norm is of: grad, update, param.

    Returns:
      {"train/<name>_norm": float32 scalar}.

    >>> norms(grad={"w": jnp.array([3.0]), "b": jnp.array([4.0])})
    {'train/grad_norm': Array(5., dtype=float32)}
    """
    return {f"train/{name}_norm": _norm(tree) for name, tree in trees.items()}


def _norm(tree) -> jax.Array:
    return jnp.sqrt(sum(jax.tree.leaves(squares(tree)), start=jnp.float32(0)))


def squares(tree):
    """The sum of squares of each leaf, float32: what norms are made of, and finite if the leaf is."""
    return jax.tree.map(lambda x: jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))), tree)


def first_nonfinite(**trees) -> tuple[jax.Array, list[str]]:
    """Which leaf, in the order of the arguments, is the first that holds a NaN or an infinity.

    Args:
      **trees: by what they are: batch, parameter, gradient. Leaves of integers are always finite, and
        `squares` says the same as a leaf does.

    Returns:
      Its position, an int32 scalar, in the list of names that comes with it; -1: all are finite.

    >>> index, names = first_nonfinite(parameter={"a": jnp.ones(2), "b": jnp.array([0, jnp.inf])})
    >>> names[index]
    'parameter b'
    """
    found = [
        (f"{kind} {jax.tree_util.keystr(path, simple=True, separator='/')}".strip(), leaf)
        for kind, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    bad = jnp.stack([~jnp.all(jnp.isfinite(leaf)) for _, leaf in found])
    index = jnp.where(jnp.any(bad), jnp.argmax(bad).astype(jnp.int32), jnp.int32(-1))
    return index, [name for name, _ in found]


def rms(opt_state) -> dict[str, jax.Array]:
    """RMS of every parameter's update as StableAdamW saw it: above 1 the second moment lags.

    Args:
      opt_state: of an optimizer with `swjax.optax.stable_adamw` anywhere in it.

    Returns:
      {"stability/rms/<path of the parameter>": scalar, or [blocks] of a stacked parameter}.
    """
    return {f"stability/rms/{path}": value for path, value in rms_by_path(opt_state).items()}


def adamw_rms(opt_state, grads, **options) -> dict[str, jax.Array]:
    """The same of plain `optax.adamw`.

    Args:
      opt_state: after the step.
      grads: of the step, as Adam was given them.
      **options: b2, eps and block_axes, see `swjax.optax.adamw_rms_by_path`.
    """
    found = adamw_rms_by_path(opt_state, grads, **options)
    return {f"stability/rms/{path}": value for path, value in found.items()}


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
