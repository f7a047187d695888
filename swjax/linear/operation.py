"""SwitchBack: a linear layer whose three matrix products are computed as a recipe says.

The paper once. `swjax.recipes` says what each product is computed in, `swjax.kernels` computes it, and the
`custom_vjp`s below are the layers between them: `switchback`, one linear layer or several of one input, and
`mlp`, two with a GELU.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swjax import recipes
from swjax.kernels import dispatch, reference
from swjax.kernels.reference import QTensor
from swjax.linear import plans
from swjax.linear.plans import Layout, Plan, Spec
from swjax.linear.prologues import Gelu, Gradient, Prologue, add
from swjax.recipes import Product, Quantizer, Recipe


def switchback(
    x: jax.Array,
    w: jax.Array | QTensor | tuple[jax.Array | QTensor, ...],
    bias: jax.Array | tuple[jax.Array | None, ...] | None = None,
    *,
    recipe: str | Recipe = "switchback",
    prologue: Prologue | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    residual: bool = False,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array | tuple:
    """Linear layer ``y = x w + bias`` with quantized products, forward and backward.

    With the default recipe, SwitchBack (Alg. 1 of the paper), one scale a token for x and g, one scale
    for w::

        y  = int8(x) int8(w)  * scale_x scale_w + bias
        dx = int8(g) int8(wT) * scale_g scale_w
        dw = xT g                                     in the dtype of x

    int8 operands are multiplied as int8 and summed in int32. The weight is quantized from `w` as given:
    pass the fp32 parameter, not a 16-bit copy.

    Args:
      x: [..., k] float16, bfloat16 or float32; any leading dimensions, empty ones included. Its dtype is
        that of the products that are not quantized.
      w: [k, n] in any of these dtypes; its gradient has the same. A tuple stands for several layers of the
        same x, such as queries, keys and values, for which x is quantized once. What `quantize_weight`
        made of w has no gradient: y is the same, and so is dx with one scale a tensor.
      bias: [n] or None; a tuple of these if w is one.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      prologue: a `swjax.LayerNorm` or `swjax.Gelu` that x goes through first, fused with the quantizer.
      out_dtype: dtype of y; None is that of x.
      precision: of the products that are not quantized, as for `jax.lax.dot_general`.
      residual: return x as well, for a residual connection to add: the gradient that comes that way is added
        in the backward pass of the prologue, not in a pass of its own.
      implementation: of the quantized ones, see `swjax.kernels.dispatch`; None chooses.
      layout: where x and w lie, see `swjax.Layout`; not needed on one device and on explicit meshes.

    Returns:
      y: [..., n] in `out_dtype`; a tuple of these if w is one. With `residual`: (y, x).

    Raises:
      ValueError: shapes, dtypes, recipe or implementation do not fit.

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
    ws, biases = (w, bias or (None,) * len(w)) if several else ((w,), (bias,))
    for each in zip(ws, biases, strict=True):
        _check(x, *each, recipe)
    each = [plans.plan(x, _matrix(w), layout) for w in ws]
    settings = tuple(
        _settings(x, recipe, out_dtype, precision, implementation, plan) for plan in each
    )
    x = _place_input(x, prologue, each[0])
    ws, biases = zip(*map(_place, ws, biases, each))
    args = plans.vary_alike(x, ws, biases, prologue)
    ys, x = _linears(*args, settings, residual)
    y = ys if several else ys[0]
    return (y, x) if residual else y


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
    implementation: str | None = None,
    layouts: tuple[Layout | None, Layout | None] = (None, None),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``gelu(x w1 + b1) w2 + b2``: two `switchback` layers that quantize where the GELU already passes.

    The same result as the two layers; in the backward pass the GELU's gradient is written once in 16 bits,
    once quantized, and summed for b1, in one pass.

    Args:
      x: [..., k] float16, bfloat16 or float32.
      w1: [k, h]; b1: [h] or None; w2: [h, n]; b2: [n] or None; weights as for `switchback`.
      recipe, prologue, precision, residual, implementation: as for `switchback`, for both layers.
      approximate: the tanh form of the GELU.
      layouts: of x and w1, and of w2; see `swjax.Layout`.

    Returns:
      [..., n] in the dtype of x; with `residual`, that and x.

    Raises:
      ValueError: shapes, dtypes, recipe or implementation do not fit.

    >>> x, w1, w2 = jnp.ones((2, 3)), jnp.ones((3, 8)), jnp.ones((8, 3))
    >>> mlp(x, w1, None, w2, None).shape
    (2, 3)
    """
    _check(x, w1, b1, recipe)
    _check(jax.ShapeDtypeStruct((*x.shape[:-1], _matrix(w1).shape[1]), x.dtype), w2, b2, recipe)
    plan = plans.plan(x, _matrix(w1), layouts[0])
    plan2 = plans.next_plan(plan, _matrix(w2), layouts[1])
    first, second = (
        _settings(x, recipe, None, precision, implementation, p) for p in (plan, plan2)
    )
    x, (w1, b1), (w2, b2) = (
        _place_input(x, prologue, plan),
        _place(w1, b1, plan),
        _place(w2, b2, plan2),
    )
    args = plans.vary_alike(x, w1, b1, w2, b2, prologue)
    y, x = _mlp(*args, Gelu(approximate), first, second, residual)
    return (y, x) if residual else y


class _Settings(NamedTuple):
    """What the products of a layer share; all of it static."""

    recipe: Recipe
    dtype: str  # of the products that are not quantized
    out_dtype: str
    precision: jax.lax.PrecisionLike
    implementation: str | None
    plan: Plan


def _settings(x, recipe, out_dtype, precision, implementation, plan) -> _Settings:
    dispatch.check(implementation)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype).name
    recipe = recipes.get(recipe)
    return _Settings(recipe, x.dtype.name, out_dtype, precision, implementation, plan)


# The arguments where the plan wants them: outside of the `custom_vjp`, whose gradients lie alike.


def _place_input(x, prologue, plan):
    return plan.place(x, plan.x if prologue is None else _prologue_spec(prologue, plan))


def _place(w, bias, plan):
    bias = plan.place(bias, Spec((plan.n,)))
    if not isinstance(w, QTensor):
        return plan.place(w, plan.w), bias
    specs = plans.specs_of(w, plans.as_matrix(plan.w, True))
    return QTensor(*map(plan.place, w, specs)), bias


def _matrix(w: jax.Array | QTensor) -> jax.Array:
    """[k, n], of the shape and the sharding of a weight."""
    return w.values.T if isinstance(w, QTensor) else w


def _check(x, w, bias, recipe):
    arrays = {"x": x, "w": w, "bias": bias}
    if isinstance(w, QTensor):
        _check_quantized(w, recipe)
        del arrays["w"]
    w = _matrix(w)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"switchback needs x [..., k] and w [k, n], got x {x.shape} and w {w.shape}: "
            "for other contractions use swjax.dot_general"
        )
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"bias must have the shape {w.shape[1:]} of w's columns, got {bias.shape}")
    for name, array in arrays.items():
        if array is not None and array.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"{name} must be float16, bfloat16 or float32, got {array.dtype}: cast it first"
            )


def _check_quantized(w: QTensor, recipe):
    quantizer = _weight_quantizer(recipe)
    columns = 1 if quantizer.scope == "tensor" else w.values.shape[0]
    if w.values.dtype != quantizer.dtype or w.scale.shape != (columns, 1):
        raise ValueError(
            f"a quantized w must be {quantizer.dtype} [n, k] with a scale {(columns, 1)} for this recipe, "
            f"got {w.values.dtype} {w.values.shape} and {w.scale.shape}: "
            f"make it by swjax.quantize_weight(w, recipe)"
        )


def _weight_quantizer(recipe: str | Recipe) -> Quantizer:
    """How the forward product quantizes w, where nothing else is needed of w."""
    fwd = recipes.get(recipe).fwd
    if fwd is None or fwd.outlier_threshold:
        needs = "multiplies w as it is" if fwd is None else "multiplies outliers with w as it is"
        raise ValueError(f"this recipe {needs}, and has no quantized w: pass w itself")
    return fwd.rhs


def quantize_weight(
    w: jax.Array, recipe: str | Recipe = "switchback", *, implementation: str | None = None
) -> QTensor:
    """`w` as the forward product of that recipe multiplies it: a quarter of fp32's bytes, for inference.

    `switchback` and `mlp` take it in place of w, with the same recipe, and give the same values: it is what
    they make of w at every call.

    Args:
      w: [k, n] float16, bfloat16 or float32.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.

    Returns:
      values [n, k], the transpose, which is how tensor cores read 8-bit matrices; scale [1, 1], or [n, 1]
      if the recipe has one for each output channel.

    Raises:
      ValueError: the recipe's forward product is not quantized, or keeps outliers in 16 bits.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> q = quantize_weight(w)
    >>> q.values.shape, bool(jnp.all(switchback(x, q) == switchback(x, w)))
    ((4, 3), True)
    """
    quantizer = _weight_quantizer(recipe)
    axes = (0, 1) if quantizer.scope == "tensor" else (0,)
    return dispatch.run(
        "quantize",
        w,
        axes=axes,
        dtype=quantizer.dtype,
        transpose=True,
        implementation=implementation,
    )


# --- forward and backward -----------------------------------------------------------------------------


class _Operand(NamedTuple):
    """A matrix, perhaps with leading axes, in the forms that exist of it."""

    wide: jax.Array | None = None
    quantized: QTensor | None = None
    transposed: QTensor | None = None  # of a matrix: what `quantize_weight` gives


class _Weight(NamedTuple):
    """What the backward pass needs of a layer."""

    w: _Operand
    w_like: jax.Array | None  # empty, of the dtype of w's gradient; None: w has none
    bias_like: jax.Array | None


class _Residuals(NamedTuple):
    inputs: jax.Array | None  # of the prologue
    x: _Operand  # empty: the prologue's backward pass computes it again
    weights: tuple[_Weight, ...]
    prologue: Prologue | None


Layers = tuple[_Settings, ...]  # of the layers that share an input, which the first speaks for


def _forward(x, ws, biases, prologue, layers: Layers) -> tuple[tuple[jax.Array, ...], _Residuals]:
    inputs = None if prologue is None else x
    x = _read(x, prologue, layers[0])
    ys, weights = zip(*(_apply_weight(x, *each) for each in zip(ws, biases, layers)))
    # What a prologue's backward pass writes again is not kept in any form.
    narrow = layers[0].recipe.save_quantized and x.wide is not None
    kept = _Operand(quantized=x.quantized) if narrow else _Operand(x.wide)
    return ys, _Residuals(inputs, kept, weights, prologue)


def _read(x, prologue, settings) -> _Operand:
    """The layers' input, through the prologue, in the forms that the products need."""
    fwd, save_quantized = settings.recipe.fwd, settings.recipe.save_quantized
    x_q = None
    if prologue is not None:
        fused = _rowwise(fwd) and (prologue.whole_rows or not settings.plan.splits(settings.plan.k))
        x, x_q = _apply(
            prologue,
            x,
            quantize_to=fwd.lhs.dtype if fused else None,
            wide=not fused,
            settings=settings,
        )
    if x_q is None and (_rowwise(fwd) or save_quantized):
        x_q = _quantize(fwd.lhs, x, settings.plan.x, -1, settings)
    return _Operand(x, _named(x_q, "swjax_x") if save_quantized else x_q)


