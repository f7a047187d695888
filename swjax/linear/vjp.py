"""The forward and the backward pass of linear layers, and the two `jax.custom_vjp`s made of them.

`linears` has one input and one or several weights; `fused_mlp` is two layers with a GELU between them. Read
`_forward` and `_backward` first; the rules at the end put them together.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels.reference import QTensor
from swjax.linear.derivatives import differentiated_as, may_be_differentiated
from swjax.linear.products import (
    Forms,
    Settings,
    from_bytes,
    input_gradient,
    named,
    output,
    quantize_input,
    quantizes_rows,
    to_bytes,
    weight_forms,
    weight_gradient,
)
from swjax.linear.prologues import Gradient, Prologue, add
from swjax.recipes import Recipe

Layers = tuple[Settings, ...]  # one for each weight; what concerns the input is read from the first


class Operands(NamedTuple):
    """What layers of one input are functions of."""

    x: jax.Array
    ws: tuple[jax.Array | QTensor, ...]
    biases: tuple[jax.Array | None, ...]
    prologue: Prologue | None


class SavedWeight(NamedTuple):
    """What the backward pass needs of one weight.

    Attributes:
      forms: what the input's gradient reads.
      like: an empty array of the dtype of w's gradient; None: w has none.
      bias_like: the same for the bias.
    """

    forms: Forms
    like: jax.Array | None
    bias_like: jax.Array | None


class Saved(NamedTuple):
    """What the forward pass saves for the backward pass.

    Attributes:
      x: what the weight gradient reads; empty where the prologue's backward pass recomputes it.
      inputs: the input of the prologue, if there is one.
      weights: for each layer.
      prologue: as given.
    """

    x: Forms
    inputs: jax.Array | None
    weights: tuple[SavedWeight, ...]
    prologue: Prologue | None


# --- forward ------------------------------------------------------------------------------------------


def outputs(operands: Operands, layers: Layers) -> tuple[tuple[jax.Array, ...], Forms, tuple]:
    """Each layer's output, the forms of their input, and of each weight."""
    x, ws, biases, prologue = operands
    x = _input_forms(x, prologue, layers[0])
    forms = tuple(
        Forms(transposed=w) if isinstance(w, QTensor) else weight_forms(w, layer)
        for w, layer in zip(ws, layers)
    )
    ys = tuple(output(x, *each) for each in zip(forms, biases, layers))
    return ys, x, forms


def _input_forms(x, prologue, layer: Settings) -> Forms:
    """The layers' input, after the prologue, in the forms that the products read."""
    fwd, save_quantized, plan = layer.recipe.fwd, layer.recipe.save_quantized, layer.plan
    quantized = None
    if prologue is not None:
        fused = quantizes_rows(fwd) and (prologue.whole_rows or not plan.splits(plan.k))
        quantize_to = fwd.lhs.dtype if fused else None
        x, quantized = layer.sharded.apply(prologue, x, quantize_to=quantize_to)
    if quantized is None and (quantizes_rows(fwd) or save_quantized):
        quantized = quantize_input(x, layer)
    if save_quantized:
        quantized = named(quantized, "swjax_x")
    return Forms(x, quantized)


def _exact_outputs(layers: Layers, *operands) -> tuple[jax.Array, ...]:
    """The outputs without quantization, for JAX to differentiate."""
    return outputs(Operands(*operands), tuple(map(_exact, layers)))[0]


def _exact(layer: Settings) -> Settings:
    arithmetic = layer.sharded.arithmetic._replace(implementation="xla")
    return layer._replace(recipe=Recipe(), sharded=layer.sharded._replace(arithmetic=arithmetic))


def _forward(operands: Operands, layers: Layers) -> tuple[tuple[jax.Array, ...], Saved]:
    ys, x, weights = outputs(lax.stop_gradient(operands), layers)
    return ys, _save(operands, x, weights, layers)


def _save(operands: Operands, x: Forms, weights: tuple[Forms, ...], layers: Layers) -> Saved:
    """High-precision arrays are saved as given: a copy would be saved next to the array itself."""
    _, ws, biases, prologue = operands
    if layers[0].recipe.save_quantized and x.high_precision is not None:
        x = Forms(quantized=x.quantized)
    else:
        x = Forms(operands.x if prologue is None else x.high_precision)
    inputs = None if prologue is None else operands.x
    saved = jax.tree.map(to_bytes, tuple(map(_save_weight, ws, biases, weights)))
    return Saved(jax.tree.map(to_bytes, x), inputs, saved, prologue)


