"""SwitchBack: a linear layer whose three matrix products are computed as a recipe says.

The paper once. `swjax.recipes` says what each product is computed in, `swjax.kernels` computes it, and the
`custom_vjp`s below are the layers between them: `switchback`, one linear layer, and `mlp`, two with a GELU.
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
from swjax.prologues import Gelu, Gradient, Prologue
from swjax.recipes import Product, Quantizer, Recipe


def switchback(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: str | Recipe = "switchback",
    prologue: Prologue | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
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
      w: [k, n] in any of these dtypes; its gradient has the same.
      bias: [n] or None.
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      prologue: a `swjax.LayerNorm` or `swjax.Gelu` that x goes through first, fused with the quantizer.
      out_dtype: dtype of y; None is that of x.
      precision: of the products that are not quantized, as for `jax.lax.dot_general`.
      implementation: of the quantized ones, see `swjax.kernels.dispatch`; None chooses.

    Returns:
      y: [..., n] in `out_dtype`.

    Raises:
      ValueError: shapes, dtypes, recipe or implementation do not fit.

    >>> x, w = jnp.ones((2, 5, 3)), jnp.full((3, 4), 0.5)
    >>> y = switchback(x, w)
    >>> y.shape, float(y[0, 0, 0])
    ((2, 5, 4), 1.5)

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
      NeurIPS 2023, https://arxiv.org/abs/2304.13013
    """
    _check(x, w, bias)
    return _linear(x, w, bias, prologue, _settings(x, recipe, out_dtype, precision, implementation))


def mlp(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    w2: jax.Array,
    b2: jax.Array | None,
    *,
    recipe: str | Recipe = "switchback",
    prologue: Prologue | None = None,
    approximate: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """``gelu(x w1 + b1) w2 + b2``: two `switchback` layers that quantize where the GELU already passes.

    The same result as the two layers; in the backward pass the GELU's gradient is written once in 16 bits,
    once quantized, and summed for b1, in one pass.

    Args:
      x: [..., k] float16, bfloat16 or float32.
      w1: [k, h]; b1: [h] or None; w2: [h, n]; b2: [n] or None.
      recipe, prologue, precision, implementation: as for `switchback`, for both layers.
      approximate: the tanh form of the GELU.

    Returns:
      [..., n] in the dtype of x.

    Raises:
      ValueError: shapes, dtypes, recipe or implementation do not fit.

    >>> x, w1, w2 = jnp.ones((2, 3)), jnp.ones((3, 8)), jnp.ones((8, 3))
    >>> mlp(x, w1, None, w2, None).shape
    (2, 3)
    """
    _check(x, w1, b1)
    _check(jax.ShapeDtypeStruct((*x.shape[:-1], w1.shape[1]), x.dtype), w2, b2)
    settings = _settings(x, recipe, None, precision, implementation)
    return _mlp(x, w1, b1, w2, b2, prologue, Gelu(approximate), settings)


class _Settings(NamedTuple):
    """What the products of a layer share; all of it static."""

    recipe: Recipe
    dtype: str  # of the products that are not quantized
    out_dtype: str
    precision: jax.lax.PrecisionLike
    implementation: str | None


def _settings(x, recipe, out_dtype, precision, implementation) -> _Settings:
    dispatch.check(implementation)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype).name
    return _Settings(recipes.get(recipe), x.dtype.name, out_dtype, precision, implementation)


def _check(x, w, bias):
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"switchback needs x [..., k] and w [k, n], got x {x.shape} and w {w.shape}: "
            "for other contractions use swjax.dot_general"
        )
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"bias must have the shape {w.shape[1:]} of w's columns, got {bias.shape}")
    for name, array in {"x": x, "w": w, "bias": bias}.items():
        if array is not None and array.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"{name} must be float16, bfloat16 or float32, got {array.dtype}: cast it first"
            )


# --- forward and backward -----------------------------------------------------------------------------


class _Operand(NamedTuple):
    """A matrix, perhaps with leading axes, in the forms that exist of it."""

    wide: jax.Array | None = None
    quantized: QTensor | None = None


class _Residuals(NamedTuple):
    inputs: jax.Array | None  # of the prologue
    x: _Operand
    w: _Operand
    w_like: jax.Array  # empty: carries the dtype that a quantized w no longer shows
    bias_like: jax.Array | None
    prologue: Prologue | None