def _apply_weight(x: _Operand, w, bias, settings) -> tuple[jax.Array, _Weight]:
    if isinstance(w, QTensor):
        w_like, w = None, _Operand(transposed=w)
    else:
        w_like, w = jnp.empty(0, w.dtype), _read_weight(w, settings)
    y = _multiply("fwd", x, w, bias, out_dtype=settings.out_dtype, settings=settings)
    if w.quantized is not None:  # what the input's gradient reads
        w = w._replace(transposed=None)
    bias_like = None if bias is None else jnp.empty(0, bias.dtype)
    return checkpoint_name(y, "swjax_y"), _Weight(w, w_like, bias_like)


def _read_weight(w: jax.Array, settings) -> _Operand:
    """w in the forms that the forward product and the input's gradient need: quantized once for both, where
    both quantize it alike."""
    fwd, dgrad, plan = settings.recipe.fwd, settings.recipe.dgrad, settings.plan
    alike = fwd is not None and dgrad is not None and fwd.rhs == dgrad.rhs
    alike = alike and fwd.rhs.scope == "tensor"
    if alike and _kernels_run(settings):
        forms = _quantize_both(w, fwd.rhs.dtype, settings)
    elif alike or settings.recipe.save_quantized:
        forms = (_quantize(fwd.rhs, w, plan.w, 0, settings),)
    else:
        return _Operand(w)
    outliers = fwd.outlier_threshold or dgrad.outlier_threshold  # are multiplied with w as it is
    return _Operand(w if outliers else None, *(_named(q, "swjax_w") for q in forms))


