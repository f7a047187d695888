"""GELU, forward and backward."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.formats import QTensor
from swjax.kernels.gelu import reference
from swjax.kernels.triton_gpu import chunks, launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, reciprocal, round_to
from swjax.kernels.triton_gpu.chunks import (
    load_chunk,
    round_chunk,
    smallest_absmax,
    store_chunk,
    store_quantized,
    store_sum,
    zero_sums,
)

_TAIL: tl.constexpr = tl.constexpr(reference.TAIL)
# A constant, because the interpreter has no len() of a constexpr.
_TERMS: tl.constexpr = tl.constexpr(len(reference.TAIL))


@triton.jit
def _normal_tail(x):
    """P(X > |x|) for a standard normal X, with relative error 1e-6, and exp(-x**2 / 2).

    The tail is 0.5 erfcx(z) exp(-z**2) with z = |x| / sqrt(2); see `reference.TAIL`. The cost is one
    reciprocal and one exponential, as in the tanh form.
    """
    t = reciprocal(tl.fma(tl.abs(x), 0.38 * 0.7071067811865476, 1.0))
    p = tl.fma(t, _TAIL[0], _TAIL[1])
    for i in tl.static_range(2, _TERMS):
        p = tl.fma(t, p, _TAIL[i])
    e = tl.exp2(x * x * -0.7213475204444817)
    return t * p * e, e


@triton.jit
def _tanh_gate(x):
    """0.5 (1 + tanh(u)), which is P(X < x) in the tanh form, and du/dx."""
    square = x * x
    u = x * tl.fma(square, 0.7978845608028654 * 0.044715, 0.7978845608028654)
    gate = reciprocal(1.0 + tl.exp2(u * -2.8853900817779268))
    return gate, tl.fma(square, 0.7978845608028654 * 0.134145, 0.7978845608028654)


@triton.jit
def gelu_value(x, TANH: tl.constexpr):
    """GELU of x."""
    if TANH:
        gate, _ = _tanh_gate(x)
        return x * gate
    else:
        tail, _ = _normal_tail(x)
        return tl.fma(-tl.abs(x), tail, tl.maximum(x, 0.0))


@triton.jit
def gelu_slope(x, TANH: tl.constexpr):
    """The derivative of GELU at x."""
    if TANH:
        gate, du = _tanh_gate(x)
        return tl.fma(x * du, 2.0 * gate * (1.0 - gate), gate)
    else:
        tail, e = _normal_tail(x)
        return tl.fma(x * 0.3989422804014327, e, tl.where(x < 0, tail, 1.0 - tail))


@triton.jit
def _gelu_kernel(
    x_ptr,  # [M, WIDTH]
    y_ptr,  # [M, WIDTH]
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TANH: tl.constexpr,
    WRITE: tl.constexpr,  # whether to write y
    QUANTIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes GELU of rows, rounded to the dtype of x, and writes or quantizes it, or both."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        for i in tl.static_range(CHUNKS):
            # Loads in pairs made this compute-bound kernel 1 to 5% slower.
            x = load_chunk(x_ptr, block, i, M, WIDTH, ROWS, CHUNK, False)
            xs = xs + (gelu_value(x, TANH),)
        ys = ()
        absmax = smallest_absmax(ROWS, CHUNK)
        for i in tl.static_range(CHUNKS):
            y = round_chunk(xs[i], y_ptr, dtype, block, i, M, WIDTH, ROWS, CHUNK, WRITE)
            ys = ys + (y,)
            absmax = nan_maximum(absmax, tl.abs(y))
        if QUANTIZE:
            store_quantized(
                ys, absmax, values_ptr, scale_ptr, block, M, WIDTH, ROWS, CHUNK, CHUNKS, LARGEST,
                INVERSE,
            )  # fmt: skip


def gelu(
    x: jax.Array,
    *,
    approximate: bool = False,
    quantize_to: str | None = None,
    high_precision: bool = True,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.gelu`."""
    if tile is None:  # tuned for the call in an MLP, which quantizes and does not write y
        tuned = quantize_to and not high_precision
        tile = tiles.row_tile("gelu", x.shape[-1]) if tuned else tiles.row_rule(x.shape[-1])
    persistent = tile.stages > 1  # several blocks per program, with prefetch
    y, values, scale = launcher.call(
        x,
        kernel=_gelu_kernel,
        out_type=(
            launcher.output(high_precision, x.shape, x.dtype),
            *chunks.quantized_outputs(x, quantize_to),
        ),
        TANH=approximate,
        WRITE=high_precision,
        QUANTIZE=quantize_to is not None,
        **chunks.range_constants(quantize_to),
        **chunks.row_launch(x, tile, persistent=persistent),
    )
    return y if high_precision else None, chunks.qtensor(values, scale, quantize_to)


