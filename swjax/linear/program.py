"""`quantized`: a function whose products with parameters follow recipes, by rewriting its traced program.

`program_plan` follows the parameters through the jaxpr, decides for every equation and lists every product;
`program_run` executes the plan.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from swjax import auto, kept, recipes
from swjax.linear.contraction import dot_general
from swjax.linear.conversion import (
    NO_LAYOUT,
    TAKES_NONE,
    UNMATCHED,
    Matrix,
    warn_if_only_kept,
)
from swjax.linear.frozen import FrozenWeight, freeze
from swjax.linear.layouts import TOKENS, known_spec
from swjax.linear.program_plan import ACTIVATIONS, CONSTANT, Choice, Origin, Planner
from swjax.linear.program_report import ProgramReport, TracedProduct
from swjax.linear.program_run import Plan, run
from swjax.recipes import Recipe

_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | FrozenWeight


@dataclass(frozen=True)
class Quantized:
    """A function whose products with parameters follow recipes; the function `quantized` creates it."""

    fn: Callable
    rules: str | Mapping[str, str | Recipe] = field(hash=False)
    implementation: str | None = None
    specs: Mapping[str, P] = field(default_factory=dict, hash=False)
    tokens: P = TOKENS

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns `fn(params, *args, **kwargs)`; arguments that are not arrays are static."""
        # One operation at a time outside of `jax.jit`: each call would compile its groups again.
        in_jit = isinstance(jnp.zeros(()), jax.core.Tracer)
        plan, planner, program = self._planned(params, args, kwargs, groups=in_jit)
        _warn(planner, program)
        outs, _ = run(plan, program.values)
        result, changes = jax.tree.unflatten(program.out, outs)
        for variable, value in zip(program.changed, changes):
            variable.set_value(value)
        return result

    def report(self, params: Any, *args: Any, **kwargs: Any) -> ProgramReport:
        """Lists every product of `fn`; arguments may be `jax.ShapeDtypeStruct`s."""
        return self._planned(params, args, kwargs)[1].products

    def freeze(self, params: Any, *args: Any, only: str = ".*", **kwargs: Any) -> Any:
        """Quantizes parameters that are not trained, once instead of in each call.

        Calls return the same values as for the parameters themselves, and compute no weight gradients. The
        input gradient multiplies the same 8-bit matrix, transposed. Recipes with one scale per output channel
        quantize it again along the other axis for that. With recipes that rotate features, the input
        gradient is rotated back.

        Args:
          params, *args, **kwargs: arguments of the function; others than the parameters to quantize may be
            `jax.ShapeDtypeStruct`s.
          only: a regular expression of the whole paths of the parameters to quantize.

        Returns:
          `params`, in which parameters that only products with a recipe read are `FrozenWeight`s: 8-bit
          [*stack, *experts, n, k], a quarter of the bytes of float32. Others are unchanged.

        Raises:
          ValueError: no such parameter matches, or a recipe needs the weight itself.

        >>> x, params = jnp.ones((2, 8)), {"up": jnp.ones((8, 32)), "down": jnp.ones((32, 8))}
        >>> int8 = quantized(lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"], {".*": "switchback"})
        >>> frozen = int8.freeze(params, x)
        >>> frozen["up"].values.shape, bool(jnp.all(int8(frozen, x) == int8(params, x)))
        ((32, 8), True)
        """
        planner = self._planned(params, args, kwargs, freezing=only)[1]
        named = dict(_named(params))
        frozen = {}
        for path, readings in planner.readings.items():
            recipe, w = planner.choices[path].recipe, named[path]
            alone = path not in planner.used and len(readings) == 1
            if recipe and alone and re.fullmatch(only, path) and not _is_frozen(w):
                (reading,) = readings.values()
                frozen[path] = freeze(w, reading, recipe)
        if not frozen:
            raise ValueError(
                f"freeze needs a parameter that matches {only!r} and that one kind of product with a recipe "
                f"reads, got {sorted(named)}: print the report"
            )
        structure: jax.tree_util.PyTreeDef = jax.tree.structure(params, is_leaf=_is_frozen)
        return structure.unflatten(frozen.get(path, leaf) for path, leaf in _named(params))

    def _planned(self, params, args, kwargs, groups=False, freezing=None):
        program = _traced(self.fn, params, args, kwargs)
        choices = _choices(self.rules, [path for path, _ in program.parameters])
        for path, w in program.parameters:  # a frozen weight is quantized once for all steps
            if _is_frozen(w) or (freezing is not None and re.fullmatch(freezing, path)):
                choices[path] = choices[path]._replace(keeps_few_rows=False, frozen=_is_frozen(w))
        specs = {**_specs(params, self.tokens), **self.specs}
        planner = Planner(choices, self.implementation, specs, self.tokens, groups)
        plan = program.planned(planner)
        return plan, planner, program


