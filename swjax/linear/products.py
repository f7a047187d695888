"""The three products of a linear layer as a recipe says: which operands are quantized, and how.

`swjax.linear.sharded` computes them on sharded arrays.
"""

from collections.abc import Callable
from typing import NamedTuple

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
    """How a layer computes; static.

    Attributes:
      recipe: what each product is computed in.
      dtype: of the products that are not quantized.
      out_dtype: of the layer's output.
      sharded: what computes the products.
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
        """Whether the forward product and the input's gradient read the same quantized weight."""
        fwd, dgrad = self.recipe.fwd, self.recipe.dgrad
        alike = fwd is not None and dgrad is not None and fwd.rhs == dgrad.rhs
        return alike and fwd.rhs.scope == "tensor"


class Forms(NamedTuple):
    """The forms of a matrix, perhaps with leading axes, that are available; the others are None.

    Attributes:
      high_precision: the matrix itself.
      quantized: the matrix quantized.
      transposed: the transpose quantized, of a matrix without leading axes; `quantize_weight` returns it.
    """

    high_precision: jax.Array | None = None
    quantized: QTensor | None = None
    transposed: QTensor | None = None


# --- the quantized forms ------------------------------------------------------------------------------


def quantizes_rows(product: Product | None) -> bool:
    """Whether the left operand is quantized row-wise, as the fused quantizers do."""
    return product is not None and product.lhs.scope == "row" and not product.outlier_threshold


def quantize_input(x: jax.Array, settings: Settings) -> QTensor:
    """x as the forward product reads it."""
    return settings.sharded.quantize(settings.recipe.fwd.lhs, x, settings.plan.x, -1)


def weight_forms(w: jax.Array, settings: Settings) -> Forms:
    """w in the forms that the forward product and the input's gradient read."""
    recipe, sharded = settings.recipe, settings.sharded
    once = settings.quantizes_weight_once
    if once and sharded.arithmetic.reads_last_axis:
        forms = sharded.quantize_both(w, recipe.fwd.rhs.dtype)
    elif once or recipe.save_quantized:
        forms = (sharded.quantize(recipe.fwd.rhs, w, settings.plan.w, 0),)
    else:
        return Forms(w)
    # Outliers are multiplied with w itself.
    keeps_w = recipe.fwd.outlier_threshold or recipe.dgrad.outlier_threshold
    return Forms(w if keeps_w else None, *(named(q, "swjax_w") for q in forms))


def named(q: QTensor, name: str) -> QTensor:
    """A quantized array that `swjax.checkpoint_policies` save. fp8 values are saved as bytes."""
    values = checkpoint_name(to_bytes(q.values), f"{name}_q")
    return QTensor(from_bytes(values, q.values.dtype), checkpoint_name(q.scale, f"{name}_scale"))


def to_bytes(values: jax.Array) -> jax.Array:
    """fp8 values as uint8; other arrays are returned as they are.

    `jax.checkpoint` rounds the floats that it saves with `jax.lax.reduce_precision`, whose largest e4m3
    value is 240, not 448: larger values become NaN.
    """
    if values.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        return jax.lax.bitcast_convert_type(values, jnp.uint8)
    return values


def from_bytes(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Inverse of `to_bytes` for values of that dtype."""
    if values.dtype == jnp.uint8:
        return jax.lax.bitcast_convert_type(values, dtype)
    return values


# --- the products -------------------------------------------------------------------------------------


def output(x: Forms, w: Forms, bias: jax.Array | None, settings: Settings) -> jax.Array:
    """y = x w + bias, in `settings.out_dtype`."""
    plan, sharded = settings.plan, settings.sharded

    def compute(x, w, bias, out_dtype):
        if isinstance(w.value, QTensor) and not already_quantized:
            w = w._replace(value=named(w.value, "swjax_w"))
        return sharded.output(x, w, bias, out_dtype=out_dtype)

    already_quantized = w.quantized is not None
    sides = (plan.x, -1), (plan.w, 0)
    return _multiply(settings.recipe.fwd, x, w, bias, sides, compute, settings.out_dtype, settings)


def input_gradient(g: Forms, w: Forms, settings: Settings, *, summed: bool = True) -> jax.Array:
    """dx = g wT, in `settings.dtype`; for `summed` see `Sharded.input_gradient`."""
    plan, sharded = settings.plan, settings.sharded

    def compute(g, w, _, out_dtype):
        return sharded.input_gradient(g, w, out_dtype=out_dtype, summed=summed)

    sides = (plan.y, -1), (plan.w, -1)
    return _multiply(settings.recipe.dgrad, g, w, None, sides, compute, settings.dtype, settings)


def weight_gradient(x: Forms, g: Forms, settings: Settings, *, out_dtype: str) -> jax.Array:
    """dw = xT g, in `out_dtype`."""
    plan, sharded = settings.plan, settings.sharded

    def compute(x, g, _, out_dtype):
        return sharded.weight_gradient(x, g, out_dtype=out_dtype)

    sides = (plan.x, 0), (plan.y, 0)
    return _multiply(settings.recipe.wgrad, x, g, None, sides, compute, out_dtype, settings)


Side = tuple[Spec, int]  # how an operand is sharded, and the axis that its product sums over


def _multiply(
    product: Product | None,
    a: Forms,
    b: Forms,
    bias: jax.Array | None,
    sides: tuple[Side, Side],
    compute: Callable[..., jax.Array],
    out_dtype: str,
    settings: Settings,
) -> jax.Array:
    """`compute(a, b, bias, out_dtype)` of operands as `product` wants them."""
    side_a, side_b = sides
    if product is None:
        a, b = (_high_precision(each, *side, settings) for each, side in ((a, side_a), (b, side_b)))
        return compute(a, b, bias, out_dtype)
    b_quantized = _quantized(product.rhs, b, *side_b, settings)
    if not product.outlier_threshold:
        return compute(_quantized(product.lhs, a, *side_a, settings), b_quantized, bias, out_dtype)
    a = _high_precision(a, *side_a, settings)
    inliers, outliers = settings.sharded.split_outliers(a.value, product.outlier_threshold, a.spec)
    inliers = _quantized(product.lhs, Forms(inliers), *side_a, settings)
    y = compute(inliers, b_quantized, bias, "float32")
    b = _high_precision(b, *side_b, settings)
    return (y + compute(a._replace(value=outliers), b, None, "float32")).astype(out_dtype)


def _high_precision(forms: Forms, spec: Spec, axis: int, settings: Settings) -> Operand:
    return Operand(as_array(forms, settings.dtype), spec, axis)


def as_array(forms: Forms, dtype: str) -> jax.Array:
    """The matrix itself, or what its quantized form stands for."""
    if forms.high_precision is not None:
        return forms.high_precision.astype(dtype)
    q = forms.transposed.T if forms.quantized is None else forms.quantized
    return reference.dequantize(q, dtype)


def _quantized(
    quantizer: Quantizer, forms: Forms, spec: Spec, axis: int, settings: Settings
) -> Operand:
    """The form that fits this quantizer and a sum over `axis`, or else one quantized here."""
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