@triton.jit
def _gelu_backward_kernel(
    x_ptr,  # [M, WIDTH]
    gradient_ptr,  # [M, WIDTH]
    dx_ptr,  # [M, WIDTH]
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    sums_ptr,  # [programs, WIDTH]
    y_ptr,  # [M, WIDTH], GELU's output
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TANH: tl.constexpr,
    QUANTIZE: tl.constexpr,
    RECOMPUTE: tl.constexpr,  # whether to write y
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes dx = gradient times GELU's slope, rounded to the dtype of x; writes, sums and quantizes it."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    sums = zero_sums(CHUNK, CHUNKS)
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        for i in tl.static_range(CHUNKS):
            x = load_chunk(x_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            gradient = load_chunk(gradient_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            if RECOMPUTE:
                y = round_to(gelu_value(x, TANH), dtype)[0]
                store_chunk(y_ptr, y, block, i, M, WIDTH, ROWS, CHUNK)
            xs = xs + (gradient * gelu_slope(x, TANH),)
        dxs = ()
        absmax = smallest_absmax(ROWS, CHUNK)
        totals = ()
        for i in tl.static_range(CHUNKS):
            dx = round_chunk(xs[i], dx_ptr, dtype, block, i, M, WIDTH, ROWS, CHUNK, True)
            dxs = dxs + (dx,)
            absmax = nan_maximum(absmax, tl.abs(dx))
            totals = totals + (sums[i] + tl.sum(dx, 0),)
        sums = totals
        if QUANTIZE:
            store_quantized(
                dxs, absmax, values_ptr, scale_ptr, block, M, WIDTH, ROWS, CHUNK, CHUNKS, LARGEST,
                INVERSE,
            )  # fmt: skip
    for i in tl.static_range(CHUNKS):
        store_sum(sums_ptr, sums[i], i, WIDTH, CHUNK)


def gelu_backward(
    x: jax.Array,
    gradient: jax.Array,
    *,
    approximate: bool = False,
    quantize_to: str | None = None,
    recompute: bool = False,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array, QTensor | None, jax.Array, jax.Array | None]:
    """`reference.gelu_backward`."""
    tile = tile or tiles.row_tile("gelu_backward", x.shape[-1])
    launch = chunks.row_launch(x, tile, persistent=True)
    rows = jax.ShapeDtypeStruct(x.shape, x.dtype)
    dx, values, scale, sums, y = launcher.call(
        x,
        gradient,
        kernel=_gelu_backward_kernel,
        out_type=(
            rows,
            *chunks.quantized_outputs(x, quantize_to),
            jax.ShapeDtypeStruct((*launch["grid"], x.shape[-1]), jnp.float32),
            launcher.output(recompute, x.shape, x.dtype),
        ),
        TANH=approximate,
        RECOMPUTE=recompute,
        QUANTIZE=quantize_to is not None,
        **chunks.range_constants(quantize_to),
        **launch,
    )
    q = chunks.qtensor(values, scale, quantize_to)
    return dx, q, jnp.sum(sums, axis=0), y if recompute else None


WHY_NOT = {"gelu": chunks.why_not, "gelu_backward": chunks.why_not}
