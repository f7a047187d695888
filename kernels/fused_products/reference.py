"""The specification of products that are fused with a row operation and a quantizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from swjax.kernels.formats import QTensor
from swjax.kernels.gated.reference import gated, gated_backward
from swjax.kernels.gelu.reference import gelu, gelu_backward
from swjax.kernels.norms.reference import (
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from swjax.kernels.products.reference import matmul
from swjax.kernels.quantizers.reference import quantize

FORWARD: dict[str, Callable] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "gelu": gelu,
    "gated": gated,
}
BACKWARD: dict[str, Callable] = {
    "layer_norm_backward": layer_norm_backward,
    "rms_norm_backward": rms_norm_backward,
    "gelu_backward": gelu_backward,
    "gated_backward": gated_backward,
}


class Factors(NamedTuple):
    """A gradient as the factors of a product, ``int8(g) wT``.

    Attributes:
      g: [..., n] bfloat16 or float32.
      w: the quantized weight [k, n], with one scale.
    """

    g: jax.Array
    w: QTensor


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
    """Quantizes the result of a row operation to int8, and multiplies it by w.

    Args:
      arrays: the arguments of the row operation: [..., k], and vectors [k].
      w: a quantized matrix with one scale, [k, n] if `axis` is 0, or [n, k] if it is -1.
      bias, addend, out_dtype: see `matmul`.
      row_operation: a key of `FORWARD`; None quantizes the only array.
      settings: (name, value) of its other arguments.

    Returns:
      [..., n] in `out_dtype`.

    >>> import jax.numpy as jnp
    >>> w = QTensor(jnp.array([[100], [50]], jnp.int8), jnp.ones((1, 1)))
    >>> x = jnp.array([[-127.0, 127.0]])
    >>> fused_product((x,), w, row_operation=None, axis=0, out_dtype="float32").tolist()
    [[-6350.0]]
    """
    if row_operation is None:
        q = quantize(arrays[0])
    else:
        options = dict(settings, quantize_to="int8", high_precision=False)
        q = FORWARD[row_operation](*arrays, **options)[1]
    return matmul(q, w, bias, addend, out_dtype=out_dtype, contract=(-1, axis))


def fused_product_backward(
    *arrays: Any, row_operation: str, settings: tuple[tuple[str, Any], ...] = ()
) -> tuple[Any, ...]:
    """Computes the gradients of a row operation from the factors of the gradient of its result.

    Args:
      *arrays: the arguments of the row operation; its gradient is a `Factors`, whose product is rounded to
        the dtype of the first array.
      row_operation: a key of `BACKWARD`.
      settings: (name, value) of its other arguments.

    Returns:
      The results of the row operation.

    >>> import jax.numpy as jnp
    >>> w = QTensor(jnp.array([[1]], jnp.int8), jnp.ones((1, 1)))
    >>> factors, x = Factors(jnp.array([[127.0]]), w), jnp.array([[100.0]])
    >>> fused_product_backward(x, factors, row_operation="gelu_backward")[0].tolist()
    [[127.0]]
    """
    dtype = arrays[0].dtype.name
    given = (
        matmul(quantize(a.g), a.w, out_dtype=dtype) if isinstance(a, Factors) else a for a in arrays
    )
    return BACKWARD[row_operation](*given, **dict(settings))
