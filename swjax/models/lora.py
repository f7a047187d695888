"""LoRA: the kernels of the blocks are frozen, in 8 bits if the recipe allows, and small matrices are trained."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from swjax import serving
from swjax.kernels.reference import QTensor
from swjax.linear.api import dequantize_weight
from swjax.linear.layer import add
from swjax.linear.prologues import Prologue
from swjax.models.config import LoRA
from swjax.nnx import Linear

MATRICES = ("lora_a", "lora_b")


class LoRALinear(Linear):
    """A `Linear` with a low-rank product beside its kernel: ``x w + bias + lora_scale (x a) b``.

    The product is added in the kernel of the layer. The backward pass recomputes it from x before the
    prologue, which the layer saves too, so LoRA saves no activations of its own.

    Attributes:
      lora_a, lora_b: a [k, rank] and b [rank, n], float32.
      lora_scale: alpha / rank.
    """

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    lora_scale: float

    def __call__(
        self,
        inputs: jax.Array,
        out_sharding: Any = None,
        *,
        prologue: Prologue | None = None,
        addend: jax.Array | None = None,
    ) -> jax.Array:
        """See `Linear`."""
        x, *_ = self._operands(inputs)
        delta = _low_rank(x, self.lora_a[...], self.lora_b[...], prologue, self.lora_scale)
        addend = add(delta, addend)
        return super().__call__(inputs, out_sharding, prologue=prologue, addend=addend)


@partial(jax.checkpoint, static_argnums=4)
def _low_rank(x, a, b, prologue: Prologue | None, scale: float):
    if prologue is not None:
        x, _ = prologue.forward(x, quantize_to=None, implementation="xla")
    return (x @ a.astype(x.dtype)) @ (b * scale).astype(x.dtype)


def adapt(model: nnx.Module, lora: LoRA, rngs: nnx.Rngs) -> None:
    """Freezes the kernels of a model's `Linear` layers and adds LoRA to some of them, in place.

    A kernel that products read in 8 bits is quantized once, see `swjax.serving.prequantize`. That of a layer
    without quantization is stored in the layer's dtype. Neither changes the output, and `lora_b` is 0.

    Args:
      model: a model whose `Linear` layers may be stacked.
      lora: rank, scale and layers.
      rngs: initializes `lora_a` as PyTorch initializes a linear layer.
    """
    found = {"/".join(map(str, path)): layer for path, layer in nnx.iter_modules(model)}
    layers = {path: layer for path, layer in found.items() if isinstance(layer, Linear)}
    for path, layer in layers.items():
        *stack, k, n = layer.kernel.shape
        fwd = layer.recipe.fwd
        if fwd is None:
            layer.kernel = nnx.Param(layer.kernel[...].astype(layer.dtype))
        elif not (fwd.outlier_threshold or fwd.in_blocks):
            serving.prequantize(layer)
        if not lora.adapts(path):
            continue
        shape, limit = (*stack, k, lora.rank), k**-0.5
        draw = partial(jax.random.uniform, shape=shape, minval=-limit, maxval=limit)
        layer.lora_a = nnx.LoRAParam(draw(rngs.params()))
        layer.lora_b = nnx.LoRAParam(jnp.zeros((*stack, lora.rank, n)))
        layer.lora_scale = lora.scale
        object.__setattr__(layer, "__class__", LoRALinear)


def merged_parameters(model: nnx.Module) -> dict:
    """The parameters of a model after `adapt` as those of the model without LoRA: kernels are w + scale a b.

    Returns:
      Nested dict of float32 arrays.
    """
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for path, layer in nnx.iter_modules(model):
        if not isinstance(layer, Linear):
            continue
        of_layer = parameters
        for name in path:
            of_layer = of_layer[name]
        of_layer["kernel"] = _merged_kernel(layer)
        for name in MATRICES:
            of_layer.pop(name, None)
    return parameters


def _merged_kernel(layer: Linear) -> jax.Array:
    kernel: Any = layer.kernel.get_value()
    if isinstance(kernel, QTensor):
        dequantize = partial(dequantize_weight, recipe=layer.recipe)
        for _ in kernel.values.shape[:-2]:
            dequantize = jax.vmap(dequantize)
        kernel = dequantize(kernel)
    kernel = kernel.astype(jnp.float32)
    if not isinstance(layer, LoRALinear):
        return kernel
    product = jnp.matmul(layer.lora_a[...], layer.lora_b[...], precision="highest")
    return kernel + layer.lora_scale * product
