"""Optimizers as optax gradient transformations. The package needs JAX, optax and `swjax.kernels` only.

>>> from swjax.optax import stable_adamw
>>> optimizer = stable_adamw(learning_rate=2e-3)
"""

from swjax.optax.codes import EightBitMomentsState
from swjax.optax.convert import from_adamw_state
from swjax.optax.eight_bits import decoded_moments, eight_bit_moments
from swjax.optax.matrices import guess_matrices, stacked_axes
from swjax.optax.orthogonal import muon
from swjax.optax.rms import adamw_rms_by_path, rms_by_path
from swjax.optax.scaling import (
    DynamicLossScaleState,
    PerTensorGuardState,
    dynamic_loss_scale,
    loss_scale,
    per_tensor_guard,
    skipped_by_path,
    unscale,
)
from swjax.optax.stable import StableAdamWState, power_decay, scale_by_stable_adam, stable_adamw
from swjax.optax.tensors import TensorValues, path_name

__all__ = [
    "DynamicLossScaleState",
    "EightBitMomentsState",
    "PerTensorGuardState",
    "StableAdamWState",
    "TensorValues",
    "adamw_rms_by_path",
    "decoded_moments",
    "dynamic_loss_scale",
    "eight_bit_moments",
    "from_adamw_state",
    "guess_matrices",
    "loss_scale",
    "muon",
    "path_name",
    "per_tensor_guard",
    "power_decay",
    "rms_by_path",
    "scale_by_stable_adam",
    "skipped_by_path",
    "stable_adamw",
    "stacked_axes",
    "unscale",
]
