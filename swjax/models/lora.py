"""LoRA: trains small matrices for the kernels of the blocks, which are frozen, in 8 bits if possible."""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from swjax import serving
from swjax.kernels.reference import QTensor
from swjax.linear.api import dequantize_weight, switchback
from swjax.linear.layer import add
from swjax.linear.prologues import Prologue
from swjax.models.config import LoRA, config
from swjax.nnx import Linear, modules_of

MATRICES = ("lora_a", "lora_b")
Model = TypeVar("Model", bound=Any)  # a CLIP


class LoRALinear(Linear):
    """A `Linear` that adds a low-rank product: ``x w + bias + lora_scale (x a) b``.

    The backward pass recomputes what it reads from the input, which layers share, so nothing else is saved.

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

        @jax.checkpoint
        def product(x, w, bias, a, b, prologue, addend):
            h, b = x, self.lora_scale * b
            if prologue is not None:
                h, _ = prologue.forward(x, quantize_to=None, implementation="xla")
            low_rank = (h @ a.astype(h.dtype)) @ b.astype(h.dtype)
            given = {"prologue": prologue, "addend": add(low_rank, addend)}
            return switchback(x, w, bias, **given, **self._options())

        matrices = self.lora_a[...], self.lora_b[...]
        y = product(*self._operands(inputs), *matrices, prologue, addend)
        return y if out_sharding is None else jax.reshard(y, out_sharding)


def adapt(model: nnx.Module, lora: LoRA, rngs: nnx.Rngs) -> None:
    """Freezes the kernels of a model's `Linear` layers and adds LoRA to some of them, in place.

    A kernel that products read in 8 bits is quantized once, see `swjax.serving.prequantize`. That of a layer
    without quantization is stored in the layer's dtype. Neither changes the output, and `lora_b` is 0.

    Args:
      model: a model whose `Linear` layers may be stacked.
      lora: rank, scale and layers.
      rngs: initializes `lora_a` as PyTorch initializes a linear layer.
    """
    modules = modules_of(model).items()
    layers = {path: layer for path, layer in modules if isinstance(layer, Linear)}
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
        object.__setattr__(layer, "__class__", LoRALinear)
        assert isinstance(layer, LoRALinear), "it is one now"
        layer.lora_a = nnx.LoRAParam(draw(rngs.params()))
        layer.lora_b = nnx.LoRAParam(jnp.zeros((*stack, lora.rank, n)))
        layer.lora_scale = lora.scale


def merged_parameters(model: nnx.Module) -> dict:
    """The parameters after `adapt` as those of the model without LoRA, whose kernels are w + lora_scale a b.

    Kernels have the rounding error of 8 bits. Quantized again, they may lose changes below it.

    Args:
      model: the model, which does not change.

    Returns:
      Nested dict of float32 arrays.
    """
    parameters = nnx.to_pure_dict(nnx.state(model))
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, Linear):
            of_layer: Any = parameters
            for name in path:
                of_layer = of_layer[name]
            of_layer["kernel"] = _merged_kernel(layer)
            for name in MATRICES:
                of_layer.pop(name, None)
    return parameters


def merged(model: Model, **options: Any) -> Model:
    """Returns a CLIP with the `merged_parameters` of a CLIP with LoRA, which does not change.

    Args:
      model: a CLIP whose configuration has LoRA.
      **options: fields of the configuration to replace, such as recipe="standard".
    """
    cfg = config(model.cfg, lora=None, **options)
    graph, state = nnx.split(nnx.eval_shape(lambda: type(model)(cfg, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, merged_parameters(model))
    return nnx.merge(graph, state)


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
