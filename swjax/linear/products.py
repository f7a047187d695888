"""The three products of linear layers that share an input. Each is a step in a `jax.shard_map`.

The recipe decides which form of its operands a product reads; `swjax.linear.sharding` says which collectives
follow it. Products and quantizers are separate steps, so that `jax.checkpoint` can save the arrays between
them.
"""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swjax.kernels import dispatch, reference
from swjax.kernels.block_formats.reference import Blocks, estimator
from swjax.kernels.formats import INVERSE, SMALLEST_ABSMAX
from swjax.kernels.reference import QTensor
from swjax.linear.gradient_sums import EIGHT_BITS
from swjax.linear.layer import (
    Layer,
    Operand,
    add,
    as_array,
    as_rows,
    quantize_blocks_both_ways,
    quantize_both_ways,
    read,
    specs_of_operand,
    split_outliers,
    stored,
)
from swjax.linear.layouts import Spec
from swjax.recipes import LONGEST_INT8_SUM, Product

Layers = tuple[Layer, ...]  # one per weight; the settings of the input are those of the first


class RowScales(NamedTuple):
    """The scales [..., 1] of the rows of quantized x and of each g; None for one that is not quantized so."""

    x: jax.Array | None
    gs: tuple[jax.Array | None, ...]


def output(
    x: Operand, w: Operand, bias: jax.Array | None, addend: jax.Array | None, layer: Layer
) -> jax.Array:
    """y = x w + bias + addend, all-reduced where w's rows k are sharded."""
    fwd, sharding = layer.recipe.fwd, layer.sharding
    later = addend is not None and bool(sharding.sharded_axes(sharding.k))  # than the all-reduce

    def multiply(product: Product | None, x: Operand, out_dtype: str) -> tuple[jax.Array]:
        lhs, rhs = (product.lhs, product.rhs) if product else (None, None)
        x = read(lhs, x, sharding.x, -1, layer)
        weight = read(rhs, w, sharding.w, 0, layer)
        w_specs = specs_of_operand(weight, sharding.w)

        def step(x, w, bias, addend):
            w = sharding.gather(w, w_specs)
            bias = None if bias is None else sharding.once(bias, sharding.k)
            terms = bias, None if later else addend
            y = _product(x, w, *terms, axes=(-1, 0), layer=layer, out_dtype=out_dtype)
            y = sharding.sum(y, sharding.k)
            return add(y, addend) if later else y

        terms = (bias, addend) if product == fwd else (None, None)
        x_specs = specs_of_operand(x, sharding.x)
        specs = x_specs, w_specs, Spec((sharding.n,)), sharding.y
        return (sharding.map_shards(step, (x, weight, *terms), specs, sharding.y),)

    parts = _parts(fwd, x, sharding.x, layer.out_dtype, layer)
    return _sum_of_parts([multiply(*part) for part in parts], layer.out_dtype)[0]


def input_gradients(
    gs: tuple[Operand, ...], ws: tuple[Operand, ...], layers: Layers
) -> tuple[jax.Array, ...]:
    """Arrays whose sum is the gradient of the layers' input, dx = g wT of each layer.

    Returns one gradient per layer, or a single gradient that is already their sum: if a kernel adds the
    products, or if n is sharded, so that one all-reduce suffices.
    """
    first, dgrad = layers[0], layers[0].recipe.dgrad
    kinds = {(layer.sharding, layer.recipe, layer.rotated_weight) for layer in layers}
    if len(kinds) == 1 and not (dgrad and dgrad.has_outliers):
        return _multiply_input_gradients(dgrad, gs, first.dtype, ws=ws, layer=first)

    def of_layer(g, w, layer):
        parts = _parts(layer.recipe.dgrad, g, layer.sharding.y, layer.dtype, layer)
        dxs = [
            _multiply_input_gradients(product, (part,), dtype, ws=(w,), layer=layer)
            for product, part, dtype in parts
        ]
        return _sum_of_parts(dxs, layer.dtype)[0]

    return tuple(map(of_layer, gs, ws, layers))


