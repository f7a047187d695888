"""The parts that the rules of experts share: the forms of their arrays, and their products.

Rows are sorted by expert. A weight [e, k, n] has a matrix for each expert. Its quantized forms are those of
`swjax.linear.layer.Operand`: `quantized` [e, k, n], and `transposed` [e, n, k]. In the sharding of a `Layer`
of experts, w is [e, k, n].
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swjax import auto, recipes
from swjax.kernels import dispatch, reference, targets
from swjax.kernels.ragged.schedule import bounds
from swjax.kernels.reference import QTensor
from swjax.linear.checks import check_arrays, check_dtypes, check_quantized, weight_array
from swjax.linear.layer import (
    Layer,
    Operand,
    as_array,
    from_bytes,
    name_for_checkpoint,
    quantize_sharded,
    to_bytes,
)
from swjax.linear.layouts import Spec, quantized_specs, specs_of
from swjax.recipes import LONGEST_INT8_SUM, Quantizer, Recipe

PRODUCTS = ("ragged_matmul", "ragged_weight_gradient", "ragged_block_weight_gradient")


# --- the forms that products read ---------------------------------------------------------------------


def quantized_gradient(g: jax.Array, layer: Layer) -> jax.Array | QTensor:
    """g [m, n] as the input gradient reads it: with a scale for each row, or itself."""
    dgrad = layer.recipe.dgrad
    return g if dgrad is None else quantize_sharded(dgrad.lhs, g, layer.sharding.y, -1, layer)


def forward_weight(w: jax.Array | QTensor, layer: Layer) -> Operand:
    """A weight, quantized for the forward product; and for the input gradient if both read the same.

    Args:
      w: [e, k, n], or a QTensor that stores [e, n, k].
      layer: the layer.
    """
    fwd = layer.recipe.fwd
    if isinstance(w, QTensor):
        return Operand(transposed=w)
    if fwd is None:
        return Operand(w)
    if layer.reads_last_axis and layer.recipe.quantizes_weight_once:
        sharding, (e, k, n) = layer.sharding, layer.sharding.w
        options: dict[str, Any] = {"implementation": layer.implementation, "dtype": fwd.rhs.dtype}

        def step(w):
            absmax = reference.absolute_maximum(w, (1, 2)).reshape(len(w), 1)
            return dispatch.run("quantize_both", w, sharding.maximum(absmax, k, n), **options)

        one = Spec((e, (), ()))
        specs = (quantized_specs(Spec(values), one) for values in ((e, k, n), (e, n, k)))
        forms = sharding.map_shards(step, (w,), (sharding.w,), tuple(specs))
    else:
        q = _quantize_weight(fwd.rhs, w, 1, layer)
        forms = (None, q.T) if layer.reads_last_axis else (q, None)
    q, transposed = (form and name_for_checkpoint(form, "swjax_w") for form in forms)
    return Operand(w, q, transposed)


def saved_weight(w: jax.Array | QTensor, forms: Operand, layer: Layer) -> Operand:
    """What the backward pass reads of a weight; fp8 values as bytes.

    A weight that is saved as it is must be the argument of the rule: a `jax.lax.scan` over layers then reads
    its own input again, and stacks no copy.
    """
    if isinstance(w, QTensor):
        forms = Operand(transposed=w)
    elif layer.recipe.quantizes_weight_once or layer.recipe.save_quantized:
        transposed = forms.transposed if forms.quantized is None else None
        forms = Operand(None, forms.quantized, transposed)
    else:
        return Operand(w)
    return jax.tree.map(to_bytes, forms)


def saved_rows(x: Operand, layer: Layer) -> QTensor | None:
    """The quantized rows that are saved for the backward pass; None: it reads the rows themselves."""
    return jax.tree.map(to_bytes, x.quantized) if layer.recipe.save_quantized else None


def rows_of_groups(x: jax.Array, group_sizes: jax.Array, spec: Spec, layer: Layer) -> jax.Array:
    """x [m, k] with zeros in the rows beyond the groups, whose values may be anything, such as NaN.

    The backward pass of a prologue multiplies them by zero gradients, and sums over all rows.
    """
    sharding = layer.sharding

    def step(x, group_sizes):
        _, ends = bounds(sharding.own_rows(group_sizes, x), len(x))
        return jnp.where(jnp.arange(len(x))[:, None] < ends[-1], x, jnp.zeros((), x.dtype))

    return sharding.map_shards(step, (x, group_sizes), (spec, Spec(((),))), spec)


def restored(saved: Any, quantizer: Quantizer) -> Any:
    """The inverse of the conversion to bytes of `saved_weight` and `saved_rows`."""
    return jax.tree.map(partial(from_bytes, dtype=quantizer.dtype), saved)


def _backward_weight(w: Operand, layer: Layer) -> tuple[jax.Array | QTensor, int]:
    """A weight in the form that the input gradient reads, and the axis that it is summed over."""
    dgrad = layer.recipe.dgrad
    if dgrad is not None:
        for q, axis in ((w.quantized, 2), (w.transposed, 1)):
            if q and q.values.dtype == dgrad.rhs.dtype and q.scale.shape[axis] == 1:
                return q, axis
    if dgrad is None:
        return as_array(w, layer.dtype), 2
    array = w.array if w.array is not None else as_array(w, "float32")
    return _quantize_weight(dgrad.rhs, array, 2, layer), 2


def _forward_weight(w: Operand, layer: Layer) -> tuple[jax.Array | QTensor, int]:
    """A weight in the form that the forward product reads, and the axis that it is summed over."""
    if layer.recipe.fwd is None:
        return as_array(w, layer.dtype), 1
    if w.transposed is not None:
        return w.transposed, 2
    assert w.quantized is not None, "see `forward_weight`"
    return w.quantized, 1


def _quantize_weight(quantizer: Quantizer, w: jax.Array, axis: int, layer: Layer) -> QTensor:
    """w [e, k, n] quantized for a product that sums over `axis`."""
    axes, sharding = (1, 2) if quantizer.scope == "tensor" else (axis,), layer.sharding

    def step(w):
        absmax = reference.absolute_maximum(w, axes)
        absmax = sharding.maximum(absmax, *(sharding.w[axis] for axis in axes))
        return reference.quantize_by(w, absmax, quantizer.dtype)

    scale = Spec(() if i in axes else each for i, each in enumerate(sharding.w))
    return sharding.map_shards(step, (w,), (sharding.w,), quantized_specs(sharding.w, scale))


# --- the products -------------------------------------------------------------------------------------


def output(x: jax.Array | QTensor, w: Operand, group_sizes: jax.Array, layer: Layer) -> jax.Array:
    """``y = x w[expert of a row]``: [m, n] in the layer's `out_dtype`."""
    b, axis = _forward_weight(w, layer)
    return _multiply(x, b, group_sizes, None, axis=axis, forward=True, layer=layer)


