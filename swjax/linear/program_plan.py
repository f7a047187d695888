"""Plans the conversion of a traced program: follows its parameters, and decides for every equation."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

from swjax import auto, kept, recipes
from swjax.linear.conversion import NO_LAYOUT
from swjax.linear.frozen import SLICE, Reading
from swjax.linear.layouts import TOKENS, Layout, layout_of_kernel
from swjax.linear.program_report import ProgramReport, TracedProduct, equation_of, unsupported
from swjax.linear.program_run import (
    CALLS,
    CASTS,
    GATHERS,
    MERGES,
    MOVES,
    RESHARDS,
    Plan,
    Step,
    as_it_is,
    hand_on,
    inline,
    merge,
    move,
    multiplied_by_one,
    multiply,
    multiply_ragged,
    picked_axis,
    returned_operands,
    run,
)
from swjax.recipes import QUANTIZED_DTYPES, Recipe

ACTIVATIONS = "both operands are activations"
CONSTANT = "one operand is a constant, or both are parameters"
WGRAD_STAYS = "the weight gradient stays in 16 bits: few rows or features an expert"


class Choice(NamedTuple):
    """The recipe that rules give a parameter, or the reason why they give none.

    Attributes:
      recipe, reason: one of them.
      followed: the recipe of a layer that is quantized already, if it is known.
      keeps_few_rows: whether experts of few rows stay in 16 bits.
      frozen: whether the parameter is stored in 8 bits.
      is_auto: whether the rule is "auto", whose choice depends on the weight of each product.
      is_llm: whether the rule is "llm".
    """

    recipe: Recipe | None
    reason: str = ""
    followed: Recipe | None = None
    keeps_few_rows: bool = False
    frozen: bool = False
    is_auto: bool = False
    is_llm: bool = False


class Origin(NamedTuple):
    """What is known of an array that depends on no activation.

    Attributes:
      paths: the parameters it depends on; none for a constant.
      dtype: dtype of the only parameter, as stored.
      changed: the operation that made it something else than a parameter; "" for a parameter.
      spec: the mesh axes that shard each of its dimensions; None if they are unknown.
      moves: the equations that moved the elements of the parameter, and `SLICE` where a scan read slices of
        it; None if that is not all.
    """

    paths: tuple[str, ...] = ()
    dtype: Any = None
    changed: str = ""
    spec: tuple | None = None
    moves: tuple | None = ()


Origins = list[Origin | None]  # of several arrays; None is an activation


@dataclass(eq=False)
class Planner:
    """Plans programs.

    Attributes:
      choices: {path of a parameter: its choice}.
      implementation: of the products, see `swjax.kernels.dispatch`.
      specs: {path of a parameter: its PartitionSpec}, those that are known.
      tokens: how meshes of type Auto shard activations, see `swjax.Layout`.
      groups: whether to compile other operations in groups, see `Plan.grouped`.
      products: what the programs multiply, in order.
      readings: {path of a parameter: {`str` of a reading: the reading}}, of products that follow a recipe.
      used: the parameters that something else reads.
      tables: the parameters that lookups read so far.
    """

    choices: Mapping[str, Choice]
    implementation: str | None
    specs: Mapping[str, P]
    tokens: P = TOKENS
    groups: bool = False
    products: ProgramReport = field(default_factory=ProgramReport)
    readings: dict[str, dict[str, Reading]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    _results: dict[tuple, Callable] = field(default_factory=dict)
    _groups: dict[tuple, Callable] = field(default_factory=dict)

    def plan(self, jaxpr: Any, origins: Origins, repeats: int = 1, opaque: str = "") -> Plan:
        """Plans a jaxpr, open or closed.

        Args:
          jaxpr: the jaxpr.
          origins: of its arguments.
          repeats: number of times that it runs.
          opaque: why none of its products may follow a recipe; "" if they may.
        """
        constants, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        known = {var: Origin() for var in jaxpr.constvars} | dict(zip(jaxpr.invars, origins))
        read = lambda atom: Origin() if isinstance(atom, core.Literal) else known[atom]
        steps = []
        for eqn in jaxpr.eqns:
            step, found = self._step(eqn, list(map(read, eqn.invars)), repeats, opaque)
            steps.append(step)
            known |= dict(zip(eqn.outvars, found))
        plan = Plan(jaxpr, constants, steps, list(map(read, jaxpr.outvars)))
        plan = plan.grouped(self._groups) if self.groups else plan
        results = self._results.setdefault(
            self._key(jaxpr, origins, opaque), lambda *args: run(plan, *args)[0]
        )
        return plan._replace(results=results)

    def _key(self, jaxpr, origins: Origins, opaque: str) -> tuple:
        """What determines the results of a plan for a jaxpr, which the plan keeps alive."""
        choice_of = lambda o: self._choice_of(o) if o.paths else None
        return (
            id(jaxpr),
            opaque,
            *(o and (o.changed, len(o.paths), choice_of(o), o.dtype, o.spec) for o in origins),
        )

    def _choice_of(self, origin: Origin) -> Choice:
        """The choice for a parameter; by the rule "llm" a table of lookups is an embedding or tied head."""
        choice = self.choices[origin.paths[0]]
        if choice.recipe and choice.is_llm and not self.tables.isdisjoint(origin.paths):
            return Choice(None, kept.reason("embedding"))
        return choice

    def _step(self, eqn, found: Origins, repeats: int, opaque: str) -> tuple[Step, Origins]:
        name, count, step = eqn.primitive.name, len(eqn.outvars), Step(as_it_is, eqn)
        if name in CALLS:
            return self._call(eqn, found, repeats, opaque)
        if (factor := multiplied_by_one(eqn)) is not None and found[factor]:
            return Step(move, eqn), [found[factor]]
        if (sources := returned_operands(eqn)) is not None and any(found):
            return Step(hand_on, eqn), [found[i] for i in sources]
        # An `optimization_barrier` has one result for each operand.
        moved = found[:count] if name in RESHARDS else found[:1] * count
        moves = name in CASTS | RESHARDS | GATHERS | MOVES and not _rounds(eqn)
        if (moves or (picked_axis(eqn) is not None and found[1])) and any(moved):
            if name not in CASTS | RESHARDS:
                moved = [o and _moved(eqn, o, v.aval.shape) for o, v in zip(moved, eqn.outvars)]
            return Step(move, eqn), moved
        if name in MERGES and (whole := self._merged(eqn, found)):
            return Step(merge, eqn), [whole]
        product = eqn if name in ("dot_general", "ragged_dot_general") else grouped_product(eqn)
        if product is not None:
            step = self._product(product, found, repeats, opaque)
            step = Step(as_it_is, eqn) if step.execute is as_it_is else step
        else:
            self._note_use(eqn, found, repeats, opaque)
        if step.execute is as_it_is:
            self._note_used(found)
        return step, [_combined(found, name)] * count

    def _merged(self, eqn, found: Origins) -> Origin | None:
        """The origin of one array of several parameters; None if they have no common choice or dtype."""
        parameters = [o for o in found if o and o.paths and not o.changed]
        common = {(self.choices[path], o.dtype) for o in parameters for path in o.paths}
        if len(parameters) < len(found) or len(common) > 1:
            return None
        paths = tuple(dict.fromkeys(path for o in parameters for path in o.paths))
        specs = {o.spec for o in parameters}
        spec = merged_spec(eqn, parameters[0].spec) if len(specs) == 1 else None
        return parameters[0]._replace(paths=paths, spec=spec, moves=None)

    def _note_used(self, found: Iterable[Origin | None]) -> None:
        self.used |= {path for o in found if o for path in o.paths}

    def _product(self, eqn, found: Origins, repeats: int, opaque: str) -> Step:
        """Lists a `dot_general`, also a ragged one, and decides whether it follows a recipe."""
        lhs, rhs = (atom.aval for atom in eqn.invars[:2])
        ragged, groups, dimension_numbers = _dimensions(eqn)
        equation = equation_of(dimension_numbers, lhs.ndim, rhs.ndim, groups)
        (_, contracted), (_, batch) = dimension_numbers
        summed = {*contracted, *batch, *groups}
        columns = [size for axis, size in enumerate(rhs.shape) if axis not in summed]
        choice, at = self._choose(eqn, found, opaque), 0 if found[1] is None else 1
        sums = dimension_numbers[0][at]  # the axes of the parameter that are summed
        recipe, reason, origin = choice.recipe, choice.reason, found[at]
        layout, order = None, tuple(range(len(contracted)))
        experts = groups or tuple(dimension_numbers[1][at])
        if recipe is not None and choice.is_auto and not choice.frozen:
            recipe = recipes.get(auto.NAME, _matrix((lhs, rhs)[at], sums, experts))
        if recipe is not None and origin is not None and {*origin.paths} & self.specs.keys():
            if origin.spec is not None:
                layout, order = self._layout(origin.spec, sums, experts)
            reason = "" if layout else NO_LAYOUT
        listed = recipe
        if recipe is not None and recipe.wgrad is not None and groups:
            rows, shape = lhs.shape[0], (rhs.shape[contracted[0]], math.prod(columns))
            if not auto.rotated_rows_pay(rows, rhs.shape[groups[0]], shape):
                listed, reason = replace(recipe, wgrad=None), reason or WGRAD_STAYS
        product = TracedProduct(
            " + ".join(dict.fromkeys(path for o in found[:2] if o for path in o.paths)),
            f"ragged {equation}" if ragged else equation,
            (lhs.shape, rhs.shape),
            2 * lhs.size * math.prod(columns) * repeats,
            listed,
            reason,
            _are_quantized(lhs, rhs) or (recipe is not None and recipe.fwd is not None),
            choice.frozen,
            eqn.source_info.traceback,
        )
        self.products.append(product)
        if recipe is None or origin is None:
            return Step(as_it_is, eqn)
        if not jnp.issubdtype(origin.dtype, jnp.floating):
            raise unsupported(product, f"its dtype is {origin.dtype}, but recipes quantize floats")
        if origin.moves is None:
            self._note_used([origin])
        else:
            along = tuple(sums[i] for i in order)
            reading = Reading(origin.moves, along, experts)
            self.readings.setdefault(origin.paths[0], {})[str(reading)] = reading
        options: dict[str, Any] = {"recipe": recipe, "implementation": self.implementation}
        options |= {"product": product, "at": at, "layout": layout}
        if ragged:
            return Step(partial(multiply_ragged, **options), eqn)
        return Step(partial(multiply, order=order, **options), eqn)

    def _choose(self, eqn, found: Origins, opaque: str) -> Choice:
        """The recipe of a `dot_general`, also a ragged one, or the reason why it has none."""
        lhs, rhs = (atom.aval for atom in eqn.invars[:2])
        known = [origin for origin in found[:2] if origin is not None]
        if _are_quantized(lhs, rhs):
            return Choice(None, "already quantized")
        if not known:
            return Choice(None, ACTIVATIONS)
        origin = known[0]
        if len(known) > 1 or not origin.paths:
            return Choice(None, CONSTANT)
        if opaque or origin.changed:
            return Choice(None, opaque or f"{origin.changed} changes the parameter first")
        choice, (ragged, groups, numbers) = self._choice_of(origin), _dimensions(eqn)
        if math.prod(lhs.shape[axis] for axis in numbers[0][0]) == 1:
            return Choice(None, "an outer product, which sums nothing")
        if choice.keeps_few_rows and ragged and ragged.lhs_ragged_dimensions:
            rows, count = lhs.shape[ragged.lhs_ragged_dimensions[0]], rhs.shape[groups[0]]
            if few_rows := auto.few_rows(rows, count, origin.dtype.itemsize):
                return Choice(None, few_rows)
        return choice

    def _layout(
        self, spec: tuple, contracted: Sequence[int], experts: Sequence[int]
    ) -> tuple[Layout | None, tuple[int, ...]]:
        """The layout of a product with a parameter, and an order of contracted axes, the sharded ones first.

        It is None if other axes than those of experts and the first of k and of n are sharded.
        """
        order = tuple(sorted(range(len(contracted)), key=lambda i: spec[contracted[i]] is None))
        matrix = [axis for axis in range(len(spec)) if axis not in experts]
        from_end = lambda axes: [matrix.index(axis) - len(matrix) for axis in axes]
        rows = from_end([contracted[i] for i in order])
        columns = from_end([axis for axis in matrix if axis not in contracted])
        layout = layout_of_kernel(P(*(spec[i] for i in matrix)), len(matrix), rows, columns)
        of_experts = P(*(spec[axis] for axis in experts))
        return layout and replace(layout, tokens=self.tokens, experts=of_experts), order

    def _call(self, eqn, found: Origins, repeats: int, opaque: str) -> tuple[Step, Origins]:
        """Plans an operation that runs other jaxprs."""
        read, execute = CALLS[eqn.primitive.name]
        call, found, mark = read(eqn), list(found), len(self.products)

        def of(i: int) -> Origin | None:
            """The origin of an operand in the body, where slices of a stack lack its first axis."""
            origin = found[i]
            if origin is not None and eqn.primitive.name == "shard_map":
                return origin._replace(moves=None)
            if i not in call.sliced or origin is None:
                return origin
            spec, moves = origin.spec, origin.moves
            return origin._replace(
                spec=spec and spec[1:], moves=None if moves is None else (*moves, SLICE)
            )

        while True:
            plans = tuple(
                self.plan(body, [of(i) for i in operands], repeats * call.times, opaque)
                for body, operands in zip(call.bodies, call.operands)
            )
            # What a loop carries is the same parameter in each iteration only if the body returns it.
            into = [found[i] for i in call.carried]
            same = [o if o == out else None for o, out in zip(into, plans[0].origins)]
            if same == into:
                break
            for i, origin in zip(call.carried, same):
                if origin is None:
                    self._note_used([found[i]])
                found[i] = origin
            del self.products[mark:]
        results = plans if call.alternatives else plans[:1]
        outs = [
            each[0] if len({*each}) == 1 else _combined([*each], eqn.primitive.name)
            for each in zip(*(p.origins for p in results))
        ]
        for each in zip(*(p.origins for p in results)):
            if len({*each}) > 1:
                self._note_used(each)
        if eqn.primitive.name == "scan":  # what it stacks is not one parameter
            self._note_used(outs[len(into) :])
            outs[len(into) :] = [None] * (len(outs) - len(into))
        casts = execute is inline and any(o and o.paths and not o.changed for o in outs)
        frozen = any(self.choices[path].frozen for o in found if o for path in o.paths)
        changes = casts or frozen or any(plan.changes for plan in plans)
        return Step(execute if changes else as_it_is, eqn, plans), outs

    def _note_use(self, eqn, found: Origins, repeats: int, opaque: str) -> None:
        """Lists what is neither a `dot_general`, nor movement, nor a call that is followed."""
        name = eqn.primitive.name
        out: Any = eqn.outvars[0].aval if eqn.outvars else None
        used = [
            (" + ".join(o.paths), atom.aval)
            for o, atom in zip(found, eqn.invars)
            if o and o.paths and getattr(atom.aval, "ndim", 0) > 1
        ]

        equation = name

        def note(reason: str, flops: Callable[[Any], int] = lambda w: 0, quantized=False) -> None:
            for path, w in used or [("", eqn.invars[0].aval)]:
                choice = self.choices.get(path, Choice(None))
                recipe = choice.followed if quantized else None
                falls_back = NO_LAYOUT if choice.reason == NO_LAYOUT else ""
                reason_of = falls_back if recipe else reason
                row = path, equation, (w.shape,), flops(w) * repeats, recipe, reason_of, quantized
                self.products.append(TracedProduct(*row, choice.frozen, eqn.source_info.traceback))

        if name == "gather" and used:
            note("a lookup")
            self.tables.update(*(o.paths for o in found[:1] if o))
        elif name == "conv_general_dilated":
            features = eqn.params["dimension_numbers"].rhs_spec[0]
            w = eqn.invars[1].aval
            note("a convolution", lambda _: 2 * out.size * w.size // w.shape[features])
        elif name == "pallas_call" or "triton" in name:
            note(opaque or "a kernel, of unknown FLOPs")
        elif used and _is_quantized_layer(eqn):
            used = [(path, w) for path, w in used if 1 not in w.shape]  # no scales
            tokens = out.size // out.shape[-1]
            equation = "a layer of swjax"
            flops = lambda w: 2 * tokens * math.prod(w.shape[-2:])  # of one expert, or one layer
            note("already quantized", flops, quantized=True)
        else:
            for jaxpr in core.jaxprs_in_params(eqn.params):
                unknown: Origins = [None] * len(jaxpr.invars)
                aligned = found if len(found) == len(unknown) else unknown
                self.plan(jaxpr, aligned, repeats, opaque or f"inside {name}")


def _dimensions(eqn: Any) -> tuple[Any, tuple[int, ...], Any]:
    """What a ragged product adds, or None; rhs's axes of groups; and the numbers of a `dot_general`."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    if ragged is None:
        return None, (), eqn.params["dimension_numbers"]
    return ragged, tuple(ragged.rhs_group_dimensions), ragged.dot_dimension_numbers


