"""Operations on a linear layer's input that are fused with its quantizer: LayerNorm and GELU.

A prologue is an argument of `swjax.switchback`. Its forward pass writes its output once, quantized. Its
backward pass reads only the prologue's input, and recomputes the output in 16 bits for the weight gradient.
The 16-bit output is thus written once, as if the forward pass stored it, but takes no memory between the
passes.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import jax

from swjax.kernels import dispatch
from swjax.kernels.reference import QTensor


class Gradient(NamedTuple):
    """The gradient of an array [..., n], with further forms that the preceding layer reads, if available.

    Attributes:
      array: the gradient.
      quantized: the gradient, quantized row-wise, or None.
      token_sum: the sum of the gradient over all tokens, [n] float32, which is the gradient of a bias; or
        None.
    """

    array: jax.Array
    quantized: QTensor | None = None
    token_sum: jax.Array | None = None


class PrologueGradients(NamedTuple):
    """The result of a prologue's backward pass.

    Attributes:
      input: the gradient of the prologue's input.
      prologue: the gradients of its parameters, as a prologue.
      recomputed: the prologue's output, or None.
    """

    input: Gradient
    prologue: "Prologue"
    recomputed: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm over the last axis.

    Attributes:
      scale, bias: [k], learned factor and offset of each feature.
      epsilon: added to the variance.

    >>> import jax.numpy as jnp, swjax
    >>> norm = LayerNorm(jnp.ones(2), jnp.zeros(2))
    >>> swjax.switchback(jnp.array([[3.0, 1.0]]), jnp.eye(2), prologue=norm).round(3).tolist()
    [[1.0, -1.0]]
    """

    scale: jax.Array
    bias: jax.Array
    epsilon: float = field(default=1e-6, metadata={"static": True})
    whole_rows: ClassVar[bool] = True  # each element depends on the whole row

    def forward(
        self, x: jax.Array, *, quantize_to: str | None, implementation: str | None
    ) -> tuple[jax.Array | None, QTensor | None]:
        """Returns (output, None), or with a dtype `quantize_to` (None, output quantized row-wise)."""
        return dispatch.run(
            "layer_norm",
            x,
            self.scale,
            self.bias,
            epsilon=self.epsilon,
            quantize_to=quantize_to,
            high_precision=quantize_to is None,
            implementation=implementation,
        )

    def backward(
        self,
        x: jax.Array,
        gradients: tuple[jax.Array, ...],
        residual_gradient: jax.Array | None,
        *,
        quantize_to: str | None,
        recompute: bool,
        implementation: str | None,
    ) -> PrologueGradients:
        """Computes the gradients of the prologue.

        Args:
          x: [..., k], the prologue's input.
          gradients: [..., k] each; their sum is the gradient of the output.
          residual_gradient: [..., k], which is added to the input gradient, or None.
          quantize_to: dtype of the quantized input gradient, if the prologue supports it; None does not
            quantize.
          recompute: whether to return the output.
          implementation: see `swjax.kernels.dispatch`.
        """
        del quantize_to  # the residual gradient is added before a layer reads the sum
        dx, dscale, dbias, y = dispatch.run(
            "layer_norm_backward",
            x,
            self.scale,
            gradients,
            residual_gradient,
            self.bias if recompute else None,
            epsilon=self.epsilon,
            implementation=implementation,
        )
        parameters = LayerNorm(
            dscale.astype(self.scale.dtype), dbias.astype(self.bias.dtype), self.epsilon
        )
        return PrologueGradients(Gradient(dx), parameters, y)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gelu:
    """GELU.

    Attributes:
      approximate: whether to use the tanh form instead of the exact form.

    >>> import jax.numpy as jnp, swjax
    >>> swjax.switchback(jnp.array([[0.0, 9.0]]), jnp.eye(2), prologue=Gelu()).tolist()
    [[0.0, 9.0]]
    """

    approximate: bool = field(default=False, metadata={"static": True})
    whole_rows: ClassVar[bool] = False

    def forward(
        self, x: jax.Array, *, quantize_to: str | None, implementation: str | None
    ) -> tuple[jax.Array | None, QTensor | None]:
        """See `LayerNorm.forward`."""
        return dispatch.run(
            "gelu",
            x,
            approximate=self.approximate,
            quantize_to=quantize_to,
            high_precision=quantize_to is None,
            implementation=implementation,
        )

    def backward(
        self,
        x: jax.Array,
        gradients: tuple[jax.Array, ...],
        residual_gradient: jax.Array | None,
        *,
        quantize_to: str | None,
        recompute: bool,
        implementation: str | None,
    ) -> PrologueGradients:
        """See `LayerNorm.backward`."""
        dx, dx_quantized, token_sum, y = dispatch.run(
            "gelu_backward",
            x,
            add(*gradients),
            approximate=self.approximate,
            quantize_to=None if residual_gradient is not None else quantize_to,
            recompute=recompute,
            implementation=implementation,
        )
        gradient = Gradient(dx, dx_quantized, token_sum)
        if residual_gradient is not None:  # the other forms exclude the residual gradient
            gradient = Gradient(add(dx, residual_gradient))
        return PrologueGradients(gradient, self, y)


def add(*arrays: jax.Array | None) -> jax.Array:
    """Sums in float32, and rounds once to the dtype of the first array; None counts as zero.

    >>> import jax.numpy as jnp
    >>> float(add(jnp.float32(1), None, jnp.float32(2)))
    3.0
    """
    first, *others = (array for array in arrays if array is not None)
    total = sum((other.astype("float32") for other in others), first.astype("float32"))
    return total.astype(first.dtype)


Prologue = LayerNorm | Gelu
