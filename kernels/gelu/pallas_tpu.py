"""GELU of rows."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from swjax.kernels.formats import QTensor
from swjax.kernels.gelu import reference
from swjax.kernels.pallas_tpu import rows


def _normal_tail(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """P(X > |x|) for a standard normal X, with relative error 1e-6, and exp(-x**2 / 2)."""
    t = 1.0 / (jnp.abs(x) * (0.38 * math.sqrt(0.5)) + 1.0)
    p = jnp.full_like(t, reference.TAIL[0])
    for coefficient in reference.TAIL[1:]:
        p = p * t + coefficient
    e = jnp.exp2(x * x * (-0.5 / math.log(2)))
    return t * p * e, e


def value(x: jax.Array, approximate: bool) -> jax.Array:
    """GELU of a block in float32."""
    if approximate:
        return jax.nn.gelu(x, approximate=True)
    return jnp.maximum(x, 0.0) - jnp.abs(x) * _normal_tail(x)[0]


def vjp(x: jax.Array, gradient: jax.Array, approximate: bool) -> jax.Array:
    """The gradient times the derivative of GELU at a block x."""
    if approximate:
        return reference.gelu_vjp(x, gradient, approximate)
    tail, e = _normal_tail(x)
    slope = jnp.where(x < 0, tail, 1.0 - tail) + x * e * (1 / math.sqrt(2 * math.pi))
    return gradient * slope


def gelu(
    x: jax.Array,
    *,
    approximate: bool = False,
    quantize_to: str | None = None,
    high_precision: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.gelu`."""
    function = partial(value, approximate=approximate)
    return rows.quantizing("gelu", function, (x,), quantize_to, high_precision, of_elements=True)


WHY_NOT = {"gelu": rows.why_not_quantizing}
