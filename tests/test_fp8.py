"""The simulated fp8 cast gives the same bits as ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swjax import fp8
from swjax.linear.layer import from_bytes, to_bytes

pytestmark = pytest.mark.usefixtures("compiles_as_users_do")

LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344}


def every(dtype):
    """Returns all 65,536 values of a 16-bit type, or fp32 values around all ties of fp8, and random ones."""
    if dtype != "float32":
        return np.arange(2**16, dtype=np.uint16).view(dtype)
    top = np.arange(2**16, dtype=np.uint32) << 16  # every sign, exponent and leading mantissa bits
    low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]  # at, just above and just below each tie
    ties = np.concatenate([top | tail for tail in low])
    random = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
    return np.concatenate([ties, random]).view(np.float32)


def expected(x, fmt, saturate):
    wide = x.astype(np.float32)
    if saturate:
        wide = np.clip(wide, -LARGEST[fmt], LARGEST[fmt])
    with np.errstate(invalid="ignore", over="ignore"):
        return wide.astype(fmt).astype(x.dtype)


def same_bits(a, b):
    """Whether values are equal, including the signs of zeros; all NaNs count as equal."""
    a, b = (np.asarray(v).astype(np.float32) for v in (a, b))
    return np.where(np.isnan(b), np.isnan(a), a.view(np.uint32) == b.view(np.uint32)).all()


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("fmt", fp8.FORMATS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, "float32"])
def test_bit_exact(dtype, fmt, saturate):
    x = every(dtype)
    for cast in (fp8.cast, jax.jit(fp8.cast, static_argnames=("fmt", "saturate"))):
        got = cast(jnp.asarray(x), fmt, saturate=saturate)
        assert got.dtype == x.dtype
        assert same_bits(got, expected(x, fmt, saturate))


@pytest.mark.parametrize("fmt", fp8.FORMATS)
def test_beyond_the_largest(fmt):
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1e30], jnp.float32)
    largest = LARGEST[fmt]
    np.testing.assert_array_equal(fp8.cast(x, fmt), [largest, -largest, np.nan, largest])
    beyond = np.nan if fmt == "float8_e4m3fn" else np.inf
    np.testing.assert_array_equal(
        fp8.cast(x, fmt, saturate=False), [beyond, -beyond, np.nan, beyond]
    )


def test_gradient_passes_straight_through():
    x = jnp.array([0.3, 1000.0], jnp.bfloat16)
    grad = jax.grad(lambda x: jnp.sum(fp8.cast(x).astype(jnp.float32) * jnp.array([2.0, 3.0])))(x)
    assert grad.tolist() == [2.0, 3.0]


def test_unknown_format():
    with pytest.raises(ValueError, match="fmt must be .* float8_e4m3fn, float8_e5m2, got 'e4m3'"):
        fp8.cast(jnp.ones(1), "e4m3")


def test_numbers_and_other_dtypes():
    assert float(jax.grad(fp8.cast)(0.3)) == 1 and float(fp8.cast(0.3)) == 0.3125
    with pytest.raises(ValueError, match="x must be float16, .* got complex64: cast it first"):
        fp8.cast(jnp.ones(2, jnp.complex64))
    with jax.enable_x64(True), pytest.raises(ValueError, match="x must be float16, .* got float64"):
        fp8.cast(jnp.asarray([1.0625 + 1e-12]))  # nearest is 1.125; through float32 it would be 1


def test_fp8_is_saved_as_bytes():
    """`jax.checkpoint` would round the saved values."""
    w = jnp.linspace(-448, 448, 99)
    q = w.astype("float8_e4m3fn")
    assert to_bytes(q).dtype == jnp.uint8 and to_bytes(w) is w
    np.testing.assert_array_equal(
        from_bytes(to_bytes(q), q.dtype).astype("float32"), q.astype("float32")
    )
