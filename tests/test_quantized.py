"""`swjax.quantized`: the traced program of any function, with its products of parameters in int8."""

import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import swjax
import swjax.linen
import swjax.nnx
import swjax.testing
from swjax.checkpoint_policies import finish_gradients
from swjax.linear import program_run, rules
from swjax.linear.conversion import NO_LAYOUT
from swjax.recipes import RECIPES
from swjax.testing import assert_quantized

WIDTH, HEADS, LENGTH = 16, 4, 8
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, LENGTH, WIDTH)), jnp.float32)


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)


def parameters(layers=2):
    """Stacked layers of einsums, as language models have them, with a tied embedding."""
    stacked = lambda *shape: jnp.stack([draw(*shape) for _ in range(layers)])
    block = {
        "norm": {"scale": jnp.ones((layers, WIDTH))},
        "q": {"w": stacked(WIDTH, HEADS, 4)},
        "out": {"w": stacked(HEADS, 4, WIDTH) / 2},
        "mlp": {"gate": stacked(WIDTH, 32), "up": stacked(WIDTH, 32), "down": stacked(32, WIDTH)},
    }
    return {"embedder": {"embedding": draw(20, WIDTH)}, "layers": block}


def layer(p, x):
    y = x * p["norm"]["scale"][None, None].astype(x.dtype)
    q = jnp.einsum("btd,dnh->bnth", y, p["q"]["w"].astype(x.dtype))
    mixed = jnp.einsum("bnst,bnth->bnsh", jax.nn.softmax(jnp.einsum("bnsh,bnth->bnst", q, q)), q)
    x = x + jnp.einsum("bnth,nhd->btd", mixed, p["out"]["w"].astype(x.dtype))
    mlp = jax.tree.map(lambda w: w.astype(x.dtype), p["mlp"])
    return x + (jax.nn.silu(x @ mlp["gate"]) * (x @ mlp["up"])) @ mlp["down"]


def language_model(params, tokens, dtype="float32", run="scan"):
    x = params["embedder"]["embedding"][tokens].astype(dtype)
    step = jax.checkpoint(lambda x, p: (layer(p, x), None))
    if run == "scan":
        x, _ = jax.lax.scan(step, x, params["layers"])
    else:
        for i in range(2):
            x, _ = step(x, jax.tree.map(lambda w: w[i], params["layers"]))  # noqa: B023
    return x.astype("float32") @ params["embedder"]["embedding"].T


TOKENS = jnp.asarray(RNG.integers(0, 20, (2, LENGTH)))


def loss(apply, params, *args):
    return jnp.mean(apply(params, *args).astype("float32") ** 2)


def differences(apply, params, *args, rules=".*"):
    """The relative norms of the differences of each leaf's gradient, quantized and not."""
    rules = {rules: "switchback"} if rules != "llm" else rules
    grads = jax.jit(jax.grad(partial(loss, swjax.quantized(apply, rules))))(params, *args)
    wanted = jax.jit(jax.grad(partial(loss, apply)))(params, *args)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True)
    return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]


def converted(report):
    return {product.path for product in report if product.recipe}


# --- models of every kind -----------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["scan", "unrolled"])
def test_a_model_of_einsums_under_scan_and_remat(run):
    apply = partial(language_model, run=run)
    params = parameters()
    if run == "scan":
        assert max(differences(apply, params, TOKENS, rules="llm")) < 0.05
    int8 = swjax.quantized(apply)
    report = int8.report(params, TOKENS)
    names = ("q/w", "out/w", "mlp/gate", "mlp/up", "mlp/down")
    assert converted(report) == {f"layers/{name}" for name in names}
    count = 5 if run == "scan" else 10  # in the program
    assert sum(product.recipe is not None for product in report) == count
    assert_quantized(int8, params, TOKENS, count=count)
    # Of 2 layers with 16 tokens: weights of 2 x 16 x 16 + 3 x 16 x 32, two products of attention; the head.
    weights, attention, head = 2 * 16 * 2048, 2 * 2 * 2 * HEADS * LENGTH * LENGTH * 4, 16 * 20 * 16
    assert report.share == pytest.approx(2 * weights / (2 * weights + 2 * attention + 2 * head))
    reasons = {product.reason for product in report if not product.recipe and product.flops}
    assert reasons == {
        "both operands are activations",
        "the embedding or tied head stays in 16 bits",
    }


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Einsum("btd,dn->btn", (WIDTH, WIDTH), rngs=rngs)

    def __call__(self, x):
        return self.o_proj(jnp.tanh(self.q_proj(x)))


