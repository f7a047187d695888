"""Stable low-precision training for JAX: SwitchBack int8 and fp8 linear layers, StableAdamW, CLIP.

Layers are in `swjax.nnx` and `swjax.linen`, optimizers in `swjax.optax`; import these modules explicitly.
"""

from swjax import checkpoint_policies
from swjax.kernels.reference import QTensor, dequantize, quantize
from swjax.linear.api import gated_mlp, mlp, quantize_weight, switchback
from swjax.linear.contraction import dot_general
from swjax.linear.layouts import Layout
from swjax.linear.program import quantized
from swjax.linear.prologues import Gelu, LayerNorm, RMSNorm
from swjax.linear.ragged import gated_ragged_mlp, ragged_switchback
from swjax.recipes import KEPT_IN_LLMS, RECIPES, Recipe

__version__ = "0.1.0"

__all__ = [
    "KEPT_IN_LLMS",
    "RECIPES",
    "Gelu",
    "LayerNorm",
    "Layout",
    "QTensor",
    "RMSNorm",
    "Recipe",
    "checkpoint_policies",
    "dequantize",
    "dot_general",
    "gated_mlp",
    "gated_ragged_mlp",
    "mlp",
    "quantize",
    "quantize_weight",
    "quantized",
    "ragged_switchback",
    "switchback",
]
