"""The row-wise quantizer: maximum and rounding in one pass."""

import jax

from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor
from swjax.kernels.pallas_tpu import rows


def quantize(
    x: jax.Array, axes: tuple[int, ...] = (-1,), dtype: str = "int8", *, transpose: bool = False
) -> QTensor:
    """`reference.quantize`."""
    return rows.over_rows("quantize", lambda x, _: rows.quantize(x), x)


def _why_not(
    x: jax.Array, axes: tuple[int, ...] = (-1,), dtype: str = "int8", *, transpose: bool = False
) -> Unavailable | None:
    if dtype != "int8" or transpose or tuple(axis % x.ndim for axis in axes) != (x.ndim - 1,):
        return Unavailable("quantizes rows to int8: use 'xla'")
    return rows.why_not(x)


WHY_NOT = {"quantize": _why_not}
