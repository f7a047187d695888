"""The specification of a gated activation, forward and backward, fused with the quantizers of its results."""

from collections.abc import Callable
from functools import partial

import jax

from swjax.kernels.formats import QTensor, to_float32
from swjax.kernels.gelu.reference import gelu_vjp
from swjax.kernels.quantizers.reference import quantized_output

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated(
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str = "silu",
    quantize_to: str | None = None,
    high_precision: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """``activation(gate) up``, in fp32, rounded once to the dtype of gate.

    Args:
      gate, up: [..., n] float16, bfloat16 or float32, of one dtype.
      activation: "silu", "gelu" (the exact form) or "gelu_tanh".
      quantize_to, high_precision: see `layer_norm`.

    Returns:
      (result or None, quantized result or None).

    >>> import jax.numpy as jnp
    >>> gated(jnp.array([[0.0, 100.0]]), jnp.array([[3.0, 2.0]]))[0].tolist()
    [[0.0, 200.0]]
    """
    h = (ACTIVATIONS[activation](to_float32(gate)) * to_float32(up)).astype(gate.dtype)
    return quantized_output(h, quantize_to, high_precision)


def gated_backward(
    gate: jax.Array,
    up: jax.Array,
    gradient: jax.Array,
    *,
    activation: str = "silu",
    quantize_to: str | None = None,
    recompute: bool = False,
) -> tuple[jax.Array, jax.Array, QTensor | None, QTensor | None, jax.Array | None]:
    """Computes the gradients of `gated` from its inputs, and quantizes them, in one pass.

    Args:
      gate, up, activation: as in the forward pass.
      gradient: [..., n], gradient of the result.
      quantize_to: dtype of the row-wise quantized gradients; None does not quantize.
      recompute: whether to also return the recomputed result of `gated`.

    Returns:
      The gradients of gate and up, [..., n] in their dtype; the quantized gradients of gate and up, each with
      its own scales, or None and None; the recomputed result of `gated`, or None.

    >>> import jax.numpy as jnp
    >>> dgate, dup, *_ = gated_backward(*(jnp.array([[x]]) for x in (0.0, 4.0, 3.0)))
    >>> dgate.tolist(), dup.tolist()
    ([[6.0]], [[0.0]])
    """
    h = gated(gate, up, activation=activation)[0] if recompute else None
    x, exact = to_float32(gate), to_float32(gradient)
    dup = (exact * ACTIVATIONS[activation](x)).astype(up.dtype)
    along = exact * to_float32(up)
    if activation == "silu":
        _, vjp = jax.vjp(jax.nn.silu, x)
        (dgate,) = vjp(along)
    else:
        dgate = gelu_vjp(x, along, activation == "gelu_tanh")
    dgate = dgate.astype(gate.dtype)
    q = [quantized_output(d, quantize_to, False)[1] for d in (dgate, dup)]
    return dgate, dup, q[0], q[1], h
