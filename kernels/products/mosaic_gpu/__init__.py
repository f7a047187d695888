"""Quantized products in Pallas, for Hopper: one product, and the sum of several."""

from swjax.kernels.products.mosaic_gpu import product, product_sum
from swjax.kernels.products.mosaic_gpu.product import matmul
from swjax.kernels.products.mosaic_gpu.product_sum import matmul_sum

__all__ = ["WHY_NOT", "matmul", "matmul_sum"]

WHY_NOT = {"matmul": product.why_not, "matmul_sum": product_sum.why_not}
