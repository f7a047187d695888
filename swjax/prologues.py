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

    def backward(self, x, gradients, residual, *, quantize_to, implementation):
        """(dx + residual, None, None) for the sum of gradients, and the gradient of this prologue."""
        del quantize_to  # a residual stream's gradient is added to before any layer multiplies it
        dx, dscale, dbias = dispatch.run(
            "layer_norm_backward",
            x,
            self.scale,
            gradients,
            residual,
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

    def backward(self, x, gradients, residual, *, quantize_to, implementation):
        """(dx, dx quantized or None, the sum of dx's rows), and the gradient of this prologue."""
        if residual is not None:  # then what is quantized would not be the input's gradient
            (dx, _, _), same = self.backward(
                x, gradients, None, quantize_to=None, implementation=implementation
            )
            return (add(dx, residual), None, None), same
        return dispatch.run(
            "gelu_backward",
            x,
            add(*gradients),
            approximate=self.approximate,
            quantize_to=quantize_to,
            implementation=implementation,
        ), self


def add(*arrays: jax.Array | None) -> jax.Array:
    """The sum in fp32, rounded once; None counts as nothing."""
    first, *others = (array for array in arrays if array is not None)
    wide = sum((other.astype("float32") for other in others), first.astype("float32"))
    return wide.astype(first.dtype)


Prologue = LayerNorm | Gelu
Gradient = tuple[jax.Array, QTensor | None, jax.Array | None]