def read_gradient(g: Operand, layer: Layer) -> Operand:
    """g with the quantized form that the input gradient reads, if rows share its scales.

    If one kernel makes the forms of both products, in blocks or with one quantizer's values, g has both.
    """
    dgrad, wgrad = layer.recipe.dgrad, layer.recipe.wgrad
    if dgrad is None or dgrad.outlier_threshold:
        return g
    g_spec = layer.sharding.y
    if wgrad is not None and dgrad.in_blocks and layer.w_dtype:
        assert g.array is not None, "every gradient is known in high precision"
        both = quantize_blocks_both_ways((dgrad.lhs, wgrad.rhs), g.array, g_spec, layer)
        return g if both is None else g._replace(quantized=both[0], transposed=both[1])
    if layer.recipe.quantizes_gradient_once and layer.reads_last_axis and layer.w_dtype:
        assert g.array is not None, "every gradient is known in high precision"
        q, transposed = quantize_both_ways(dgrad.lhs, g.array, g_spec, layer)
        return g._replace(quantized=q, transposed=transposed)
    if dgrad.lhs.scope != "row":
        return g
    return g._replace(quantized=read(dgrad.lhs, g, layer.sharding.y, -1, layer).quantized)


def _multiply_input_gradients(product: Product | None, gs, out_dtype: str, *, ws, layer: Layer):
    sharding = layer.sharding
    lhs, rhs = (product.lhs, product.rhs) if product else (None, None)
    gs = tuple(read(lhs, g, sharding.y, -1, layer) for g in gs)
    ws = tuple(read(rhs, w, sharding.w, -1, layer) for w in ws)
    g_specs = tuple(specs_of_operand(g, sharding.y) for g in gs)
    w_specs = tuple(specs_of_operand(w, sharding.w) for w in ws)

    def step(gs, ws):
        ws = sharding.gather(ws, w_specs)
        options: dict[str, Any] = {"layer": layer, "out_dtype": out_dtype}
        total = _sum_in_kernel(gs, ws, **options) if len(gs) > 1 else None
        if total is not None:
            dxs: tuple[jax.Array, ...] = (total,)
        else:
            dxs = tuple(_product(g, w, axes=(-1, -1), **options) for g, w in zip(gs, ws))
        if len(dxs) > 1 and sharding.sharded_axes(sharding.n):
            dxs = (add(*dxs),)
        dxs = sharding.sum(dxs, sharding.n)
        # g (H w)T = (g wT) HT
        rotation = layer.rotated_weight
        return tuple(reference.rotate_features(dx, rotation, inverse=True) for dx in dxs)

    return sharding.map_shards(step, (gs, ws), (g_specs, w_specs), sharding.x)


def weight_gradients(
    x: Operand, gs: tuple[Operand, ...], layers: Layers, scales: RowScales | None = None
) -> tuple[jax.Array | None, ...]:
    """dw = xT g of each layer in its `w_dtype`; None for a quantized weight.

    They are reduce-scattered over the axes that shard tokens and w, and all-reduced over the others. In an
    8-bit product with a scale for each block of tokens, x counts as zero where all gs are, and g where x is.
    """
    first, dws = layers[0], dict.fromkeys(range(len(layers)))
    kinds = dict.fromkeys((layer.sharding, layer.w_dtype) for layer in layers if layer.w_dtype)
    for sharding, dtype in kinds:
        alike = [i for i in dws if (layers[i].sharding, layers[i].w_dtype) == (sharding, dtype)]
        layer = layers[alike[0]]
        of_these = scales and RowScales(scales.x, tuple(scales.gs[i] for i in alike))
        present = of_these and _present(of_these, layer)
        options: dict[str, Any] = {"gs": [gs[i] for i in alike], "present": present, "layer": layer}
        parts = _parts(first.recipe.wgrad, x, sharding.x, dtype, layer)
        found = [_multiply_weight_gradients(*part, **options) for part in parts]
        dws |= zip(alike, _sum_of_parts(found, dtype))
    return tuple(dws.values())


