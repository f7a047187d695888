"""LayerNorm and GELU, forward and backward, each fused with the quantizer of its result."""

import math

import jax
import jax.numpy as jnp

from swjax.kernels.reference.numbers import to_float32
from swjax.kernels.reference.quantizers import QTensor, quantize, row_sum


def layer_norm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    *,
    epsilon: float,
    quantize_to: str | None = None,
    high_precision: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """LayerNorm over the last axis, ``gamma (x - mean) / sqrt(variance + epsilon) + beta``, in fp32.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      gamma, beta: [n], scale and offset of each feature.
      epsilon: added to the variance.
      quantize_to: dtype of the row-wise quantized result; None does not quantize.
      high_precision: whether to also return the result in the dtype of x.

    Returns:
      (result or None, quantized result or None). The quantizer reads the result rounded to the dtype of x.

    >>> y, q = layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.zeros(2), epsilon=0.0)
    >>> y.tolist(), q
    ([[-1.0, 1.0]], None)
    """
    centred, deviation = _moments(x, epsilon)
    gamma, beta = (_along_rows(t, x.ndim) for t in (gamma, beta))
    y = (centred * (gamma / deviation) + beta).astype(x.dtype)
    return _outputs(y, quantize_to, high_precision)


def layer_norm_backward(
    x: jax.Array,
    gamma: jax.Array,
    gradient: jax.Array | tuple[jax.Array, ...],
    residual: jax.Array | None = None,
    beta: jax.Array | None = None,
    *,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes the gradients of `layer_norm` from its input; mean and deviation are recomputed.

    Args:
      x: [..., n], input of the forward pass.
      gamma: [n].
      gradient: [..., n], gradient of the output; a tuple is summed.
      residual: [..., n], gradient of x along a residual connection, which is added to dx; or None.
      beta: [n], to also return the recomputed result of `layer_norm`; or None.
      epsilon: as in the forward pass.

    Returns:
      dx [..., n] in the dtype of x; dgamma and dbeta [n] in float32; the recomputed result, or None without
      beta.

    >>> x, gamma = jnp.array([[1.0, 3.0]]), jnp.ones(2)
    >>> layer_norm_backward(x, gamma, jnp.array([[1.0, 0.0]]), epsilon=0.0)[2].tolist()
    [1.0, 0.0]
    """
    gradients = gradient if isinstance(gradient, tuple) else (gradient,)
    centred, deviation = _moments(x, epsilon)
    normalized = centred / deviation
    total = sum(map(to_float32, gradients[1:]), to_float32(gradients[0]))
    v = total * _along_rows(gamma, x.ndim)
    slope = jnp.mean(v * normalized, axis=-1, keepdims=True)
    dx = (v - jnp.mean(v, axis=-1, keepdims=True) - normalized * slope) / deviation
    dx = dx if residual is None else dx + to_float32(residual)
    y = None if beta is None else layer_norm(x, gamma, beta, epsilon=epsilon)[0]
    return dx.astype(x.dtype), row_sum(total * normalized), row_sum(total), y


def _moments(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Returns the rows minus their mean, and their standard deviations."""
    exact = to_float32(x)
    centred = exact - jnp.mean(exact, axis=-1, keepdims=True)
    return centred, jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon)


def _along_rows(t: jax.Array, ndim: int) -> jax.Array:
    return t.astype(jnp.float32).reshape((1,) * (ndim - 1) + t.shape)


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
    return _outputs(y, quantize_to, high_precision)


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
    exact, gradient = to_float32(x), to_float32(gradient)
    y = gelu(x, approximate=approximate)[0] if recompute else None
    if approximate:
        _, vjp = jax.vjp(jax.nn.gelu, exact)
        (dx,) = vjp(gradient)
    else:
        density = jnp.exp(-0.5 * exact**2) * jnp.float32(1 / math.sqrt(2 * math.pi))
        dx = gradient * (jax.scipy.special.ndtr(exact) + exact * density)
    dx = dx.astype(x.dtype)
    return dx, _outputs(dx, quantize_to, False)[1], row_sum(dx), y


def _outputs(
    y: jax.Array, quantize_to: str | None, high_precision: bool
) -> tuple[jax.Array | None, QTensor | None]:
    q = quantize(y, (y.ndim - 1,), quantize_to) if quantize_to else None
    return y if high_precision else None, q
