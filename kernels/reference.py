"""What every kernel computes, in jax.numpy: the specification, and the XLA path on every platform.

A quantized array is a ``QTensor``: narrow ``values`` and an fp32 ``scale`` with ``x ~ values * scale``.
Scales are found over an operand's *contracted* axes, or over the whole tensor, so that they factor out
of the product: ``(a . b)[i, j] = scale_a[i] * scale_b[j] * sum_k a.values[i, k] * b.values[k, j]``.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# An absolute maximum below this counts as this: an all-zero vector gets a positive scale, neither the scale
# nor its reciprocal leaves the normal range of fp32, and subnormals of fp32, which some platforms read as
# zeros, round to zero in every quantized type.
SMALLEST_ABSMAX = 2.0**-92

# The largest magnitude of each quantized type: symmetric int8 and the OCP fp8 formats.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

# Their reciprocals, rounded to fp32.
INVERSE = {name: float(np.float32(1.0 / largest)) for name, largest in LARGEST.items()}

# Stored bits of the mantissa, and the exponent of the smallest normal value.
FP8_MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
FP8_SMALLEST_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14}


class QTensor(NamedTuple):
    """A quantized array, ``values * scale``.

    Attributes:
      values: int8, float8_e4m3fn or float8_e5m2, of the shape of the array it stands for.
      scale: fp32, of the same rank; length 1 along every axis that shares one scale.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def T(self) -> "QTensor":
        """The transpose, of a matrix."""
        return QTensor(self.values.T, self.scale.T)