def input_gradient(
    g: jax.Array | QTensor,
    w: Operand,
    group_sizes: jax.Array,
    layer: Layer,
    addend: jax.Array | None = None,
) -> jax.Array:
    """``dx = g w[expert of a row]T + addend``: [m, k] in the layer's dtype."""
    b, axis = _backward_weight(w, layer)
    return _multiply(g, b, group_sizes, addend, axis=axis, forward=False, layer=layer)


def _multiply(a, b, group_sizes, addend, *, axis: int, forward: bool, layer: Layer) -> jax.Array:
    """The forward product or the input gradient; `axis` is that of b which it is summed over."""
    sharding, transposed = layer.sharding, forward == (axis == 2)  # b is [e, n, k]
    (e, k, n), x, y = sharding.w, sharding.x, sharding.y
    a_spec, out_spec = (x, y) if forward else (y, x)
    options: dict[str, Any] = {"axis": axis}
    options["out_dtype"] = layer.out_dtype if forward else layer.dtype
    if not isinstance(a, QTensor):
        options["precision"] = layer.precision
    options["implementation"] = _implementation(a, layer)
    b_spec = _specs(b, Spec((e, n, k) if transposed else (e, k, n)))
    assert addend is None or sharding.mesh is None, "`gated_mlp` has no layout"

    def step(a, b, group_sizes, addend):
        b, sizes = sharding.gather(b, b_spec), sharding.own_rows(group_sizes, a)
        y = dispatch.run("ragged_matmul", a, b, sizes, addend, **options)
        return sharding.sum(y, a_spec[-1])

    specs = _specs(a, a_spec), b_spec, Spec(((),)), out_spec
    return sharding.map_shards(step, (a, b, group_sizes, addend), specs, out_spec)


