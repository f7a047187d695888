"""A gated activation of rows."""

from typing import Any

from swjax.kernels.availability import Unavailable
from swjax.kernels.gated import reference
from swjax.kernels.pallas_tpu import rows

gated = rows.by_specification("gated", reference.gated, of_elements=True)


def _why_not(*arrays: Any, activation: str = "silu", **options: Any) -> Unavailable | None:
    if activation == "gelu":
        return Unavailable("has no exact GELU as a gate: use 'xla'")
    return rows.why_not_quantizing(*arrays, **options)


WHY_NOT = {"gated": _why_not}