class Llama(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Attention(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, 20, use_bias=False, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(self.norm(x))


def test_an_nnx_model_split_or_whole():
    model = Llama(nnx.Rngs(0))
    graph, state = nnx.split(model)
    apply = lambda state, x: nnx.merge(graph, state)(x)
    assert max(differences(apply, state, X, rules="llm")) < 0.05
    report = swjax.quantized(apply).report(state, X)
    assert converted(report) == {
        f"layers/{i}/{name}/kernel" for i in range(2) for name in ("q_proj", "o_proj")
    }
    whole = swjax.quantized(lambda model, x: model(x))
    assert whole.report(model, X) == report
    split = jax.jit(swjax.quantized(apply))(state, X)
    np.testing.assert_array_equal(jax.jit(whole)(model, X), split)


def test_what_an_nnx_model_changes_in_itself_changes():
    """Each step had the dropout of the first, and the statistics of batches stayed at zero."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.dropout, self.norm = nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            return jnp.sum(self.norm(self.dropout(self.linear(x))) ** 2)

    converted, own = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    step = nnx.jit(nnx.grad(swjax.quantized(Model.__call__, "llm")))
    for _ in range(2):
        step(converted, X)
        own(X)
    assert converted.dropout.rngs.count[...] == own.dropout.rngs.count[...] == 2
    np.testing.assert_allclose(converted.norm.mean[...], own.norm.mean[...], atol=0.01)
    optimizer = nnx.Optimizer(own, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(TypeError, match="updates no parameters, got an nnx.Optimizer .* the loss"):
        swjax.quantized(lambda model, optimizer: None, "llm")(own, optimizer)


def test_blocks_that_share_a_random_counter_draw_different_numbers():
    """Each block had a copy of the counter, so all drew the numbers of the first."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.rngs = nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs

        def __call__(self, x):
            return self.linear(x) + jax.random.normal(self.rngs.noise(), x.shape)

    make = lambda: nnx.List([Block(rngs) for rngs in [nnx.Rngs(0)] for _ in range(2)])
    converted, own = make(), make()
    apply = lambda model, x: [block(x) for block in model]
    for _ in range(2):
        np.testing.assert_allclose(swjax.quantized(apply)(converted, X), apply(own, X), atol=0.1)


def test_variables_that_a_function_adds_to_a_model_are_dropped_with_a_warning():
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.hidden = nnx.Intermediate(self.linear(x))
            return self.hidden[...]

    with pytest.warns(UserWarning, match="drops variables .* here Intermediate: .* nnx.capture"):
        swjax.quantized(lambda model, x: model(x))(Model(), X)


def test_a_parameter_without_a_tree_has_a_path():
    """Its product counted as one of two activations, whose input gradients are two."""
    report = swjax.quantized(lambda w, x: x @ w, {".*": "switchback"}).report(draw(WIDTH, WIDTH), X)
    assert [product.path for product in report] == ["."]
    assert (report.share, report.input_gradient_share) == (1, 1)


def test_an_array_named_value_keeps_its_name():
    """Its path lacked the name, as that of Flax's variables does, so no rule reached it."""
    params = {"attention": {name: draw(WIDTH, WIDTH) for name in ("query", "key", "value")}}
    apply = lambda params, x: [x @ w for w in params["attention"].values()]
    int8 = swjax.quantized(apply, {"attention/.*": "switchback"})
    assert {*converted(int8.report(params, X))} == {f"attention/{n}" for n in params["attention"]}


class NNXState(nnx.Module):
    """Linear attention, whose state of earlier tokens is in a cache."""

    def __init__(self):
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.state = nnx.Cache(jnp.ones((WIDTH, WIDTH)))

    def __call__(self, x):
        return self.query(x) @ self.state[...]


class LinenState(nn.Module):
    @nn.compact
    def __call__(self, x):
        state = self.variable("cache", "state", jnp.ones, (WIDTH, WIDTH))
        return nn.Dense(WIDTH, name="query")(x) @ state.value


def test_a_cache_is_no_parameter():
    """A product that read a cache before writing it was int8, as if the cache were a weight."""
    linen = LinenState()
    for apply, params in (
        (NNXState.__call__, NNXState()),
        (linen.apply, linen.init(jax.random.key(0), X)),
    ):
        report = swjax.quantized(apply, {".*": "switchback"}).report(params, X)
        assert [product.reason for product in report] == ["", "both operands are activations"]
        with pytest.raises(ValueError, match="'.*state' matches no parameter"):
            swjax.quantized(apply, {".*state": "switchback"})(params, X)


def test_a_linen_model_equals_its_interceptor():
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(WIDTH)])
    variables = model.init(jax.random.key(0), X)
    ours = swjax.quantized(model.apply, {"params/layers_.*/kernel": "switchback"})
    with swjax.linen.quantized({".*": "switchback"}):
        want = jax.jit(model.apply)(variables, X)
    np.testing.assert_allclose(jax.jit(ours)(variables, X), want, rtol=1e-6)


# --- one layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_equals_switchback_of_the_stored_parameter(dtype):
    """Also through casts, transposes, reshapes and slices; the gradients too."""
    x, w = X.astype(dtype), draw(WIDTH, 32)

    def moved(w, x):  # w is stored as [2, 32, 16]
        w = jax.jit(lambda w: w.astype(dtype))(w)
        return jnp.einsum("btd,hd->bth", x, jax.lax.slice_in_dim(w, 1, 2)[0])

    def gradients(fn, w, g):
        y, vjp = jax.jit(lambda w: jax.vjp(lambda w, x: fn(w, x), w, x))(w)
        return y, *jax.jit(lambda vjp, g: vjp(g))(vjp, g)

    g = jnp.asarray(RNG.normal(size=(2, LENGTH, 32)), dtype)
    y, dw, dx = gradients(lambda w, x: swjax.switchback(x, w), w, g)
    ways = (
        (lambda w, x: x @ w.astype(dtype), w, lambda dw: dw),
        (moved, jnp.stack([w.T, w.T]), lambda dw: dw[1].T),
        (
            lambda w, x: jnp.einsum("dh,btd->hbt", w.astype(dtype), x).transpose(1, 2, 0),
            w,
            lambda dw: dw,
        ),
    )
    for fn, stored, restore in ways:
        got, stored_gradient, got_dx = gradients(
            swjax.quantized(fn, {".*": "switchback"}), stored, g
        )
        assert got.dtype == y.dtype
        np.testing.assert_array_equal(got, y)
        np.testing.assert_array_equal(got_dx, dx)
        # XLA may sum the product of dw, which is not quantized, in another order for a moved parameter.
        exact = 0 if stored is w else 1e-5
        np.testing.assert_allclose(restore(stored_gradient), dw, rtol=exact)


