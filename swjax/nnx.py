"""SwitchBack for Flax NNX: drop-in layers, and `quantize_model` for existing models."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from swjax import kept, nnx_blocks
from swjax.kernels import dispatch
from swjax.kernels.reference import QTensor
from swjax.linear.api import gated_mlp as fused_gated_mlp
from swjax.linear.api import mlp as fused_mlp
from swjax.linear.api import plain_weight, switchback
from swjax.linear.checks import OPERAND_DTYPES, check_activation, weight_array
from swjax.linear.contraction import DotGeneral, dot_general, keywords_of
from swjax.linear.conversion import (
    MAY_IGNORE,
    NO_LAYOUT,
    TAKES_NONE,
    UNMATCHED,
    Conversion,
    elements,
    refuse_dot_general_cls,
    warn_if_only_kept,
    warn_of_own_product,
)
from swjax.linear.interception import is_active
from swjax.linear.layouts import TOKENS, Layout, known_spec, layout_of_kernel
from swjax.linear.program import products_of
from swjax.linear.program_report import ProgramReport
from swjax.linear.prologues import Gated, Gelu, Prologue
from swjax.linear.sharding import reduced
from swjax.recipes import Recipe, first_match, get, get_all


class Linear(nnx.Linear):
    """`flax.nnx.Linear` whose three matrix products follow `recipe`.

    The parameters, their names, shapes, dtypes and initial values are those of `flax.nnx.Linear`, so
    checkpoints load in both directions. The weight is quantized from the parameter in `param_dtype`, not
    from a copy in `dtype`.

    Args:
      in_features, out_features: k and n.
      recipe: a name in `swjax.recipes.RECIPES`, "auto", or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      layout: shardings of input and kernel, see `swjax.Layout`; None reads the kernel's sharding from Flax's
        metadata (`kernel_metadata={"out_sharding": ("fsdp", "tensor")}`), if it is set.
      rngs: see `flax.nnx.Linear`.
      **kwargs: use_bias, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype,
        preferred_element_type, kernel_metadata, bias_metadata: see `flax.nnx.Linear`.

    Raises:
      ValueError: the recipe or the implementation does not exist.

    >>> import jax.numpy as jnp
    >>> layer = Linear(3, 4, recipe="switchback", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: str | Recipe = "switchback",
        implementation: str | None = None,
        layout: Layout | None = None,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        if "dot_general" in kwargs:
            raise ValueError(
                "swjax.nnx.Linear computes its own product and takes no dot_general: "
                "give it to flax.nnx.Linear, or choose a recipe here"
            )
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        # Recipe and implementation before `quantize_model` changed them.
        self.replaced: tuple[Recipe, str | None] | None = None
        self.set_recipe(recipe, implementation)
        self.layout = layout if layout is not None else _layout(self)

    def set_recipe(self, recipe: str | Recipe, implementation: str | None = None) -> None:
        """Sets the recipe and the implementation of future calls."""
        dispatch.check(implementation)
        self.recipe = get(recipe, (self.in_features, self.out_features))
        self.implementation = implementation

    def __call__(
        self,
        inputs: jax.Array,
        out_sharding: Any = None,
        *,
        prologue: Prologue | None = None,
        addend: jax.Array | None = None,
    ) -> jax.Array:
        """``inputs w + bias + addend``: [..., k] -> [..., n], after `prologue` is applied to the inputs."""
        options = {"prologue": prologue, "addend": addend} | self._options()
        y = switchback(*self._operands(inputs), **options)
        assert isinstance(y, jax.Array), "one weight without residual has one output"
        return y if out_sharding is None else jax.reshard(y, out_sharding)

    def _operands(self, inputs):
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x, _, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        return x, plain_weight(kernel, x), bias

    def _options(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "out_dtype": self.preferred_element_type,
            "precision": self.precision,
            "implementation": self.implementation,
            "layout": self.layout,
        }


def linears(
    layers: Sequence[nnx.Linear],
    inputs: jax.Array,
    *,
    prologue: Prologue | None = None,
    residual: bool = False,
) -> tuple:
    """Applies several layers to the same inputs, such as queries, keys and values, which are quantized once.

    Args:
      layers: `Linear`s, or layers of Flax that `quantize_model` converted. Those that differ in recipe,
        dtypes, implementation or layout, and subclasses with code of their own, are computed one by one.
      inputs: [..., k].
      prologue: a `swjax.LayerNorm`, `swjax.RMSNorm` or `swjax.Gelu` to apply to the inputs first.
      residual: whether to return the inputs as well, see `swjax.switchback`.

    Returns:
      A tuple with the output [..., n] of each layer, equal to its call, except that a bias of Flax's layers
      is added before the output is rounded. With `residual`: (outputs, inputs), where the inputs have the
      dtype of the first layer's computation.

    Raises:
      TypeError: a layer is neither a `Linear` of this module nor a converted one of Flax.

    >>> import jax.numpy as jnp
    >>> q, k = (Linear(3, n, rngs=nnx.Rngs(0)) for n in (4, 2))
    >>> [y.shape for y in linears((q, k), jnp.ones((2, 3)))]
    [(2, 4), (2, 2)]
    """
    if not _alike(*layers) or is_active():
        ys = tuple(_call(layer, inputs, prologue) for layer in layers)
        return (ys, _operands(layers[0], inputs)[0]) if residual else ys
    (x, *_), ws, biases = zip(*(_operands(layer, inputs) for layer in layers))
    options = {"prologue": prologue, "residual": residual} | _options(layers[0])
    outputs = switchback(x, ws, biases, **options)
    assert isinstance(outputs, tuple), "several weights have several outputs"
    return outputs


def mlp(
    fc1: nnx.Linear,
    fc2: nnx.Linear,
    inputs: jax.Array,
    *,
    prologue: Prologue | None = None,
    approximate: bool = False,
    residual: bool = False,
    add_input: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``fc2(gelu(fc1(inputs)))``, where the pass of the GELU also quantizes; see `swjax.mlp`.

    Args:
      fc1, fc2: layers; if they differ in recipe, dtypes or implementation, each quantizes separately.
      inputs: [..., k].
      prologue, residual: see `linears`.
      approximate: whether to use the tanh form of the GELU.
      add_input: whether to add the inputs to the output, see `swjax.mlp`.

    Returns:
      The output [..., n]; with `residual`: (output, inputs). The inputs, also those that `add_input` adds,
      have the dtype of fc1's computation.

    Raises:
      TypeError: a layer is neither a `Linear` of this module nor a converted one of Flax.

    >>> import jax.numpy as jnp
    >>> fc1, fc2 = (Linear(*sizes, rngs=nnx.Rngs(0)) for sizes in ((3, 8), (8, 2)))
    >>> mlp(fc1, fc2, jnp.ones((5, 3))).shape
    (5, 2)
    """
    x, w1, b1 = _operands(fc1, inputs)
    if not _can_fuse(fc1, fc2):
        hidden = _call(fc1, inputs, prologue)
        y = _call(fc2, hidden, Gelu(approximate), x if add_input else None)
        return (y, x) if residual else y
    _, w2, b2 = _operands(fc2, x)
    options: dict[str, Any] = {"prologue": prologue, "residual": residual, "add_input": add_input}
    options |= _options_of_mlp(fc1, fc2)
    return fused_mlp(x, w1, b1, w2, b2, approximate=approximate, **options)


def gated_mlp(
    gate: nnx.Linear,
    up: nnx.Linear,
    down: nnx.Linear,
    inputs: jax.Array,
    *,
    activation: str = "silu",
    prologue: Prologue | None = None,
    residual: bool = False,
    add_input: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``down(activation(gate(inputs)) * up(inputs))``, with fewer passes over memory; see `swjax.gated_mlp`.

    Args:
      gate, up, down: layers, see `linears`; if they differ in recipe, dtypes or implementation, or if one has
        a bias, each quantizes separately.
      inputs: [..., k].
      activation, prologue, residual, add_input: see `swjax.gated_mlp`.

    Returns:
      As `mlp`.

    Raises:
      TypeError: a layer is neither a `Linear` nor converted.
      ValueError: the activation does not exist.

    >>> import jax.numpy as jnp
    >>> gate, up, down = (Linear(*sizes, rngs=nnx.Rngs(0)) for sizes in ((3, 8), (3, 8), (8, 3)))
    >>> gated_mlp(gate, up, down, jnp.ones((5, 3))).shape
    (5, 3)
    """
    check_activation(activation)
    x, w_gate, _ = _operands(gate, inputs)
    has_bias = any(layer.bias is not None for layer in (gate, up, down))
    if has_bias or not _can_fuse(gate, up, down):
        pair = tuple(linears((gate, up), inputs, prologue=prologue))
        hidden: Any = Gated(activation).forward(pair, quantize_to=None, implementation="xla")[0]
        y = _call(down, hidden, None, x if add_input else None)
        return (y, x) if residual else y
    w_up, w_down = (_operands(layer, x)[1] for layer in (up, down))
    options: dict[str, Any] = {"prologue": prologue, "residual": residual, "add_input": add_input}
    options |= _options_of_mlp(gate, down)
    return fused_gated_mlp(x, w_gate, w_up, w_down, activation=activation, **options)


def _can_fuse(*layers: nnx.Linear) -> bool:
    """Whether one rule can compute the layers of an MLP, of which the last may have another layout."""
    alike = _alike(*layers, but="layout") and _alike(*layers[:-1])
    return alike and _options(layers[0])["out_dtype"] is None and not is_active()


def _options_of_mlp(first: nnx.Linear, last: nnx.Linear) -> dict[str, Any]:
    options = _options(first)
    del options["out_dtype"]
    return options | {"layouts": (options.pop("layout"), _options(last)["layout"])}


class GatedMLP(nnx.Module):
    """The MLP of language models, ``down_proj(activation(gate_proj(x)) * up_proj(x))``, without biases.

    The parameters are gate_proj/kernel, up_proj/kernel and down_proj/kernel, as in the Llama, Qwen and
    Mistral models of tunix and Bonsai.

    Args:
      features: of the inputs and outputs.
      hidden_features: outputs of gate_proj and up_proj.
      activation: "silu", "gelu" (the exact form) or "gelu_tanh".
      layouts: shardings of gate_proj and up_proj, and of down_proj, see `Linear`.
      rngs: see `flax.nnx.Linear`.
      **kwargs: recipe, implementation, and the arguments of `Linear` except `use_bias`.

    Raises:
      ValueError: the activation, the recipe or the implementation does not exist.

    >>> import jax.numpy as jnp
    >>> mlp = GatedMLP(4, 8, rngs=nnx.Rngs(0))
    >>> mlp(jnp.ones((2, 4)), add_input=True).shape, mlp.down_proj.kernel.shape
    ((2, 4), (8, 4))
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        activation: str = "silu",
        layouts: tuple[Layout | None, Layout | None] = (None, None),
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        check_activation(activation)
        self.activation = activation
        kwargs |= {"use_bias": False, "rngs": rngs}
        self.gate_proj = Linear(features, hidden_features, layout=layouts[0], **kwargs)
        self.up_proj = Linear(features, hidden_features, layout=layouts[0], **kwargs)
        self.down_proj = Linear(hidden_features, features, layout=layouts[1], **kwargs)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        prologue: Prologue | None = None,
        residual: bool = False,
        add_input: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """See `gated_mlp`."""
        layers = self.gate_proj, self.up_proj, self.down_proj
        options: dict[str, Any] = {"prologue": prologue, "residual": residual}
        options |= {"add_input": add_input, "activation": self.activation}
        return gated_mlp(*layers, inputs, **options)


def _alike(*layers: nnx.Linear, but: str | None = None) -> bool:
    """Whether the layers differ only in their parameters and the option `but`; refuses other layers."""
    for layer in layers:
        if not isinstance(layer, Linear) and not (
            isinstance(layer, nnx.Linear) and product_of(layer)
        ):
            raise TypeError(
                "layers computed together must be swjax.nnx.Linear or converted by quantize_model, got a "
                f"{type(layer).__name__} of {type(layer).__module__}: call others one by one"
            )
    seen = {
        (
            layer.dtype,
            layer.param_dtype,
            layer.promote_dtype,
            isinstance(layer, Linear),
            *(value for name, value in _options(layer).items() if name != but),
        )
        for layer in layers
    }
    # A subclass with its own `__call__`, such as a tapped layer, must be called directly.
    return len(seen) == 1 and all(_has_no_code_of_its_own(layer) for layer in layers)


def _has_no_code_of_its_own(layer: nnx.Linear) -> bool:
    return type(layer).__call__ in (Linear.__call__, nnx.Linear.__call__)


def _call(layer: nnx.Linear, inputs, prologue: Prologue | None, addend=None) -> jax.Array:
    """The output of one layer after a prologue."""
    if isinstance(layer, Linear):
        return layer(inputs, prologue=prologue, addend=addend)
    if _has_no_code_of_its_own(layer):
        options = {"prologue": prologue, "addend": addend} | _options(layer)
        return switchback(*_operands(layer, inputs), **options)  # type: ignore[return-value]  # one weight
    if prologue is not None:
        inputs, _ = prologue.forward(inputs, quantize_to=None, implementation="xla")
    y = layer(inputs)
    return y if addend is None else y + addend


def _operands(layer: nnx.Linear, inputs) -> tuple:
    """x, w and the bias. Layers of Flax cast w to their dtype first."""
    if isinstance(layer, Linear):
        return layer._operands(inputs)
    bias = None if layer.bias is None else layer.bias[...]
    return layer.promote_dtype((inputs, layer.kernel.get_value(), bias), dtype=layer.dtype)


def _options(layer: nnx.Linear) -> dict[str, Any]:
    if isinstance(layer, Linear):
        return layer._options()
    product = product_of(layer)
    assert product is not None, "`_alike` refuses layers that are not converted"
    given = keywords_of(getattr(layer.dot_general, "replaced", None))
    return {
        "recipe": product.recipe,
        "out_dtype": layer.preferred_element_type or given.get("preferred_element_type"),
        "precision": layer.precision,
        "implementation": product.implementation,
        "layout": product.layout,
    }


@dataclasses.dataclass(frozen=True)
class _Product:
    """The product of a Flax module: its `dot_general` or `einsum_op`, and the one that it replaces."""

    product: DotGeneral
    replaced: Callable | None
    is_einsum: bool

    def __call__(self, *args, **kwargs) -> jax.Array:
        multiply = self.product.einsum if self.is_einsum else self.product
        return multiply(*args, **keywords_of(self.replaced) | kwargs)


def quantize_model(
    model: nnx.Module,
    recipes: str | Mapping[str, str | Recipe],
    *,
    implementation: str | None = None,
) -> nnx.Module:
    """Makes the linear layers of an existing NNX model follow recipes, in place.

    A linear layer is a module with a `dot_general` or an `einsum_op`: `nnx.Linear`, `nnx.LinearGeneral` or
    `nnx.Einsum`. The projections of `nnx.MultiHeadAttention` are `nnx.LinearGeneral` layers. Parameters and
    checkpoints do not change. `print(describe_model(model))` lists converted and unconverted matrices;
    `restore_model` undoes the change. A function that copied the model before, such as `nnx.cached_partial`,
    keeps the old layers: create it after the conversion.

    Modules whose code computes ``down(activation(gate(x)) * up(x))`` of three `nnx.Linear` without bias, with
    a SiLU or GELU, run as `swjax.gated_mlp` does, if one recipe applies to them. `describe_model` lists them.

    Args:
      model: any NNX model, modified in place.
      recipes: {regular expression: recipe}. An expression must match a module's whole path, such as
        "encoder/layers/0/mlp/fc1"; the first match is used. Layers without a match do not change. The
        expression "llm" matches all layers but heads, routers and gates of experts, see `swjax.KEPT_IN_LLMS`.
        Or "llm", short for ``{"llm": "switchback"}``.
      implementation: see `swjax.kernels.dispatch`; None chooses.

    Returns:
      `model`.

    Raises:
      TypeError: `recipes` is neither, or `model` is a Linen module.
      ValueError: a recipe does not exist, or an expression or "llm" matches no linear layer, or matches one
        with a `dot_general_cls`, which computes its product itself.

    >>> mlp = nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    >>> mlp = quantize_model(mlp, {r"layers/0": "switchback"})
    >>> print(describe_model(mlp))
    layers/0  Linear.kernel  3 x 8  switchback
    layers/1  Linear.kernel  8 x 2  -           no expression matches its path
    1 of 2 matrices converted, 24 of 40 elements (60%)
    switchback: fwd int8 row x int8 tensor, dgrad int8 row x int8 tensor, wgrad not quantized
    """
    modules = modules_of(model)
    linears = {path: module for path, module in modules.items() if product_name(module)}
    is_llm = kept.is_named(recipes)
    rules: Any = kept.LLM_RULES if recipes == kept.LLM else recipes
    get_all(rules)  # refuses unknown ones
    if is_llm and all(kept.kept_kind_among(path, linears) for path in linears):
        raise ValueError(
            f"the rules 'llm' need linear layers of Flax other than heads and routers, got none in a "
            f'{type(model).__name__}: swjax.quantized(fn, "llm") converts layers of any kind'
        )
    chosen = {
        path: get(recipe, *_matrix_of(linears[path]))
        for path, recipe in first_match(kept.expanded(rules, linears), linears).items()
    }
    for path in chosen:
        refuse_dot_general_cls(path, linears[path])
    for path, recipe in chosen.items():
        layer, before = linears[path], _conversion_of(linears[path])
        if isinstance(layer, Linear):
            layer.replaced = before or (layer.recipe, layer.implementation)
            layer.set_recipe(recipe, recipe.implementation(implementation))
        else:
            layout = _layout(layer)
            named = recipe.implementation(implementation)
            product = dot_general(recipe, implementation=named, layout=layout)
            name = product_name(layer)
            replaced = before.replaced if before else getattr(layer, name)
            warn_of_own_product(path, replaced)
            setattr(layer, name, _Product(product, replaced, name == "einsum_op"))
    for module in modules.values():
        nnx_blocks.fuse(module, _gated_mlp_of)
    converted = [path for path, recipe in chosen.items() if recipe != Recipe()]
    warn_if_only_kept(converted, "print swjax.nnx.describe_model(model)")
    if is_llm:
        _warn_if_mostly_unreached(describe_model(model))
    return model


def _warn_if_mostly_unreached(conversion: Conversion) -> None:
    """Warns if code of the model may multiply more elements than recipes, as in experts."""
    if elements(conversion.unreached) > elements(m for m in conversion if m.recipe):
        matrix = conversion.unreached[0]
        warnings.warn(
            f"the rules 'llm' quantize less than half of the model, because {matrix.kind} multiplies "
            f"{matrix.path}/{matrix.name} itself: {conversion.line} converts that too",
            stacklevel=3,
        )


def _gated_mlp_of(*layers: Any) -> Callable | None:
    """The function (x, activation) -> y of converted layers of Flax; None if they do not fit together."""
    for layer in layers:
        if not isinstance(layer, nnx.Linear) or type(layer).__call__ is not nnx.Linear.__call__:
            return None
        kernel = layer.kernel.get_value()
        dtype = layer.param_dtype if isinstance(kernel, QTensor) else getattr(kernel, "dtype", None)
        if layer.bias is not None or dtype not in OPERAND_DTYPES or not product_of(layer):
            return None
    gate, up, down = layers
    if not _can_fuse(gate, up, down):
        return None
    return lambda x, activation: gated_mlp(gate, up, down, x, activation=activation)


def _matrix_of(layer: nnx.Module) -> tuple[tuple[int, int], ...]:
    """(k, n) of a layer whose kernel is a matrix, for the recipe "auto"; () for other kernels."""
    match getattr(getattr(layer, "kernel", None), "shape", ()):
        case (k, n):
            return ((k, n),)
    return ()


def product_name(module: nnx.Module) -> str:
    """The attribute of a module that holds the function of its product; "" if it has none.

    >>> product_name(nnx.Einsum("bi,io->bo", (3, 4), rngs=nnx.Rngs(0)))
    'einsum_op'
    """
    return next((name for name in ("dot_general", "einsum_op") if hasattr(module, name)), "")


def product_of(module: nnx.Module) -> DotGeneral | None:
    """The product of a Flax module if it follows a recipe, by `quantize_model` or by an argument; else None.

    >>> product_of(nnx.Linear(3, 4, dot_general=dot_general("switchback"), rngs=nnx.Rngs(0))).recipe.wgrad
    """
    function = getattr(module, product_name(module), None)
    owner = getattr(function, "__self__", function)  # `DotGeneral.einsum` is a bound method
    if isinstance(owner, _Product):
        return owner.product
    return owner if isinstance(owner, DotGeneral) else None


def restore_model(model: nnx.Module) -> nnx.Module:
    """Undoes all calls of `quantize_model`: every layer computes as before the first call.

    Args:
      model: modified in place.

    Returns:
      `model`.

    Raises:
      ValueError: a converted layer is prequantized, so it has no float weights to compute with.

    >>> layer = nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)))
    >>> restore_model(quantize_model(layer, {".*": "llm_int8"})).layers[0].dot_general.__name__
    'dot_general'
    """
    # Any, because not every module has a `dot_general`.
    modules = modules_of(model)
    changed: dict[str, Any] = {p: module for p, module in modules.items() if _conversion_of(module)}
    for path, module in changed.items():
        kernel = getattr(module, "kernel", None)  # a layer of the model's own may have another name
        if kernel is not None and isinstance(kernel.get_value(), QTensor):
            raise ValueError(
                f"layer {path!r} is prequantized and has no float weights to restore: "
                "build the model again and load its checkpoint"
            )
    for module in changed.values():
        before = _conversion_of(module)
        if isinstance(module, Linear):
            module.set_recipe(*before)
            module.replaced = None
        else:
            setattr(module, product_name(module), before.replaced)
    for module in modules.values():
        nnx_blocks.restore(module)
    return model


def _conversion_of(module):
    """The changes of `quantize_model` to a module, or None if it is not converted."""
    if isinstance(module, Linear):
        return module.replaced
    product = getattr(module, product_name(module), None)
    return product if isinstance(product, _Product) else None


@overload
def describe_model(model: nnx.Module) -> Conversion: ...
@overload
def describe_model(model: nnx.Module, *inputs: Any, **kwargs: Any) -> ProgramReport: ...
def describe_model(model: nnx.Module, *inputs: Any, **kwargs: Any) -> Conversion | ProgramReport:
    """Lists the recipe of every matrix of a model; with inputs, the FLOPs of every product.

    Embeddings, convolutions and modules that call `jnp.dot` or `jnp.einsum` themselves have no `dot_general`
    or `einsum_op`, so recipes do not apply to them. A prequantized kernel is listed with its stored shape,
    the transpose. See `quantize_model` for an example.

    Args:
      model: any NNX model, converted or not.
      *inputs, **kwargs: arguments of the model, which is traced with them and does not run: arrays or
        `jax.ShapeDtypeStruct`s.

    Returns:
      A printable table: without inputs a `swjax.linear.conversion.Conversion`, with inputs a
      `swjax.linear.program_report.ProgramReport`, whose shares say how much of each pass is in 8 bits.

    >>> model = nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    >>> print(describe_model(quantize_model(model, {"layers/0": "switchback"}), jax.numpy.ones((4, 3))))
    layers/0/kernel  a layer of swjax  3x8       1 x  60.0%  switchback
    layers/1/kernel  ab,bc->ac         4x8, 8x2  1 x  40.0%  -           no expression matches its path
    in 8 bits: 60.0% of 320 forward FLOPs, 60.0% of input gradients, 0.0% of weight gradients
    """
    conversion = Conversion()
    conversion.line = 'swjax.quantized(lambda model, *args: model(*args), "llm")'
    modules = modules_of(model)
    for path, module in modules.items():
        shapes = {name: _shape_of(value) for name, value in vars(module).items()}
        own = {name: shape for name, shape in shapes.items() if shape is not None}
        kind = type(module)
        of_model = not kind.__module__.startswith("flax.")
        conversion.note(path, kind.__name__, own, *_recipe_of(path, modules), of_model)
        if nnx_blocks.runs_fused(module):
            conversion.fused.append(path)
    if not inputs and not kwargs:
        return conversion
    graph, state = nnx.split(model)
    fn = lambda state, *args, **kwargs: nnx.merge(graph, state)(*args, **kwargs)
    return products_of(fn, state, inputs, kwargs, conversion, conversion.line)


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a parameter or of the values of a prequantized kernel; None for other attributes."""
    if isinstance(value, nnx.Variable) and isinstance(value.get_value(), QTensor):
        return value.get_value().values.shape
    return value.shape if isinstance(value, nnx.Param) else None