def _present(scales: RowScales, layer: Layer) -> jax.Array | None:
    """[..., 1] in the dtype of x: 0 for tokens whose x or gs are zero, 1 for others; None: not known.

    A row of zeros has the smallest scale. So have rows with magnitudes up to 2**-92, which the scales of
    other products round away as well. A token with NaN or an infinity is present.
    """
    recipe, known = layer.recipe, [scale for scale in scales.gs if scale is not None]
    if recipe.wgrad is None or recipe.wgrad.lhs.scope != "block":
        return None
    if scales.x is None or len(known) < len(scales.gs):
        return None
    assert recipe.fwd is not None and recipe.dgrad is not None, "quantized arrays have scales"
    smallest = lambda product: SMALLEST_ABSMAX * INVERSE[product.lhs.dtype]
    g = functools.reduce(jnp.maximum, known)  # a NaN stays
    x_is_zero, g_is_zero = scales.x <= smallest(recipe.fwd), g <= smallest(recipe.dgrad)
    absent = (x_is_zero | g_is_zero) & jnp.isfinite(scales.x) & jnp.isfinite(g)
    return (~absent).astype(layer.dtype)


def _multiply_weight_gradients(
    product: Product | None, x, out_dtype: str, *, gs, present: jax.Array | None, layer: Layer
):
    """dw = xT g of each g. With blocks, each device quantizes its own tokens."""
    sharding = layer.sharding
    block_product = product if product is not None and product.lhs.scope == "block" else None
    lhs, rhs = (product.lhs, product.rhs) if product and not block_product else (None, None)
    x = read(lhs, x, sharding.x, 0, layer)
    gs = tuple(read(rhs, g, sharding.y, 0, layer) for g in gs)
    dtype = out_dtype
    if sharding.sharded_axes(sharding.token_axes) and sharding.reduce_dtype:
        in_8_bits = sharding.reduce_dtype in EIGHT_BITS  # quantized from 16 bits
        dtype = "bfloat16" if in_8_bits else sharding.reduce_dtype

    def step(x, gs, present):
        dws = _sums_over_tokens(x, gs, present, block_product, layer, dtype)
        return tuple(sharding.scatter_sum(dw).astype(out_dtype) for dw in dws)

    g_specs = tuple(specs_of_operand(g, sharding.y) for g in gs)
    specs = specs_of_operand(x, sharding.x), g_specs, Spec((*sharding.tokens, ()))
    return sharding.map_shards(step, (x, gs, present), specs, sharding.w)


def estimated(dw: jax.Array | None, w: Operand, layer: Layer) -> jax.Array | None:
    """dw times the estimated derivative of rounding w, if the recipe has an estimator."""
    power, fwd, spec = layer.recipe.estimator, layer.recipe.fwd, layer.sharding.w
    if dw is None or not power or fwd is None:
        return dw

    def step(dw, w):
        slope = estimator(w, fwd.rhs.dtype, power)
        return (dw.astype("float32") * slope).astype(dw.dtype)

    return layer.sharding.map_shards(step, (dw, w.array), (spec, spec), spec)


def _parts(
    product: Product | None, a: Operand, spec: Spec, out_dtype: str, layer: Layer
) -> tuple[tuple[Product | None, Operand, str], ...]:
    """The products whose sum is the product of `a`: (product, its operand, dtype of its result) of each.

    With outliers there are two: a quantized product without them, and an exact product of the outliers, whose
    Product is None.
    """
    if product is None or not product.has_outliers:
        return ((product, a, out_dtype),)
    rest, outliers = split_outliers(as_array(a, layer.dtype), product, spec, layer)
    return (product, Operand(rest), "float32"), (None, Operand(outliers), "float32")


def _sum_of_parts(
    results: Sequence[tuple[jax.Array, ...]], out_dtype: str
) -> tuple[jax.Array, ...]:
    """The sum of the results of `_parts`, each a tuple of arrays."""
    if len(results) == 1:
        return results[0]
    return tuple((y + exact).astype(out_dtype) for y, exact in zip(*results))


# --- on one device ------------------------------------------------------------------------------------


