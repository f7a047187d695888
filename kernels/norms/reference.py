"""The specification of LayerNorm and RMSNorm, forward and backward, fused with the results' quantizer."""

import jax
import jax.numpy as jnp
from jax import lax

from swjax.kernels.formats import QTensor, to_float32
from swjax.kernels.quantizers.reference import quantized_output, token_sum


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
    return quantized_output(y, quantize_to, high_precision)


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
    centred, deviation = _moments(x, epsilon)
    normalized = centred / deviation
    total = _sum(gradient)
    v = total * _along_rows(gamma, x.ndim)
    slope = jnp.mean(v * normalized, axis=-1, keepdims=True)
    dx = (v - jnp.mean(v, axis=-1, keepdims=True) - normalized * slope) / deviation
    dx = dx if residual is None else dx + to_float32(residual)
    y = None if beta is None else layer_norm(x, gamma, beta, epsilon=epsilon)[0]
    return dx.astype(x.dtype), token_sum(total * normalized), token_sum(total), y


def rms_norm(
    x: jax.Array,
    gamma: jax.Array,
    *,
    epsilon: float,
    offset: float = 0.0,
    quantize_to: str | None = None,
    high_precision: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """RMSNorm over the last axis, ``x (rsqrt(mean(x**2) + epsilon) (offset + gamma))``, in fp32.

    The operations have the order of Flax's RMSNorm, so the result has the same bits.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      gamma: [n], scale of each feature.
      epsilon: added to the mean square.
      offset: added to the scale: 1 in Gemma.
      quantize_to, high_precision: see `layer_norm`.

    Returns:
      (result or None, quantized result or None). The quantizer reads the result rounded to the dtype of x.

    >>> rms_norm(jnp.array([[0.0, 0.0, 0.0, 4.0]]), jnp.ones(4), epsilon=0.0)[0].tolist()
    [[0.0, 0.0, 0.0, 2.0]]
    """
    exact, inverse = _inverse_rms(x, epsilon)
    y = (exact * (inverse * (offset + _along_rows(gamma, x.ndim)))).astype(x.dtype)
    return quantized_output(y, quantize_to, high_precision)


def rms_norm_backward(
    x: jax.Array,
    gamma: jax.Array,
    gradient: jax.Array | tuple[jax.Array, ...],
    residual: jax.Array | None = None,
    *,
    epsilon: float,
    offset: float = 0.0,
    recompute: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Computes the gradients of `rms_norm` from its input; the root mean square is recomputed.

    Args:
      x, gamma, epsilon, offset: as in the forward pass.
      gradient, residual: see `layer_norm_backward`.
      recompute: whether to also return the recomputed result of `rms_norm`.

    Returns:
      dx [..., n] in the dtype of x; dgamma [n] in float32; the recomputed result, or None.

    >>> x, gamma = jnp.array([[0.0, 0.0, 0.0, 4.0]]), jnp.ones(4)
    >>> rms_norm_backward(x, gamma, jnp.ones((1, 4)), epsilon=0.0)[1].tolist()
    [0.0, 0.0, 0.0, 2.0]
    """
    exact, inverse = _inverse_rms(x, epsilon)
    normalized, total = exact * inverse, _sum(gradient)
    v = total * (offset + _along_rows(gamma, x.ndim))
    dx = (v - normalized * jnp.mean(v * normalized, axis=-1, keepdims=True)) * inverse
    dx = dx if residual is None else dx + to_float32(residual)
    y = rms_norm(x, gamma, epsilon=epsilon, offset=offset)[0] if recompute else None
    return dx.astype(x.dtype), token_sum(total * normalized), y


def _sum(gradient: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
    first, *others = gradient if isinstance(gradient, tuple) else (gradient,)
    return sum(map(to_float32, others), to_float32(first))


def _inverse_rms(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Returns the rows in fp32, and the reciprocals of their root mean squares."""
    exact = to_float32(x)
    return exact, lax.rsqrt(jnp.mean(lax.square(exact), axis=-1, keepdims=True) + epsilon)


def _moments(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Returns the rows minus their mean, and their standard deviations."""
    exact = to_float32(x)
    centred = exact - jnp.mean(exact, axis=-1, keepdims=True)
    return centred, jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon)


def _along_rows(t: jax.Array, ndim: int) -> jax.Array:
    return t.astype(jnp.float32).reshape((1,) * (ndim - 1) + t.shape)
