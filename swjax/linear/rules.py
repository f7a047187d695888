"""Forward and backward pass of linear layers that share an input, as in Algorithm 1, with their derivatives.

`linears` is one input and one or several weights; `fused_mlp` is two layers with a GELU between them. The
recipe determines the first derivative: products of quantized operands. The derivative of rounding is zero
almost everywhere, so higher derivatives treat every product as exact. This is the straight-through estimate:
the derivatives of ``prologue(x) w + bias`` in high precision.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels.reference import QTensor
from swjax.linear.interception import without_interception
from swjax.linear.layer import (
    Layer,
    Operand,
    add,
    as_array,
    from_bytes,
    named,
    quantize,
    quantize_and_sum,
    quantize_both,
    quantizes_rows,
    read,
    to_bytes,
)
from swjax.linear.layouts import Spec
from swjax.linear.products import Layers, input_gradients, output, weight_gradients
from swjax.linear.prologues import Prologue, apply, apply_backward, input_spec
from swjax.recipes import Recipe

Addends = tuple[jax.Array | None, ...]  # one per layer: the array that is added to its output


class Inputs(NamedTuple):
    """The arrays of layers that share an input, except for the addends of their outputs; or their gradients.

    Attributes:
      x: the input of the layers, or of their prologue.
      ws, biases: one per layer.
      prologue: the prologue, or None.
    """

    x: Any
    ws: tuple[Any, ...]
    biases: tuple[Any, ...]
    prologue: Prologue | None


class Saved(NamedTuple):
    """The arrays that the backward pass reads.

    Attributes:
      x: the form that the weight gradient reads; empty if the prologue's backward pass recomputes it.
      ws: for each layer, the forms that the input gradient reads.
      inputs: x if there is a prologue, and the prologue; of the biases only the dtypes are read. The rest is
        for derivatives of the backward pass: compilers remove arrays that nothing reads.
    """

    x: Operand
    ws: tuple[Operand, ...]
    inputs: Inputs


# --- forward ------------------------------------------------------------------------------------------


def forward(
    inputs: Inputs, addends: Addends, layers: Layers
) -> tuple[tuple[jax.Array, ...], Operand, tuple[Operand, ...]]:
    """Returns y = x w + bias + addend of each layer, and x and each w in the forms that were read."""
    x = _quantized_input(inputs.x, inputs.prologue, layers[0])
    ws = tuple(map(_quantized_weight, inputs.ws, layers))
    ys = tuple(map(partial(output, x), ws, inputs.biases, addends, layers))
    return ys, x, ws


def _quantized_input(x: Any, prologue: Prologue | None, layer: Layer) -> Operand:
    """The layers' input, after the prologue."""
    fwd, sharding, q = layer.recipe.fwd, layer.sharding, None
    if prologue is not None:
        fusable = prologue.whole_rows or not sharding.splits(sharding.k)
        quantize_to = fwd.lhs.dtype if quantizes_rows(fwd) and fusable else None
        x, q = apply(prologue, x, layer, quantize_to=quantize_to)
    if q is None and fwd is not None and not fwd.outlier_threshold:
        q = quantize(fwd.lhs, x, sharding.x, -1, layer)
    if q is not None and layer.recipe.save_quantized:
        q = named(q, "swjax_x")
    return Operand(x, q)


def _quantized_weight(w: jax.Array | QTensor, layer: Layer) -> Operand:
    """A weight, quantized for the forward product; and for the input gradient if both read the same."""
    fwd = layer.recipe.fwd
    if isinstance(w, QTensor):
        return Operand(transposed=w)
    if fwd is None:
        return Operand(w)
    if layer.quantizes_weight_once and layer.reads_last_axis:
        known = Operand(None, *quantize_both(w, fwd.rhs.dtype, layer))
    else:
        known = read(fwd.rhs, Operand(w), layer.sharding.w, 0, layer)
    q, transposed = (form and named(form, "swjax_w") for form in known[1:3])
    return Operand(w, q, transposed)


def _save(inputs: Inputs, x: Operand, ws: tuple[Operand, ...], layers: Layers) -> Saved:
    """Selects the arrays to save; saves high-precision arrays as given, because a cast would be a copy."""
    save_quantized = layers[0].recipe.save_quantized
    if inputs.prologue is not None:
        x = Operand(None if save_quantized else x.array)
    else:
        x = Operand(quantized=x.quantized) if save_quantized else Operand(inputs.x)
    ws = tuple(map(_saved_weight, inputs.ws, ws, layers))
    x, ws = jax.tree.map(to_bytes, (x, ws))
    return Saved(x, ws, _kept(inputs))


def _saved_weight(w: jax.Array | QTensor, read: Operand, layer: Layer) -> Operand:
    recipe = layer.recipe
    if isinstance(w, QTensor):
        return read
    if not (layer.quantizes_weight_once or recipe.save_quantized):
        return Operand(w)
    products = recipe.fwd, recipe.dgrad
    with_outliers = any(product.outlier_threshold for product in products if product)
    transposed = (
        read.transposed if read.quantized is None else None
    )  # dx reads w along its last axis
    return Operand(w if with_outliers else None, read.quantized, transposed)