def _kernels_run(settings) -> bool:
    """Kernels sum over the last axis; XLA for CPUs takes either, and is slow with what was transposed."""
    return jax.default_backend() == "gpu" and settings.implementation != "xla"


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
        dxs = (_sum_of(dxs, layers[0].plan),)
    if prologue is None:
        input_gradient, dprologue = (add(*dxs, residual), None, None), None
    else:
        kept = x.wide is not None or x.quantized is not None
        again = not kept and any(weight.w_like is not None for weight in weights)
        input_gradient, dprologue, y = _apply_backward(
            prologue, inputs, dxs, residual, quantize_to, again, layers[0]
        )
        x = _Operand(y) if again else x
    dws = tuple(_backward_weight(x, *one) for one in zip(gradients, weights, layers))
    return input_gradient, dws, dbiases, dprologue


def _backward_input(gradient: Gradient, weight: _Weight, settings, *, summed: bool):
    """The gradients of one layer's input (see `_in_shards`) and bias."""
    dgrad, (w, _, bias_like), (g, g_q, g_sum) = settings.recipe.dgrad, weight, gradient
    if bias_like is not None and g_sum is None:
        if g_q is None and _rowwise(dgrad) and not settings.plan.splits(settings.plan.n):
            g_q, g_sum = _quantize_and_sum(g, dgrad.lhs.dtype, settings)
        else:
            g_sum = jnp.sum(g, axis=tuple(range(g.ndim - 1)), dtype=jnp.float32)
    dx = _multiply(
        "dgrad", _Operand(g, g_q), w, out_dtype=settings.dtype, settings=settings, summed=summed
    )
    return dx, None if bias_like is None else g_sum.astype(bias_like.dtype)


