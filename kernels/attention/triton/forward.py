"""Attention over short sequences, forward, for Hopper.

A program holds all keys and values of a head in shared memory and whole rows of scores in registers, so the
softmax needs no running correction.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels.attention import tiles
from swjax.kernels.attention.triton.heads import (
    LN_2,
    LOG2_E,
    Head,
    add_product,
    add_transposed,
    column_constants,
    head_constants,
    inner_products,
    load_head,
    scale_pieces,
    store_head,
    transpose_pieces,
    visible,
    zero_pieces,
)
from swjax.kernels.triton_gpu import launcher


@triton.jit
def _scores(
    q, keys, query, ROWS: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr,
    FULL: tl.constexpr, TAIL: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Scores of some queries with all keys, and the largest score of each query."""
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    scores = ()
    for i in tl.static_range(FULL + (TAIL > 0)):
        key = i * COLUMNS + tl.arange(0, COLUMNS if i < FULL else TAIL)
        if FEW:
            s = inner_products(keys[i], q, HEAD)
            s = visible(
                s, query[None, :], key[:, None], float("-inf"), (i + 1) * COLUMNS > HEAD.T, HEAD
            )
            largest = tl.maximum(largest, tl.max(s, 0))
        else:
            s = inner_products(q, keys[i], HEAD)
            s = visible(
                s, query[:, None], key[None, :], float("-inf"), (i + 1) * COLUMNS > HEAD.T, HEAD
            )
            largest = tl.maximum(largest, tl.max(s, 1))
        scores = scores + (s,)
    return scores, largest


@triton.jit
def _forward_rows(
    q_ptr, out_ptr, lse_ptr, keys, values, start, ROWS: tl.constexpr, FEW: tl.constexpr,
    MASK: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Attention of some queries; scores are [queries, keys], or [keys, queries] if FEW."""
    q = load_head(q_ptr, start, ROWS, MASK, HEAD)
    query = start + tl.arange(0, ROWS)
    scores, largest = _scores(q, keys, query, ROWS, FEW, COLUMNS, FULL, TAIL, HEAD)
    largest *= HEAD.SCALE * LOG2_E
    total = tl.zeros((ROWS,), tl.float32)
    out = zero_pieces(ROWS, HEAD)
    if FEW:
        out = transpose_pieces(out, HEAD)
    for i in tl.static_range(FULL + (TAIL > 0)):
        if FEW:
            weights = tl.exp2(tl.fma(scores[i], HEAD.SCALE * LOG2_E, -largest[None, :]))
            total += tl.sum(weights, 0)
            out = add_transposed(out, values[i], weights, HEAD)
        else:
            weights = tl.exp2(tl.fma(scores[i], HEAD.SCALE * LOG2_E, -largest[:, None]))
            total += tl.sum(weights, 1)
            out = add_product(out, weights, values[i], HEAD)
    if FEW:
        out = transpose_pieces(out, HEAD)
    out = scale_pieces(out, (1.0 / total)[:, None], HEAD)
    store_head(out_ptr, out, start, ROWS, MASK, HEAD)
    tl.store(lse_ptr + query, (largest + tl.log2(total)) * LN_2, mask=query < HEAD.T)


@triton.jit
def _load_tokens(
    x_ptr, COLUMNS: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Loads all tokens of a head: FULL pieces of COLUMNS tokens, and TAIL tokens."""
    arrays = ()
    for i in tl.static_range(FULL + (TAIL > 0)):
        array = load_head(
            x_ptr, i * COLUMNS, COLUMNS if i < FULL else TAIL, (i + 1) * COLUMNS > HEAD.T, HEAD,
        )  # fmt: skip
        arrays = arrays + (array,)
    return arrays


@triton.jit
def _attention_kernel(
    q_ptr,  # [B, T, H, D], like the next three
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,  # [B, H, T]
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    ROWS: tl.constexpr,  # queries at a time
    BLOCKS: tl.constexpr,  # number of blocks of ROWS queries
    REST: tl.constexpr,  # remaining queries, or 0
    COLUMNS: tl.constexpr,  # keys per product
    FULL: tl.constexpr,  # number of products with COLUMNS keys
    TAIL: tl.constexpr,  # remaining keys, or 0
):
    """Attention of one head."""
    HEAD: tl.constexpr = Head(T, H * D, D, D_MAIN, D_TAIL, SCALE, CAUSAL)
    head = tl.program_id(0).to(tl.int64)
    offset = head // H * (T * HEAD.STRIDE) + head % H * D
    q_ptr += offset
    out_ptr += offset
    lse_ptr += head * T
    keys = _load_tokens(k_ptr + offset, COLUMNS, FULL, TAIL, HEAD)
    values = _load_tokens(v_ptr + offset, COLUMNS, FULL, TAIL, HEAD)
    for start in tl.range(0, BLOCKS * ROWS, ROWS):
        _forward_rows(
            q_ptr, out_ptr, lse_ptr, keys, values, start, ROWS, False, BLOCKS * ROWS > T, COLUMNS,
            FULL, TAIL, HEAD,
        )  # fmt: skip
    if REST > 0:
        _forward_rows(
            q_ptr, out_ptr, lse_ptr, keys, values, BLOCKS * ROWS, REST, True, True, COLUMNS, FULL,
            TAIL, HEAD,
        )  # fmt: skip


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`reference.attention`."""
    batch, tokens, heads, _ = q.shape
    tile = tiles.forward_tile(tokens)
    return launcher.call(
        q,
        k,
        v,
        kernel=_attention_kernel,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32),
        ),
        grid=(batch * heads,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        registers=tile.registers,
        **head_constants(q, tile, causal),
        **column_constants(q, tile),
    )