def quantize(
    x: jax.Array, axes: tuple[int, ...] = (-1,), dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """Scales `x` so that its absolute maximum over `axes` is the largest value of `dtype`, and rounds.

    ``scale = max(absmax(x), 2**-92) / largest``, ``values = round(x / scale)``, ties to even. Zeros stay
    zeros. A non-finite element makes its scale non-finite, and so every product with it. The values are the
    same on every platform and in every implementation.

    Args:
      x: [...] float16, bfloat16 or float32, of any rank and size, empty included.
      axes: the axes one scale spans: the last one for row-wise, all of them for tensor-wise.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".
      transpose: return the transpose, of a matrix x.

    Returns:
      A QTensor; its scale has length 1 along `axes`.

    >>> q = quantize(jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    >>> q.values.tolist()
    [[64, -127, 32], [0, 0, 0]]
    """
    return quantize_by(x, absolute_maximum(x, axes), dtype, transpose=transpose)


def quantize_by(
    x: jax.Array, absmax: jax.Array, dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """`quantize` with absolute maxima that are known: those of an `x` that lies on several devices.

    Args:
      x: [...] float16, bfloat16 or float32.
      absmax: float32 of the rank of x, of length 1 along the axes one scale spans.
      dtype, transpose: as for `quantize`.

    Returns:
      A QTensor.

    >>> quantize_by(jnp.array([[1.0, -2.0]]), jnp.array([[4.0]])).values.tolist()
    [[32, -64]]
    """
    absmax = jnp.maximum(absmax, SMALLEST_ABSMAX)
    # One division a scale, not one an element.
    scaled = _widen(x) * divide(LARGEST[dtype], absmax)
    scaled = jnp.round(scaled) if dtype == "int8" else round_to_fp8(scaled, dtype)
    q = QTensor(scaled.astype(dtype), scale_of(absmax, dtype))
    return q.T if transpose else q


def quantize_both(x: jax.Array, absmax: jax.Array, dtype: str = "int8") -> tuple[QTensor, QTensor]:
    """A weight as its two products read it: quantized by one scale, as it lies and transposed, in one pass.

    Args:
      x: [k, n] float16, bfloat16 or float32.
      absmax: [p] float32: the absolute maxima of p parts of x, the largest of which counts.
      dtype: as for `quantize`.

    Returns:
      QTensors with values [k, n] and [n, k], and the same scale [1, 1].
    """
    q = quantize_by(x, absolute_maximum(absmax[None], (0, 1)), dtype)
    return q, q.T


def quantize_and_sum(x: jax.Array, dtype: str = "int8") -> tuple[QTensor, jax.Array]:
    """`x` quantized row-wise, and the sum of its rows: a gradient, and that of a bias, read once.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      dtype: as for `quantize`.

    Returns:
      The QTensor, and the sum over all axes but the last: [n] float32.
    """
    return quantize(x, (x.ndim - 1,), dtype), _row_sum(x)


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(_widen(x), axis=tuple(range(x.ndim - 1)))


def round_to_fp8(x: jax.Array, dtype: str) -> jax.Array:
    """`x` rounded to the spacing of an fp8 format, ties to even, as fp32.

    A cast to fp8 and back does the same, but XLA for GPUs removes such pairs (it may keep more precision
    than asked for): after this rounding the cast changes nothing.

    Args:
      x: [...] float32. Beyond the largest value of the format the result is none of its values.
      dtype: "float8_e4m3fn" or "float8_e5m2".

    >>> round_to_fp8(jnp.array([0.3, 17.1, 0.001]), "float8_e4m3fn").tolist()
    [0.3125, 18.0, 0.001953125]
    """
    exponent_bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    power = lax.bitcast_convert_type(exponent_bits, jnp.float32)  # 2 ** floor(log2 |x|), or 0
    power = jnp.maximum(power, 2.0 ** FP8_SMALLEST_EXPONENT[dtype])  # subnormals: a fixed spacing
    spacing = power * 2.0 ** -FP8_MANTISSA_BITS[dtype]
    return jnp.where(jnp.isfinite(x), jnp.round(x / spacing) * spacing, x)


def dequantize(q: QTensor, dtype: str = "float32") -> jax.Array:
    """The array a QTensor stands for: ``values * scale``, in `dtype`."""
    return (q.values.astype(jnp.float32) * q.scale).astype(dtype)


def dot(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    precision=None,
) -> jax.Array:
    """The product that is not quantized, plus bias: what a linear layer of Flax computes.

    Args:
      a, b: two arrays of one floating dtype.
      contract: the axes of `a` and of `b` that are summed over; the others become the result's axes,
        those of `a` first.
      bias: [n] for the last axis of the result, or None.
      out_dtype: dtype of the result.
      precision: as for `jax.lax.dot_general`.
    """
    product = lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=out_dtype
    )
    return _add_bias(product, bias)


def matmul(
    a: QTensor,
    b: QTensor,
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
) -> jax.Array:
    """The product of two quantized arrays: narrow arithmetic, then scales, bias and `out_dtype`.

    ``a bT = (sum_k a.values * b.values) * (a.scale * b.scale) + bias``. int8 values are multiplied as int8
    and summed in int32. fp8 values are multiplied exactly and summed in fp32.

    Args:
      a: values [..., k]; scale [..., 1], or of one element.
      b: values [n, k]; scale [n, 1], or of one element.
      bias: [n], or None.
      out_dtype: "float32", "bfloat16" or "float16".
      contract: the axes of a and b that are summed over. -1 is how tensor cores read 8-bit matrices: an
        operand contracted along 0, a matrix [k, ...], is transposed first. XLA for CPUs takes either,
        but multiplies in int32, five times slower, what was transposed before.

    Returns:
      [..., n] in `out_dtype`.
    """
    axes = tuple(axis % q.values.ndim for axis, q in zip(contract, (a, b)))
    numbers = (tuple((axis,) for axis in axes), ((), ()))
    if a.values.dtype == jnp.int8:
        accumulator = lax.dot_general(
            a.values, b.values, numbers, preferred_element_type=jnp.int32
        ).astype(jnp.float32)
    else:
        # Every fp8 value is exact in bf16 and in fp32; bf16 products are slow on CPUs.
        wide = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        accumulator = lax.dot_general(
            a.values.astype(wide),
            b.values.astype(wide),
            numbers,
            preferred_element_type=jnp.float32,
        )
    scale_a = jnp.expand_dims(lax.squeeze(a.scale, [axes[0]]), -1)
    scale_b = b.scale.reshape((1,) * (scale_a.ndim - 1) + (-1,))
    return _add_bias(accumulator * (scale_a * scale_b), bias).astype(out_dtype)


def weight_gradient(x: jax.Array, g: jax.Array, *, out_dtype: str, precision=None) -> jax.Array:
    """xT g, the product of a linear layer that SwitchBack keeps in 16 bits.

    Args:
      x: [tokens, k]; g: [tokens, n], of the same floating dtype.
      out_dtype: dtype of the result; the sum is in fp32.
      precision: as for `jax.lax.dot_general`.

    Returns:
      [k, n] in `out_dtype`.
    """
    return dot(x, g, ((0,), (0,)), out_dtype=out_dtype, precision=precision)


def layer_norm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    *,
    epsilon: float,
    quantize_to: str | None = None,
    wide: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """LayerNorm over the last axis, ``gamma (x - mean) / sqrt(variance + epsilon) + beta``, in fp32.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      gamma, beta: [n].
      epsilon: added to the variance.
      quantize_to: a dtype to quantize the result to, row-wise; None: not quantized.
      wide: return the result in the dtype of x.

    Returns:
      (the result or None, the result quantized or None). What is quantized is the result rounded to the
      dtype of x.
    """
    centred, deviation = _moments(x, epsilon)
    gamma, beta = (_along_rows(t, x.ndim) for t in (gamma, beta))
    y = (centred * (gamma / deviation) + beta).astype(x.dtype)
    return _outputs(y, quantize_to, wide)


def layer_norm_backward(
    x: jax.Array,
    gamma: jax.Array,
    gradient: jax.Array | tuple[jax.Array, ...],
    residual: jax.Array | None = None,
    beta: jax.Array | None = None,
    *,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients of `layer_norm` from its input alone: mean and deviation are computed again.

    Args:
      x: [..., n], the input; gamma: [n].
      gradient: [..., n], of the output; a tuple stands for its sum.
      residual: [..., n] or None: the gradient that x gets from elsewhere, added to dx.
      beta: [n], for the result of `layer_norm` again; or None.
      epsilon: as in the forward pass.

    Returns:
      dx [..., n] in the dtype of x; dgamma and dbeta [n] in float32; with beta the result, else None.
    """
    gradients = gradient if isinstance(gradient, tuple) else (gradient,)
    centred, deviation = _moments(x, epsilon)
    normalized, wide = centred / deviation, sum(map(_widen, gradients[1:]), _widen(gradients[0]))
    v = wide * _along_rows(gamma, x.ndim)
    slope = jnp.mean(v * normalized, axis=-1, keepdims=True)
    dx = (v - jnp.mean(v, axis=-1, keepdims=True) - normalized * slope) / deviation
    dx = dx if residual is None else dx + _widen(residual)
    y = None if beta is None else layer_norm(x, gamma, beta, epsilon=epsilon)[0]
    return dx.astype(x.dtype), _row_sum(wide * normalized), _row_sum(wide), y


def _moments(x, epsilon):
    wide = _widen(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return centred, jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon)


def _along_rows(t, ndim):
    return t.astype(jnp.float32).reshape((1,) * (ndim - 1) + t.shape)


def gelu(
    x: jax.Array, *, approximate: bool = False, quantize_to: str | None = None, wide: bool = True
) -> tuple[jax.Array | None, QTensor | None]:
    """GELU, ``x P(X < x)`` of a normal X, in fp32.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      approximate: the tanh form in place of the exact one.
      quantize_to, wide: as for `layer_norm`.

    Returns:
      (the result or None, the result quantized or None).
    """
    y = jax.nn.gelu(_widen(x), approximate=approximate).astype(x.dtype)
    return _outputs(y, quantize_to, wide)


def gelu_backward(
    x: jax.Array,
    gradient: jax.Array,
    *,
    approximate: bool = False,
    quantize_to: str | None = None,
    again: bool = False,
) -> tuple[jax.Array, QTensor | None, jax.Array, jax.Array | None]:
    """The gradient of `gelu`, from its input; what the linear layer before it needs, in one pass.

    Args:
      x: [..., n], the input.
      gradient: [..., n], of the output.
      approximate: as in the forward pass.
      quantize_to: a dtype to quantize dx to, row-wise; None: not quantized.
      again: return the result of `gelu` again.

    Returns:
      dx [..., n] in the dtype of x; dx quantized or None; the sum of dx over all axes but the last, [n] in
      float32: the gradient of that layer's bias; the result of `gelu` or None.
    """
    wide, gradient = _widen(x), _widen(gradient)
    y = gelu(x, approximate=approximate)[0] if again else None
    if approximate:
        _, vjp = jax.vjp(jax.nn.gelu, wide)
        (dx,) = vjp(gradient)
    else:
        density = jnp.exp(-0.5 * wide**2) * jnp.float32(1 / math.sqrt(2 * math.pi))
        dx = gradient * (jax.scipy.special.ndtr(wide) + wide * density)
    dx = dx.astype(x.dtype)
    return dx, _outputs(dx, quantize_to, False)[1], _row_sum(dx), y


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of every head.

    ``s = q k^T / sqrt(d)``, ``lse = log sum_keys exp s``, ``out = exp(s - lse) v``.

    Args:
      q, k, v: [b, t, h, d].
      causal: a query sees the keys up to its own position only.

    Returns:
      (out [b, t, h, d] in the dtype of q, lse float32 [b, h, t]).

    >>> q = jnp.zeros((1, 2, 1, 4))
    >>> attention(q, q, jnp.eye(2, 4)[None, :, None])[0][0, 0, 0].tolist()
    [0.5, 0.5, 0.0, 0.0]
    """
    scores = _scores(q, k, causal)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return _heads_product("bhqk,bkhd->bqhd", weights, v).astype(q.dtype), lse


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    gradient: jax.Array,
    *,
    causal: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of `attention`.

    Args:
      q, k, v, out, lse: its arguments and results.
      gradient: [b, t, h, d], of out.

    Returns:
      (dq, dk, dv), each as what it is the gradient of.
    """
    weights = jnp.exp(_scores(q, k, causal) - lse[..., None])
    delta = jnp.einsum("bqhd,bqhd->bhq", _widen(out), _widen(gradient))
    slopes = weights * (_heads_product("bqhd,bkhd->bhqk", gradient, v) - delta[..., None])
    slopes *= jnp.float32(q.shape[-1] ** -0.5)
    dq = _heads_product("bhqk,bkhd->bqhd", slopes, k)
    dk = _heads_product("bhqk,bqhd->bkhd", slopes, q)
    dv = _heads_product("bhqk,bqhd->bkhd", weights, gradient)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _scores(q, k, causal):
    scores = _heads_product("bqhd,bkhd->bhqk", q, k) * jnp.float32(q.shape[-1] ** -0.5)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.where(seen, scores, -jnp.inf) if causal else scores


def _heads_product(subscripts, a, b):
    return jnp.einsum(subscripts, _widen(a), _widen(b), precision="highest")


def _outputs(y, quantize_to, wide):
    q = quantize(y, (y.ndim - 1,), quantize_to) if quantize_to else None
    return y if wide else None, q


def _add_bias(product: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is None:
        return product
    return product + bias.astype(product.dtype).reshape((1,) * (product.ndim - 1) + bias.shape)


def absolute_maximum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """max |x| over `axes` in fp32, its rank kept; 0 for an empty x, NaN where x has one."""
    # As integers, whose order is that of positive floats with NaN on top: XLA for CPUs loses NaN in a
    # maximum of floats, and a gradient of NaN would become one of zeros.
    bits = lax.bitcast_convert_type(jnp.abs(_widen(x)), jnp.int32)
    largest = jnp.max(bits, axis=axes, keepdims=True, initial=0)
    return lax.bitcast_convert_type(largest, jnp.float32)


def _widen(x: jax.Array) -> jax.Array:
    """x in fp32. XLA for GPUs may skip a rounding to 16 bits just before: here it is made up for."""
    wide = x.astype(jnp.float32)
    if x.dtype == jnp.float32:
        return wide
    kind = jnp.finfo(x.dtype)
    rounded = lax.reduce_precision(wide, kind.nexp, kind.nmant)
    if x.dtype == jnp.float16:  # whose subnormals reduce_precision takes for zero
        subnormal = jnp.abs(wide) < 2.0**-14
        rounded = jnp.where(subnormal, jnp.round(wide * 2.0**24) * 2.0**-24, rounded)
    return rounded


def scale_of(absmax: jax.Array, dtype: str) -> jax.Array:
    """absmax / largest, as a multiplication: XLA rewrites a division by a constant, others do not."""
    return absmax * jnp.float32(INVERSE[dtype])


def divide(x: float, y: jax.Array) -> jax.Array:
    """x / y in fp32, correctly rounded also where the hardware's division is not (XLA on GPUs).

    One Newton step on an exact remainder: quotient and divisor are cut in halves whose products are exact. A
    huge divisor is made smaller first, for GPUs flush the halves of its quotient to zero.
    """
    small = jnp.where(y < 2.0**64, jnp.float32(1), jnp.float32(2.0**-64))
    y = y * small
    quotient = x / y
    high, low = _halves(quotient)
    y_high, y_low = _halves(y)
    remainder = ((x - high * y_high) - high * y_low - low * y_high) - low * y_low
    return (quotient + remainder / y) * small


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as a sum of two numbers of 12 significant bits."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high
