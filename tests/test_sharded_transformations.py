"""Sharded layers under JAX's transformations."""

import itertools
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from eight_devices import (
    AXES,
    BATCH,
    CASES,
    KINDS,
    MLP_LAYOUTS,
    TOKENS,
    TOKENS_EACH,
    K,
    N,
    arrays,
    compare,
    compiled,
    draw,
    gradients,
    make_mesh,
    one_device,
    put,
    release,
    sharded,
    train_program,
)
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from micro_run import UNDIAGNOSED
from numeric import snr_db

import swjax
import swjax.losses
import swjax.nnx
from swjax import Gelu, LayerNorm, Layout
from swjax.kernels import dispatch
from swjax.linear.conversion import NO_LAYOUT
from swjax.linear.sharding import reduced
from swjax.testing import assert_quantized_gathers, collectives

pytestmark = pytest.mark.eight_devices


@pytest.mark.parametrize("tensor", [release(1), 2])
@pytest.mark.parametrize("recipe", ["switchback", release("standard")])
@pytest.mark.release
def test_transformations_a_train_step_that_reduces_once_leaves_the_same(recipe, tensor):
    """With scan, rematerialization and tensor parallelism, `reduce_once` does not change a step's results."""
    changes = {"mesh.data": 8 // tensor, "mesh.tensor": tensor, "model.recipe": recipe}
    changes |= {"model.scan_layers": True, "model.remat": "full", "model.vision.layers": 2}
    changes |= UNDIAGNOSED
    results = []
    for once in (False, True):
        _, _, step, _, state, batch = train_program(**changes, **{"train.reduce_once": once})
        results.append(step(state(), batch))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "policy", thinning.first(["save_quantized", None, "save_weights", "save_linear"])
)
@pytest.mark.parametrize("name", [release("switchback"), "switchback_m"])
def test_transformations_remat(name, policy):
    mesh, layout, args, g = sharded("fsdp_column")
    policy = policy and getattr(swjax.checkpoint_policies, policy)
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        fn = compiled(partial(gradients, jax.checkpoint(layer, policy=policy)), args, g)
        compare(fn(args, g), one_device(name))
        assert_quantized_gathers(fn, weights=[(K, N)])


@pytest.mark.parametrize("kind", thinning.first(["explicit", "auto"]))
def test_transformations_scan_over_stacked_layers(kind):
    """Each scan step has a column- and a row-parallel layer, rematerialised. Auto meshes need no set_mesh."""
    mesh = make_mesh((2, 2, 2), KINDS[kind])
    w1, w2 = draw(3, K, N, seed=1) / np.sqrt(K), draw(3, N, K, seed=2) / np.sqrt(N)
    x, g = draw(BATCH, TOKENS_EACH, K), draw(BATCH, TOKENS_EACH, K, seed=3)

    def run(layouts, x, w1, w2):
        @jax.checkpoint
        def step(h, w):
            hidden = swjax.switchback(h, w[0], layout=layouts[0])
            return h + swjax.switchback(jnp.tanh(hidden), w[1], layout=layouts[1]), None

        return jax.lax.scan(step, x, (w1, w2))[0]

    want = jax.jit(partial(gradients, partial(run, (None, None))))((x, w1, w2), g)
    args = (
        put(x, mesh, TOKENS),
        put(w1, mesh, P(None, "fsdp", "tensor")),
        put(w2, mesh, P(None, "tensor", "fsdp")),
    )
    g = put(g, mesh, TOKENS)
    with jax.set_mesh(mesh) if kind == "explicit" else nullcontext():
        fn = compiled(partial(gradients, partial(run, MLP_LAYOUTS)), args, g)
        got = fn(args, g)
        assert_quantized_gathers(fn, weights=[(K, N), (N, K)])
    for a, b in zip(got, want):
        assert snr_db(a, b) > 38  # values of later layers may be rounded to another int8 step


