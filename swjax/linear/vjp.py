"""The layers' forward and backward passes, and the `custom_vjp`s made of them."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels.reference import QTensor
from swjax.linear.products import (
    Operand,
    Settings,
    apply,
    apply_backward,
    kernels_run,
    multiply,
    named,
    quantize,
    quantize_and_sum,
    quantize_both,
    quantizes_rows,
    sum_of,
)
from swjax.linear.prologues import Gradient, Prologue, add


class _Weight(NamedTuple):
    """What the backward pass needs of a layer."""

    w: Operand
    w_like: jax.Array | None  # empty, of the dtype of w's gradient; None: w has none
    bias_like: jax.Array | None


class _Residuals(NamedTuple):
    inputs: jax.Array | None  # of the prologue
    x: Operand  # empty: the prologue's backward pass computes it again
    weights: tuple[_Weight, ...]
    prologue: Prologue | None


Layers = tuple[Settings, ...]  # of the layers that share an input, which the first speaks for


def _forward(x, ws, biases, prologue, layers: Layers) -> tuple[tuple[jax.Array, ...], _Residuals]:
    inputs = None if prologue is None else x
    x = _read(x, prologue, layers[0])
    ys, weights = zip(*(_apply_weight(x, *each) for each in zip(ws, biases, layers)))
    # What a prologue's backward pass writes again is not kept in any form.
    narrow = layers[0].recipe.save_quantized and x.wide is not None
    kept = Operand(quantized=x.quantized) if narrow else Operand(x.wide)
    return ys, _Residuals(inputs, kept, weights, prologue)


def _read(x, prologue, settings) -> Operand:
    """The layers' input, through the prologue, in the forms that the products need."""
    fwd, save_quantized = settings.recipe.fwd, settings.recipe.save_quantized
    x_q = None
    if prologue is not None:
        fused = quantizes_rows(fwd) and (
            prologue.whole_rows or not settings.plan.splits(settings.plan.k)
        )
        x, x_q = apply(
            prologue,
            x,
            quantize_to=fwd.lhs.dtype if fused else None,
            wide=not fused,
            settings=settings,
        )
    if x_q is None and (quantizes_rows(fwd) or save_quantized):
        x_q = quantize(fwd.lhs, x, settings.plan.x, -1, settings)
    return Operand(x, named(x_q, "swjax_x") if save_quantized else x_q)


def _apply_weight(x: Operand, w, bias, settings) -> tuple[jax.Array, _Weight]:
    if isinstance(w, QTensor):
        w_like, w = None, Operand(transposed=w)
    else:
        w_like, w = jnp.empty(0, w.dtype), _read_weight(w, settings)
    y = multiply("fwd", x, w, bias, out_dtype=settings.out_dtype, settings=settings)
    if w.quantized is not None:  # what the input's gradient reads
        w = w._replace(transposed=None)
    bias_like = None if bias is None else jnp.empty(0, bias.dtype)
    return checkpoint_name(y, "swjax_y"), _Weight(w, w_like, bias_like)


def _read_weight(w: jax.Array, settings) -> Operand:
    """w in the forms that the forward product and the input's gradient need: quantized once for both, where
    both quantize it alike."""
    fwd, dgrad, plan = settings.recipe.fwd, settings.recipe.dgrad, settings.plan
    alike = fwd is not None and dgrad is not None and fwd.rhs == dgrad.rhs
    alike = alike and fwd.rhs.scope == "tensor"
    if alike and kernels_run(settings):
        forms = quantize_both(w, fwd.rhs.dtype, settings)
    elif alike or settings.recipe.save_quantized:
        forms = (quantize(fwd.rhs, w, plan.w, 0, settings),)
    else:
        return Operand(w)
    outliers = fwd.outlier_threshold or dgrad.outlier_threshold  # are multiplied with w as it is
    return Operand(w if outliers else None, *(named(q, "swjax_w") for q in forms))


