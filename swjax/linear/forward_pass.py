"""The forward pass of layers that share an input: it computes outputs and saves for the backward pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swjax.kernels.reference import QTensor
from swjax.linear.products import (
    Forms,
    Settings,
    named,
    output,
    quantize_input,
    quantizes_rows,
    to_bytes,
    weight_forms,
)
from swjax.linear.prologues import Prologue

Layers = tuple[Settings, ...]  # one per weight; settings of the input come from the first


class Operands(NamedTuple):
    """The operands of layers that share an input, except for the addends of their outputs.

    x and ws are None if `Saved` replaces them.
    """

    x: Any
    ws: tuple[Any, ...]
    biases: tuple[jax.Array | None, ...]
    prologue: Prologue | None


class SavedWeight(NamedTuple):
    """The data of one weight that the backward pass needs.

    Attributes:
      forms: the forms that the input gradient reads.
      like: an empty array with the dtype of w's gradient, or None if w has no gradient.
      bias_like: the same for the bias.
    """

    forms: Forms
    like: jax.Array | None
    bias_like: jax.Array | None


class Saved(NamedTuple):
    """The data that the forward pass saves for the backward pass.

    Attributes:
      x: the form that the weight gradient reads; empty if the prologue's backward pass recomputes it.
      inputs: the input of the prologue, or None.
      weights: one `SavedWeight` per layer.
      prologue: the prologue, or None.
    """

    x: Forms
    inputs: jax.Array | None
    weights: tuple[SavedWeight, ...]
    prologue: Prologue | None


Addends = tuple[jax.Array | None, ...]  # one per layer: the array that is added to its output


def forward(
    operands: Operands, addends: Addends, layers: Layers
) -> tuple[tuple[jax.Array, ...], Saved]:
    """Returns the output of each layer, and the arrays that the backward pass needs."""
    ys, x, weights = outputs(*lax.stop_gradient((operands, addends)), layers)
    return ys, _save(operands, x, weights, layers)


def outputs(
    operands: Operands, addends: Addends, layers: Layers
) -> tuple[tuple[jax.Array, ...], Forms, tuple]:
    """Returns the output of each layer, the forms of their input, and the forms of each weight."""
    x = _input_forms(operands.x, operands.prologue, layers[0])
    forms = tuple(
        Forms(transposed=w) if isinstance(w, QTensor) else weight_forms(w, layer)
        for w, layer in zip(operands.ws, layers)
    )
    ys = tuple(output(x, *each) for each in zip(forms, operands.biases, layers, addends))
    return ys, x, forms


def _input_forms(x, prologue, layer: Settings) -> Forms:
    """The layers' input, after the prologue, in the forms that the products read."""
    fwd, save_quantized, plan = layer.recipe.fwd, layer.recipe.save_quantized, layer.plan
    quantized = None
    if prologue is not None:
        fusable = prologue.whole_rows or not plan.splits(plan.k)
        quantize_to = fwd.lhs.dtype if quantizes_rows(fwd) and fusable else None
        x, quantized = layer.sharded.apply(prologue, x, quantize_to=quantize_to)
    if quantized is None and fwd is not None and (quantizes_rows(fwd) or save_quantized):
        quantized = quantize_input(x, fwd, layer)
    if save_quantized and quantized is not None:
        quantized = named(quantized, "swjax_x")
    return Forms(x, quantized)


def _save(operands: Operands, x: Forms, weights: tuple[Forms, ...], layers: Layers) -> Saved:
    """Selects the arrays to save; saves high-precision arrays as given, because a cast would be a copy."""
    _, ws, biases, prologue = operands
    save_quantized = layers[0].recipe.save_quantized
    if prologue is not None:
        x = Forms(None if save_quantized else x.high_precision)
    else:
        x = Forms(quantized=x.quantized) if save_quantized else Forms(operands.x)
    inputs = None if prologue is None else operands.x
    saved = jax.tree.map(to_bytes, tuple(map(_save_weight, ws, biases, weights)))
    return Saved(jax.tree.map(to_bytes, x), inputs, saved, prologue)


def _save_weight(w, bias, forms: Forms) -> SavedWeight:
    bias_like = None if bias is None else jnp.empty(0, bias.dtype)
    if isinstance(w, QTensor):
        return SavedWeight(forms, None, bias_like)
    if forms.high_precision is not None:
        forms = forms._replace(high_precision=w)
    if forms.quantized is not None:  # the form that the input's gradient reads
        forms = forms._replace(transposed=None)
    return SavedWeight(forms, jnp.empty(0, w.dtype), bias_like)
