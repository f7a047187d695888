"""SwitchBack for Flax Linen: drop-in layers, and a context for existing models."""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import opt_einsum
from flax import errors, traverse_util
from flax import linen as nn
from flax.linen import spmd

from swjax.kept import is_named
from swjax.kernels.reference import QTensor
from swjax.linear.api import gated_mlp, plain_weight, switchback
from swjax.linear.checks import check_activation
from swjax.linear.contraction import DotGeneral, dot_general, keywords_of
from swjax.linear.conversion import (
    MAY_IGNORE,
    NOT_RUN,
    TAKES_NONE,
    UNMATCHED,
    Conversion,
    refuse_dot_general_cls,
    warn_if_only_kept,
    warn_of_own_product,
)
from swjax.linear.interception import is_active
from swjax.linear.layouts import Layout, layout_of_kernel
from swjax.linear.program import products_of
from swjax.linear.program_report import ProgramReport
from swjax.linear.prologues import Gated, Prologue
from swjax.recipes import Recipe, get, get_all, unmatched

# JAX's caches include its value in their key, so a function that was traced with other recipes, or without
# any, is traced again. This holds for `jax.jit` and for Flax's wrappers of it, such as `nn.jit`.
_recipes_in_use = jax.make_user_context(default_value=None)


class Dense(nn.Dense):
    """`flax.linen.Dense` whose three matrix products follow `recipe`.

    Parameters and checkpoints are those of `flax.linen.Dense`. The weight is quantized from the parameter
    in `param_dtype`, not from a copy in `dtype`.

    Attributes:
      recipe: a name in `swjax.recipes.RECIPES`, "auto", or a `swjax.recipes.Recipe`.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      layout: shardings of input and kernel, see `swjax.Layout`.
      The other attributes are those of `flax.linen.Dense`.

    >>> import jax.numpy as jnp
    >>> layer = Dense(4, recipe="switchback")
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> layer.apply(params, jnp.ones((2, 3))).shape
    (2, 4)
    """

    recipe: str | Recipe = "switchback"
    implementation: str | None = None
    layout: Layout | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``inputs w + bias``: [..., k] -> [..., n]."""
        if self.dot_general is not None or self.dot_general_cls is not None:
            raise ValueError(
                "swjax.linen.Dense computes its own product and takes no dot_general: "
                "give it to flax.linen.Dense, or choose a recipe here"
            )
        y = switchback(*_operands(self, inputs), layout=self.layout, **_options(self))
        assert isinstance(y, jax.Array), "one weight without residual has one output"
        return y


def _operands(layer: Dense, inputs: jax.Array) -> tuple[jax.Array, Any, jax.Array | None]:
    """The inputs in the layer's dtype, its kernel and its bias; in the layer's compact method."""
    inputs = jnp.asarray(inputs)
    kernel: Any = _quantized_kernel(layer)
    if kernel is None:
        shape = (inputs.shape[-1], layer.features)
        kernel = layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
        _note_kernel(layer, get(layer.recipe, *_matrix_of(layer)), 1)
    bias = None
    if layer.use_bias:
        bias = layer.param("bias", layer.bias_init, (layer.features,), layer.param_dtype)
    like = jnp.zeros((), layer.param_dtype) if isinstance(kernel, QTensor) else kernel
    x, _, bias = layer.promote_dtype(inputs, like, bias, dtype=layer.dtype)
    assert x is not None, "promote_dtype returns None only for None"
    return x, plain_weight(kernel, x), bias


def _options(layer: Dense) -> dict[str, Any]:
    return {
        "recipe": get(layer.recipe, *_matrix_of(layer)),
        "precision": layer.precision,
        "implementation": layer.implementation,
    }


class Projection(Dense):
    """A layer of `GatedMLP`, which computes its product."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> Any:
        """Returns the inputs in the layer's dtype, the kernel, and the options of the product."""
        x, kernel, _ = _operands(self, inputs)
        return x, kernel, _options(self)


