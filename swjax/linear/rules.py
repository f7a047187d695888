"""Forward and backward pass of linear layers that share an input, as in Algorithm 1, with their derivatives.

`linears` is one input and one or several weights; `fused_mlp` is one layer, or two before a gated activation,
then the activation and a last layer. The recipe determines the first derivative: products of quantized
operands. The derivative of rounding is zero almost everywhere, so higher derivatives treat every product as
exact. This is the straight-through estimate: the derivatives of ``prologue(x) w + bias`` in high precision.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels import dispatch
from swjax.kernels.block_formats.reference import Blocks
from swjax.kernels.reference import QTensor, rotate_features
from swjax.linear import fused
from swjax.linear.interception import without_interception
from swjax.linear.layer import (
    Layer,
    Operand,
    add,
    as_array,
    from_bytes,
    name_for_checkpoint,
    quantize_blocks_both_ways,
    quantize_both_ways,
    quantize_gradient,
    quantize_in_blocks,
    quantize_sharded,
    quantizes_rows,
    read,
    to_bytes,
)
from swjax.linear.layouts import Spec
from swjax.linear.products import (
    Layers,
    RowScales,
    estimated,
    input_gradients,
    output,
    read_gradient,
    weight_gradients,
)
from swjax.linear.prologues import Gated, Prologue, apply, apply_backward, input_spec
from swjax.recipes import Recipe

Addends = tuple[jax.Array | None, ...]  # one per layer: the array that is added to its output


class LayerArrays(NamedTuple):
    """The arrays of layers that share an input, except for the addends of their outputs; or their gradients.

    Attributes:
      x: the input of the layers, or of their prologue; for `Gated` a pair.
      ws, biases: one per layer.
      prologue: the prologue, or None.
    """

    x: Any
    ws: tuple[Any, ...]
    biases: tuple[Any, ...]
    prologue: Prologue | Gated | None


class Saved(NamedTuple):
    """The arrays that the backward pass reads.

    Attributes:
      x: the form that the weight gradient reads; empty if the prologue's backward pass recomputes it.
      x_scale: the scales of the rows of the quantized x, if an 8-bit weight gradient reads x itself, or None.
      ws: for each layer, the forms that the input gradient reads.
      inputs: x if there is a prologue, and the prologue; of the biases only the dtypes are read. The rest is
        for derivatives of the backward pass: compilers remove arrays that nothing reads.
    """

    x: Operand
    x_scale: jax.Array | None
    ws: tuple[Operand, ...]
    inputs: LayerArrays


# --- forward ------------------------------------------------------------------------------------------


def forward(
    inputs: LayerArrays, addends: Addends, layers: Layers
) -> tuple[tuple[jax.Array, ...], Operand, tuple[Operand, ...]]:
    """Returns y = x w + bias + addend of each layer, and x and each w in the forms that were read."""
    ws, prologue, y = tuple(map(_quantized_weight, inputs.ws, layers)), inputs.prologue, None
    if len(layers) == 1:
        y = fused.output(inputs.x, prologue, ws[0], inputs.biases[0], addends[0], layers[0])
    ys: tuple[jax.Array, ...]
    if y is not None:
        x, ys = Operand(None if prologue else inputs.x), (y,)
    else:
        x = quantized_input(inputs.x, prologue, layers[0])
        ys = tuple(map(partial(output, x), ws, inputs.biases, addends, layers))
    if layers[0].recipe.fwd is not None:
        ys = tuple(map(_as_product, ys))
    return ys, x, ws


def _as_product(y: jax.Array) -> jax.Array:
    """Returns y as the result of a `jax.lax.dot_general`, for JAX's own policies of `jax.checkpoint`.

    `dots_saveable` and the like save the results of that operation. Of a quantized product they would save
    the int32 sums, and they do not see a kernel at all. XLA removes the product with one.
    """
    no_axes = (((), ()), ((), ()))
    return lax.dot_general(y, jnp.ones((), y.dtype), no_axes, precision=lax.Precision.HIGHEST)


def quantized_input(x: Any, prologue: Prologue | Gated | None, layer: Layer) -> Operand:
    """The layers' input, after the prologue."""
    fwd, sharding = layer.recipe.fwd, layer.sharding
    q: QTensor | Blocks | None = None
    if prologue is not None:
        fusable = prologue.whole_rows or not sharding.sharded_axes(sharding.k)
        quantize_to = fwd.lhs.dtype if quantizes_rows(fwd) and fusable else None
        x, q = apply(prologue, x, layer, quantize_to=quantize_to)
    if q is None and fwd is not None and not fwd.has_outliers:
        if not fwd.in_blocks:
            q = quantize_sharded(fwd.lhs, x, sharding.x, -1, layer)
        elif layer.multiplies_blocks(fwd.lhs, x.shape[-1]):
            q = quantize_in_blocks(fwd.lhs, x, sharding.x, -1, layer)
    if isinstance(q, QTensor) and layer.recipe.save_quantized:
        q = name_for_checkpoint(q, "swjax_x")
    return Operand(x, q)


