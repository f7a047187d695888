"""Every recipe written out in NumPy, independently of swjax: quantization in fp32, products in float64.

Each function is one algorithm of the paper, line by line.
"""

import jax
import ml_dtypes
import numpy as np

FP8 = {
    "e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), np.float32(448)),
    "e5m2": (np.dtype(ml_dtypes.float8_e5m2), np.float32(57344)),
}


def _scaled(x, axis, largest):
    x = x.astype(np.float32)
    absmax = np.max(np.abs(x), axis=axis, keepdims=True)
    absmax = np.maximum(absmax, np.float32(2.0**-92))
    return x * (largest / absmax), absmax.astype(np.float64) / float(largest)


def int8(x, axis):
    """Returns x quantized and dequantized: round(127 x / absmax) * absmax / 127; axis None: tensor-wise."""
    scaled, scale = _scaled(x, axis, np.float32(127))
    return np.round(scaled).astype(np.float64) * scale


def fp8(x, axis, fmt):
    dtype, largest = FP8[fmt]
    scaled, scale = _scaled(x, axis, largest)
    return scaled.astype(dtype).astype(np.float64) * scale


def wide(x):
    return x.astype(np.float64)


def standard(x, w, g):
    return wide(x) @ wide(w), wide(g) @ wide(w).T, wide(x).T @ wide(g)


def switchback(x, w, g):
    y = int8(x, 1) @ int8(w, None)
    dx = int8(g, 1) @ int8(w, None).T
    return y, dx, wide(x).T @ wide(g)


def switchback_m(x, w, g):
    y, dx, _ = switchback(x, w, g)
    return y, dx, int8(x, 1).T @ wide(g)


def switchback_q(x, w, g):
    y = int8(x, 1) @ int8(w, 0)
    dx = int8(g, 1) @ int8(w, 1).T
    return y, dx, wide(x).T @ wide(g)


def llm_int8(x, w, g):
    y = int8(x, 1) @ int8(w, 0)
    dx = int8(g, 1) @ int8(w, 1).T
    return y, dx, int8(x, 0).T @ int8(g, 0)


def llm_int8_outlier6(x, w, g):
    columns = np.max(np.abs(x), axis=0) >= 6
    rest, outliers = np.where(columns, 0, x).astype(x.dtype), np.where(columns, x, 0)
    y, dx, dw = llm_int8(rest, w, g)
    return y + wide(outliers) @ wide(w), dx, dw + wide(outliers).T @ wide(g)


def hadamard(size):
    """Returns an orthogonal Hadamard matrix; the bits of pi give the signs of its columns."""
    pi = 0x243F6A8885A308D313198A2E03707344
    matrix = [
        [(-1) ** ((i & j).bit_count() + (pi >> j & 1)) for j in range(size)] for i in range(size)
    ]
    return np.array(matrix) / np.sqrt(size)


def rotated(x, largest_block=1024, size=128):
    """Returns [blocks, tokens, n]: groups of `size` tokens, multiplied by an orthogonal matrix."""
    blocks = -(-len(x) // largest_block)
    length = -(-len(x) // (blocks * size)) * size
    padded = np.zeros((blocks * length, x.shape[1]))
    padded[: len(x)] = x
    groups = padded.reshape(-1, size, x.shape[1])
    return (hadamard(size) @ groups).reshape(blocks, length, x.shape[1])


def switchback_hadamard(x, w, g):
    y, dx, _ = switchback(x, w, g)
    pairs = zip(rotated(wide(x)), rotated(wide(g)), strict=True)
    return y, dx, sum(int8(a, 0).T @ int8(b, 0) for a, b in pairs)


def rotated_features(x):
    """Returns rows of which groups of up to 128 features are multiplied by an orthogonal matrix."""
    size = np.gcd(x.shape[1], 128)
    mixed = wide(x).reshape(len(x), -1, size) @ hadamard(size).T
    return mixed.reshape(x.shape).astype(x.dtype)


def int8_hadamard(x, w, g):
    y = int8(rotated_features(x), 1) @ int8(rotated_features(w.T), None).T
    dx = int8(rotated_features(g), 1) @ int8(rotated_features(w), None).T
    return y, dx, switchback_hadamard(x, w, g)[2]


def fp8_switchback(x, w, g):
    y = fp8(x, 1, "e4m3") @ fp8(w, None, "e4m3")
    dx = fp8(g, 1, "e5m2") @ fp8(w, None, "e4m3").T
    return y, dx, wide(x).T @ wide(g)


def fp8_tensorwise(x, w, g):
    y = fp8(x, None, "e4m3") @ fp8(w, None, "e4m3")
    dx = fp8(g, None, "e5m2") @ fp8(w, None, "e4m3").T
    return y, dx, fp8(x, None, "e4m3").T @ fp8(g, None, "e5m2")


def fp8_static(x, w, g):
    def static(a, fmt, scale=1):
        dtype, largest = FP8[fmt]
        return np.clip(a.astype(np.float32) / scale, -largest, largest).astype(dtype) * float(scale)

    weight = static(w, "e4m3", np.float32(2.0 ** -np.round(np.log2(len(w)) / 2)))
    x8, g8 = static(x, "e4m3"), static(g, "e5m2")
    return x8 @ weight, g8 @ weight.T, x8.T @ g8


def fp8_hadamard(x, w, g):
    y = fp8(rotated_features(x), 1, "e4m3") @ fp8(rotated_features(w.T), None, "e4m3").T
    dx = fp8(rotated_features(g), 1, "e5m2") @ fp8(rotated_features(w), None, "e4m3").T
    pairs = zip(rotated(wide(x)), rotated(wide(g)), strict=True)
    return y, dx, sum(fp8(a, 0, "e4m3").T @ fp8(b, 0, "e5m2") for a, b in pairs)


def in_blocks(x, rounded, block, square=False, *others):
    """Applies `rounded`, a function of a block, to blocks of neighbours in a row, or to squares; `others` are
    cut alike."""
    out, rows = wide(x), block if square else 1
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], block):
            part = np.s_[i : i + rows, j : j + block]
            out[part] = rounded(x[part].astype(np.float32), *(other[part] for other in others))
    return out


