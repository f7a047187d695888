"""The three products of a linear layer with a recipe: which operands are quantized, and how.

`swjax.linear.sharded` computes them on sharded arrays.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels import reference
from swjax.kernels.reference import QTensor
from swjax.linear.layouts import Spec, as_matrix
from swjax.linear.plans import Plan
from swjax.linear.sharded import Operand, Sharded, transposed_operand
from swjax.recipes import Product, Quantizer, Recipe


class Settings(NamedTuple):
    """The settings of a layer; static.

    Attributes:
      recipe: recipe of the products.
      dtype: dtype of the products without quantization.
      out_dtype: dtype of the layer's output.
      sharded: computes the products on sharded arrays.
    """

    recipe: Recipe
    dtype: str
    out_dtype: str
    sharded: Sharded

    @property
    def plan(self) -> Plan:
        return self.sharded.plan

    @property
    def quantizes_weight_once(self) -> bool:
        """Whether the forward product and the input gradient read the same quantized weight."""
        fwd, dgrad = self.recipe.fwd, self.recipe.dgrad
        if fwd is None or dgrad is None:
            return False
        return fwd.rhs == dgrad.rhs and fwd.rhs.scope == "tensor"


class Forms(NamedTuple):
    """The available forms of a matrix, which may have leading axes; the other forms are None.

    Attributes:
      high_precision: the matrix itself.
      quantized: the quantized matrix.
      transposed: the quantized transpose of a matrix without leading axes, as `quantize_weight` returns it.
    """

    high_precision: jax.Array | None = None
    quantized: QTensor | None = None
    transposed: QTensor | None = None


# --- the quantized forms ------------------------------------------------------------------------------


def quantizes_rows(product: Product | None) -> TypeGuard[Product]:
    """Whether the left operand is quantized row-wise, as in the fused quantizers."""
    return product is not None and product.lhs.scope == "row" and not product.outlier_threshold


def quantize_input(x: jax.Array, fwd: Product, settings: Settings) -> QTensor:
    """Quantizes x for the forward product."""
    return settings.sharded.quantize(fwd.lhs, x, settings.plan.x, -1)


def weight_forms(w: jax.Array, settings: Settings) -> Forms:
    """The forms of w that the forward product and the input gradient read."""
    fwd, dgrad, sharded = settings.recipe.fwd, settings.recipe.dgrad, settings.sharded
    once = settings.quantizes_weight_once
    if fwd is None or dgrad is None or not (once or settings.recipe.save_quantized):
        return Forms(w)
    forms: tuple[QTensor, ...]
    if once and sharded.arithmetic.reads_last_axis:
        forms = sharded.quantize_both(w, fwd.rhs.dtype)
    else:
        forms = (sharded.quantize(fwd.rhs, w, settings.plan.w, 0),)
    # Outliers are multiplied with w itself.
    keeps_w = fwd.outlier_threshold or dgrad.outlier_threshold
    return Forms(w if keeps_w else None, *(named(q, "swjax_w") for q in forms))


def named(q: QTensor, name: str) -> QTensor:
    """Names a quantized array for `swjax.checkpoint_policies`; fp8 values are saved as bytes."""
    values = checkpoint_name(to_bytes(q.values), f"{name}_q")
    return QTensor(from_bytes(values, q.values.dtype), checkpoint_name(q.scale, f"{name}_scale"))


def to_bytes(values: jax.Array) -> jax.Array:
    """Reinterprets fp8 values as uint8; returns other arrays unchanged.

    `jax.checkpoint` rounds the floats that it saves with `jax.lax.reduce_precision`, whose largest e4m3
    value is 240, not 448: larger values become NaN.
    """
    if values.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        return jax.lax.bitcast_convert_type(values, jnp.uint8)
    return values


def from_bytes(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The inverse of `to_bytes` for values of a dtype."""
    if values.dtype == jnp.uint8:
        return jax.lax.bitcast_convert_type(values, dtype)
    return values


# --- the products -------------------------------------------------------------------------------------


class Factor(NamedTuple):
    """A factor of a product.

    Attributes:
      forms: the available forms of the factor.
      spec: sharding of the factor.
      axis: the axis that the product sums over; for an array of tokens, 0 stands for all token axes.
    """

    forms: Forms
    spec: Spec
    axis: int


def output(
    x: Forms,
    w: Forms,
    bias: jax.Array | None,
    settings: Settings,
    addend: jax.Array | None = None,
) -> jax.Array:
    """y = x w + bias + addend, in `settings.out_dtype`."""
    plan, sharded = settings.plan, settings.sharded
    names_weight = w.quantized is None  # `weight_forms` has named the form that it quantized

    def compute(x, w, out_dtype, *, first=True):
        if isinstance(w.value, QTensor) and names_weight:
            w = w._replace(value=named(w.value, "swjax_w"))
        terms = (bias, addend) if first else (None, None)
        return sharded.output(x, w, *terms, out_dtype=out_dtype)

    factors = Factor(x, plan.x, -1), Factor(w, plan.w, 0)
    return _multiply(settings.recipe.fwd, *factors, compute, settings.out_dtype, settings)


def input_gradient(g: Forms, w: Forms, settings: Settings, *, summed: bool = True) -> jax.Array:
    """dx = g wT, in `settings.dtype`; see `Sharded.input_gradient` for `summed`."""
    plan, sharded = settings.plan, settings.sharded

    def compute(g, w, out_dtype, *, first=True):
        return sharded.input_gradient(g, w, out_dtype=out_dtype, summed=summed)

    factors = Factor(g, plan.y, -1), Factor(w, plan.w, -1)
    return _multiply(settings.recipe.dgrad, *factors, compute, settings.dtype, settings)