class _Program(NamedTuple):
    """A traced function.

    Attributes:
      jaxpr: of its arrays.
      values: the arrays, those of the parameters first.
      parameters: their paths and arrays; caches and statistics are none.
      changed: Flax variables of the arguments that the function changes, such as random counters.
      out: structure of the result, and of the values of `changed`.
    """

    jaxpr: Any
    values: list[Any]
    parameters: list[tuple[str, Any]]
    changed: list[Any]
    out: Any

    def planned(self, planner: Planner) -> Plan:
        """Plans the program; the planner lists the products."""
        origins: list[Origin | None] = [
            Origin((path,), w.dtype, "", _entries(planner.specs.get(path), w.ndim))
            for path, w in self.parameters
        ]
        origins += [None] * (len(self.values) - len(origins))
        plan = planner.plan(self.jaxpr, origins)
        planner.used |= {path for origin in plan.origins if origin for path in origin.paths}
        for path, w in self.parameters:
            if not isinstance(w, FrozenWeight) or path not in {*planner.used, *planner.readings}:
                continue
            read = planner.choices[path].recipe, {*planner.readings.get(path, ())}
            if path in planner.used or read != (w.recipe, {w.reading}):
                raise ValueError(
                    f"the parameter {path!r} was frozen for another product or recipe: freeze the "
                    "parameters with this function and these rules"
                )
        return plan


def _traced(fn: Callable, params: Any, args: tuple, kwargs: dict) -> _Program:
    """Traces ``fn(params, *args, **kwargs)``; arguments that are not arrays are static."""
    leaves, tree = jax.tree.flatten((params, args, kwargs), is_leaf=_is_frozen)
    arrays_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]
    are_parameters = dict(enumerate(_are_parameters(params)))
    at = sorted(arrays_at, key=lambda i: not are_parameters.get(i))  # stable: parameters first
    given, changed = _variables((params, args, kwargs)), list[Any]()

    def of_arrays(*arrays):
        whole = list(leaves)
        for i, array in zip(at, arrays):
            whole[i] = array
        params, args, kwargs = _sharing(given, jax.tree.unflatten(tree, whole))
        copies = _variables((params, args, kwargs))
        before = [copy.get_value() for copy in copies]
        result = fn(params, *args, **kwargs)
        _warn_of_new(copies, _variables((params, args, kwargs)))
        after = [copy.get_value() for copy in copies]
        written = [i for i, value in enumerate(after) if value is not before[i]]
        changed[:] = [given[i] for i in written]
        return result, [after[i] for i in written]

    values = [leaves[i] for i in at]
    like = [value.like if _is_frozen(value) else value for value in values]
    jaxpr, out = jax.make_jaxpr(of_arrays, return_shape=True)(*like)
    named = _named(params)
    parameters = [named[i] for i in at if are_parameters.get(i)]
    return _Program(jaxpr, values, parameters, changed, jax.tree.structure(out))


def _variables(tree: Any) -> list[Any]:
    """The Flax NNX variables of a tree that are no parameters.

    Raises:
      TypeError: the tree has an optimizer, which would update a copy of the parameters.
    """
    if (nnx := sys.modules.get("flax.nnx")) is None:
        return []
    kinds = (nnx.Variable, nnx.Optimizer)
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    if any(isinstance(leaf, nnx.Optimizer) for leaf in leaves):
        raise TypeError(
            "swjax.quantized needs a function that updates no parameters, got an nnx.Optimizer as an "
            "argument: convert the loss, and update the parameters outside of it"
        )
    return [leaf for leaf in leaves if _is_state(leaf)]


