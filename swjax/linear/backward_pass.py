"""The backward pass of layers that share an input: it computes the gradients of their operands."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swjax.linear.forward_pass import Layers, Operands, Saved, SavedWeight
from swjax.linear.layouts import Spec
from swjax.linear.products import (
    Forms,
    Settings,
    as_array,
    from_bytes,
    input_gradients,
    quantizes_rows,
    weight_gradients,
)
from swjax.linear.prologues import Gradient, Prologue, add


class Gradients(NamedTuple):
    """The gradients of `Operands`; the gradient of x has a quantized form if the prologue returned one."""

    x: Gradient
    ws: tuple[jax.Array | None, ...]
    biases: tuple[jax.Array | None, ...]
    prologue: Prologue | None


def backward(
    saved: Saved,
    gradients: tuple[Gradient, ...],
    layers: Layers,
    *,
    residual_gradient: jax.Array | None = None,
    quantize_to: str | None = None,
) -> Gradients:
    """Computes the gradients of the operands from the gradients of the outputs.

    `residual_gradient` is added to the gradient of x; a prologue quantizes the sum to `quantize_to` if it
    can.
    """
    x, inputs, weights, prologue = _read(saved, layers)
    if x.quantized is not None:
        # Without the barrier, XLA dequantizes x in the forward pass and saves the high-precision array.
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
        assert inputs is not None, "a prologue has an input"
        dx, dprologue, recomputed = layers[0].sharded.apply_backward(
            prologue, inputs, dxs, residual_gradient, quantize_to=quantize_to, recompute=recompute
        )
        x = Forms(recomputed) if recompute else x
    return Gradients(dx, _weight_gradients(x, gradients, weights, layers), biases, dprologue)


def operands_from(saved: Saved, biases: tuple, layers: Layers) -> Operands:
    """The operands in the backward pass; arrays that were saved quantized are dequantized."""
    forms_of_x, inputs, weights, prologue = _read(saved, layers)
    x = as_array(forms_of_x, layers[0].dtype) if prologue is None else inputs
    ws = tuple(
        forms.transposed if like is None else as_array(forms, like.dtype.name)
        for forms, like, _ in weights
    )
    return Operands(x, ws, biases, prologue)


def _read(saved: Saved, layers: Layers) -> Saved:
    """Converts fp8 values that were saved as bytes back to fp8."""

    def read(forms, product_dtype):
        return jax.tree.map(lambda array: from_bytes(array, product_dtype), forms)

    fwd = layers[0].recipe.fwd
    if fwd is None:
        return saved
    weights = tuple(
        weight._replace(forms=read(weight.forms, fwd.rhs.dtype)) for weight in saved.weights
    )
    return saved._replace(x=read(saved.x, fwd.lhs.dtype), weights=weights)


def _bias_gradient(gradient: Gradient, weight: SavedWeight, layer: Settings):
    """Returns (output gradient with the form computed here, bias gradient or None)."""
    if weight.bias_like is None:
        return gradient, None
    if gradient.token_sum is None:
        g, dgrad, plan = gradient.array, layer.recipe.dgrad, layer.plan
        whole_rows = not plan.splits(plan.n)
        if gradient.quantized is None and quantizes_rows(dgrad) and whole_rows:
            gradient = Gradient(g, *layer.sharded.quantize_and_sum(g, dgrad.lhs.dtype))
        else:
            total = jnp.sum(g, axis=tuple(range(g.ndim - 1)), dtype=jnp.float32)
            gradient = gradient._replace(token_sum=total)
    assert gradient.token_sum is not None, "it was computed above"
    # The layer that follows may have summed the gradient in another sharding.
    placed = layer.plan.place(gradient.token_sum, Spec((layer.plan.n,)))
    assert placed is not None, "it is an array"
    return gradient, placed.astype(weight.bias_like.dtype)


def _input_gradients(gradients, weights, layers: Layers) -> tuple[jax.Array, ...]:
    """Arrays whose sum is the gradient of the input: one for each layer, or one in all.

    For layers with equal plans whose sums are sharded, each device adds the gradients; one all-reduce
    follows.
    """
    plan = layers[0].plan
    together = len(layers) > 1 and len({layer.plan for layer in layers}) == 1
    together = together and bool(plan.splits(plan.n))
    gs = tuple(Forms(g.array, g.quantized) for g in gradients)
    ws = tuple(weight.forms for weight in weights)
    dxs = input_gradients(gs, ws, layers, summed=not together)
    return (layers[0].sharded.sum_partial(dxs),) if together else dxs


def _weight_gradients(x: Forms, gradients, weights, layers: Layers) -> tuple[jax.Array | None, ...]:
    """The gradient of each weight; None for a quantized weight."""
    trained = [i for i, weight in enumerate(weights) if weight.like is not None]
    gs = tuple(Forms(gradients[i].array) for i in trained)
    dtypes = tuple(weights[i].like.dtype.name for i in trained)
    computed = weight_gradients(x, gs, tuple(layers[i] for i in trained), dtypes) if trained else ()
    dws = dict(zip(trained, computed))
    return tuple(map(dws.get, range(len(weights))))
