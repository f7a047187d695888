"""A gated activation of rows."""

from typing import Any

import jax

from swjax.kernels.availability import Unavailable
from swjax.kernels.formats import QTensor
from swjax.kernels.gated import reference
from swjax.kernels.pallas_tpu import rows


def gated(
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str = "silu",
    quantize_to: str | None = None,
    high_precision: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.gated`."""
    block = lambda *arrays: reference.gated(*arrays, activation=activation)[0]
    options = quantize_to, high_precision
    return rows.quantizing("gated", block, (gate, up), *options, of_elements=True)


def _why_not(*arrays: Any, activation: str = "silu", **options: Any) -> Unavailable | None:
    if activation == "gelu":
        return Unavailable("has no exact GELU as a gate: use 'xla'")
    return rows.why_not_quantizing(*arrays, **options)


WHY_NOT = {"gated": _why_not}