def _kept_for_derivatives(operands: tuple) -> tuple | None:
    """The operands, for derivatives of the backward pass; None where nothing can ask for these.

    The backward pass itself does not read them: a compiler removes those that nothing else reads.
    """
    return operands if may_be_differentiated(operands) else None


def _save_weight(w, bias, forms: Forms) -> SavedWeight:
    bias_like = None if bias is None else jnp.empty(0, bias.dtype)
    if isinstance(w, QTensor):
        return SavedWeight(forms, None, bias_like)
    if forms.high_precision is not None:
        forms = forms._replace(high_precision=w)
    if forms.quantized is not None:  # the form that the input's gradient reads
        forms = forms._replace(transposed=None)
    return SavedWeight(forms, jnp.empty(0, w.dtype), bias_like)


# --- backward -----------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """The gradients of `Operands`; that of x with its quantized form, if the prologue returned one."""

    x: Gradient
    ws: tuple[jax.Array | None, ...]
    biases: tuple[jax.Array | None, ...]
    prologue: Prologue | None


def _backward(
    saved: Saved,
    gradients: tuple[Gradient, ...],
    layers: Layers,
    *,
    residual_gradient: jax.Array | None = None,
    quantize_to: str | None = None,
) -> Gradients:
    """The gradients of the operands, from those of the outputs.

    `residual_gradient` is added to that of x; a prologue quantizes the sum to `quantize_to` if it can.
    """
    x, inputs, weights, prologue = _read(saved, layers)
    if x.quantized is not None:
        # Without the barrier XLA dequantizes x in the forward pass and keeps the high-precision array.
        x, gradients, residual_gradient = lax.optimization_barrier(
            (x, gradients, residual_gradient)
        )
    gradients, biases = zip(*map(_bias_gradient, gradients, weights, layers))
    dxs = _input_gradients(gradients, weights, layers)
    if prologue is None:
        dx, dprologue = Gradient(add(*dxs, residual_gradient)), None
    else:
        recompute = x.high_precision is None and x.quantized is None
        recompute = recompute and any(weight.like is not None for weight in weights)
        dx, dprologue, recomputed = layers[0].sharded.apply_backward(
            prologue, inputs, dxs, residual_gradient, quantize_to=quantize_to, recompute=recompute
        )
        x = Forms(recomputed) if recompute else x
    dws = tuple(_weight_gradient(x, *each) for each in zip(gradients, weights, layers))
    return Gradients(dx, dws, biases, dprologue)


def _read(saved: Saved, layers: Layers) -> Saved:
    """fp8 values that were saved as bytes, as fp8."""

    def read(forms, product_dtype):
        return jax.tree.map(lambda array: from_bytes(array, product_dtype), forms)

    fwd = layers[0].recipe.fwd
    if fwd is None:
        return saved
    weights = tuple(
        weight._replace(forms=read(weight.forms, layer.recipe.fwd.rhs.dtype))
        for weight, layer in zip(saved.weights, layers)
    )
    return saved._replace(x=read(saved.x, fwd.lhs.dtype), weights=weights)


def _bias_gradient(gradient: Gradient, weight: SavedWeight, layer: Settings):
    """(the gradient of the output, with the form made here, that of the bias or None)."""
    if weight.bias_like is None:
        return gradient, None
    if gradient.token_sum is None:
        g, dgrad, plan = gradient.array, layer.recipe.dgrad, layer.plan
        quantizable = quantizes_rows(dgrad) and not plan.splits(plan.n)
        if gradient.quantized is None and quantizable:
            gradient = Gradient(g, *layer.sharded.quantize_and_sum(g, dgrad.lhs.dtype))
        else:
            total = jnp.sum(g, axis=tuple(range(g.ndim - 1)), dtype=jnp.float32)
            gradient = gradient._replace(token_sum=total)
    return gradient, gradient.token_sum.astype(weight.bias_like.dtype)


def _input_gradients(gradients, weights, layers: Layers) -> tuple[jax.Array, ...]:
    """The gradient of the input by way of each layer, or one sum of them.

    Layers with equal plans whose sums are split over devices are all-reduced once, after adding.
    """
    plan = layers[0].plan
    together = len(layers) > 1 and len({layer.plan for layer in layers}) == 1
    together = together and bool(plan.splits(plan.n))
    dxs = tuple(
        input_gradient(Forms(g.array, g.quantized), weight.forms, layer, summed=not together)
        for g, weight, layer in zip(gradients, weights, layers)
    )
    return (layers[0].sharded.sum_partial(dxs),) if together else dxs


