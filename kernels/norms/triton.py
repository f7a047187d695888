"""LayerNorm and RMSNorm, forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from swjax.kernels import tiles
from swjax.kernels.formats import QTensor
from swjax.kernels.triton_gpu import chunks, launcher
from swjax.kernels.triton_gpu.arithmetic import nan_maximum, round_to
from swjax.kernels.triton_gpu.chunks import (
    load_chunk,
    load_vector,
    moments,
    round_chunk,
    row_sum,
    smallest_absmax,
    store_chunk,
    store_quantized,
    store_sum,
    zero_sums,
)


@triton.jit
def _norm_kernel(
    x_ptr,  # [M, WIDTH]
    gamma_ptr,  # [WIDTH]
    beta_ptr,  # [WIDTH]
    y_ptr,  # [M, WIDTH]
    values_ptr,  # [M, WIDTH]
    scale_ptr,  # [M]
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,  # added to gamma
    CENTRED: tl.constexpr,  # LayerNorm; if not, RMSNorm, which does not read beta
    WRITE: tl.constexpr,  # whether to write y
    QUANTIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes the norm of rows, rounded to the dtype of x, and writes or quantizes it, or both."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        for i in tl.static_range(CHUNKS):
            xs = xs + (load_chunk(x_ptr, block, i, M, WIDTH, ROWS, CHUNK),)
        xs, inverse = moments(xs, WIDTH, CHUNK, CHUNKS, EPSILON, CENTRED)
        ys = ()
        absmax = smallest_absmax(ROWS, CHUNK)
        for i in tl.static_range(CHUNKS):
            gamma = load_vector(gamma_ptr, i, WIDTH, CHUNK)
            if OFFSET != 0:
                gamma += OFFSET
            y = xs[i] * (inverse * gamma)
            if CENTRED:
                y += load_vector(beta_ptr, i, WIDTH, CHUNK)
            y = round_chunk(y, y_ptr, dtype, block, i, M, WIDTH, ROWS, CHUNK, WRITE)
            ys = ys + (y,)
            absmax = nan_maximum(absmax, tl.abs(y))
        if QUANTIZE:
            store_quantized(
                ys, absmax, values_ptr, scale_ptr, block, M, WIDTH, ROWS, CHUNK, CHUNKS, LARGEST,
                INVERSE,
            )  # fmt: skip


def layer_norm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    *,
    epsilon: float,
    quantize_to: str | None = None,
    high_precision: bool = True,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.layer_norm`."""
    tile = tile or tiles.row_tile("layer_norm", x.shape[-1])
    constants = {"EPSILON": epsilon, "OFFSET": 0.0, "CENTRED": True}
    return _forward(x, gamma, beta, quantize_to, high_precision, tile, constants)