def test_parameters_cast_before_a_scan_are_read_as_stored():
    model = partial(language_model, dtype="bfloat16")

    def cast_first(params, tokens):
        layers = jax.jit(partial(jax.tree.map, lambda w: w.astype("bfloat16")))(params["layers"])
        return model(params | {"layers": layers}, tokens)

    params = parameters()
    first, inside = (jax.jit(swjax.quantized(fn))(params, TOKENS) for fn in (cast_first, model))
    np.testing.assert_array_equal(first, inside)


@pytest.mark.parametrize("merge", [jnp.stack, jnp.concatenate])
def test_parameters_that_the_program_stacks_or_concatenates(merge):
    """They stayed in 16 bits: layers that a scan reads, and queries, keys and values of one product."""
    ws, x = [draw(WIDTH, WIDTH) for _ in range(2)], X.astype("bfloat16")
    fn = lambda ws, x: jnp.tensordot(x, merge([w.astype(x.dtype) for w in ws], axis=1), 1)
    y = jax.jit(swjax.quantized(fn))(ws, x)
    want = swjax.switchback(x, jnp.concatenate(ws, axis=1))
    np.testing.assert_array_equal(y.reshape(want.shape), want)
    assert max(differences(fn, ws, x)) < 0.05
    reasons = lambda rules, **sharded: [
        p.reason for p in swjax.quantized(fn, rules, **sharded).report(ws, x)
    ]
    changes = f"{merge.__name__} changes the parameter first"
    assert reasons({"0": "switchback", "1": "standard"}) == [changes]
    assert reasons("llm", sharded_like=[P("fsdp")] * 2) == [""]
    assert reasons("llm", sharded_like=[P(None, "tensor")] * 2) == [NO_LAYOUT]


def test_parameters_that_the_program_unpacks_or_repeats():
    """`q, k = w` is an operation of its own in jax 0.12, and stopped the conversion of all layers."""
    w = draw(WIDTH, 2, WIDTH)
    fn = lambda w, x: [x @ w for w in (*jnp.unstack(w, axis=1), jnp.tile(w[0], (WIDTH // 2, 1)))]
    int8 = swjax.quantized(fn, sharded_like=P("fsdp", None, "tensor"))
    assert [product.reason for product in int8.report(w, X)] == [""] * 3
    got = jax.jit(int8)(w, X)
    np.testing.assert_allclose(got[1], swjax.switchback(X, w[:, 1]), rtol=1e-5, atol=1e-6)
    assert max(differences(lambda w, x: jnp.stack(fn(w, x)), w, X)) < 0.05
    with pytest.raises(ValueError, match="freeze needs a parameter"):
        swjax.quantized(lambda w, x: x @ jax.lax.split(w, (2,))[0]).freeze(w[0], X[..., :2])


def test_layers_that_a_loop_picks_from_a_stack_and_multiplies_by_one():
    """As Haliax does. A parameter that an activation picks stays a lookup."""

    def picked(w, x):
        def step(carry, _):
            i, x = carry
            return (i + 1, jnp.tanh(x @ (jnp.take(w, i, axis=0) * 1.0))), None

        return jax.lax.scan(step, (0, x), None, length=2)[0][1]

    def scanned(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w = jnp.stack([draw(WIDTH, WIDTH)] * 2)
    int8, want = (swjax.quantized(fn, {".*": "switchback"}) for fn in (picked, scanned))
    step = lambda fn: jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(fn(w, x) ** 2)))
    for got, wanted in zip(step(int8)(w, X), step(want)(w, X), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.jit(int8)(int8.freeze(w, X), X), jax.jit(int8)(w, X))
    looked_up = lambda w, x: x[0] @ jnp.take(w, jnp.argmax(x[0, 0]), axis=0)
    report = swjax.quantized(looked_up, {".*": "switchback"}).report(w[0], X)
    assert [product.reason for product in report] == ["a lookup", "both operands are activations"]


def test_a_step_that_differentiates_inside():
    """Its input gradients are int8 products too, and its weight gradients are not."""
    step = swjax.quantized(jax.grad(lambda w, x: jnp.sum((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)))
    params = {"a": draw(WIDTH, WIDTH), "b": draw(WIDTH, WIDTH)}
    found = [(product.path, product.quantized) for product in step.report(params, X)]
    assert sorted(found) == [("", False), ("", False), ("a", True), ("b", True), ("b", True)]


def under_cond(w, x):
    return jax.lax.cond(x[0, 0, 0] > 0, lambda x, w: x @ w, lambda x, w: -x @ w, x, w)


def under_while(w, x):
    """A loop that carries the parameter, and one that does not end by itself, whose condition multiplies."""
    x, _ = jax.lax.fori_loop(0, 2, lambda i, c: (jnp.tanh(c[0] @ c[1]), c[1]), (x, w))
    step = lambda x: x + jnp.abs(jnp.tanh(x @ w))
    return jax.lax.while_loop(lambda x: (jnp.max(x) < 3) & (jnp.max(x @ w) < 99), step, x)


def under_vmap(w, x):
    return jax.vmap(lambda x, w: x @ w, in_axes=(0, None))(x, w)


def under_trace(w, x):
    """A function that was traced before; jax 0.12 calls its jaxpr by an operation."""
    return jax.jit(lambda x, w: x @ w).trace(x, w)(x, w)


def under_shard_map(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    body = lambda x, w: x @ w
    return jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))(x, w)


def under_explicit_mesh(w, x):
    w = jax.reshard(w.astype(x.dtype), P())
    return jnp.einsum("btd,dn->btn", x, w, out_sharding=P("data"))


TRANSFORMATIONS = [under_cond, under_while, under_vmap, under_trace, under_shard_map]


@pytest.mark.parametrize("fn", TRANSFORMATIONS)
def test_products_inside_transformations(fn):
    w = draw(WIDTH, WIDTH)
    int8 = jax.jit(swjax.quantized(fn, {".*": "switchback"}))
    got, want = int8(w, X), jax.jit(fn)(w, X)
    assert 0 < jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)
    assert_quantized(int8, w, X, count={"under_cond": 2, "under_while": 3}.get(fn.__name__, 1))
    mapped = jax.vmap(swjax.quantized(fn, {".*": "switchback"}), in_axes=(None, 0))
    if fn is under_cond:
        np.testing.assert_allclose(mapped(w, X[None])[0], got, rtol=1e-5)


def test_explicit_meshes_gather_the_stored_parameter():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w, x = jax.device_put(draw(WIDTH, 32), P("data")), jax.device_put(X, P("data"))
        int8 = jax.jit(swjax.quantized(under_explicit_mesh, {".*": "switchback"}))
        y = int8(w, x)
        assert jax.typeof(y).sharding.spec == P("data", None, None)
        swjax.testing.assert_quantized_gathers(int8, w, x, weights=[w.shape])
    np.testing.assert_allclose(y, swjax.switchback(X, np.asarray(w)), rtol=1e-5)


# --- what stays ---------------------------------------------------------------------------------------


@jax.custom_vjp
def custom(x, w):
    return x @ w


custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0][0].T @ g[0]))

