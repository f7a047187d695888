"""Triton kernels, called through jax-triton, for NVIDIA GPUs from Ampere on (fp8: from Ada on).

Row kernels hold whole rows in registers, cut into `CHUNKS` pieces of `CHUNK` columns (a power of two, as
Triton wants it: 1280 is 5 x 256, so no lane idles). Every size is a `constexpr`: with sizes known only at
run time the loads of the product went byte by byte. Floating-point fusion is off: what is written is what is
computed, as in the specification.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import reference, tiles
from swjax.kernels.reference import INVERSE, LARGEST, SMALLEST_ABSMAX, QTensor

_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_ABSMAX)
# Added to |x| < 2**22 it leaves the nearest integer, ties to even, in the low bits of the sum.
_ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)


# --- element-wise pieces ------------------------------------------------------------------------------


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """fp32 within the range of `dtype`, rounded to it, ties to even."""
    if dtype == tl.int8:
        return (x + _ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return x.to(dtype)


@triton.jit
def _larger(a, b):
    """NaN if either is: a row that holds one gets a scale that says so."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


_BF16_PAIR: tl.constexpr = tl.constexpr("""{
    .reg .b32 low, high;
    cvt.rn.bf16x2.f32 $0, $4, $3;
    shl.b32 low, $0, 16;
    and.b32 high, $0, 0xffff0000;
    mov.b32 $1, low;
    mov.b32 $2, high;
}""")


@triton.jit
def _round(x, dtype: tl.constexpr):
    """fp32 rounded to `dtype`, as that and as fp32."""
    if dtype == tl.bfloat16:
        # Two at a time: one alone goes through the slow conversion unit, which the exponential needs.
        return tl.inline_asm_elementwise(
            _BF16_PAIR, "=r,=f,=f,f,f", [x], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=2
        )
    else:
        y = x.to(dtype)
        return y, y.to(tl.float32)


_TWO_BF16: tl.constexpr = tl.constexpr("""{
    shl.b32 $0, $2, 16;
    and.b32 $1, $2, 0xffff0000;
}""")


@triton.jit
def _widen(x, PAIRS: tl.constexpr):
    """In fp32; bf16 in pairs is two instructions, one by one three."""
    if PAIRS and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _TWO_BF16, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _normal_tail(x):
    """P(X > |x|) for a normal X, relative error 1e-6, and exp(-x**2 / 2).

    The tail is 0.5 erfcx(z) exp(-z**2) with z = |x| / sqrt(2), and erfcx a polynomial in
    t = 1 / (1 + 0.38 z), a minimax fit. One reciprocal and one exponential, as the tanh form has.
    """
    t = _reciprocal(tl.fma(tl.abs(x), 0.38 * 0.7071067811865476, 1.0))
    p = tl.fma(t, -0.06268340327314895, 0.16792059162792555)
    p = tl.fma(t, p, -0.034805477355772395)
    p = tl.fma(t, p, 0.12379693751587756)
    p = tl.fma(t, p, 0.09034876746578992)
    p = tl.fma(t, p, 0.10827743860128841)
    p = tl.fma(t, p, 0.10714462882421476)
    e = tl.exp2(x * x * -0.7213475204444817)
    return t * p * e, e


@triton.jit
def _tanh_gate(x):
    """0.5 (1 + tanh(u)), which the tanh form has for P(X < x), and du/dx."""
    square = x * x
    u = x * tl.fma(square, 0.7978845608028654 * 0.044715, 0.7978845608028654)
    gate = _reciprocal(1.0 + tl.exp2(u * -2.8853900817779268))
    return gate, tl.fma(square, 0.7978845608028654 * 0.134145, 0.7978845608028654)


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:
        gate, _ = _tanh_gate(x)
        return x * gate
    else:
        tail, _ = _normal_tail(x)
        return tl.fma(-tl.abs(x), tail, tl.maximum(x, 0.0))


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr):
    if TANH:
        gate, du = _tanh_gate(x)
        return tl.fma(x * du, 2.0 * gate * (1.0 - gate), gate)
    else:
        tail, e = _normal_tail(x)
        return tl.fma(x * 0.3989422804014327, e, tl.where(x < 0, tail, 1.0 - tail))


