"""Gated MLPs in the code of other projects' NNX models, recognised by the program that they trace to."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax

from swjax.kernels.reference import QTensor
from swjax.linear.api import gated_mlp
from swjax.linear.checks import OPERAND_DTYPES
from swjax.linear.contraction import DotGeneral
from swjax.linear.interception import is_active

NAMES = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
}
Products = Callable[[nnx.Module], DotGeneral | None]  # `swjax.nnx.product_of`


def fuse(block: Any, product_of: Products) -> None:
    """Lets a gated MLP share memory passes, in place, if it is one.

    Its class becomes a subclass whose call is `swjax.gated_mlp`. Each call checks again that the code of the
    block traces to a gated MLP of converted layers, for the given input and in the current context, and calls
    that code if it does not.

    Args:
      block: any module.
      product_of: a function from a layer to its product, or None if it has no recipe.
    """
    if is_fused(block) or _layers(block, product_of) is None:
        return
    state = nnx.state(block)
    one_layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[-2:], a.dtype), state)
    layer = block.gate_proj
    dtype = layer.dtype or layer.kernel.dtype
    x = jax.ShapeDtypeStruct((1, 1, layer.kernel.shape[-2]), dtype)
    kind: Any = type(block)
    if gated_activation(kind.__call__, nnx.graphdef(block), one_layer, x):
        object.__setattr__(block, "__class__", _fused_class(kind, product_of))


def is_fused(block: nnx.Module) -> bool:
    """Whether `fuse` changed the class of a module."""
    return hasattr(type(block), "_unfused_class")


def restore(block: Any) -> None:
    """Undoes `fuse`."""
    if is_fused(block):
        object.__setattr__(block, "__class__", type(block)._unfused_class)


@functools.cache  # equal graphs share compiled functions
def _fused_class(kind: type, product_of: Products) -> type:
    def __call__(self, *args, **kwargs):
        y = None
        if len(args) == 1 and isinstance(args[0], jax.Array) and not kwargs:
            y = _fused_output(self, kind.__call__, args[0], product_of)
        return kind.__call__(self, *args, **kwargs) if y is None else y

    members = {"__call__": __call__, "__module__": kind.__module__, "_unfused_class": kind}
    return type(kind.__name__, (kind,), members)


def _fused_output(block, code: Callable, x: jax.Array, product_of: Products) -> Any:
    """The output of a gated MLP; None if the block is none, or if one of its layers must run by itself."""
    layers = _layers(block, product_of)
    if layers is None or is_active():
        return None
    graphdef, state = nnx.split(block)
    activation = gated_activation(code, graphdef, state, x)
    kernels = [layer.kernel[...] for layer in layers]
    if activation is None or any(isinstance(kernel, QTensor) for kernel in kernels):
        return None
    ws = []
    for layer, kernel in zip(layers, kernels):
        x, w = layer.promote_dtype((x, kernel), dtype=layer.dtype)
        ws.append(w)
    if x.dtype not in OPERAND_DTYPES:
        return None
    of_gate, _, of_down = (product_of(layer) for layer in layers)
    assert of_gate and of_down, "`_layers` returns converted layers"
    return gated_mlp(
        x,
        *ws,
        activation=activation,
        recipe=of_gate.recipe,
        precision=layers[0].precision,
        implementation=of_gate.implementation,
        layouts=(of_gate.layout, of_down.layout),
    )


def _layers(block: nnx.Module, product_of: Products) -> list[Any] | None:
    """Flax's layers of a gated MLP, if they follow one recipe and differ in their parameters only."""
    layers = [getattr(block, name, None) for name in NAMES]
    products, settings = [], set()
    for layer in layers:
        if not isinstance(layer, nnx.Linear) or type(layer).__call__ is not nnx.Linear.__call__:
            return None
        product = product_of(layer)
        if product is None or layer.bias is not None or layer.preferred_element_type is not None:
            return None
        products.append(product)
        settings.add(
            (
                product.recipe,
                product.implementation,
                layer.precision,
                layer.dtype,
                layer.promote_dtype,
            )
        )
    return layers if len(settings) == 1 and products[0] == products[1] else None


# --- recognition --------------------------------------------------------------------------------------


def gated_activation(
    code: Callable, graphdef: nnx.GraphDef, state: Any, x: jax.Array | jax.ShapeDtypeStruct
) -> str | None:
    """The activation, if ``code(block, x)`` is ``down_proj(activation(gate_proj(x)) * up_proj(x))``.

    Both are traced, with Flax's own products, and their programs are compared. The code may order independent
    operations and the factors of products as it likes. Anything else, such as a dropout, a sharding
    constraint or an effect, makes it another program.

    Args:
      code: the `__call__` of a block.
      graphdef, state: the block; shapes suffice as the state.
      x: input of the block, or its shape.
    """

    def expression(call):
        def run(state, x):
            block: Any = nnx.merge(graphdef, state)
            for name in NAMES:
                getattr(block, name).dot_general = lax.dot_general
            return call(block, x)

        return _expression(jax.make_jaxpr(run)(state, x))

    try:
        given = expression(code)
    except Exception:  # code that cannot run like this says so when it is called
        return None

    def of(activation):
        return lambda block, x: block.down_proj(activation(block.gate_proj(x)) * block.up_proj(x))

    names = (name for name, function in ACTIVATIONS.items() if expression(of(function)) == given)
    return next(names, None)


def _expression(program: Any) -> tuple | None:
    """The results of a program as expressions of its inputs, hashed; None if it does more than that."""
    if program.effects or program.consts:
        return None
    jaxpr = program.jaxpr
    known = {variable: hash(("input", i)) for i, variable in enumerate(jaxpr.invars)}
    value = lambda atom: hash(str(atom)) if hasattr(atom, "val") else known[atom]
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [value(atom) for atom in equation.invars]
        operands = sorted(operands) if name == "mul" else operands
        for i, variable in enumerate(equation.outvars):
            known[variable] = hash((name, str(equation.params), *operands, i))
    return tuple(value(atom) for atom in jaxpr.outvars)
