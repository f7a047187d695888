"""Every recipe under every transformation of JAX: does it work, and if not, with which error?

`OUTCOMES` has the answers. The tests check them, and `python tests/test_transformations.py` writes them into
the table of docs/transformations.md.
"""

import pickle
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import swjax
from swjax import checkpoint_policies
from swjax.kernels import dispatch
from swjax.recipes import RECIPES

PAGE = Path(__file__).parent.parent / "docs" / "transformations.md"

YES = "yes"
NO_FORWARD_MODE = (
    "no: `TypeError: can't apply forward-mode autodiff (jvp) to a custom_vjp function`"
)
STANDARD_ONLY = {name: YES if name == "standard" else NO_FORWARD_MODE for name in RECIPES}

# {transformation: the outcome of all recipes, or {recipe: outcome}}
OUTCOMES: dict[str, str | dict[str, str]] = {
    "`jax.jit`": YES,
    "`jax.eval_shape`": YES,
    "ahead of time: `jax.jit(f).lower(...).compile()`": YES,
    "donation: `jax.jit(f, donate_argnums=...)`": YES,
    "`jax.grad`": YES,
    "`jax.value_and_grad`": YES,
    "`jax.vjp`": YES,
    "`jax.jacrev`": YES,
    "`jax.vmap`, over tokens or over weights": YES,
    "`jax.grad` of `jax.vmap`": YES,
    "`jax.vmap` of `jax.grad`": YES,
    "`jax.vmap` over an axis of an explicit mesh, and its `jax.grad`": YES,
    "second order: `jax.hessian`": YES,
    "second order: `jax.grad` of `jax.grad`": YES,
    "`jax.jvp`": STANDARD_ONLY,
    "`jax.jacfwd`": STANDARD_ONLY,
    "`jax.linearize`": STANDARD_ONLY,
    "`jax.checkpoint`": YES,
    "`jax.checkpoint`, `everything_saveable`": YES,
    "`jax.checkpoint`, `nothing_saveable`": YES,
    "`jax.checkpoint`, `dots_saveable`": YES,
    "`jax.checkpoint`, `dots_with_no_batch_dims_saveable`": YES,
    "`jax.checkpoint`, `save_anything_except_these_names`": YES,
    "`jax.checkpoint`, `save_any_names_but_these`": YES,
    "`jax.checkpoint`, `save_only_these_names`": YES,
    "`jax.checkpoint`, `save_from_both_policies`": YES,
    "`jax.checkpoint`, `swjax.checkpoint_policies.save_weights`": YES,
    "`jax.checkpoint`, `swjax.checkpoint_policies.save_quantized`": YES,
    "`jax.checkpoint`, `swjax.checkpoint_policies.save_outputs`": YES,
    "`jax.checkpoint`, `swjax.checkpoint_policies.save_linear`": YES,
    "`jax.lax.scan` over layers, and its `jax.grad`": YES,
    "`jax.lax.map`": YES,
    "`jax.lax.cond`, and its `jax.grad`": YES,
    "`jax.lax.while_loop`, forward": YES,
    "`jax.shard_map`, and its `jax.grad`": YES,
    "`jax.pmap` of `jax.grad`": YES,
    "`jax.export`, serialized and called": YES,
    "`pickle` of `swjax.dot_general`": YES,
}


def outcome(transformation: str, recipe: str) -> str:
    found = OUTCOMES[transformation]
    return found if isinstance(found, str) else found[recipe]


# --- the transformations ------------------------------------------------------------------------------

CASES: dict[str, Callable[[str], tuple]] = {}  # recipe -> (result, expected result)


def case(transformation: str):
    def register(function):
        CASES[transformation] = function
        return function

    return register


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W, BIAS, G = draw(4, 6, 16), draw(16, 16, seed=1) / 4, draw(16, seed=2), draw(4, 6, 16, seed=3)


def layer(recipe):
    return partial(swjax.switchback, recipe=recipe)


def loss(recipe, w, x, *more):
    return jnp.sum(jnp.sin(layer(recipe)(x, w, *more)))


