"""Attention over short sequences in Triton, for Hopper.

cuDNN cuts tokens and features into tiles of 128: of its work on ViT-H's 257 tokens and 80 features two
thirds are padding, of that on 129 tokens five sixths. Here both are cut into powers of two and a shorter
tail: 257 is 256 + 16, and 80 is 64 + 16. A tail of rows is computed transposed, with them as columns: tensor
cores take rows by 64, columns by 8.

In the forward pass a program has all keys and values of a head in shared memory and whole rows of scores in
registers, so that no softmax is corrected on the way. The backward pass is one kernel, run twice: its rows
are queries, which go through all keys, and then keys, which go through all queries. So every sum stays in
registers and has one order.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.triton_gpu import _call

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


# --- heads in pieces ----------------------------------------------------------------------------------
# An array [rows, D] is a tuple of one or two, [rows, D_MAIN] and [rows, D_TAIL].


@triton.jit
def _load(
    x_ptr, start, ROWS: tl.constexpr, MASK: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
):  # fmt: skip
    """Tokens from `start` on, zero past the last one and the last feature."""
    token = start + tl.arange(0, ROWS)
    at = x_ptr + token[:, None] * STRIDE
    feature = tl.arange(0, D_MAIN)
    if MASK or D_MAIN > D:
        inside = (token < T)[:, None] & (feature < D)[None, :]
        pieces = (tl.load(at + feature[None, :], mask=inside, other=0.0),)
    else:
        pieces = (tl.load(at + feature[None, :]),)
    if D_TAIL > 0:
        feature = D_MAIN + tl.arange(0, D_TAIL)
        if MASK or D_MAIN + D_TAIL > D:
            inside = (token < T)[:, None] & (feature < D)[None, :]
            pieces = pieces + (tl.load(at + feature[None, :], mask=inside, other=0.0),)
        else:
            pieces = pieces + (tl.load(at + feature[None, :]),)
    return pieces


@triton.jit
def _store(
    x_ptr, pieces, start, ROWS: tl.constexpr, MASK: tl.constexpr, T: tl.constexpr,
    STRIDE: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
):  # fmt: skip
    token = start + tl.arange(0, ROWS)
    at = x_ptr + token[:, None] * STRIDE
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    feature = tl.arange(0, D_MAIN)
    if MASK or D_MAIN > D:
        inside = (token < T)[:, None] & (feature < D)[None, :]
        tl.store(at + feature[None, :], pieces[0].to(dtype), mask=inside)
    else:
        tl.store(at + feature[None, :], pieces[0].to(dtype))
    if D_TAIL > 0:
        feature = D_MAIN + tl.arange(0, D_TAIL)
        inside = (token < T)[:, None] & (feature < D)[None, :]
        tl.store(at + feature[None, :], pieces[1].to(dtype), mask=inside)


@triton.jit
def _zeros(ROWS: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr):
    pieces = (tl.zeros((ROWS, D_MAIN), tl.float32),)
    if D_TAIL > 0:
        pieces = pieces + (tl.zeros((ROWS, D_TAIL), tl.float32),)
    return pieces


@triton.jit
def _scaled(pieces, factor, D_TAIL: tl.constexpr):
    scaled = (pieces[0] * factor,)
    if D_TAIL > 0:
        scaled = scaled + (pieces[1] * factor,)
    return scaled


@triton.jit
def _transposed(pieces, D_TAIL: tl.constexpr):
    turned = (tl.trans(pieces[0]),)
    if D_TAIL > 0:
        turned = turned + (tl.trans(pieces[1]),)
    return turned


@triton.jit
def _inner(a, b, D_TAIL: tl.constexpr):
    """a b^T over the features of both."""
    total = tl.dot(a[0], tl.trans(b[0]))
    if D_TAIL > 0:
        total = tl.dot(a[1], tl.trans(b[1]), total)
    return total


@triton.jit
def _add_product(totals, weights, x, D_TAIL: tl.constexpr):
    """totals + weights x."""
    weights = weights.to(x[0].dtype)
    sums = (tl.dot(weights, x[0], totals[0]),)
    if D_TAIL > 0:
        sums = sums + (tl.dot(weights, x[1], totals[1]),)
    return sums


@triton.jit
def _add_transposed(totals, x, weights, D_TAIL: tl.constexpr):
    """totals + x^T weights, for totals that are transposed."""
    weights = weights.to(x[0].dtype)
    sums = (tl.dot(tl.trans(x[0]), weights, totals[0]),)
    if D_TAIL > 0:
        sums = sums + (tl.dot(tl.trans(x[1]), weights, totals[1]),)
    return sums


@triton.jit
def _visible(
    scores, query, key, otherwise, MASK: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr
):
    """`otherwise` where a query must not see the key."""
    if CAUSAL:
        scores = tl.where(key <= query, scores, otherwise)
    if MASK:
        scores = tl.where(key < T, scores, otherwise)
    return scores


# --- forward ------------------------------------------------------------------------------------------


@triton.jit
def _forward_rows(
    q_ptr, out_ptr, lse_ptr, keys, values, start, ROWS: tl.constexpr, FEW: tl.constexpr,
    MASK: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr,
    STRIDE: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
):  # fmt: skip
    """Attention of some queries; scores are [queries, keys], of few [keys, queries]."""
    q = _load(q_ptr, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    query = start + tl.arange(0, ROWS)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    scores = ()
    for i in tl.static_range(FULL + (TAIL > 0)):
        key = i * COLUMNS + tl.arange(0, COLUMNS if i < FULL else TAIL)
        if FEW:
            s = _inner(keys[i], q, D_TAIL)
            s = _visible(
                s, query[None, :], key[:, None], float("-inf"), (i + 1) * COLUMNS > T, CAUSAL, T
            )
            largest = tl.maximum(largest, tl.max(s, 0))
        else:
            s = _inner(q, keys[i], D_TAIL)
            s = _visible(
                s, query[:, None], key[None, :], float("-inf"), (i + 1) * COLUMNS > T, CAUSAL, T
            )
            largest = tl.maximum(largest, tl.max(s, 1))
        scores = scores + (s,)
    largest *= SCALE * _LOG2_E
    total = tl.zeros((ROWS,), tl.float32)
    out = _zeros(ROWS, D_MAIN, D_TAIL)
    if FEW:
        out = _transposed(out, D_TAIL)
    for i in tl.static_range(FULL + (TAIL > 0)):
        if FEW:
            weights = tl.exp2(tl.fma(scores[i], SCALE * _LOG2_E, -largest[None, :]))
            total += tl.sum(weights, 0)
            out = _add_transposed(out, values[i], weights, D_TAIL)
        else:
            weights = tl.exp2(tl.fma(scores[i], SCALE * _LOG2_E, -largest[:, None]))
            total += tl.sum(weights, 1)
            out = _add_product(out, weights, values[i], D_TAIL)
    if FEW:
        out = _transposed(out, D_TAIL)
    out = _scaled(out, (1.0 / total)[:, None], D_TAIL)
    _store(out_ptr, out, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    tl.store(lse_ptr + query, (largest + tl.log2(total)) * _LN_2, mask=query < T)


@triton.jit
def _load_columns(
    x_ptr, T: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr,
    TAIL: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
):  # fmt: skip
    """All tokens of a head: FULL times COLUMNS of them, and TAIL."""
    arrays = ()
    for i in tl.static_range(FULL + (TAIL > 0)):
        array = _load(
            x_ptr, i * COLUMNS, COLUMNS if i < FULL else TAIL, (i + 1) * COLUMNS > T, T, STRIDE, D,
            D_MAIN, D_TAIL,
        )  # fmt: skip
        arrays = arrays + (array,)
    return arrays


@triton.jit
def _attention_kernel(
    q_ptr,  # [B, T, H, D], as all but the last
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
    BLOCKS: tl.constexpr,  # so many times
    REST: tl.constexpr,  # queries after these, or 0
    COLUMNS: tl.constexpr,  # keys of a product
    FULL: tl.constexpr,  # so many times
    TAIL: tl.constexpr,  # keys after these, or 0
):
    STRIDE: tl.constexpr = H * D
    head = tl.program_id(0).to(tl.int64)
    offset = head // H * (T * STRIDE) + head % H * D
    q_ptr += offset
    out_ptr += offset
    lse_ptr += head * T
    keys = _load_columns(k_ptr + offset, T, STRIDE, COLUMNS, FULL, TAIL, D, D_MAIN, D_TAIL)
    values = _load_columns(v_ptr + offset, T, STRIDE, COLUMNS, FULL, TAIL, D, D_MAIN, D_TAIL)
    for start in tl.range(0, BLOCKS * ROWS, ROWS):
        _forward_rows(
            q_ptr, out_ptr, lse_ptr, keys, values, start, ROWS, False, BLOCKS * ROWS > T, SCALE,
            CAUSAL, T, STRIDE, COLUMNS, FULL, TAIL, D, D_MAIN, D_TAIL,
        )  # fmt: skip
    if REST > 0:
        _forward_rows(
            q_ptr, out_ptr, lse_ptr, keys, values, BLOCKS * ROWS, REST, True, True, SCALE,
            CAUSAL, T, STRIDE, COLUMNS, FULL, TAIL, D, D_MAIN, D_TAIL,
        )  # fmt: skip


# --- backward -----------------------------------------------------------------------------------------
# Rows have a first array (q or k), whose inner products with that of the columns are the scores, and a second
# (g or v), whose inner products with that of the columns are the gradients of the weights.


@triton.jit
def _backward_columns(
    firsts_ptr, seconds_ptr, lse_ptr, delta_ptr, first, second, lse, delta, dfirst, dsecond, row,
    start, COLUMNS: tl.constexpr, MASK: tl.constexpr, FEW: tl.constexpr, KEYS: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
):  # fmt: skip
    """Adds what some columns contribute to the gradients of the rows."""
    firsts = _load(firsts_ptr, start, COLUMNS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    seconds = _load(seconds_ptr, start, COLUMNS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    column = start + tl.arange(0, COLUMNS)
    if KEYS:
        lse = tl.load(lse_ptr + column, mask=column < T, other=float("inf")) * _LOG2_E
        delta = tl.load(delta_ptr + column, mask=column < T, other=0.0)
    if FEW:
        scores = _inner(firsts, first, D_TAIL)
        slopes = _inner(seconds, second, D_TAIL)
    else:
        scores = _inner(first, firsts, D_TAIL)
        slopes = _inner(second, seconds, D_TAIL)
    query = column if KEYS else row
    key = row if KEYS else column
    if KEYS == FEW:  # queries are along the first axis
        weights = tl.exp2(tl.fma(scores, SCALE * _LOG2_E, -lse[:, None]))
        weights = _visible(weights, query[:, None], key[None, :], 0.0, MASK and not KEYS, CAUSAL, T)
        slopes = weights * (slopes - delta[:, None])
    else:
        weights = tl.exp2(tl.fma(scores, SCALE * _LOG2_E, -lse[None, :]))
        weights = _visible(weights, query[None, :], key[:, None], 0.0, MASK and not KEYS, CAUSAL, T)
        slopes = weights * (slopes - delta[None, :])
    if FEW:
        dfirst = _add_transposed(dfirst, firsts, slopes, D_TAIL)
        if KEYS:
            dsecond = _add_transposed(dsecond, seconds, weights, D_TAIL)
    else:
        dfirst = _add_product(dfirst, slopes, firsts, D_TAIL)
        if KEYS:
            dsecond = _add_product(dsecond, weights, seconds, D_TAIL)
    return dfirst, dsecond


@triton.jit
def _backward_rows(
    first_ptr, second_ptr, firsts_ptr, seconds_ptr, out_ptr, lse_ptr, delta_ptr, dfirst_ptr,
    dsecond_ptr, start, ROWS: tl.constexpr, FEW: tl.constexpr, MASK: tl.constexpr,
    KEYS: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr,
    STRIDE: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
):  # fmt: skip
    first = _load(first_ptr, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    second = _load(second_ptr, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    row = start + tl.arange(0, ROWS)
    lse = row  # of keys neither: they come with the queries, the columns
    delta = row
    if not KEYS:
        lse = tl.load(lse_ptr + row, mask=row < T, other=float("inf")) * _LOG2_E
        out = _load(out_ptr, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
        delta = tl.sum(out[0].to(tl.float32) * second[0].to(tl.float32), 1)
        if D_TAIL > 0:
            delta += tl.sum(out[1].to(tl.float32) * second[1].to(tl.float32), 1)
        tl.store(delta_ptr + row, delta, mask=row < T)
    dfirst = _zeros(ROWS, D_MAIN, D_TAIL)
    dsecond = _zeros(ROWS, D_MAIN, D_TAIL)
    if FEW:
        dfirst = _transposed(dfirst, D_TAIL)
        dsecond = _transposed(dsecond, D_TAIL)
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
        dfirst = _transposed(dfirst, D_TAIL)
        dsecond = _transposed(dsecond, D_TAIL)
    dfirst = _scaled(dfirst, SCALE, D_TAIL)
    _store(dfirst_ptr, dfirst, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)
    if KEYS:
        _store(dsecond_ptr, dsecond, start, ROWS, MASK, T, STRIDE, D, D_MAIN, D_TAIL)


@triton.jit
def _attention_backward_kernel(
    first_ptr,  # of the rows: q or k, [B, T, H, D], as all but lse and delta
    second_ptr,  # g or v
    firsts_ptr,  # of the columns: k or q
    seconds_ptr,  # v or g
    out_ptr,
    lse_ptr,  # [B, H, T]
    delta_ptr,  # [B, H, T]: sums of out g, that queries write and keys read
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
    ROWS: tl.constexpr,  # of a program
    BLOCKS: tl.constexpr,  # so many programs
    REST: tl.constexpr,  # rows of one more program, or 0
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
):
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


# --- calls --------------------------------------------------------------------------------------------


def attention(q, k, v, *, causal=False, tile=None):
    """`reference.attention`."""
    tile = tile or tiles.attention("attention", q.shape[1])
    batch, tokens, heads, _ = q.shape
    return _call(
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
        **_cut(q, tile, causal),
    )


def attention_backward(q, k, v, out, lse, gradient, *, causal=False, tile=None):
    """`reference.attention_backward`."""
    tile = tile or tiles.attention("attention_backward", q.shape[1])
    cut = _cut(q, tile, causal)
    programs = q.shape[0] * q.shape[2] * (cut["BLOCKS"] + (cut["REST"] > 0))
    call = partial(
        _call,
        kernel=_attention_backward_kernel,
        grid=(programs,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **cut,
    )
    like_q, like_lse = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, lse))
    unused = jax.ShapeDtypeStruct((1,), jnp.float32)
    delta, dq, _ = call(
        q, gradient, k, v, out, lse, KEYS=False, out_type=(like_lse, like_q, unused)
    )
    dk, dv = call(k, v, q, gradient, out, lse, delta, KEYS=True, out_type=(like_q, like_q))
    return dq, dk, dv


def _cut(q: jax.Array, tile: tiles.AttentionTile, causal: bool) -> dict:
    _, tokens, heads, width = q.shape
    full, tail = tiles.attention_pieces(tokens, tile.columns)
    d_main = max(16, 1 << (width.bit_length() - 1))
    blocks, rest = tiles.attention_pieces(tokens, tile.rows)
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
        "COLUMNS": tile.columns,
        "FULL": full,
        "TAIL": tail,
    }
