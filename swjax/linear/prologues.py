"""Operations on a linear layer's input that are fused with its quantizer: norms and activations.

A prologue is an argument of `swjax.switchback` and of `swjax.ragged_switchback`. If the forward product
quantizes whole rows of x, without rotation and outliers, the forward pass writes the prologue's output only
in quantized form. For the weight gradient, the backward pass recomputes the output in the dtype of x, so it
takes no memory between the passes. Otherwise the output is computed in high precision, and saved unless the
recipe sets `save_quantized`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax

from swjax.kernels import dispatch
from swjax.kernels.fused_products.reference import Factors
from swjax.kernels.reference import QTensor
from swjax.linear.layer import Layer, Operand, add, row_specs
from swjax.linear.layouts import Spec, SpecTree, specs_of


class PrologueGradients(NamedTuple):
    """The result of a prologue's backward pass.

    Attributes:
      inputs: the gradient of each of the prologue's inputs; `Gated` has two.
      prologue: the gradients of its parameters, as a prologue; None without a prologue.
      recomputed: the prologue's output, or None.
    """

    inputs: tuple[Operand, ...]
    prologue: "Prologue | Gated | None"
    recomputed: jax.Array | None


class Backward(NamedTuple):
    """The arguments of a prologue's backward pass.

    Attributes:
      x: [..., k], the prologue's input; for `Gated` a pair.
      gradients: [..., k] each, whose sum is the gradient of the output; or its `Factors`.
      residual_gradient: [..., k], which is added to the input gradient, or None.
      quantize_to: dtype of the quantized input gradient, if the prologue supports it; None does not quantize.
      recompute: whether to return the output.
      implementation: see `swjax.kernels.dispatch`.
    """

    x: Any
    gradients: tuple[jax.Array, ...] | Factors
    residual_gradient: jax.Array | None
    quantize_to: str | None
    recompute: bool
    implementation: str | None


class RowOperation(NamedTuple):
    """The forward pass of a prologue: the arguments of `dispatch.run`; no name without a prologue."""

    name: str | None
    arrays: tuple[jax.Array, ...]
    settings: dict[str, Any]


class _Operation(ABC):
    """What every prologue has."""

    whole_rows: ClassVar[bool]  # whether an element of the output depends on its whole row

    @abstractmethod
    def operation(self, x: Any) -> RowOperation:
        """The operation on x [..., k], or on the pair of `Gated`."""

    @abstractmethod
    def backward(self, of: Backward) -> PrologueGradients:
        """Computes the gradients of the prologue."""

    def forward(
        self, x: Any, *, quantize_to: str | None, implementation: str | None
    ) -> tuple[jax.Array | None, QTensor | None]:
        """Returns (output, None), or with a dtype `quantize_to` (None, output quantized row-wise)."""
        name, arrays, settings = self.operation(x)
        assert name is not None, "a prologue has a name"
        options: dict[str, Any] = {
            "quantize_to": quantize_to,
            "high_precision": quantize_to is None,
        }
        return dispatch.run(name, *arrays, **settings, **options, implementation=implementation)


def _run_backward(name: str, *arrays: Any, implementation: str | None, **settings: Any) -> Any:
    """Runs the backward pass of a row operation; the product of `Factors` among its arrays comes first."""
    if not any(isinstance(array, Factors) for array in arrays):
        return dispatch.run(name, *arrays, **settings, implementation=implementation)
    fused: dict[str, Any] = {"row_operation": name, "settings": tuple(settings.items())}
    return dispatch.run("fused_product_backward", *arrays, **fused, implementation=implementation)


def _added(gradients: tuple[jax.Array, ...] | Factors) -> jax.Array | Factors:
    return gradients if isinstance(gradients, Factors) else add(*gradients)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerNorm(_Operation):
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
    whole_rows: ClassVar[bool] = True

    def operation(self, x: jax.Array) -> RowOperation:
        return RowOperation("layer_norm", (x, self.scale, self.bias), {"epsilon": self.epsilon})

    def backward(self, of: Backward) -> PrologueGradients:
        # Not quantized: the residual gradient is added before a layer reads the sum.
        dx, dscale, dbias, y = _run_backward(
            "layer_norm_backward",
            of.x,
            self.scale,
            of.gradients,
            of.residual_gradient,
            self.bias if of.recompute else None,
            epsilon=self.epsilon,
            implementation=of.implementation,
        )
        parameters = LayerNorm(
            dscale.astype(self.scale.dtype), dbias.astype(self.bias.dtype), self.epsilon
        )
        return PrologueGradients((Operand(dx),), parameters, y)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RMSNorm(_Operation):
    """RMSNorm over the last axis: ``x (rsqrt(mean(x**2) + epsilon) (offset + scale))`` in float32.

    It equals `flax.linen.RMSNorm`, and `flax.nnx.RMSNorm` with a dtype, which rounds the scale to that dtype
    first: pass the rounded scale to get the same bits.

    Attributes:
      scale: [k], learned factor of each feature.
      epsilon: added to the mean square.
      offset: added to the scale: 1.0 in models that store the scale minus one, such as Gemma.

    >>> import jax.numpy as jnp, swjax
    >>> x = jnp.array([[0.0, 0.0, 0.0, 4.0]])
    >>> swjax.switchback(x, jnp.eye(4), prologue=RMSNorm(jnp.ones(4))).round(3).tolist()
    [[0.0, 0.0, 0.0, 2.0]]
    """

    scale: jax.Array
    epsilon: float = field(default=1e-6, metadata={"static": True})
    offset: float = field(default=0.0, metadata={"static": True})
    whole_rows: ClassVar[bool] = True

    def operation(self, x: jax.Array) -> RowOperation:
        settings = {"epsilon": self.epsilon, "offset": self.offset}
        return RowOperation("rms_norm", (x, self.scale), settings)

    def backward(self, of: Backward) -> PrologueGradients:
        dx, dscale, y = _run_backward(
            "rms_norm_backward",
            of.x,
            self.scale,
            of.gradients,
            of.residual_gradient,
            epsilon=self.epsilon,
            offset=self.offset,
            recompute=of.recompute,
            implementation=of.implementation,
        )
        parameters = RMSNorm(dscale.astype(self.scale.dtype), self.epsilon, self.offset)
        return PrologueGradients((Operand(dx),), parameters, y)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gelu(_Operation):
    """GELU.

    Attributes:
      approximate: whether to use the tanh form instead of the exact form.

    >>> import jax.numpy as jnp, swjax
    >>> swjax.switchback(jnp.array([[0.0, 9.0]]), jnp.eye(2), prologue=Gelu()).tolist()
    [[0.0, 9.0]]
    """

    approximate: bool = field(default=False, metadata={"static": True})
    whole_rows: ClassVar[bool] = False

    def operation(self, x: jax.Array) -> RowOperation:
        return RowOperation("gelu", (x,), {"approximate": self.approximate})

    def backward(self, of: Backward) -> PrologueGradients:
        dx, dx_quantized, token_sum, y = _run_backward(
            "gelu_backward",
            of.x,
            _added(of.gradients),
            approximate=self.approximate,
            quantize_to=None if of.residual_gradient is not None else of.quantize_to,
            recompute=of.recompute,
            implementation=of.implementation,
        )
        gradient = Operand(dx, dx_quantized, token_sum=token_sum)
        if of.residual_gradient is not None:  # the other forms exclude the residual gradient
            gradient = Operand(add(dx, of.residual_gradient))
        return PrologueGradients((gradient,), self, y)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gated(_Operation):
    """``activation(gate) up``, the second prologue of `swjax.gated_mlp`; its input is the pair (gate, up).

    Attributes:
      activation: see `swjax.gated_mlp`.
    """

    activation: str = field(default="silu", metadata={"static": True})
    whole_rows: ClassVar[bool] = False

    def operation(self, x: tuple[jax.Array, jax.Array]) -> RowOperation:
        return RowOperation("gated", x, {"activation": self.activation})

    def backward(self, of: Backward) -> PrologueGradients:
        # No residual connection starts at gate or up.
        dgate, dup, *quantized, h = _run_backward(
            "gated_backward",
            *of.x,
            _added(of.gradients),
            activation=self.activation,
            quantize_to=of.quantize_to,
            recompute=of.recompute,
            implementation=of.implementation,
        )
        return PrologueGradients(tuple(map(Operand, (dgate, dup), quantized)), self, h)


Prologue = LayerNorm | RMSNorm | Gelu  # what users pass


# --- on sharded arrays --------------------------------------------------------------------------------


def input_spec(prologue: Prologue | Gated | None, layer: Layer) -> Spec:
    """The sharding of the input of a layer, or of its prologue."""
    sharding = layer.sharding
    whole_rows = prologue is not None and prologue.whole_rows
    return Spec((*sharding.tokens, ())) if whole_rows else sharding.x


def apply(
    prologue: Prologue | Gated, x: Any, layer: Layer, *, quantize_to: str | None
) -> tuple[jax.Array | None, QTensor | None]:
    """Returns (prologue's output, None), or with `quantize_to` (None, output quantized row-wise)."""
    spec, implementation = input_spec(prologue, layer), layer.implementation

    def step(prologue, x):
        return prologue.forward(x, quantize_to=quantize_to, implementation=implementation)

    out_specs = (None, row_specs(spec)) if quantize_to else (spec, None)
    return layer.sharding.map_shards(step, (prologue, x), (Spec(), spec), out_specs)


def apply_backward(
    prologue: Prologue | Gated,
    x: Any,
    gradients: tuple[jax.Array, ...] | Factors,
    residual_gradient: jax.Array | None,
    layer: Layer,
    *,
    quantize_to: str | None,
    recompute: bool,
) -> PrologueGradients:
    """Computes the gradients of a prologue; see `backward` of its class."""
    sharding, spec = layer.sharding, input_spec(prologue, layer)
    of_gradients: Any = (spec,) * len(gradients)
    if isinstance(gradients, Factors):
        of_gradients = Factors(sharding.y, specs_of(gradients.w, sharding.w))  # type: ignore[arg-type]  # specs

    def step(prologue, x, gradients, residual_gradient):
        if isinstance(gradients, Factors):
            gradients = gradients._replace(w=sharding.gather(gradients.w, of_gradients.w))
        arrays = x, gradients, residual_gradient
        of = prologue.backward(Backward(*arrays, quantize_to, recompute, layer.implementation))
        sums = [dx.token_sum for dx in of.inputs], of.prologue
        totals, parameters = sharding.sum(sums, *sharding.tokens)
        dxs = tuple(dx._replace(token_sum=total) for dx, total in zip(of.inputs, totals))
        return PrologueGradients(dxs, parameters, of.recomputed)

    tree: SpecTree = spec
    of_input = Operand(tree)
    if not prologue.whole_rows and residual_gradient is None:
        columns: SpecTree = Spec(spec[-1:]) if isinstance(prologue, Gelu) else None
        of_input = Operand(tree, row_specs(spec) if quantize_to else None, token_sum=columns)
    whole: SpecTree = Spec()
    inputs = (of_input,) * (2 if isinstance(prologue, Gated) else 1)
    out_specs = PrologueGradients(inputs, whole, tree if recompute else None)
    arrays = (prologue, x, gradients, residual_gradient)
    return sharding.map_shards(step, arrays, (Spec(), spec, of_gradients, spec), out_specs)