@cache
def gradients(recipe):
    """Returns the loss and its gradients with respect to w, x and bias, without other transformations."""
    return jax.value_and_grad(partial(loss, recipe), (0, 1, 2))(W, X, BIAS)


@cache
def output(recipe):
    return layer(recipe)(X, W, BIAS)


@case("`jax.jit`")
def _(recipe):
    return jax.jit(layer(recipe))(X, W, BIAS), output(recipe)


@case("`jax.eval_shape`")
def _(recipe):
    shape = jax.eval_shape(layer(recipe), X, W, BIAS)
    return jnp.zeros(shape.shape, shape.dtype), jnp.zeros_like(output(recipe))


@case("ahead of time: `jax.jit(f).lower(...).compile()`")
def _(recipe):
    return jax.jit(layer(recipe)).lower(X, W, BIAS).compile()(X, W, BIAS), output(recipe)


@case("donation: `jax.jit(f, donate_argnums=...)`")
def _(recipe):
    def step(w):
        return w - jax.grad(partial(loss, recipe))(w, X, BIAS)

    return jax.jit(step, donate_argnums=0)(W.copy()), W - gradients(recipe)[1][0]


@case("`jax.grad`")
def _(recipe):
    fn = jax.jit(jax.grad(partial(loss, recipe), (0, 1, 2)))
    return fn(W, X, BIAS), gradients(recipe)[1]


@case("`jax.value_and_grad`")
def _(recipe):
    fn = jax.jit(jax.value_and_grad(partial(loss, recipe), (0, 1, 2)))
    return fn(W, X, BIAS), gradients(recipe)


@case("`jax.vjp`")
def _(recipe):
    y, vjp = jax.vjp(layer(recipe), X, W, BIAS)
    dx, dw, db = vjp(jnp.cos(y))
    return (dw, dx, db), gradients(recipe)[1]


@case("`jax.jacrev`")
def _(recipe):
    fn = lambda bias: jnp.sin(layer(recipe)(X, W, bias))
    return jnp.sum(jax.jit(jax.jacrev(fn))(BIAS), (0, 1, 2)), gradients(recipe)[1][2]


@case("`jax.vmap`, over tokens or over weights")
def _(recipe):
    ws = jnp.stack([W, 2 * W.T])
    got = jax.jit(jax.vmap(layer(recipe), (0, None)))(X, W)
    by_weight = jax.jit(jax.vmap(layer(recipe), (None, 0)))(X, ws)
    want = jnp.stack([layer(recipe)(x, W) for x in X])
    return (got, by_weight), (want, jnp.stack([layer(recipe)(X, w) for w in ws]))


@cache
def by_row(recipe):
    """Returns the gradients of each row's loss."""
    grads = [jax.grad(partial(loss, recipe), (0, 1))(W, x) for x in X]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *grads)


@case("`jax.grad` of `jax.vmap`")
def _(recipe):
    total = lambda w, x: jnp.sum(jax.vmap(partial(loss, recipe), (None, 0))(w, x))
    dw, dx = by_row(recipe)
    return jax.jit(jax.grad(total, (0, 1)))(W, X), (jnp.sum(dw, 0), dx)


@case("`jax.vmap` of `jax.grad`")
def _(recipe):
    fn = jax.vmap(jax.grad(partial(loss, recipe), (0, 1)), (None, 0))
    grad, ws = jax.grad(partial(loss, recipe)), jnp.stack([W, 2 * W[::-1], W.T])
    by_weight = jax.jit(jax.vmap(grad, (0, None)))(ws, X)
    return (jax.jit(fn)(W, X), by_weight), (by_row(recipe), jnp.stack([grad(w, X) for w in ws]))


@case("`jax.vmap` over an axis of an explicit mesh, and its `jax.grad`")
def _(recipe):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    total = lambda w, x: jnp.sum(jax.vmap(partial(loss, recipe), (None, 0))(w, x))
    dw, dx = by_row(recipe)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        w = jax.device_put(W, NamedSharding(mesh, P()))
        got = jax.jit(jax.grad(total, (0, 1)))(w, x)
        each = jax.jit(jax.vmap(jax.grad(partial(loss, recipe), (0, 1)), (None, 0)))(w, x)
    return (got, each), ((jnp.sum(dw, 0), dx), (dw, dx))