def _is_state(node: Any) -> bool:
    """Whether a node of a tree is a Flax NNX variable that is no parameter."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)


def _sharing(given: list[Any], copied: Any) -> Any:
    """A copied tree in which the copies of one variable of `given` are one, such as shared counters."""
    structure: jax.tree_util.PyTreeDef
    nodes, structure = jax.tree.flatten(copied, is_leaf=_is_state)
    originals, first = iter(given), dict[int, Any]()
    return structure.unflatten(
        first.setdefault(id(next(originals)), node) if _is_state(node) else node for node in nodes
    )


def _warn_of_new(known: list[Any], variables: list[Any]) -> None:
    """Warns if a function added variables to its arguments, which are copies."""
    ids = {id(variable) for variable in known}
    new = [type(variable).__name__ for variable in variables if id(variable) not in ids]
    if new:
        warnings.warn(
            f"swjax.quantized drops variables that its function adds to a model, here {new[0]}: read those "
            "of Module.sow by nnx.capture",
            stacklevel=2,
        )


def _are_parameters(params: Any) -> list[bool]:
    """For each leaf of the first argument, whether it may be a weight: not in a cache or in statistics."""
    nnx = sys.modules.get("flax.nnx")
    kinds = (nnx.Cache, nnx.BatchStat, nnx.Intermediate) if nnx else ()
    is_linen = isinstance(params, Mapping) and "params" in params  # collections of variables
    flags = []
    is_leaf = lambda node: isinstance(node, kinds) or _is_frozen(node)
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_leaf):
        is_weight = not isinstance(node, kinds)
        if is_linen and path[0].key in ("cache", "batch_stats", "intermediates"):
            is_weight = False
        flags += [is_weight] * len(jax.tree.leaves(node, is_leaf=_is_frozen))
    return flags


def products_of(
    fn: Callable, params: Any, args: tuple, kwargs: dict, matrices: Iterable[Matrix], line: str
) -> ProgramReport:
    """The products of a model, with the recipes of its converted layers: `describe_model` with inputs.

    Args:
      fn, params, args, kwargs: the model as a function, and its arguments.
      matrices: the report of the conversion.
      line: code that applies `quantized` to the model.
    """
    program = _traced(fn, params, args, kwargs)
    choices = dict.fromkeys((path for path, _ in program.parameters), Choice(None, UNMATCHED))
    stored = {path for path, w in program.parameters if w.dtype.name in recipes.QUANTIZED_DTYPES}
    for matrix in matrices:
        reason = matrix.reason
        if matrix.recipe is not None:
            plain = matrix.recipe.fwd is None
            reason = "its recipe has no 8-bit forward product" if plain else _REACHED[1]
            reason = NO_LAYOUT if matrix.reason == NO_LAYOUT else reason
        name = f"{matrix.path}/{matrix.name}".lstrip("/")
        for path in choices:
            if re.fullmatch(rf"(?:params/)?{re.escape(name)}(?:/(?:values|scale|0|1))?", path):
                if matrix.reason == TAKES_NONE:
                    is_kept = kept.kept_kind_among(path, choices)
                    reason = _KEPT if is_kept else _REACHED[0]
                choices[path] = Choice(None, reason, matrix.recipe, frozen=path in stored)
    planner = Planner(choices, None, {})
    program.planned(planner)
    report = planner.products
    more = sum(product.flops for product in report if product.reason in _REACHED)
    if more:
        share = more / sum(product.flops for product in report)
        report.remedy = f"swjax.quantized reaches {share:.1%} of the forward FLOPs more: {line}"
    return report


_KEPT = f'{TAKES_NONE}; the rules "llm" keep it in 16 bits'
_REACHED = tuple(
    f"{reason}; swjax.quantized reaches it" for reason in (TAKES_NONE, "code of its own")
)


def quantized(
    fn: Callable,
    rules: str | Mapping[str, str | Recipe] = "llm",
    *,
    implementation: str | None = None,
    sharded_like: Any = None,
    tokens: P = TOKENS,
) -> Quantized:
    """Returns `fn` with every product of an activation and a parameter computed by a recipe.

    `fn(params, *args)` is traced to a program, and each parameter is followed by its path through casts,
    transposes, reshapes, slices and reshards to the products that read it, also inside jit, scan, remat,
    cond, while, vmap and shard_map. It may stack or concatenate parameters of one recipe. Such a product
    becomes the operation of `swjax.switchback`, which quantizes the parameter as stored, before its casts.
    Neither `fn` nor the parameters change; other variables of an NNX model, such as random counters,
    statistics and caches, change as by `fn`. Put `jax.jit`, `jax.grad` and `jax.vmap` around the result:
    without `jax.jit`, each call traces `fn` and runs one operation at a time.

    Kept as they are and listed by `report`: functions with custom derivatives, kernels, layers that are
    quantized already, convolutions, lookups, outer products, products of two activations, such as caches,
    parameters that the program scales, adds or casts to integers first, and the matrices of LoRA. Ragged
    products follow `swjax.ragged_switchback`. If `fn` differentiates inside, its input gradients follow the
    recipe's forward product, and its weight gradients are products of two activations.

    Args:
      fn: a function of parameters and further arguments, such as a loss or an `apply`; or of an NNX model or
        its state. Only the first argument has parameters.
      rules: {regular expression: recipe}. An expression must match the whole path of a parameter, such as
        "layers/0/mlp/up_proj/kernel"; the first match is used, and "standard" keeps a product. The
        expression "llm" matches all parameters but those of routers, gates of experts, norms, embeddings and
        heads, see `swjax.KEPT_IN_LLMS`, and tables of lookups; a `gate` next to an `up` is an MLP's. Or
        "llm", short for ``{"llm": "switchback"}``. With "llm" and the recipe "auto", `jax.lax.ragged_dot`
        of few rows an expert stays in 16 bits, see `swjax.auto.few_rows`.
      implementation: see `swjax.kernels.dispatch`; None chooses.
      sharded_like: a tree with the paths of the parameters: arrays, `jax.ShapeDtypeStruct`s with shardings,
        shardings or PartitionSpecs. On meshes with axes of type Auto, kernels need them, because inside
        `jax.jit` arrays do not show their sharding. None reads Flax's metadata. `report` lists the products
        that run through XLA.
      tokens: PartitionSpec of the leading dimensions of activations there, see `swjax.Layout`.

    Returns:
      A function with the arguments of `fn`, and a method `report` with the same arguments.

    Raises:
      TypeError: `fn` is a module of Flax instead of a function of its parameters; or, in a call, an argument
        is an `nnx.Optimizer`.
      ValueError: a recipe does not exist; or, in a call, an expression matches no parameter, a rule names a
        parameter of integers that is multiplied, or no recipe supports a product.

    >>> import jax.numpy as jnp
    >>> params = {"up": jnp.ones((8, 32)), "norm": jnp.ones(8), "lm_head": jnp.ones((32, 16))}
    >>> def apply(params, x):
    ...     return jnp.einsum("btd,dh->bth", x * params["norm"][None, None], params["up"]) @ params["lm_head"]
    >>> int8 = quantized(apply, "llm")
    >>> int8(params, jnp.ones((2, 4, 8))).shape
    (2, 4, 16)
    >>> print(int8.report(params, jnp.ones((2, 4, 8))))
    up       abc,cd->abd  2x4x8, 8x32    1 x  33.3%  switchback
    lm_head  abc,cd->abd  2x4x32, 32x16  1 x  66.7%  -           the head stays in 16 bits
    in 8 bits: 33.3% of 1.23e+04 forward FLOPs, 33.3% of input gradients, 0.0% of weight gradients
    """
    remedies = {"flax.linen": "its apply", "flax.nnx": "lambda model, *args: model(*args)"}
    for library, remedy in remedies.items():
        if library in sys.modules and isinstance(fn, sys.modules[library].Module):
            raise TypeError(
                "swjax.quantized needs a function of parameters, got the module "
                f"{type(fn).__name__}: pass {remedy}"
            )
    dot_general(implementation=implementation)  # refuses one that does not exist
    if rules != kept.LLM:
        recipes.get_all(rules)  # type: ignore[arg-type]  # it refuses other types
    return Quantized(fn, rules, implementation, _specs(sharded_like, tokens), tokens)


def _is_frozen(leaf: Any) -> bool:
    return isinstance(leaf, FrozenWeight)


def _named(tree: Any, is_leaf: Callable[[Any], bool] = _is_frozen) -> list[tuple[str, Any]]:
    """The path and the leaf of each parameter, "." for a tree of one; Flax's boxes add no key to paths."""
    names = {"flax.nnx": "Variable", "flax.core.meta": "AxisMetadata"}
    holders = tuple(getattr(sys.modules[m], n) for m, n in names.items() if m in sys.modules)
    stops = lambda node: is_leaf(node) or isinstance(node, holders)
    named = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stops):
        for below, leaf in jax.tree_util.tree_leaves_with_path(node, is_leaf=is_leaf):
            name = jax.tree_util.keystr((*path, *below[1:]), simple=True, separator="/")
            named.append((name or ".", leaf))
    return named


