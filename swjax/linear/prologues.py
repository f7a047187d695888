"""What runs on a linear layer's input just before it, fused with the quantizer: LayerNorm and GELU.

A prologue is passed to `swjax.switchback`. Its forward pass writes the activation once, quantized. Its
backward pass needs the prologue's input alone, and writes the activation again for the weight gradient, in 16
bits: as many bytes as if the forward pass had written it so, and none to keep in between.
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

    def backward(self, x, gradients, residual, *, quantize_to, again, implementation):
        """(dx + residual, None, None) for the sum of gradients, the gradient of this prologue, and with
        `again` its output."""
        del quantize_to  # a residual stream's gradient is added to before any layer multiplies it
        dx, dscale, dbias, y = dispatch.run(
            "layer_norm_backward",
            x,
            self.scale,
            gradients,
            residual,
            self.bias if again else None,
            epsilon=self.epsilon,
            implementation=implementation,
        )
        gradient = LayerNorm(
            dscale.astype(self.scale.dtype), dbias.astype(self.bias.dtype), self.epsilon
        )
        return (dx, None, None), gradient, y


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

    def backward(self, x, gradients, residual, *, quantize_to, again, implementation):
        """(dx, dx quantized or None, the sum of dx's rows), the gradient of this prologue, and with `again`
        its output."""
        *input_gradient, y = dispatch.run(
            "gelu_backward",
            x,
            add(*gradients),
            approximate=self.approximate,
            quantize_to=None if residual is not None else quantize_to,
            again=again,
            implementation=implementation,
        )
        if residual is not None:  # what is quantized and summed would not be the input's gradient
            input_gradient = add(input_gradient[0], residual), None, None
        return tuple(input_gradient), self, y


def add(*arrays: jax.Array | None) -> jax.Array:
    """The sum in fp32, rounded once; None counts as nothing."""
    first, *others = (array for array in arrays if array is not None)
    wide = sum((other.astype("float32") for other in others), first.astype("float32"))
    return wide.astype(first.dtype)


Prologue = LayerNorm | Gelu
Gradient = tuple[jax.Array, QTensor | None, jax.Array | None]
