"""The two `jax.custom_vjp`s of linear layers: `linears`, for one input and one or several weights, and
`fused_mlp`, for two layers with a GELU between them.

The recipe determines the first derivative, through `forward` and `backward`. Higher derivatives are those of
the same layers without quantization, see `swjax.linear.derivatives`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels.reference import QTensor
from swjax.linear.backward_pass import backward, operands_from
from swjax.linear.derivatives import differentiated_as, may_be_differentiated
from swjax.linear.forward_pass import Addends, Layers, Operands, Saved, forward, outputs
from swjax.linear.products import Settings, quantizes_rows
from swjax.linear.prologues import Gelu, Gradient, Prologue, add
from swjax.recipes import Recipe

# --- layers of one input ------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def linears(
    x: jax.Array,
    ws: tuple[jax.Array | QTensor, ...],
    biases: tuple[jax.Array | None, ...],
    prologue: Prologue | None,
    addends: Addends,
    layers: Layers,
    residual: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Returns the layers' outputs, and x for a residual connection or None."""
    return _linears_forward(x, ws, biases, prologue, addends, layers, residual)[0]


def _linears_forward(x, ws, biases, prologue, addends, layers, residual):
    operands = Operands(x, ws, biases, prologue)
    ys, saved = forward(operands, addends, layers)
    ys = differentiated_as(partial(_exact_outputs, layers), ys, addends, *operands)
    ys = tuple(checkpoint_name(y, "swjax_y") for y in ys)
    like_addends = tuple(None if a is None else jnp.empty(0, a.dtype) for a in addends)
    return (ys, x if residual else None), (saved, _kept(operands), like_addends)


def _linears_backward(layers, _, residuals, gradients):
    saved, (kept,), like_addends = residuals
    constants, (gs, residual_gradient) = lax.stop_gradient((saved, gradients))
    computed = backward(
        constants, tuple(map(Gradient, gs)), layers, residual_gradient=residual_gradient
    )
    arrays = (computed.x.array, *computed[1:])
    of_addends = tuple(
        None if like is None else g.astype(like.dtype)
        for like, g in zip(like_addends, gradients[0])
    )
    if not may_be_differentiated((kept, gradients)):
        return *arrays, of_addends
    operands = _restored(kept, constants, layers)
    no_addends = (None,) * len(layers)
    exact = partial(_exact_gradients, partial(_exact_outputs, layers, no_addends))
    return *differentiated_as(exact, arrays, tuple(operands), *gradients), of_addends


linears.defvjp(_linears_forward, _linears_backward)


# --- two layers with a GELU ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9, 10))
def fused_mlp(
    x: jax.Array,
    w1: jax.Array | QTensor,
    b1: jax.Array | None,
    w2: jax.Array | QTensor,
    b2: jax.Array | None,
    prologue: Prologue | None,
    gelu: Gelu,
    first: Settings,
    second: Settings,
    residual: bool,
    add_input: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns ``gelu(x w1 + b1) w2 + b2``, plus x if `add_input`; and x for a residual connection or None."""
    return _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, first, second, residual, add_input)[0]


def _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, first, second, residual, add_input):
    operands = Operands(x, (w1,), (b1,), prologue)
    (hidden,), saved = forward(operands, (None,), (first,))
    hidden = checkpoint_name(hidden, "swjax_y")
    operands_of_second = Operands(hidden, (w2,), (b2,), gelu)
    addends = (x if add_input else None,)
    (y,), saved_by_second = forward(operands_of_second, addends, (second,))
    exact = partial(_exact_mlp, gelu, first, second, add_input)
    y = differentiated_as(exact, y, x, w1, b1, w2, b2, prologue)
    y = checkpoint_name(y, "swjax_y")
    kept = _kept(operands, operands_of_second)
    return (y, x if residual else None), (saved, saved_by_second, kept)


def _mlp_backward(gelu, first, second, _, add_input, residuals, gradients):
    *saved, kept = residuals
    constants, (g, residual_gradient) = lax.stop_gradient((saved, gradients))
    if add_input:  # the output may have another sharding than x
        g_of_input = first.sharded.place_input(g, constants[0].prologue)
        residual_gradient = add(g_of_input, residual_gradient)
    dgrad, plan = first.recipe.dgrad, second.plan
    quantizable = quantizes_rows(dgrad) and not plan.splits(plan.k)
    quantize_to = dgrad.lhs.dtype if quantizable else None
    of_second = backward(constants[1], (Gradient(g),), (second,), quantize_to=quantize_to)
    of_first = backward(constants[0], (of_second.x,), (first,), residual_gradient=residual_gradient)
    (dw1,), (db1,), (dw2,), (db2,) = of_first.ws, of_first.biases, of_second.ws, of_second.biases
    arrays = of_first.x.array, dw1, db1, dw2, db2, of_first.prologue
    if not may_be_differentiated((kept, gradients)):
        return arrays
    x, (w1,), (b1,), prologue = _restored(kept[0], constants[0], (first,))
    _, (w2,), (b2,), _ = _restored(kept[1], constants[1], (second,))
    exact = partial(_exact_gradients, partial(_exact_mlp, gelu, first, second, add_input))
    return differentiated_as(exact, arrays, (x, w1, b1, w2, b2, prologue), *gradients)


fused_mlp.defvjp(_mlp_forward, _mlp_backward)


# --- further derivatives ------------------------------------------------------------------------------


def _kept(*operands: Operands) -> tuple[Operands, ...]:
    """Arrays that derivatives of the backward pass need in addition to `Saved`.

    The backward pass itself does not read them, and compilers remove unread arrays. Concrete operands are
    constants. x and w, which may take memory, are omitted; `_restored` recovers them from `Saved`.
    """
    if may_be_differentiated(operands):
        return operands
    return tuple(each._replace(x=None, ws=(None,) * len(each.ws)) for each in operands)


def _restored(kept: Operands, saved: Saved, layers: Layers) -> Operands:
    return kept if kept.x is not None else operands_from(saved, kept.biases, layers)


def _exact_outputs(layers: Layers, addends: Addends, *operands) -> tuple[jax.Array, ...]:
    """The outputs without quantization, which JAX differentiates."""
    return outputs(Operands(*operands), addends, tuple(map(_exact, layers)))[0]


def _exact_mlp(gelu, first, second, add_input, x, w1, b1, w2, b2, prologue):
    (hidden,) = _exact_outputs((first,), (None,), x, (w1,), (b1,), prologue)
    (y,) = _exact_outputs((second,), (x if add_input else None,), hidden, (w2,), (b2,), gelu)
    return y


def _exact_gradients(exact_outputs, operands, gradients, residual_gradient):
    """The gradients without quantization, which JAX differentiates."""
    _, vjp = jax.vjp(exact_outputs, *operands)
    dx, *others = vjp(gradients)
    is_quantized = lambda leaf: isinstance(leaf, QTensor)
    others = jax.tree.map(lambda d: None if is_quantized(d) else d, others, is_leaf=is_quantized)
    return add(dx, residual_gradient), *others


def _exact(layer: Settings) -> Settings:
    arithmetic = layer.sharded.arithmetic._replace(implementation="xla")
    return layer._replace(recipe=Recipe(), sharded=layer.sharded._replace(arithmetic=arithmetic))