def _matrix(w: Any, contracted: Sequence[int], experts: Sequence[int]) -> tuple[int, int]:
    """(k, n) of a parameter, or of that of each expert."""
    k, count = (math.prod(w.shape[axis] for axis in axes) for axes in (contracted, experts))
    return k, w.size // max(k * count, 1)


def _are_quantized(lhs: Any, rhs: Any) -> bool:
    return {lhs.dtype.name, rhs.dtype.name} <= {*QUANTIZED_DTYPES}


def _rounds(eqn: Any) -> bool:
    """Whether an equation casts floats to integers or booleans, which changes the parameter."""
    if eqn.primitive.name not in CASTS:
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact)


def _moved(eqn: Any, origin: Origin, shape: tuple[int, ...]) -> Origin:
    """The origin of the result of an operation that moves elements."""
    spec, moves = moved_spec(eqn, origin.spec, shape), origin.moves
    several = eqn.primitive.multiple_results or len(eqn.invars) > 1
    alone = eqn.primitive.name not in GATHERS and not several
    step = eqn if alone else None
    if picked_axis(eqn) == 0 and {*(moves or ())} <= {SLICE}:
        step = SLICE
    return origin._replace(spec=spec, moves=None if moves is None or not step else (*moves, step))


def moved_spec(eqn: Any, spec: tuple | None, shape: tuple[int, ...]) -> tuple | None:
    """The mesh axes that shard the result of an operation that moves elements; None if they are unknown.

    Args:
      eqn: the operation.
      spec: those of its operand.
      shape: of the result.
    """
    if spec is None:
        return None
    name, before = eqn.primitive.name, eqn.invars[0].aval.shape
    picked = eqn.params["axis"] if name == "unstack" else picked_axis(eqn)
    if picked is not None:
        return (*spec[:picked], *spec[picked + 1 :])
    if name == "transpose":
        return tuple(spec[axis] for axis in eqn.params["permutation"])
    if name == "broadcast_in_dim":
        sources = dict(zip(eqn.params["broadcast_dimensions"], zip(spec, before)))
        entries = [(sources.get(i, (None, 0)), size) for i, size in enumerate(shape)]
        return tuple(entry if of == size else None for (entry, of), size in entries)
    if len(before) == len(shape):  # a part of a sharded dimension has another sharding
        return tuple(e if n == m else None for e, n, m in zip(spec, before, shape))
    return reshaped_spec(spec, before, shape)


