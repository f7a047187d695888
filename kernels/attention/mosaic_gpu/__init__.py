"""Attention of short sequences in Pallas, for Hopper.

`forward` computes with heads in the shared memory of `forward_scratch`. `backward` computes in
`backward_products` with the shared memory that `backward_copies` fills. `backward_heads` finds the tiles of
a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from swjax.kernels.attention.mosaic_gpu import backward, forward
from swjax.kernels.attention.mosaic_gpu.backward import attention_backward
from swjax.kernels.attention.mosaic_gpu.forward import attention
from swjax.kernels.availability import Unavailable

__all__ = ["WHY_NOT", "attention", "attention_backward"]

WIDTHS = (64, 80)  # others were not measured


def _why_not(of_pass: Callable, q: jax.Array, *arrays: Any, **options: Any) -> Unavailable | None:
    """Why a kernel does not compute attention of these queries, [b, t, h, d]; None: it does."""
    # The kernels need features of jax 0.11, and were compiled with jax 0.11 and 0.12 only.
    if not (0, 11) <= jax.__version_info__[:2] <= (0, 12):
        return Unavailable(
            f"needs jax 0.11 or 0.12, and this is jax {jax.__version__}: use 'triton'"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return Unavailable(f"needs a 16-bit dtype, got {q.dtype}: use 'xla'")
    if q.shape[3] not in WIDTHS:
        return Unavailable(f"supports heads of {WIDTHS} features, got {q.shape[3]}: use 'triton'")
    return of_pass(q, *arrays, **options)


WHY_NOT = {
    "attention": partial(_why_not, forward.why_not),
    "attention_backward": partial(_why_not, backward.why_not),
}