def _quantized_weight(w: jax.Array | QTensor, layer: Layer) -> Operand:
    """A weight, quantized for the forward product; and for the input gradient if both read the same."""
    fwd = layer.recipe.fwd
    if isinstance(w, QTensor):
        return Operand(transposed=w)
    if fwd is None:
        return Operand(w)
    if fwd.in_blocks:  # blocks extend along the axis that a product sums over
        rhs = layer.recipe.dgrad and layer.recipe.dgrad.rhs
        both = rhs and quantize_blocks_both_ways((rhs, fwd.rhs), w, layer.sharding.w, layer)
        return Operand(w, *both) if both else Operand(w)
    if layer.recipe.quantizes_weight_once and layer.reads_last_axis:
        known = Operand(None, *quantize_both_ways(fwd.rhs, w, layer.sharding.w, layer))
    else:
        known = read(fwd.rhs, Operand(w), layer.sharding.w, 0, layer)
    q, transposed = (form and name_for_checkpoint(form, "swjax_w") for form in known[1:3])
    return Operand(w, q, transposed)


def _save(inputs: LayerArrays, x: Operand, ws: tuple[Operand, ...], layers: Layers) -> Saved:
    """Selects the arrays to save.

    High-precision arrays are the arguments of the rule themselves: a cast would be a copy, and a
    `jax.lax.scan` over layers copies what is not a slice of its own input.
    """
    recipe, x_scale = layers[0].recipe, None
    save_quantized = recipe.save_quantized
    if x.quantized is not None and recipe.fwd is not None and recipe.fwd.lhs.scope == "row":
        if recipe.wgrad is not None and recipe.wgrad.lhs.scope == "block":
            x_scale = checkpoint_name(_as_product(x.quantized.scale), "swjax_x_scale")
    if inputs.prologue is not None:
        x = Operand(None if save_quantized else x.array)
    else:
        x = Operand(quantized=x.quantized) if save_quantized else Operand(inputs.x)
    ws = tuple(map(_saved_weight, inputs.ws, ws, layers))
    x, ws = jax.tree.map(to_bytes, (x, ws))
    return Saved(x, x_scale, ws, _kept(inputs))


def _saved_weight(w: jax.Array | QTensor, forms: Operand, layer: Layer) -> Operand:
    recipe = layer.recipe
    if isinstance(w, QTensor):
        return Operand(transposed=w)
    if isinstance(forms.quantized, Blocks):
        return Operand(quantized=forms.quantized)
    if not (recipe.quantizes_weight_once or recipe.save_quantized):
        return Operand(w)
    products = recipe.fwd, recipe.dgrad
    with_outliers = any(product.outlier_threshold for product in products if product)
    # dx reads w along its last axis, as stored in `quantized`.
    transposed = forms.transposed if forms.quantized is None else None
    return Operand(w if with_outliers else None, forms.quantized, transposed)