def _forward(x, w, bias, prologue, settings) -> tuple[jax.Array, _Residuals]:
    recipe, run = settings.recipe, _runner(settings)
    fwd, save_quantized = recipe.fwd, recipe.save_quantized
    rowwise = fwd is not None and fwd.lhs.scope == "row" and not fwd.outlier_threshold
    inputs, x_q = x, None
    if prologue is not None:
        x, x_q = prologue.forward(
            x,
            quantize_to=fwd.lhs.dtype if rowwise else None,
            wide=not (rowwise and save_quantized),
            implementation=settings.implementation,
        )
        x = None if x is None else checkpoint_name(x, "swjax_x")
    elif rowwise:
        x_q = _quantize(fwd.lhs, x, -1, run)
    if save_quantized:
        x_q = _quantize(fwd.lhs, x, -1, run) if x_q is None else x_q
        x_q = QTensor(
            checkpoint_name(x_q.values, "swjax_x_q"), checkpoint_name(x_q.scale, "swjax_x_scale")
        )
        saved_w = _Operand(quantized=_quantize(fwd.rhs, w, 0, run))
    else:
        saved_w = _Operand(w)
    y = _multiply(
        fwd,
        _Operand(x, x_q),
        saved_w,
        (-1, 0),
        bias,
        out_dtype=settings.out_dtype,
        settings=settings,
    )
    residuals = _Residuals(
        inputs=None if prologue is None else inputs,
        x=_Operand(quantized=x_q) if save_quantized else _Operand(x),
        w=saved_w,
        w_like=jnp.empty(0, w.dtype),
        bias_like=None if bias is None else jnp.empty(0, bias.dtype),
        prologue=prologue,
    )
    return checkpoint_name(y, "swjax_y"), residuals


def _backward(settings, residuals: _Residuals, gradient: Gradient, quantize_to=None):
    """(gradient of the input, as `Gradient`), dw, dbias, and the prologue's gradient."""
    recipe, run = settings.recipe, _runner(settings)
    inputs, x, w, w_like, bias_like, prologue = residuals
    g, g_q, g_sum = gradient
    if recipe.save_quantized:
        # Without the barrier XLA dequantizes x in the forward pass already, and keeps the wide copy.
        x, g = jax.lax.optimization_barrier((x, g))

    dgrad = recipe.dgrad
    rowwise = dgrad is not None and dgrad.lhs.scope == "row" and not dgrad.outlier_threshold
    if g_q is None and rowwise and bias_like is not None and g_sum is None:
        g_q, g_sum = run("quantize_and_sum", g, dtype=dgrad.lhs.dtype)
    if bias_like is not None and g_sum is None:
        g_sum = jnp.sum(g, axis=tuple(range(g.ndim - 1)), dtype=jnp.float32)
    dx = _multiply(
        dgrad, _Operand(g, g_q), w, (-1, -1), out_dtype=settings.dtype, settings=settings
    )
    dw = _multiply(
        recipe.wgrad, x, _Operand(g), (0, 0), out_dtype=w_like.dtype.name, settings=settings
    )
    dbias = None if bias_like is None else g_sum.astype(bias_like.dtype)
    if prologue is None:
        return (dx, None, None), dw, dbias, None
    input_gradient, dprologue = prologue.backward(
        inputs, dx, quantize_to=quantize_to, implementation=settings.implementation
    )
    return input_gradient, dw, dbias, dprologue


def _runner(settings) -> Callable:
    return partial(dispatch.run, implementation=settings.implementation)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear(x, w, bias, prologue, settings):
    return _forward(x, w, bias, prologue, settings)[0]


def _linear_backward(settings, residuals, g):
    (dx, _, _), dw, dbias, dprologue = _backward(settings, residuals, (g, None, None))
    return dx, dw, dbias, dprologue


_linear.defvjp(_forward, _linear_backward)


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def _mlp(x, w1, b1, w2, b2, prologue, gelu, settings):
    return _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, settings)[0]


def _mlp_forward(x, w1, b1, w2, b2, prologue, gelu, settings):
    hidden, first = _forward(x, w1, b1, prologue, settings)
    y, second = _forward(hidden, w2, b2, gelu, settings)
    return y, (first, second)


def _mlp_backward(settings, residuals, g):
    first, second = residuals
    dgrad = settings.recipe.dgrad
    fused = dgrad is not None and dgrad.lhs.scope == "row" and not dgrad.outlier_threshold
    dhidden, dw2, db2, dgelu = _backward(
        settings, second, (g, None, None), quantize_to=dgrad.lhs.dtype if fused else None
    )
    (dx, _, _), dw1, db1, dprologue = _backward(settings, first, dhidden)
    return dx, dw1, db1, dw2, db2, dprologue, dgelu


_mlp.defvjp(_mlp_forward, _mlp_backward)


# --- one product --------------------------------------------------------------------------------------


