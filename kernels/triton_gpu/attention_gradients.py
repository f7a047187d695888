"""Attention backward for Hopper. Up to `tiles.SHORT_SEQUENCE` tokens use `attention_gradients_short`.

The kernel of this module runs twice. First its rows are queries, and each row loops over all keys; then its
rows are keys, and each row loops over all queries. So every sum stays in registers and has a fixed order.
Rows have a first array (q or k) and a second array (g or v). Inner products of the first arrays of rows and
columns are the scores. Inner products of the second arrays are the gradients of the weights.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.triton_gpu import attention_gradients_short, launcher
from swjax.kernels.triton_gpu.heads import (
    LOG2_E,
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


@triton.jit
def _weights_and_slopes(
    first, second, firsts, seconds, lse, delta, query, key, FEW: tl.constexpr, KEYS: tl.constexpr,
    MASK: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr,
    D_TAIL: tl.constexpr,
):  # fmt: skip
    """The softmax of the scores of rows and columns, and the gradients of the scores."""
    if FEW:
        scores = inner_products(firsts, first, D_TAIL)
        slopes = inner_products(seconds, second, D_TAIL)
    else:
        scores = inner_products(first, firsts, D_TAIL)
        slopes = inner_products(second, seconds, D_TAIL)
    if KEYS == FEW:  # queries are along the first axis
        weights = tl.exp2(tl.fma(scores, SCALE * LOG2_E, -lse[:, None]))
        weights = visible(weights, query[:, None], key[None, :], 0.0, MASK and not KEYS, CAUSAL, T)
        slopes = weights * (slopes - delta[:, None])
    else:
        weights = tl.exp2(tl.fma(scores, SCALE * LOG2_E, -lse[None, :]))
        weights = visible(weights, query[None, :], key[:, None], 0.0, MASK and not KEYS, CAUSAL, T)
        slopes = weights * (slopes - delta[None, :])
    return weights, slopes


@triton.jit
def _backward_columns(
    firsts_ptr, seconds_ptr, lse_ptr, delta_ptr, first, second, lse, delta, dfirst, dsecond, row,
    start, COLUMNS: tl.constexpr, MASK: tl.constexpr, FEW: tl.constexpr, KEYS: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
):  # fmt: skip
    """Adds the contributions of some columns to the gradients of the rows."""
    firsts = load_head(firsts_ptr, start, COLUMNS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    seconds = load_head(seconds_ptr, start, COLUMNS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    column = start + tl.arange(0, COLUMNS)
    if KEYS and MASK:
        lse = tl.load(lse_ptr + column, mask=column < T, other=float("inf")) * LOG2_E
        delta = tl.load(delta_ptr + column, mask=column < T, other=0.0)
    elif KEYS:
        lse = tl.load(lse_ptr + column) * LOG2_E
        delta = tl.load(delta_ptr + column)
    query = column if KEYS else row
    key = row if KEYS else column
    weights, slopes = _weights_and_slopes(
        first, second, firsts, seconds, lse, delta, query, key, FEW, KEYS, MASK, SCALE, CAUSAL, T,
        D_TAIL,
    )  # fmt: skip
    if FEW:
        dfirst = add_transposed(dfirst, firsts, slopes, D_TAIL)
        if KEYS:
            dsecond = add_transposed(dsecond, seconds, weights, D_TAIL)
    else:
        dfirst = add_product(dfirst, slopes, firsts, D_TAIL)
        if KEYS:
            dsecond = add_product(dsecond, weights, seconds, D_TAIL)
    return dfirst, dsecond


@triton.jit
def _backward_rows(
    first_ptr, second_ptr, firsts_ptr, seconds_ptr, out_ptr, lse_ptr, delta_ptr, dfirst_ptr,
    dsecond_ptr, start, ROWS: tl.constexpr, FEW: tl.constexpr, MASK: tl.constexpr,
    KEYS: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr,
    STRIDE: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
):  # fmt: skip
    """The gradients of some queries, or of some keys and their values."""
    first = load_head(first_ptr, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    second = load_head(second_ptr, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    row = start + tl.arange(0, ROWS)
    lse = row  # unused if rows are keys: the columns, which are queries, then load lse and delta
    delta = row
    if not KEYS:
        lse = tl.load(lse_ptr + row, mask=row < T, other=float("inf")) * LOG2_E
        out = load_head(out_ptr, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
        delta = tl.sum(out[0].to(tl.float32) * second[0].to(tl.float32), 1)
        if D_TAIL > 0:
            delta += tl.sum(out[1].to(tl.float32) * second[1].to(tl.float32), 1)
        tl.store(delta_ptr + row, delta, mask=row < T)
    dfirst = zero_pieces(ROWS, D_MAIN, D_TAIL)
    dsecond = zero_pieces(ROWS, D_MAIN, D_TAIL)
    if FEW:
        dfirst = transpose_pieces(dfirst, D_TAIL)
        dsecond = transpose_pieces(dsecond, D_TAIL)
    for column in tl.range(0, FULL * COLUMNS, COLUMNS):
        dfirst, dsecond = _backward_columns(
            firsts_ptr, seconds_ptr, lse_ptr, delta_ptr, first, second, lse, delta, dfirst, dsecond,
            row, column, COLUMNS, FULL * COLUMNS > T, FEW, KEYS, SCALE, CAUSAL, T, STRIDE, D,
            D_MAIN, D_TAIL,
        )  # fmt: skip
    if TAIL > 0:
        dfirst, dsecond = _backward_columns(
            firsts_ptr, seconds_ptr, lse_ptr, delta_ptr, first, second, lse, delta, dfirst, dsecond,
            row, FULL * COLUMNS, TAIL, True, FEW, KEYS, SCALE, CAUSAL, T, STRIDE, D, D_MAIN, D_TAIL,
        )  # fmt: skip
    if FEW:
        dfirst = transpose_pieces(dfirst, D_TAIL)
        dsecond = transpose_pieces(dsecond, D_TAIL)
    dfirst = scale_pieces(dfirst, SCALE, D_TAIL)
    store_head(dfirst_ptr, dfirst, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    if KEYS:
        store_head(dsecond_ptr, dsecond, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)


@triton.jit
def _attention_backward_kernel(
    first_ptr,  # rows: q or k, [B, T, H, D], as all arrays except lse and delta
    second_ptr,  # rows: g or v
    firsts_ptr,  # columns: k or q
    seconds_ptr,  # columns: v or g
    out_ptr,
    lse_ptr,  # [B, H, T]
    delta_ptr,  # [B, H, T]: sums of out g, from the run over queries
    dfirst_ptr,
    dsecond_ptr,
    KEYS: tl.constexpr,  # whether rows are keys
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    ROWS: tl.constexpr,  # rows per program
    BLOCKS: tl.constexpr,  # number of programs with ROWS rows
    REST: tl.constexpr,  # rows of one more program, or 0
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The gradients of one block of queries or keys of one head."""
    STRIDE: tl.constexpr = H * D
    PROGRAMS: tl.constexpr = BLOCKS + (REST > 0)
    head = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    block = tl.program_id(0) % PROGRAMS
    offset = head // H * (T * STRIDE) + head % H * D
    first_ptr += offset
    second_ptr += offset
    firsts_ptr += offset
    seconds_ptr += offset
    out_ptr += offset
    dfirst_ptr += offset
    dsecond_ptr += offset
    lse_ptr += head * T
    delta_ptr += head * T
    if block < BLOCKS:
        _backward_rows(
            first_ptr, second_ptr, firsts_ptr, seconds_ptr, out_ptr, lse_ptr, delta_ptr, dfirst_ptr,
            dsecond_ptr, block * ROWS, ROWS, False, BLOCKS * ROWS > T, KEYS, SCALE, CAUSAL, T,
            STRIDE, COLUMNS, FULL, TAIL, D, D_MAIN, D_TAIL,
        )  # fmt: skip
    elif REST > 0:
        _backward_rows(
            first_ptr, second_ptr, firsts_ptr, seconds_ptr, out_ptr, lse_ptr, delta_ptr, dfirst_ptr,
            dsecond_ptr, BLOCKS * ROWS, REST, True, True, KEYS, SCALE, CAUSAL, T,
            STRIDE, COLUMNS, FULL, TAIL, D, D_MAIN, D_TAIL,
        )  # fmt: skip


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    gradient: jax.Array,
    *,
    causal: bool = False,
    tile: tiles.AttentionTile | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.attention_backward`."""
    batch, tokens, heads, width = q.shape
    if tokens <= tiles.SHORT_SEQUENCE:
        return attention_gradients_short.attention_backward(
            q, k, v, out, lse, gradient, causal=causal, tile=tile
        )
    tile = tile or tiles.attention_tile("attention_backward", tokens, width)
    constants = head_constants(q, tile, causal) | column_constants(q, tile)
    programs = batch * heads * (constants["BLOCKS"] + (constants["REST"] > 0))
    call = partial(
        launcher.call,
        kernel=_attention_backward_kernel,
        grid=(programs,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        registers=tile.registers,
        **constants,
    )
    like_q, like_lse = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, lse))
    unused = jax.ShapeDtypeStruct((1,), jnp.float32)
    delta, dq, _ = call(
        q, gradient, k, v, out, lse, KEYS=False, out_type=(like_lse, like_q, unused)
    )
    dk, dv = call(k, v, q, gradient, out, lse, delta, KEYS=True, out_type=(like_q, like_q))
    return dq, dk, dv
