"""Attention of short sequences in Triton, for Hopper and Blackwell. `heads` has what both passes share."""

from swjax.kernels.attention.triton.backward import attention_backward
from swjax.kernels.attention.triton.forward import attention
from swjax.kernels.attention.triton.heads import why_not

__all__ = ["WHY_NOT", "attention", "attention_backward"]

WHY_NOT = {"attention": why_not, "attention_backward": why_not}
