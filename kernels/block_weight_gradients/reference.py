"""The 8-bit weight gradient: tokens are rotated, and each column and block of tokens has a scale."""

from typing import Any

import jax
import jax.numpy as jnp

from swjax.kernels.formats import QTensor
from swjax.kernels.products.reference import matmul
from swjax.kernels.quantizers.reference import quantize
from swjax.kernels.rotations.reference import rotate


def block_weight_gradient(
    x: jax.Array,
    g: jax.Array,
    present: jax.Array | None = None,
    *,
    dtypes: tuple[str, str],
    block: int,
    rotation: int,
    out_dtype: str,
) -> jax.Array:
    """``xT g`` from 8-bit products, with one scale per column and block of tokens.

    Each group of `rotation` tokens of x and of g is multiplied by the same orthogonal matrix H of `rotate`::

        (H x)T (H g) = xT HT H g = xT g

    so the exact product is unchanged. A rotated token is a mixture of all tokens of its group, and all
    rotated tokens have about the same magnitude. Without the rotation, one scale covers tokens of very
    different magnitude, and small tokens are rounded to few values. This, rather than the length of the sum,
    causes the error of int8 weight gradients.

    Size of the error: elements with standard deviation s have a maximum of about ``s sqrt(2 ln m)`` over m
    tokens. An integer step is this maximum divided by 127, and rounding errors have a standard deviation of
    ``step / sqrt(12)``. The squared errors of x and g add up to ``sqrt(2) sqrt(2 ln m) / (127 sqrt(12))`` of
    the product's norm for independent x and g, which is 1.2 % for m = 1,024.

    If a column contains a non-finite element, its result is not finite. The same may happen for an element
    beyond 2**121, whose rotation overflows.

    A token whose g is zero, such as padding, adds nothing to the sum, but its x would enlarge the scale of
    its block. `present` says which tokens to leave out.

    Args:
      x: [tokens, k] float16, bfloat16 or float32.
      g: [tokens, n] in the dtype of x.
      present: [tokens] in the dtype of x: 0 for tokens that count as zero, whose x and g must be finite, and
        1 for the others; None: all 1.
      dtypes: dtypes of quantized x and g, see `quantize`.
      block: largest number of tokens that share the scale of a column. All blocks have the same length, a
        multiple of `rotation`; zeros fill the last block.
      rotation: tokens per group, a power of two up to 128; 1 means no rotation.
      out_dtype: "float32", "bfloat16" or "float16".

    Returns:
      [k, n] in `out_dtype`. int8 products are summed in int32 within a block, and in float32 over blocks.

    >>> x = jnp.array([[1.0], [2.0], [-1.0]])
    >>> options = {"dtypes": ("int8", "int8"), "block": 4, "rotation": 2, "out_dtype": "float32"}
    >>> round(float(block_weight_gradient(x, x, **options)[0, 0]), 1)
    6.0
    """
    if not x.shape[0]:
        return jnp.zeros((x.shape[1], g.shape[1]), out_dtype)
    if present is not None:
        x, g = (a * present[:, None] for a in (x, g))
    x_blocks, g_blocks = (
        quantize(rotated_blocks(a, block, rotation), (1,), dtype)
        for a, dtype in zip((x, g), dtypes)
    )

    def product(pair: tuple[QTensor, QTensor]) -> jax.Array:
        return matmul(*pair, out_dtype="float32", contract=(0, 0))

    def add(total, pair):
        return total + product(pair), None

    first, others = (
        jax.tree.map(part, (x_blocks, g_blocks)) for part in (lambda a: a[0], lambda a: a[1:])
    )
    total = product(first)
    if others[0].values.shape[0]:  # under jax.disable_jit a scan needs a step
        total, _ = jax.lax.scan(add, total, others)
    return (total / rotation).astype(out_dtype)  # exact: each operand has a factor sqrt(rotation)


def block_weight_gradient_group(
    x: jax.Array,
    gs: tuple[jax.Array, ...],
    present: jax.Array | None = None,
    *,
    dtypes: tuple[str, str],
    block: int,
    rotation: int,
    out_dtype: str,
) -> tuple[jax.Array, ...]:
    """``xT g`` for each g: the weight gradients of layers that share their input.

    Args:
      x: [tokens, k].
      gs: [tokens, n] each, in the dtype of x.
      present, dtypes, block, rotation, out_dtype: see `block_weight_gradient`; a token is present if any of
        its gs is.

    Returns:
      [k, n] in `out_dtype` for each g.

    >>> x, options = jnp.ones((2, 1)), {"block": 2, "rotation": 1, "out_dtype": "float32"}
    >>> [dw] = block_weight_gradient_group(x, (x,), dtypes=("int8", "int8"), **options)
    >>> dw.tolist()
    [[2.0]]
    """
    options: dict[str, Any] = dict(
        dtypes=dtypes, block=block, rotation=rotation, out_dtype=out_dtype
    )
    return tuple(block_weight_gradient(x, g, present, **options) for g in gs)


def cut_into_blocks(tokens: int, block: int, rotation: int) -> tuple[int, int]:
    """The number of blocks of tokens, and their length, a multiple of `rotation`.

    >>> cut_into_blocks(1300, block=1024, rotation=128)
    (2, 768)
    """
    count = max(1, -(-tokens // block))
    return count, rotation * -(-tokens // (count * rotation))


def rotated_blocks(x: jax.Array, block: int, rotation: int) -> jax.Array:
    """Rotates tokens and splits them into blocks, which `block_weight_gradient` quantizes per column.

    Args:
      x: [tokens, n] float16, bfloat16 or float32.
      block, rotation: see `block_weight_gradient`.

    Returns:
      float32 [blocks, tokens per block, n], see `rotate`. Zeros fill the last block.

    >>> rotated_blocks(jnp.array([[3.0], [1.0], [2.0]]), block=2, rotation=2).tolist()
    [[[4.0], [2.0]], [[2.0], [2.0]]]
    """
    count, length = cut_into_blocks(x.shape[0], block, rotation)
    padded = jnp.pad(x, ((0, count * length - x.shape[0]), (0, 0)))
    return rotate(padded.reshape(count, length, x.shape[1]), rotation)