def quadratic(multiply, w):
    """A function whose second derivative does not depend on the values of the products."""
    return jnp.sum(multiply(X[0], w) ** 2)


@cache
def second_derivative():
    return jax.hessian(partial(quadratic, jnp.matmul))(W[:, :3])


@case("second order: `jax.hessian`")
def _(recipe):
    return jax.jit(jax.hessian(partial(quadratic, layer(recipe))))(W[:, :3]), second_derivative()


@case("second order: `jax.grad` of `jax.grad`")
def _(recipe):
    v = draw(16, 3, seed=5)
    inner = lambda w: jnp.vdot(jax.grad(partial(quadratic, layer(recipe)))(w), v)
    want = jnp.einsum("ijkl,kl->ij", second_derivative(), v)
    return jax.jit(jax.grad(inner))(W[:, :3]), want


@case("`jax.jvp`")
def _(recipe):
    fn = lambda w: jax.jvp(lambda w: layer(recipe)(X, w, BIAS), (w,), (w,))
    return jax.jit(fn)(W), (jnp.matmul(X, W) + BIAS[None, None], jnp.matmul(X, W))


@case("`jax.jacfwd`")
def _(recipe):
    fn = lambda bias: jnp.sin(layer(recipe)(X, W, bias))
    return jnp.sum(jax.jit(jax.jacfwd(fn))(BIAS), (0, 1, 2)), gradients(recipe)[1][2]


@case("`jax.linearize`")
def _(recipe):
    _, jvp = jax.linearize(lambda w: layer(recipe)(X, w, BIAS), W)
    return jvp(W), jnp.matmul(X, W)


POLICIES = jax.checkpoint_policies
NAMES = ("swjax_y", "swjax_x_q")
CHECKPOINTS = {
    "": None,
    ", `everything_saveable`": POLICIES.everything_saveable,
    ", `nothing_saveable`": POLICIES.nothing_saveable,
    ", `dots_saveable`": POLICIES.dots_saveable,
    ", `dots_with_no_batch_dims_saveable`": POLICIES.dots_with_no_batch_dims_saveable,
    ", `save_anything_except_these_names`": POLICIES.save_anything_except_these_names(*NAMES),
    ", `save_any_names_but_these`": POLICIES.save_any_names_but_these(*NAMES),
    ", `save_only_these_names`": POLICIES.save_only_these_names(*NAMES),
    ", `save_from_both_policies`": POLICIES.save_from_both_policies(
        POLICIES.dots_saveable, checkpoint_policies.save_weights
    ),
} | {
    f", `swjax.checkpoint_policies.{name}`": getattr(checkpoint_policies, name)
    for name in ("save_weights", "save_quantized", "save_outputs", "save_linear")
}


def checkpointed(policy, recipe):
    fn = jax.checkpoint(partial(loss, recipe), policy=policy)
    return jax.jit(jax.grad(fn, (0, 1, 2)))(W, X, BIAS), gradients(recipe)[1]


for name, policy in CHECKPOINTS.items():
    CASES[f"`jax.checkpoint`{name}"] = partial(checkpointed, policy)


def run_layers(fold, recipe, ws, x):
    return jnp.sum(fold(lambda x, w: (layer(recipe)(x, w), None), x, ws)[0] * G)


def unrolled(step, x, ws):
    for w in ws:
        x, _ = step(x, w)
    return x, None


def saved_by(policy, layers, x, ws) -> Counter:
    """The arrays that scanned layers save for the backward pass: {(shape, dtype): count}, without x, ws and
    scales of tokens."""

    def loss(ws, x):
        layer = jax.checkpoint(layers, policy=policy, prevent_cse=False)
        return jnp.sum(lax.scan(lambda x, ws: (layer(x, *ws), None), x, ws)[0])

    residuals = jax.eval_shape(lambda ws, x: jax.tree.leaves(jax.vjp(loss, ws, x)[1]), ws, x)
    given = {(array.shape, array.dtype) for array in (*ws, x)}
    saved = ((array.shape, array.dtype) for array in residuals if array.shape[-1:] != (1,))
    return Counter((shape, dtype.name) for shape, dtype in saved if (shape, dtype) not in given)


