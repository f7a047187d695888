"""The specification of every kernel in jax.numpy, which is also the XLA implementation on every platform.

A quantized array is a ``QTensor``: int8 or fp8 ``values`` and an fp32 ``scale`` with ``x ~ values * scale``.
A scale spans an operand's *contracted* axes, or the whole tensor, so that it factors out of the product:
``(a . b)[i, j] = scale_a[i] * scale_b[j] * sum_k a.values[i, k] * b.values[k, j]``.
"""

from swjax.kernels.attention.reference import attention, attention_backward
from swjax.kernels.block_formats.reference import (
    block_matmul,
    quantize_segments,
    quantize_squares,
)
from swjax.kernels.block_weight_gradients.reference import (
    block_weight_gradient,
    block_weight_gradient_group,
)
from swjax.kernels.cross_entropy.reference import cross_entropy
from swjax.kernels.formats import (
    LARGEST,
    SMALLEST_ABSMAX,
    QTensor,
    absolute_maximum,
    divide,
    round_to_fp8,
)
from swjax.kernels.fused_products.reference import fused_product, fused_product_backward
from swjax.kernels.gated.reference import gated, gated_backward
from swjax.kernels.gelu.reference import gelu, gelu_backward
from swjax.kernels.norms.reference import (
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from swjax.kernels.products.reference import dot, matmul, matmul_sum
from swjax.kernels.quantizers.reference import (
    dequantize,
    quantize,
    quantize_and_sum,
    quantize_both,
    quantize_by,
    static_absmax,
)
from swjax.kernels.ragged.reference import (
    ragged_block_weight_gradient,
    ragged_matmul,
    ragged_weight_gradient,
)
from swjax.kernels.rotations.reference import quantize_rotated, rotate_features
from swjax.kernels.symmetric.reference import symmetric_product
from swjax.kernels.weight_gradients.reference import weight_gradient, weight_gradient_group

__all__ = [
    "LARGEST",
    "SMALLEST_ABSMAX",
    "QTensor",
    "absolute_maximum",
    "attention",
    "attention_backward",
    "block_matmul",
    "block_weight_gradient",
    "block_weight_gradient_group",
    "cross_entropy",
    "dequantize",
    "divide",
    "dot",
    "fused_product",
    "fused_product_backward",
    "gated",
    "gated_backward",
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "matmul",
    "matmul_sum",
    "quantize",
    "quantize_and_sum",
    "quantize_both",
    "quantize_by",
    "quantize_rotated",
    "quantize_segments",
    "quantize_squares",
    "ragged_block_weight_gradient",
    "ragged_matmul",
    "ragged_weight_gradient",
    "rms_norm",
    "rms_norm_backward",
    "rotate_features",
    "round_to_fp8",
    "static_absmax",
    "symmetric_product",
    "weight_gradient",
    "weight_gradient_group",
]
