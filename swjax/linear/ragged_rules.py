"""Forward and backward pass of the layers of experts, with their derivatives, as in `swjax.linear.rules`."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels import dispatch
from swjax.kernels.gated.reference import gated
from swjax.kernels.reference import QTensor, dequantize
from swjax.linear import experts
from swjax.linear.interception import without_interception
from swjax.linear.layer import Layer, Operand
from swjax.linear.prologues import Gated, Prologue, apply_backward, input_spec
from swjax.linear.rules import differentiated_as, quantized_input, without_quantized

# --- one layer ----------------------------------------------------------------------------------------


class RaggedInput(NamedTuple):
    """The input of `ragged`, or its gradients.

    Attributes:
      x: [m, k], the input of the layer, or of its prologue.
      prologue: the prologue, or None.
    """

    x: Any
    prologue: Prologue | Gated | None


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def ragged(before: RaggedInput, w: Any, group_sizes: jax.Array, layer: Layer) -> jax.Array:
    """``prologue(x) w[expert of a row]``; see `swjax.ragged_switchback`."""
    return _ragged_forward(before, w, group_sizes, layer)[0]


@without_interception
def _ragged_forward(before, w, group_sizes, layer: Layer):
    (x, prologue), weight, sizes = lax.stop_gradient((before, w, group_sizes))
    rows, forms = quantized_input(x, prologue, layer), experts.forward_weight(weight, layer)
    y = experts.output(_left(rows), forms, sizes, layer)
    y = differentiated_as(partial(_exact, layer), y, before, w, group_sizes)
    saved = experts.saved_rows(rows, layer), experts.saved_weight(w, forms, layer)
    output = None
    if prologue is not None:  # the backward pass reads or recomputes its output
        saved = None, saved[1]
        output = None if layer.recipe.save_quantized else rows.array
    # Of x and w compilers remove what the backward pass does not read.
    return checkpoint_name(y, "swjax_y"), (before, w, group_sizes, saved, output)


@without_interception
def _ragged_backward(layer: Layer, residuals, g):
    inputs = residuals[:3]
    ((x, prologue), _, sizes, saved, output), constant = lax.stop_gradient((residuals, g))
    rows: Any  # None after a prologue if no weight gradient reads them
    rows, (w,) = _restored(x, saved, (layer,))
    lhs = experts.quantized_gradient(constant, layer)
    dx = experts.input_gradient(lhs, w, sizes, layer)
    dbefore = RaggedInput(dx, None)
    if prologue is not None:
        recompute = output is None and layer.w_dtype is not None
        options: dict[str, Any] = {"quantize_to": None, "recompute": recompute}
        x = experts.rows_of_groups(x, sizes, input_spec(prologue, layer), layer)
        (of_x,), dprologue, recomputed = apply_backward(prologue, x, (dx,), None, layer, **options)
        dbefore, rows = RaggedInput(of_x.array, dprologue), recomputed if recompute else output
    (dw,) = experts.weight_gradients(rows, (constant,), sizes, (layer,))
    exact = partial(_exact_gradients, partial(_exact, layer))
    return *differentiated_as(exact, (dbefore, dw), *inputs, g), None


ragged.defvjp(_ragged_forward, _ragged_backward)


def _left(rows: Operand) -> jax.Array | QTensor:
    """The form of rows that a product reads."""
    lhs = rows.array if rows.quantized is None else rows.quantized
    assert lhs is not None, "see `quantized_input`"
    return lhs


def _restored(
    x: jax.Array, saved: tuple[Any, ...], layers: tuple[Layer, ...]
) -> tuple[jax.Array, list[Operand]]:
    """Returns the rows that the weight gradient reads, and the saved forms of the weights."""
    fwd, (rows, *ws) = layers[0].recipe.fwd, saved
    if fwd is not None:
        ws = [experts.restored(w, fwd.rhs) for w in ws]
        x = x if rows is None else dequantize(experts.restored(rows, fwd.lhs), x.dtype.name)
    return x, ws


def _exact(layer: Layer, before: RaggedInput, w, group_sizes):
    x, prologue = before
    if prologue is not None:
        x = experts.rows_of_groups(x, group_sizes, input_spec(prologue, layer), layer)
        x, _ = prologue.forward(x, quantize_to=None, implementation="xla")
    return experts.exact_output(x, w, group_sizes, layer)


def _exact_gradients(exact, x, ws, group_sizes, g):
    dx, dws = jax.vjp(lambda x, ws: exact(x, ws, group_sizes), x, ws)[1](g)
    return dx, without_quantized(dws)


# --- gate, up, activation, down -----------------------------------------------------------------------


class GatedLayers(NamedTuple):
    """The layers of `gated_mlp`. They have one recipe."""

    gate: Layer
    up: Layer
    down: Layer


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def gated_mlp(
    x: jax.Array, ws: Any, group_sizes: jax.Array, layers: GatedLayers, activation: str
) -> jax.Array:
    """See `swjax.gated_ragged_mlp`; `ws` are the weights of gate, up and down."""
    return _mlp_forward(x, ws, group_sizes, layers, activation)[0]


@without_interception
def _mlp_forward(x, ws, group_sizes, layers: GatedLayers, activation: str):
    rows, weights, sizes = lax.stop_gradient((x, ws, group_sizes))
    fwd = layers.down.recipe.fwd
    quantized = quantized_input(rows, None, layers.gate)
    forms = tuple(map(experts.forward_weight, weights, layers))
    gate, up = (
        checkpoint_name(experts.output(_left(quantized), w, sizes, layer), "swjax_y")
        for w, layer in zip(forms[:2], layers[:2])
    )
    h, q = dispatch.run(
        "gated",
        gate,
        up,
        activation=activation,
        quantize_to=fwd.lhs.dtype if fwd else None,
        high_precision=fwd is None,
        implementation=layers.down.implementation,
    )
    y = experts.output(h if q is None else q, forms[2], sizes, layers.down)
    y = differentiated_as(partial(_exact_mlp, layers, activation), y, x, ws, group_sizes)
    saved = (
        experts.saved_rows(quantized, layers.gate),
        *map(experts.saved_weight, ws, forms, layers),
    )
    return checkpoint_name(y, "swjax_y"), (x, ws, group_sizes, (gate, up), saved)


@without_interception
def _mlp_backward(layers: GatedLayers, activation: str, residuals, g):
    inputs = residuals[:3]
    (x, _, sizes, hidden, saved), constant = lax.stop_gradient((residuals, g))
    x, (w_gate, w_up, w_down) = _restored(x, saved, layers)
    dgrad = layers.down.recipe.dgrad
    lhs = experts.quantized_gradient(constant, layers.down)
    dh = experts.input_gradient(lhs, w_down, sizes, layers.down)
    recompute = layers.down.w_dtype is not None
    dgate, dup, q_gate, q_up, h = dispatch.run(
        "gated_backward",
        *hidden,
        dh,
        activation=activation,
        quantize_to=dgrad.lhs.dtype if dgrad else None,
        recompute=recompute,
        implementation=layers.down.implementation,
    )
    dx = experts.input_gradient(dgate if q_gate is None else q_gate, w_gate, sizes, layers.gate)
    dx = experts.input_gradient(dup if q_up is None else q_up, w_up, sizes, layers.up, dx)
    dws = (
        *experts.weight_gradients(x, (dgate, dup), sizes, layers[:2]),
        *experts.weight_gradients(h, (constant,), sizes, layers[2:]),
    )
    exact = partial(_exact_gradients, partial(_exact_mlp, layers, activation))
    return *differentiated_as(exact, (dx, dws), *inputs, g), None


gated_mlp.defvjp(_mlp_forward, _mlp_backward)


def _exact_mlp(layers: GatedLayers, activation: str, x, ws, group_sizes):
    gate, up = (
        experts.exact_output(x, w, group_sizes, layer) for w, layer in zip(ws[:2], layers[:2])
    )
    h, _ = gated(gate, up, activation=activation)
    assert h is not None, "high_precision=True"
    return experts.exact_output(h, ws[2], group_sizes, layers.down)