# --- backward -----------------------------------------------------------------------------------------


def backward(
    saved: Saved,
    gradients: tuple[Operand, ...],
    layers: Layers,
    *,
    residual_gradient: jax.Array | None = None,
    quantize_to: str | None = None,
) -> Inputs:
    """Computes the gradients of the inputs from the gradients of the outputs; that of x is an `Operand`.

    `residual_gradient` is added to the gradient of x; a prologue quantizes the sum to `quantize_to` if it
    can.
    """
    x, ws, (before_prologue, _, biases, prologue) = _from_bytes(saved, layers)
    if x.quantized is not None:
        # Without the barrier, XLA dequantizes x in the forward pass and saves the high-precision array.
        x, gradients, residual_gradient = lax.optimization_barrier(
            (x, gradients, residual_gradient)
        )
    gs, dbiases = zip(*map(_bias_gradient, gradients, biases, layers))
    dxs = input_gradients(gs, ws, layers)
    if prologue is None:
        dx, dprologue = Operand(add(*dxs, residual_gradient)), None
    else:
        recompute = x.array is None and x.quantized is None
        recompute = recompute and any(layer.w_dtype for layer in layers)
        options: dict[str, Any] = {"quantize_to": quantize_to, "recompute": recompute}
        dx, dprologue, recomputed = apply_backward(
            prologue, before_prologue, dxs, residual_gradient, layers[0], **options
        )
        x = Operand(recomputed) if recompute else x
    dws = weight_gradients(x, tuple(Operand(g.array) for g in gs), layers)
    return Inputs(dx, dws, dbiases, dprologue)


def _bias_gradient(g: Operand, bias: jax.Array | None, layer: Layer):
    """Returns (output gradient with the forms computed here, bias gradient or None)."""
    if bias is None:
        return g, None
    array, dgrad, sharding = g.array, layer.recipe.dgrad, layer.sharding
    assert array is not None, "every gradient is known in high precision"
    if g.token_sum is None:
        whole_rows = not sharding.splits(sharding.n)
        if g.quantized is None and quantizes_rows(dgrad) and whole_rows:
            q, total = quantize_and_sum(array, dgrad.lhs.dtype, layer)
            g = g._replace(quantized=q, token_sum=total)
        else:
            total = jnp.sum(array, axis=tuple(range(array.ndim - 1)), dtype=jnp.float32)
            g = g._replace(token_sum=total)
    # The layer that follows may have summed the gradient in another sharding.
    placed: Any = sharding.place(g.token_sum, Spec((sharding.n,)))
    return g, placed.astype(bias.dtype)


def _from_bytes(saved: Saved, layers: Layers) -> Saved:
    """Converts fp8 values that were saved as bytes back to fp8."""
    fwd = layers[0].recipe.fwd
    if fwd is None:
        return saved
    x = jax.tree.map(lambda a: from_bytes(a, fwd.lhs.dtype), saved.x)
    ws = jax.tree.map(lambda a: from_bytes(a, fwd.rhs.dtype), saved.ws)
    return Saved(x, ws, saved.inputs)


# --- layers of one input ------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def linears(
    inputs: Inputs, addends: Addends, layers: Layers, residual: bool
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Returns the layers' outputs, and x for a residual connection or None."""
    return _linears_forward(inputs, addends, layers, residual)[0]


def _linears_forward(inputs, addends, layers, residual):
    ys, x, ws = forward(*lax.stop_gradient((inputs, addends)), layers)
    ys = differentiated_as(partial(_exact_outputs, layers), ys, inputs, addends)
    ys = tuple(checkpoint_name(y, "swjax_y") for y in ys)
    return (ys, inputs.x if residual else None), _save(inputs, x, ws, layers)


@without_interception
def _linears_backward(layers, _, saved, gradients):
    constants, (gs, residual_gradient) = lax.stop_gradient((saved, gradients))
    gs = tuple(map(Operand, gs))
    of = backward(constants, gs, layers, residual_gradient=residual_gradient)
    of = of._replace(x=of.x.array)
    of_addends = tuple(
        g.astype(layer.addend_dtype) if layer.addend_dtype else None
        for g, layer in zip(gradients[0], layers)
    )
    if may_be_differentiated((saved.inputs, gradients)):
        inputs = _restored(saved.inputs, constants, layers)
        exact = lambda inputs: _exact_outputs(layers, inputs, (None,) * len(layers))
        of = differentiated_as(partial(_exact_gradients, exact), of, (inputs,), *gradients)
    return of, of_addends


linears.defvjp(_linears_forward, _linears_backward)