TABLE = draw(8, WIDTH)
IMAGE = jnp.ones((1, WIDTH, 8, 8))
STAYS = {
    "inside custom_vjp_call": lambda w, x: custom(x, w),
    "mul changes the parameter first": lambda w, x: x @ (w * 2.0),
    "add changes the parameter first": lambda w, x: x @ (w + w @ w),
    "convert_element_type changes the parameter first": lambda w, x: (
        x @ (w > 0).astype(x.dtype) + x @ w.astype("int8").astype(x.dtype)
    ),
    "cond changes the parameter first": lambda w, x: (
        x @ jax.lax.cond(x[0, 0, 0] > 0, lambda: w, lambda: w.T)
    ),
    "an outer product, which sums nothing": lambda w, x: (
        x + jnp.einsum("bt,d->btd", x[..., 0], w[0])
    ),
    "a lookup": lambda w, x: x + w[jnp.argmax(x, -1)],
    "both operands are activations": lambda w, x: x @ x.swapaxes(1, 2),
    "already quantized": lambda w, x: swjax.switchback(x, w),
    "a convolution": lambda w, x: (
        jax.lax.conv(IMAGE, w[:, :, None, None], (1, 1), "SAME") + x.sum()
    ),
}


@pytest.mark.parametrize("reason", STAYS)
@pytest.mark.filterwarnings("ignore:rules quantize nothing")
def test_what_stays_is_listed_and_computed_as_before(reason):
    w, fn = draw(WIDTH, WIDTH), STAYS[reason]
    int8 = swjax.quantized(fn, {".*": "switchback"})
    products = int8.report(w, X)
    assert reason in {product.reason for product in products} and not converted(products)
    assert all(product.quantized == (reason == "already quantized") for product in products)
    np.testing.assert_array_equal(jax.jit(int8)(w, X), jax.jit(fn)(w, X))
    with pytest.warns(UserWarning, match="quantize nothing"):
        int8(w, X)


def test_the_warning_names_a_product_that_rules_do_not_reach():
    """It named the first use of a parameter, that of an embedding or a router."""
    params = {name: draw(WIDTH, WIDTH) for name in ("embed", "w")}
    uses = {"mul changes": lambda x, w: x @ (w * 2.0)}
    uses |= {"a lookup": lambda x, w: x + w[jnp.argmax(x, -1)]}
    for reason, use in uses.items():
        apply = lambda p, x: x @ p["embed"] + use(x, p["w"])  # noqa: B023
        with pytest.warns(UserWarning, match=f"nothing; 'w' stays, because: {reason}"):
            swjax.quantized(apply)(params, X)


def blocks_in_order(params, x):
    """Each block holds back the gradients of the next one, as on several GPUs."""
    ws = list(params)
    for i, _ in enumerate(ws):
        if i + 1 < len(ws):
            ws[i + 1], x = finish_gradients(ws[i + 1], x)
        x = jnp.tanh(x @ ws[i])
    return x