def _in_three_products(x, w, g, of_rows, of_weight, of_tokens):
    y = of_rows(x) @ of_weight(w.T).T
    dx = of_rows(g) @ of_weight(w).T
    return y, dx, of_tokens(x.T) @ of_tokens(g.T).T


def fp8_block128(x, w, g):
    of_rows = lambda a: in_blocks(a, lambda block: fp8(block, None, "e4m3"), 128)
    of_weight = lambda a: in_blocks(a, lambda block: fp8(block, None, "e4m3"), 128, square=True)
    return _in_three_products(x, w, g, of_rows, of_weight, of_rows)


def mx(block, fmt="e4m3", ceil=False):
    dtype, largest = FP8[fmt]
    absmax = max(np.abs(block).max(), 2.0**-92)
    exponent = np.floor(np.log2(absmax)) - np.floor(np.log2(largest))
    scale = np.float32(2.0**exponent)
    scale *= 1 + (ceil and absmax > scale * largest)
    values = np.clip(block / scale, -largest, largest).astype(dtype)
    return values.astype(np.float64) * scale


def mxfp8(x, w, g):
    of_rows = lambda a: in_blocks(a, mx, 32)
    return _in_three_products(x, w, g, of_rows, of_rows, of_rows)


def nv(a, square=False, bits=None):
    absmax = max(np.abs(a.astype(np.float32)).max(initial=0), 2.0**-92)
    encode = np.float32(448 * 6) / np.float32(absmax)

    def rounded(block, bits=None):
        scale = np.float32(np.abs(block).max()) / np.float32(6) * encode
        scale = np.minimum(scale, np.float32(448)).astype(FP8["e4m3"][0]).astype(np.float32)
        whole = scale * (np.float32(1) / encode)
        if not whole:
            return np.zeros_like(block)
        scaled = block * (np.float32(1) / whole)
        values = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        if bits is not None:
            values = rounded_stochastically(scaled, bits)
        return values.astype(np.float64) * float(scale) * float(np.float32(1) / encode)

    return in_blocks(a, rounded, 16, square, *([] if bits is None else [bits]))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8], np.float32)


def rounded_stochastically(x, bits):
    """The neighbour further from zero in e2m1 with a probability that is the distance to the nearer one."""
    below = np.searchsorted(E2M1, np.minimum(np.abs(x), 6), side="right") - 1
    low, high = E2M1[below], E2M1[below + 1]
    up = (bits >> 8) * 2.0**-24 < (np.abs(x) - low) / (high - low)
    return np.copysign(np.minimum(np.where(up, high, low), 6), x)


def random_bits(x, shape, stream):
    """Threefry's bits, the seed of which is the sum of MurmurHash3's final mixing of each element."""
    h = x.astype(np.float32).view(np.uint32)
    h = (h ^ h >> 16) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> 13) * np.uint32(0xC2B2AE35)
    seed = np.sum(h ^ h >> 16, dtype=np.uint32)
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)
    return np.asarray(jax.random.bits(key, shape, "uint32"))


def nvfp4(x, w, g):
    def of_tokens(a, stochastic=False):
        padded = np.pad(a, ((0, 0), (0, -a.shape[1] % 16)))
        mixed = wide(padded).reshape(len(a), -1, 16) @ hadamard(16).T
        bits = random_bits(a, padded.shape[::-1], 1).T if stochastic else None
        return nv(mixed.reshape(padded.shape).astype(a.dtype), bits=bits)

    of_weight = lambda a: nv(a, square=True)
    y = nv(x) @ of_weight(w.T).T
    dx = nv(g, bits=random_bits(g, g.shape, 0)) @ of_weight(w).T
    return y, dx, of_tokens(x.T) @ of_tokens(g.T, stochastic=True).T


def fp4(x, axis):
    """e2m1 with one scale along an axis."""
    scaled, scale = _scaled(x, axis, np.float32(6))
    return scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale


def slope(w, power=5.0, most=3.0):
    """The derivative of the smooth approximation of arXiv 2501.17116, Section 3.1, interval by interval."""
    scaled, _ = _scaled(w, 0, np.float32(6))
    below = np.searchsorted(E2M1, np.abs(scaled), side="right") - 1
    delta = (E2M1[below + 1] - E2M1[below]).astype(np.float64)
    with np.errstate(divide="ignore"):
        root = np.abs(2 * (np.abs(scaled) - E2M1[below]) / delta - 1) ** (1 / power - 1)
    return np.minimum(root / power, most)


def fp4_dge(x, w, g, quantile=0.99):
    ordered, k = np.sort(x, axis=1), x.shape[1]
    low, high = ordered[:, [int((1 - quantile) * k)]], ordered[:, [int(quantile * k)]]
    clipped = np.clip(x, low, high)
    y = fp4(clipped, 1) @ fp4(w, 0) + wide(x - clipped) @ wide(w)
    dx = fp8(g, 1, "e5m2") @ fp4(w, 0).T
    return y, dx, fp8(x, None, "e4m3").T @ fp8(g, None, "e5m2") * slope(w)
