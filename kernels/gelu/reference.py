"""The specification of GELU, forward and backward, each fused with the quantizer of its result."""

import math

import jax
import jax.numpy as jnp

from swjax.kernels.formats import QTensor, to_float32
from swjax.kernels.quantizers.reference import quantized_output, token_sum

# erfcx(z) / 2 is t = 1 / (1 + 0.38 z) times this polynomial in t, the highest power first: a minimax fit with
# relative error 1e-6. The kernels use it, because Triton and Pallas lack the complementary error function.
TAIL = (
    -0.06268340327314895,
    0.16792059162792555,
    -0.034805477355772395,
    0.12379693751587756,
    0.09034876746578992,
    0.10827743860128841,
    0.10714462882421476,
)


def gelu(
    x: jax.Array,
    *,
    approximate: bool = False,
    quantize_to: str | None = None,
    high_precision: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """GELU, ``x P(X < x)`` for a standard normal X, in fp32.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      approximate: whether to use the tanh form instead of the exact form.
      quantize_to, high_precision: see `layer_norm`.

    Returns:
      (result or None, quantized result or None).

    >>> gelu(jnp.array([[0.0, 100.0]]))[0].tolist()
    [[0.0, 100.0]]
    """
    y = jax.nn.gelu(to_float32(x), approximate=approximate).astype(x.dtype)
    return quantized_output(y, quantize_to, high_precision)


def gelu_backward(
    x: jax.Array,
    gradient: jax.Array,
    *,
    approximate: bool = False,
    quantize_to: str | None = None,
    recompute: bool = False,
) -> tuple[jax.Array, QTensor | None, jax.Array, jax.Array | None]:
    """Computes the gradient of `gelu` from its input, and quantizes and sums that gradient, in one pass.

    Args:
      x: [..., n], input of the forward pass.
      gradient: [..., n], gradient of the output.
      approximate: as in the forward pass.
      quantize_to: dtype of the row-wise quantized dx; None does not quantize.
      recompute: whether to also return the recomputed result of `gelu`.

    Returns:
      dx [..., n] in the dtype of x; dx quantized, or None; the sum of dx over all axes except the last, [n]
      in float32, which is the gradient of the preceding layer's bias; the recomputed result of `gelu`, or
      None.

    >>> dx, _, total, _ = gelu_backward(jnp.array([[0.0, 100.0]]), jnp.ones((1, 2)))
    >>> dx.tolist(), total.tolist()
    ([[0.5, 1.0]], [0.5, 1.0])
    """
    y = gelu(x, approximate=approximate)[0] if recompute else None
    dx = gelu_vjp(to_float32(x), to_float32(gradient), approximate).astype(x.dtype)
    return dx, quantized_output(dx, quantize_to, False)[1], token_sum(dx), y


def gelu_vjp(x: jax.Array, gradient: jax.Array, approximate: bool) -> jax.Array:
    """The gradient times the derivative of GELU at x, all in fp32."""
    if approximate:
        _, vjp = jax.vjp(jax.nn.gelu, x)
        return vjp(gradient)[0]
    density = jnp.exp(-0.5 * x**2) * jnp.float32(1 / math.sqrt(2 * math.pi))
    return gradient * (jax.scipy.special.ndtr(x) + x * density)
