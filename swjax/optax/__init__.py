"""Optimizers as optax gradient transformations. Needs JAX and optax, nothing else of swjax.

>>> from swjax.optax import stable_adamw
>>> optimizer = stable_adamw(learning_rate=2e-3)

The name `swjax.optax.stable_adamw` is the function, also after `import swjax.optax.stable_adamw`.
"""

from swjax.optax.adamw import adamw_rms_by_path
from swjax.optax.convert import from_adamw_state
from swjax.optax.rms import TensorRMS, rms_by_path
from swjax.optax.stable_adamw import StableAdamWState, stable_adamw

__all__ = [
    "StableAdamWState",
    "TensorRMS",
    "adamw_rms_by_path",
    "from_adamw_state",
    "rms_by_path",
    "stable_adamw",
]
