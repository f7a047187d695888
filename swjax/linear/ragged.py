"""`ragged_switchback`: linear layers of experts, each of which multiplies its own rows, through XLA."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import RaggedDotDimensionNumbers

from swjax import recipes
from swjax.kernels import dispatch, targets
from swjax.kernels.reference import QTensor, dequantize, quantize
from swjax.linear.checks import OPERAND_DTYPES
from swjax.linear.interception import without_interception
from swjax.linear.layer import from_bytes, name_for_checkpoint, to_bytes
from swjax.linear.rules import differentiated_as
from swjax.linear.sharding import vary_alike
from swjax.recipes import LONGEST_INT8_SUM, Quantizer, Recipe

# Sums over the rows of each group: the product of a weight gradient.
_SUM_OF_ROWS = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


@dataclass(frozen=True)
class _Settings:
    """What is static: see `ragged_switchback`; `w_dtype` is None if w is quantized, and has no gradient."""

    recipe: Recipe
    out_dtype: str
    w_dtype: str | None
    precision: Any

    @property
    def reuses_weight(self) -> bool:
        """Whether both products read the same quantized weight."""
        fwd, dgrad = self.recipe.fwd, self.recipe.dgrad
        if fwd is None or dgrad is None:
            return False
        return self.recipe.save_quantized or (fwd.rhs == dgrad.rhs and fwd.rhs.scope == "tensor")


def ragged_switchback(
    x: jax.Array,
    w: jax.Array | QTensor,
    group_sizes: jax.Array,
    *,
    recipe: str | Recipe = "switchback",
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` with quantized products, forward and backward: the linear layer of experts.

    Row i of x belongs to the group e that ``cumsum(group_sizes)`` tells, and is multiplied with w[e], as by
    `swjax.switchback`: one scale per row of x and of the gradient, one scale per expert's weight (or one per
    expert and channel). The weight gradient is a product in the dtype of x. Rows beyond the sum of the
    groups are zero, in y and in the gradient of x.

    XLA computes the products. On CPUs, and on GPUs unless its flags say otherwise, XLA expands a ragged
    product to a dense one over all experts, also that of `jax.lax.ragged_dot` in 16 bits.

    Args:
      x: [m, k] float16, bfloat16 or float32, rows sorted by expert.
      w: [e, k, n], dtypes as for x; its gradient has the dtype of w. Or the QTensor of
        ``jax.vmap(swjax.quantize_weight)(w)``, which has no gradient.
      group_sizes: [e] integers, the number of rows of each expert.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe` that quantizes x row by row and
        has no quantized weight gradient, rotation and outliers.
      out_dtype: dtype of y; None uses the dtype of x.
      precision: precision of the products without quantization, see `jax.lax.dot_general`.

    Returns:
      y: [m, n] in `out_dtype`.

    Raises:
      ValueError: shapes or dtypes do not fit, a group size is negative or their sum exceeds m (checked if
        `group_sizes` is concrete), or the recipe does not exist or is not supported.

    >>> x, w = jnp.ones((5, 3)), jnp.stack([jnp.ones((3, 2)), jnp.full((3, 2), 2.0)])
    >>> ragged_switchback(x, w, jnp.array([1, 3]))[:, 0].tolist()
    [3.0, 6.0, 6.0, 6.0, 0.0]
    """
    recipe = recipes.get(recipe)
    if isinstance(w, QTensor):  # stored [e, n, k]
        w = QTensor(w.values.mT, w.scale.mT)
    _check(x, w, group_sizes, recipe)
    settings = _Settings(
        recipe,
        jnp.dtype(x.dtype if out_dtype is None else out_dtype).name,
        None if isinstance(w, QTensor) else w.dtype.name,
        precision,
    )
    x, w, group_sizes = vary_alike(x, w, group_sizes)
    return _ragged(x, w, group_sizes, settings)


# --- forward and backward -----------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ragged(x, w, group_sizes, settings: _Settings):
    return _forward(x, w, group_sizes, settings)[0]


@without_interception
def _forward(x, w, group_sizes, settings: _Settings):
    recipe, fwd = settings.recipe, settings.recipe.fwd
    lhs, rhs, sizes = lax.stop_gradient((x, w, group_sizes))
    if fwd is not None:
        lhs, rhs = _rows(fwd.lhs, lhs), name_for_checkpoint(_weight(fwd.rhs, rhs, 1), "swjax_w")
    if recipe.save_quantized:
        lhs = name_for_checkpoint(lhs, "swjax_x")
    y = _multiply(lhs, rhs, sizes, 1, settings.out_dtype, settings)
    y = differentiated_as(partial(_exact, settings), y, x, w, group_sizes)
    forms = lhs if recipe.save_quantized else None, rhs if settings.reuses_weight else None
    # Of x and w compilers remove what the backward pass does not read.
    return checkpoint_name(y, "swjax_y"), (x, w, group_sizes, jax.tree.map(to_bytes, forms))


@without_interception
def _backward(settings: _Settings, saved, g):
    recipe, (*inputs, forms) = settings.recipe, saved
    (x, w, sizes), constant = lax.stop_gradient((tuple(inputs), g))
    if recipe.fwd is not None:
        dtypes = recipe.fwd.lhs.dtype, recipe.fwd.rhs.dtype
        forms = [jax.tree.map(partial(from_bytes, dtype=d), q) for q, d in zip(forms, dtypes)]
    x = x if forms[0] is None else dequantize(forms[0], x.dtype.name)
    w = w if forms[1] is None else forms[1]
    lhs, rhs = constant, w
    if recipe.dgrad is not None:
        lhs, rhs = _rows(recipe.dgrad.lhs, lhs), _weight(recipe.dgrad.rhs, rhs, 2)
    dx, dw = _multiply(lhs, rhs, sizes, 2, x.dtype.name, settings), None
    if settings.w_dtype is not None:
        options = {"precision": settings.precision, "preferred_element_type": settings.w_dtype}
        dw = lax.ragged_dot_general(x, constant.astype(x.dtype), sizes, _SUM_OF_ROWS, **options)
    exact = partial(_exact_gradients, settings)
    return *differentiated_as(exact, (dx, dw), *inputs, g), None