def rms_norm(
    x: jax.Array,
    gamma: jax.Array,
    *,
    epsilon: float,
    offset: float = 0.0,
    quantize_to: str | None = None,
    high_precision: bool = True,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.rms_norm`."""
    tile = tile or tiles.row_tile("rms_norm", x.shape[-1])
    constants = {"EPSILON": epsilon, "OFFSET": offset, "CENTRED": False}
    return _forward(x, gamma, gamma, quantize_to, high_precision, tile, constants)


def _forward(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    quantize_to: str | None,
    high_precision: bool,
    tile: tiles.RowTile,
    constants: dict[str, Any],
) -> tuple[jax.Array | None, QTensor | None]:
    y, values, scale = launcher.call(
        x,
        gamma,
        beta,
        kernel=_norm_kernel,
        out_type=(
            launcher.output(high_precision, x.shape, x.dtype),
            *chunks.quantized_outputs(x, quantize_to),
        ),
        WRITE=high_precision,
        QUANTIZE=quantize_to is not None,
        **constants,
        **chunks.range_constants(quantize_to),
        **chunks.row_launch(x, tile, persistent=False),
    )
    return y if high_precision else None, chunks.qtensor(values, scale, quantize_to)


@triton.jit
def _load_gradients(
    gradient_ptr, second_ptr, third_ptr, block, i: tl.constexpr, M: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Loads a chunk of the sum of one to three gradients."""
    gradient = load_chunk(gradient_ptr, block, i, M, WIDTH, ROWS, CHUNK)
    if GRADIENTS > 1:
        gradient += load_chunk(second_ptr, block, i, M, WIDTH, ROWS, CHUNK)
    if GRADIENTS > 2:
        gradient += load_chunk(third_ptr, block, i, M, WIDTH, ROWS, CHUNK)
    return gradient


@triton.jit
def _backward_terms(
    gamma_ptr, beta_ptr, y_ptr, xs, inverse, gradients, gamma_sums, beta_sums, block,
    M: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, OFFSET: tl.constexpr, CENTRED: tl.constexpr, RECOMPUTE: tl.constexpr,
):  # fmt: skip
    """Returns v = gradient gamma, v times the rows xs, and the running gradients of gamma and beta."""
    vs = ()
    products = ()
    new_gamma_sums = ()
    new_beta_sums = ()
    for i in tl.static_range(CHUNKS):
        gamma = load_vector(gamma_ptr, i, WIDTH, CHUNK)
        if OFFSET != 0:
            gamma += OFFSET
        if RECOMPUTE:
            y = xs[i] * (inverse * gamma)
            if CENTRED:
                y += load_vector(beta_ptr, i, WIDTH, CHUNK)
            y = round_to(y, y_ptr.dtype.element_ty)[0]
            store_chunk(y_ptr, y, block, i, M, WIDTH, ROWS, CHUNK)
        v = gradients[i] * gamma
        vs = vs + (v,)
        products = products + (v * xs[i],)
        term = tl.sum(gradients[i] * (xs[i] * inverse), 0)
        new_gamma_sums = new_gamma_sums + (gamma_sums[i] + term,)
        term = tl.sum(gradients[i], 0) if CENTRED else 0.0
        new_beta_sums = new_beta_sums + (beta_sums[i] + term,)
    return vs, products, new_gamma_sums, new_beta_sums


@triton.jit
def _store_input_gradient(
    dx_ptr, residual_ptr, xs, inverse, vs, products, block, M: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """dx = (v - mean(v) - n mean(v n)) / deviation + residual, with n the normalized row.

    RMSNorm has no mean(v). Args: rows xs, centred for LayerNorm, reciprocal deviations `inverse`, v, and the
    products v xs.
    """
    if CENTRED:
        v_mean = row_sum(vs, CHUNKS) * (1.0 / WIDTH)
    slope = row_sum(products, CHUNKS) * (1.0 / WIDTH) * inverse * inverse
    for i in tl.static_range(CHUNKS):
        v = vs[i] - v_mean if CENTRED else vs[i]
        dx = (v - xs[i] * slope) * inverse
        if RESIDUAL:
            dx += load_chunk(residual_ptr, block, i, M, WIDTH, ROWS, CHUNK)
        dx = dx.to(dx_ptr.dtype.element_ty)
        store_chunk(dx_ptr, dx, block, i, M, WIDTH, ROWS, CHUNK)


@triton.jit
def _norm_backward_kernel(
    x_ptr,  # [M, WIDTH]
    gradient_ptr,  # [M, WIDTH]
    second_ptr,  # [M, WIDTH], as the next two
    third_ptr,
    residual_ptr,
    gamma_ptr,  # [WIDTH]
    beta_ptr,  # [WIDTH]
    dx_ptr,  # [M, WIDTH]
    sums_ptr,  # [programs, 2, WIDTH]: gamma's and beta's; [programs, 1, WIDTH] for RMSNorm
    y_ptr,  # [M, WIDTH], the norm's output
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    GRADIENTS: tl.constexpr,  # 1 to 3, whose sum is the gradient
    RESIDUAL: tl.constexpr,
    RECOMPUTE: tl.constexpr,  # whether to write y
    STAGES: tl.constexpr,
):
    """Computes the gradients of rows, of gamma and of beta."""
    gamma_sums = zero_sums(CHUNK, CHUNKS)
    beta_sums = zero_sums(CHUNK, CHUNKS)
    blocks: tl.constexpr = tl.cdiv(M, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        gradients = ()
        for i in tl.static_range(CHUNKS):
            xs = xs + (load_chunk(x_ptr, block, i, M, WIDTH, ROWS, CHUNK),)
            gradient = _load_gradients(
                gradient_ptr, second_ptr, third_ptr, block, i, M, WIDTH, ROWS, CHUNK, GRADIENTS
            )
            gradients = gradients + (gradient,)
        xs, inverse = moments(xs, WIDTH, CHUNK, CHUNKS, EPSILON, CENTRED)

        vs, products, gamma_sums, beta_sums = _backward_terms(
            gamma_ptr, beta_ptr, y_ptr, xs, inverse, gradients, gamma_sums, beta_sums, block, M,
            WIDTH, ROWS, CHUNK, CHUNKS, OFFSET, CENTRED, RECOMPUTE,
        )  # fmt: skip
        _store_input_gradient(
            dx_ptr, residual_ptr, xs, inverse, vs, products, block, M, WIDTH, ROWS, CHUNK, CHUNKS,
            CENTRED, RESIDUAL,
        )  # fmt: skip

    SUMS: tl.constexpr = 2 if CENTRED else 1
    for i in tl.static_range(CHUNKS):
        store_sum(sums_ptr, gamma_sums[i], i, WIDTH, CHUNK, SUM=0, SUMS=SUMS)
        if CENTRED:
            store_sum(sums_ptr, beta_sums[i], i, WIDTH, CHUNK, SUM=1, SUMS=SUMS)


def layer_norm_backward(
    x: jax.Array,
    gamma: jax.Array,
    gradient: jax.Array | tuple[jax.Array, ...],
    residual: jax.Array | None = None,
    beta: jax.Array | None = None,
    *,
    epsilon: float,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """`reference.layer_norm_backward`."""
    tile = tile or tiles.row_tile("layer_norm_backward", x.shape[-1])
    constants = {"EPSILON": epsilon, "OFFSET": 0.0, "CENTRED": True, "RECOMPUTE": beta is not None}
    beta = gamma if beta is None else beta
    dx, (dgamma, dbeta), y = _backward(x, gamma, beta, gradient, residual, tile, constants)
    return dx, dgamma, dbeta, y


def rms_norm_backward(
    x: jax.Array,
    gamma: jax.Array,
    gradient: jax.Array | tuple[jax.Array, ...],
    residual: jax.Array | None = None,
    *,
    epsilon: float,
    offset: float = 0.0,
    recompute: bool = False,
    tile: tiles.RowTile | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`reference.rms_norm_backward`."""
    tile = tile or tiles.row_tile("rms_norm_backward", x.shape[-1])
    constants = {"EPSILON": epsilon, "OFFSET": offset, "CENTRED": False, "RECOMPUTE": recompute}
    dx, (dgamma,), y = _backward(x, gamma, gamma, gradient, residual, tile, constants)
    return dx, dgamma, y


def _backward(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    gradient: jax.Array | tuple[jax.Array, ...],
    residual: jax.Array | None,
    tile: tiles.RowTile,
    constants: dict[str, Any],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dx, the gradients of the parameters [1 or 2, n], and the recomputed result or None."""
    gradients = gradient if isinstance(gradient, tuple) else (gradient,)
    if len(gradients) > 3:
        rest = sum((g.astype(jnp.float32) for g in gradients[3:]), gradients[2].astype(jnp.float32))
        gradients = (*gradients[:2], rest.astype(x.dtype))
    count = 2 if constants["CENTRED"] else 1
    launch = chunks.row_launch(x, tile, persistent=True, sums=count)
    dx, sums, y = launcher.call(
        x,
        *(gradients * 3)[:3],  # unread arguments still need an address
        x if residual is None else residual,
        gamma,
        beta,
        kernel=_norm_backward_kernel,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((*launch["grid"], count, x.shape[-1]), jnp.float32),
            jax.ShapeDtypeStruct(x.shape if constants["RECOMPUTE"] else (1,), x.dtype),
        ),
        GRADIENTS=len(gradients),
        RESIDUAL=residual is not None,
        **constants,
        **launch,
    )
    return dx, jnp.sum(sums, axis=0), y if constants["RECOMPUTE"] else None


WHY_NOT = dict.fromkeys(
    ("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"), chunks.why_not
)