class GatedMLP(nn.Module):
    """The MLP of language models, ``down_proj(activation(gate_proj(x)) * up_proj(x))``, without biases.

    The parameters are gate_proj/kernel, up_proj/kernel and down_proj/kernel. `quantized` applies to its
    layers as to `Dense`; if their recipes differ, each quantizes separately.

    Attributes:
      hidden_features: outputs of gate_proj and up_proj.
      activation: "silu", "gelu" (the exact form) or "gelu_tanh".
      recipe, implementation: see `Dense`.
      layouts: shardings of gate_proj and up_proj, and of down_proj, see `swjax.Layout`.
      dtype, param_dtype, precision, kernel_init: see `flax.linen.Dense`.

    >>> import jax.numpy as jnp
    >>> layer = GatedMLP(8)
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 4)))
    >>> layer.apply(params, jnp.ones((2, 4)), add_input=True).shape
    (2, 4)
    """

    hidden_features: int
    activation: str = "silu"
    recipe: str | Recipe = "switchback"
    implementation: str | None = None
    layouts: tuple[Layout | None, Layout | None] = (None, None)
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Callable = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(
        self, inputs: jax.Array, *, prologue: Prologue | None = None, add_input: bool = False
    ) -> jax.Array:
        """[..., k] -> [..., k]; see `swjax.gated_mlp`."""
        check_activation(self.activation)
        names = "dtype", "param_dtype", "precision", "kernel_init", "recipe", "implementation"
        shared: dict[str, Any] = {name: getattr(self, name) for name in names} | {"use_bias": False}
        layer: Any = partial(Dense if is_active() else Projection, **shared)
        gate, up = (layer(self.hidden_features, name=name) for name in ("gate_proj", "up_proj"))
        down = layer(inputs.shape[-1], name="down_proj")
        if not is_active():  # else Qwix's rules are those of the module that multiplies
            hidden_inputs = jnp.zeros((self.hidden_features,), inputs.dtype)
            (inputs, *of_gate), (_, *of_up) = gate(inputs), up(inputs)
            of_down = down(hidden_inputs)[1:]
            kernels, options = zip(of_gate, of_up, of_down)
            if all(each == options[0] for each in options):
                y: Any = gated_mlp(
                    inputs,
                    *kernels,
                    activation=self.activation,
                    prologue=prologue,
                    add_input=add_input,
                    layouts=self.layouts,
                    **options[0],
                )
                return y
            layouts = self.layouts[0], *self.layouts
            gate, up, down = (
                partial(switchback, w=w, layout=layout, **each)
                for w, layout, each in zip(kernels, layouts, options)
            )
        x: Any = inputs
        if prologue is not None:
            x, _ = prologue.forward(inputs, quantize_to=None, implementation="xla")
        activation = Gated(self.activation)
        hidden, _ = activation.forward((gate(x), up(x)), quantize_to=None, implementation="xla")
        y = down(hidden)
        return y + inputs.astype(y.dtype) if add_input else y