def _recipe_of(path: str, modules: dict[str, nnx.Module]) -> tuple[Recipe | None, str]:
    """The recipe of a module's product, or None, and the reason for its absence or that of kernels."""
    module = modules[path]
    if not isinstance(module, Linear) and not product_name(module):
        return None, TAKES_NONE
    product = module if isinstance(module, Linear) else product_of(module)
    if product is None:
        kind = kept.kept_kind_among(path, modules)
        return None, kept.reason(kind) if kind else UNMATCHED
    kernel = getattr(module, "kernel", None)
    falls_back = product.layout is None and kernel is not None and _spec(kernel) is not None
    code = (vars(kind).get("__call__") for kind in type(module).__mro__)
    if not getattr(next(filter(None, code), None), "__module__", "").startswith(
        ("flax.", "swjax.")
    ):
        return product.recipe, MAY_IGNORE
    return product.recipe, NO_LAYOUT if falls_back else ""


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """The modules of a model by their paths; "" is the model itself.

    Raises:
      TypeError: it is a Linen module.
    """
    if isinstance(model, linen.Module):
        raise TypeError(
            f"swjax.nnx needs an NNX model, got the Linen module {type(model).__name__}: "
            "use swjax.linen.quantized around its apply"
        )
    return {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}


def set_layouts(
    model: nnx.Module,
    spec_of: Callable[[str], P],
    tokens: P = TOKENS,
    reduce_dtype: str | None = None,
    reduce_later: bool = False,
) -> nnx.Module:
    """Sets the shardings of the operands of a model's `Linear` layers, in place.

    Use it for parameters that a table of rules shards, rather than Flax's metadata.

    Args:
      model: an NNX model, modified in place.
      spec_of: a function from the path of a parameter, such as "blocks/mlp/fc1/kernel", to its partition
        spec. For stacked kernels, as for `jax.lax.scan`, the last two dimensions of the spec apply.
      tokens: the spec of the leading dimensions of every layer's input.
      reduce_dtype: dtype of the sums of kernel gradients over devices; see `swjax.Layout`.
      reduce_later: setting for stacked kernels, in code that splits the stack by `split_stack`.

    Returns:
      `model`.

    >>> model = set_layouts(nnx.Dict(fc=Linear(4, 8, rngs=nnx.Rngs(0))), {"fc/kernel": P("fsdp")}.get)
    >>> model.fc.layout.w
    P('fsdp', None)
    """
    for path, module in modules_of(model).items():
        if isinstance(module, Linear):
            spec = spec_of(f"{path}/kernel".lstrip("/"))
            ndim = weight_array(module.kernel.get_value()).ndim
            whole, stacked = (*spec, *(None,) * ndim)[:ndim], ndim > 2
            module.layout = Layout(P(*whole[-2:]), tokens, reduce_dtype, reduce_later and stacked)
    return model


