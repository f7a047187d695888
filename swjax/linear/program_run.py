"""Executes the plan of a traced program, in which products follow recipes.

Each version of JAX has its own parameters of the operations that run other jaxprs; only this file knows them.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Sharding

from swjax.kernels.reference import QTensor
from swjax.linear.contraction import dot_general
from swjax.linear.frozen import FrozenWeight
from swjax.linear.layouts import Layout
from swjax.linear.program_report import TracedProduct, unsupported
from swjax.linear.ragged import ragged_switchback
from swjax.recipes import Recipe

Arrays = list[Any]

# Operations that cast or move the elements of their first operand.
CASTS = {"convert_element_type"}
RESHARDS = {"sharding_constraint", "reshard", "optimization_barrier", "name"}
GATHERS = {"all_gather", "all_gather_invariant"}
MOVES = {
    *("transpose", "reshape", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice", "split"),
    *("unstack", "tile", "rev", "copy", "stop_gradient", "pvary"),
}  # fmt: skip
MERGES = {"concatenate", "stack"}  # operations that make one array of all their operands


class Step(NamedTuple):
    """What `run` does with an equation.

    Attributes:
      execute: a function of the step, the values of the operands, and these before casts and reshards; it
        returns the same two lists for the results. The second may be shorter: what it lacks is as the values.
      eqn: the equation, or a `Group`.
      bodies: the plans of the jaxprs that it runs.
    """

    execute: Callable[["Step", Arrays, Arrays], tuple[Arrays, Arrays]]
    eqn: Any
    bodies: "tuple[Plan, ...]" = ()


class Plan(NamedTuple):
    """The steps of a jaxpr.

    Attributes:
      jaxpr, constants: the jaxpr and the arrays that it closes over.
      steps: one per equation.
      origins: of the results, see `program_plan.Origin`.
      results: the first results of `run`. Equal layers have one such function, so JAX traces it once.
    """

    jaxpr: Any
    constants: Sequence[Any]
    steps: list[Step]
    origins: list[Any]
    results: Any = None

    @property
    def changes(self) -> bool:
        """Whether a step differs from its equation."""
        return any(step.execute not in (as_it_is, move, merge, hand_on) for step in self.steps)

    def grouped(self, known: "dict[tuple, Callable]") -> "Plan":
        """The plan with equations that run as they are in groups; JAX traces those of equal layers once.

        Args:
          known: {what determines a group: its function}; groups are added.
        """
        if not self.changes:  # nothing will run its steps
            return self
        steps: list[Step] = []
        last = {atom for atom in self.jaxpr.outvars if isinstance(atom, core.Var)}
        for key, group in reversed([(k, list(g)) for k, g in groupby(self.steps, _group_of)]):
            steps[:0] = group if key is None else [_as_one(group, last, known)]
            last |= {
                atom for step in group for atom in step.eqn.invars if isinstance(atom, core.Var)
            }
        return self._replace(steps=steps)


def run(plan: Plan, values: Sequence, stored: Sequence = ()) -> tuple[Arrays, Arrays]:
    """Executes a plan.

    Args:
      plan: the plan.
      values: the arguments of its jaxpr.
      stored: for each argument that is a cast or resharded parameter, the parameter as stored, moved like the
        argument; None or nothing for others.

    Returns:
      The results, and the results before casts and reshards.
    """
    jaxpr = plan.jaxpr
    env = dict(zip(jaxpr.constvars, plan.constants)) | dict(zip(jaxpr.invars, values))
    before = {atom: array for atom, array in zip(jaxpr.invars, stored) if array is not None}

    def read(atoms) -> tuple[Arrays, Arrays]:
        arrays, parameters = [], []
        for atom in atoms:
            literal = isinstance(atom, core.Literal)
            arrays.append(atom.val if literal else env[atom])
            parameters.append(arrays[-1] if literal else before.get(atom, arrays[-1]))
        return arrays, parameters

    for step in plan.steps:
        eqn, name = step.eqn, str(step.eqn.source_info.name_stack)
        with eqn.ctx.manager, jax.named_scope(name) if name else nullcontext():
            outs, parameters = step.execute(step, *read(eqn.invars))
        env |= dict(zip(eqn.outvars, outs))
        before |= dict(zip(eqn.outvars, parameters))
    return read(jaxpr.outvars)


def as_it_is(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    """Executes an equation."""
    return _bind(step.eqn, values), []


def _bind(eqn, values: Arrays) -> Arrays:
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    outs = eqn.primitive.bind(*functions, *values, **params)
    return outs if eqn.primitive.multiple_results else [outs]


# --- groups of equations that run as they are -----------------------------------------------------------


class Group(NamedTuple):
    """Consecutive equations as one; the attributes are those of an equation that `run` reads."""

    function: Callable
    invars: list[core.Var]
    outvars: list[core.Var]
    ctx: Any
    source_info: Any


def _group_of(step: Step) -> tuple | None:
    """What the equations of a group share; None for a step that runs by itself."""
    eqn = step.eqn
    if step.execute is not as_it_is or eqn.effects:
        return None
    return eqn.ctx, str(eqn.source_info.name_stack)


def _as_one(steps: list[Step], needed: set, known: dict[tuple, Callable]) -> Step:
    """One step for several; `needed` are the variables that later steps read."""
    eqns = [step.eqn for step in steps]
    made = {var: None for eqn in eqns for var in eqn.outvars}
    read = [atom for eqn in eqns for atom in eqn.invars if isinstance(atom, core.Var)]
    invars = list(dict.fromkeys(var for var in read if var not in made))
    outvars = [var for var in made if var in needed]
    key = _description(eqns, invars, outvars)
    if key not in known:

        @jax.jit
        def operations(*values):
            env = dict(zip(invars, values))
            for eqn in eqns:
                operands = [a.val if isinstance(a, core.Literal) else env[a] for a in eqn.invars]
                env |= zip(eqn.outvars, _bind(eqn, operands))
            return [env[var] for var in outvars]

        known[key] = operations
    group = Group(known[key], invars, outvars, eqns[0].ctx, eqns[0].source_info)
    return Step(lambda step, values, stored: (step.eqn.function(*values), []), group)


def _description(eqns, invars, outvars) -> tuple:
    """Equal for groups that compute the same."""
    number = {var: i for i, var in enumerate([*invars, *(v for eqn in eqns for v in eqn.outvars)])}

    def of_atom(atom):
        if isinstance(atom, core.Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return number[atom]

    def of_parameter(value):
        try:
            hash(value)
        except TypeError:
            return id(value)
        return value

    described = [
        (
            eqn.primitive,
            *((name, of_parameter(value)) for name, value in sorted(eqn.params.items())),
            *map(of_atom, eqn.invars),
            *(var.aval for var in eqn.outvars),
        )
        for eqn in eqns
    ]
    return (*described, *(var.aval for var in invars), *(number[var] for var in outvars))


def move(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    """Moves a parameter, and the stored parameter likewise, but without gathers: its layer gathers int8."""
    if (factor := multiplied_by_one(step.eqn)) is not None:
        return [values[factor]], [stored[factor]]
    name = step.eqn.primitive.name
    if name == "optimization_barrier":  # the only one with several operands
        return jax.lax.optimization_barrier(values), stored
    if isinstance(w := values[0], FrozenWeight):  # it is the matrix already, or a stack of matrices
        if picked_axis(step.eqn) is not None:
            at = partial(jnp.take, indices=values[1][0], axis=0, mode="clip")
            w = replace(w, values=at(w.values), scale=at(w.scale))
        return [w], []
    outs = _bind(step.eqn, values)
    if name in CASTS | RESHARDS:
        return outs, stored[: len(outs)]
    if name in GATHERS or stored[0] is values[0]:
        return outs, []
    return outs, _bind(step.eqn, [stored[0], *values[1:]])


def merge(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    """Makes one array of parameters, and one of the stored ones unless their dtypes or shardings differ."""
    sharding = lambda arrays: [jax.typeof(array).sharding for array in arrays]
    alike = len({array.dtype for array in stored}) == 1 and sharding(stored) == sharding(values)
    return _bind(step.eqn, values), _bind(step.eqn, stored) if alike else []


def returned_operands(eqn: Any) -> list[int] | None:
    """Which operand each result of a function with its own derivative is; None if it computes anything."""
    if eqn.primitive.name not in ("custom_vjp_call", "custom_jvp_call"):
        return None
    jaxpr = eqn.params["call_jaxpr"].jaxpr
    if jaxpr.eqns or any(atom not in jaxpr.invars for atom in jaxpr.outvars):
        return None
    return [jaxpr.invars.index(var) for var in jaxpr.outvars]


def hand_on(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    """Executes a function that returns parameters, and may change their gradients."""
    frozen = [isinstance(value, FrozenWeight) for value in values]  # these have none
    arrays = [jnp.zeros(v.shape, v.dtype) if f else v for v, f in zip(values, frozen)]
    outs, sources = _bind(step.eqn, arrays), returned_operands(step.eqn) or []
    return [values[i] if frozen[i] else out for i, out in zip(sources, outs)], []


def multiplied_by_one(eqn: Any) -> int | None:
    """Which operand is the result, because the other is 1; None for other operations."""
    if eqn.primitive.name != "mul":
        return None
    for factor, one in ((0, eqn.invars[1]), (1, eqn.invars[0])):
        if isinstance(one, core.Literal) and np.shape(one.val) == () and one.val == 1:
            return factor if eqn.invars[factor].aval.shape == eqn.outvars[0].aval.shape else None
    return None


def picked_axis(eqn: Any) -> int | None:
    """The axis along which a gather takes one entry of an array: one layer of a stack; None for others."""
    if eqn.primitive.name != "gather" or eqn.invars[1].aval.shape != (1,):
        return None
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    picked = tuple(numbers.start_index_map)
    rest = (size for axis, size in enumerate(eqn.invars[0].aval.shape) if axis not in picked)
    if picked != tuple(numbers.collapsed_slice_dims) or eqn.outvars[0].aval.shape != tuple(rest):
        return None
    return picked[0] if sizes[picked[0]] == 1 else None


@cache
def _product(recipe, implementation, layout, dimension_numbers, precision, preferred) -> Callable:
    """A product, jitted so that JAX traces those of equal shapes once."""
    multiply = dot_general(recipe, implementation=implementation, layout=layout)

    @jax.jit
    def quantized_product(x, w):
        return multiply(x, w, dimension_numbers, precision, preferred)

    return quantized_product


def multiply(
    step: Step,
    values: Arrays,
    stored: Arrays,
    *,
    product: TracedProduct,
    recipe: Recipe,
    implementation: str | None,
    at: int,
    layout: Layout | None,
    order: Sequence[int],
) -> tuple[Arrays, Arrays]:
    """Computes a `dot_general`, whose operand `at` is a parameter, by a recipe.

    `order` is that of the contracted axes in the matrix of `layout`.
    """
    params = step.eqn.params
    x, w = values[1 - at], stored[at]
    contracted, batch = params["dimension_numbers"]
    if at == 0:
        contracted, batch = contracted[::-1], batch[::-1]
    contracted = tuple(tuple(axes[i] for i in order) for axes in contracted)
    if isinstance(w, FrozenWeight):
        q, shape = w.matrix, step.eqn.invars[at].aval.shape
        experts = [shape[axis] for axis in batch[1]]
        used = {*contracted[1], *batch[1]}
        columns = [size for axis, size in enumerate(shape) if axis not in used]
        sizes = [*experts, *columns, *(shape[axis] for axis in contracted[1])]
        scale = q.scale
        if scale.shape[-2] > 1:
            scale = scale.reshape(*experts, *columns, *(1,) * len(order))
        w = QTensor(q.values.reshape(sizes), scale)
    options = {key: params[key] for key in ("precision", "preferred_element_type")}
    try:
        product_of = partial(_product, recipe, implementation, layout, (contracted, batch))
        y = product_of(*options.values())(x, w)
    except ValueError as error:
        raise unsupported(product, error) from error
    if at == 0:  # [*batch, *rows, *columns] to [*batch, *columns, *rows]
        first, columns = len(batch[0]), x.ndim - len(contracted[0])
        y = y.transpose(*range(first), *range(columns, y.ndim), *range(first, columns))
    return [_like(y, step)], []


def _like(y: jax.Array, step: Step) -> jax.Array:
    """y with the dtype and the sharding of the result of an equation."""
    like: Any = step.eqn.outvars[0].aval
    y, spec = y.astype(like.dtype), like.sharding.spec
    return y if jax.typeof(y).sharding.spec == spec else jax.reshard(y, spec)


@cache
def _ragged_product(recipe, implementation, layout, precision, preferred) -> Callable:
    @jax.jit
    def quantized_product(x, w, group_sizes):
        options = {"recipe": recipe, "precision": precision, "out_dtype": preferred}
        options |= {"implementation": implementation, "layout": layout}
        return ragged_switchback(x, w, group_sizes, **options)

    return quantized_product


def multiply_ragged(
    step: Step,
    values: Arrays,
    stored: Arrays,
    *,
    product: TracedProduct,
    recipe: Recipe,
    implementation: str | None,
    at: int,
    layout: Layout | None,
) -> tuple[Arrays, Arrays]:
    """Computes a `ragged_dot_general`, whose right operand is a parameter, by a recipe."""
    params, x, w = step.eqn.params, values[0], stored[1]
    dimension_numbers = params["ragged_dot_dimension_numbers"]
    (contracted, (k,)), (batch, _) = dimension_numbers.dot_dimension_numbers
    ragged, groups = (
        dimension_numbers.lhs_ragged_dimensions,
        dimension_numbers.rhs_group_dimensions,
    )
    ndims = tuple(atom.aval.ndim for atom in step.eqn.invars[:2])
    if at == 0 or batch or (*ndims, len(groups)) != (2, 3, 1) or ragged == contracted:
        raise unsupported(product, "experts need x [m, k] and w [e, k, n]")
    (n,) = {0, 1, 2} - {k, *groups}
    x = x.transpose(*ragged, *contracted)
    w = w.matrix if isinstance(w, FrozenWeight) else w.transpose(*groups, k, n)
    options = params["precision"], params["preferred_element_type"]
    try:
        y = _ragged_product(recipe, implementation, layout, *options)(x, w, values[2])
    except ValueError as error:
        raise unsupported(product, error) from error
    return [_like(y, step)], []


# --- operations that run other jaxprs -----------------------------------------------------------------


class Call(NamedTuple):
    """How an operation runs jaxprs.

    Attributes:
      bodies: the jaxprs.
      operands: for each body, which operands of the equation it receives.
      carried: the operands that the first results of the first body replace in the next iteration.
      times: number of iterations, or of devices.
      alternatives: whether each body computes the results; otherwise the first does.
      sliced: the operands of which each iteration receives a slice along the first axis.
    """

    bodies: tuple
    operands: tuple[Sequence[int], ...]
    carried: Sequence[int] = ()
    times: int = 1
    alternatives: bool = False
    sliced: Sequence[int] = ()


def _differing(values: Arrays, stored: Arrays) -> Arrays:
    return [None if before is value else before for before, value in zip(stored, values)]


def _read_call(eqn) -> Call:
    body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return Call((body,), (range(len(eqn.invars)),))


def inline(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    """Runs the body of a `jax.jit`."""
    params, constrain = step.eqn.params, jax.lax.with_sharding_constraint

    def place(arrays, name):
        shardings = params.get(name, [None] * len(arrays))
        return [
            constrain(a, s) if isinstance(s, Sharding) and not isinstance(a, FrozenWeight) else a
            for a, s in zip(arrays, shardings)
        ]

    values, stored = place(values, "in_shardings"), _differing(values, stored)
    outs, parameters = run(step.bodies[0], values, stored)
    return place(outs, "out_shardings"), parameters


def _remat(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    options = {key: step.eqn.params[key] for key in ("policy", "prevent_cse")}
    body = jax.checkpoint(step.bodies[0].results, **options)
    return body(values, _differing(values, stored)), []


def _scan_sizes(eqn) -> tuple[int, int]:
    """The numbers of constants and of carried arrays."""
    if "ft_in" in eqn.params:  # jax 0.12
        constants, carried, _ = map(len, eqn.params["ft_in"].unpack())
        return constants, carried
    return eqn.params["num_consts"], eqn.params["num_carry"]


def _read_scan(eqn) -> Call:
    first, count = _scan_sizes(eqn)
    operands, carried = range(len(eqn.invars)), range(first, first + count)
    sliced = range(first + count, len(eqn.invars))
    return Call((eqn.params["jaxpr"],), (operands,), carried, eqn.params["length"], sliced=sliced)


def _scan(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    first, count = _scan_sizes(step.eqn)
    end, stored = first + count, _differing(values, stored)

    def body(carry, x):
        arguments = [*values[:first], *carry, *x[0]], [*stored[:first], *[None] * count, *x[1]]
        outs, _ = run(step.bodies[0], *arguments)
        return outs[:count], outs[count:]

    options = {key: step.eqn.params[key] for key in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, values[first:end], (values[end:], stored[end:]), **options)
    return [*carry, *ys], []


def _read_while(eqn) -> Call:
    first, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    bodies = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
    end = len(eqn.invars)
    carried = range(first + count, end)
    return Call(bodies, (range(first, end), (*range(first), *carried)), carried)


def _while(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    first, count = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
    stored = _differing(values, stored)
    body, goes_on = (plan.results for plan in step.bodies)
    of_body = slice(first, first + count)
    outs = jax.lax.while_loop(
        lambda carry: goes_on([*values[:first], *carry], stored[:first])[0],
        lambda carry: body([*values[of_body], *carry], stored[of_body]),
        values[first + count :],
    )
    return outs, []


def _cond(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    index, *operands = values
    stored = _differing(values, stored)[1:]
    return jax.lax.switch(index, [plan.results for plan in step.bodies], operands, stored), []


def _read_cond(eqn) -> Call:
    branches = eqn.params["branches"]
    operands = (range(1, len(eqn.invars)),) * len(branches)
    return Call(branches, operands, alternatives=True)


def _read_shard_map(eqn) -> Call:
    sizes = (eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    return Call((eqn.params["jaxpr"],), (range(len(eqn.invars)),), times=math.prod(sizes))


def _shard_map(step: Step, values: Arrays, stored: Arrays) -> tuple[Arrays, Arrays]:
    params, specs = step.eqn.params, list(step.eqn.params["in_specs"])
    spec_of = lambda array: jax.typeof(array).sharding.spec
    stored = [  # `in_specs` must fit the shardings of explicit meshes
        None if before is None or spec_of(before) != spec_of(value) else before
        for before, value in zip(_differing(values, stored), values)
    ]
    body = jax.shard_map(
        step.bodies[0].results,
        mesh=params["mesh"],
        in_specs=(specs, [None if a is None else spec for a, spec in zip(stored, specs)]),
        out_specs=list(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return body(values, stored), []


# {primitive: (how it runs jaxprs, executes it)}
CALLS: dict[str, tuple[Callable, Callable]] = {
    # jax 0.12 has renamed the second to the third.
    **dict.fromkeys(("jit", "closed_call", "eval_jaxpr"), (_read_call, inline)),
    "remat2": (_read_call, _remat),
    "scan": (_read_scan, _scan),
    "while": (_read_while, _while),
    "cond": (_read_cond, _cond),
    "shard_map": (_read_shard_map, _shard_map),
}
