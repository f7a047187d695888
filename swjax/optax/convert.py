"""Converts an AdamW state to StableAdamW in the middle of a run."""

import jax
import jax.numpy as jnp
import optax

from swjax.optax.codes import has_eight_bits
from swjax.optax.eight_bits import decoded_moments
from swjax.optax.stable import StableAdamWState, one_minus_power
from swjax.optax.tensors import nodes_of, path_name


def from_adamw_state(
    adamw_state: optax.OptState, opt_state: optax.OptState, *, b1: float, b2: float
) -> optax.OptState:
    """Moves the moments of an optax AdamW (or Adam) state into a fresh StableAdamW state.

    optax stores the moment M, the sum of (1 - b1) b1^(t-i) g_i over the steps i, and debiases it at each use.
    StableAdamW stores m = M / (1 - b1^t), and v in the same way. Training continues as AdamW would have,
    except for clipping.

    Args:
      adamw_state: state with one `optax.ScaleByAdamState`, such as that of `optax.adamw`.
      opt_state: result of `stable_adamw(...).init(params)`, or of a chain, wrapper or guard around it; it
        determines structure and dtypes, and must have float moments. If one state is the `opt_state` of an
        `nnx.Optimizer`, both must be.
      b1: b1 of the AdamW optimizer.
      b2: b2 of the AdamW optimizer. The new optimizer may have other values of both.

    Returns:
      `opt_state` with the count and the moments of `adamw_state`. RMS is 0 until the first step.

    Raises:
      ValueError: b1 or b2 is out of range, one of the states does not contain exactly one state of its kind,
        they belong to different parameters, `opt_state` has moments in 8 bits, or the state is that of an
        ensemble, with several counts.

    >>> from swjax.optax import stable_adamw
    >>> params, gradient = jnp.array([1.0, 2.0]), jnp.array([0.5, 4.0])
    >>> after_one_step = (jnp.int32(1), 0.1 * gradient, 0.01 * gradient**2)
    >>> old = optax.ScaleByAdamState(*after_one_step)
    >>> state = from_adamw_state(old, stable_adamw(1e-3).init(params), b1=0.9, b2=0.99)
    >>> state.mu.round(4)  # m of the first step is the gradient
    Array([0.5, 4. ], dtype=float32)
    """
    for name, b in (("b1", b1), ("b2", b2)):
        if not isinstance(b, jax.core.Tracer) and not 0 <= b < 1:
            raise ValueError(f"{name} must be that of the AdamW optimizer, in [0, 1), got {b}")
    if has_eight_bits(opt_state):
        raise ValueError(
            "opt_state must have float moments: remove eight_bit_moments from its optimizer"
        )
    old = _only(optax.ScaleByAdamState, decoded_moments(adamw_state), "adamw_state")
    new = _only(StableAdamWState, opt_state, "opt_state")
    if jnp.ndim(old.count):
        raise ValueError(
            f"adamw_state must have a single step count, got {jnp.shape(old.count)}: convert the states "
            "of an ensemble under jax.vmap"
        )
    _require_alike(old.mu, new.mu)
    steps = jnp.maximum(old.count, 1)  # before the first step all moments are 0

    def debias(moment, like, b):
        total = one_minus_power(b, steps)
        return jax.tree.map(
            lambda x, y: (x / total.astype(x.real.dtype)).astype(y.dtype), moment, like
        )

    mu, nu = debias(old.mu, new.mu, b1), debias(old.nu, new.nu, b2)
    # The leaves of an `nnx.Optimizer`'s state are variables, which `jax.tree.map` keeps.
    count = jax.tree.map(lambda old, new: old, old.count, new.count)
    converted = StableAdamWState(count, mu, nu, new.rms)
    return jax.tree.map(
        lambda x: converted if isinstance(x, StableAdamWState) else x,
        opt_state,
        is_leaf=lambda x: isinstance(x, StableAdamWState),
    )


def _require_alike(old, new):
    """Raises an error unless the moments of both states are those of the same parameters."""
    shapes = [
        {path_name(path): jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(mu)}
        for mu in (old, new)
    ]
    for name in shapes[0] | shapes[1]:
        a, b = (each.get(name) for each in shapes)
        if a != b:
            raise ValueError(
                f"adamw_state and opt_state must have moments of the same parameters, got {name!r} of "
                f"the shapes {a} and {b}: mask both optimizers in the same way, and take states of one model"
            )


def _only(kind, tree, name):
    """Returns the only node of a kind in a tree."""
    found = nodes_of(tree, kind)
    if len(found) != 1:
        raise ValueError(
            f"{name} must contain one {kind.__name__}, got {len(found)}: pass the state of one optimizer"
        )
    return found[0]
