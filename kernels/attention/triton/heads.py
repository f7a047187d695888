"""Heads in the registers of a Triton program, stored in pieces, and the products of attention.

cuDNN splits tokens and features into tiles of 128. For ViT-H's 257 tokens and 80 features, two thirds of its
work is padding; for 129 tokens five sixths is. This module splits both into powers of two and a shorter tail:
257 is 256 + 16, and 80 is 64 + 16. A tail of rows is computed transposed, as columns, because tensor cores
process 64 rows at a time, but 8 columns.

An array [rows, D] is a tuple of one or two pieces, [rows, D_MAIN] and [rows, D_TAIL].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.attention.tiles import LONGEST_SEQUENCE, AttentionTile, attention_pieces
from swjax.kernels.availability import Unavailable

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Head(NamedTuple):
    """Constants of every head.

    Attributes:
      T: tokens.
      STRIDE: elements from one token to the next.
      D, D_MAIN, D_TAIL: features, and those of the first and of the second piece.
      SCALE: factor of the scores.
      CAUSAL: whether a query attends only to keys up to its own position.
    """

    T: tl.constexpr
    STRIDE: tl.constexpr
    D: tl.constexpr
    D_MAIN: tl.constexpr
    D_TAIL: tl.constexpr
    SCALE: tl.constexpr
    CAUSAL: tl.constexpr


@triton.jit
def load_head(x_ptr, start, ROWS: tl.constexpr, MASK: tl.constexpr, HEAD: tl.constexpr):
    """Loads tokens from `start` on, with zeros past the last token and the last feature."""
    token = start + tl.arange(0, ROWS)
    at = x_ptr + token[:, None] * HEAD.STRIDE
    feature = tl.arange(0, HEAD.D_MAIN)
    if MASK or HEAD.D_MAIN > HEAD.D:
        inside = (token < HEAD.T)[:, None] & (feature < HEAD.D)[None, :]
        pieces = (tl.load(at + feature[None, :], mask=inside, other=0.0),)
    else:
        pieces = (tl.load(at + feature[None, :]),)
    if HEAD.D_TAIL > 0:
        feature = HEAD.D_MAIN + tl.arange(0, HEAD.D_TAIL)
        if MASK or HEAD.D_MAIN + HEAD.D_TAIL > HEAD.D:
            inside = (token < HEAD.T)[:, None] & (feature < HEAD.D)[None, :]
            pieces = pieces + (tl.load(at + feature[None, :], mask=inside, other=0.0),)
        else:
            pieces = pieces + (tl.load(at + feature[None, :]),)
    return pieces


@triton.jit
def store_head(x_ptr, pieces, start, ROWS: tl.constexpr, MASK: tl.constexpr, HEAD: tl.constexpr):
    """Writes tokens from `start` on."""
    token = start + tl.arange(0, ROWS)
    at = x_ptr + token[:, None] * HEAD.STRIDE
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    feature = tl.arange(0, HEAD.D_MAIN)
    if MASK or HEAD.D_MAIN > HEAD.D:
        inside = (token < HEAD.T)[:, None] & (feature < HEAD.D)[None, :]
        tl.store(at + feature[None, :], pieces[0].to(dtype), mask=inside)
    else:
        tl.store(at + feature[None, :], pieces[0].to(dtype))
    if HEAD.D_TAIL > 0:
        feature = HEAD.D_MAIN + tl.arange(0, HEAD.D_TAIL)
        inside = (token < HEAD.T)[:, None] & (feature < HEAD.D)[None, :]
        tl.store(at + feature[None, :], pieces[1].to(dtype), mask=inside)


@triton.jit
def zero_pieces(ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Zeros [ROWS, D]."""
    pieces = (tl.zeros((ROWS, HEAD.D_MAIN), tl.float32),)
    if HEAD.D_TAIL > 0:
        pieces = pieces + (tl.zeros((ROWS, HEAD.D_TAIL), tl.float32),)
    return pieces


