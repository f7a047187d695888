"""Optimizers as optax gradient transformations. Needs JAX and optax, nothing else of swjax.

>>> from swjax.optax import stable_adamw
>>> optimizer = stable_adamw(learning_rate=2e-3)

The name `swjax.optax.stable_adamw` is the function, also after `import swjax.optax.stable_adamw`.
"""

from swjax.optax.adamw import adamw_rms_by_path
from swjax.optax.convert import from_adamw_state
from swjax.optax.rms import TensorRMS, rms_by_path
from swjax.optax.scaling import (
    DynamicLossScaleState,
    PerTensorGuardState,
    dynamic_loss_scale,
    loss_scale,
    per_tensor_guard,
    skipped_by_path,
    unscale,
)
from swjax.optax.stable_adamw import StableAdamWState, power_decay, stable_adamw

__all__ = [
    "DynamicLossScaleState",
    "PerTensorGuardState",
    "StableAdamWState",
    "TensorRMS",
    "adamw_rms_by_path",
    "dynamic_loss_scale",
    "from_adamw_state",
    "loss_scale",
    "per_tensor_guard",
    "power_decay",
    "rms_by_path",
    "skipped_by_path",
    "stable_adamw",
    "unscale",
]