def _specs(tree: Any, tokens: P) -> dict[str, P]:
    """The PartitionSpec of each parameter that has one: that of Flax's metadata, or of its array.

    Arrays count only on meshes with an axis of `tokens`, which otherwise does not say how tokens are sharded.
    """
    leaves = _named(tree, lambda node: _metadata(node) is not None)
    axes = {
        axis for entry in tokens for axis in ((entry,) if isinstance(entry, str) else entry or ())
    }
    specs = {}
    for path, leaf in leaves:
        spec = _metadata(leaf)
        if spec is None and (spec := known_spec(leaf)) is not None:
            mesh = getattr(getattr(leaf, "sharding", leaf), "mesh", None)
            spec = spec if mesh is None or axes & {*mesh.axis_names} else None
        if spec is not None:
            specs[path] = spec
    return specs


def _metadata(node: Any) -> P | None:
    """The PartitionSpec in the metadata of a Flax variable; None if it has none."""
    nnx, linen = (sys.modules.get(name) for name in ("flax.nnx", "flax.linen"))
    if nnx and isinstance(node, nnx.Variable) and node.get_metadata("out_sharding", None):
        return nnx.get_partition_spec(node).get_value()
    if linen and type(node) is linen.Partitioned:
        return node.get_partition_spec()
    return None


