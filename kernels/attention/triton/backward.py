"""Attention backward, for Hopper.

A program computes all gradients of a head. In the first loop, rows are keys: for each block of rows the
program loops over all queries, sums dk and dv in registers, and writes the gradients of the scores ("slopes")
to a buffer. In the second loop, rows are queries, and dq is the product of the slopes and k. The scores are
computed once, so the program has five products; two passes, one over queries and one over keys, would have
seven. Every sum has a fixed order.
"""

import jax
import triton
import triton.language as tl

from swjax.kernels.attention import tiles
from swjax.kernels.attention.triton.heads import (
    LOG2_E,
    Head,
    add_product,
    add_transposed,
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
def _store_delta(
    out_ptr, g_ptr, delta_ptr, start, ROWS: tl.constexpr, MASK: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Writes delta [ROWS], the inner products of the outputs of some queries and their gradients."""
    out = load_head(out_ptr, start, ROWS, MASK, HEAD)
    g = load_head(g_ptr, start, ROWS, MASK, HEAD)
    delta = tl.sum(out[0].to(tl.float32) * g[0].to(tl.float32), 1)
    if HEAD.D_TAIL > 0:
        delta += tl.sum(out[1].to(tl.float32) * g[1].to(tl.float32), 1)
    query = start + tl.arange(0, ROWS)
    tl.store(delta_ptr + query, delta, mask=query < HEAD.T)


@triton.jit
def _weights_and_slopes(
    k, v, q, g, lse, delta, key, query, FEW: tl.constexpr, MASK: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """The softmax of the scores, and the gradients of the scores: [keys, queries], or transposed if FEW."""
    if FEW:
        scores = inner_products(q, k, HEAD)
        slopes = inner_products(g, v, HEAD)
        weights = tl.exp2(tl.fma(scores, HEAD.SCALE * LOG2_E, -lse[:, None]))
        weights = visible(weights, query[:, None], key[None, :], 0.0, MASK, HEAD)
        slopes = weights * (slopes - delta[:, None])
    else:
        scores = inner_products(k, q, HEAD)
        slopes = inner_products(v, g, HEAD)
        weights = tl.exp2(tl.fma(scores, HEAD.SCALE * LOG2_E, -lse[None, :]))
        weights = visible(weights, query[None, :], key[:, None], 0.0, MASK, HEAD)
        slopes = weights * (slopes - delta[None, :])
    return weights.to(q[0].dtype), slopes.to(q[0].dtype)


@triton.jit
def _add_queries(
    q_ptr, g_ptr, lse_ptr, delta_ptr, slopes_ptr, k, v, dk, dv, key, start, COLUMNS: tl.constexpr,
    MASK: tl.constexpr, FEW: tl.constexpr, MASK_KEYS: tl.constexpr, SPAN: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Adds the terms of some queries to the gradients of some keys and values, and writes the slopes."""
    q = load_head(q_ptr, start, COLUMNS, MASK, HEAD)
    g = load_head(g_ptr, start, COLUMNS, MASK, HEAD)
    query = start + tl.arange(0, COLUMNS)
    if MASK:
        lse = tl.load(lse_ptr + query, mask=query < HEAD.T, other=float("inf"))
        delta = tl.load(delta_ptr + query, mask=query < HEAD.T, other=0.0)
    else:
        lse = tl.load(lse_ptr + query)
        delta = tl.load(delta_ptr + query)
    weights, slopes = _weights_and_slopes(
        k, v, q, g, lse * LOG2_E, delta, key, query, FEW, MASK_KEYS, HEAD,
    )  # fmt: skip
    if FEW:
        dk = add_transposed(dk, q, slopes, HEAD)
        dv = add_transposed(dv, g, weights, HEAD)
        tl.store(slopes_ptr + key[None, :] * SPAN + query[:, None], slopes)
    else:
        dk = add_product(dk, slopes, q, HEAD)
        dv = add_product(dv, weights, g, HEAD)
        tl.store(slopes_ptr + key[:, None] * SPAN + query[None, :], slopes)
    return dk, dv


@triton.jit
def _key_rows(
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, slopes_ptr, dk_ptr, dv_ptr, start,
    ROWS: tl.constexpr, FEW: tl.constexpr, MASK: tl.constexpr, COLUMNS: tl.constexpr,
    FULL: tl.constexpr, REST: tl.constexpr, SPAN: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of some keys and their values, and the slopes of all queries with these keys."""
    k = load_head(k_ptr, start, ROWS, MASK, HEAD)
    v = load_head(v_ptr, start, ROWS, MASK, HEAD)
    key = start + tl.arange(0, ROWS)
    dk = zero_pieces(ROWS, HEAD)
    dv = zero_pieces(ROWS, HEAD)
    if FEW:
        dk = transpose_pieces(dk, HEAD)
        dv = transpose_pieces(dv, HEAD)
    first = start // COLUMNS * COLUMNS if HEAD.CAUSAL else 0
    for query in tl.range(first, FULL, COLUMNS):
        dk, dv = _add_queries(
            q_ptr, g_ptr, lse_ptr, delta_ptr, slopes_ptr, k, v, dk, dv, key, query, COLUMNS,
            FULL > HEAD.T, FEW, MASK, SPAN, HEAD,
        )  # fmt: skip
    if REST > 0:
        dk, dv = _add_queries(
            q_ptr, g_ptr, lse_ptr, delta_ptr, slopes_ptr, k, v, dk, dv, key, FULL, REST, True, FEW,
            MASK, SPAN, HEAD,
        )  # fmt: skip
    if FEW:
        dk = transpose_pieces(dk, HEAD)
        dv = transpose_pieces(dv, HEAD)
    dk = scale_pieces(dk, HEAD.SCALE, HEAD)
    store_head(dk_ptr, dk, start, ROWS, MASK, HEAD)
    store_head(dv_ptr, dv, start, ROWS, MASK, HEAD)


@triton.jit
def _add_keys(
    k_ptr, slopes_ptr, dq, start, key, ROWS: tl.constexpr, FEW: tl.constexpr, MASK: tl.constexpr,
    COLUMNS: tl.constexpr, SPAN: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Adds the terms of some keys to the gradients of some queries."""
    k = load_head(k_ptr, key, COLUMNS, MASK, HEAD)
    key = key + tl.arange(0, COLUMNS)
    query = start + tl.arange(0, ROWS)
    slopes = tl.load(slopes_ptr + key[:, None] * SPAN + query[None, :])
    if FEW:
        return add_transposed(dq, k, slopes, HEAD)
    else:
        return add_product(dq, tl.trans(slopes), k, HEAD)


@triton.jit
def _query_rows(
    k_ptr, slopes_ptr, dq_ptr, start, ROWS: tl.constexpr, FEW: tl.constexpr, MASK: tl.constexpr,
    COLUMNS: tl.constexpr, FULL: tl.constexpr, REST: tl.constexpr, SPAN: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of some queries, from their slopes."""
    dq = zero_pieces(ROWS, HEAD)
    if FEW:
        dq = transpose_pieces(dq, HEAD)
    last = start + ROWS if HEAD.CAUSAL and not FEW else FULL
    for key in tl.range(0, last, COLUMNS):
        dq = _add_keys(
            k_ptr, slopes_ptr, dq, start, key, ROWS, FEW, FULL > HEAD.T, COLUMNS, SPAN, HEAD
        )
    if REST > 0 and (FEW or not HEAD.CAUSAL):
        dq = _add_keys(k_ptr, slopes_ptr, dq, start, FULL, ROWS, FEW, True, REST, SPAN, HEAD)
    if FEW:
        dq = transpose_pieces(dq, HEAD)
    dq = scale_pieces(dq, HEAD.SCALE, HEAD)
    store_head(dq_ptr, dq, start, ROWS, MASK, HEAD)


@triton.jit
def _attention_backward_kernel(
    q_ptr,  # [B, T, H, D], as all arrays except lse, delta and slopes
    k_ptr,
    v_ptr,
    out_ptr,
    g_ptr,
    lse_ptr,  # [B, H, T]
    dq_ptr,
    dk_ptr,
    dv_ptr,
    delta_ptr,  # [B, H, T]
    slopes_ptr,  # [B, H, SPAN, SPAN]: keys, queries
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    ROWS: tl.constexpr,  # keys, then queries, at a time; also queries per product
    BLOCKS: tl.constexpr,  # number of blocks of ROWS tokens
    REST: tl.constexpr,  # remaining tokens, or 0
):
    """The gradients of one head."""
    HEAD: tl.constexpr = Head(T, H * D, D, D_MAIN, D_TAIL, SCALE, CAUSAL)
    FULL: tl.constexpr = BLOCKS * ROWS  # tokens in blocks
    SPAN: tl.constexpr = FULL + REST
    MASK: tl.constexpr = FULL > T
    # Keys per product with the gradients of scores.
    KEYS: tl.constexpr = 2 * ROWS if FULL % (2 * ROWS) == 0 and not CAUSAL else ROWS
    head = tl.program_id(0).to(tl.int64)
    offset = head // H * (T * HEAD.STRIDE) + head % H * D
    q_ptr += offset
    k_ptr += offset
    v_ptr += offset
    out_ptr += offset
    g_ptr += offset
    dq_ptr += offset
    dk_ptr += offset
    dv_ptr += offset
    lse_ptr += head * T
    delta_ptr += head * T
    slopes_ptr += head * (SPAN * SPAN)
    for start in tl.range(0, FULL, ROWS):
        _store_delta(out_ptr, g_ptr, delta_ptr, start, ROWS, MASK, HEAD)
    if REST > 0:
        _store_delta(out_ptr, g_ptr, delta_ptr, FULL, REST, True, HEAD)
    tl.debug_barrier()  # delta is read by other threads than those that wrote it
    for start in tl.range(0, FULL, ROWS):
        _key_rows(
            q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, slopes_ptr, dk_ptr, dv_ptr, start, ROWS,
            False, MASK, ROWS, FULL, REST, SPAN, HEAD,
        )  # fmt: skip
    if REST > 0:
        _key_rows(
            q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, slopes_ptr, dk_ptr, dv_ptr, FULL, REST,
            True, True, ROWS, FULL, REST, SPAN, HEAD,
        )  # fmt: skip
    tl.debug_barrier()  # so are the slopes
    for start in tl.range(0, FULL, ROWS):
        _query_rows(
            k_ptr, slopes_ptr, dq_ptr, start, ROWS, False, MASK, KEYS, FULL, REST, SPAN, HEAD,
        )  # fmt: skip
    if REST > 0:
        _query_rows(k_ptr, slopes_ptr, dq_ptr, FULL, REST, True, True, KEYS, FULL, REST, SPAN, HEAD)


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
    """`reference.attention_backward`."""
    batch, _, heads, _ = q.shape
    tile = tiles.BACKWARD
    constants = head_constants(q, tile, causal)
    span = constants["BLOCKS"] * tile.rows + constants["REST"]
    like_q, like_lse = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, lse))
    slopes = jax.ShapeDtypeStruct((batch * heads, span, span), q.dtype)
    dq, dk, dv, _, _ = launcher.call(
        q,
        k,
        v,
        out,
        gradient,
        lse,
        kernel=_attention_backward_kernel,
        out_type=(like_q, like_q, like_q, like_lse, slopes),
        grid=(batch * heads,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        registers=tile.registers,
        **constants,
    )
    return dq, dk, dv