@triton.jit
def scale_pieces(pieces, factor, HEAD: tl.constexpr):
    """Multiplies every piece by a factor."""
    scaled = (pieces[0] * factor,)
    if HEAD.D_TAIL > 0:
        scaled = scaled + (pieces[1] * factor,)
    return scaled


@triton.jit
def transpose_pieces(pieces, HEAD: tl.constexpr):
    """Transposes every piece."""
    turned = (tl.trans(pieces[0]),)
    if HEAD.D_TAIL > 0:
        turned = turned + (tl.trans(pieces[1]),)
    return turned


@triton.jit
def inner_products(a, b, HEAD: tl.constexpr):
    """a b^T, summed over the features."""
    total = tl.dot(a[0], tl.trans(b[0]))
    if HEAD.D_TAIL > 0:
        total = tl.dot(a[1], tl.trans(b[1]), total)
    return total


@triton.jit
def add_product(totals, weights, x, HEAD: tl.constexpr):
    """totals + weights x."""
    weights = weights.to(x[0].dtype)
    sums = (tl.dot(weights, x[0], totals[0]),)
    if HEAD.D_TAIL > 0:
        sums = sums + (tl.dot(weights, x[1], totals[1]),)
    return sums


@triton.jit
def add_transposed(totals, x, weights, HEAD: tl.constexpr):
    """totals + x^T weights, for transposed totals."""
    weights = weights.to(x[0].dtype)
    sums = (tl.dot(tl.trans(x[0]), weights, totals[0]),)
    if HEAD.D_TAIL > 0:
        sums = sums + (tl.dot(tl.trans(x[1]), weights, totals[1]),)
    return sums


@triton.jit
def visible(scores, query, key, otherwise, MASK: tl.constexpr, HEAD: tl.constexpr):
    """Replaces scores by `otherwise` where a query must not attend to the key."""
    if HEAD.CAUSAL:
        scores = tl.where(key <= query, scores, otherwise)
    if MASK:
        scores = tl.where(key < HEAD.T, scores, otherwise)
    return scores


def head_constants(q: jax.Array, tile: AttentionTile, causal: bool) -> dict:
    """The sizes for which an attention kernel is compiled, for queries [b, t, h, d]."""
    _, tokens, heads, width = q.shape
    d_main = max(16, 1 << (width.bit_length() - 1))
    blocks, rest = attention_pieces(tokens, tile.rows)
    return {
        "SCALE": width**-0.5,
        "CAUSAL": causal,
        "H": heads,
        "T": tokens,
        "D": width,
        "D_MAIN": d_main,
        "D_TAIL": max(16, triton.next_power_of_2(width - d_main)) if width > d_main else 0,
        "ROWS": tile.rows,
        "BLOCKS": blocks,
        "REST": rest,
    }


def column_constants(q: jax.Array, tile: AttentionTile) -> dict:
    """The number of columns per product, of products with so many, and of the remaining columns."""
    full, tail = attention_pieces(q.shape[1], tile.columns)
    return {"COLUMNS": tile.columns, "FULL": full, "TAIL": tail}


def why_not(q: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why the kernels cannot compute attention of these queries, or None if they can."""
    tokens, width = q.shape[1], q.shape[3]
    capability = tiles.compute_capability()
    if capability < (9, 0):
        return Unavailable(
            f"needs Hopper or Blackwell (compute capability 9.0), and this GPU has {capability}: use 'xla'"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"needs a 16-bit dtype, got {q.dtype}: use 'xla'")
    if tokens > LONGEST_SEQUENCE:
        return Unavailable(
            f"supports sequences of up to {LONGEST_SEQUENCE} tokens, got {tokens}: use 'xla'"
        )
    if not 16 <= width <= 128 or width % 8:
        return Unavailable(
            f"supports heads of 16 to 128 features, a multiple of 8, got {width}: use 'xla'"
        )
    return None