@contextmanager
def quantized(
    recipes: Mapping[str, str | Recipe], *, implementation: str | None = None
) -> Iterator[Conversion]:
    """A context in which the linear layers of any Linen model follow recipes.

    A linear layer is a `Dense`, `DenseGeneral` or `Einsum`. The projections of attention modules are
    `DenseGeneral` layers. Parameters and checkpoints do not change; outside the context the model computes as
    before. The recipes are part of the key of JAX's caches: a function under `jax.jit` or `nn.jit` is traced
    once with them and once without. Contexts do not nest. A context holds for the thread that opens it.

    Args:
      recipes: {regular expression: recipe}. An expression must match a module's whole path, such as
        "encoder/layer_0/mlp/Dense_0"; the first match is used. Layers without a match do not change.
      implementation: see `swjax.kernels.dispatch`; None chooses.

    Yields:
      A printable `swjax.linear.conversion.Conversion`: the recipe of each matrix of the model that was traced
      or ran. Embeddings, convolutions and modules that call `jnp.dot` or `jnp.einsum` themselves have no
      `dot_general`, so recipes do not apply to them. Layers that `nn.jit` compiled before are listed
      without recipe: their code does not run again.

    Raises:
      TypeError: `recipes` is not a mapping.
      ValueError: a recipe does not exist; another of these contexts is open; or model code ran, and an
        expression matched no linear layer, or matched one with a `dot_general_cls`, which computes its
        product itself.

    >>> import jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
    >>> params = model.init(jax.random.key(0), jnp.ones((4, 3)))
    >>> @jax.jit
    ... def predict(params, x):
    ...     with quantized({r"layers_0": "switchback"}) as conversion:
    ...         y = model.apply(params, x)
    ...     print(conversion)
    ...     return y
    >>> predict(params, jnp.ones((4, 3))).shape
    layers_0  Dense.kernel  3 x 8  switchback
    layers_2  Dense.kernel  8 x 2  -           no expression matches its path
    1 of 2 matrices converted, 24 of 40 elements (60%)
    switchback: fwd int8 row x int8 tensor, dgrad int8 row x int8 tensor, wgrad not quantized
    (4, 2)
    """
    if is_named(recipes):
        raise TypeError(
            'swjax.linen.quantized reads no "llm", because it meets the layers one by one: use '
            'swjax.quantized(model.apply, "llm")'
        )
    interceptor = _Interceptor(recipes, implementation)
    if _recipes_in_use.value is not None:
        raise ValueError(
            "swjax.linen.quantized runs inside another swjax.linen.quantized: give all expressions to one "
            "context, whose first match is used"
        )
    in_use = tuple(interceptor.recipes.items()), implementation
    with nn.intercept_methods(interceptor), _recipes_in_use(in_use):
        yield interceptor.conversion
    interceptor.check_all_matched()
    if interceptor.conversion:
        _effective.add(in_use)
    elif recipes and in_use not in _effective:
        warnings.warn(f"swjax.linen.quantized converts nothing: {_NOTHING_RAN}", stacklevel=3)


# Values of `_recipes_in_use` with which compiled functions may exist.
_effective: set[tuple] = set()


def describe_model(
    model: nn.Module,
    variables: Any,
    *inputs: Any,
    recipes: Mapping[str, str | Recipe] | None = None,
    **kwargs: Any,
) -> ProgramReport:
    """Lists the FLOPs of every product of a Linen model, and which of them recipes compute in 8 bits.

    Args:
      model: any Linen model; it is traced and does not run.
      variables: its variables: arrays or `jax.ShapeDtypeStruct`s.
      *inputs, **kwargs: further arguments of its `apply`.
      recipes: those of `quantized`; None describes the model as it is.

    Returns:
      A printable `swjax.linear.program_report.ProgramReport`.

    Raises:
      TypeError, ValueError: see `quantized`; call it outside of that context.

    >>> import jax.numpy as jnp
    >>> model, x = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)]), jnp.ones((4, 3))
    >>> params = model.init(jax.random.key(0), x)
    >>> report = describe_model(model, params, x, recipes={"layers_0": "switchback"})
    >>> round(report.share, 2), round(report.input_gradient_share, 2)
    (0.6, 0.6)
    """
    with quantized(recipes or {}) as conversion:
        return products_of(model.apply, variables, inputs, kwargs, conversion, conversion.line)


_NOTHING_RAN = (
    "no Linen module with matrices ran here: call the model inside the context, also by jax.jit, which "
    "runs its code only to compile; swjax.nnx.quantize_model converts NNX models"
)