def split_stack(stack: nnx.Module, x: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
    """Like `nnx.split` of a stack of equal layers, as for `jax.lax.scan`, but all-reduces gradients at once.

    Devices with the same shard of a kernel all-reduce its gradient. Here they all-reduce the gradient of the
    whole stack, if the layout of its `Linear` has `reduce_later`.

    Args:
      stack: a module whose parameters have a leading axis with one entry per layer.
      x: [..., k], the input of the layers.

    >>> import jax.numpy as jnp
    >>> make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Linear(4, 4, rngs=rngs)))
    >>> graph, layers = split_stack(make(nnx.Rngs(0)), x := jnp.ones((2, 4)))
    >>> x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, layers)
    """
    graph, state = nnx.split(stack)
    layers = {path: layer for path, layer in nnx.iter_modules(stack) if isinstance(layer, Linear)}

    def leaf(path, parameter):
        if path[-1] != "kernel" or path[:-1] not in layers:
            return parameter
        if isinstance(parameter.get_value(), QTensor):  # it has no gradient
            return parameter
        return parameter.replace(reduced(parameter[...], x, layers[path[:-1]].layout))

    return graph, nnx.map_state(leaf, state)


def _layout(layer: nnx.Module) -> Layout | None:
    """The layout from the metadata of a layer's kernel, or the sharding of its array; None if unknown."""
    kernel, axes = getattr(layer, "kernel", None), _matrix_axes(layer)
    if kernel is None or axes is None or (spec := _spec(kernel)) is None:
        return None
    return layout_of_kernel(spec, kernel.ndim, *axes)


def _spec(kernel: nnx.Variable) -> P | None:
    """The PartitionSpec of a kernel that is or will be on a mesh, else None."""
    if kernel.get_metadata("out_sharding", None):
        return nnx.get_partition_spec(kernel).get_value()
    if (spec := known_spec(kernel.get_value())) is None:
        return None
    # With other names it is unknown which axes shard tokens.
    names = kernel.get_value().sharding.mesh.axis_names
    return None if {axis for axes in TOKENS for axis in axes}.isdisjoint(names) else spec


def _matrix_axes(layer: nnx.Module) -> tuple[Sequence[int], Sequence[int]] | None:
    """The axes of k and n of a kernel, counted from its end; None if experts or unknown axes precede them."""
    if isinstance(layer, nnx.Linear):
        return (-2,), (-1,)
    if isinstance(layer, nnx.LinearGeneral) and not layer.batch_axis:
        columns = len(layer.out_features)
        return range(-columns - len(layer.in_features), -columns), range(-columns, 0)
    equation = getattr(layer, "einsum_str", None)
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    operands, output = equation.replace(" ", "").split("->")
    x, w = operands.split(",")
    if any(index in x and index in output for index in w):
        return None
    axis = lambda index: w.index(index) - len(w)
    return [axis(index) for index in x if index in w], [axis(i) for i in w if i not in x]
