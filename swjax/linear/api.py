"""The public functions of the linear layer: `switchback`, `mlp`, and `quantize_weight` for inference."""

from typing import Any

import jax
import jax.numpy as jnp

from swjax import recipes
from swjax.kernels import dispatch
from swjax.kernels.reference import QTensor
from swjax.linear.arithmetic import Arithmetic
from swjax.linear.checks import (
    check_addend,
    check_dtypes,
    check_prologue,
    check_shapes,
    weight_array,
    weight_quantizer,
)
from swjax.linear.layouts import Layout, Spec, as_matrix, specs_of
from swjax.linear.plain import is_plain, plain_output
from swjax.linear.planning import plan_layer, plan_next
from swjax.linear.plans import vary_alike
from swjax.linear.products import Settings
from swjax.linear.prologues import Gelu, Prologue
from swjax.linear.sharded import Sharded
from swjax.linear.vjp import fused_mlp, linears
from swjax.recipes import Recipe


def switchback(
    x: jax.Array,
    w: jax.Array | QTensor | tuple[jax.Array | QTensor, ...],
    bias: jax.Array | tuple[jax.Array | None, ...] | None = None,
    *,
    addend: jax.Array | None = None,
    recipe: str | Recipe = "switchback",
    prologue: Prologue | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    residual: bool = False,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array | tuple:
    """Linear layer ``y = x w + bias`` with quantized products, forward and backward.

    The default recipe is SwitchBack (Alg. 1 of the paper, `swjax.linear.algorithm`): one scale per token
    of x and g, one scale for w::

        y  = int8(x) int8(w)  * scale_x scale_w + bias
        dx = int8(g) int8(wT) * scale_g scale_w
        dw = xT g                                     in the dtype of x

    int8 operands are multiplied as int8 and summed in int32. The weight is quantized from `w` as given: pass
    the fp32 parameter, not a 16-bit copy. Higher derivatives are straight-through: they equal those of exact
    products, see docs/transformations.md.

    Args:
      x: [..., k] float16, bfloat16 or float32; any leading dimensions, also of size 0. Products without
        quantization are computed in its dtype. The recipe "standard" also supports float64 and complex, if w,
        bias and y have the same dtype and neither `prologue` nor `layout` is given.
      w: [k, n], dtypes as for x; its gradient has the dtype of w. A tuple contains the weights of several
        layers with the same input, such as queries, keys and values, for which x is quantized once. A weight
        from `quantize_weight` has no gradient; y is the same, and so is dx if the recipe has one scale for w.
      bias: [n] or None; a tuple of these if w is one.
      addend: [..., n] float16, bfloat16 or float32 array to add to y, such as a residual stream, or None. The
        kernel of a quantized product adds it in float32, which saves a pass over memory. Not for several
        weights.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      prologue: a `swjax.LayerNorm` or `swjax.Gelu` to apply to x first, fused with the quantizer.
      out_dtype: dtype of y; None uses the dtype of x.
      precision: precision of the products without quantization, see `jax.lax.dot_general`.
      residual: whether to return x as well, for a residual connection. The prologue's backward pass then adds
        the residual's gradient, which saves a pass over memory.
      implementation: implementation of the quantized products, see `swjax.kernels.dispatch`; None chooses.
      layout: shardings of x and w, see `swjax.Layout`; not needed on one device and on explicit meshes.

    Returns:
      y: [..., n] in `out_dtype`; a tuple of outputs if w is a tuple. With `residual`: (y, x).

    Raises:
      ValueError: an argument is not an array, shapes or dtypes do not fit, or the recipe or the
        implementation does not exist.

    >>> x, w = jnp.ones((2, 5, 3)), jnp.full((3, 4), 0.5)
    >>> y = switchback(x, w)
    >>> y.shape, float(y[0, 0, 0])
    ((2, 5, 4), 1.5)
    >>> [y.shape for y in switchback(x, (w, w[:, :1]), (None, None))]
    [(2, 5, 4), (2, 5, 1)]

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
      NeurIPS 2023, https://arxiv.org/abs/2304.13013
    """
    several = isinstance(w, tuple) and not isinstance(w, QTensor)
    ws: Any = w if several else (w,)
    if not ws:
        raise ValueError(
            "w must be an array or a tuple of several, got (): pass at least one weight"
        )
    biases: Any = _biases(ws, bias) if several else (bias,)
    for each in zip(ws, biases, strict=True):
        check_shapes(x, *each, recipe)
    check_addend(x, ws, addend)
    check_prologue(x, prologue)
    plans = [plan_layer(x, weight_array(w), layout) for w in ws]
    layers = tuple(
        _settings(x, recipe, out_dtype, precision, implementation, plan) for plan in plans
    )
    if _has_no_tokens(x, plans[0]):
        ys = tuple(_no_outputs(x, *each) for each in zip(ws, layers))
    elif prologue is None and all(is_plain(x, *each, addend) for each in zip(ws, biases, layers)):
        ys = tuple(plain_output(x, *each, addend, precision) for each in zip(ws, biases))
    else:
        for each in zip(ws, biases):
            check_dtypes(x, *each, addend)
        x = layers[0].sharded.place_input(x, prologue)
        ws, biases = zip(*map(_place, ws, biases, plans))
        addends = (plans[0].place(addend, plans[0].y), *(None for _ in ws[1:]))
        ys, kept = linears(*vary_alike(x, ws, biases, prologue, addends), layers, residual)
        x = x if kept is None else kept
    y = ys if several else ys[0]
    return (y, x) if residual else y


def _biases(ws: tuple, bias) -> tuple:
    """The bias of each of several weights."""
    if bias is None:
        return (None,) * len(ws)
    if not isinstance(bias, tuple | list) or len(bias) != len(ws):
        got = len(bias) if isinstance(bias, tuple | list) else "one for all"
        raise ValueError(
            f"{len(ws)} weights need None or a tuple of {len(ws)} biases, "
            f"each an array or None, got {got}"
        )
    return tuple(bias)


def mlp(
    x: jax.Array,
    w1: jax.Array | QTensor,
    b1: jax.Array | None,
    w2: jax.Array | QTensor,
    b2: jax.Array | None,
    *,
    recipe: str | Recipe = "switchback",
    prologue: Prologue | None = None,
    approximate: bool = False,
    precision: jax.lax.PrecisionLike = None,
    residual: bool = False,
    add_input: bool = False,
    implementation: str | None = None,
    layouts: tuple[Layout | None, Layout | None] = (None, None),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``gelu(x w1 + b1) w2 + b2``: two `switchback` layers that share memory passes with the GELU.

    The result equals that of the two layers. In the backward pass, one memory pass writes the GELU's gradient
    in 16 bits and quantized, and sums it for b1.

    Args:
      x: [..., k] float16, bfloat16 or float32.
      w1: [k, h]; b1: [h] or None; w2: [h, n]; b2: [n] or None; weights as in `switchback`.
      recipe, prologue, precision, residual, implementation: see `switchback`; they apply to both layers.
      approximate: whether to use the tanh form of the GELU.
      add_input: whether to add x to y. The kernel of the second product adds it; the prologue's backward
        pass adds its gradient. Each saves a pass over memory.
      layouts: the layout of x and w1, and the layout of w2; see `swjax.Layout`.

    Returns:
      y: [..., n] in the dtype of x. With `residual`: (y, x).

    Raises:
      ValueError: an argument is not an array, shapes or dtypes do not fit, or the recipe or the
        implementation does not exist.

    >>> x, w1, w2 = jnp.ones((2, 3)), jnp.ones((3, 8)), jnp.ones((8, 3))
    >>> mlp(x, w1, None, w2, None).shape
    (2, 3)
    """
    check_shapes(x, w1, b1, recipe)
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], weight_array(w1).shape[1]), x.dtype)
    check_shapes(hidden, w2, b2, recipe)
    check_addend(hidden, (w2,), x if add_input else None, "x (add_input=True)")
    check_prologue(x, prologue)
    check_dtypes(x, w1, b1)
    check_dtypes(hidden, w2, b2)
    plan = plan_layer(x, weight_array(w1), layouts[0])
    plan2 = plan_next(plan, weight_array(w2), layouts[1])
    first, second = (
        _settings(x, recipe, None, precision, implementation, each) for each in (plan, plan2)
    )
    if _has_no_tokens(x, plan):
        y = _no_outputs(x, w2, second)
        return (y, x) if residual else y
    x = first.sharded.place_input(x, prologue)
    (w1, b1), (w2, b2) = _place(w1, b1, plan), _place(w2, b2, plan2)
    args = vary_alike(x, w1, b1, w2, b2, prologue)
    y, kept = fused_mlp(*args, Gelu(approximate), first, second, residual, add_input)
    return y if kept is None else (y, kept)


def _settings(x, recipe, out_dtype, precision, implementation, plan) -> Settings:
    dispatch.check(implementation)
    kind = jnp.inexact if jnp.iscomplexobj(x) else jnp.floating
    if out_dtype is not None and not jnp.issubdtype(out_dtype, kind):
        raise ValueError(
            f"out_dtype must be a floating dtype, got {jnp.dtype(out_dtype)}: cast y instead"
        )
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype).name
    sharded = Sharded(plan, Arithmetic(implementation, precision))
    return Settings(recipes.get(recipe), x.dtype.name, out_dtype, sharded)


# XLA cannot compile a `jax.shard_map` whose results are constants, such as sums over zero tokens.


def _has_no_tokens(x, plan) -> bool:
    return plan.mesh is not None and 0 in x.shape[:-1]


def _no_outputs(x, w, settings) -> jax.Array:
    shape = (*x.shape[:-1], weight_array(w).shape[1])
    return settings.plan.place(jnp.zeros(shape, settings.out_dtype), settings.plan.y)


# Arguments are resharded to the plan outside of the `custom_vjp`, so that JAX reshards the gradients back.


def _place(w, bias, plan):
    bias = plan.place(bias, Spec((plan.n,)))
    if not isinstance(w, QTensor):
        return plan.place(w, plan.w), bias
    specs = specs_of(w, as_matrix(plan.w, True))
    return QTensor(*map(plan.place, w, specs)), bias


def quantize_weight(
    w: jax.Array, recipe: str | Recipe = "switchback", *, implementation: str | None = None
) -> QTensor:
    """Quantizes `w` for the forward product of a recipe, for inference: a quarter of the bytes of fp32.

    `switchback` and `mlp` accept the result instead of w, with the same recipe, and return the same values.
    Without it they quantize w at every call.

    Args:
      w: [k, n] float16, bfloat16 or float32.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.

    Returns:
      A QTensor with values [n, k], the transpose, which tensor cores read, and scale [1, 1], or [n, 1] if the
      recipe has one scale per output channel.

    Raises:
      ValueError: w is not an array [k, n], or the recipe's forward product is not quantized, or keeps
        outliers in 16 bits.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> q = quantize_weight(w)
    >>> q.values.shape, bool(jnp.all(switchback(x, q) == switchback(x, w)))
    ((4, 3), True)
    """
    if not hasattr(w, "dtype"):
        remedy = "it is quantized already" if isinstance(w, QTensor) else "pass jnp.asarray(w)"
        raise ValueError(f"w must be an array, got a {type(w).__name__}: {remedy}")
    if w.ndim != 2:
        raise ValueError(
            f"quantize_weight needs w [k, n], got {w.shape}: use jax.vmap for a stack of weights"
        )
    quantizer = weight_quantizer(recipe)
    axes = (0, 1) if quantizer.scope == "tensor" else (0,)
    return dispatch.run(
        "quantize",
        w,
        axes=axes,
        dtype=quantizer.dtype,
        transpose=True,
        implementation=implementation,
    )