def _specs(array: jax.Array | QTensor, spec: Spec) -> Any:
    return specs_of(array, spec) if isinstance(array, QTensor) else spec


def weight_gradients(
    x: jax.Array, gs: tuple[jax.Array, ...], group_sizes: jax.Array, layers: tuple[Layer, ...]
) -> tuple[jax.Array | None, ...]:
    """``xT g`` over the rows of each expert, for each g; None for a quantized weight.

    `layers` have one recipe, and weights of one shape. Where rotations do not pay, a recipe that quantizes
    this product computes it in the dtype of x.
    """
    if not any(layer.w_dtype for layer in layers):
        return (None,) * len(layers)
    sharding = layers[0].sharding

    def step(x, gs, group_sizes):
        dws = _sums_over_rows(x, gs, sharding.own_rows(group_sizes, x), layers)
        return tuple(
            None if dw is None else sharding.scatter_sum(dw).astype(layer.w_dtype)
            for dw, layer in zip(dws, layers)
        )

    gs = tuple(g.astype(x.dtype) for g in gs)
    specs = sharding.x, (sharding.y,) * len(gs), Spec(((),))
    out_specs = tuple(layer.w_dtype and sharding.w for layer in layers)
    return sharding.map_shards(step, (x, gs, group_sizes), specs, out_specs)