class _Interceptor:
    """Intercepts modules' methods, and runs linear layers whose path an expression matches with a recipe."""

    def __init__(self, recipes: Mapping[str, str | Recipe], implementation: str | None):
        get_all(recipes)  # refuses unknown ones
        self.recipes = dict(recipes)
        self.conversion = Conversion()
        self.conversion.if_empty = _NOTHING_RAN
        self.conversion.line = 'swjax.quantized(model.apply, "llm")'
        self._implementation = implementation
        self._calls: list[_Call] = []  # within the outermost method that runs
        self._is_within = False
        self._paths: set[str] = set()  # of linear layers
        self._ran: set[str] = set()  # paths of all modules that ran
        self._parents: set[str] = set()  # paths of all modules with parameters
        self._replaced: set[str] = set()  # paths of einsums that ran with a recipe
        self._unmatched = set(recipes)

    def __call__(self, call: Callable, args: tuple, kwargs: dict, context) -> Any:
        """Flax calls this function instead of each method of a module."""
        module, method = context.module, context.method_name
        if module.scope is None or method == "setup":  # no parameters yet
            return call(*args, **kwargs)
        is_outermost, self._is_within = not self._is_within, True
        try:
            result = self._run(module, method, call, args, kwargs, _is_of_flax(context))
            if is_outermost:
                self._note_calls(module)
        finally:
            if is_outermost:
                self._calls, self._is_within = [], False
        return result

    def _run(
        self, module, method: str, call: Callable, args: tuple, kwargs: dict, is_of_flax: bool
    ) -> Any:
        """Calls a method of a bound module: with a recipe, if an expression matches this linear layer.

        A subclass may have code of its own, which calls that of Flax. Only the code of Flax is replaced.
        """
        path = "/".join(module.path)
        recipe, reason = None, TAKES_NONE
        if method != "__call__":
            result = call(*args, **kwargs)
        elif isinstance(module, (nn.Dense, nn.DenseGeneral)):
            matched = self._match(module, path)
            recipe = matched or _recipe_given(module)
            reason = "" if recipe else UNMATCHED
            if recipe and not is_of_flax and not isinstance(module, Dense):
                reason = MAY_IGNORE
            result = self._run_linear(module, path, matched, call, args, kwargs, is_of_flax)
        elif isinstance(module, nn.Einsum):
            recipe = self._match(module, path)
            reason = "" if recipe else UNMATCHED
            self._replaced.discard(path)
            replaced = recipe if is_of_flax else None
            result = self._run_einsum(module, path, replaced, call, args, kwargs)
            if recipe and path not in self._replaced:
                recipe, reason = None, "has code of its own"
        else:
            result = call(*args, **kwargs)
        kind = type(module).__name__
        if hasattr(module, "nnx_class"):  # nnx.bridge.ToLinen and MaxText's own
            for below, shapes in _held_shapes(module).items():
                self._calls.append(_Call(below, kind, shapes, None, "in an NNX module"))
        of_model = not type(module).__module__.startswith("flax.")
        self._calls.append(_Call(path, kind, _own_shapes(module), recipe, reason, of_model))
        return result

    def _note_calls(self, outermost) -> None:
        """Adds the modules that ran to the report, and those below `outermost` that did not run.

        Within `nn.scan` and `nn.vmap` a module has the parameters of one layer, but the outermost module has
        the whole stacks.
        """
        held = _held_shapes(outermost)
        for path, kind, shapes, recipe, reason, own_code in self._calls:
            whole = held.get(path, {})
            shapes = {name: _stacked(shape, whole.get(name)) for name, shape in shapes.items()}
            self.conversion.note(path, kind, shapes, recipe, reason, own_code)
            self._ran.add(path)
        for path, shapes in held.items():
            if path not in self._ran:
                self.conversion.note(path, "", shapes, None, NOT_RUN)
        self._parents.update(held)

    def _match(self, module, path: str) -> Recipe | None:
        """The recipe of the first expression that matches the path."""
        self._paths.add(path)
        matching = [pattern for pattern in self.recipes if re.fullmatch(pattern, path)]
        self._unmatched.difference_update(matching)
        return get(self.recipes[matching[0]], *_matrix_of(module)) if matching else None

    def _run_linear(
        self, module, path: str, recipe: Recipe | None, call, args, kwargs, is_of_flax: bool
    ):
        kernel = None if isinstance(module, Dense) else _quantized_kernel(module)
        if kernel is None or not is_of_flax:
            with _computing_as(module, path, recipe, self._implementation):
                try:
                    return call(*args, **kwargs)
                except errors.ScopeParamShapeError as error:
                    if kernel is None:
                        raise
                    raise ValueError(
                        f"the kernel of {path!r} is quantized, and {type(module).__name__} reads it in code "
                        "of its own: exclude this layer from the expressions of its quantization"
                    ) from error
        if recipe is None:
            raise ValueError(
                f"the kernel of {path!r} is quantized and needs its recipe, but no expression "
                f"matches: pass the expressions of its quantization"
            )
        product = dot_general(recipe, implementation=recipe.implementation(self._implementation))
        given = keywords_of(module.dot_general)
        return _multiply(module, kernel, partial(product, **given), *args, **kwargs)

    def _run_einsum(self, module: nn.Einsum, path: str, recipe: Recipe | None, call, args, kwargs):
        if recipe is None:
            return call(*args, **kwargs)
        self._replaced.add(path)
        if not module.has_variable("params", "kernel"):
            call(*args, **kwargs)  # initializes the parameters
        product = dot_general(recipe, implementation=recipe.implementation(self._implementation))
        return _einsum(module, product, *args, **kwargs)

    def check_all_matched(self) -> None:
        """Raises a ValueError if model code ran and an expression matched none of its layers.

        Layers that did not run may be linear: `nn.jit` calls its compiled program without the code, and a
        model of two towers may run one of them.
        """
        idle = self._parents - self._ran
        for pattern in sorted(self._unmatched):
            if self._ran and not any(re.fullmatch(pattern, path) for path in idle):
                raise unmatched(pattern, sorted(self._paths))
        converted = [m.path for m in self.conversion if m.recipe not in (None, Recipe())]
        warn_if_only_kept(converted, "print the conversion")