# --- rows in chunks -----------------------------------------------------------------------------------


@triton.jit
def _load_rows(
    x_ptr, block, i: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, PAIRS: tl.constexpr = True,
):  # fmt: skip
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # a tensor may pass 2**31 elements
    column = i * CHUNK + tl.arange(0, CHUNK)
    at = x_ptr + row[:, None] * WIDTH + column[None, :]
    if M % ROWS == 0 and WIDTH % CHUNK == 0:
        return _widen(tl.load(at), PAIRS)
    else:
        inside = (row < M)[:, None] & (column < WIDTH)[None, :]
        return _widen(tl.load(at, mask=inside, other=0.0), PAIRS)


@triton.jit
def _store_rows(
    y_ptr, y, block, i: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = i * CHUNK + tl.arange(0, CHUNK)
    at = y_ptr + row[:, None] * WIDTH + column[None, :]
    if M % ROWS == 0 and WIDTH % CHUNK == 0:
        tl.store(at, y)
    else:
        tl.store(at, y, mask=(row < M)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _load_columns(x_ptr, i: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    column = (i * CHUNK + tl.arange(0, CHUNK))[None, :]
    if WIDTH % CHUNK == 0:
        return tl.load(x_ptr + column).to(tl.float32)
    else:
        return tl.load(x_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _store_columns(y_ptr, y, i: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """One row a program, summed afterwards: the same sum in every run."""
    column = i * CHUNK + tl.arange(0, CHUNK)
    tl.store(y_ptr + tl.program_id(0) * WIDTH + column, y, mask=column < WIDTH)


@triton.jit
def _row_sum(xs, CHUNKS: tl.constexpr):
    total = xs[0]
    for i in tl.static_range(1, CHUNKS):
        total += xs[i]
    return tl.sum(total, 1)[:, None]


@triton.jit
def _moments(
    xs, WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EPSILON: tl.constexpr
):
    """The rows minus their mean (zero past the edge), and one over their standard deviation."""
    mean = _row_sum(xs, CHUNKS) * (1.0 / WIDTH)
    centred = ()
    squares = ()
    for i in tl.static_range(CHUNKS):
        x = xs[i] - mean
        if WIDTH % CHUNK != 0:
            x = tl.where((i * CHUNK + tl.arange(0, CHUNK) < WIDTH)[None, :], x, 0.0)
        centred = centred + (x,)
        squares = squares + (x * x,)
    deviation = tl.sqrt_rn(_row_sum(squares, CHUNKS) * (1.0 / WIDTH) + EPSILON)
    return centred, tl.div_rn(tl.full(deviation.shape, 1.0, tl.float32), deviation)


# --- row kernels --------------------------------------------------------------------------------------


@triton.jit
def _row_kernel(
    x_ptr,  # [M, WIDTH]
    gradient_ptr,  # [M, WIDTH], of the GELU's output
    gamma_ptr,  # [WIDTH], of LayerNorm
    beta_ptr,  # [WIDTH]
    wide_ptr,  # [M, WIDTH]
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    sums_ptr,  # [programs, WIDTH]
    again_ptr,  # [M, WIDTH], the GELU's output, in its backward pass
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRODUCER: tl.constexpr,  # "none", "layer_norm", "gelu" or "gelu_backward"
    TANH: tl.constexpr,
    EPSILON: tl.constexpr,
    WIDE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SUM: tl.constexpr,
    AGAIN: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Reads rows, applies the producer, and writes what is asked for: wide, quantized, column sums."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums = sums + (tl.zeros((CHUNK,), tl.float32),)

    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        for i in tl.static_range(CHUNKS):
            # Pairs made the GELU, which waits for its arithmetic, 1 to 5% slower.
            x = _load_rows(x_ptr, block, i, M, WIDTH, ROWS, CHUNK, PRODUCER != "gelu")
            if PRODUCER == "gelu":
                x = _gelu(x, TANH)
            elif PRODUCER == "gelu_backward":
                gradient = _load_rows(gradient_ptr, block, i, M, WIDTH, ROWS, CHUNK)
                if AGAIN:
                    again = _round(_gelu(x, TANH), dtype)[0]
                    _store_rows(again_ptr, again, block, i, M, WIDTH, ROWS, CHUNK)
                x = gradient * _gelu_slope(x, TANH)
            xs = xs + (x,)
        if PRODUCER == "layer_norm":
            xs, inverse = _moments(xs, WIDTH, CHUNK, CHUNKS, EPSILON)

        ys = ()  # in the dtype of x: what is quantized is what the wide output says
        absmax = tl.full((ROWS, CHUNK), _SMALLEST, tl.float32)
        totals = ()
        for i in tl.static_range(CHUNKS):
            x = xs[i]
            if PRODUCER == "layer_norm":
                gamma = _load_columns(gamma_ptr, i, WIDTH, CHUNK)
                x = x * (inverse * gamma) + _load_columns(beta_ptr, i, WIDTH, CHUNK)
            if PRODUCER == "none":
                y = x
            else:
                narrow, y = _round(x, dtype)
                if WIDE:
                    _store_rows(wide_ptr, narrow, block, i, M, WIDTH, ROWS, CHUNK)
            ys = ys + (y,)
            absmax = _larger(absmax, tl.abs(y))
            if SUM:
                totals = totals + (sums[i] + tl.sum(y, 0),)
            else:
                totals = totals + (sums[i],)
        sums = totals

        if QUANTIZE:
            absmax = tl.reduce(absmax, 1, _larger)
            row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
            tl.store(scale_ptr + row, absmax * INVERSE, mask=row < M)
            factor = tl.div_rn(tl.full((ROWS,), LARGEST, tl.float32), absmax)[:, None]
            for i in tl.static_range(CHUNKS):
                narrow = _narrow(ys[i] * factor, values_ptr.dtype.element_ty)
                _store_rows(values_ptr, narrow, block, i, M, WIDTH, ROWS, CHUNK)

    if SUM:
        for i in tl.static_range(CHUNKS):
            _store_columns(sums_ptr, sums[i], i, WIDTH, CHUNK)


@triton.jit
def _layer_norm_backward_kernel(
    x_ptr,  # [M, WIDTH]
    gradient_ptr,  # [M, WIDTH]
    second_ptr,  # [M, WIDTH], as the next two
    third_ptr,
    residual_ptr,
    gamma_ptr,  # [WIDTH]
    beta_ptr,  # [WIDTH]
    dx_ptr,  # [M, WIDTH]
    gamma_sums_ptr,  # [programs, WIDTH]
    beta_sums_ptr,  # [programs, WIDTH]
    again_ptr,  # [M, WIDTH], LayerNorm's output
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EPSILON: tl.constexpr,
    GRADIENTS: tl.constexpr,  # 1 to 3, whose sum is the gradient
    RESIDUAL: tl.constexpr,
    AGAIN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = (v - mean(v) - n mean(v n)) / deviation + residual, with v = gradient gamma and n the normalized
    row."""
    gamma_sums = ()
    beta_sums = ()
    for _ in tl.static_range(CHUNKS):
        gamma_sums = gamma_sums + (tl.zeros((CHUNK,), tl.float32),)
        beta_sums = beta_sums + (tl.zeros((CHUNK,), tl.float32),)

    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        gradients = ()
        for i in tl.static_range(CHUNKS):
            xs = xs + (_load_rows(x_ptr, block, i, M, WIDTH, ROWS, CHUNK),)
            gradient = _load_rows(gradient_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            if GRADIENTS > 1:
                gradient += _load_rows(second_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            if GRADIENTS > 2:
                gradient += _load_rows(third_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            gradients = gradients + (gradient,)
        xs, inverse = _moments(xs, WIDTH, CHUNK, CHUNKS, EPSILON)

        vs = ()
        products = ()
        new_gamma_sums = ()
        new_beta_sums = ()
        for i in tl.static_range(CHUNKS):
            gamma = _load_columns(gamma_ptr, i, WIDTH, CHUNK)
            if AGAIN:
                y = xs[i] * (inverse * gamma) + _load_columns(beta_ptr, i, WIDTH, CHUNK)
                y = _round(y, again_ptr.dtype.element_ty)[0]
                _store_rows(again_ptr, y, block, i, M, WIDTH, ROWS, CHUNK)
            v = gradients[i] * gamma
            vs = vs + (v,)
            products = products + (v * xs[i],)
            term = tl.sum(gradients[i] * (xs[i] * inverse), 0)
            new_gamma_sums = new_gamma_sums + (gamma_sums[i] + term,)
            new_beta_sums = new_beta_sums + (beta_sums[i] + tl.sum(gradients[i], 0),)
        gamma_sums = new_gamma_sums
        beta_sums = new_beta_sums
        v_mean = _row_sum(vs, CHUNKS) * (1.0 / WIDTH)
        slope = _row_sum(products, CHUNKS) * (1.0 / WIDTH) * inverse * inverse
        for i in tl.static_range(CHUNKS):
            dx = (vs[i] - v_mean - xs[i] * slope) * inverse
            if RESIDUAL:
                dx += _load_rows(residual_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            dx = dx.to(dx_ptr.dtype.element_ty)
            _store_rows(dx_ptr, dx, block, i, M, WIDTH, ROWS, CHUNK)

    for i in tl.static_range(CHUNKS):
        _store_columns(gamma_sums_ptr, gamma_sums[i], i, WIDTH, CHUNK)
        _store_columns(beta_sums_ptr, beta_sums[i], i, WIDTH, CHUNK)


# --- a whole matrix with scales found before ----------------------------------------------------------


@triton.jit
def _scale_kernel(
    x_ptr,  # [M, N]
    absmax_ptr,  # [PARTS], [M] or [N]
    values_ptr,  # [M, N]
    transposed_ptr,  # [N, M]
    scale_ptr,  # [1], [M] or [N]
    M: tl.constexpr,
    N: tl.constexpr,
    SCOPE: tl.constexpr,  # what one scale spans: "tensor", "row" or "column"
    PARTS: tl.constexpr,  # of a tensor, each with its maximum
    STRAIGHT: tl.constexpr,  # the values as they lie
    TRANSPOSED: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < M)[:, None] & (column < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCOPE == "tensor":
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        at, known = tl.zeros((1,), tl.int64), tl.full((1,), True, tl.int1)
        largest = tl.reduce(tl.load(absmax_ptr + tl.arange(0, PARTS)), 0, _larger)
        absmax = tl.zeros((1,), tl.float32) + largest
    else:
        if SCOPE == "row":
            first = tl.program_id(0) == 0
            at, known = row, row < M
        else:
            first = tl.program_id(1) == 0
            at, known = column.to(tl.int64), column < N
        absmax = tl.load(absmax_ptr + at, mask=known, other=1.0)
    absmax = _larger(absmax, tl.full(absmax.shape, _SMALLEST, tl.float32))
    if first:
        tl.store(scale_ptr + at, absmax * INVERSE, mask=known)
    factor = tl.div_rn(tl.full(absmax.shape, LARGEST, tl.float32), absmax)
    factor = factor[:, None] if SCOPE == "row" else factor[None, :]
    if STRAIGHT:
        narrow = _narrow(x * factor, values_ptr.dtype.element_ty)
        tl.store(values_ptr + row[:, None] * N + column[None, :], narrow, mask=inside)
    if TRANSPOSED:
        narrow = _narrow(x * factor, transposed_ptr.dtype.element_ty)
        at = column[:, None].to(tl.int64) * M + row[None, :]
        tl.store(transposed_ptr + at, tl.trans(narrow), mask=tl.trans(inside))


# --- the product --------------------------------------------------------------------------------------


@triton.jit
def _matmul_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [N, K]
    a_scale_ptr,  # [M] or [1]
    b_scale_ptr,  # [N] or [1]
    bias_ptr,  # [N]
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_ROWS: tl.constexpr,  # one scale a row of a, or one in all
    B_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # row blocks that share their columns of b while these are in the L2 cache
):
    blocks_m: tl.constexpr = tl.cdiv(M, BLOCK_M)
    blocks_n: tl.constexpr = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * blocks_n) * GROUP
    height = min(blocks_m - first, GROUP)
    block_m = first + program % (GROUP * blocks_n) % height
    block_n = program % (GROUP * blocks_n) // height

    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the edge the first rows are read again: loads need no mask, and the store has one.
    a_row = (row % M if M % BLOCK_M else row).to(tl.int64)
    b_row = (column % N if N % BLOCK_N else column).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + a_row[:, None] * K + k[None, :]
    b_at = b_ptr + b_row[None, :] * K + k[:, None]
    integer: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    total_type: tl.constexpr = tl.int32 if integer else tl.float32
    total = tl.zeros((BLOCK_M, BLOCK_N), total_type)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(k < K - start)[None, :], other=0.0)
            b = tl.load(b_at, mask=(k < K - start)[:, None], other=0.0)
        total = tl.dot(a, b, total, out_dtype=total_type)
        a_at += BLOCK_K
        b_at += BLOCK_K

    if A_ROWS:
        a_scale = tl.load(a_scale_ptr + row, mask=row < M, other=0.0)[:, None]
    else:
        a_scale = tl.load(a_scale_ptr + tl.zeros((1, 1), tl.int32))
    if B_ROWS:
        b_scale = tl.load(b_scale_ptr + column, mask=column < N, other=0.0)[None, :]
    else:
        b_scale = tl.load(b_scale_ptr + tl.zeros((1, 1), tl.int32))
    out = total.to(tl.float32) * (a_scale * b_scale)
    if BIAS:
        out += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    inside = (row < M)[:, None] & (column < N)[None, :]
    at = row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


# --- calls --------------------------------------------------------------------------------------------


def _call(*arrays, **options):
    # Here, so that the kernels compile where jax-triton is not installed.
    import jax_triton

    return jax_triton.triton_call(*arrays, backend_options={"enable_fp_fusion": False}, **options)


def quantize(
    x: jax.Array, axes: tuple[int, ...] = (-1,), dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """`reference.quantize`, for row-wise scales, one scale in all, or scales of the last axis.

    Rows are read once. Otherwise XLA finds the maxima, and a second pass rounds, and transposes.
    """
    axes = tuple(axis % x.ndim for axis in axes)
    rowwise = axes == (x.ndim - 1,)
    if rowwise and not transpose and x.shape[-1] <= tiles.WIDEST_ROW:
        return _rows(x, quantize_to=dtype)[1]
    return quantize_by(x, reference.absolute_maximum(x, axes), dtype, transpose=transpose)


def quantize_by(
    x: jax.Array, absmax: jax.Array, dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """`reference.quantize_by`, for the same scales."""
    values, transposed, scale = _scaled(x, absmax, dtype, not transpose, transpose)
    return QTensor(transposed, scale.T) if transpose else QTensor(values.reshape(x.shape), scale)


def quantize_both(x: jax.Array, absmax: jax.Array, dtype: str = "int8") -> tuple[QTensor, QTensor]:
    """`reference.quantize_both`."""
    if absmax.size & (absmax.size - 1):  # Triton counts in powers of two
        absmax = reference.absolute_maximum(absmax, (0,))
    values, transposed, scale = _scaled(x, absmax, dtype, True, True)
    return QTensor(values, scale), QTensor(transposed, scale)


def _scaled(x, absmax, dtype: str, straight: bool, transposed: bool):
    """Values [m, n] as they lie, values [n, m], either if it is asked for, and scales.

    absmax has one element, one a row or one a column, or in one dimension the maxima of parts."""
    matrix = x.reshape(-1, x.shape[-1])
    m, n = matrix.shape
    scope = "row" if absmax.shape[-1] == 1 else "column"
    if absmax.size == 1 or absmax.ndim == 1:
        scope = "tensor"
    shape = (1,) * x.ndim if scope == "tensor" else absmax.shape
    values, values_t, scale = _call(
        matrix,
        absmax.reshape(-1),
        kernel=_scale_kernel,
        out_type=(
            jax.ShapeDtypeStruct((m, n) if straight else (1,), dtype),
            jax.ShapeDtypeStruct((n, m) if transposed else (1,), dtype),
            jax.ShapeDtypeStruct((math.prod(shape),), jnp.float32),
        ),
        grid=(triton.cdiv(n, 64), triton.cdiv(m, 64)),
        num_warps=4,
        M=m,
        N=n,
        SCOPE=scope,
        PARTS=absmax.size,
        STRAIGHT=straight,
        TRANSPOSED=transposed,
        LARGEST=LARGEST[dtype],
        INVERSE=INVERSE[dtype],
        BLOCK_M=64,
        BLOCK_N=64,
    )
    return values, values_t, scale.reshape(shape)


def quantize_and_sum(x: jax.Array, dtype: str = "int8") -> tuple[QTensor, jax.Array]:
    """`reference.quantize_and_sum`."""
    return _rows(x, quantize_to=dtype, total=True)[1:3]


def layer_norm(x, gamma, beta, *, epsilon, quantize_to=None, wide=True):
    """`reference.layer_norm`."""
    affine = {"gamma": gamma, "beta": beta, "epsilon": epsilon}
    return _rows(x, producer="layer_norm", quantize_to=quantize_to, wide=wide, **affine)[:2]


def gelu(x, *, approximate=False, quantize_to=None, wide=True):
    """`reference.gelu`."""
    return _rows(x, producer="gelu", tanh=approximate, quantize_to=quantize_to, wide=wide)[:2]


def gelu_backward(x, gradient, *, approximate=False, quantize_to=None, again=False):
    """`reference.gelu_backward`."""
    outputs = {"quantize_to": quantize_to, "wide": True, "total": True, "again": again}
    return _rows(x, gradient, producer="gelu_backward", tanh=approximate, **outputs)


def _rows(
    x: jax.Array,
    gradient: jax.Array | None = None,
    *,
    gamma: jax.Array | None = None,
    beta: jax.Array | None = None,
    producer: str = "none",
    tanh: bool = False,
    epsilon: float = 0.0,
    quantize_to: str | None = None,
    wide: bool = False,
    total: bool = False,
    again: bool = False,
    tile: tiles.RowTile | None = None,
):
    """The row kernel: (result, its QTensor, its column sums, the GELU's output), each or None."""
    width = x.shape[-1]
    if tile is None:  # tuned as blocks call it, the GELU to be quantized alone
        tuned = producer != "gelu" or (quantize_to and not wide)
        tile = tiles.row(producer, width) if tuned else tiles.row_rule(width)
    m = x.size // width
    blocks = triton.cdiv(m, tile.rows)
    many = total or (producer == "gelu" and tile.stages > 1)  # rows a program, that are read ahead
    programs = min(blocks, tiles.row_programs(tile)) if many else blocks
    unused = jnp.zeros(1, jnp.float32)  # in the place of what the producer does not read

    def out(wanted, shape, dtype):
        return jax.ShapeDtypeStruct(shape if wanted else (1,), dtype if wanted else jnp.float32)

    y, values, scale, sums, output = _call(
        x,
        unused if gradient is None else gradient,
        unused if gamma is None else gamma,
        unused if beta is None else beta,
        kernel=_row_kernel,
        out_type=(
            out(wide, x.shape, x.dtype),
            out(quantize_to, x.shape, quantize_to),
            out(quantize_to, (*x.shape[:-1], 1), jnp.float32),
            out(total, (programs, width), jnp.float32),
            out(again, x.shape, x.dtype),
        ),
        grid=(programs,),
        num_warps=tile.warps,
        PRODUCER=producer,
        TANH=tanh,
        EPSILON=epsilon,
        WIDE=wide,
        QUANTIZE=quantize_to is not None,
        SUM=total,
        AGAIN=again,
        LARGEST=LARGEST[quantize_to or "int8"],
        INVERSE=INVERSE[quantize_to or "int8"],
        **_cut(x, tile, many),
    )
    return (
        y if wide else None,
        QTensor(values, scale) if quantize_to else None,
        jnp.sum(sums, axis=0) if total else None,
        output if again else None,
    )


def layer_norm_backward(x, gamma, gradient, residual=None, beta=None, *, epsilon, tile=None):
    """`reference.layer_norm_backward`."""
    gradients = gradient if isinstance(gradient, tuple) else (gradient,)
    if len(gradients) > 3:
        rest = sum(g.astype(jnp.float32) for g in gradients[2:]).astype(x.dtype)
        gradients = (*gradients[:2], rest)
    width = x.shape[-1]
    m = x.size // width
    tile = tile or tiles.row("layer_norm_backward", width)
    programs = min(triton.cdiv(m, tile.rows), tiles.row_programs(tile, sums=2))
    partial_sums = jax.ShapeDtypeStruct((programs, width), jnp.float32)
    wide = jax.ShapeDtypeStruct(x.shape, x.dtype)
    dx, dgamma, dbeta, output = _call(
        x,
        *(gradients * 3)[:3],  # what a kernel does not read still needs an address
        x if residual is None else residual,
        gamma,
        gamma if beta is None else beta,
        kernel=_layer_norm_backward_kernel,
        out_type=(
            wide,
            partial_sums,
            partial_sums,
            jax.ShapeDtypeStruct((1,), x.dtype) if beta is None else wide,
        ),
        grid=(programs,),
        num_warps=tile.warps,
        EPSILON=epsilon,
        GRADIENTS=len(gradients),
        RESIDUAL=residual is not None,
        AGAIN=beta is not None,
        **_cut(x, tile, True),
    )
    sums = (jnp.sum(partial_sum, axis=0) for partial_sum in (dgamma, dbeta))
    return dx, *sums, None if beta is None else output


def _cut(x: jax.Array, tile: tiles.RowTile, many: bool) -> dict[str, int]:
    """What a row kernel is told of sizes; `many`: its programs take more than one block. Stages are tuned for
    16 bits: those of wider rows might not fit into shared memory."""
    width = x.shape[-1]
    return {
        "M": x.size // width,
        "WIDTH": width,
        "ROWS": tile.rows,
        "CHUNK": tile.chunk,
        "CHUNKS": triton.cdiv(width, tile.chunk),
        "STAGES": tile.stages if many and x.dtype.itemsize == 2 else 1,
    }


def matmul(
    a: QTensor,
    b: QTensor,
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    contract: tuple[int, int] = (-1, -1),
    tile: tiles.TritonTile | None = None,
) -> jax.Array:
    """`reference.matmul`."""
    a, b = (q.T if axis == 0 else q for q, axis in zip((a, b), contract))
    k = a.values.shape[-1]
    m, n = a.values.size // k, b.values.shape[0]
    tile = tile or tiles.triton(m, n, k)
    y = _call(
        a.values.reshape(m, k),
        b.values,
        a.scale.reshape(-1),
        b.scale.reshape(-1),
        jnp.zeros(1, jnp.float32) if bias is None else bias,
        kernel=_matmul_kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        M=m,
        N=n,
        K=k,
        A_ROWS=a.scale.size > 1,
        B_ROWS=b.scale.size > 1,
        BIAS=bias is not None,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP=tile.group,
    )
    return y.reshape(*a.values.shape[:-1], n)
