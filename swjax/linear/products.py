"""One matrix product as a recipe says: quantized, sharded, computed."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels import dispatch, reference
from swjax.kernels.reference import QTensor
from swjax.linear.layouts import Spec, as_matrix, specs_of
from swjax.linear.plans import Plan
from swjax.linear.prologues import Prologue, add
from swjax.recipes import Product, Quantizer, Recipe


class Settings(NamedTuple):
    """What the products of a layer share; all of it static."""

    recipe: Recipe
    dtype: str  # of the products that are not quantized
    out_dtype: str
    precision: jax.lax.PrecisionLike
    implementation: str | None
    plan: Plan


class Operand(NamedTuple):
    """A matrix, perhaps with leading axes, in the forms that exist of it."""

    wide: jax.Array | None = None
    quantized: QTensor | None = None
    transposed: QTensor | None = None  # of a matrix: what `quantize_weight` gives


def kernels_run(settings) -> bool:
    """Kernels sum over the last axis; XLA for CPUs takes either, and is slow with what was transposed."""
    return jax.default_backend() == "gpu" and settings.implementation != "xla"


def named(q: QTensor, name: str) -> QTensor:
    """For `swjax.checkpoint_policies`. fp8 is kept as bytes: `jax.checkpoint` rounds floats that it keeps to
    what IEEE makes of their bits, whose e4m3 ends at 240, not at 448."""
    values, dtype = q.values, q.values.dtype
    if dtype != jnp.int8:
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    values = checkpoint_name(values, f"{name}_q")
    if dtype != jnp.int8:
        values = jax.lax.bitcast_convert_type(values, dtype)
    return QTensor(values, checkpoint_name(q.scale, f"{name}_scale"))


def quantizes_rows(product: Product | None) -> bool:
    """Is its left operand quantized by rows, as the fused quantizers do?"""
    return product is not None and product.lhs.scope == "row" and not product.outlier_threshold


def _runner(settings) -> Callable:
    return partial(dispatch.run, implementation=settings.implementation)


def multiply(
    name: str,
    a: Operand,
    b: Operand,
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    settings: Settings,
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
        a = Operand(inliers)
    narrow_a = _narrow(product.lhs, a, a_spec, a_axis, settings)
    narrow_b = _narrow(product.rhs, b, b_spec, b_axis, settings)
    if name == "fwd" and b.quantized is None:
        narrow_b = narrow_b._replace(q=named(narrow_b.q, "swjax_w"))
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


def sum_of(dxs: tuple[jax.Array, ...], plan: Plan) -> jax.Array:
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


def _narrow(quantizer: Quantizer, t: Operand, spec: Spec, axis: int, settings) -> _Narrow:
    """`t` quantized, for a product that sums over `axis`."""
    forms = (t.quantized, False), (t.transposed, True)
    for q, transposed in forms[::-1] if axis == 0 else forms:  # first what sums over its last axis
        along = -1 - axis if transposed else axis
        if q is None or q.values.dtype != quantizer.dtype or q.scale.shape[along] != 1:
            continue
        if axis == -1 or q.values.ndim == 2:
            specs = specs_of(q, as_matrix(spec, True) if transposed else spec)
            return _Narrow(q, specs, along)
    wide = _widen(t, "float32") if t.wide is None else t.wide
    transpose = axis == 0 and kernels_run(settings)
    q = quantize(quantizer, wide, spec, axis, settings, transpose)
    spec = as_matrix(spec, transpose) if axis == 0 else spec
    return _Narrow(q, specs_of(q, spec), -1 if transpose else axis)


def quantize(
    quantizer: Quantizer, x: jax.Array, spec: Spec, axis: int, settings, transpose: bool = False
) -> QTensor:
    """`x` for a product that sums over `axis`; for axis 0 as a matrix [all but the last axis, the last]."""
    plan, run, per_tensor = settings.plan, _runner(settings), quantizer.scope == "tensor"
    spec_out = as_matrix(spec, False) if axis == 0 else spec
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


def quantize_both(w: jax.Array, dtype: str, settings) -> tuple[QTensor, QTensor]:
    """w by one scale, as it lies and transposed."""
    plan, run, one = settings.plan, _runner(settings), Spec(((), ()))

    def step(w):
        # Of parts: one pass for XLA, which takes two for one maximum of all.
        parts = math.gcd(w.size, 256)
        absmax = reference.absolute_maximum(w.reshape(parts, -1), (1,)).reshape(parts)
        if plan.splits(*plan.w):
            absmax = plan.maximum(reference.absolute_maximum(absmax, (0,)), *plan.w)
        return run("quantize_both", w, absmax, dtype=dtype)

    specs = QTensor(plan.w, one), QTensor(as_matrix(plan.w, True), one)
    return tuple(map(_fixed_scale, plan.run(step, (w,), (plan.w,), specs)))


def _fixed_scale(q: QTensor) -> QTensor:
    """Before jax 0.12 XLA moves constants from one factor of a product of scales to the other: then the last
    bit of y would depend on whether the scale of w is computed here or is an argument."""
    return q._replace(scale=jax.lax.optimization_barrier(q.scale))


def quantize_and_sum(g: jax.Array, dtype: str, settings):
    plan, run = settings.plan, _runner(settings)

    def step(g):
        q, total = run("quantize_and_sum", g, dtype=dtype)
        return q, plan.sum(total, *plan.tokens)

    return plan.run(
        step, (g,), (plan.y,), (QTensor(plan.y, Spec((*plan.tokens, ()))), Spec((plan.n,)))
    )


def apply(prologue: Prologue, x, *, quantize_to, wide, settings):
    options = {
        "quantize_to": quantize_to,
        "wide": wide,
        "implementation": settings.implementation,
    }
    spec = prologue_spec(prologue, settings.plan)
    q_spec = QTensor(spec, Spec((*spec[:-1], ())))
    return settings.plan.run(
        lambda prologue, x: prologue.forward(x, **options),
        (prologue, x),
        (Spec(), spec),
        (spec if wide else None, q_spec if quantize_to else None),
    )


def apply_backward(prologue: Prologue, x, gradients, residual, quantize_to, again, settings):
    plan, options = settings.plan, {"quantize_to": quantize_to, "again": again}

    def step(prologue, x, gradients, residual):
        (dx, dx_q, total), dprologue, y = prologue.backward(
            x, gradients, residual, implementation=settings.implementation, **options
        )
        total, dprologue = plan.sum((total, dprologue), *plan.tokens)
        return (dx, dx_q, total), dprologue, y

    spec = prologue_spec(prologue, plan)
    q_spec = QTensor(spec, Spec((*spec[:-1], ()))) if quantize_to else None
    sum_spec = None if prologue.whole_rows else Spec(spec[-1:])
    out_specs = ((spec, q_spec, sum_spec), Spec(), spec if again else None)
    arrays = (prologue, x, gradients, residual)
    return plan.run(step, arrays, (Spec(), spec, (spec,) * len(gradients), spec), out_specs)


def prologue_spec(prologue: Prologue, plan: Plan) -> Spec:
    return Spec((*plan.tokens, ())) if prologue.whole_rows else plan.x


def _flat(x: jax.Array) -> jax.Array:
    """Leading dimensions as one. XLA for GPUs fails to compile some int8 sums over several."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _widen(t: Operand, dtype: str) -> jax.Array:
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