def merged_spec(eqn: Any, spec: tuple | None) -> tuple | None:
    """The mesh axes that shard one array of several with this spec; None if they are unknown."""
    if spec is None:
        return None
    if eqn.primitive.name == "stack":
        return (*spec[: eqn.params["axis"]], None, *spec[eqn.params["axis"] :])
    return None if spec[eqn.params["dimension"]] else spec


def reshaped_spec(spec: tuple, before: tuple[int, ...], after: tuple[int, ...]) -> tuple | None:
    """The spec after a reshape: the first of the dimensions that are merged or split has the sharding.

    >>> reshaped_spec(("fsdp", "tensor", None), (8, 4, 2), (8, 8))
    ('fsdp', 'tensor')
    >>> reshaped_spec((None, "tensor"), (4, 2), (8,)) is None
    True
    """
    result, of, to = [], list(zip(spec, before)), list(after)
    while of or to:
        group, sizes = of[:1], to[:1]
        del of[:1], to[:1]
        while (n := math.prod(size for _, size in group)) != (m := math.prod(sizes)):
            longer, rest = (sizes, to) if m < n else (group, of)
            longer.append(rest.pop(0))  # type: ignore[arg-type]  # of its own kind
        # Dimensions of size 1 are not sharded.
        entries = [entry for entry, size in group if size > 1] or [None]
        if any(entry is not None for entry in entries[1:]):
            return None
        places = [size > 1 for size in sizes]
        first = places.index(True) if True in places else -1
        result += [entries[0] if i == first else None for i in range(len(sizes))]
    return tuple(result)


