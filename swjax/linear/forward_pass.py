"""The forward pass of layers that share an input: their outputs, and what it saves for the backward pass."""

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

Layers = tuple[Settings, ...]  # one for each weight; settings of the input come from the first


class Operands(NamedTuple):
    """The operands of layers that share an input; x and ws are None where `Saved` replaces them."""

    x: Any
    ws: tuple[Any, ...]
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


def forward(operands: Operands, layers: Layers) -> tuple[tuple[jax.Array, ...], Saved]:
    ys, x, weights = outputs(lax.stop_gradient(operands), layers)
    return ys, _save(operands, x, weights, layers)


def outputs(operands: Operands, layers: Layers) -> tuple[tuple[jax.Array, ...], Forms, tuple]:
    """Each layer's output, the forms of their input, and of each weight."""
    x = _input_forms(operands.x, operands.prologue, layers[0])
    forms = tuple(
        Forms(transposed=w) if isinstance(w, QTensor) else weight_forms(w, layer)
        for w, layer in zip(operands.ws, layers)
    )
    ys = tuple(output(x, *each) for each in zip(forms, operands.biases, layers))
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
    """High-precision arrays are saved as given: a copy would be saved next to the array itself."""
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