def _weight_gradient(x: Forms, gradient: Gradient, weight: SavedWeight, layer: Settings):
    if weight.like is None:
        return None
    g, out_dtype = Forms(gradient.array), weight.like.dtype.name
    return weight_gradient(x, g, layer, out_dtype=out_dtype)


def _exact_gradients(exact_outputs, operands, gradients, residual_gradient):
    """The gradients without quantization, for JAX to differentiate."""
    _, vjp = jax.vjp(exact_outputs, *operands)
    dx, *others = vjp(gradients)
    is_quantized = lambda leaf: isinstance(leaf, QTensor)
    others = jax.tree.map(lambda d: None if is_quantized(d) else d, others, is_leaf=is_quantized)
    return add(dx, residual_gradient), *others


# --- layers of one input ------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def linears(x, ws, biases, prologue, layers: Layers, residual: bool):
    """The layers' outputs, and x for a residual connection, or None."""
    return _linears_forward(x, ws, biases, prologue, layers, residual)[0]


def _linears_forward(x, ws, biases, prologue, layers, residual):
    operands = Operands(x, ws, biases, prologue)
    ys, saved = _forward(operands, layers)
    ys = differentiated_as(partial(_exact_outputs, layers), ys, *operands)
    ys = tuple(checkpoint_name(y, "swjax_y") for y in ys)
    return (ys, x if residual else None), (saved, _kept_for_derivatives(operands))


def _linears_backward(layers, _, kept, gradients):
    saved, operands = kept
    constants, (gs, residual_gradient) = lax.stop_gradient((saved, gradients))
    gs = tuple(map(Gradient, gs))
    computed = _backward(constants, gs, layers, residual_gradient=residual_gradient)
    arrays = (computed.x.array, *computed[1:])
    if operands is None:
        return arrays
    exact = partial(_exact_gradients, partial(_exact_outputs, layers))
    return differentiated_as(exact, arrays, tuple(operands), *gradients)


linears.defvjp(_linears_forward, _linears_backward)


# --- two layers with a GELU ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def fused_mlp(x, w1, b1, w2, b2, prologue, gelu, first: Settings, second: Settings, residual: bool):
    """``gelu(x w1 + b1) w2 + b2``, and x for a residual connection, or None."""
    return _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, first, second, residual)[0]


def _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, first, second, residual):
    operands = x, w1, b1, w2, b2, prologue
    (hidden,), saved = _forward(Operands(x, (w1,), (b1,), prologue), (first,))
    hidden = checkpoint_name(hidden, "swjax_y")
    (y,), saved_by_second = _forward(Operands(hidden, (w2,), (b2,), gelu), (second,))
    y = differentiated_as(partial(_exact_mlp, gelu, first, second), y, *operands)
    y = checkpoint_name(y, "swjax_y")
    return (y, x if residual else None), (saved, saved_by_second, _kept_for_derivatives(operands))


def _mlp_backward(gelu, first, second, _, kept, gradients):
    saved, saved_by_second, operands = kept
    constants, (g, residual_gradient) = lax.stop_gradient(((saved, saved_by_second), gradients))
    dgrad, plan = first.recipe.dgrad, second.plan
    quantizable = quantizes_rows(dgrad) and not plan.splits(plan.k)
    quantize_to = dgrad.lhs.dtype if quantizable else None
    of_second = _backward(constants[1], (Gradient(g),), (second,), quantize_to=quantize_to)
    of_first = _backward(
        constants[0], (of_second.x,), (first,), residual_gradient=residual_gradient
    )
    (dw1,), (db1,), (dw2,), (db2,) = of_first.ws, of_first.biases, of_second.ws, of_second.biases
    arrays = of_first.x.array, dw1, db1, dw2, db2, of_first.prologue
    if operands is None:
        return arrays
    exact = partial(_exact_gradients, partial(_exact_mlp, gelu, first, second))
    return differentiated_as(exact, arrays, operands, *gradients)


def _exact_mlp(gelu, first, second, x, w1, b1, w2, b2, prologue):
    (hidden,) = _exact_outputs((first,), x, (w1,), (b1,), prologue)
    (y,) = _exact_outputs((second,), hidden, (w2,), (b2,), gelu)
    return y


fused_mlp.defvjp(_mlp_forward, _mlp_backward)