@pytest.mark.parametrize("where", ["one device", "kernels", "a mesh"])
@pytest.mark.parametrize(
    "recipe", thinning.kept(RECIPES, ("standard", "switchback", "int8_hadamard", "fp8_switchback"))
)
def test_policies_of_jax_save_16_bit_outputs(recipe, where, monkeypatch):
    """As of Flax's layers: neither int32 sums nor rotated inputs, and the outputs of opaque kernels too."""
    if where == "kernels":
        opaque = lambda function, *names: (
            lambda *arrays, **options: sequential_vmap(partial(function, **options))(*arrays)
        )
        monkeypatch.setattr(dispatch, "_specification", opaque)
    x = jax.ShapeDtypeStruct((4, 256, 128), jnp.bfloat16)
    ws = [jax.ShapeDtypeStruct((3, *shape), jnp.float32) for shape in ((128, 512), (512, 128))]
    mesh = jax.make_mesh((2,), ("fsdp",), (AxisType.Auto,))
    layouts = (swjax.Layout(P("fsdp")),) * 2 if where == "a mesh" else (None,) * 2
    mlp = lambda product: lambda x, up, down: x + product(jnp.tanh(product(x, up, 0)), down, 1)
    flax = mlp(lambda x, w, _: x @ w.astype(x.dtype))
    ours = mlp(lambda x, w, i: swjax.switchback(x, w, recipe=recipe, layout=layouts[i]))
    fused = lambda x, up, down: swjax.gated_mlp(
        x, up, up, down, recipe=recipe, layouts=layouts, add_input=True
    )
    with jax.set_mesh(mesh) if where == "a mesh" else nullcontext():
        for policy in (POLICIES.dots_saveable, POLICIES.dots_with_no_batch_dims_saveable):
            assert saved_by(policy, ours, x, ws) == saved_by(policy, flax, x, ws)
            assert {dtype for _, dtype in saved_by(policy, fused, x, ws)} == {"bfloat16"}


@pytest.mark.parametrize("where", ["one device", "an explicit mesh"])
@pytest.mark.parametrize("recipe", ["standard", "switchback_q"])
def test_a_scan_stacks_no_copy_of_a_parameter(recipe, where):
    """The backward pass reads parameters in high precision from the input of the scan."""
    mesh = jax.make_mesh((2,), ("fsdp",), (AxisType.Explicit,)) if "mesh" in where else None
    sharded = lambda *spec: mesh and jax.NamedSharding(mesh, P(*spec))
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=sharded("fsdp"))
    sizes, sides = jnp.array([5, 3]), ((16, 32), (16, 32), (32, 16))

    def stack(*of):
        spec = sharded(*(None,) * (1 + len(of)), "fsdp")
        shapes = ((3, *of, *side) for side in sides)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec) for shape in shapes)

    def layer(x, ws):
        (gate, up, down), experts = ws
        x = swjax.switchback(swjax.switchback(x, up, recipe=recipe), down, recipe=recipe)
        x = swjax.gated_mlp(x, gate, up, down, recipe=recipe)
        if mesh is None:
            x = swjax.gated_ragged_mlp(x, *experts, sizes, recipe=recipe)
        return x, None

    loss = lambda ws, x: jnp.sum(lax.scan(layer, x, ws)[0])
    with jax.set_mesh(mesh) if mesh else nullcontext():
        eqns = jax.make_jaxpr(jax.grad(loss))((stack(), stack(2)), x).eqns
    forward, _ = (eqn for eqn in eqns if eqn.primitive.name == "scan")
    stacked = {(each.aval.shape[-2:], each.aval.dtype.name) for each in forward.outvars[1:]}
    assert not stacked & {((16, 32), "float32"), ((32, 16), "float32")}, stacked


@case("`jax.lax.scan` over layers, and its `jax.grad`")
def _(recipe):
    ws = jnp.stack([W, W.T])
    got, want = (
        jax.jit(jax.grad(partial(run_layers, fold, recipe), (0, 1)))(ws, X)
        for fold in (lax.scan, unrolled)
    )
    return got, want