def _combined(found: Origins, name: str) -> Origin | None:
    """The origin of the result of an operation."""
    if None in found:
        return None
    paths = tuple(dict.fromkeys(path for o in found if o for path in o.paths))
    return Origin(paths, None, name) if paths else Origin()


def _is_quantized_layer(eqn) -> bool:
    """Whether an equation is a layer of this library with 8-bit operands."""
    eqns = list(_equations(eqn.params))
    names = {inner.params.get("name") for inner in eqns}
    dtypes = {str(getattr(var.aval, "dtype", "")) for inner in eqns for var in inner.outvars}
    return "swjax_y" in names and not dtypes.isdisjoint(QUANTIZED_DTYPES)


def _equations(params: Mapping[str, Any]) -> Iterator[Any]:
    """The equations of all jaxprs in the parameters of an equation, at any depth."""
    for jaxpr in core.jaxprs_in_params(params):
        for eqn in jaxpr.eqns:
            yield eqn
            yield from _equations(eqn.params)


def grouped_product(eqn: Any) -> Any | None:
    """The `ragged_dot_general` of a call of `megablox.gmm`, JAX's kernel for TPUs; None for other equations.

    A call with a group offset or an output to add to, which are a fourth operand, has no such product.
    """
    if eqn.primitive.name != "custom_vjp_call" or len(eqn.invars) != 3:
        return None
    if [each.params.get("name") for each in eqn.params["call_jaxpr"].jaxpr.eqns] != ["gmm"]:
        return None
    products = [each for each in _equations(eqn.params) if each.primitive.name == "dot_general"]
    if not products:
        return None
    (_, (k,)), _ = products[0].params["dimension_numbers"]
    options = {
        "ragged_dot_dimension_numbers": lax.RaggedDotDimensionNumbers(
            (((1,), (k + 1,)), ((), ())), (0,), (0,)
        ),
        "preferred_element_type": eqn.outvars[0].aval.dtype,
    }
    shapes = (jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars)
    product = jax.make_jaxpr(partial(lax.ragged_dot_general, **options))(*shapes).eqns[-1]
    return product.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