def _backward_weight(x: _Operand, gradient: Gradient, weight: _Weight, settings):
    """The gradient of one layer's weight."""
    if weight.w_like is None:
        return None
    out_dtype = weight.w_like.dtype.name
    return _multiply("wgrad", x, _Operand(gradient[0]), out_dtype=out_dtype, settings=settings)


def _named(q: QTensor, name: str) -> QTensor:
    """For `swjax.checkpoint_policies`. fp8 is kept as bytes: `jax.checkpoint` rounds floats that it keeps to
    what IEEE makes of their bits, whose e4m3 ends at 240, not at 448."""
    values, dtype = q.values, q.values.dtype
    if dtype != jnp.int8:
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    values = checkpoint_name(values, f"{name}_q")
    if dtype != jnp.int8:
        values = jax.lax.bitcast_convert_type(values, dtype)
    return QTensor(values, checkpoint_name(q.scale, f"{name}_scale"))


def _rowwise(product: Product | None) -> bool:
    """Is its left operand quantized by rows, as the fused quantizers do?"""
    return product is not None and product.lhs.scope == "row" and not product.outlier_threshold


def _runner(settings) -> Callable:
    return partial(dispatch.run, implementation=settings.implementation)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _linears(x, ws, biases, prologue, layers, residual):
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


