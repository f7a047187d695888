"""Layers on TPUs whose prologue, quantizer and product are one kernel; backward alike.

XLA for TPUs writes a quantized array to memory, and reads it for the product. These kernels write neither it
nor the prologue's output. They run where every device has whole rows of x, and the recipe needs no quantized
array elsewhere; see `swjax.kernels.fused_products` for the shapes.
"""

from collections.abc import Callable
from typing import Any

import jax

from swjax.kernels import dispatch, targets
from swjax.kernels.fused_products.reference import Factors
from swjax.linear.layer import Layer, Operand, add, read, specs_of_operand, stored
from swjax.linear.layouts import Axes, Spec
from swjax.linear.prologues import (
    Gated,
    Prologue,
    PrologueGradients,
    RowOperation,
    apply,
    apply_backward,
    input_spec,
)
from swjax.recipes import Product, Quantizer

_INT8 = Product(Quantizer("int8", "row"), Quantizer("int8", "tensor"))


def output(
    x: Any,
    prologue: Prologue | Gated | None,
    w: Operand,
    bias: jax.Array | None,
    addend: jax.Array | None,
    layer: Layer,
) -> jax.Array | None:
    """y = prologue(x) w + bias + addend, or None if no kernel computes it."""
    sharding = layer.sharding
    if not _may_run(layer, layer.recipe.fwd, sharding.k):
        return None
    spec = input_spec(prologue, layer)

    def step(prologue, x, w, bias, addend):
        operation = RowOperation(None, (x,), {}) if prologue is None else prologue.operation(x)
        return _product(operation, w, bias, addend, axis=0, out_dtype=layer.out_dtype, layer=layer)

    weight = read(_INT8.rhs, w, sharding.w, 0, layer)
    specs = Spec(), spec, specs_of_operand(weight, sharding.w), Spec((sharding.n,)), sharding.y
    return _run(step, (prologue, x, weight, bias, addend), specs, sharding.y, layer)


def input_gradient(
    g: Operand,
    w: Operand,
    x: Any,
    prologue: Prologue | Gated | None,
    residual_gradient: jax.Array | None,
    layer: Layer,
    *,
    recompute: bool,
) -> PrologueGradients | None:
    """The gradients of x, the input of a layer or of its prologue, or None if no kernel computes them."""
    sharding = layer.sharding
    whole = (sharding.n, sharding.k) if prologue and prologue.whole_rows else (sharding.n,)
    if g.array is None or not _may_run(layer, layer.recipe.dgrad, *whole):
        return None
    weight = read(_INT8.rhs, w, sharding.w, -1, layer)
    if prologue is None:

        def step(g, w):
            operation = RowOperation(None, (g,), {})
            return _product(operation, w, axis=-1, out_dtype=layer.dtype, layer=layer)

        specs = sharding.y, specs_of_operand(weight, sharding.w)
        dx = _run(step, (g.array, weight), specs, sharding.x, layer)
        if dx is None:
            return None
        return PrologueGradients((Operand(add(dx, residual_gradient)),), None, None)
    if weight.quantized is None:
        return None

    in_kernel = recompute and prologue.whole_rows

    def backward(prologue, x, factors, residual_gradient):
        return apply_backward(
            prologue, x, factors, residual_gradient, layer, quantize_to=None, recompute=in_kernel
        )

    factors = Factors(g.array, weight.quantized)
    found = _if_kernel(backward, prologue, x, factors, residual_gradient)
    if found is None or recompute == in_kernel:
        return found
    # XLA applies an operation on elements where the weight gradient reads them.
    return found._replace(recomputed=apply(prologue, x, layer, quantize_to=None)[0])


def _may_run(layer: Layer, product: Product | None, *whole: Axes) -> bool:
    """Whether the layer allows a kernel, for which the given dimensions must not be sharded."""
    recipe, sharding = layer.recipe, layer.sharding
    if targets.platform(sharding.mesh) != "tpu" or layer.implementation is not None:
        return False
    needs_arrays = recipe.save_quantized or recipe.wgrad is not None
    plain = product == _INT8 and layer.rotated_weight == 1
    return plain and not needs_arrays and not sharding.sharded_axes(*whole)


def _product(
    operation: RowOperation, w: Operand, *terms: Any, axis: int, out_dtype: str, layer: Layer
):
    weight = layer.sharding.gather(w, specs_of_operand(w, layer.sharding.w))
    q, along = stored(weight, axis)
    return dispatch.run(
        "fused_product",
        operation.arrays,
        q,
        *terms,
        row_operation=operation.name,
        settings=tuple(operation.settings.items()),
        axis=along,
        out_dtype=out_dtype,
    )


def _run(step: Callable, arrays: tuple, in_specs: tuple, out_spec: Spec, layer: Layer) -> Any:
    return _if_kernel(
        lambda *arrays: layer.sharding.map_shards(step, arrays, in_specs, out_spec), *arrays
    )


def _if_kernel(function: Callable, *arrays: Any) -> Any:
    """The function's result if it calls a kernel for TPUs, or None."""
    with dispatch.record() as calls:
        jax.eval_shape(function, *arrays)
    return function(*arrays) if any(name == "pallas_tpu" for _, name in calls) else None