def _is_of_flax(context) -> bool:
    """Whether the intercepted method is the `__call__` of Flax's linear layers, not that of a subclass."""
    layers = nn.Dense, nn.DenseGeneral, nn.Einsum
    return inspect.unwrap(context.orig_method.func) in {inspect.unwrap(x.__call__) for x in layers}


@contextmanager
def _computing_as(module, path: str, recipe: Recipe | None, implementation: str | None):
    """A context in which a bound (frozen) module has another recipe; None keeps its own."""
    other: dict[str, Any]
    if recipe is None:
        other = {}
    elif isinstance(module, Dense):
        other = {"recipe": recipe, "implementation": recipe.implementation(implementation)}
    else:
        refuse_dot_general_cls(path, module)
        warn_of_own_product(path, module.dot_general)
        named = recipe.implementation(implementation)
        product = dot_general(recipe, implementation=named, layout=_layout(module))
        given = keywords_of(module.dot_general)
        other = {"dot_general": partial(product, **given) if given else product}
        if not _tuple(getattr(module, "batch_dims", ())):
            _note_kernel(module, recipe, len(_tuple(module.features)))
    before = {name: getattr(module, name) for name in other}
    try:
        for name, value in other.items():
            object.__setattr__(module, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _layout(module: nn.Dense | nn.DenseGeneral) -> Layout | None:
    """The layout from the metadata of a layer's kernel; None if there is none."""
    box = module.variables.get("params", {}).get("kernel")
    if not isinstance(box, nn.Partitioned) or _tuple(getattr(module, "batch_dims", ())):
        return None
    spec = nn.get_partition_spec(box)
    if isinstance(box, nn.LogicallyPartitioned):
        spec = spmd.logical_to_mesh(spec, box.rules)
    ndim, columns = len(box.value.shape), len(_tuple(module.features))
    return layout_of_kernel(spec, ndim, range(-ndim, -columns), range(-columns, 0))


def _recipe_given(module: nn.Dense | nn.DenseGeneral) -> Recipe | None:
    """The recipe that model code gave a layer, by an argument."""
    if isinstance(module, Dense):
        return get(module.recipe, *_matrix_of(module))
    return module.dot_general.recipe if isinstance(module.dot_general, DotGeneral) else None


class _Call(NamedTuple):
    """A call of a module: the arguments of `Conversion.note`."""

    path: str
    kind: str
    shapes: dict[str, tuple[int, ...]]
    recipe: Recipe | None
    reason: str
    own_code: bool = False


def _own_shapes(module) -> dict[str, tuple[int, ...]]:
    """The shapes of a bound module's own parameters, by name."""
    params = module.variables.get("params", {})
    own = {name: value for name, value in params.items() if not isinstance(value, Mapping)}
    return {name: shape for name, value in own.items() if (shape := _shape(value)) is not None}


def _matrix_of(module) -> tuple[tuple[int, ...], ...]:
    """(k, n) of a bound layer whose kernel is a matrix, for the recipe "auto"; () for other kernels."""
    shape = _own_shapes(module).get("kernel", ())
    return (shape,) if len(shape) == 2 else ()


def _held_shapes(module) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of a bound module and of those below it, {path: {name: shape}}."""
    held: dict[str, dict[str, tuple[int, ...]]] = {}
    for (*below, name), value in traverse_util.flatten_dict(
        module.variables.get("params", {})
    ).items():
        if (shape := _shape(value)) is not None:
            held.setdefault("/".join((*module.path, *below)), {})[name] = shape
    return held


def _shape(parameter) -> tuple[int, ...] | None:
    """The shape of an array, also in a box of Flax's metadata; None for a `QTensor`, which is two arrays."""
    arrays = jax.tree.leaves(parameter)
    return arrays[0].shape if len(arrays) == 1 else None


def _stacked(shape: tuple[int, ...], whole: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of the whole stack if `shape` is that of one of its layers, else `shape`."""
    sizes = iter(whole or ())
    return whole if whole and all(size in sizes for size in shape) else shape


# --- inference with kernels that are already quantized, see swjax.serving -----------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A parameter "kernel" that a product with a recipe reads.

    Attributes:
      recipe: recipe of the product.
      shape: [*in_features, *out_features], for one layer of a stack.
      outs: number of axes of out_features.
      dtype: the dtype that its module expects.
      cast_to: the dtype to which Flax casts it before the product; None means no cast.
    """

    recipe: Recipe
    shape: tuple[int, ...]
    outs: int
    dtype: jnp.dtype
    cast_to: jax.typing.DTypeLike | None


_kernels: ContextVar[dict[tuple[str, ...], Kernel] | None] = ContextVar("_kernels", default=None)


@contextmanager
def kernels_used() -> Iterator[dict[tuple[str, ...], Kernel]]:
    """Yields {path of a module: its `Kernel`} for modules with a recipe; model code fills it as it runs."""
    kernels: dict = {}
    token = _kernels.set(kernels)
    try:
        yield kernels
    finally:
        _kernels.reset(token)


def _note_kernel(module, recipe: Recipe, outs: int) -> None:
    kernels, shape = _kernels.get(), _own_shapes(module).get("kernel")
    if kernels is not None and shape is not None:
        cast_to = None if isinstance(module, Dense) else module.dtype
        kernels[module.path] = Kernel(recipe, shape, outs, jnp.dtype(module.param_dtype), cast_to)


def _quantized_kernel(module) -> QTensor | None:
    """The kernel of a bound module if it is quantized, else None."""
    kernel = module.variables.get("params", {}).get("kernel")
    return kernel if isinstance(kernel, QTensor) else None


def _multiply(
    layer: nn.Dense | nn.DenseGeneral, kernel: QTensor, product: Callable, inputs: jax.Array
) -> jax.Array:
    """The output of a Flax layer whose kernel is a `QTensor`, which Flax's own code does not support."""
    axes = sorted(axis % inputs.ndim for axis in _tuple(getattr(layer, "axis", -1)))
    bias = nn.meta.unbox(layer.get_variable("params", "bias")) if layer.use_bias else None
    like = jnp.zeros((), layer.param_dtype)
    x, _, bias = layer.promote_dtype(inputs, like, bias, dtype=layer.dtype)
    contracted = (tuple(axes), tuple(range(len(axes))))
    y = product(x, kernel, (contracted, ((), ())), precision=layer.precision)
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def _einsum(
    layer: nn.Einsum, product: DotGeneral, inputs: jax.Array, einsum_str: str | None = None
) -> jax.Array:
    """The output of a Flax einsum, which calls `jnp.einsum` itself, with another product."""
    equation = nn.merge_param("einsum_str", layer.einsum_str, einsum_str)
    kernel = nn.meta.unbox(layer.get_variable("params", "kernel"))
    bias = nn.meta.unbox(layer.get_variable("params", "bias")) if layer.use_bias else None
    x, w, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    assert x is not None and w is not None, "promote_dtype returns None only for None"
    y = product.einsum(
        equation,
        x,
        w,
        precision=layer.precision,
        preferred_element_type=layer.preferred_element_type,
    )
    if bias is None:
        return y
    operands, output, _ = opt_einsum.parser.parse_einsum_input((equation, x, w))
    sizes = dict(zip(operands.split(",")[1], w.shape))
    return y + bias.reshape([sizes.get(index, 1) for index in output])


def _tuple(sizes) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)
