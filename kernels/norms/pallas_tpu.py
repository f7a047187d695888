"""LayerNorm and RMSNorm of rows: the specification on blocks of them."""

import jax

from swjax.kernels.formats import QTensor
from swjax.kernels.norms import reference
from swjax.kernels.pallas_tpu import rows


def layer_norm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    *,
    epsilon: float,
    quantize_to: str | None = None,
    high_precision: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.layer_norm`."""
    block = lambda *arrays: reference.layer_norm(*arrays, epsilon=epsilon)[0]
    return rows.quantizing("layer_norm", block, (x, gamma, beta), quantize_to, high_precision)


def rms_norm(
    x: jax.Array,
    gamma: jax.Array,
    *,
    epsilon: float,
    offset: float = 0.0,
    quantize_to: str | None = None,
    high_precision: bool = True,
) -> tuple[jax.Array | None, QTensor | None]:
    """`reference.rms_norm`."""
    block = lambda *arrays: reference.rms_norm(*arrays, epsilon=epsilon, offset=offset)[0]
    return rows.quantizing("rms_norm", block, (x, gamma), quantize_to, high_precision)


WHY_NOT = dict.fromkeys(("layer_norm", "rms_norm"), rows.why_not_quantizing)