def input_gradients(
    gs: tuple[Forms, ...], ws: tuple[Forms, ...], layers: tuple[Settings, ...], *, summed: bool
) -> tuple[jax.Array, ...]:
    """Arrays whose sum is the gradient of the input that layers share, in their dtype.

    There is one array for each layer, or one array in all if a kernel adds the products.
    """
    first, product = layers[0], layers[0].recipe.dgrad
    alike = {(layer.recipe.dgrad, layer.dtype, layer.sharded) for layer in layers}
    if product is None or product.outlier_threshold or len(alike) > 1:
        return tuple(input_gradient(*each, summed=summed) for each in zip(gs, ws, layers))

    def operands(quantizer, forms, spec):
        return tuple(_quantized(quantizer, Factor(each, spec, -1), first) for each in forms)

    return first.sharded.input_gradients(
        operands(product.lhs, gs, first.plan.y),
        operands(product.rhs, ws, first.plan.w),
        out_dtype=first.dtype,
        summed=summed,
    )


def weight_gradient(x: Forms, g: Forms, settings: Settings, *, out_dtype: str) -> jax.Array:
    """dw = xT g, in `out_dtype`."""
    plan, sharded, product = settings.plan, settings.sharded, settings.recipe.wgrad

    def compute(x, g, out_dtype, *, first=True):
        return sharded.weight_gradient(x, g, out_dtype=out_dtype)

    factors = Factor(x, plan.x, 0), Factor(g, plan.y, 0)
    if product is not None and product.lhs.scope == "block":
        operands = (_high_precision(factor, settings) for factor in factors)
        return sharded.weight_gradient(*operands, out_dtype=out_dtype, blocks=product)
    return _multiply(product, *factors, compute, out_dtype, settings)


def weight_gradients(
    x: Forms, gs: tuple[Forms, ...], layers: tuple[Settings, ...], out_dtypes: tuple[str, ...]
) -> tuple[jax.Array, ...]:
    """dw = xT g of each layer, in its dtype of `out_dtypes`."""
    first, product = layers[0], layers[0].recipe.wgrad
    in_blocks = product is not None and product.lhs.scope == "block"
    alike = {(layer.recipe.wgrad, layer.dtype, layer.sharded) for layer in layers}
    quantized_here = product is not None and not in_blocks
    if quantized_here or len(alike) > 1 or len(set(out_dtypes)) > 1:
        return tuple(
            weight_gradient(x, g, layer, out_dtype=dtype)
            for g, layer, dtype in zip(gs, layers, out_dtypes)
        )
    operands = tuple(_high_precision(Factor(g, first.plan.y, 0), first) for g in gs)
    x_operand = _high_precision(Factor(x, first.plan.x, 0), first)
    (dtype,) = set(out_dtypes)
    return first.sharded.weight_gradients(x_operand, operands, out_dtype=dtype, blocks=product)


def _multiply(
    product: Product | None,
    a: Factor,
    b: Factor,
    compute: Callable[..., jax.Array],
    out_dtype: str,
    settings: Settings,
) -> jax.Array:
    """Calls `compute(a, b, out_dtype)` with the operands that `product` reads.

    With outliers, the result is the sum of two products: a quantized product without the outliers, and a
    high-precision product of the outliers (`first=False`).
    """
    if product is None:
        return compute(_high_precision(a, settings), _high_precision(b, settings), out_dtype)
    b_quantized = _quantized(product.rhs, b, settings)
    if not product.outlier_threshold:
        return compute(_quantized(product.lhs, a, settings), b_quantized, out_dtype)
    whole = as_array(a.forms, settings.dtype)
    rest, outliers = settings.sharded.split_outliers(whole, product.outlier_threshold, a.spec)
    a_quantized = _quantized(product.lhs, a._replace(forms=Forms(rest)), settings)
    y = compute(a_quantized, b_quantized, "float32")
    exact = Operand(outliers, a.spec, a.axis), _high_precision(b, settings)
    return (y + compute(*exact, "float32", first=False)).astype(out_dtype)


def _high_precision(factor: Factor, settings: Settings) -> Operand:
    return Operand(as_array(factor.forms, settings.dtype), factor.spec, factor.axis)


def as_array(forms: Forms, dtype: str) -> jax.Array:
    """The matrix itself, or its dequantized form."""
    if forms.high_precision is not None:
        return forms.high_precision.astype(dtype)
    if forms.quantized is not None:
        return reference.dequantize(forms.quantized, dtype)
    assert forms.transposed is not None, "a matrix has at least one form"
    return reference.dequantize(forms.transposed.T, dtype)


def _quantized(quantizer: Quantizer, factor: Factor, settings: Settings) -> Operand:
    """The form that fits this quantizer and sum, or a form that is quantized here."""
    forms, spec, axis = factor
    available = [(forms.quantized, False), (forms.transposed, True)]
    for q, transposed in reversed(available) if axis == 0 else available:
        along = -1 - axis if transposed else axis
        if q is None or q.values.dtype != quantizer.dtype or q.scale.shape[along] != 1:
            continue
        if axis == -1 or q.values.ndim == 2:
            return transposed_operand(q, spec, axis, transposed=transposed)
    x = forms.high_precision
    x = as_array(forms, "float32") if x is None else x
    transpose = axis == 0 and settings.sharded.arithmetic.reads_last_axis
    q = settings.sharded.quantize(quantizer, x, spec, axis, transpose=transpose)
    spec = as_matrix(spec, False) if axis == 0 else spec
    return transposed_operand(q, spec, axis, transposed=transpose)