# --- backward -----------------------------------------------------------------------------------------


def backward(
    saved: Saved,
    gradients: tuple[Operand, ...],
    layers: Layers,
    *,
    residual_gradient: jax.Array | None = None,
    quantize_to: str | None = None,
) -> LayerArrays:
    """Computes the gradients of the inputs from the gradients of the outputs.

    That of x is a tuple: an `Operand` for each array. `residual_gradient` is added to the gradient of x; a
    prologue quantizes the sum to `quantize_to` if it can.
    """
    x, x_scale, ws, (before_prologue, _, biases, prologue) = _from_bytes(saved, layers)
    if x.quantized is not None:
        # Without the barrier, XLA dequantizes x in the forward pass and saves the high-precision array.
        x, gradients, residual_gradient = lax.optimization_barrier(
            (x, gradients, residual_gradient)
        )
    gs, dbiases = zip(*map(_bias_gradient, gradients, biases, layers))
    recompute = prologue is not None and x.array is None and x.quantized is None
    recompute = recompute and any(layer.w_dtype for layer in layers)
    found = None
    if len(layers) == 1:
        given = gs[0], ws[0], before_prologue, prologue, residual_gradient, layers[0]
        found = fused.input_gradient(*given, recompute=recompute)
    if found is None:
        gs = tuple(map(read_gradient, gs, layers))
        dxs = input_gradients(gs, ws, layers)
    if found is not None:
        dx, dprologue, recomputed = found
        x = Operand(recomputed) if recompute else x
    elif prologue is None:
        dx = (Operand(add(*dxs, residual_gradient)),)
        dprologue = None
    else:
        options: dict[str, Any] = {"quantize_to": quantize_to, "recompute": recompute}
        dx, dprologue, recomputed = apply_backward(
            prologue, before_prologue, dxs, residual_gradient, layers[0], **options
        )
        x = Operand(recomputed) if recompute else x
    scales = RowScales(x_scale, tuple(g.quantized.scale if g.quantized else None for g in gs))
    gs = tuple(Operand(g.array, transposed=g.transposed) for g in gs)
    dws = weight_gradients(x, gs, layers, scales)
    dws = tuple(map(estimated, dws, ws, layers))
    return LayerArrays(dx, dws, dbiases, dprologue)


def _bias_gradient(g: Operand, bias: jax.Array | None, layer: Layer):
    """Returns (output gradient with the forms computed here, bias gradient or None)."""
    if bias is None:
        return g, None
    array, dgrad, sharding = g.array, layer.recipe.dgrad, layer.sharding
    assert array is not None, "every gradient is known in high precision"
    if g.token_sum is None:
        whole_rows = not sharding.sharded_axes(sharding.n)
        if g.quantized is None and quantizes_rows(dgrad) and whole_rows:
            q, total = quantize_gradient(array, dgrad.lhs.dtype, layer)
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
    return Saved(x, saved.x_scale, ws, saved.inputs)


# --- layers of one input ------------------------------------------------------------------------------


