"""Triton kernels, called through jax-triton, for NVIDIA GPUs from Ampere on (fp8: from Ada on).

Every size is a ``constexpr``, because with run-time sizes the product loaded single bytes. Floating-point
fusion is off, so that a kernel rounds like its source and the specification.

- `launcher`: the call of jax-triton.
- `arithmetic`: element-wise functions. `chunks`: rows in registers.
- `quantizers`, `layer_norms`, `gelus`: the row kernels, one per producer.
- `scales`: quantizes a matrix with known maxima. `products`: the quantized product.
- `blocks`: the weight gradient in int8.
- `heads`, `attention_forward`, `attention_gradients`: attention; `attention_gradients_short`: its backward
  pass for sequences of up to `tiles.SHORT_SEQUENCE` tokens.
"""

from collections.abc import Callable
from typing import Any

from swjax.kernels.availability import Unavailable
from swjax.kernels.triton_gpu import blocks, chunks, heads, quantizers, scales
from swjax.kernels.triton_gpu.attention_forward import attention
from swjax.kernels.triton_gpu.attention_gradients import attention_backward
from swjax.kernels.triton_gpu.blocks import block_weight_gradient
from swjax.kernels.triton_gpu.gelus import gelu, gelu_backward
from swjax.kernels.triton_gpu.layer_norms import layer_norm, layer_norm_backward
from swjax.kernels.triton_gpu.products import matmul
from swjax.kernels.triton_gpu.quantizers import quantize, quantize_and_sum
from swjax.kernels.triton_gpu.scales import quantize_both, quantize_by

__all__ = [
    "attention",
    "attention_backward",
    "block_weight_gradient",
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "matmul",
    "quantize",
    "quantize_and_sum",
    "quantize_both",
    "quantize_by",
    "why_not",
]

# Each function has the signature of its operation. Operations without an entry accept all arguments.
_WHY_NOT: dict[str, Callable[..., Unavailable | None]] = {
    "block_weight_gradient": blocks.why_not,
    "quantize": quantizers.why_not_quantize,
    "quantize_by": scales.why_not_quantize_by,
    "quantize_and_sum": chunks.why_not,
    "layer_norm": chunks.why_not,
    "layer_norm_backward": chunks.why_not,
    "gelu": chunks.why_not,
    "gelu_backward": chunks.why_not,
    "attention": heads.why_not,
    "attention_backward": heads.why_not,
}


def why_not(operation: str, *arrays: Any, **options: Any) -> Unavailable | None:
    """Returns why these kernels cannot compute an operation on a GPU from Ampere on, or None if they can.

    Args:
      operation: the name of a function of this module.
      *arrays, **options: arguments of the operation.
    """
    check = _WHY_NOT.get(operation)
    return check(*arrays, **options) if check else None
