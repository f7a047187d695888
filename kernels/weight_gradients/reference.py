"""The specification of weight gradients in 16 bits."""

import jax
from jax import lax

from swjax.kernels.products.reference import dot


def weight_gradient(
    x: jax.Array, g: jax.Array, *, out_dtype: str, precision: lax.PrecisionLike = None
) -> jax.Array:
    """``xT g``, the product of a linear layer that SwitchBack keeps in 16 bits.

    Args:
      x: [tokens, k].
      g: [tokens, n], with the same floating dtype.
      out_dtype: dtype of the result; the sum is in fp32.
      precision: see `jax.lax.dot_general`.

    Returns:
      [k, n] in `out_dtype`.

    >>> import jax.numpy as jnp
    >>> weight_gradient(jnp.ones((3, 1)), jnp.ones((3, 2)), out_dtype="float32").tolist()
    [[3.0, 3.0]]
    """
    return dot(x, g, ((0,), (0,)), out_dtype=out_dtype, precision=precision)


def weight_gradient_group(
    x: jax.Array, gs: tuple[jax.Array, ...], *, out_dtype: str, precision: lax.PrecisionLike = None
) -> tuple[jax.Array, ...]:
    """``xT g`` for each g: the weight gradients of layers that share their input.

    Args:
      x: [tokens, k].
      gs: [tokens, n] each, with the same floating dtype.
      out_dtype, precision: see `weight_gradient`.

    Returns:
      [k, n] in `out_dtype` for each g.

    >>> import jax.numpy as jnp
    >>> x, g = jnp.ones((3, 1)), jnp.ones((3, 2))
    >>> [dw.tolist() for dw in weight_gradient_group(x, (g, 2 * g), out_dtype="float32")]
    [[[3.0, 3.0]], [[6.0, 6.0]]]
    """
    return tuple(weight_gradient(x, g, out_dtype=out_dtype, precision=precision) for g in gs)
