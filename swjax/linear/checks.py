"""Checks of arguments: each error says in one line what must hold, what was given and what to do."""

import jax
import jax.numpy as jnp

from swjax import recipes
from swjax.kernels.reference import QTensor
from swjax.recipes import Quantizer, Recipe


def check_operands(x, w, bias, recipe):
    arrays = {"x": x, "w": w, "bias": bias}
    if isinstance(w, QTensor):
        check_quantized(w, recipe)
        del arrays["w"]
    w = as_array(w)
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


def check_quantized(w: QTensor, recipe):
    quantizer = weight_quantizer(recipe)
    columns = 1 if quantizer.scope == "tensor" else w.values.shape[0]
    if w.values.dtype != quantizer.dtype or w.scale.shape != (columns, 1):
        raise ValueError(
            f"a quantized w must be {quantizer.dtype} [n, k] with a scale {(columns, 1)} for this recipe, "
            f"got {w.values.dtype} {w.values.shape} and {w.scale.shape}: "
            f"make it by swjax.quantize_weight(w, recipe)"
        )


def weight_quantizer(recipe: str | Recipe) -> Quantizer:
    """How the forward product quantizes w, where nothing else is needed of w."""
    fwd = recipes.get(recipe).fwd
    if fwd is None or fwd.outlier_threshold:
        needs = "multiplies w as it is" if fwd is None else "multiplies outliers with w as it is"
        raise ValueError(f"this recipe {needs}, and has no quantized w: pass w itself")
    return fwd.rhs


def as_array(w: jax.Array | QTensor) -> jax.Array:
    """[k, n], of the shape and the sharding of a weight."""
    return w.values.T if isinstance(w, QTensor) else w
