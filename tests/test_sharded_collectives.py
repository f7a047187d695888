"""The collectives of compiled programs: which operations, dtypes and shapes devices exchange."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import thinning
from eight_devices import (
    CASES,
    KINDS,
    MLP_LAYOUTS,
    TOKENS,
    TOKENS_EACH,
    K,
    N,
    compare,
    compiled,
    gradients,
    make_mesh,
    mlp,
    mlp_arguments,
    one_device,
    release,
    sharded,
    train_program,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from micro_run import UNDIAGNOSED

import swjax
import swjax.losses
import swjax.nnx
from swjax import Layout
from swjax.linear import gradient_sums
from swjax.optax import path_name
from swjax.optax.newton_schulz import orthogonalize
from swjax.recipes import RECIPES
from swjax.testing import assert_quantized_gathers, collectives

pytestmark = pytest.mark.eight_devices

COEFFICIENTS = np.float32([3.4445, -4.775, 2.0315])  # of Muon
MORE_RECIPES = (
    "switchback_q",
    "switchback_hadamard",
    "llm_int8",
    "fp8_switchback",
    "fp8_tensorwise",
)


def ops(found, *names):
    """Returns (operation, dtype) of the named collectives, without those of scales and biases."""
    return sorted(
        (op, dtype) for op, dtype, shape in found if op in names and max(shape, default=1) > 1
    )


@pytest.mark.parametrize("kind", ["auto", release("explicit")])
@pytest.mark.parametrize(
    "name", thinning.kept(RECIPES, ["switchback", "switchback_hadamard", "fp8_tensorwise"])
)
def test_collectives_of_data_parallel(name, kind):
    mesh, layout, args, g = sharded("data", kind, dtype="bfloat16")
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        forward = collectives(layer, *args)
        both = collectives(partial(gradients, layer), args, g)
    if name in ("llm_int8_outlier6", "fp8_tensorwise", "nvfp4"):  # maxima over the whole batch
        assert all(op == "all-reduce" and np.prod(shape) <= K for op, _, shape in forward)
    else:
        assert not forward
    assert {op for op, _, _ in both} == {"all-reduce"}


@pytest.mark.parametrize(
    "case, kind",
    thinning.thinned(
        [case for case in CASES if case not in ("data", "column", "row")], list(KINDS), full=[]
    ),
)
@pytest.mark.parametrize("name", ["switchback", release("fp8_switchback")])
def test_collectives_gather_narrow_weights_and_scatter_their_gradients(name, case, kind):
    if kind == "explicit" and name != "switchback":
        pytest.skip("how the layer learns of shardings does not depend on the recipe")
    mesh, layout, args, g = sharded(case, kind, dtype="bfloat16")
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        if kind == "explicit" and "row" in case.split(
            "_"
        ):  # avoids a split of x and a concatenation of dx
            spec = P(*TOKENS, None, "tensor")
            args = (jax.device_put(args[0], NamedSharding(mesh, spec)), *args[1:])
        programs = compiled(layer, *args), compiled(partial(gradients, layer), args, g)
        for program in programs:
            assert_quantized_gathers(program, weights=[(K, N)])
        forward, both = map(collectives, programs)
    assert ops(forward, "all-gather") == [("all-gather", "s8")]
    assert ("all-reduce", "f32", (1, 1)) in forward  # the absolute maximum of w
    # Both products may share one gather, because w has a single scale and XLA reads it in either layout.
    assert ops(both, "all-gather") in ([("all-gather", "s8")], [("all-gather", "s8")] * 2)
    assert ops(both, "reduce-scatter") == [("reduce-scatter", "f32")]


@pytest.mark.parametrize("kind", ["auto", release("explicit")])
@pytest.mark.parametrize(
    "case, sums", [("data", {"all_reduce"}), ("fsdp_rows", {"reduce_scatter"})]
)
def test_collectives_that_sum_gradients_in_16_bits(case, sums, kind):
    mesh, layout, args, g = sharded(case, kind)
    layer = partial(swjax.switchback, layout=replace(layout, reduce_dtype="bfloat16"))
    with jax.set_mesh(mesh):
        lowered = jax.jit(partial(gradients, layer)).lower(args, g)
        got = lowered.compile()(args, g)
    # Reads the lowered program, because XLA for CPUs replaces 16-bit sums by 32-bit sums.
    asked = re.findall(
        r'"stablehlo\.(all_reduce|reduce_scatter)"[^^]*\^\w+\(%\w+: tensor<(\w+)>',
        lowered.as_text(),
    )
    assert {op for op, dtype in asked if dtype == "bf16"} == sums
    compare(got, one_device("switchback"), "bfloat16", exact=(0, 1))
    dw, exact = np.asarray(got[2]), np.asarray(one_device("switchback")[2])
    assert 1e-4 < np.linalg.norm(dw - exact) / np.linalg.norm(exact) < 1e-2  # bfloat16's precision


@pytest.mark.parametrize("kind", ["auto", release("explicit")])
@pytest.mark.parametrize(
    "case, dtype",
    [
        ("hybrid", "int8"),
        ("fsdp_columns", "float8_e4m3fn"),
        release("data", "int8"),
        release("fsdp_rows", "int8"),
    ],
)
def test_collectives_that_sum_gradients_in_8_bits(case, dtype, kind):
    """Each device sends its gradient once. Whatever is as large as a shard of it is sent in 8 bits."""
    mesh, layout, args, g = sharded(case, kind)
    layer = partial(swjax.switchback, layout=replace(layout, reduce_dtype=dtype))
    with jax.set_mesh(mesh):
        program = compiled(partial(gradients, layer), args, g)
        got, found = program(args, g), collectives(program)
    data, fsdp, _ = CASES[case][0]
    sent = sum(np.prod(shape) for op, type_, shape in found if (op, type_) == ("all-to-all", "s8"))
    assert sent == K * N * (fsdp > 1) + K * N // fsdp * (data > 1)
    assert {type_ for _, type_, shape in found if np.prod(shape) >= K * N // 8} == {"s8"}
    compare(got[:2], one_device("switchback")[:2], exact=(0, 1))
    dw, exact = np.asarray(got[2]), np.asarray(one_device("switchback")[2])
    error = np.linalg.norm(dw - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < {"int8": 0.015, "float8_e4m3fn": 0.04}[dtype]


def test_sums_in_8_bits_of_devices_whose_gradients_differ_in_size():
    """No sum overflows or rounds to the step of the largest device's gradient, and a NaN is not lost."""
    mesh, rng = make_mesh((8, 1, 1)), np.random.default_rng(0)
    x = rng.standard_normal((8, 30, 64)).astype("float32")  # 30 rows, which 8 devices do not divide
    x *= 10.0 ** np.arange(-4, 4)[:, None, None]
    x[:, 7] = 3e37
    x[2, 9, 3] = np.nan

    def run(x):
        return gradient_sums.all_reduce(x[0], ("data",), "int8")[None]

    spec = P("data")
    sums = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    got, want = np.asarray(sums(x)), x.astype("float64").sum(0)
    assert (got == got[:1])[:, np.arange(30) != 9].all() and np.isnan(got[:, 9, 3]).all()
    finite = np.arange(30) != 9
    np.testing.assert_allclose(got[0, 7], want[7], rtol=1e-6)
    error = np.abs(got[0] - want)[finite].max(1) / np.abs(want)[finite].max(1)
    assert error.max() < 0.009  # one step of 127, of the largest device and of the sum


