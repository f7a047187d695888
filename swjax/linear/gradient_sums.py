"""Sums of weight gradients over devices, in the dtype of `Layout.reduce_dtype`.

In 8 bits no device adds 8-bit numbers. Each device quantizes the rows of its gradient, with a scale for each
row, and sends each part of the gradient to the device that sums this part, in float32. So nothing overflows,
and the error of a sum does not grow with the number of devices. An all-reduce then quantizes the sums once
more, and gathers them. It moves half of the bytes of one in 16 bits, and a quarter of those in float32.

References:
  Peng et al., "FP8-LM", 2023, https://arxiv.org/abs/2310.18313: 8-bit gradients with scales for each tensor.
  Wang et al., "ZeRO++", 2023, https://arxiv.org/abs/2306.10209: sums of quantized gradients by an all-to-all.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from swjax.kernels import dispatch
from swjax.kernels.reference import QTensor, dequantize

EIGHT_BITS = ("int8", "float8_e4m3fn")


def all_reduce(x: jax.Array, axes: tuple[str, ...], dtype: str | None) -> jax.Array:
    """Sums x [..., n] over the devices along mesh axes.

    Args:
      x: a gradient, or a stack of gradients.
      axes: mesh axes of the surrounding `jax.shard_map`.
      dtype: of what devices exchange; None: that of x.

    Returns:
      [..., n], float32 if the dtype has 8 bits, otherwise of the dtype.
    """
    if dtype not in EIGHT_BITS:
        return lax.psum(x.astype(dtype or x.dtype), axes)
    devices, rows = lax.axis_size(axes), math.prod(x.shape[:-1])
    parts = jnp.pad(x.reshape(rows, -1), ((0, -rows % devices), (0, 0)))
    total = _sum_of_parts(parts.reshape(devices, -1, x.shape[-1]), axes, dtype)
    q = dispatch.run("quantize", total, dtype=dtype)
    gathered = _exchange(q, lambda array: lax.all_gather(array, axes, tiled=True))
    return dequantize(gathered)[:rows].reshape(x.shape)


def reduce_scatter(
    x: jax.Array, axes: tuple[str, ...], axis: int, dtype: str | None = None
) -> jax.Array:
    """Sums x over the devices along mesh axes, and returns this device's part along `axis`.

    Args:
      x: [k, n], or [e, k, n] of experts.
      axes, dtype: see `all_reduce`.
      axis: of x; its devices must divide it.
    """
    # XLA for GPUs scatters along the outermost dimension in memory. Along another dimension it transposes
    # operand and result element by element; this function copies whole segments of rows instead.
    parts = x.reshape(*x.shape[:axis], lax.axis_size(axes), -1, *x.shape[axis + 1 :])
    parts = jnp.moveaxis(parts, axis, 0)
    if dtype in EIGHT_BITS:
        return _sum_of_parts(parts, axes, dtype)
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        # JAX fails to lower a reduce-scatter inside a `jax.vmap` over an explicit axis.
        size = x.shape[axis] // lax.axis_size(axes)
        start = lax.axis_index(axes) * size
        return lax.dynamic_slice_in_dim(lax.psum(x, axes), start, size, axis)
    return lax.psum_scatter(parts, axes)


def _sum_of_parts(parts: jax.Array, axes: tuple[str, ...], dtype: str) -> jax.Array:
    """Sums parts [devices, rows, n] over devices in 8 bits: this device's part, [rows, n] float32."""
    q = dispatch.run("quantize", parts, dtype=dtype)
    received = _exchange(q, lambda array: lax.all_to_all(array, axes, 0, 0))
    return jnp.sum(dequantize(received), 0)


def _exchange(q: QTensor, collective) -> QTensor:
    """Applies a collective to values and scales. fp8 is sent as bytes: see `sharding.gather`."""
    values = collective(lax.bitcast_convert_type(q.values, jnp.int8))
    return QTensor(lax.bitcast_convert_type(values, q.values.dtype), collective(q.scale))
