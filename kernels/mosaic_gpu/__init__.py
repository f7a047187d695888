"""Pallas Mosaic GPU kernels for Hopper: quantized products, weight gradients, and attention.

`pipeline` is what the products share; `products`, `product_sums`, `weight_gradients` and `block_products` are
what each computes. `rotations` quantizes the operands of the int8 weight gradient. `attention_forward` is the
forward pass of attention, and `attention_memory` its heads in shared memory. `attention_gradients` is the
backward pass: `attention_copies` fills shared memory with `attention_heads`, and `attention_products`
multiplies.
"""

from collections.abc import Callable
from typing import Any

import jax

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.mosaic_gpu import (
    attention_forward,
    attention_gradients,
    block_products,
    product_sums,
    products,
    weight_gradients,
)
from swjax.kernels.mosaic_gpu.attention_forward import attention
from swjax.kernels.mosaic_gpu.attention_gradients import attention_backward
from swjax.kernels.mosaic_gpu.block_products import (
    block_weight_gradient,
    block_weight_gradient_group,
)
from swjax.kernels.mosaic_gpu.product_sums import matmul_sum
from swjax.kernels.mosaic_gpu.products import matmul
from swjax.kernels.mosaic_gpu.weight_gradients import weight_gradient, weight_gradient_group

__all__ = [
    "attention",
    "attention_backward",
    "block_weight_gradient",
    "block_weight_gradient_group",
    "matmul",
    "matmul_sum",
    "weight_gradient",
    "weight_gradient_group",
    "why_not",
]

# Each has the signature of its operation.
_WHY_NOT: dict[str, Callable[..., Unavailable | None]] = {
    "matmul": products.why_not,
    "matmul_sum": product_sums.why_not,
    "weight_gradient": weight_gradients.why_not,
    "weight_gradient_group": weight_gradients.why_not_group,
    "block_weight_gradient": block_products.why_not,
    "block_weight_gradient_group": block_products.why_not_group,
    "attention": attention_forward.why_not,
    "attention_backward": attention_gradients.why_not,
}


def why_not(operation: str, *arrays: Any, **options: Any) -> Unavailable | None:
    """Why these kernels cannot compute an operation on this GPU; None: they can.

    Args:
      operation: one of the functions above.
      *arrays, **options: its arguments.
    """
    capability = tiles.compute_capability()
    if capability != (9, 0):
        return Unavailable(
            f"is for Hopper (compute capability 9.0), and this GPU has {capability}: use 'triton'"
        )
    # Attention needs features of jax 0.11, and its kernels were compiled with jax 0.11 and 0.12 only.
    if operation.startswith("attention") and not (0, 11) <= jax.__version_info__[:2] <= (0, 12):
        version = jax.__version__
        return Unavailable(f"needs jax 0.11 or 0.12, and this is jax {version}: use 'triton'")
    return _WHY_NOT[operation](*arrays, **options)