_ragged.defvjp(_forward, _backward)


def _exact(settings: _Settings, x, w, group_sizes):
    """The layer without quantization, which JAX differentiates."""
    return _multiply(x, w, group_sizes, 1, settings.out_dtype, settings)


def _exact_gradients(settings: _Settings, x, w, group_sizes, g):
    dx, dw = jax.vjp(lambda x, w: _exact(settings, x, w, group_sizes), x, w)[1](g)
    return dx, None if settings.w_dtype is None else dw


# --- the products -------------------------------------------------------------------------------------


def _rows(quantizer: Quantizer, x: jax.Array) -> QTensor:
    return quantize(x, (1,), quantizer.dtype)


def _weight(quantizer: Quantizer, w: jax.Array | QTensor, axis: int) -> QTensor:
    """w [e, k, n] quantized for a product that sums over `axis`."""
    if isinstance(w, QTensor):
        if w.values.dtype == quantizer.dtype and w.scale.shape[axis] == 1:
            return w
        w = dequantize(w)
    return quantize(w, (1, 2) if quantizer.scope == "tensor" else (axis,), quantizer.dtype)


def _multiply(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor,
    group_sizes: jax.Array,
    axis: int,
    out_dtype: str,
    settings: _Settings,
) -> jax.Array:
    """Multiplies each row with the matrix of its group, summed over the `axis` of w [e, k, n]."""
    dimension_numbers = RaggedDotDimensionNumbers((((1,), (axis,)), ((), ())), (0,), (0,))
    if not isinstance(x, QTensor):
        w = dequantize(w) if isinstance(w, QTensor) else w
        options = {"precision": settings.precision, "preferred_element_type": out_dtype}
        return lax.ragged_dot_general(
            x, w.astype(x.dtype), group_sizes, dimension_numbers, **options
        )
    assert isinstance(w, QTensor), "both operands are quantized, or none"
    lhs, rhs, dtype = x.values, w.values, "int32"
    if lhs.dtype == jnp.int8:
        dispatch.warn_of_split_sums()
    else:  # as in `swjax.kernels.reference.matmul`
        exact = "float32" if targets.platform() == "cpu" else "bfloat16"
        lhs, rhs, dtype = lhs.astype(exact), rhs.astype(exact), "float32"
    options = {"preferred_element_type": jnp.dtype(dtype)}
    y = lax.ragged_dot_general(lhs, rhs, group_sizes, dimension_numbers, **options)
    rows, ends = jnp.arange(len(lhs), dtype=group_sizes.dtype), jnp.cumsum(group_sizes)
    groups = jnp.searchsorted(ends, rows, side="right")
    scale = jnp.take(w.scale.squeeze(axis), groups, axis=0, mode="clip")  # [m, 1] or [m, n]
    y = jnp.where((rows < ends[-1])[:, None], y.astype("float32") * (x.scale * scale), 0)
    return y.astype(out_dtype)


# --- checks -------------------------------------------------------------------------------------------


def _check(x, w, group_sizes, recipe: Recipe) -> None:
    shape = (w.values if isinstance(w, QTensor) else w).shape
    fit = x.ndim == 2 and len(shape) == 3 and x.shape[1] == shape[1]
    if not fit or group_sizes.shape != shape[:1]:
        raise ValueError(
            "ragged_switchback needs x [m, k], w [e, k, n] and group_sizes [e], got x "
            f"{x.shape}, w {shape} and group_sizes {group_sizes.shape}: sort the rows of x by expert, and "
            "transpose w"
        )
    for name, array in {"x": x, "w": w}.items():
        if not isinstance(array, QTensor) and array.dtype not in OPERAND_DTYPES:
            raise ValueError(
                f"{name} must be float16, bfloat16 or float32, got {array.dtype}: cast it first"
            )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes must be integers, got {group_sizes.dtype}: pass numbers of rows"
        )
    if not isinstance(group_sizes, jax.core.Tracer):
        sizes = np.asarray(group_sizes, np.int64)
        if sizes.min(initial=0) < 0 or sizes.sum() > len(x):
            raise ValueError(
                f"group_sizes must be at least 0 and add up to at most the {len(x)} rows of x, got "
                f"{sizes.tolist()}: count the rows of each expert"
            )
    products = [product for product in (recipe.fwd, recipe.dgrad) if product is not None]
    plain = [(p.lhs.scope, p.lhs.rotation, p.outlier_threshold) for p in products]
    if recipe.wgrad or any(each != ("row", 1, 0) for each in plain):
        raise ValueError(
            "ragged_switchback needs a recipe that quantizes rows of x, without rotation and outliers, and "
            f"computes the weight gradient in 16 bits, got {recipe}: use 'switchback', 'switchback_m', "
            "'switchback_q' or 'fp8_switchback'"
        )
    longest = max(shape[1:])
    if longest > LONGEST_INT8_SUM:
        raise ValueError(
            f"ragged_switchback adds up to {LONGEST_INT8_SUM} int8 products, got w {shape}: split w"
        )
