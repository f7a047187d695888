"""Layers without quantization, as plain products that JAX differentiates in every mode and to any order."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swjax.kernels import reference
from swjax.kernels.reference import QTensor
from swjax.linear.checks import PLAIN_DTYPES
from swjax.linear.products import Settings

_DTYPES = (jnp.float32, *PLAIN_DTYPES)


def is_plain(
    x: jax.Array,
    w: jax.Array | QTensor,
    bias: jax.Array | None,
    layer: Settings,
    addend: jax.Array | None,
) -> bool:
    """Whether JAX's derivatives of the plain product equal those of `swjax.linear.vjp`.

    This holds if nothing is quantized or sharded by a plan, and all arrays have one dtype with at least 32
    bits. For 16-bit arrays, `swjax.linear.vjp` sums gradients in float32, and may compute the weight gradient
    in a kernel.
    """
    recipe = layer.recipe
    quantizes = any((recipe.fwd, recipe.dgrad, recipe.wgrad))
    if isinstance(w, QTensor) or quantizes or layer.plan.mesh is not None:
        return False
    dtypes = {jnp.dtype(layer.out_dtype), *(a.dtype for a in (x, w, bias, addend) if a is not None)}
    return len(dtypes) == 1 and x.dtype in _DTYPES


def plain_weight(w: jax.Array | QTensor, x: jax.Array) -> jax.Array | QTensor:
    """The weight of a layer that casts its parameters to float64 or complex inputs, as Flax's layers do."""
    if isinstance(w, QTensor) or x.dtype not in PLAIN_DTYPES:
        return w
    return w.astype(x.dtype)


def plain_output(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    addend: jax.Array | None,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """``x w + bias + addend`` for x [..., k] and w [k, n], in their dtype."""
    contract = ((x.ndim - 1,), (0,))
    y = reference.dot(x, w, contract, bias, out_dtype=x.dtype.name, precision=precision)
    return checkpoint_name(y if addend is None else y + addend, "swjax_y")
