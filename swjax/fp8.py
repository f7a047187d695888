"""A simulated fp8 cast: rounds to the exact values of an fp8 format, in the caller's dtype."""

from functools import partial

import jax
import jax.numpy as jnp

from swjax.kernels.reference import LARGEST, round_to_fp8

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
FORMATS = ("float8_e4m3fn", "float8_e5m2")


def cast(x: jax.Array, fmt: str = "float8_e4m3fn", *, saturate: bool = True) -> jax.Array:
    """Rounds `x` to the nearest value of an OCP fp8 format, ties to even, in the dtype of `x`.

    The function does not scale; see `swjax.quantize` for that. The result is bit-exact against `ml_dtypes`
    for every float16 and bfloat16 input. The gradient passes straight through.

    Args:
      x: [...] float16, bfloat16 or float32.
      fmt: "float8_e4m3fn" (largest value 448, no infinity) or "float8_e5m2" (largest value 57344).
      saturate: whether values beyond the largest, infinity included, become the largest. If not, they
        become NaN in e4m3fn and infinity in e5m2. NaN stays NaN.

    Returns:
      [...] in the dtype of `x`.

    Raises:
      ValueError: `fmt` is not an fp8 format, or x has another dtype: float64 would be rounded twice.

    >>> cast(jnp.array([0.3, 100.0, 1000.0])).tolist()
    [0.3125, 96.0, 448.0]

    References:
      Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)", 2023.
    """
    if fmt not in FORMATS:
        raise ValueError(f"fmt must be one of {', '.join(FORMATS)}, got {fmt!r}")
    x = jnp.asarray(x)
    if x.dtype not in _DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, got {x.dtype}: cast it first")
    return _cast(x, fmt, saturate)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _cast(x, fmt, saturate):
    rounded = round_to_fp8(x.astype(jnp.float32), fmt)
    largest = LARGEST[fmt]
    if saturate:
        return jnp.clip(rounded, -largest, largest).astype(x.dtype)
    beyond = jnp.full_like(rounded, jnp.nan if fmt == "float8_e4m3fn" else jnp.inf)
    overflows = jnp.abs(rounded) > largest  # False for NaN, which stays NaN
    return jnp.where(overflows, jnp.copysign(beyond, rounded), rounded).astype(x.dtype)


@_cast.defjvp
def _straight_through(fmt, saturate, primals, tangents):
    return _cast(*primals, fmt, saturate), tangents[0]
