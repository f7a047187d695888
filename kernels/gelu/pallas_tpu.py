"""GELU of rows. Pallas has no complementary error function, so the exact form has its own."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from swjax.kernels.formats import QTensor
from swjax.kernels.gelu import reference
from swjax.kernels.pallas_tpu import rows

# erfcx(z) / 2 as a polynomial in t = 1 / (1 + 0.38 z), a minimax fit, as in the Triton kernel.
_TAIL = (
    -0.06268340327314895,
    0.16792059162792555,
    -0.034805477355772395,
    0.12379693751587756,
    0.09034876746578992,
    0.10827743860128841,
    0.10714462882421476,
)


def _normal_tail(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """P(X > |x|) for a standard normal X, with relative error 1e-6, and exp(-x**2 / 2)."""
    t = 1.0 / (jnp.abs(x) * (0.38 * math.sqrt(0.5)) + 1.0)
    p = jnp.full_like(t, _TAIL[0])
    for coefficient in _TAIL[1:]:
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