def _sums_over_rows(x, gs, group_sizes, layers: tuple[Layer, ...]) -> tuple:
    """The weight gradients of these rows, in the dtype in which devices add them."""
    sharding = layers[0].sharding
    sharded = sharding.sharded_axes(sharding.token_axes)
    reduce_dtype = sharding.reduce_dtype if sharded else None
    w_dtypes = [layer.w_dtype and (reduce_dtype or layer.w_dtype) for layer in layers]
    dtypes = {*w_dtypes} - {None}
    options: dict[str, Any] = {"implementation": _implementation(x, layers[0])}
    product, shape = layers[0].recipe.wgrad, (x.shape[1], gs[0].shape[1])
    if product is not None and auto.rotated_rows_pay(len(x), len(group_sizes), shape):
        lhs, rhs = product.lhs, product.rhs
        rotated: dict[str, Any] = {
            "dtypes": (lhs.dtype, rhs.dtype),
            "block": lhs.block,
            "rotation": lhs.rotation,
        }
        rotated["out_dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
        operation, arrays = "ragged_block_weight_gradient", (x, gs, group_sizes)
        # Triton's product of rotated rows takes as long as that of 16 bits.
        slow = layers[0].implementation is None and targets.platform() == "gpu"
        if not slow or dispatch.choose(operation, *arrays, **rotated, **options) == "mosaic_gpu":
            dws = dispatch.run(operation, *arrays, **rotated, **options)
            return tuple(dw.astype(of) if of else None for dw, of in zip(dws, w_dtypes))
    options["precision"] = layers[0].precision
    run = partial(dispatch.run, "ragged_weight_gradient", x, **options)
    return tuple(run(g, group_sizes, out_dtype=of) if of else None for g, of in zip(gs, w_dtypes))


def _implementation(a: jax.Array | QTensor, layer: Layer) -> str | None:
    """XLA multiplies float32, also if a layer names kernels for its quantized products."""
    if isinstance(a, QTensor) or a.dtype.itemsize == 2:
        return layer.implementation
    return "xla"


def exact_output(x: jax.Array, w: Any, group_sizes: jax.Array, layer: Layer) -> jax.Array:
    """y without quantization, which JAX differentiates."""
    w = as_array(Operand(transposed=w) if isinstance(w, QTensor) else Operand(w), layer.dtype)
    options: dict[str, Any] = {"out_dtype": layer.out_dtype, "precision": layer.precision}
    return reference.ragged_matmul(x, w, group_sizes, axis=1, **options)


# --- checks -------------------------------------------------------------------------------------------


def check(
    name: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    w: Any,
    group_sizes: jax.Array,
    recipe: str | Recipe,
) -> Recipe:
    """Returns the recipe of a layer of experts; warns if its products are not faster than those of 16 bits.

    Raises a ValueError if these are not arrays of such a layer; `name` is the function's.
    """
    check_shapes(name, x, w, group_sizes)
    check_group_sizes(x, group_sizes)
    e, *shape = weight_array(w).shape
    few_rows = ""
    if not isinstance(w, QTensor):
        few_rows = auto.few_rows(x.shape[0], e, w.dtype.itemsize)
    found = recipes.get(recipe, tuple(shape), few_rows=few_rows)
    auto.warn_if_slow(found.dtypes, few_rows=few_rows)
    check_recipe(name, found, (e, *shape))
    if isinstance(w, QTensor):
        check_quantized(w, found)
    return found


def check_shapes(
    name: str, x: jax.Array | jax.ShapeDtypeStruct, w: Any, group_sizes: jax.Array
) -> None:
    """Raises a ValueError if these are not arrays, or shapes or dtypes do not fit."""
    check_arrays(x=x, w=w, group_sizes=group_sizes)
    shape = weight_array(w).shape
    fit = x.ndim == 2 and len(shape) == 3 and x.shape[1] == shape[1]
    if not fit or group_sizes.shape != shape[:1]:
        raise ValueError(
            f"{name} needs x [m, k], w [e, k, n] and group_sizes [e], got x "
            f"{x.shape}, w {shape} and group_sizes {group_sizes.shape}: sort the rows of x by expert, and "
            "transpose w"
        )
    if not shape[0]:
        raise ValueError(f"{name} needs at least one expert, got w {shape}: pass w [e, k, n]")
    check_dtypes(x, w, None)


def check_group_sizes(x: jax.Array | jax.ShapeDtypeStruct, group_sizes: jax.Array) -> None:
    """Raises a ValueError if these are no numbers of rows; traced values are not read."""
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes must be integers, got {group_sizes.dtype}: pass numbers of rows"
        )
    if isinstance(group_sizes, jax.core.Tracer):
        return
    sizes = np.asarray(group_sizes, np.int64)
    if sizes.min(initial=0) < 0 or sizes.sum() > x.shape[0]:
        raise ValueError(
            f"group_sizes must be at least 0 and add up to at most the {x.shape[0]} rows of x, got "
            f"{sizes.tolist()}: count the rows of each expert"
        )


def check_recipe(name: str, recipe: Recipe, shape: tuple[int, ...]) -> None:
    """Raises a ValueError if experts with weights of this shape [e, k, n] cannot follow the recipe."""
    products = [product for product in (recipe.fwd, recipe.dgrad) if product is not None]
    plain = [
        (p.lhs.scope, p.lhs.rotation, p.outlier_threshold) for p in products if not p.rhs.is_static
    ]
    blocks = recipe.wgrad is None or recipe.wgrad.lhs.scope == "block"
    if not blocks or plain != [("row", 1, 0)] * len(products):
        raise ValueError(
            f"{name} needs a recipe that quantizes rows of x, without rotated features and outliers, and "
            f"computes the weight gradient in 16 bits or in blocks of tokens, got {recipe}: use "
            "'switchback', 'switchback_m', 'switchback_q', 'switchback_hadamard' or 'fp8_switchback'"
        )
    longest = max(shape[1:])
    if longest > LONGEST_INT8_SUM:
        raise ValueError(
            f"{name} adds up to {LONGEST_INT8_SUM} int8 products, got w {shape}: split w"
        )