@pytest.mark.parametrize("name", ["switchback", *map(release, ("switchback_m", *MORE_RECIPES))])
def test_collectives_of_an_mlp(name):
    """Gathers quantized weights, reduce-scatters two gradients; of activations, all-reduces only y and dx."""
    mesh = make_mesh((2, 2, 2))
    with jax.set_mesh(mesh):
        fn = partial(gradients, partial(mlp, MLP_LAYOUTS, recipe=name))
        program = compiled(fn, *mlp_arguments(mesh))
        assert_quantized_gathers(program, weights=[(K, N), (N, K)])
        found = collectives(program)
    assert ops(found, "all-gather").count(("all-gather", "s8")) in (2, 4)
    assert ops(found, "reduce-scatter") == [("reduce-scatter", "f32")] * 2
    activations = [shape for op, _, shape in found if shape[-2:] == (TOKENS_EACH, K)]
    assert len(activations) == 2 and not [
        1 for _, _, shape in found if shape[-2:] == (TOKENS_EACH, N)
    ]


def shapes_of(params):
    """Returns the shapes of the blocks' kernels, and of all parameters outside blocks."""
    params = {path_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    kernels = {shape[1:] for name, shape in params.items() if "blocks" in name and "kernel" in name}
    return kernels, {shape for name, shape in params.items() if "blocks" not in name}


@pytest.mark.release
def test_collectives_of_a_train_step():
    """Only parameters and the loss's embeddings are gathered; kernels of blocks are gathered in int8."""
    config, cfg, step, like, _, _ = train_program(**{"mesh.data": 2, "mesh.fsdp": 4})
    kernels, others = shapes_of(like["params"])
    found = [c for c in collectives(step) if c.op == "all-gather" and len(c.shape) > 1]
    # In a shape of three sizes the first is the number of devices, whose columns are concatenated.
    whole = lambda shape: shape if len(shape) == 2 else (shape[1], shape[0] * shape[2])
    assert {whole(shape) for _, dtype, shape in found if dtype == "s8"} == kernels
    embeddings = (config.train.batch_size, cfg.embed_dim)
    assert {shape for _, dtype, shape in found if dtype != "s8"} <= others | {embeddings}


@pytest.mark.parametrize("accumulation", [1, release(2)])
@pytest.mark.release
def test_collectives_of_a_train_step_that_reduces_once(accumulation):
    """Kernel gradients are all-reduced in stacks of layers, and the step's results do not change."""
    shared = {"mesh.data": 4, "mesh.fsdp": 2, "train.accumulation": accumulation}
    shared |= {
        "train.batch_size": 8 * accumulation,
        "model.vision.layers": 2,
        "model.text.layers": 2,
    }
    shared |= UNDIAGNOSED
    results, sums = [], []
    for once in (False, True):
        _, _, step, like, state, batch = train_program(**shared, **{"train.reduce_once": once})
        kernels, _ = shapes_of(like["params"])
        parts = {(k // 2, n) for k, n in kernels} | {(k, n // 2) for k, n in kernels}
        found = [shape for op, _, shape in collectives(step) if op == "all-reduce"]
        sums.append(Counter(len(shape) for shape in found if shape[-2:] in parts))
        results.append(step(state(), batch))
    # Six kernels in each of two layers of two towers; parameters outside blocks do not change.
    assert sums[0] - sums[1] == {2: 24} and sums[1][3] == 12
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "spec", [release(P()), P(None, "fsdp", "tensor"), release(P(None, "tensor", "fsdp"))]
)
def test_devices_share_the_layers_that_muon_orthogonalizes(spec, tmp_path):
    mesh, layers = make_mesh((2, 2, 2)), (16, 12)  # 2 for each device; 12 for six of eight
    run = jax.jit(partial(orthogonalize, coefficients=COEFFICIENTS), static_argnames="dtype")
    for number in layers:
        x = jax.random.normal(jax.random.key(0), (number, 32, 64))
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        np.testing.assert_allclose(run(placed), run(x), atol=1e-5)
        one, eight = (run.lower(a).compile().cost_analysis()["flops"] for a in (x, placed))
        assert 2 / number < eight / one < 2.2 / number
    # XLA for CPUs replaces bf16 later, so the test reads the program as XLA partitions it.
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    run.lower(placed, dtype="bfloat16").compile(compiler_options=dump)
    (after,) = tmp_path.glob("*after_spmd-partitioning*")
    gathered = re.findall(r"= (\w+)\[\S+ all-gather\(", after.read_text())
    # The first gather is one along each axis of the mesh that shards the matrices.
    assert gathered == ["bf16"] * (3 if any(spec) else 1)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    "shape, mesh",
    thinning.thinned(
        [(4, 4, 32, 64), (12, 32, 64), (1, 64, 32), (64, 32)],
        [
            ((2, 2, 2), (EXPLICIT,) * 3),
            ((2, 2, 2), (AUTO, EXPLICIT, AUTO)),
            ((1, 1, 1), (EXPLICIT,) * 3),  # a cluster's program on one device
            ((4, 1, 2), (AUTO, EXPLICIT, EXPLICIT)),
        ],
        full=[],
    ),
)
def test_muon_on_a_mesh_with_explicit_axes(shape, mesh):
    sizes, kinds = mesh
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=kinds)
    x = jax.random.normal(jax.random.key(0), shape)
    run = jax.jit(partial(orthogonalize, coefficients=COEFFICIENTS))
    want, spec = run(x), P(*[None] * (len(shape) - 2), "fsdp", "tensor")
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        got = run(placed)
    assert jax.typeof(got) == jax.typeof(placed)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("kind, spec", [release(AUTO, P("fsdp", "tensor")), (EXPLICIT, P())])
