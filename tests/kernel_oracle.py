"""Every operation of `swjax.kernels` in NumPy: quantizers in fp32, bit for bit, all else in float64.

Written from the documented formulas, independently of `reference.py`: no code is shared with it.
"""

import ml_dtypes  # noqa: F401  # makes NumPy know the names of bfloat16 and fp8
import numpy as np
from scipy.special import expit, ndtr

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}


def quantize(x, axes=(-1,), dtype="int8", transpose=False):
    """Returns (values, scale); every implementation must give the same bits."""
    x, largest = np.asarray(x).astype(np.float32), np.float32(LARGEST[dtype])
    absmax = np.max(np.abs(x), axis=axes, keepdims=True, initial=np.float32(2.0**-92))
    scaled = x * (largest / absmax)
    values = (np.rint(scaled) if dtype == "int8" else scaled).astype(dtype)
    scale = absmax * (np.float32(1) / largest)
    return (values.T, scale.T) if transpose else (values, scale)


def quantize_blocks(x, axis, square=False):
    """Returns e4m3 values and the scales of blocks of 128 along an axis of a matrix, with that axis last."""
    x = np.asarray(x).astype(np.float32)
    x = x if axis == -1 else x.T
    blocks = x.reshape(-1, 128 if square else 1, x.shape[1] // 128, 128)
    values, scales = quantize(blocks, (1, 3), "float8_e4m3fn")
    return values.reshape(x.shape), scales[:, 0, :, 0]


def block_matmul(a, b, bias=None, addend=None):
    """Returns a b^T + bias + addend; a and b are pairs (values, scales of blocks of 128)."""
    pairs = []
    for values, scales in (a, b):
        scales = np.repeat(wide(scales), 128, 1)
        scales = np.repeat(scales, len(values) // len(scales), 0)
        pairs.append((wide(values) * scales, np.ones((1, 1))))
    return matmul(*pairs, bias, addend)


def matmul(a, b, bias=None, addend=None):
    """Returns a b^T + bias + addend; a and b are pairs (values, scale)."""
    (a, a_scale), (b, b_scale) = ((wide(values), wide(scale)) for values, scale in (a, b))
    y = (a @ b.T) * (a_scale * b_scale.reshape(-1))
    return y + sum(wide(term) for term in (bias, addend) if term is not None)


def weight_gradient(x, g):
    return wide(x).T @ wide(g)


def quantize_and_sum(x):
    return None, column_sums(x)


def layer_norm(x, gamma, beta, *, epsilon):
    normalized, _ = _normalize(x, epsilon)
    return normalized * wide(gamma) + wide(beta), None


def layer_norm_backward(x, gamma, gradient, *, epsilon):
    normalized, deviation = _normalize(x, epsilon)
    gradient = wide(gradient)
    v = gradient * wide(gamma)
    along = np.mean(v * normalized, -1, keepdims=True)
    dx = (v - np.mean(v, -1, keepdims=True) - along * normalized) / deviation
    return dx, column_sums(gradient * normalized), column_sums(gradient)


def rms_norm(x, gamma, *, epsilon, offset=0.0):
    x = wide(x)
    return x / _rms(x, epsilon) * (offset + wide(gamma)), None


def rms_norm_backward(x, gamma, gradient, *, epsilon, offset=0.0):
    x, gradient = wide(x), wide(gradient)
    rms = _rms(x, epsilon)
    v = gradient * (offset + wide(gamma))
    dx = v / rms - x * np.mean(v * x, -1, keepdims=True) / rms**3
    return dx, column_sums(gradient * x / rms)


def _rms(x, epsilon):
    return np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon)


def _normalize(x, epsilon):
    x = wide(x)
    deviation = np.sqrt(np.var(x, -1, keepdims=True) + epsilon)
    return (x - np.mean(x, -1, keepdims=True)) / deviation, deviation


def gelu(x, *, approximate=False):
    x = wide(x)
    return x * (_gate(x) if approximate else ndtr(x)), None


def gelu_backward(x, gradient, *, approximate=False):
    slope = _gelu_slope(wide(x), approximate)
    return wide(gradient) * slope, None, None  # column sums are tested against the rounded dx


def _gelu_slope(x, approximate):
    if not approximate:
        return ndtr(x) + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    gate = _gate(x)
    return gate + x * gate * (1 - gate) * 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


def gated(gate, up, *, activation="silu"):
    return _activate(wide(gate), activation)[0] * wide(up), None


def gated_backward(gate, up, gradient, *, activation="silu"):
    value, slope = _activate(wide(gate), activation)
    up, gradient = wide(up), wide(gradient)
    return gradient * up * slope, gradient * value, None, None


def _activate(x, activation):
    """Returns the activation and its derivative at x."""
    if activation == "silu":
        gate = expit(x)
        return x * gate, gate * (1 + x * (1 - gate))
    approximate = activation == "gelu_tanh"
    return gelu(x, approximate=approximate)[0], _gelu_slope(x, approximate)


def _gate(x):
    return (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def attention(q, k, v, *, causal=False):
    scores = _scores(q, k, causal)
    lse = np.log(np.sum(np.exp(scores), -1))  # cannot overflow: scores in tests are small
    return np.einsum("bhqk,bkhd->bqhd", np.exp(scores - lse[..., None]), wide(v)), lse


def attention_backward(q, k, v, out, lse, gradient, *, causal=False):
    """Computes the gradients with the softmax's Jacobian; `results` are not read."""
    q, k, v, gradient = (wide(x) for x in (q, k, v, gradient))
    weights = np.exp(_scores(q, k, causal))
    weights /= weights.sum(-1, keepdims=True)
    along = np.einsum("bqhd,bkhd->bhqk", gradient, v)
    slopes = weights * (along - np.sum(weights * along, -1, keepdims=True)) / np.sqrt(q.shape[-1])
    return (
        np.einsum("bhqk,bkhd->bqhd", slopes, k),
        np.einsum("bhqk,bqhd->bkhd", slopes, q),
        np.einsum("bhqk,bqhd->bkhd", weights, gradient),
    )


def _scores(q, k, causal):
    scores = np.einsum("bqhd,bkhd->bhqk", wide(q), wide(k)) / np.sqrt(q.shape[-1])
    return np.where(np.tril(np.ones(scores.shape[-2:])), scores, -np.inf) if causal else scores


def cross_entropy(logits, labels, where):
    logits = wide(logits)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    own = labels[..., None] == np.arange(logits.shape[-1])
    losses = -np.log(np.sum(p, -1, where=own)) * where
    return losses, (p - own) * where[..., None]


def column_sums(x):
    return wide(x).reshape(-1, x.shape[-1]).sum(0)


def wide(x):
    return np.asarray(x).astype(np.float64)