def _backward(
    layers: Layers, residuals: _Residuals, gradients: tuple, residual=None, quantize_to=None
):
    """(gradient of the input, as `Gradient`), dws, dbiases, and the prologue's gradient.

    `gradients` has a `Gradient` of the output of each layer, `residual` is what the input's gradient is
    added to."""
    inputs, x, weights, prologue = residuals
    if x.quantized is not None:
        # Without the barrier XLA dequantizes x in the forward pass already, and keeps the wide copy.
        x, gradients, residual = jax.lax.optimization_barrier((x, gradients, residual))
    # What devices have of the input's gradient is summed once for all layers that split its sum alike.
    together = len(layers) > 1 and len({layer.plan for layer in layers}) == 1
    together = together and bool(layers[0].plan.splits(layers[0].plan.n))
    each = zip(gradients, weights, layers)
    dxs, dbiases = zip(*(_backward_input(*one, summed=not together) for one in each))
    if together:
        dxs = (sum_of(dxs, layers[0].plan),)
    if prologue is None:
        input_gradient, dprologue = (add(*dxs, residual), None, None), None
    else:
        kept = x.wide is not None or x.quantized is not None
        again = not kept and any(weight.w_like is not None for weight in weights)
        input_gradient, dprologue, y = apply_backward(
            prologue, inputs, dxs, residual, quantize_to, again, layers[0]
        )
        x = Operand(y) if again else x
    dws = tuple(_backward_weight(x, *one) for one in zip(gradients, weights, layers))
    return input_gradient, dws, dbiases, dprologue


def _backward_input(gradient: Gradient, weight: _Weight, settings, *, summed: bool):
    """The gradients of one layer's input (see `_in_shards`) and bias."""
    dgrad, (w, _, bias_like), (g, g_q, g_sum) = settings.recipe.dgrad, weight, gradient
    if bias_like is not None and g_sum is None:
        if g_q is None and quantizes_rows(dgrad) and not settings.plan.splits(settings.plan.n):
            g_q, g_sum = quantize_and_sum(g, dgrad.lhs.dtype, settings)
        else:
            g_sum = jnp.sum(g, axis=tuple(range(g.ndim - 1)), dtype=jnp.float32)
    dx = multiply(
        "dgrad", Operand(g, g_q), w, out_dtype=settings.dtype, settings=settings, summed=summed
    )
    return dx, None if bias_like is None else g_sum.astype(bias_like.dtype)


def _backward_weight(x: Operand, gradient: Gradient, weight: _Weight, settings):
    """The gradient of one layer's weight."""
    if weight.w_like is None:
        return None
    out_dtype = weight.w_like.dtype.name
    return multiply("wgrad", x, Operand(gradient[0]), out_dtype=out_dtype, settings=settings)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def linears(x, ws, biases, prologue, layers, residual):
    """The layers' outputs, and x or None."""
    return _linears_forward(x, ws, biases, prologue, layers, residual)[0]


def _linears_forward(x, ws, biases, prologue, layers, residual):
    ys, kept = _forward(x, ws, biases, prologue, layers)
    return (ys, x if residual else None), kept


def _linears_backward(layers, _, residuals, gradients):
    gs, residual = gradients
    gradients = tuple((g, None, None) for g in gs)
    (dx, _, _), dws, dbiases, dprologue = _backward(layers, residuals, gradients, residual)
    return dx, dws, dbiases, dprologue


linears.defvjp(_linears_forward, _linears_backward)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def fused_mlp(x, w1, b1, w2, b2, prologue, gelu, first, second, residual):
    return _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, first, second, residual)[0]


def _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, first, second, residual):
    (hidden,), kept = _forward(x, (w1,), (b1,), prologue, (first,))
    (y,), kept_too = _forward(hidden, (w2,), (b2,), gelu, (second,))
    return (y, x if residual else None), (kept, kept_too)


def _mlp_backward(first, second, _, residuals, gradients):
    (kept, kept_too), (g, residual) = residuals, gradients
    dgrad, plan = first.recipe.dgrad, second.plan
    fused = quantizes_rows(dgrad) and not plan.splits(plan.k)
    dhidden, (dw2,), (db2,), dgelu = _backward(
        (second,), kept_too, ((g, None, None),), None, dgrad.lhs.dtype if fused else None
    )
    (dx, _, _), (dw1,), (db1,), dprologue = _backward((first,), kept, (dhidden,), residual)
    return dx, dw1, db1, dw2, db2, dprologue, dgelu


fused_mlp.defvjp(_mlp_forward, _mlp_backward)