@pytest.mark.release
def test_devices_share_single_matrices(kind, spec):
    """8 and 4 more for 8 devices, so each computes 2 of 12; all compute a matrix of another shape."""
    shapes = {f"layer{i}": (32, 64) for i in range(12)} | {
        "single": (32, 128),
        "tall0": (64, 32),
        "tall1": (64, 32),
        "stack": (8, 32, 64),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    tree = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    run = jax.jit(partial(orthogonalize, coefficients=COEFFICIENTS))
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)
    with jax.set_mesh(mesh):
        placed = {
            n: jax.device_put(x, NamedSharding(mesh, P(*[None] * (x.ndim - 2), *spec)))
            for n, x in tree.items()
        }
        got, flops = run(placed), run.lower(placed).compile().cost_analysis()["flops"]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, run(tree))
    if kind == EXPLICIT:
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, placed)
    matrix, single = (
        run.lower(tree[n]).compile().cost_analysis()["flops"] for n in ("layer0", "single")
    )
    # One of the stack, two of 12, at most both of two: with explicit axes no device has one alone. With FSDP
    # the devices share the products of `single`. Without sharing there are 22.
    assert 3 * matrix < flops < 1.25 * (5 * matrix + single)


@pytest.mark.parametrize("number", [3, 7])
def test_few_single_matrices_on_explicit_axes(number):
    """7 of 8 devices compute one each; with 3 every device computes all, instead of a stack of 8."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(EXPLICIT,))
    run = jax.jit(partial(orthogonalize, coefficients=COEFFICIENTS))
    tree = list(jax.random.normal(jax.random.key(0), (number, 32, 64)))
    with jax.set_mesh(mesh):
        placed = jax.device_put(tree, NamedSharding(mesh, P()))
        got, flops = run(placed), run.lower(placed).compile().cost_analysis()["flops"]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, run(tree))
    one = run.lower(tree[:1]).compile().cost_analysis()["flops"]
    computed = {3: 3, 7: 1}[number]
    assert 0.9 * computed < flops / one < 1.3 * computed


def test_the_gradient_of_muon_outside_jit():
    mesh, x = make_mesh((2, 2, 2)), jax.random.normal(jax.random.key(0), (3, 4, 2))
    loss = lambda x: orthogonalize(x, coefficients=COEFFICIENTS)[:, 0].sum()
    want = jax.grad(loss)(x)
    got = jax.grad(loss)(jax.device_put(x, NamedSharding(mesh, P())))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_muon_outside_jit_and_inside_shard_map():
    mesh, x = make_mesh((2, 2, 2)), jax.random.normal(jax.random.key(0), (12, 32, 64))
    run = partial(orthogonalize, coefficients=COEFFICIENTS)
    want, placed = run(x), jax.device_put(x, NamedSharding(mesh, P(None, "fsdp")))
    np.testing.assert_allclose(run(placed), want, atol=1e-5)
    local = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(local)(x), want, atol=1e-5)


@pytest.mark.release
@pytest.mark.parametrize("mesh", [{"mesh.data": 8}, {"mesh.data": 2, "mesh.fsdp": 4}])
def test_collectives_of_a_train_step_with_muon(mesh):
    """Each kernel's stack is gathered once or twice, and no product of the iterations."""
    layers = {"model.vision.layers": 8, "model.text.layers": 8, "model.scan_layers": True}
    muon = {"optimizer.name": "muon"}
    _, _, step, like, state, batch = train_program(**mesh, **layers, **UNDIAGNOSED, **muon)
    after, _ = step(state(), batch)
    kernels, _ = shapes_of(like["params"])
    shapes = [shape for op, _, shape in collectives(step) if op == "all-gather"]
    found = Counter(shape[1:] for shape in shapes if shape[0] == 8 and shape[1:] in kernels)
    each = 1 if mesh.get("mesh.fsdp", 1) == 1 else 2
    # Each of two towers has q, k, v and out of one shape.
    assert found == {shape: each * (8 if shape == (32, 32) else 2) for shape in kernels}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