_linears.defvjp(_linears_forward, _linears_backward)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _mlp(x, w1, b1, w2, b2, prologue, gelu, first, second, residual):
    return _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, first, second, residual)[0]


def _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, first, second, residual):
    (hidden,), kept = _forward(x, (w1,), (b1,), prologue, (first,))
    (y,), kept_too = _forward(hidden, (w2,), (b2,), gelu, (second,))
    return (y, x if residual else None), (kept, kept_too)


def _mlp_backward(first, second, _, residuals, gradients):
    (kept, kept_too), (g, residual) = residuals, gradients
    dgrad, plan = first.recipe.dgrad, second.plan
    fused = _rowwise(dgrad) and not plan.splits(plan.k)
    dhidden, (dw2,), (db2,), dgelu = _backward(
        (second,), kept_too, ((g, None, None),), None, dgrad.lhs.dtype if fused else None
    )
    (dx, _, _), (dw1,), (db1,), dprologue = _backward((first,), kept, (dhidden,), residual)
    return dx, dw1, db1, dw2, db2, dprologue, dgelu


_mlp.defvjp(_mlp_forward, _mlp_backward)


# --- one product --------------------------------------------------------------------------------------


def _multiply(
    name: str,
    a: _Operand,
    b: _Operand,
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    settings: _Settings,
    summed: bool = True,
) -> jax.Array:
    """The product of that name: "fwd" of x and w, "dgrad" of g and w, or "wgrad" of x and g."""
    product, multiply = getattr(settings.recipe, name), partial(_in_shards, name, settings, summed)
    if product is None or product.outlier_threshold:
        wide_a, wide_b = _widen(a, settings.dtype), _widen(b, settings.dtype)
    if product is None:
        return multiply(wide_a, wide_b, bias, out_dtype)

    (a_spec, a_axis), (b_spec, b_axis) = _geometry(name, settings.plan)
    if product.outlier_threshold:
        inliers, outliers = _split_outliers(
            wide_a, product.outlier_threshold, a_spec, settings.plan
        )
        a = _Operand(inliers)
    narrow_a = _narrow(product.lhs, a, a_spec, a_axis, settings)
    narrow_b = _narrow(product.rhs, b, b_spec, b_axis, settings)
    if name == "fwd" and b.quantized is None:
        narrow_b = narrow_b._replace(q=_named(narrow_b.q, "swjax_w"))
    if not product.outlier_threshold:
        return multiply(narrow_a, narrow_b, bias, out_dtype)
    narrow = multiply(narrow_a, narrow_b, bias, "float32")
    return (narrow + multiply(outliers, wide_b, None, "float32")).astype(out_dtype)


def _geometry(name: str, plan: Plan) -> tuple[tuple[Spec, int], tuple[Spec, int]]:
    """Where a product's operands lie, and the axis it sums over in each; 0 of x and g: all their tokens."""
    return {
        "fwd": ((plan.x, -1), (plan.w, 0)),
        "dgrad": ((plan.y, -1), (plan.w, -1)),
        "wgrad": ((plan.x, 0), (plan.y, 0)),
    }[name]


class _Narrow(NamedTuple):
    """A quantized operand of a product."""

    q: QTensor
    specs: QTensor
    axis: int  # that is summed over