def _multiply(
    product: Product | None,
    a: _Operand,
    b: _Operand,
    contract: tuple[int, int],
    bias: jax.Array | None = None,
    *,
    out_dtype: str,
    settings: _Settings,
) -> jax.Array:
    """The product that sums over axis contract[0] of a and contract[1] of b, -1 or 0: all but the last."""
    run = _runner(settings)
    if product is None or product.outlier_threshold:
        wide_a, wide_b = _widen(a, settings.dtype), _widen(b, settings.dtype)
    if product is None:
        return _wide_product(wide_a, wide_b, contract, bias, out_dtype, settings)

    if product.outlier_threshold:
        inliers, outliers = _split_outliers(wide_a, product.outlier_threshold)
        a = _Operand(inliers)
    narrow_a, axis_a = _narrow(product.lhs, a, contract[0], run)
    narrow_b, axis_b = _narrow(product.rhs, b, contract[1], run)
    matmul = partial(run, "matmul", narrow_a, narrow_b, bias, contract=(axis_a, axis_b))
    if not product.outlier_threshold:
        return matmul(out_dtype=out_dtype)
    narrow = matmul(out_dtype="float32")
    wide = _wide_product(outliers, wide_b, contract, None, "float32", settings)
    return (narrow + wide).astype(out_dtype)


def _wide_product(a, b, contract, bias, out_dtype, settings):
    precision = settings.precision
    if contract == (0, 0):
        run = _runner(settings)
        return run("weight_gradient", _flat(a), _flat(b), out_dtype=out_dtype, precision=precision)
    axes = ((a.ndim - 1,), (contract[1] % b.ndim,))
    return reference.dot(a, b, axes, bias, out_dtype=out_dtype, precision=precision)


def _narrow(quantizer: Quantizer, t: _Operand, axis: int, run) -> tuple[QTensor, int]:
    """`t` quantized, for a product that sums over `axis`, and which axis that then is."""
    q = t.quantized
    if q is not None and (q.scale.size == 1 or q.scale.shape[axis] == 1):
        return q, axis
    wide = _widen(t, "float32") if t.wide is None else t.wide
    if axis == -1:
        return _quantize(quantizer, wide, axis, run), axis
    wide = _flat(wide)
    if _quantize(quantizer, wide, axis, partial(dispatch.choose, **run.keywords)) == "xla":
        return _quantize(quantizer, wide, axis, run), axis
    return _quantize(quantizer, wide, axis, run, transpose=True), -1


def _quantize(quantizer: Quantizer, x: jax.Array, axis: int, run, transpose: bool = False):
    scope = range(x.ndim) if quantizer.scope == "tensor" else [axis % x.ndim]
    return run("quantize", x, axes=tuple(scope), dtype=quantizer.dtype, transpose=transpose)


def _flat(x: jax.Array) -> jax.Array:
    """Leading dimensions as one. XLA for GPUs fails to compile some int8 sums over several."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _widen(t: _Operand, dtype: str) -> jax.Array:
    if t.wide is None:
        return reference.dequantize(t.quantized, dtype)
    return t.wide.astype(dtype)


def _split_outliers(x, threshold: float):
    """x as a sum of two: the features below `threshold` for every token, and the others."""
    features = jnp.max(jnp.abs(x), axis=tuple(range(x.ndim - 1)), keepdims=True, initial=0.0)
    outlier = features >= jnp.asarray(threshold, x.dtype)
    zero = jnp.zeros((), x.dtype)
    return jnp.where(outlier, zero, x), jnp.where(outlier, x, zero)


@cache
def dot_general(
    recipe: str | Recipe = "switchback", *, implementation: str | None = None
) -> Callable[..., jax.Array]:
    """A `jax.lax.dot_general` that computes as `recipe` says, for modules that take one.

    For `dot_general=` of `flax.nnx.Linear`, `LinearGeneral`, `MultiHeadAttention` (`qkv_dot_general=`,
    `out_dot_general=`) and of their linen counterparts. The left operand is the activation, the right one
    the weight. Flax casts the weight to the compute dtype first: `swjax.nnx.Linear` and `swjax.linen.Dense`
    quantize the fp32 parameter itself.

    Args:
      recipe: a name in `swjax.recipes.RECIPES` or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.

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
        rhs_free = _remaining(rhs, rhs_contract, rhs_batch)
        batch, rows = _shape(lhs, lhs_batch), _shape(lhs, lhs_free)
        columns, k = _shape(rhs, rhs_free), math.prod(_shape(lhs, lhs_contract))
        n = math.prod(columns)
        x = lhs.transpose(*lhs_batch, *lhs_free, *lhs_contract).reshape(*batch, *rows, k)
        w = rhs.transpose(*rhs_batch, *rhs_contract, *rhs_free).reshape(*batch, k, n)
        linear = partial(
            switchback,
            recipe=recipe,
            out_dtype=preferred_element_type,
            precision=precision,
            implementation=implementation,
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