def traced_once(*static: int) -> Callable[[Callable], Callable]:
    """Decorates a rule so that JAX traces it once for layers of equal shapes and settings.

    `jax.checkpoint` sees the names inside. Outside of `jax.jit` the rule runs as it is, because it saves less
    for arrays that it sees to be constants, see `may_be_differentiated`; and where `dispatch.record` counts
    its operations.

    Args:
      *static: positions of the arguments that are no arrays.

    >>> rule = traced_once(0)(lambda name, x: print(name) or x)
    >>> _ = jax.make_jaxpr(lambda x: rule("traced", rule("traced", x)))(1.0)
    traced
    """

    def decorate(rule):
        jitted = jax.jit(rule, static_argnums=static)

        @wraps(rule)
        def wrapper(*args):
            arrays = [arg for i, arg in enumerate(args) if i not in static]
            as_it_is = dispatch.is_recording() or not may_be_differentiated(arrays)
            return (rule if as_it_is else jitted)(*args)

        return wrapper

    return decorate


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def linears(
    inputs: LayerArrays, addends: Addends, layers: Layers, residual: bool
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Returns the layers' outputs, and x for a residual connection or None."""
    return _linears_forward(inputs, addends, layers, residual)[0]


def _linears_forward(inputs, addends, layers, residual):
    ys, x, ws = _outputs(inputs, addends, layers)
    ys = tuple(checkpoint_name(y, "swjax_y") for y in ys)
    return (ys, inputs.x if residual else None), _save(inputs, x, ws, layers)


@traced_once(2)
def _outputs(inputs, addends, layers):
    ys, x, ws = forward(*lax.stop_gradient((inputs, addends)), layers)
    return differentiated_as(partial(_exact_outputs, layers), ys, inputs, addends), x, ws


@without_interception
@traced_once(0, 1)
def _linears_backward(layers, _, saved, gradients):
    constants, (gs, residual_gradient) = lax.stop_gradient((saved, gradients))
    gs = tuple(map(Operand, gs))
    grads = backward(constants, gs, layers, residual_gradient=residual_gradient)
    grads = grads._replace(x=grads.x[0].array)
    addend_grads = tuple(
        g.astype(layer.addend_dtype) if layer.addend_dtype else None
        for g, layer in zip(gradients[0], layers)
    )
    if may_be_differentiated((saved.inputs, gradients)):
        inputs = _restored(saved.inputs, constants, layers)
        exact = lambda inputs: _exact_outputs(layers, inputs, (None,) * len(layers))
        exact_grads = partial(_exact_gradients, exact)
        grads = differentiated_as(exact_grads, grads, (inputs,), *gradients)
    return grads, addend_grads


linears.defvjp(_linears_forward, _linears_backward)


# --- layers with an activation between them -----------------------------------------------------------


class MLPLayers(NamedTuple):
    """The layers of `fused_mlp`: one before the activation, or two before a gated one; and the last."""

    first: Layers
    last: Layer


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def fused_mlp(
    inputs: LayerArrays,
    inputs2: LayerArrays,
    layers: MLPLayers,
    residual: bool,
    add_input: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns ``activation(x w1 + b1) w2 + b2``, plus x if `add_input`; and x for a residual connection or
    None.

    `inputs2` are those of the last layer without x; its prologue is the activation.
    """
    return _mlp_forward(inputs, inputs2, layers, residual, add_input)[0]


def _mlp_forward(inputs, inputs2, layers, residual, add_input):
    hidden, x, ws, y, x2, ws2 = _mlp_outputs(inputs, inputs2, layers, add_input)
    whole = inputs2._replace(x=_one_or_pair(hidden))
    saved = _save(inputs, x, ws, layers.first), _save(whole, x2, ws2, (layers.last,))
    return (checkpoint_name(y, "swjax_y"), inputs.x if residual else None), saved


@traced_once(2, 3)
def _mlp_outputs(inputs, inputs2, layers, add_input):
    first, last = layers.first, (layers.last,)
    hidden, x, ws = forward(lax.stop_gradient(inputs), (None,) * len(first), first)
    hidden = tuple(checkpoint_name(each, "swjax_y") for each in hidden)
    whole = inputs2._replace(x=_one_or_pair(hidden))
    addends = (inputs.x if add_input else None,)
    (y,), x2, ws2 = forward(*lax.stop_gradient((whole, addends)), last)
    y = differentiated_as(partial(_exact_mlp, layers, add_input), y, inputs, inputs2)
    return hidden, x, ws, y, x2, ws2


def _one_or_pair(hidden: tuple) -> Any:
    """The input of the activation: one layer's output, or those of gate and up."""
    return hidden if len(hidden) > 1 else hidden[0]


@without_interception
@traced_once(0, 1, 2)
def _mlp_backward(layers, _, add_input, saved, gradients):
    first, last = layers
    constants, (g, residual_gradient) = lax.stop_gradient((saved, gradients))
    if add_input:  # the output may have another sharding than x
        spec = input_spec(constants[0].inputs.prologue, first[0])
        residual_gradient = add(first[0].sharding.place(g, spec), residual_gradient)
    dgrad, sharding = first[0].recipe.dgrad, last.sharding
    quantizable = quantizes_rows(dgrad) and not sharding.sharded_axes(sharding.k)
    quantize_to = dgrad.lhs.dtype if quantizable else None
    grads2 = backward(constants[1], (Operand(g),), (last,), quantize_to=quantize_to)
    grads1 = backward(constants[0], grads2.x, first, residual_gradient=residual_gradient)
    grads = grads1._replace(x=grads1.x[0].array), grads2._replace(x=None)
    if not may_be_differentiated((saved[0].inputs, saved[1].inputs, gradients)):
        return grads
    inputs, inputs2 = (
        _restored(each.inputs, constant, of)
        for each, constant, of in zip(saved, constants, (first, (last,)))
    )
    exact = partial(_exact_gradients, partial(_exact_mlp, layers, add_input))
    return differentiated_as(exact, grads, (inputs, inputs2._replace(x=None)), *gradients)


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


def _kept(inputs: LayerArrays) -> LayerArrays:
    """The inputs to save. x and w, which may take memory, are omitted where `_restored` can recover them."""
    if may_be_differentiated(inputs):
        return inputs
    x = None if inputs.prologue is None else inputs.x
    return inputs._replace(x=x, ws=(None,) * len(inputs.ws))


def _restored(kept: LayerArrays, saved: Saved, layers: Layers) -> LayerArrays:
    """The inputs in the backward pass; arrays that were saved quantized are dequantized."""
    if kept.ws[0] is not None:
        return kept
    x, _, ws, _ = _from_bytes(saved, layers)
    return kept._replace(
        x=as_array(x, layers[0].dtype) if kept.x is None else kept.x,
        ws=tuple(
            as_array(w, layer.w_dtype) if layer.w_dtype else w.transposed
            for w, layer in zip(ws, layers)
        ),
    )


def _exact_outputs(layers: Layers, inputs: LayerArrays, addends: Addends) -> tuple[jax.Array, ...]:
    """The outputs without quantization, which JAX differentiates."""
    exact = tuple(replace(layer, recipe=Recipe(), implementation="xla") for layer in layers)
    ws = tuple(map(_exact_weight, inputs.ws, layers))
    return forward(inputs._replace(ws=ws), addends, exact)[0]


def _exact_weight(w: jax.Array | QTensor, layer: Layer) -> jax.Array | QTensor:
    """The weight that a layer without quantization multiplies."""
    if not isinstance(w, QTensor) or layer.rotated_weight == 1:
        return w
    return rotate_features(
        as_array(Operand(transposed=w), "float32"), layer.rotated_weight, 0, inverse=True
    )


def _exact_mlp(layers: MLPLayers, add_input: bool, inputs: LayerArrays, inputs2: LayerArrays):
    hidden = _exact_outputs(layers.first, inputs, (None,) * len(layers.first))
    addends = (inputs.x if add_input else None,)
    return _exact_outputs((layers.last,), inputs2._replace(x=_one_or_pair(hidden)), addends)[0]


def without_quantized(gradients: Any) -> Any:
    """Gradients with None for those of quantized weights, which have none."""
    is_quantized = lambda leaf: isinstance(leaf, QTensor)
    return jax.tree.map(lambda d: None if is_quantized(d) else d, gradients, is_leaf=is_quantized)


def _exact_gradients(exact_outputs, inputs, gradients, residual_gradient):
    """The gradients without quantization, which JAX differentiates."""
    _, vjp = jax.vjp(exact_outputs, *inputs)
    first, *others = without_quantized(vjp(gradients))
    first = first._replace(x=add(first.x, residual_gradient))
    return (first, *others) if others else first