def _in_shards(name, settings, summed, a, b, bias, out_dtype) -> jax.Array:
    """The product of two operands, both narrow or both wide.

    Not summed it has a leading axis, along which lie what devices have of each sum."""
    plan, contract = settings.plan, None
    (a_spec, _), (b_spec, _) = _geometry(name, plan)
    if isinstance(a, _Narrow):
        (a, a_spec, a_axis), (b, b_spec, b_axis) = a, b
        contract = a_axis, b_axis
    if name == "wgrad":
        rounded = plan.reduce_dtype if plan.splits(plan.token_axes) else None
        multiply = partial(_local_product, name, settings, rounded or out_dtype, contract)

        def step(x, g):
            return plan.scatter_sum(multiply(x, g, None)).astype(out_dtype)

        return plan.run(step, (a, b), (a_spec, b_spec), plan.w)
    multiply = partial(_local_product, name, settings, out_dtype, contract)
    reduced, out_spec = (plan.k, plan.y) if name == "fwd" else (plan.n, plan.x)

    def step(a, w, bias):
        bias = None if bias is None else plan.once(bias, reduced)
        y = multiply(a, plan.gather(w, b_spec), bias)
        return plan.sum(y, reduced) if summed else y[None]

    out_spec = out_spec if summed else Spec((reduced, *out_spec))
    return plan.run(step, (a, b, bias), (a_spec, b_spec, Spec((plan.n,))), out_spec)


def _sum_of(dxs: tuple[jax.Array, ...], plan: Plan) -> jax.Array:
    """The input's gradient from what `_in_shards` has not summed."""

    def step(*dxs):
        return plan.sum(add(*(dx[0] for dx in dxs)), plan.n)

    return plan.run(step, dxs, (Spec((plan.n, *plan.x)),) * len(dxs), plan.x)


def _local_product(name, settings, out_dtype, contract, a, b, bias):
    run = _runner(settings)
    if isinstance(a, QTensor):
        return run("matmul", a, b, bias, out_dtype=out_dtype, contract=contract)
    precision = settings.precision
    if name == "wgrad":
        return run("weight_gradient", _flat(a), _flat(b), out_dtype=out_dtype, precision=precision)
    axes = ((a.ndim - 1,), (0 if name == "fwd" else 1,))
    return reference.dot(a, b, axes, bias, out_dtype=out_dtype, precision=precision)


def _narrow(quantizer: Quantizer, t: _Operand, spec: Spec, axis: int, settings) -> _Narrow:
    """`t` quantized, for a product that sums over `axis`."""
    forms = (t.quantized, False), (t.transposed, True)
    for q, transposed in forms[::-1] if axis == 0 else forms:  # first what sums over its last axis
        along = -1 - axis if transposed else axis
        if q is None or q.values.dtype != quantizer.dtype or q.scale.shape[along] != 1:
            continue
        if axis == -1 or q.values.ndim == 2:
            specs = plans.specs_of(q, plans.as_matrix(spec, True) if transposed else spec)
            return _Narrow(q, specs, along)
    wide = _widen(t, "float32") if t.wide is None else t.wide
    transpose = axis == 0 and _kernels_run(settings)
    q = _quantize(quantizer, wide, spec, axis, settings, transpose)
    spec = plans.as_matrix(spec, transpose) if axis == 0 else spec
    return _Narrow(q, plans.specs_of(q, spec), -1 if transpose else axis)