def test_parameters_that_a_function_with_its_own_gradient_returns_are_followed():
    """With `finish_gradients` only the first block was int8, without a warning."""
    params = [draw(WIDTH, WIDTH) for _ in range(3)]
    assert len(converted(swjax.quantized(blocks_in_order, "llm").report(params, X))) == 3
    assert max(differences(blocks_in_order, params, X)) < 0.05
    doubled = jax.custom_vjp(lambda w: w)
    doubled.defvjp(lambda w: (w, None), lambda _, g: (2 * g,))
    plain = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    apply = lambda w, x: plain(doubled(w), x)
    gradient = lambda fn: jax.grad(swjax.quantized(fn, "llm"))(params[0], X)
    np.testing.assert_allclose(gradient(apply), 2 * gradient(plain), rtol=1e-5)
    int8 = swjax.quantized(blocks_in_order, "llm")
    np.testing.assert_array_equal(int8(int8.freeze(params, X), X), int8(params, X))


def test_a_captured_batch_is_a_constant_and_the_warning_says_so():
    with pytest.warns(
        UserWarning, match="'.' stays, because: one operand is a constant.* arguments"
    ):
        swjax.quantized(lambda w: X @ w, "llm")(draw(WIDTH, WIDTH))


def test_parameters_in_another_argument_than_the_first_warn():
    """The batch counted as a parameter, and all layers but the first stayed, without a warning."""
    apply = lambda x, p: jax.nn.relu(x @ p["up"]) @ p["down"]
    p = {"up": draw(WIDTH, 32), "down": draw(32, WIDTH)}
    with pytest.warns(UserWarning, match="only the first .* test_quantized.py:[0-9]+: pass the"):
        swjax.quantized(apply)(X[0], p)
    bank = jnp.ones((3, WIDTH))
    swjax.quantized(lambda p, x, bank: apply(x, p) @ bank.T)(p, X[0], bank)
    bilinear = lambda w, x: jnp.einsum("bti,oij,btj->bto", x, w, x)
    swjax.quantized(bilinear)(draw(4, WIDTH, WIDTH), X)


def test_a_batch_without_rows():
    """It ended in an IndexError of the warning for parameters in other arguments."""
    w = draw(WIDTH, WIDTH)
    assert swjax.quantized(lambda w, x: x @ w)(w, X[0, :0]).shape == (0, WIDTH)


def test_rules_that_reach_less_than_half_warn():
    params = [draw(WIDTH, WIDTH) for _ in range(3)]
    apply = lambda ws, x: custom(custom(x @ ws[0], ws[1]), ws[2])
    message = "less than half of what they name; '1' stays, because: inside custom_vjp_call"
    with pytest.warns(UserWarning, match=message):
        swjax.quantized(apply, {".*": "switchback"})(params, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swjax.quantized(apply, {"0": "switchback"})(params, X)


def test_layers_of_this_library_stay_and_their_lora_too():
    params = {"layer": draw(WIDTH, WIDTH), "w_lora_a": draw(WIDTH, 2), "w_lora_b": draw(2, WIDTH)}
    base = lambda p, x: swjax.switchback(x, p["layer"], recipe="switchback_q")
    lora = lambda p, x: base(p, x) + (x @ p["w_lora_a"]) @ p["w_lora_b"]
    report = swjax.quantized(lora, {".*": "switchback"}).report(params, X)
    assert [(product.path, product.reason) for product in report] == [
        ("layer", "already quantized"),
        ("w_lora_a", "the matrix of LoRA stays in 16 bits"),
        ("w_lora_b", "the matrix of LoRA stays in 16 bits"),
    ]


@pytest.mark.filterwarnings("ignore")
def test_lora_of_qwix_over_int8_trains_without_gradients_of_the_base():
    """As `nnx.split` separates them: the parameters are a tuple, of which one part has gradients."""
    qwix = pytest.importorskip("qwix", reason="needs Qwix: pip install qwix")
    provider = qwix.LoraProvider([qwix.LoraRule(module_path=".*", rank=2, alpha=2.0)])
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        model = qwix.apply_lora_to_model(Attention(nnx.Rngs(0)), provider, X, rngs=nnx.Rngs(1))
        graph, lora, base = nnx.split(model, nnx.LoRAParam, ...)
        int8 = swjax.quantized(lambda params, x: nnx.merge(graph, *params)(x))
        report = int8.report((lora, base), X)
        assert converted(report) == {"1/q_proj/kernel", "1/o_proj/kernel"}
        want = jax.jit(swjax.quantized(lambda model, x: model(x)))(Attention(nnx.Rngs(0)), X)
        np.testing.assert_array_equal(jax.jit(int8)((lora, base), X), want)  # b is 0
        gradients = jax.grad(lambda lora, base, x: jnp.sum(int8((lora, base), x) ** 2))
        assert any(jnp.any(g != 0) for g in jax.tree.leaves(jax.jit(gradients)(lora, base, X)))
        # Two forward, and the input gradient of o_proj: no LoRA needs that of q_proj.
        assert_quantized(gradients, lora, base, X, count=3)


@pytest.mark.parametrize("converted_first", [True, False])
def test_lora_of_flax_over_int8_trains_its_own_matrices(converted_first):
    """Its base layer is int8 in the model, as `quantize_model` converts it, and in the program."""
    make = lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
    wrap = lambda base: nnx.LoRA(WIDTH, 2, WIDTH, base_module=base, rngs=nnx.Rngs(1))
    convert = lambda model: swjax.nnx.quantize_model(model, {".*": "switchback"})
    model = wrap(convert(make())) if converted_first else convert(wrap(make()))
    model.lora_b[...] = draw(2, WIDTH)
    delta = X @ model.lora_a[...] @ model.lora_b[...]
    base = swjax.switchback(X, model.base_module.kernel[...])
    np.testing.assert_allclose(model(X), base + delta, rtol=1e-5, atol=1e-5)
    plain = wrap(make())
    plain.lora_b[...] = model.lora_b[...]
    int8 = swjax.quantized(lambda model, x: model(x))
    assert converted(int8.report(plain, X)) == {"base_module/kernel"}
    np.testing.assert_allclose(int8(plain, X), model(X), rtol=1e-5, atol=1e-5)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    loss = lambda lora: jnp.sum(nnx.merge(graph, lora, frozen)(X) ** 2)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(jax.jit(jax.grad(loss))(lora)))


