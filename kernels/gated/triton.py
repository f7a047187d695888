"""A gated activation, forward and backward."""

import math
from typing import Any

import jax
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor
from swjax.kernels.gelu.triton import gelu_slope, gelu_value
from swjax.kernels.quantizers.triton import quantize, why_not_rows
from swjax.kernels.triton_gpu import chunks, launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, reciprocal, round_to
from swjax.kernels.triton_gpu.chunks import (
    load_chunk,
    smallest_absmax,
    store_chunk,
    store_quantized,
)


@triton.jit
def _sigmoid(x):
    return reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _value(x, ACTIVATION: tl.constexpr):
    """The activation of x."""
    if ACTIVATION == "silu":
        return x * _sigmoid(x)
    else:
        return gelu_value(x, ACTIVATION == "gelu_tanh")


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """The derivative of the activation at x."""
    if ACTIVATION == "silu":
        gate = _sigmoid(x)
        return tl.fma(x, gate * (1.0 - gate), gate)
    else:
        return gelu_slope(x, ACTIVATION == "gelu_tanh")


@triton.jit
def _gated_kernel(
    gate_ptr,  # [M, WIDTH]
    up_ptr,  # [M, WIDTH]
    h_ptr,  # [M, WIDTH]
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WRITE: tl.constexpr,  # whether to write h
    QUANTIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes h = activation(gate) up of rows, rounded to gate's dtype; writes or quantizes it, or both."""
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        hs = ()
        absmax = smallest_absmax(ROWS, CHUNK)
        for i in tl.static_range(CHUNKS):
            gate = load_chunk(gate_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            up = load_chunk(up_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            h, exact = round_to(_value(gate, ACTIVATION) * up, dtype)
            if WRITE:
                store_chunk(h_ptr, h, block, i, M, WIDTH, ROWS, CHUNK)
            hs = hs + (h,)
            absmax = nan_maximum(absmax, tl.abs(exact))
        if QUANTIZE:
            store_quantized(
                hs, absmax, values_ptr, scale_ptr, block, M, WIDTH, ROWS, CHUNK, CHUNKS, LARGEST,
                INVERSE,
            )  # fmt: skip


def gated(
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str = "silu",
    quantize_to: str | None = None,
    high_precision: bool = True,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.gated`."""
    shape = gate.shape
    if shape[-1] > tiles.WIDEST_ROW:
        parts, _ = gated(*_cut(gate, up), activation=activation)
        assert parts is not None, "high_precision=True"
        h = parts.reshape(shape)
        q = quantize(h, dtype=quantize_to) if quantize_to else None
        return h if high_precision else None, q
    tile = tile or tiles.row_tile("gated", shape[-1])
    persistent = tile.stages > 1  # several blocks per program, with prefetch
    h, values, scale = launcher.call(
        gate,
        up,
        kernel=_gated_kernel,
        out_type=(
            launcher.output(high_precision, shape, gate.dtype),
            *chunks.quantized_outputs(gate, quantize_to),
        ),
        ACTIVATION=activation,
        WRITE=high_precision,
        QUANTIZE=quantize_to is not None,
        **chunks.range_constants(quantize_to),
        **chunks.row_launch(gate, tile, persistent=persistent),
    )
    return h if high_precision else None, chunks.qtensor(values, scale, quantize_to)


@triton.jit
def _gated_backward_kernel(
    gate_ptr,  # [M, WIDTH], as the next two
    up_ptr,
    gradient_ptr,  # overwritten with h, the result of the forward pass, if RECOMPUTE
    dgate_ptr,  # [M, WIDTH]
    dup_ptr,  # [M, WIDTH]
    dgate_values_ptr,  # [M, WIDTH]
    dgate_scale_ptr,  # [M]
    dup_values_ptr,  # [M, WIDTH]
    dup_scale_ptr,  # [M]
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANTIZE: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes the gradients of gate and up, rounded to their dtype; writes and quantizes them.

    Two rows stay in registers until their maxima are known, rounded, which takes half of the registers.
    """
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        dgates = ()
        dups = ()
        dgate_absmax = smallest_absmax(ROWS, CHUNK)
        dup_absmax = smallest_absmax(ROWS, CHUNK)
        for i in tl.static_range(CHUNKS):
            gate = load_chunk(gate_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            up = load_chunk(up_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            gradient = load_chunk(gradient_ptr, block, i, M, WIDTH, ROWS, CHUNK)
            value = _value(gate, ACTIVATION)
            if RECOMPUTE:
                h = round_to(value * up, dtype)[0]
                # A thread writes the elements that it has read, and no other thread reads them.
                store_chunk(gradient_ptr, h, block, i, M, WIDTH, ROWS, CHUNK)
            dup, exact = round_to(gradient * value, dtype)
            store_chunk(dup_ptr, dup, block, i, M, WIDTH, ROWS, CHUNK)
            dups = dups + (dup,)
            dup_absmax = nan_maximum(dup_absmax, tl.abs(exact))
            dgate, exact = round_to(gradient * up * _slope(gate, ACTIVATION), dtype)
            store_chunk(dgate_ptr, dgate, block, i, M, WIDTH, ROWS, CHUNK)
            dgates = dgates + (dgate,)
            dgate_absmax = nan_maximum(dgate_absmax, tl.abs(exact))
        if QUANTIZE:
            store_quantized(
                dgates, dgate_absmax, dgate_values_ptr, dgate_scale_ptr, block, M, WIDTH, ROWS,
                CHUNK, CHUNKS, LARGEST, INVERSE,
            )  # fmt: skip
            store_quantized(
                dups, dup_absmax, dup_values_ptr, dup_scale_ptr, block, M, WIDTH, ROWS, CHUNK,
                CHUNKS, LARGEST, INVERSE,
            )  # fmt: skip


def gated_backward(
    gate: jax.Array,
    up: jax.Array,
    gradient: jax.Array,
    *,
    activation: str = "silu",
    quantize_to: str | None = None,
    recompute: bool = False,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array, jax.Array, QTensor | None, QTensor | None, jax.Array | None]:
    """`reference.gated_backward`."""
    shape = gate.shape
    if shape[-1] > tiles.WIDEST_ROW:
        dgate, dup, _, _, h = gated_backward(
            *_cut(gate, up, gradient), activation=activation, recompute=recompute
        )
        dgate, dup = dgate.reshape(shape), dup.reshape(shape)
        q = [quantize(d, dtype=quantize_to) if quantize_to else None for d in (dgate, dup)]
        return dgate, dup, q[0], q[1], None if h is None else h.reshape(shape)
    tile = tile or tiles.row_tile("gated_backward", shape[-1])
    assert tile.rows * tile.chunk >= 32 * tile.warps, (
        "threads that share elements read what others write"
    )
    persistent = tile.stages > 1
    rows = jax.ShapeDtypeStruct(shape, gate.dtype)
    quantized = chunks.quantized_outputs(gate, quantize_to)
    gradient = gradient.astype(gate.dtype)
    h_ref = jax.new_ref(gradient) if recompute else None  # in the memory of the gradient
    dgate, dup, dgate_values, dgate_scale, dup_values, dup_scale = launcher.call(
        gate,
        up,
        gradient if h_ref is None else h_ref,
        kernel=_gated_backward_kernel,
        out_type=(rows, rows, *quantized, *quantized),
        ACTIVATION=activation,
        RECOMPUTE=recompute,
        QUANTIZE=quantize_to is not None,
        **chunks.range_constants(quantize_to),
        **chunks.row_launch(gate, tile, persistent=persistent),
    )
    return (
        dgate,
        dup,
        chunks.qtensor(dgate_values, dgate_scale, quantize_to),
        chunks.qtensor(dup_values, dup_scale, quantize_to),
        None if h_ref is None else jax.freeze(h_ref),
    )


# --- rows that registers do not hold ------------------------------------------------------------------

# Shortest parts of a row.
SHORTEST_PART = 128


def _part(width: int) -> int:
    return math.gcd(width, 4096)


def _cut(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Cuts long rows into parts, which suffices without a quantizer; that is then a kernel of its own."""
    return tuple(x.reshape(-1, _part(x.shape[-1])) for x in arrays)


def why_not(gate: jax.Array, *_: Any, **__: Any) -> Unavailable | None:
    """Returns why the kernels cannot read these rows, or None if they can."""
    width = gate.shape[-1]
    if width <= tiles.WIDEST_ROW:
        return None
    if _part(width) < SHORTEST_PART:
        return Unavailable(
            f"supports rows of up to {tiles.WIDEST_ROW}, or of a multiple of {SHORTEST_PART}, "
            f"got {width}: use 'xla'"
        )
    return why_not_rows(gate)


WHY_NOT = {"gated": why_not, "gated_backward": why_not}