def _product(
    a: Operand,
    b: Operand,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    *,
    axes: tuple[int, int],
    layer: Layer,
    out_dtype: str,
) -> jax.Array:
    """``a b + bias + addend``, summed over `axes` of the two matrices; both are quantized, or neither."""
    (lhs, axis_a), (rhs, axis_b) = stored(a, axes[0]), stored(b, axes[1])
    options: dict[str, Any]
    if isinstance(lhs, Blocks):
        options = {"out_dtype": out_dtype, "implementation": layer.implementation}
        return dispatch.run("block_matmul", lhs, rhs, bias, addend, **options)
    if isinstance(lhs, QTensor):
        options = {"contract": (axis_a, axis_b)}
        if lhs.values.dtype.itemsize > 1:  # of a block format, which no kernel multiplies
            return reference.matmul(lhs, rhs, bias, addend, out_dtype=out_dtype, **options)
        options["implementation"] = layer.implementation
        if not _sum_fits_int32(lhs, axis_a):
            return _long_product(lhs, rhs, bias, addend, options).astype(out_dtype)
        return dispatch.run("matmul", lhs, rhs, bias, addend, out_dtype=out_dtype, **options)
    contract = (axis_a % lhs.ndim,), (axis_b % rhs.ndim,)
    y = reference.dot(lhs, rhs, contract, bias, out_dtype=out_dtype, precision=layer.precision)
    if addend is None:
        return y
    # XLA for GPUs adds an array of the product's dtype in the product's epilogue.
    return y + addend if addend.dtype == y.dtype else add(y, addend)


def _long_product(a: QTensor, b: QTensor, bias, addend, options: dict[str, Any]) -> jax.Array:
    """Splits an int8 sum that could overflow int32, and adds the parts in float32."""
    axes = options["contract"]
    length = a.values.shape[axes[0]]

    def part(start: int) -> jax.Array:
        stop = min(start + LONGEST_INT8_SUM, length)
        operands = (
            q._replace(values=lax.slice_in_dim(q.values, start, stop, axis=axis))
            for q, axis in zip((a, b), axes)
        )
        terms = (bias, addend) if start == 0 else ()
        return dispatch.run("matmul", *operands, *terms, out_dtype="float32", **options)

    others = range(LONGEST_INT8_SUM, length, LONGEST_INT8_SUM)
    return sum(map(part, others), part(0))


def _sum_in_kernel(gs, ws, *, layer: Layer, out_dtype: str) -> jax.Array | None:
    """The sum of the products ``g wT`` of all pairs, or None if no kernel computes it."""
    pairs = [(stored(g, -1), stored(w, -1)) for g, w in zip(gs, ws)]
    (a, axes_of_a), (b, axes_of_b) = (zip(*side) for side in zip(*pairs))
    options: dict[str, Any] = {"out_dtype": out_dtype, "contract": (axes_of_a[0], axes_of_b[0])}
    options["implementation"] = layer.implementation
    in_8_bits = all(isinstance(q, QTensor) and q.values.dtype.itemsize == 1 for q in a)
    fit = in_8_bits and len({*axes_of_a}) == len({*axes_of_b}) == 1
    fit = fit and all(_sum_fits_int32(q, axes_of_a[0]) for q in a)
    if fit and dispatch.has_kernel("matmul_sum", a, b, **options):
        return dispatch.run("matmul_sum", a, b, **options)
    return None


def _sum_fits_int32(a: QTensor, axis: int) -> bool:
    """Whether int32 holds every sum of products of int8 values along an axis; fp8 is summed in float32."""
    return a.values.dtype != jnp.int8 or a.values.shape[axis] <= LONGEST_INT8_SUM


def _sums_over_tokens(
    x: Operand,
    gs: tuple[Operand, ...],
    present: jax.Array | None,
    block_product: Product | None,
    layer: Layer,
    out_dtype: str,
) -> tuple[jax.Array, ...]:
    """``xT g`` for each g, summed over all tokens; `block_product` quantizes here, in blocks of tokens."""
    if x.array is None:
        multiply = partial(_product, x, axes=(0, 0), layer=layer, out_dtype=out_dtype)
        return tuple(map(multiply, gs))
    operation, options = "weight_gradient", dict[str, Any](out_dtype=out_dtype)
    if block_product is None:
        options["precision"] = layer.precision
    else:
        operation = "block_weight_gradient"
        lhs, rhs = block_product.lhs, block_product.rhs
        options |= {"dtypes": (lhs.dtype, rhs.dtype), "block": lhs.block, "rotation": lhs.rotation}
    options["implementation"] = layer.implementation
    rows, of_gs = as_rows(x.array), tuple(as_rows(g.array) for g in gs if g.array is not None)
    factors = () if present is None else (present.reshape(-1),)
    group = f"{operation}_group"
    if len(gs) > 1 and dispatch.has_kernel(group, rows, of_gs, *factors, **options):
        return dispatch.run(group, rows, of_gs, *factors, **options)
    return tuple(dispatch.run(operation, rows, g, *factors, **options) for g in of_gs)