# --- rules --------------------------------------------------------------------------------------------

KEPT = """
embedder/embedding  embedder/input_embedding  lm_head/kernel  lm_head/w  final_norm/scale  final_norm/w
layers/0/input_layernorm/w  layers/0/attn/q_norm/w  layers/0/pre_attention_norm/scale
layers/3/mlp/router/kernel  params/token_embedder/embedding  params/decoder/decoder_norm/scale
params/decoder/logits_dense/kernel  params/decoder/layers/MoeBlock_0/gate/kernel
params/decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel  model/embed_tokens/embedding
model/layers/0/mlp/gate/weight  model/layers/0/mlp/shared_expert_gate/weight
model/layers/0/block_sparse_moe/gate/kernel  model.embed_tokens.weight  model.layers.0.mlp.gate.weight
transformer/wte/embedding  transformer/wpe/embedding  transformer/h/0/ln_1/scale  transformer/ln_f/scale
score/head/kernel  decoder/logitdense/kernel  output/kernel  layers/0/attn/q_proj/w_lora_a
classifier/kernel  to_logits/kernel  output  model.output.weight  lm/softmax/logits_ffn/linear/w
layers/0/attn/lora/a  layers/0/attn/lora/B  layers/0/q_proj/lora_down/kernel
layers/0/attn/q_proj/kernel_lora_b  layers/0/self_attn/q_proj/lora_A/default/weight
transformer/layers/0/LayerNorm_0/scale  blocks/0/norm1/scale
""".split()
QUANTIZED = """
layers/0/attn/q_proj/kernel  layers/0/attn/q_einsum/w  layers/0/attn/kv_einsum/w
layers/0/attn/attn_vec_einsum/w  layers/0/mlp/gate_proj/kernel  layers/0/mlp/up_proj/w
layers/0/mlp/experts/0/gate_proj/weight  transformer/layer_0/mlp/gating_einsum
transformer/layer_0/mlp/linear  transformer/layer_0/mlp/gating_einsum/w
params/decoder/layers/self_attention/query/kernel  params/decoder/layers/mlp/wi_0/kernel
params/decoder/layers/MoeBlock_0/wi_0  params/decoder/layers/self_attention/out/kernel
model/layers/0/mlp/gate_up_proj/weight  model/layers/0/mlp/shared_expert/gate_proj/kernel
transformer/h/0/attn/c_attn/kernel  transformer/h/0/mlp/c_fc/kernel
bert/encoder/layer/0/output/dense/kernel  model.layers.0.self_attn.q_proj.weight
transformer/layers/stacked/self_attn/q_proj/weight  encoder/layers/0/attn/multihead/query/kernel
model/layers/0/layernorm_mlp/wi_kernel  blocks/0/multi_head/query/kernel
blocks/0/attention_head/wq  layers/0/attention/output
""".split()


def test_names_of_parameters_that_language_models_keep():
    assert [path for path in KEPT if not re.fullmatch(swjax.KEPT_IN_LLMS, path)] == []
    assert [path for path in QUANTIZED if re.fullmatch(swjax.KEPT_IN_LLMS, path)] == []


def test_a_gate_beside_experts_stays_and_one_beside_up_does_not():
    params = {
        name: draw(WIDTH, WIDTH)
        for name in ("mlp/gate", "mlp/up", "moe/gate", "moe/experts", "gate", "up_proj")
    }
    fn = lambda p, x: sum((x @ w for w in p.values()), x)
    report = swjax.quantized(fn).report(params, X)
    assert set(params) - converted(report) == {"moe/gate"}
    rules = {"gate": "standard", "llm": "int8_hadamard", ".*gate": "llm_int8"}
    by_path = {p.path: p.recipe for p in swjax.quantized(fn, rules).report(params, X)}
    assert by_path.pop("gate") is None and by_path.pop("moe/gate") == RECIPES["llm_int8"]
    assert set(by_path.values()) == {RECIPES["int8_hadamard"]}


def test_a_tied_head_stays_whatever_its_name_is():
    """Its product was int8, because only the name tells an embedding; rules of one's own convert it."""
    apply = lambda p, tokens: jnp.take(p["E"], tokens, axis=0) @ p["up"] @ p["E"].T
    params = {"E": draw(20, WIDTH), "up": draw(WIDTH, WIDTH)}
    of = lambda rules: converted(swjax.quantized(apply, rules).report(params, TOKENS))
    assert of("llm") == {"up"} and of({".*": "switchback"}) == {"E", "up"}