# --- two layers with a GELU ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def fused_mlp(
    inputs: Inputs, inputs2: Inputs, layers: tuple[Layer, Layer], residual: bool, add_input: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns ``gelu(x w1 + b1) w2 + b2``, plus x if `add_input`; and x for a residual connection or None.

    `inputs2` are those of the second layer without x; its prologue is the GELU.
    """
    return _mlp_forward(inputs, inputs2, layers, residual, add_input)[0]


def _mlp_forward(inputs, inputs2, layers, residual, add_input):
    first, second = ((layer,) for layer in layers)
    (hidden,), x, ws = forward(lax.stop_gradient(inputs), (None,), first)
    hidden = checkpoint_name(hidden, "swjax_y")
    whole = inputs2._replace(x=hidden)
    addends = (inputs.x if add_input else None,)
    (y,), x2, ws2 = forward(*lax.stop_gradient((whole, addends)), second)
    y = differentiated_as(partial(_exact_mlp, layers, add_input), y, inputs, inputs2)
    y = checkpoint_name(y, "swjax_y")
    saved = _save(inputs, x, ws, first), _save(whole, x2, ws2, second)
    return (y, inputs.x if residual else None), saved


@without_interception
def _mlp_backward(layers, _, add_input, saved, gradients):
    first, second = layers
    constants, (g, residual_gradient) = lax.stop_gradient((saved, gradients))
    if add_input:  # the output may have another sharding than x
        spec = input_spec(constants[0].inputs.prologue, first)
        residual_gradient = add(first.sharding.place(g, spec), residual_gradient)
    dgrad, sharding = first.recipe.dgrad, second.sharding
    quantizable = quantizes_rows(dgrad) and not sharding.splits(sharding.k)
    quantize_to = dgrad.lhs.dtype if quantizable else None
    of2 = backward(constants[1], (Operand(g),), (second,), quantize_to=quantize_to)
    of1 = backward(constants[0], (of2.x,), (first,), residual_gradient=residual_gradient)
    of = of1._replace(x=of1.x.array), of2._replace(x=None)
    if not may_be_differentiated((saved[0].inputs, saved[1].inputs, gradients)):
        return of
    inputs, inputs2 = (
        _restored(each.inputs, constant, (layer,))
        for each, constant, layer in zip(saved, constants, layers)
    )
    exact = partial(_exact_gradients, partial(_exact_mlp, layers, add_input))
    return differentiated_as(exact, of, (inputs, inputs2._replace(x=None)), *gradients)


fused_mlp.defvjp(_mlp_forward, _mlp_backward)


# --- higher derivatives -------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def differentiated_as(exact: Callable, value: Any, *operands: Any) -> Any:
    """Returns `value` with the derivatives of ``exact(*operands)``; adds no operations to the program.

    Args:
      exact: a differentiable function whose result has the structure, shapes and dtypes of `value`.
      value: a tree of arrays, computed from `jax.lax.stop_gradient` of the operands.
      operands: trees of arrays.

    >>> import jax.numpy as jnp
    >>> rounded = lambda x: differentiated_as(jnp.sin, jnp.round(jax.lax.stop_gradient(x)), x)
    >>> float(rounded(0.9)), float(jax.grad(rounded)(0.0))
    (1.0, 1.0)
    """
    del exact, operands
    return value


@differentiated_as.defjvp
def _derivative(exact, primals, tangents):
    _, tangent = jax.jvp(exact, primals[1:], tangents[1:])
    return differentiated_as(exact, *primals), tangent


def may_be_differentiated(tree: Any) -> bool:
    """Whether a transformation may differentiate with respect to any array; concrete arrays are constants."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _kept(inputs: Inputs) -> Inputs:
    """The inputs to save. x and w, which may take memory, are omitted where `_restored` can recover them."""
    if may_be_differentiated(inputs):
        return inputs
    x = None if inputs.prologue is None else inputs.x
    return inputs._replace(x=x, ws=(None,) * len(inputs.ws))


def _restored(kept: Inputs, saved: Saved, layers: Layers) -> Inputs:
    """The inputs in the backward pass; arrays that were saved quantized are dequantized."""
    if kept.ws[0] is not None:
        return kept
    x, ws, _ = _from_bytes(saved, layers)
    return kept._replace(
        x=as_array(x, layers[0].dtype) if kept.x is None else kept.x,
        ws=tuple(
            as_array(w, layer.w_dtype) if layer.w_dtype else w.transposed
            for w, layer in zip(ws, layers)
        ),
    )


def _exact_outputs(layers: Layers, inputs: Inputs, addends: Addends) -> tuple[jax.Array, ...]:
    """The outputs without quantization, which JAX differentiates."""
    exact = (replace(layer, recipe=Recipe(), implementation="xla") for layer in layers)
    return forward(inputs, addends, tuple(exact))[0]


def _exact_mlp(layers: tuple[Layer, Layer], add_input: bool, inputs: Inputs, inputs2: Inputs):
    first, second = layers
    (hidden,) = _exact_outputs((first,), inputs, (None,))
    addends = (inputs.x if add_input else None,)
    return _exact_outputs((second,), inputs2._replace(x=hidden), addends)[0]


def _exact_gradients(exact_outputs, inputs, gradients, residual_gradient):
    """The gradients without quantization, which JAX differentiates."""
    _, vjp = jax.vjp(exact_outputs, *inputs)
    is_quantized = lambda leaf: isinstance(leaf, QTensor)
    first, *others = jax.tree.map(
        lambda d: None if is_quantized(d) else d, vjp(gradients), is_leaf=is_quantized
    )
    first = first._replace(x=add(first.x, residual_gradient))
    return (first, *others) if others else first
