"""The orthogonal matrix that mixes neighbours along a contraction before they are quantized.

Both operands of a product are multiplied by the same matrix, so the exact product does not change::

    (x HT) (H w) = x w

A rotated element is a mixture of all elements of its group, so elements of one group have about the same
magnitude, and a few large ones no longer set the rounding error of the others.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from swjax.kernels import targets
from swjax.kernels.formats import QTensor, to_float32
from swjax.kernels.quantizers.reference import quantize

_SIGNS = 0x243F6A8885A308D313198A2E03707344  # the first 128 bits of the fraction of pi


def rotation_matrix(size: int) -> np.ndarray:
    """``sqrt(size) H``: int8 [size, size] of 1 and -1 with orthogonal rows.

    It is a Hadamard matrix whose columns have fixed signs, the same in every step, on every device and in
    every group.

    Args:
      size: a power of two, up to 128.

    >>> rotation_matrix(4) @ rotation_matrix(4).T
    array([[4, 0, 0, 0],
           [0, 4, 0, 0],
           [0, 0, 4, 0],
           [0, 0, 0, 4]], dtype=int8)
    """
    matrix = np.ones((1, 1), np.int8)
    for _ in range(int(math.log2(size))):
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.int8), matrix)
    return matrix * np.array([1 - 2 * (_SIGNS >> i & 1) for i in range(size)], np.int8)


def rotate(x: jax.Array, rotation: int) -> jax.Array:
    """Multiplies each group of tokens by ``sqrt(rotation) H``.

    The products with 1 and -1 are exact; their sum is in float32.

    Args:
      x: [..., tokens, n] float16, bfloat16 or float32; `rotation` divides tokens.
      rotation: tokens per group, a power of two up to 128.

    Returns:
      float32 [..., tokens, n].

    >>> rotate(jnp.array([[3.0], [1.0]]), 2).tolist()
    [[4.0], [2.0]]
    """
    if rotation == 1:
        return to_float32(x)
    x = _fast(x)
    groups = x.reshape(*x.shape[:-2], x.shape[-2] // rotation, rotation, x.shape[-1])
    mixed = jnp.einsum(
        "rt,...tn->...rn",
        jnp.asarray(rotation_matrix(rotation), x.dtype),
        groups,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return mixed.reshape(x.shape)


def rotate_features(
    x: jax.Array, rotation: int, axis: int = -1, *, inverse: bool = False
) -> jax.Array:
    """Multiplies each group of features by H, which keeps the norm of the group.

    Args:
      x: [..., n] float16, bfloat16 or float32; or [n, m] with `axis` 0.
      rotation: features per group, a power of two up to 128 that divides n.
      axis: the axis of the features, -1 or 0.
      inverse: whether to multiply by HT, which undoes the rotation.

    Returns:
      An array of the shape and dtype of x; the sums are in float32, except that NVIDIA GPUs round float32
      elements to TF32 first. That error is a hundredth of that of int8.

    >>> rotate_features(jnp.array([[3.0, 1.0]]), 2).round(3).tolist()
    [[2.828000068664551, 1.4140000343322754]]
    """
    if rotation == 1:
        return x
    signs = rotation_matrix(rotation)
    matrix = jnp.asarray(signs.T if inverse else signs, _fast(x).dtype)
    groups = _fast(x).reshape(
        *x.shape[: axis % x.ndim],
        x.shape[axis] // rotation,
        rotation,
        *x.shape[axis % x.ndim + 1 :],
    )
    equation = "rt,gtn->grn" if axis % x.ndim == 0 and x.ndim > 1 else "rt,...t->...r"
    mixed = jnp.einsum(equation, matrix, groups, preferred_element_type=jnp.float32)
    return (mixed.reshape(x.shape) * (1 / math.sqrt(rotation))).astype(x.dtype)


def _fast(x: jax.Array) -> jax.Array:
    """x in a dtype whose products are fast: 16-bit products are slow on CPUs."""
    return to_float32(x) if targets.platform() == "cpu" else x


def quantize_rotated(x: jax.Array, dtype: str = "int8", *, rotation: int) -> QTensor:
    """Rotates the features of rows, rounds them to the dtype of x, and quantizes each row.

    Args:
      x: [..., n] float16, bfloat16 or float32.
      dtype: see `quantize`.
      rotation: see `rotate_features`.

    Returns:
      A QTensor with a scale [..., 1].

    >>> quantize_rotated(jnp.array([[3.0, 1.0]]), rotation=2).values.tolist()
    [[127, 64]]
    """
    return quantize(rotate_features(x, rotation), (x.ndim - 1,), dtype)