@case("`jax.lax.map`")
def _(recipe):
    got = jax.jit(lambda x: lax.map(lambda x: layer(recipe)(x, W), x))(X)
    return got, jnp.stack([layer(recipe)(x, W) for x in X])


@case("`jax.lax.cond`, and its `jax.grad`")
def _(recipe):
    def either(w, x, bias, which):
        return lax.cond(which, partial(loss, recipe), lambda w, x, bias: jnp.sum(x), w, x, bias)

    fn = jax.jit(jax.grad(either, (0, 1, 2)))
    other = jnp.zeros_like(W), jnp.ones_like(X), jnp.zeros_like(BIAS)
    return (fn(W, X, BIAS, True), fn(W, X, BIAS, False)), (gradients(recipe)[1], other)


@case("`jax.lax.while_loop`, forward")
def _(recipe):
    step = lambda carry: (carry[0] + 1, layer(recipe)(carry[1], W))
    got = jax.jit(lambda x: lax.while_loop(lambda carry: carry[0] < 2, step, (0, x))[1])(X)
    return got, layer(recipe)(layer(recipe)(X, W), W)


@case("`jax.shard_map`, and its `jax.grad`")
def _(recipe):
    """Each device quantizes its rows with its own scales; the gradient of w is all-reduced."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def each(w, x):
        return loss(recipe, w, x)[None]

    return jax.jit(jax.grad(lambda w, x: jnp.sum(each(w, x)), (0, 1)))(W, X), halves(recipe)


def halves(recipe):
    """The gradients of w and x if each of two devices quantizes its half of the rows."""
    grads = [jax.grad(partial(loss, recipe), (0, 1))(W, x) for x in (X[:2], X[2:])]
    return sum(dw for dw, _ in grads), jnp.concatenate([dx for _, dx in grads])


@case("`jax.pmap` of `jax.grad`")
def _(recipe):
    def each(w, x):
        dw, dx = jax.grad(partial(loss, recipe), (0, 1))(w, x)
        return lax.psum(dw, "data"), dx

    devices = jax.devices()[:2]
    step = jax.pmap(each, axis_name="data", in_axes=(None, 0), out_axes=(None, 0), devices=devices)
    dw, dx = step(W, X.reshape(2, 2, *X.shape[1:]))
    return (dw, dx.reshape(X.shape)), halves(recipe)


@case("`jax.export`, serialized and called")
def _(recipe):
    fn = jax.jit(jax.value_and_grad(partial(loss, recipe), (0, 1, 2)))
    stored = jax.export.export(fn)(W, X, BIAS).serialize()
    return jax.export.deserialize(stored).call(W, X, BIAS), gradients(recipe)


@case("`pickle` of `swjax.dot_general`")
def _(recipe):
    product = swjax.dot_general(recipe)
    copy = pickle.loads(pickle.dumps(product))
    assert copy == product and hash(copy) == hash(product)
    return copy(X, W, (((2,), (0,)), ((), ()))), layer(recipe)(X, W)


# --- tests --------------------------------------------------------------------------------------------


def test_gated_mlps_in_checkpointed_scanned_and_mapped_layers():
    shapes = (3, 16, 24), (3, 16, 24), (3, 24, 16)
    stack = tuple(draw(*shape, seed=seed) / 4 for seed, shape in enumerate(shapes))

    def block(x, ws):
        norm = swjax.RMSNorm(BIAS)
        return swjax.gated_mlp(x, *ws, prologue=norm, add_input=True)

    def scanned(stack, x):
        step = jax.checkpoint(block, policy=checkpoint_policies.save_linear)
        return jnp.sum(lax.scan(lambda x, ws: (step(x, ws), None), x, stack)[0] ** 2)

    def unrolled(stack, x):
        for i in range(3):
            x = block(x, tuple(w[i] for w in stack))
        return jnp.sum(x**2)

    got = jax.jit(jax.vmap(jax.grad(scanned), (None, 0)))(stack, X)
    want = [jax.jit(jax.grad(unrolled))(stack, x) for x in X[:2]]
    for i, one in enumerate(want):
        for a, b in zip(got, one, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-3)


def test_the_table_has_every_case():
    assert list(CASES) == list(OUTCOMES)


@pytest.mark.parametrize(
    "transformation, recipe", thinning.thinned(list(OUTCOMES), RECIPES, full=[])
)
def test_outcome(transformation, recipe):
    expected = outcome(transformation, recipe)
    if expected == YES:
        got, want = CASES[transformation](recipe)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)
        return
    kind, message = re.fullmatch("no: `([A-Za-z]+): (.*)`", expected).groups()
    with pytest.raises(Exception, match=re.escape(message)) as error:
        CASES[transformation](recipe)
    assert error.type.__name__ == kind


# Constraints with which `jax.export` takes gradients with a symbolic number of tokens.
BOUNDS = {
    "switchback_hadamard": ["b <= 1024", "b >= 1025"],
    "int8_hadamard": ["b <= 1024", "b >= 1025"],
    "fp8_hadamard": ["b <= 1024", "b >= 1025"],
    "llm_int8": ["b <= 131072"],
    "llm_int8_outlier6": ["b <= 131072"],
}


def exported(recipe, *constraints):
    """The gradients of w and x, exported for a symbolic number of tokens."""
    (b,) = jax.export.symbolic_shape("b", constraints=constraints)
    fn = jax.jit(jax.grad(partial(loss, recipe), (0, 1)))
    return jax.export.export(fn)(W, jax.ShapeDtypeStruct((b, X.shape[-1]), X.dtype))


@pytest.mark.parametrize(
    "recipe, bound",
    thinning.kept(
        [(recipe, bound) for recipe in RECIPES for bound in BOUNDS.get(recipe, [""])],
        [("switchback", ""), *(("switchback_hadamard", b) for b in BOUNDS["switchback_hadamard"])],
    ),
)
def test_a_symbolic_number_of_tokens(recipe, bound):
    x = jnp.tile(X[0], (300, 1)) if ">=" in bound else X[0]
    want = jax.grad(partial(loss, recipe), (0, 1))(W, x)
    got = exported(recipe, *[bound] * bool(bound)).call(W, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)
    if bound:
        with pytest.raises(Exception, match="Symbolic dimension comparison .* is inconclusive"):
            exported(recipe)


def test_the_page_shows_the_bounds():
    for recipe, bounds in BOUNDS.items():
        (row,) = re.findall(rf"^\| .*`{recipe}`.* \| (.*b .*) \|$", PAGE.read_text(), re.MULTILINE)
        assert re.findall(r"`(.*?)`", row) == bounds


# --- the page -----------------------------------------------------------------------------------------

BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"


def table() -> str:
    """Returns `OUTCOMES` in Markdown: what works with every recipe, and a table of the rest.

    In the table recipes with equal outcomes share a column, and transformations a row.
    """
    everywhere = [t for t in OUTCOMES if all(outcome(t, recipe) == YES for recipe in RECIPES)]
    lines: dict[str, list[str]] = {}
    for transformation in everywhere:
        name, *options = transformation.split(", ", 1)
        lines.setdefault(name, []).extend(options)
    rows: dict[tuple[str, ...], list[str]] = {}
    for transformation in (t for t in OUTCOMES if t not in everywhere):
        row = tuple(outcome(transformation, recipe) for recipe in RECIPES)
        rows.setdefault(row, []).append(transformation)
    columns: dict[tuple[str, ...], list[str]] = {}
    for recipe, *column in zip(RECIPES, *rows, strict=True):
        columns.setdefault(tuple(column), []).append(f"`{recipe}`")
    names = ["all others" if len(group) > 1 else group[0] for group in columns.values()]
    cells = [("transformation", *names), ("---",) * (1 + len(columns))]
    cells += zip(map(", ".join, rows.values()), *columns, strict=True)
    listed = [f"- {', '.join([name, *options])}" for name, options in lines.items()]
    table = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(["Every recipe works with:", "", *listed, "", *table])


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def test_the_page_shows_the_table():
    page = PAGE.read_text()
    assert page == with_table(page), "run: python tests/test_transformations.py"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
