"""SwitchBack: a linear layer whose three matrix products are computed as a recipe says.

The paper once. `swjax.recipes` says what each product is computed in, `swjax.kernels` computes it, and the
`custom_vjp` below is the linear layer between them.
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
from swjax.recipes import Product, Quantizer, Recipe


def switchback(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    recipe: str | Recipe = "switchback",
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
    recipe = recipes.get(recipe)
    _check(x, w, bias)
    dispatch.choose("matmul", implementation)  # an unknown name fails whatever the recipe
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype).name
    return _linear(x, w, bias, recipe, out_dtype, precision, implementation)


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


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _linear(x, w, bias, recipe, out_dtype, precision, implementation):
    return _forward(x, w, bias, recipe, out_dtype, precision, implementation)[0]


def _forward(x, w, bias, recipe, out_dtype, precision, implementation):
    contract = ((x.ndim - 1,), (0,))
    # Zero-size arrays carry the dtypes that quantized residuals no longer show.
    dtypes = jnp.empty(0, x.dtype), jnp.empty(0, w.dtype)
    if recipe.save_quantized:
        x = _quantize(recipe.fwd.lhs, x, contract[0], implementation)
        w = _quantize(recipe.fwd.rhs, w, contract[1], implementation)
        x = QTensor(
            checkpoint_name(x.values, "swjax_x_q"), checkpoint_name(x.scale, "swjax_x_scale")
        )
    settings = _Settings(dtypes[0].dtype.name, precision, implementation)
    y = _multiply(recipe.fwd, x, w, contract, bias, out_dtype=out_dtype, settings=settings)
    return checkpoint_name(y, "swjax_y"), (x, w, bias, dtypes)


def _backward(recipe, out_dtype, precision, implementation, residuals, g):
    del out_dtype  # g has it
    x, w, bias, dtypes = residuals
    x_dtype, w_dtype = (like.dtype.name for like in dtypes)
    tokens = tuple(range(g.ndim - 1))
    if recipe.save_quantized:
        # Without the barrier XLA dequantizes x in the forward pass already, and keeps the wide copy.
        x, g = jax.lax.optimization_barrier((x, g))
    settings = _Settings(x_dtype, precision, implementation)
    contract = ((g.ndim - 1,), (1,))
    dx = _multiply(recipe.dgrad, g, w, contract, out_dtype=x_dtype, settings=settings)
    dw = _multiply(
        recipe.wgrad, _flat(x), _flat(g), ((0,), (0,)), out_dtype=w_dtype, settings=settings
    )
    if bias is None:
        return dx, dw, None
    return dx, dw, jnp.sum(g, axis=tokens, dtype=jnp.float32).astype(bias.dtype)


_linear.defvjp(_forward, _backward)


class _Settings(NamedTuple):
    """What the three products of one layer share."""

    dtype: str  # of the products that are not quantized
    precision: jax.lax.PrecisionLike
    implementation: str | None


def _multiply(product: Product | None, a, b, contract, bias=None, *, out_dtype, settings):
    """One product of the layer; its operands are arrays, or QTensors that were quantized before."""
    dtype, precision, implementation = settings
    wide_dot = partial(reference.dot, contract=contract, precision=precision)
    if product is None:
        return wide_dot(_widen(a, dtype), _widen(b, dtype), bias=bias, out_dtype=out_dtype)

    matmul = partial(
        dispatch.choose("matmul", implementation), contract=contract, out_dtype=out_dtype
    )
    quantized_b = _quantize(product.rhs, b, contract[1], implementation)
    if not product.outlier_threshold:
        return matmul(
            _quantize(product.lhs, a, contract[0], implementation), quantized_b, bias=bias
        )

    inliers, outliers = _split_outliers(a, product.outlier_threshold)
    narrow = matmul(
        _quantize(product.lhs, inliers, contract[0], implementation),
        quantized_b,
        bias=bias,
        out_dtype="float32",
    )
    wide = wide_dot(_widen(outliers, dtype), _widen(b, dtype), out_dtype="float32")
    return (narrow + wide).astype(out_dtype)


def _quantize(quantizer: Quantizer, t, contracted, implementation) -> QTensor:
    """`t` quantized for a product that sums over the axes `contracted`."""
    if isinstance(t, QTensor):
        if all(t.scale.shape[axis] == 1 for axis in contracted):
            return t
        t = reference.dequantize(t)  # its scales do not factor out of this product
    axes = tuple(range(t.ndim)) if quantizer.scope == "tensor" else tuple(contracted)
    return dispatch.choose("quantize", implementation)(t, axes, quantizer.dtype)


def _flat(t):
    """Leading dimensions as one. XLA for GPUs fails to compile some int8 sums over several."""
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), t)


def _widen(t, dtype: str) -> jax.Array:
    return reference.dequantize(t, dtype) if isinstance(t, QTensor) else t.astype(dtype)


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
    dispatch.choose("matmul", implementation)

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
