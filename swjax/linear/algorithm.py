"""Algorithm 1 of the SwitchBack paper and nothing else: the specification of `swjax.switchback`.

It has no sharding, prologue or bias, and only one weight and one recipe. The other modules of this folder
compute the same values faster and in more cases; tests compare every implementation with this one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from swjax.kernels.reference import QTensor, quantize


@jax.custom_vjp
def algorithm_1(x: jax.Array, w: jax.Array) -> jax.Array:
    """``y = x w`` with int8 products for y and dx, and a product in the dtype of x for dw: the switch back.

    Row-wise quantization has one scale per row, tensor-wise quantization one scale per matrix::

        x_q, s_x = rowwise(x)       x_q = round(127 x / absmax(x)), s_x = absmax(x) / 127
        w_q, s_w = tensorwise(w)
        y  = int32(x_q w_q)  s_x s_w

        g_q, s_g = rowwise(g)       g is the gradient of y
        dx = int32(g_q w_qT) s_g s_w
        dw = xT g

    Args:
      x: [b, k] float16, bfloat16 or float32.
      w: [k, n], in any of these dtypes.

    Returns:
      y: [b, n] in the dtype of x. The gradients dx and dw have the dtypes of x and w.

    >>> x, w, g = (jnp.array(rows) for rows in ([[127.0, -2.0]], [[127.0], [3.0]], [[127.0]]))
    >>> y, vjp = jax.vjp(algorithm_1, x, w)
    >>> dx, dw = vjp(g)
    >>> y.tolist(), dx.tolist(), dw.tolist()
    ([[16123.0]], [[16129.0, 381.0]], [[16129.0], [-254.0]])

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
      NeurIPS 2023, https://arxiv.org/abs/2304.13013, Algorithm 1.
    """
    return _forward(x, w)[0]


def _forward(x, w):
    y = _int8_product(_rowwise(x), _tensorwise(w))
    return y.astype(x.dtype), (x, w)


def _backward(saved, g):
    x, w = saved
    dx = _int8_product(_rowwise(g), _tensorwise(w).T)
    dw = lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=w.dtype)
    return dx.astype(x.dtype), dw


algorithm_1.defvjp(_forward, _backward)


def _rowwise(x) -> QTensor:
    return quantize(x, axes=(1,), dtype="int8")


def _tensorwise(w) -> QTensor:
    return quantize(w, axes=(0, 1), dtype="int8")


def _int8_product(a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies [m, k] x [k, n] as int8, sums in int32, scales in float32."""
    total = jnp.matmul(a.values, b.values, preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * (a.scale * b.scale)
