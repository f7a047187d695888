"""Gated MLPs in the code of other projects' NNX models, recognised by the program that they trace to."""

import copyreg
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax

from swjax.kernels.gated.reference import ACTIVATIONS
from swjax.kernels.reference import QTensor
from swjax.linear.checks import OPERAND_DTYPES

Names = tuple[str, str, str]  # attributes of a block: the layers of gate, up and down
_struct = jax.ShapeDtypeStruct
# From gate, up and down to the function (x, activation) -> y of all three; to None if they do not fit.
Together = Callable[[Any, Any, Any], Callable[[jax.Array, str], Any] | None]


def fuse(block: Any, together: Together) -> None:
    """Lets a gated MLP share memory passes, in place, if the block is one.

    Its class becomes a subclass that computes the layers together. Each call checks again that the code of
    the block traces to a gated MLP, for the given input and in the current context, and calls that code if it
    does not.

    Args:
      block: any module; a gated MLP has three linear layers.
      together: a function that returns how to compute the layers.
    """
    linears = [name for name, value in vars(block).items() if isinstance(value, nnx.Linear)]
    if is_fused(block) or len(linears) != 3:
        return
    if any(isinstance(getattr(block, name).kernel.get_value(), QTensor) for name in linears):
        return
    kind: Any = type(block)
    state = jax.eval_shape(lambda state: state, nnx.state(block))
    one_layer = jax.tree.map(lambda a: _struct(a.shape[-2:], a.dtype), state)
    for names in itertools.permutations(linears):
        layers = gate, up, down = [getattr(block, name) for name in names]
        if not together(*layers):
            continue
        *_, k, h = gate.kernel.shape
        if up.kernel.shape[-2:] != (k, h) or down.kernel.shape[-2] != h:
            continue
        x = _struct((1, 1, k), gate.dtype or gate.kernel.dtype)
        if gated_activation(names, kind.__call__, nnx.graphdef(block), one_layer, x):
            object.__setattr__(block, "__class__", _fused_class(kind, names, together))
            return


def is_fused(block: nnx.Module) -> bool:
    """Whether `fuse` changed the class of a module."""
    return hasattr(type(block), "_unfused_class")


def runs_fused(block: Any) -> bool:
    """Whether `fuse` changed a module, and its layers still fit together: others may have replaced them."""
    if not is_fused(block):
        return False
    _, names, together = type(block)._made_from
    return together(*(getattr(block, name) for name in names)) is not None


def restore(block: Any) -> None:
    """Undoes `fuse`."""
    if is_fused(block):
        object.__setattr__(block, "__class__", type(block)._unfused_class)


@functools.cache  # equal graphs share compiled functions
def _fused_class(kind: Any, names: Names, together: Together) -> type:
    def __call__(self, *args, **kwargs):
        run = together(*(getattr(self, name) for name in names))
        dtype = getattr(args[0], "dtype", None) if len(args) == 1 and not kwargs else None
        if run and dtype in OPERAND_DTYPES:
            activation = gated_activation(names, kind.__call__, *nnx.split(self), args[0])
            if activation:
                return run(args[0], activation)
        return kind.__call__(self, *args, **kwargs)

    members = {"__call__": __call__, "__module__": kind.__module__, "_unfused_class": kind}
    fused = _metaclass(kind.__class__)(kind.__name__, (kind,), members)
    fused._made_from = kind, names, together
    return fused


def _reduced(fused: Any) -> tuple:
    return _fused_class, fused._made_from


@functools.cache
def _metaclass(metaclass: Any) -> Any:
    """A metaclass whose classes, which no module contains, can be pickled."""
    pickled = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(pickled, _reduced)
    return pickled


# --- recognition --------------------------------------------------------------------------------------


def gated_activation(
    names: Names,
    code: Callable,
    graphdef: nnx.GraphDef,
    state: Any,
    x: jax.Array | jax.ShapeDtypeStruct,
) -> str | None:
    """The activation, if ``code(block, x)`` is ``down(activation(gate(x)) * up(x))``; else None.

    Both are traced, with Flax's own products, and their programs are compared. The code may order independent
    operations and the factors of products as it likes. Anything else, such as a dropout, a sharding
    constraint or a value that the block stores, makes it another program.

    Args:
      names: the attributes gate, up and down of the block.
      code: the `__call__` of a block.
      graphdef, state: the block; shapes suffice as the state.
      x: input of the block, or its shape.
    """

    def expression(call):
        def run(state, x):
            block: Any = nnx.merge(graphdef, state)
            for name in names:
                _use_own_product(getattr(block, name))
            return call(block, x), nnx.state(block)  # which the code may change

        return _expression(jax.make_jaxpr(run)(state, x))

    try:
        given = expression(code)
    except Exception:  # code that cannot run like this says so when it is called
        return None
    if given is None:
        return None

    def formula(activation):
        def run(block, x):
            gate, up, down = (getattr(block, name) for name in names)
            return down(activation(gate(x)) * up(x))

        return expression(run)

    known = (name for name, function in ACTIVATIONS.items() if formula(function) == given)
    return next(known, None)


def _use_own_product(layer: Any) -> None:
    """Gives a layer Flax's own product, which reads a prequantized kernel [n, k] as an array [k, n]."""
    layer.dot_general = lax.dot_general
    if isinstance(kernel := layer.kernel.get_value(), QTensor):
        layer.kernel = nnx.Param(kernel.values.T.astype(layer.dtype or layer.param_dtype))


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