def _entries(spec: P | None, ndim: int) -> tuple | None:
    return None if spec is None else (*spec, *(None,) * ndim)[:ndim]


# --- rules -----------------------------------------------------------------------------------------------


def _choices(rules: str | Mapping[str, str | Recipe], paths: Sequence[str]) -> dict[str, Choice]:
    if isinstance(rules, str):
        rules = kept.LLM_RULES
    by_kind = {pattern: (rule, pattern == kept.LLM) for pattern, rule in rules.items()}
    named = recipes.first_match(kept.expanded(by_kind, paths), paths, kind="parameter")
    choices = {}
    for path in paths:
        rule, is_llm = named.get(path, (None, False))
        recipe, reason = None if rule is None else recipes.get(rule), UNMATCHED
        if rule is None and kept.is_named(rules):
            reason = kept.reason(kept.kept_kind_among(path, paths))
        if recipe == Recipe():
            recipe, reason = None, "its rule is 'standard'"
        choices[path] = Choice(
            recipe,
            "" if recipe else reason,
            keeps_few_rows=is_llm or rule == auto.NAME,
            is_auto=rule == auto.NAME,
            is_llm=is_llm,
        )
        if kept.kept_kind(path) == "lora":
            choices[path] = Choice(None, kept.reason("lora"))
    return choices


def _warn(planner: Planner, program: _Program) -> None:
    """Warns if the rules reach less than half of what they name, or only routers, embeddings and heads.

    Also if half of the products are of another argument than the first, which has the parameters.
    """
    report = "print the report of swjax.quantized"
    converted = [product for product in planner.products if product.recipe]
    warn_if_only_kept([product.path for product in converted], report)
    named = lambda p: any(planner.choices[path].recipe for path in p.path.split(" + ") if path)
    missed = [p for p in planner.products if _OUT_OF_REACH.search(p.reason) and named(p)]
    flops = lambda products: sum(p.flops for p in products)
    if converted and flops(missed) <= flops(converted):
        other = _of_other_arguments(planner, program)
        if other and flops(other) >= flops(converted):  # without rows, nothing has FLOPs
            warnings.warn(
                "only the first argument has parameters, but half of the products are of arrays of others, "
                f"as at {other[0].site or other[0].equation}: pass the parameters first; {report}",
                stacklevel=3,
            )
        return
    much = "less than half of what they name" if converted else "nothing"
    message = f"rules quantize {much}, no product has a parameter of the first argument"
    for product in missed or [*filter(named, planner.products)] or planner.products:
        if product.path:
            message = f"rules quantize {much}; {product.path!r} stays, because: {product.reason}"
            if product.reason == CONSTANT:
                report = "pass arrays that the function captures, such as a batch, as arguments"
            break
    warnings.warn(f"{message}; {report}", stacklevel=3)


def _of_other_arguments(planner: Planner, program: _Program) -> list[TracedProduct]:
    """The products of an activation and a matrix of another argument than the first, as it was passed."""
    of_activations = [p for p in planner.products if p.reason == ACTIVATIONS]
    if not of_activations:
        return []
    others = Planner({"other": Choice(None, "other")}, None, {})
    count, avals = len(program.parameters), program.jaxpr.in_avals
    passed = [Origin(("other",), aval.dtype) for aval in avals[count:]]
    others.plan(program.jaxpr, [*[None] * count, *passed])
    of_code = lambda p: (p.traceback, p.equation, p.shapes)  # an einsum of three has two products
    sites = {of_code(p) for p in of_activations}
    is_batched = lambda p: set.intersection(*map(set, re.split(",|->", p.equation))) - {" "}
    of_others = (p for p in others.products if p.reason == "other" and of_code(p) in sites)
    return [p for p in of_others if not is_batched(p)]  # a cache has the axis of the batch


_OUT_OF_REACH = re.compile("^inside | changes the parameter first$")