def test_collectives_check_can_fail():
    mesh, _, args, _ = sharded("fsdp_rows")
    with jax.set_mesh(mesh):
        with pytest.raises(AssertionError, match=r"found all-gather f32\[48, 80\]"):
            assert_quantized_gathers(
                partial(swjax.switchback, layout=Layout()), *args, weights=[(K, N)]
            )
        with pytest.raises(AssertionError, match="gathers of weights"):
            assert_quantized_gathers(
                partial(swjax.switchback, layout=Layout(tokens=P())), *args, weights=[(K, N)]
            )


@pytest.mark.parametrize("kind", ["auto", release("explicit")])
@pytest.mark.parametrize("name", ["switchback", *map(release, ("standard", "llm_int8_outlier6"))])
def test_collectives_sum_the_gradient_of_a_shared_input_once(name, kind):
    """Three column-parallel layers share an input, whose partial gradients are all-reduced once."""
    mesh, layout, (x, w, _), g = sharded("column", kind)
    ws, gs = (w, 2 * w, w[::-1]), (g, g, -g)

    def run(layouts, x, ws, gs):
        layers = partial(swjax.switchback, recipe=name, layout=layouts)
        ys, vjp = jax.vjp(layers, x, ws)
        specs = [jax.typeof(y).sharding.spec for y in ys]
        return vjp(tuple(jax.reshard(g, s) if any(s) else g for g, s in zip(gs, specs)))

    alone = [jax.device_put(np.asarray(a), jax.devices()[0]) for a in (x, *ws, *gs)]
    want = jax.jit(partial(run, None))(alone[0], tuple(alone[1:4]), tuple(alone[4:]))
    with jax.set_mesh(mesh):
        fn = jax.jit(partial(run, layout))
        compare(fn(x, ws, gs), want)
        found = collectives(fn, x, ws, gs)
    sums = [shape for op, _, shape in found if op == "all-reduce" and shape[-1:] == (K,)]
    assert sum(len(shape) > 1 and shape[-2] == TOKENS_EACH for shape in sums) == 1, found
