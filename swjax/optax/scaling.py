"""Loss scaling for float16: reads values from the state of either scaler in a training step.

float16 gradients below 6e-8 are 0. So the loss is multiplied by a scale, and gradients are divided by it
before the update. A gradient that then exceeds 65504 becomes infinite: `per_tensor_guard` skips the update of
that tensor, `dynamic_loss_scale` the whole step.
"""

import jax
import optax

from swjax.optax.dynamic import DynamicLossScaleState
from swjax.optax.guard import PerTensorGuardState


def loss_scale(opt_state: optax.OptState) -> jax.Array:
    """The factor of the next loss, [] float32.

    Args:
      opt_state: state of `per_tensor_guard` or `dynamic_loss_scale`, or of a chain or wrapper around one.

    Raises:
      ValueError: `opt_state` contains no scale.
    """
    return _find(opt_state, PerTensorGuardState, DynamicLossScaleState).scale


def skipped_by_path(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """The number of steps that each tensor has skipped in `per_tensor_guard`: int32, a scalar or [blocks].

    Args:
      opt_state: state of `per_tensor_guard`, or of a chain or wrapper around it.

    Raises:
      ValueError: `opt_state` contains no guard.
    """
    return _find(opt_state, PerTensorGuardState).skipped.by_path()


def _find(opt_state, *kinds):
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kinds))
    for node in nodes:
        if isinstance(node, kinds):
            return node
    raise ValueError(
        f"opt_state contains no {' or '.join(kind.__name__ for kind in kinds)}: wrap the optimizer in "
        f"swjax.optax.{'per_tensor_guard' if len(kinds) == 1 else 'per_tensor_guard or dynamic_loss_scale'}"
    )
