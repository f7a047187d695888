"""Products of two matrices: quantized, or in the dtype of the operands."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from swjax.kernels import targets
from swjax.kernels.formats import QTensor, to_float32


def dot(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """A product without quantization, plus bias, as in a linear layer of Flax.

    Args:
      a, b: two arrays with the same floating dtype.
      contract: the axes of `a` and of `b` to sum over; the result has the remaining axes, those of `a` first.
      bias: [n], added along the last axis of the result, or None.
      out_dtype: dtype of the result.
      precision: see `jax.lax.dot_general`.

    Returns:
      The product in `out_dtype`.

    >>> a, b = jnp.array([[1.0, 2.0]]), jnp.array([[3.0], [4.0]])
    >>> dot(a, b, ((1,), (0,)), jnp.ones(1), out_dtype="float32").tolist()
    [[12.0]]
    """
    product = lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=out_dtype
    )
    return _add_bias(product, bias)


def matmul(
    a: QTensor,
    b: QTensor,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
) -> jax.Array:
    """The product of two quantized arrays: int8 or fp8 products, then scales, sums and `out_dtype`.

    ``a bT = (sum_k a.values * b.values) * (a.scale * b.scale) + bias + addend``. int8 values are multiplied
    as int8 and summed in int32, which may overflow if k > 133,144. fp8 values are multiplied exactly and
    summed in fp32, and so are bfloat16 and float32 values, those of emulated formats.

    Args:
      a: values [..., k]; scale [..., 1], or with one element.
      b: values [n, k]; scale [n, 1], or with one element.
      bias: [n], or None.
      addend: [..., n], or None; an array to add to the result, such as a residual stream.
      out_dtype: "float32", "bfloat16" or "float16".
      contract: the axes of a and b to sum over. Tensor cores read 8-bit matrices along -1, so an operand [k,
        ...] contracted along 0 is transposed first. XLA for CPUs supports both, but multiplies a previously
        transposed operand in int32, five times slower.

    Returns:
      [..., n] in `out_dtype`.

    >>> one = jnp.ones((1, 1))
    >>> a = QTensor(jnp.array([[100, 100]], jnp.int8), one)
    >>> matmul(a, a, out_dtype="float32").tolist()
    [[20000.0]]
    """
    axis_a, axis_b = contract[0] % a.values.ndim, contract[1] % b.values.ndim
    dimension_numbers = (((axis_a,), (axis_b,)), ((), ()))
    if a.values.dtype == jnp.int8:
        accumulator = lax.dot_general(
            a.values, b.values, dimension_numbers, preferred_element_type=jnp.int32
        ).astype(jnp.float32)
    else:
        # Every fp8 value is exact in bf16 and in fp32; bf16 products are slow on CPUs.
        whole = jnp.float32 in (a.values.dtype, b.values.dtype)
        exact = jnp.float32 if whole or targets.platform() == "cpu" else jnp.bfloat16
        accumulator = lax.dot_general(
            a.values.astype(exact),
            b.values.astype(exact),
            dimension_numbers,
            precision="highest" if whole else None,
            preferred_element_type=jnp.float32,
        )
    scale_a = jnp.expand_dims(lax.squeeze(a.scale, [axis_a]), -1)
    scale_b = b.scale.reshape((1,) * (scale_a.ndim - 1) + (-1,))
    y = _add_bias(accumulator * (scale_a * scale_b), bias)
    return (y if addend is None else y + to_float32(addend)).astype(out_dtype)


def matmul_sum(
    a: tuple[QTensor, ...],
    b: tuple[QTensor, ...],
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
) -> jax.Array:
    """The sum of the products ``a[i] b[i]T``, such as the input gradient of layers that share their input.

    Args:
      a: the left operands, see `matmul`.
      b: the right operands, one for each left operand.
      out_dtype: dtype of the result. The sum is in float32.
      contract: the axes to sum over, see `matmul`.

    Returns:
      [..., n] in `out_dtype`.

    >>> one = jnp.ones((1, 1))
    >>> a = QTensor(jnp.array([[100, 100]], jnp.int8), one)
    >>> matmul_sum((a, a), (a, a), out_dtype="float32").tolist()
    [[40000.0]]
    """
    ys = (matmul(*pair, out_dtype="float32", contract=contract) for pair in zip(a, b, strict=True))
    return functools.reduce(jnp.add, ys).astype(out_dtype)


def _add_bias(product: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is None:
        return product
    return product + bias.astype(product.dtype).reshape((1,) * (product.ndim - 1) + bias.shape)