@pytest.mark.parametrize(
    "case, kind",
    thinning.kept(
        itertools.product(["data", "hybrid", "fsdp_rows"], KINDS),
        [("hybrid", "explicit"), ("fsdp_rows", "auto")],
    ),
)
def test_transformations_stacks_are_reduced_once(case, kind):
    """The gradient of a stack is all-reduced once over replicas, not layer by layer, with the same bits."""
    (sizes, spec), dtype = CASES[case], "bfloat16"
    mesh = make_mesh(sizes, KINDS[kind])
    x, g = (put(draw(BATCH, TOKENS_EACH, K, seed=seed), mesh, TOKENS) for seed in (0, 3))
    stack = put(draw(3, K, K, seed=1) / np.sqrt(K), mesh, P(None, *spec))

    def run(layout, x, stack):
        for w in jax.lax.split(reduced(stack, x, layout), (1, 1, 1)):
            x = x + swjax.switchback(jnp.tanh(x), w.squeeze(0), layout=layout)
        return x

    with jax.set_mesh(mesh):
        now, later = (
            compiled(
                partial(gradients, partial(run, Layout(spec, TOKENS, dtype, later))), (x, stack), g
            )
            for later in (False, True)
        )
        for a, b in zip(now((x, stack), g), later((x, stack), g), strict=True):
            np.testing.assert_array_equal(a, b)
        layer = (K // sizes[1], K)
        sums = [
            [s for op, _, s in collectives(p) if op == "all-reduce" and s[-2:] == layer]
            for p in (now, later)
        ]
    assert sums == ([[], []] if case == "fsdp_rows" else [[layer] * 3, [(3, *layer)]])


@pytest.mark.parametrize("kind", thinning.first(["explicit", "auto"]))
def test_transformations_vmap(kind):
    """vmap over weights (experts) and over tokens; `spmd_axis_name` names a sharded mapped axis."""
    mesh, layout, (x, w, bias), _ = sharded("fsdp_column", kind)
    plain = arrays()
    experts = jnp.stack([plain[1], 2 * plain[1]])
    want = [swjax.switchback(plain[0], expert, plain[2]) for expert in experts]
    layer = partial(swjax.switchback, layout=layout)
    with jax.set_mesh(mesh):
        stacked = put(experts, mesh, P(None, *layout.w))
        y = jax.jit(jax.vmap(layer, (None, 0, None)))(x, stacked, bias)
        compare(y[0], want[0])
        compare(y[1], want[1])
        x = put(plain[0], mesh, P("data"))
        layer = partial(swjax.switchback, layout=Layout(layout.w, P("fsdp")))
        fn = jax.vmap(layer, (0, None, None), spmd_axis_name="data" if kind == "auto" else None)
        compare(jax.jit(fn)(x, w, bias), want[0])


@pytest.mark.parametrize("case", thinning.first(["column", "hybrid"]))
def test_transformations_gradient_of_vmap_over_an_explicit_axis(case):
    mesh, _, (x, w, bias), _ = sharded(case, "explicit")
    plain = arrays()

    def total(layer, x, w, bias):
        return jnp.sum(jnp.sin(jax.vmap(layer, (0, None, None))(x, w, bias)))

    differentiate = jax.jit(jax.grad(partial(total, swjax.switchback), (0, 1, 2)))
    want = differentiate(*plain[:3])
    with jax.set_mesh(mesh):
        x = jax.reshard(x, P("data"))
        compare(differentiate(x, w, bias), want)
        each = jax.vmap(jax.grad(partial(total, swjax.switchback), 1), (0, None, None))
        compare(jnp.sum(jax.jit(each)(x[:, None], w, bias), 0), want[1])


@pytest.mark.parametrize(
    "case, kind",
    thinning.kept(
        itertools.product(["hybrid", "fsdp_row", "fsdp_column"], KINDS),
        [("fsdp_column", "explicit")],
    ),
)
def test_transformations_second_derivatives(case, kind):
    mesh, layout, args, _ = sharded(case, kind)

    def product(layout, x, w, bias):
        def loss(w):
            y, x_again = swjax.switchback(x, w, bias, residual=True, layout=layout)
            return jnp.sum(jnp.sin(y)) + jnp.sum(x_again)

        return jax.jvp(jax.grad(loss), (w,), (jnp.cos(w),))[1]

    want = jax.jit(partial(product, None))(*arrays()[:3])
    with jax.set_mesh(mesh):
        compare(jax.jit(partial(product, layout))(*args), want)


@pytest.mark.parametrize("taken", [("data",), ("data", "fsdp"), AXES])
def test_transformations_inside_a_shard_map(taken):
    """Inside a user's shard_map the layer shards over the axes that remain automatic."""
    mesh, layout, args, g = sharded("fsdp_column")
    given = P(tuple(a for a in taken if a != "tensor"))

    def whole(x, w, bias):
        one = lambda x, w, bias: swjax.switchback(x, w, bias, layout=layout)
        return jax.shard_map(
            one, in_specs=(given, P(), P()), out_specs=given, axis_names=set(taken), check_vma=False
        )(x, w, bias)

    with jax.set_mesh(mesh):
        compare(jax.jit(partial(gradients, whole))(args, g), one_device("switchback"))


@pytest.mark.parametrize("taken", [release(("data",)), release(("data", "fsdp")), AXES])
def test_transformations_inside_a_shard_map_that_checks(taken):
    """With check_vma, gradients inside are all-reduced over the user's axes, as for JAX's own products."""
    mesh, layout, args, g = sharded("hybrid")
    given = P(tuple(a for a in taken if a != "tensor"))

    @partial(
        jax.shard_map,
        in_specs=(given, P(), P(), given),
        out_specs=(given, given, P(), P()),
        axis_names=set(taken),
    )
    def whole(x, w, bias, g):
        y, vjp = jax.vjp(partial(swjax.switchback, layout=layout), x, w, bias)
        return y, *vjp(g)

    with jax.set_mesh(mesh):
        compare(jax.jit(whole)(*args, g), one_device("switchback"))


def test_transformations_none_at_all():
    """Eager calls give the values of one device."""
    mesh, layout, args, g = sharded("fsdp_column")
    with jax.set_mesh(mesh):
        compare(
            gradients(partial(swjax.switchback, layout=layout), args, g), one_device("switchback")
        )


@pytest.mark.parametrize("kind", thinning.first(["explicit", "auto"]))
@pytest.mark.parametrize("case", ["hybrid", release("fsdp_row"), release("fsdp_column")])
def test_transformations_of_layers_in_flax(case, kind):
    """`dot_general` without a layout, and a layer whose sharding is in Flax's metadata."""
    mesh, layout, (x, w, bias), _ = sharded(case, kind)
    want = swjax.switchback(*arrays()[:3])
    unannotated = swjax.dot_general("switchback")
    with jax.set_mesh(mesh):
        injected = jax.jit(lambda x, w: unannotated(x, w, (((2,), (0,)), ((), ()))))(x, w)
        names = (*layout.w, None)[:2]
        layer = swjax.nnx.Linear(K, N, kernel_metadata={"out_sharding": names}, rngs=nnx.Rngs(0))
        graph, params = nnx.split(layer)
        params["kernel"].set_value(w), params["bias"].set_value(bias)
        call = compiled(lambda params, x: nnx.merge(graph, params)(x), params, x)
        compare(injected + bias[None, None], want)
        compare(call(params, x), want)
        if "row" not in case:
            assert_quantized_gathers(call, weights=[(K, N)])


def test_a_rewritten_program_gathers_stored_parameters_in_8_bits():
    """With scan and remat over 4 x 2 devices, although the function reshards 16-bit casts of parameters."""

    def apply(layers, x):
        def step(x, layer):
            up = jax.reshard(layer["up"].astype("bfloat16"), P(None, "tensor")).astype(x.dtype)
            hidden = jax.nn.relu(jnp.einsum("btd,dh->bth", x, up))
            down = jax.reshard(layer["down"].astype("bfloat16"), P("tensor", None)).astype(x.dtype)
            return x + jnp.einsum("bth,hd->btd", hidden, down, out_sharding=P("fsdp")), None

        return jax.lax.scan(jax.checkpoint(step), x, layers)[0]

    loss = lambda layers, x: jnp.sum(swjax.quantized(apply)(layers, x).astype("float32") ** 2)
    step = jax.jit(jax.grad(loss))
    layers = {"up": draw(2, K, N) / np.sqrt(K), "down": draw(2, N, K, seed=1) / np.sqrt(N)}
    specs = {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}
    results = []
    for sizes in ((1, 4, 2), (1, 1, 1)):
        mesh = make_mesh(sizes, KINDS["explicit"])
        with jax.set_mesh(mesh):
            here = {key: put(layers[key], mesh, spec) for key, spec in specs.items()}
            x = put(draw(BATCH, TOKENS_EACH, K), mesh, P("fsdp"))
            results.append(jax.device_get(step(here, x)))
            assert_quantized_gathers(step, here, x, weights=[(K, N), (N, K)])
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert snr_db(a, b) > 60  # an int8 value of x may round in another way


@pytest.mark.parametrize("as_stack", [True, release(False)])
def test_layouts_follow_sharded_parameters_on_automatic_axes(as_stack):
    """Kernels of three axes, stacked for a scan or sliced: 4 x 2 devices gather int8 weights only."""

    def layer(x, w):
        q = jnp.tanh(jnp.einsum("btd,dnh->bnth", x, w["q"].astype(x.dtype)))
        x = x + jnp.einsum("bnth,nhd->btd", q, w["out"].astype(x.dtype))
        return x + jnp.tanh(x @ w["up"].reshape(K, N)) @ w["down"].swapaxes(0, 1), None

    def apply(layers, x):
        if as_stack:
            return jax.lax.scan(jax.checkpoint(layer), x, layers)[0]
        for i in range(2):
            x, _ = layer(x, jax.tree.map(lambda w: w[i], layers))  # noqa: B023
        return x

    shapes = {"q": (K, 4, 8), "out": (4, 8, K), "up": (K, 4, N // 4), "down": (K, N)}
    layers = {name: draw(2, *shape) / np.sqrt(K) for name, shape in shapes.items()}
    rows = "batch" if as_stack else "fsdp"  # the second is an axis of the default of `tokens`
    specs = {"q": P(None, rows, "tensor"), "out": P(None, "tensor", None, rows)}
    specs |= {"up": P(None, rows, "tensor"), "down": P(None, rows, "tensor")}
    mesh = jax.make_mesh((4, 2), (rows, "tensor"), axis_types=(AxisType.Auto,) * 2)
    here = {name: put(layers[name], mesh, spec) for name, spec in specs.items()}
    x = draw(BATCH, TOKENS_EACH, K)
    tokens = {"tokens": P(rows)} if as_stack else {}
    int8 = swjax.quantized(apply, sharded_like=here, **tokens)
    report = int8.report(here, x)
    assert len(report) >= 4 and all(product.recipe and not product.reason for product in report)
    loss = lambda fn: jax.jit(jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1)))
    args = here, put(x, mesh, P(rows))
    weights = [(K, 32), (32, K), (K, N), (N, K)]
    assert_quantized_gathers(loss(int8), *args, weights=weights)
    assert collectives(loss(int8), *args)
    got, want = loss(int8)(*args), loss(swjax.quantized(apply))(layers, x)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert snr_db(a, b) > 60
    # Shards of the second axis of n are no shards of a matrix.
    bad = swjax.quantized(
        apply, sharded_like=specs | {"q": P(None, None, None, "tensor")}, **tokens
    )
    fallen = {product.path for product in bad.report(layers, x) if product.reason == NO_LAYOUT}
    assert fallen == {"q"}


@pytest.mark.parametrize("axes", [("expert", "fsdp", "tensor"), release((None, "fsdp", "tensor"))])
def test_experts_on_automatic_axes_have_layouts(axes, monkeypatch):
    """Ragged products and einsums with experts: each device runs kernels on its rows; int8 weights move."""
    expert, fsdp, tensor = axes
    sizes = jnp.array([11, 0, 20, 10])  # experts begin within the rows of a device

    def apply(params, x):
        hidden = jnp.tanh(jax.lax.ragged_dot(x, params["wi"].astype(x.dtype), sizes))
        x = x + jax.lax.ragged_dot(hidden, params["wo"].swapaxes(1, 2), sizes)
        each = jnp.broadcast_to(x, (4, *x.shape))
        hidden = jnp.tanh(jnp.einsum("ebk,kefh->ebfh", each, params["up"]))
        return jnp.einsum("ebfh,ehfk->ebk", hidden, params["down"])

    shapes = {"wi": (4, 32, 64), "wo": (4, 32, 64), "up": (32, 4, 2, 32), "down": (4, 32, 2, 32)}
    params = {name: draw(*shape) / 8 for name, shape in shapes.items()}
    specs = {"wi": P(expert, fsdp, tensor), "wo": P(expert, fsdp, tensor)}
    specs |= {"up": P(fsdp, expert, tensor), "down": P(expert, None, tensor, fsdp)}
    mesh = jax.make_mesh((2, 2, 2), ("expert", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    here = {
        name: jax.device_put(params[name], jax.NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    x = draw(48, 32)
    int8 = swjax.quantized(apply, {".*": "switchback"}, sharded_like=here)
    assert [product.reason for product in int8.report(here, x)] == [""] * 4
    gathering, choose = set(), dispatch.choose
    monkeypatch.setattr(
        dispatch,
        "choose",
        lambda *a, **kw: gathering.add(dispatch.would_gather()) or choose(*a, **kw),
    )
    loss = lambda fn: jax.jit(jax.value_and_grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1)))
    args = here, jax.device_put(x, jax.NamedSharding(mesh, P("fsdp")))
    program = loss(int8).lower(*args).compile()
    assert gathering == {False}
    for moved in collectives(program):
        assert moved.op != "all-gather" or moved.dtype == "s8" or np.prod(moved.shape) <= x.size
    want = loss(swjax.quantized(apply, {".*": "switchback"}))(params, x)
    for a, b in zip(*map(jax.tree.leaves, (program(*args), want)), strict=True):
        assert snr_db(a, b) > 60


@pytest.mark.parametrize(
    "kind, specs, norm",
    [
        ("explicit", (P("data"), P("data", None, "tensor")), LayerNorm(draw(32), draw(32))),
        ("auto", (P("fsdp"), P("data", "tensor", "fsdp")), Gelu()),  # no device has a whole row
        release("auto", (P("fsdp"), P("data", "tensor", "fsdp")), LayerNorm(draw(32), draw(32))),
    ],
)
def test_experts_after_a_prologue(kind, specs, norm):
    """The gradients, those of the norm included, are those of one device."""
    x, w, g = draw(48, 32).at[41:].set(jnp.nan), draw(4, 32, 64, seed=1), draw(48, 64, seed=2)

    def layer(layout, x, w, norm):
        sizes = jnp.array([11, 0, 20, 10])  # experts begin within the rows of a device
        return swjax.ragged_switchback(x, w, sizes, prologue=norm, layout=layout)

    want = jax.jit(partial(gradients, partial(layer, None)))((x, w, norm), g)
    mesh, (tokens, (experts, *matrix)) = make_mesh((2, 2, 2), KINDS[kind]), specs
    layout = Layout(P(*matrix), tokens=tokens, experts=P(experts))
    with jax.set_mesh(mesh):
        args = tuple(put(a, mesh, spec) for a, spec in zip((x, w), specs))
        norm, g = jax.tree.map(lambda a: put(a, mesh, P()), (norm, g))
        got = jax.jit(partial(gradients, partial(layer, layout)))((*args, norm), g)
    compare(got, want)
