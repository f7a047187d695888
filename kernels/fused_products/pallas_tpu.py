"""Products fused with a row operation: a block of rows stays in VMEM from the operation to the product.

The weight stays there too, so that each array of rows is read and written once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor
from swjax.kernels.fused_products.reference import BACKWARD, FORWARD, Factors
from swjax.kernels.gelu import pallas_tpu as gelu
from swjax.kernels.pallas_tpu import rows
from swjax.kernels.products.reference import matmul


def fused_product(
    arrays: tuple[jax.Array, ...],
    w: QTensor,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    *,
    row_operation: str | None,
    settings: tuple[tuple[str, Any], ...] = (),
    axis: int,
    out_dtype: str,
) -> jax.Array:
    """`reference.fused_product`."""
    dtype, options = arrays[0].dtype, dict(settings)

    def block(arrays: Any, whole: Any) -> jax.Array:
        (arrays, addend), (w, bias) = arrays, whole
        if row_operation is None:
            (x,) = arrays
        elif row_operation == "gelu":
            x = rows.by_columns(partial(gelu.value, **options), *arrays)
        else:
            x = FORWARD[row_operation](*arrays, **options)[0]
        q = rows.quantize(rows.rounded(x, dtype))
        return matmul(q, w, bias, addend, out_dtype=out_dtype, contract=(-1, axis))

    return rows.over_rows(
        f"{row_operation or 'quantize'}_product", block, (arrays, addend), (w, bias)
    )


def fused_product_backward(
    *arrays: Any, row_operation: str, settings: tuple[tuple[str, Any], ...] = ()
) -> tuple[Any, ...]:
    """`reference.fused_product_backward`."""
    dtype, at = arrays[0].dtype, _position(arrays)
    g, w = arrays[at]
    others = (*arrays[:at], None, *arrays[at + 1 :])

    def block(arrays: Any, w: QTensor) -> tuple[Any, ...]:
        others, g = arrays
        product = matmul(rows.quantize(g), w, out_dtype=dtype.name)
        gradient = product.astype(jnp.float32)
        terms = (*others[:at], gradient, *others[at + 1 :])
        if row_operation == "gelu_backward":
            results = _gelu_backward(*terms, dtype=dtype, **dict(settings))
        else:
            results = BACKWARD[row_operation](*terms, **dict(settings))
        return jax.tree.map(lambda y: y.astype(dtype) if y.ndim > 1 else y, results)

    return rows.over_rows(
        row_operation.replace("backward", "product_backward"), block, (others, g), w
    )


def _gelu_backward(
    x: jax.Array,
    gradient: jax.Array,
    *,
    dtype: Any,
    approximate: bool,
    quantize_to: None,
    recompute: bool,
) -> tuple[jax.Array, None, jax.Array, jax.Array | None]:
    def of_columns(x: jax.Array, gradient: jax.Array) -> tuple[Any, ...]:
        dx = rows.rounded(gelu.vjp(x, gradient, approximate), dtype)
        return dx, None, jnp.sum(dx, axis=0), gelu.value(x, approximate) if recompute else None

    return rows.by_columns(of_columns, x, gradient)


def _position(arrays: tuple[Any, ...]) -> int:
    return next(i for i, a in enumerate(arrays) if isinstance(a, Factors))


def _why_not(
    arrays: Any, w: QTensor, bias: Any = None, addend: Any = None, **options: Any
) -> Unavailable | None:
    return _why_not_operation(options) or rows.why_not((arrays, addend), (w, bias))


def _why_not_backward(*arrays: Any, **options: Any) -> Unavailable | None:
    at = _position(arrays)
    others = (*arrays[:at], *arrays[at + 1 :])
    return _why_not_operation(options) or rows.why_not((others, arrays[at].g), arrays[at].w)


def _why_not_operation(options: dict[str, Any]) -> Unavailable | None:
    settings = dict(options["settings"])
    if "gated" in str(options["row_operation"]) and settings["activation"] == "gelu":
        return Unavailable("has no exact GELU as a gate: use 'xla'")
    if settings.get("quantize_to"):
        return Unavailable("returns gradients in high precision: use 'xla'")
    return None


WHY_NOT = {"fused_product": _why_not, "fused_product_backward": _why_not_backward}