def _quantize(
    quantizer: Quantizer, x: jax.Array, spec: Spec, axis: int, settings, transpose: bool = False
) -> QTensor:
    """`x` for a product that sums over `axis`; for axis 0 as a matrix [all but the last axis, the last]."""
    plan, run, per_tensor = settings.plan, _runner(settings), quantizer.scope == "tensor"
    spec_out = plans.as_matrix(spec, False) if axis == 0 else spec
    spanned = spec_out if per_tensor else (spec_out[axis],)
    options = {"dtype": quantizer.dtype, "transpose": transpose}

    def step(x):
        x = _flat(x) if axis == 0 else x
        axes = tuple(range(x.ndim)) if per_tensor else (axis % x.ndim,)
        if not plan.splits(*spanned):
            return run("quantize", x, axes=axes, **options)
        absmax = plan.maximum(reference.absolute_maximum(x, axes), *spanned)
        return run("quantize_by", x, absmax, **options)

    whole = range(len(spec_out)) if per_tensor else (axis % len(spec_out),)
    scale = Spec(() if i in whole else axes for i, axes in enumerate(spec_out))
    specs = QTensor(spec_out, scale)
    if transpose:
        specs = QTensor(*(Spec(reversed(spec)) for spec in specs))
    q = plan.run(step, (x,), (spec,), specs)
    return _fixed_scale(q) if per_tensor else q


def _quantize_both(w: jax.Array, dtype: str, settings) -> tuple[QTensor, QTensor]:
    """w by one scale, as it lies and transposed."""
    plan, run, one = settings.plan, _runner(settings), Spec(((), ()))

    def step(w):
        # Of parts: one pass for XLA, which takes two for one maximum of all.
        parts = math.gcd(w.size, 256)
        absmax = reference.absolute_maximum(w.reshape(parts, -1), (1,)).reshape(parts)
        if plan.splits(*plan.w):
            absmax = plan.maximum(reference.absolute_maximum(absmax, (0,)), *plan.w)
        return run("quantize_both", w, absmax, dtype=dtype)

    specs = QTensor(plan.w, one), QTensor(plans.as_matrix(plan.w, True), one)
    return tuple(map(_fixed_scale, plan.run(step, (w,), (plan.w,), specs)))


def _fixed_scale(q: QTensor) -> QTensor:
    """Before jax 0.12 XLA moves constants from one factor of a product of scales to the other: then the last
    bit of y would depend on whether the scale of w is computed here or is an argument."""
    return q._replace(scale=jax.lax.optimization_barrier(q.scale))


def _quantize_and_sum(g: jax.Array, dtype: str, settings):
    plan, run = settings.plan, _runner(settings)

    def step(g):
        q, total = run("quantize_and_sum", g, dtype=dtype)
        return q, plan.sum(total, *plan.tokens)

    return plan.run(
        step, (g,), (plan.y,), (QTensor(plan.y, Spec((*plan.tokens, ()))), Spec((plan.n,)))
    )


def _apply(prologue: Prologue, x, *, quantize_to, wide, settings):
    options = {
        "quantize_to": quantize_to,
        "wide": wide,
        "implementation": settings.implementation,
    }
    spec = _prologue_spec(prologue, settings.plan)
    q_spec = QTensor(spec, Spec((*spec[:-1], ())))
    return settings.plan.run(
        lambda prologue, x: prologue.forward(x, **options),
        (prologue, x),
        (Spec(), spec),
        (spec if wide else None, q_spec if quantize_to else None),
    )


def _apply_backward(prologue: Prologue, x, gradients, residual, quantize_to, again, settings):
    plan, options = settings.plan, {"quantize_to": quantize_to, "again": again}

    def step(prologue, x, gradients, residual):
        (dx, dx_q, total), dprologue, y = prologue.backward(
            x, gradients, residual, implementation=settings.implementation, **options
        )
        total, dprologue = plan.sum((total, dprologue), *plan.tokens)
        return (dx, dx_q, total), dprologue, y

    spec = _prologue_spec(prologue, plan)
    q_spec = QTensor(spec, Spec((*spec[:-1], ()))) if quantize_to else None
    sum_spec = None if prologue.whole_rows else Spec(spec[-1:])
    out_specs = ((spec, q_spec, sum_spec), Spec(), spec if again else None)
    arrays = (prologue, x, gradients, residual)
    return plan.run(step, arrays, (Spec(), spec, (spec,) * len(gradients), spec), out_specs)


