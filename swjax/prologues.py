"""What runs on a linear layer's input just before it, fused with the quantizer: LayerNorm and GELU.

A prologue is passed to `swjax.switchback`. Its forward pass writes the activation once, quantized, and in 16
bits only if the recipe's weight gradient needs that; its backward pass keeps the prologue's input alone.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import jax

from swjax.kernels import dispatch
from swjax.kernels.reference import QTensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm over the last axis.

    Attributes:
      scale, bias: [k].
      epsilon: added to the variance.
    """

    scale: jax.Array
    bias: jax.Array
    epsilon: float = field(default=1e-6, metadata={"static": True})
    whole_rows: ClassVar[bool] = True  # needs all of a row to compute any of it

    def forward(self, x, *, quantize_to, wide, implementation):
        return dispatch.run(
            "layer_norm",
            x,
            self.scale,
            self.bias,
            epsilon=self.epsilon,
            quantize_to=quantize_to,
            wide=wide,
            implementation=implementation,
        )

    def backward(self, x, gradient, *, quantize_to, implementation):
        """(dx, None, None) and the gradient of this prologue."""
        del quantize_to  # a residual stream's gradient is added to before any layer multiplies it
        dx, dscale, dbias = dispatch.run(
            "layer_norm_backward",
            x,
            self.scale,
            gradient,
            epsilon=self.epsilon,
            implementation=implementation,
        )
        gradient = LayerNorm(
            dscale.astype(self.scale.dtype), dbias.astype(self.bias.dtype), self.epsilon
        )
        return (dx, None, None), gradient


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gelu:
    """GELU.

    Attributes:
      approximate: the tanh form in place of the exact one.
    """

    approximate: bool = field(default=False, metadata={"static": True})
    whole_rows: ClassVar[bool] = False

    def forward(self, x, *, quantize_to, wide, implementation):
        return dispatch.run(
            "gelu",
            x,
            approximate=self.approximate,
            quantize_to=quantize_to,
            wide=wide,
            implementation=implementation,
        )

    def backward(self, x, gradient, *, quantize_to, implementation):
        """(dx, dx quantized or None, the sum of dx's rows), and the gradient of this prologue."""
        return dispatch.run(
            "gelu_backward",
            x,
            gradient,
            approximate=self.approximate,
            quantize_to=quantize_to,
            implementation=implementation,
        ), self


Prologue = LayerNorm | Gelu
Gradient = tuple[jax.Array, QTensor | None, jax.Array | None]