def test_the_first_rule_counts_and_a_recipe_may_be_one_of_yours():
    params = {"a": draw(WIDTH, WIDTH), "b": draw(WIDTH, WIDTH), "c": draw(WIDTH, WIDTH)}
    fn = lambda p, x: x @ p["a"] @ p["b"] @ p["c"]
    rules = {"a": "standard", "a|b": RECIPES["switchback_hadamard"]}
    rows = [(p.path, p.recipe, p.reason) for p in swjax.quantized(fn, rules).report(params, X)]
    assert rows == [
        ("a", None, "its rule is 'standard'"),
        ("b", RECIPES["switchback_hadamard"], ""),
        ("c", None, "no expression matches its path"),
    ]


@pytest.mark.parametrize(
    ("rules", "fn", "message"),
    [
        ({"layer": "swichback"}, None, "recipe must be one of"),
        ("lm", None, "recipes must map regular expressions"),
        ("llm", nn.Dense(8), "needs a function .* got the module Dense: pass its apply"),
        ({"kernel": "switchback"}, lambda w, x: x @ w["w"], "'kernel' matches no .* it must"),
        ({"i": "switchback"}, lambda w, x: x @ w["i"].astype(x.dtype),
         "abc,cd->abd with the parameter 'i': its dtype is int8, but recipes quantize floats; keep"),
        ({"w": "switchback"}, lambda w, x: x.astype("complex64") @ w["w"].astype("complex64"),
         "product abc,cd->abd with the parameter 'w': .* got complex64.*'standard'"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_the_remedy(rules, fn, message):
    params = {"w": draw(WIDTH, WIDTH), "i": jnp.ones((WIDTH, WIDTH), jnp.int8)}
    with pytest.raises((ValueError, TypeError), match=message) as error:
        swjax.quantized(fn, rules)(params, X)
    assert "\n" not in str(error.value)


def test_a_conversion_of_only_routers_and_heads_warns():
    params = {"mlp/router": draw(WIDTH, 4), "mlp/experts": draw(WIDTH, 32), "lm_head": draw(32, 20)}
    fn = lambda p, x: x @ (p["mlp/experts"] * 2.0) @ p["lm_head"] + jnp.sum(x @ p["mlp/router"])
    with pytest.warns(UserWarning, match="only 'lm_head', a router"):
        swjax.quantized(fn, {".*": "switchback"})(params, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swjax.quantized(lambda p, x: x @ p["w"], {"w": "switchback"})(
            {"w": params["lm_head"].T[:WIDTH]}, X
        )


def test_results_may_be_constants():
    fn = lambda w, x: (jnp.tanh(x @ w), 0.0)
    y, constant = jax.jit(swjax.quantized(fn, {".*": "switchback"}))(draw(WIDTH, WIDTH), X)
    assert y.shape == X.shape and constant == 0


def test_arguments_that_are_no_arrays_are_static():
    def fn(w, x, scale, *, train):
        return {"y": scale * (x @ w)} if train else None

    int8 = swjax.quantized(fn, {".*": "switchback"})
    assert int8(draw(WIDTH, 4), X, 2.0, train=True)["y"].shape == (2, LENGTH, 4)
    like = jax.ShapeDtypeStruct((WIDTH, 4), "float32")
    assert int8.report(like, jax.ShapeDtypeStruct(X.shape, X.dtype), 2.0, train=True).share == 1
    assert_quantized(int8, draw(WIDTH, 4), X, 2.0, train=True)


def test_the_report_is_a_table():
    params = {f"layers/{i}/w": draw(WIDTH, WIDTH) for i in range(2)} | {"lm_head": draw(WIDTH, 4)}
    fn = lambda p, x: x @ p["layers/0/w"] @ p["layers/1/w"] @ p["lm_head"]
    table = """
        layers/*/w  abc,cd->abd  2x8x16, 16x16  2 x  88.9%  switchback
        lm_head     abc,cd->abd  2x8x16, 16x4   1 x  11.1%  -           the head stays in 16 bits
        in 8 bits: 88.9% of 1.84e+04 forward FLOPs, 88.9% of input gradients, 0.0% of weight gradients"""
    assert str(swjax.quantized(fn).report(params, X)).split() == table.split()


# --- frozen parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["switchback", "switchback_q", "int8_hadamard"])
def test_frozen_parameters_give_the_values_of_float_ones(recipe):
    """In a scan with remat; LoRA beside them has the same gradients, and weights are quantized in no call."""
    int8, params = swjax.quantized(language_model, {"llm": recipe}), parameters()
    frozen = int8.freeze(params, TOKENS, only="layers/.*")
    assert frozen["layers"]["out"]["w"].values.shape == (2, WIDTH, WIDTH)
    assert int8.report(frozen, TOKENS).weight_gradient_share == 0
    stays = frozen["embedder"]["embedding"], frozen["layers"]["norm"]["scale"]
    assert all(isinstance(leaf, jax.Array) for leaf in stays)

    def of(trained, whole):
        return loss(int8, whole | {"embedder": trained}, TOKENS)

    step = jax.jit(jax.value_and_grad(of))
    (value, grads), (want, wanted) = (step(p["embedder"], p) for p in (frozen, params))
    assert value == want
    error = jnp.linalg.norm(grads["embedding"] - wanted["embedding"])
    exact = (
        recipe == "switchback"
    )  # others quantize or rotate along the other axis for the input gradient
    assert error <= (1e-6 if exact else 0.02) * jnp.linalg.norm(wanted["embedding"])
    shapes = {
        eqn.invars[0].aval.shape
        for eqn in all_equations(jax.make_jaxpr(step)(frozen["embedder"], frozen).jaxpr)
        if str(eqn.params.get("name", "")).startswith("quantize") and eqn.invars
    }
    assert shapes and (not exact or all(len(shape) > 2 for shape in shapes)), "only x and g"


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from all_equations(inner)


def test_a_frozen_model_of_flax_with_lora():
    model = nnx.List([nnx.LoRALinear(WIDTH, 16, lora_rank=2, rngs=nnx.Rngs(i)) for i in range(2)])
    graph, lora, base = nnx.split(model, nnx.LoRAParam, ...)

    def apply(state, x):
        for layer in nnx.merge(graph, state):
            x = jnp.tanh(layer(x))
        return x

    int8 = swjax.quantized(apply, {".*": "switchback"})
    frozen = int8.freeze(nnx.merge_state(lora, base), X)
    base_of = lambda state: nnx.filter_state(state, nnx.Not(nnx.LoRAParam))
    of = lambda lora, base: loss(int8, nnx.merge_state(lora, base), X)
    step = jax.jit(jax.value_and_grad(of))
    got, want = step(lora, base_of(frozen)), step(lora, base)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_frozen_parameters_that_one_function_reads_in_two_ways():
    """The traced function is one, but the weight is transposed before one of its calls."""
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
    int8 = swjax.quantized(lambda p, x: layer(p["b"].T, layer(p["a"], x)), {".*": "switchback"})
    params = {"a": draw(WIDTH, WIDTH), "b": draw(WIDTH, WIDTH)}
    frozen, call = int8.freeze(params, X), jax.jit(int8)
    np.testing.assert_array_equal(call(frozen, X), call(params, X))


def test_frozen_parameters_in_calls_that_do_not_read_them():
    """The calls received `FrozenWeight`s, which are no arrays."""

    def apply(p, x):
        scale = lambda p, x: x * p["scale"]
        for call in (
            jax.jit(scale),
            jax.checkpoint(scale),
            partial(jax.lax.cond, True, scale, scale),
        ):
            x = call(p, x)
        x, p = jax.lax.fori_loop(0, 2, lambda _, c: (scale(c[1], c[0]), c[1]), (x, p))
        x, p = jax.lax.optimization_barrier((x, p))
        moved, _ = jax.lax.fori_loop(0, 2, lambda _, c: (c[0] @ c[1], c[1].T), (x, p["moved"]))
        return x @ p["w"] + x @ p["moved"] + moved

    params = {"scale": jnp.ones(()), "w": draw(WIDTH, WIDTH), "moved": draw(WIDTH, WIDTH)}
    int8 = swjax.quantized(apply, {"w|moved": "switchback"})
    frozen = int8.freeze(params, X[0])
    assert isinstance(frozen["moved"], jax.Array), "a loop reads it in two ways"
    np.testing.assert_array_equal(jax.jit(int8)(frozen, X[0]), jax.jit(int8)(params, X[0]))


def test_frozen_parameters_for_another_function_are_refused():
    w = draw(WIDTH, WIDTH)
    other = swjax.quantized(lambda w, x: x @ w.T, {".*": "switchback"})
    int8 = swjax.quantized(lambda w, x: x @ w, {".*": "switchback"})
    frozen = int8.freeze(w, X)
    for bad in (other, swjax.quantized(int8.fn, {".*": "switchback_q"})):
        with pytest.raises(ValueError, match="frozen for another product or recipe"):
            bad(frozen, X)
    for bad in (int8.fn, lambda w, x: x @ (2.0 * w)):
        with pytest.raises(ValueError, match="frozen for another product or recipe"):
            swjax.quantized(bad, {".*": "standard"})(frozen, X)
    with pytest.raises(ValueError, match="freeze needs a parameter that matches 'no'"):
        int8.freeze(w, X, only="no")
    with pytest.raises(ValueError, match="multiplies outliers with w itself"):
        swjax.quantized(int8.fn, {".*": "llm_int8_outlier6"}).freeze(w, X)


# --- tracing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", ["quantized", "quantize_model"])
def test_equal_layers_are_traced_once(convert, monkeypatch):
    """One pass forward and one backward for each shape, and other operations in one group for each place."""
    calls, groups = [], []
    for rule in ("forward", "backward"):
        of = getattr(rules, rule)
        monkeypatch.setattr(
            rules, rule, lambda *args, of=of, name=rule, **kw: calls.append(name) or of(*args, **kw)
        )
    of_group = program_run.Group
    monkeypatch.setattr(
        program_run,
        "Group",
        lambda function, *of: groups.append(function) or of_group(function, *of),
    )

    def traced(layers):
        jax.clear_caches()
        calls.clear(), groups.clear()
        blocks = nnx.List([Attention(nnx.Rngs(i)) for i in range(layers)])
        if convert == "quantize_model":
            swjax.nnx.quantize_model(blocks, {".*": "switchback"})
        graph, state = nnx.split(blocks)

        def apply(state, x):
            for block in nnx.merge(graph, state):
                x = x + jnp.tanh(block(x)) / 2
            return jnp.sum(x)

        apply = swjax.quantized(apply, {".*": "switchback"}) if convert == "quantized" else apply
        jax.make_jaxpr(jax.value_and_grad(apply))(state, X)
        return sorted(calls), len({*groups})

    (two, few), (six, many) = traced(2), traced(6)
    assert two == six == ["backward", "forward"], "q_proj and o_proj have one shape"
    assert few == many and (few > 0) == (convert == "quantized")