def _prologue_spec(prologue: Prologue, plan: Plan) -> Spec:
    return Spec((*plan.tokens, ())) if prologue.whole_rows else plan.x


def _flat(x: jax.Array) -> jax.Array:
    """Leading dimensions as one. XLA for GPUs fails to compile some int8 sums over several."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _widen(t: _Operand, dtype: str) -> jax.Array:
    if t.wide is not None:
        return t.wide.astype(dtype)
    return reference.dequantize(t.transposed.T if t.quantized is None else t.quantized, dtype)


def _split_outliers(x, threshold: float, spec: Spec, plan: Plan):
    """x as a sum of two: the features below `threshold` for every token, and the others."""

    def step(x):
        features = reference.absolute_maximum(x, tuple(range(x.ndim - 1)))
        outlier = ~(
            plan.maximum(features, *plan.tokens) < threshold
        )  # NaN is one, on every platform
        zero = jnp.zeros((), x.dtype)
        return jnp.where(outlier, zero, x), jnp.where(outlier, x, zero)

    return plan.run(step, (x,), (spec,), (spec, spec))


@cache
def dot_general(
    recipe: str | Recipe = "switchback",
    *,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> Callable[..., jax.Array]:
    """A `jax.lax.dot_general` that computes as `recipe` says, for modules that take one.

    For `dot_general=` of `flax.nnx.Linear`, `LinearGeneral`, `MultiHeadAttention` (`qkv_dot_general=`,
    `out_dot_general=`) and of their linen counterparts. The left operand is the activation, the right one
    the weight. Flax casts the weight to the compute dtype first: `swjax.nnx.Linear` and `swjax.linen.Dense`
    quantize the fp32 parameter itself.

    Args:
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      layout: where the operands lie, both as matrices; see `swjax.Layout`.

    Returns:
      A function with the signature of `jax.lax.dot_general`; equal arguments give the same function.

    Raises:
      ValueError: there is no such recipe or implementation.

    >>> from flax import nnx
    >>> layer = nnx.Linear(3, 4, dot_general=dot_general("switchback"), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """
    recipe = recipes.get(recipe)
    dispatch.check(implementation)

    def quantized_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
    ):
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        lhs_free = _remaining(lhs, lhs_contract, lhs_batch)
        batch, rows = _shape(lhs, lhs_batch), _shape(lhs, lhs_free)
        k = math.prod(_shape(lhs, lhs_contract))
        x = lhs.transpose(*lhs_batch, *lhs_free, *lhs_contract).reshape(*batch, *rows, k)
        if isinstance(rhs, QTensor):  # [n, k] as [*columns, *contracted]
            columns = rhs.values.shape[: -len(rhs_contract)]
            w = QTensor(rhs.values.reshape(-1, k), rhs.scale.reshape(-1, 1))
        else:
            rhs_free = _remaining(rhs, rhs_contract, rhs_batch)
            columns = _shape(rhs, rhs_free)
            w = rhs.transpose(*rhs_batch, *rhs_contract, *rhs_free)
            w = w.reshape(*batch, k, math.prod(columns))
        linear = partial(
            switchback,
            recipe=recipe,
            out_dtype=preferred_element_type,
            precision=precision,
            implementation=implementation,
            layout=layout,
        )
        for _ in batch:
            linear = jax.vmap(linear)
        y = linear(x, w).reshape(*batch, *rows, *columns)
        return y if out_sharding is None else jax.reshard(y, out_sharding)

    return quantized_dot_general


def _remaining(array, *used) -> tuple[int, ...]:
    return tuple(axis for axis in range(array.ndim) if not any(axis in axes for axes in used))


def _shape(array, axes) -> tuple[int, ...]:
    return tuple(array.shape[axis] for axis in axes)
