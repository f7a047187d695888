"""Gated MLPs in the code of other projects' NNX models, recognised by the program that they trace to."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax

from swjax.linear.checks import OPERAND_DTYPES

NAMES = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
}
# From a block to the function (x, activation) -> y of its layers; to None if it has no such layers.
Layers = Callable[[Any], Callable[[jax.Array, str], Any] | None]


def fuse(block: Any, layers_of: Layers) -> None:
    """Lets a gated MLP share memory passes, in place, if it is one.

    Its class becomes a subclass that computes the layers together. Each call checks again that the code of
    the block traces to a gated MLP, for the given input and in the current context, and calls that code if it
    does not.

    Args:
      block: any module.
      layers_of: a function that returns how to compute the layers of a block.
    """
    if is_fused(block) or layers_of(block) is None:
        return
    kind: Any = type(block)
    state, layer = nnx.state(block), block.gate_proj
    one_layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[-2:], a.dtype), state)
    dtype = layer.dtype or layer.kernel.dtype
    x = jax.ShapeDtypeStruct((1, 1, layer.kernel.shape[-2]), dtype)
    if gated_activation(kind.__call__, nnx.graphdef(block), one_layer, x):
        object.__setattr__(block, "__class__", _fused_class(kind, layers_of))


def is_fused(block: nnx.Module) -> bool:
    """Whether `fuse` changed the class of a module."""
    return hasattr(type(block), "_unfused_class")


def restore(block: Any) -> None:
    """Undoes `fuse`."""
    if is_fused(block):
        object.__setattr__(block, "__class__", type(block)._unfused_class)


@functools.cache  # equal graphs share compiled functions
def _fused_class(kind: Any, layers_of: Layers) -> type:
    def __call__(self, *args, **kwargs):
        if len(args) == 1 and hasattr(args[0], "dtype") and not kwargs and (run := layers_of(self)):
            activation = gated_activation(kind.__call__, *nnx.split(self), args[0])
            if activation and args[0].dtype in OPERAND_DTYPES:
                return run(args[0], activation)
        return kind.__call__(self, *args, **kwargs)

    members = {"__call__": __call__, "__module__": kind.__module__, "_unfused_class": kind}
    return type(kind.__name__, (kind,), members)


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
