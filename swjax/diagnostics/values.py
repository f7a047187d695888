"""Named scalars of the trees of a training step, computed inside the step without a host sync.

A value is a scalar, or a vector with one entry per block, which the log writes as "<name>/<block>".
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swjax.diagnostics.names import FEATURE_MAX, FEATURE_MEAN, RMS
from swjax.optax import adamw_rms_by_path, path_name, rms_by_path


def norms(**trees: Any) -> dict[str, jax.Array]:
    """Global L2 norms: the square root of the sum of squares of all entries of a tree.

    Args:
      **trees: trees by name, such as grad, update, param.

    Returns:
      {"train/<name>_norm": float32 scalar}.

    >>> norms(grad={"w": jnp.array([3.0]), "b": jnp.array([4.0])})
    {'train/grad_norm': Array(5., dtype=float32)}
    """
    return {f"train/{name}_norm": _norm(tree) for name, tree in trees.items()}


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jax.tree.leaves(squares(tree)), start=jnp.float32(0)))


def squares(tree: Any) -> Any:
    """The sum of squares of each leaf, a float32 scalar; it is finite if the leaf is, except for overflow.

    Integers are finite, and are left out.
    """

    def leaf(x):
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return None
        return jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32)))

    return jax.tree.map(leaf, tree)


@partial(jax.tree_util.register_dataclass, data_fields=["index"], meta_fields=["names"])
@dataclass(frozen=True)
class NamedIndex:
    """One of several names, chosen on the device; a pytree whose names are static.

    Attributes:
      index: int32 scalar, a position in `names`; -1 selects none.
      names: the selectable names.
    """

    index: jax.Array
    names: tuple[str, ...]


def first_nonfinite(**trees: Any) -> NamedIndex:
    """Selects the first tensor of a step that contains a NaN or an infinity.

    Args:
      **trees: {kind: tree of arrays or numbers} in dataflow order (parameters, batch, loss, gradient), so
        that the first non-finite tensor is the origin. Integers count as finite. A tree may contain the
        `squares` of tensors instead, which are finite if the tensors are.

    Returns:
      The selected "<kind> <path>"; index -1 means that all tensors are finite, or that there are none.

    >>> params = {"a": jnp.ones(2), "b": jnp.array([0, jnp.inf])}
    >>> found = first_nonfinite(parameter=params, loss=jnp.float32(jnp.nan))
    >>> found.names[found.index]
    'parameter b'
    """
    floats = [pair for kind, tree in trees.items() for pair in _floats(kind, tree)]
    names = tuple(name for name, _ in floats)
    # All flags are read unconditionally, because a branch would make the GPU wait for the host.
    # The last entry means that all are finite. XLA would turn `jnp.any` into a long chain of scalars, and
    # repeat it in the fusion of every tensor that depends on the result.
    bad = jnp.stack([*(~jnp.all(jnp.isfinite(leaf)) for _, leaf in floats), jnp.bool_(True)])
    first = jnp.argmax(bad).astype(jnp.int32)
    return NamedIndex(jnp.where(first < len(names), first, -1), names)


def _floats(kind: str, tree: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of the real and complex leaves of a tree; Python numbers become NumPy arrays."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    name = lambda path: f"{kind} {path_name(path)}".strip()
    arrays = [(path, x if hasattr(x, "dtype") else np.asarray(x)) for path, x in named]
    return [(name(path), x) for path, x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]


def rms(opt_state: Any) -> dict[str, jax.Array]:
    """The RMS of every parameter's update in StableAdamW; above 1 the second moment lags behind the gradient.

    Args:
      opt_state: state of an optimizer that contains `swjax.optax.stable_adamw`.

    Returns:
      {"stability/rms/<path of the parameter>": scalar, or [blocks] for a stacked parameter}.
    """
    return {f"{RMS}{path}": value for path, value in rms_by_path(opt_state).items()}


def adamw_rms(opt_state: Any, grads: Any, **options: Any) -> dict[str, jax.Array]:
    """The RMS of every parameter's update, see `rms`, for plain `optax.adamw`.

    Args:
      opt_state: state of the optimizer after the step.
      grads: gradients of the step, as passed to Adam.
      **options: b2, eps and block_axes, see `swjax.optax.adamw_rms_by_path`.
    """
    found = adamw_rms_by_path(opt_state, grads, **options)
    return {f"{RMS}{path}": value for path, value in found.items()}


def magnitudes(x: jax.Array) -> dict[str, jax.Array]:
    """Mean and maximum of |x| as float32 scalars, without a gradient; NaN if x contains NaN.

    >>> magnitudes(jnp.array([1.0, -3.0]))
    {'feature_mean_abs': Array(2., dtype=float32), 'feature_max_abs': Array(3., dtype=float32)}
    """
    absolute = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
    # One reduction with two results, because XLA for GPUs would read x for each of two reductions.
    sums, maxima = jax.lax.reduce(
        (absolute, absolute),
        (jnp.float32(0), jnp.float32(0)),
        lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])),
        (x.ndim - 1,),
    )
    mean, largest = jnp.mean(sums) / x.shape[-1], jnp.max(maxima)
    # The maximum over devices drops NaN, unlike the sum.
    return {FEATURE_MEAN: mean, FEATURE_MAX: jnp.where(jnp.isnan(mean), jnp.nan, largest)}


def feature_magnitude(outs: dict[str, dict]) -> dict[str, jax.Array]:
    """Magnitudes of each block's output.

    Args:
      outs: {tower: intermediates of its forward pass}, whose "blocks" are vectors with one entry per block.

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


def logit_sharpness(logits: jax.Array, labels: jax.Array, *, radius: float = 5e-4) -> jax.Array:
    """How much a small error of the logits can raise the cross-entropy, in percent.

    Each logit z moves by at most radius * (|z| + 1), and the result is 100 * (maximum - loss) / (1 + loss),
    where the maximum is over this box. It is the sharpness of Keskar et al. (arXiv:1609.04836), taken over
    logits as in "To FP8 and Back Again" (arXiv:2405.18710), which compares it between precisions. Both search
    for the maximum. Cross-entropy falls in the label's logit and rises in all others, so the maximum is at
    a known corner: the label's logit is least and the others are largest.

    Args:
      logits: [..., classes] of any float dtype; computed in float32.
      labels: integers [...].
      radius: size of the box, above 0.

    Returns:
      float32 [...], one value a label; NaN where the logits are not finite, or the label is none of
      the classes.

    Raises:
      ValueError: the shapes do not fit, or the radius is not positive.

    >>> logits = jnp.array([[4.0, 0.0], [400.0, 0.0]])
    >>> [f"{value:.2f}" for value in logit_sharpness(logits, jnp.array([0, 1]))]
    ['0.01', '0.05']
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of logits without its last axis, {logits.shape[:-1]}, got "
            f"{labels.shape}"
        )
    if not radius > 0:
        raise ValueError(f"radius must be above 0, got {radius}")
    z = logits.astype(jnp.float32)
    is_label = jax.nn.one_hot(labels, z.shape[-1], dtype=jnp.bool_)
    step = radius * (jnp.abs(z) + 1)
    worst = z + jnp.where(is_label, -step, step)

    def loss(z: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(z, axis=-1) - jnp.sum(jnp.where(is_label, z, 0), axis=-1)

    before = loss(z)
    sharpness = 100 * (loss(worst) - before) / (1 + before)
    return jnp.where(jnp.any(is_label, axis=-1), sharpness, jnp.nan)
