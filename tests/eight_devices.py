"""The layer on every mesh of eight devices: the values of one device, and what the devices exchange.

Not collected by itself: tests/test_sharding.py runs it in a process that has eight devices.
"""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from micro_run import MICRO, ROOT
from numeric import floor_db, snr_db

import swjax
import swjax.losses
import swjax.nnx
from swjax import Gelu, LayerNorm, Layout
from swjax.attention import dot_product_attention
from swjax.linear.planning import reduced
from swjax.models import sharding
from swjax.optax import path_name, rms_by_path, stable_adamw
from swjax.recipes import RECIPES
from swjax.testing import assert_quantized_gathers, collectives
from swjax.training import config as config_lib
from swjax.training import setup
from swjax.training.optimizer import make_optimizer, make_schedule
from swjax.training.step import make_train_step

if len(jax.devices()) != 8:  # looked through for examples in docstrings
    pytest.skip("tests/test_sharding.py runs these on eight devices", allow_module_level=True)

slow = partial(pytest.param, marks=pytest.mark.slow)

AXES = ("data", "fsdp", "tensor")
TOKENS, WHOLE = P(("data", "fsdp")), P()
BATCH, TOKENS_EACH, K, N = 8, 5, 48, 80  # no weight has a part of 5 rows

# name: (data, fsdp, tensor), spec of w [k, n]
CASES = {
    "data": ((8, 1, 1), P()),
    "fsdp_rows": ((1, 8, 1), P("fsdp")),
    "fsdp_columns": ((1, 8, 1), P(None, "fsdp")),
    "hybrid": ((2, 4, 1), P("fsdp")),
    "column": ((2, 1, 4), P(None, "tensor")),
    "row": ((2, 1, 4), P("tensor")),
    "fsdp_column": ((2, 2, 2), P("fsdp", "tensor")),
    "fsdp_row": ((2, 2, 2), P("tensor", "fsdp")),
    "fsdp_and_row_in_one": ((1, 4, 2), P(("tensor", "fsdp"))),
}
ROW, COLUMN = ("row", "fsdp_row", "fsdp_and_row_in_one"), ("column", "fsdp_column")
MORE_RECIPES = ("switchback_q", "llm_int8", "fp8_switchback", "fp8_tensorwise")
INT8 = ("switchback", "switchback_m", "switchback_q", "llm_int8")
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def arrays(dtype="float32", k=K, n=N, batch=BATCH):
    """x, w, bias, g; feature 1 of x an outlier."""
    x = draw(batch, TOKENS_EACH, k, dtype=dtype).at[..., 1].multiply(8)
    w, bias = draw(k, n, seed=1) / np.sqrt(k), draw(n, seed=2)
    return x, w, bias, draw(batch, TOKENS_EACH, n, seed=3, dtype=dtype)


def make_mesh(sizes, kind=AxisType.Auto):
    return jax.make_mesh(sizes, AXES, axis_types=(kind,) * 3)


def put(array, mesh, spec=WHOLE):
    fitting = (
        axes if axes and size % np.prod([mesh.shape[a] for a in np.atleast_1d(axes)]) == 0 else None
        for axes, size in zip(spec, array.shape)
    )
    return jax.device_put(array, NamedSharding(mesh, P(*fitting)))


def gradients(layer, args, g):
    """y and the gradients of the layer's arguments."""
    y, vjp = jax.vjp(layer, *args)
    spec = jax.typeof(y).sharding.spec
    return y, *vjp(jax.reshard(g, spec) if any(spec) else g)


def sharded(case, kind="auto", **changes):
    """The mesh of a case, its layout, and arguments that lie on it."""
    sizes, spec = CASES[case]
    mesh = make_mesh(sizes, KINDS[kind])
    x, w, bias, g = arrays(**changes)
    args = (
        put(x, mesh, TOKENS),
        put(w, mesh, spec),
        put(bias, mesh, P(*("tensor" for axis in spec[1:] if axis == "tensor"))),
    )
    return mesh, Layout(w=spec), args, put(g, mesh, TOKENS)


def compiled(fn, *args):
    """Compiled once, to be run and looked through; compiling is what takes time here."""
    return jax.jit(fn).lower(*args).compile()


def compare(got, want, dtype="float32", exact=()):
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        if i in exact:
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert snr_db(a, b) > floor_db(dtype, max(K, N)), i


# --- values -------------------------------------------------------------------------------------------


@cache
def one_device(name, **changes):
    x, w, bias, g = arrays(**changes)
    return jax.jit(partial(gradients, partial(swjax.switchback, recipe=name)))((x, w, bias), g)


@pytest.mark.parametrize(
    "name, case, kind",
    [("switchback", case, kind) for case in CASES for kind in KINDS]
    + [(name, case, "auto") for name in RECIPES for case in ("fsdp_column", "fsdp_row")]
    + [("llm_int8_outlier6", "fsdp_column", "explicit")],
)
def test_values_are_those_of_one_device(name, case, kind):
    mesh, layout, args, g = sharded(case, kind)
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(gradients, layer))(args, g)
    # Integer sums that no axis cuts: y unless rows of w stay split, dx unless its columns do.
    exact = [i for i, where in enumerate((ROW, COLUMN)) if case not in where and name in INT8]
    compare(got, one_device(name), exact=exact)
    assert got[2].sharding.is_equivalent_to(args[1].sharding, 2)


@pytest.mark.parametrize("case", ["hybrid", "fsdp_row", "fsdp_column"])
@pytest.mark.parametrize("odd", [{"k": 47, "n": 83}, {"batch": 3}, {"batch": 1, "k": 1, "n": 1}])
def test_values_of_odd_sizes(case, odd):
    """What an axis does not divide stays whole."""
    mesh, layout, args, g = sharded(case, **odd)
    layer = partial(swjax.switchback, layout=layout)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(gradients, layer))(args, g)
    compare(got, one_device("switchback", **odd))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["hybrid", "fsdp_row", slow("fsdp_column")])
@pytest.mark.parametrize("prologue", ["layer_norm", "gelu"])
@pytest.mark.parametrize("name", ["switchback", slow("switchback_m"), slow("standard")])
def test_values_after_a_prologue(name, prologue, case, kind):
    if kind == "explicit" and name != "switchback":
        pytest.skip("how the layer learns of shardings does not depend on the recipe")
    mesh, layout, args, g = sharded(case, kind)
    plain = arrays()

    def layer(layout, x, w, bias, affine):
        before = LayerNorm(*affine) if prologue == "layer_norm" else Gelu()
        return swjax.switchback(x, w, bias, recipe=name, prologue=before, layout=layout)

    affine = (draw(K, seed=4), draw(K, seed=5)) if prologue == "layer_norm" else ()
    want = jax.jit(partial(gradients, partial(layer, None)))((*plain[:3], affine), plain[3])
    with jax.set_mesh(mesh):
        affine = tuple(put(t, mesh) for t in affine)
        got = jax.jit(partial(gradients, partial(layer, layout)))((*args, affine), g)
    compare(got, want)


def mlp_arguments(mesh=None, dtype="bfloat16"):
    x, w1, b1, _ = arrays(dtype)
    w2, b2 = draw(N, K, seed=6) / np.sqrt(N), draw(K, seed=7)
    args, g = (
        (x, w1, b1, w2, b2, draw(K, seed=4), draw(K, seed=5)),
        draw(*x.shape, seed=8, dtype=dtype),
    )
    if mesh is None:
        return args, g
    specs = (TOKENS, P("fsdp", "tensor"), P("tensor"), P("tensor", "fsdp"), P(), P(), P())
    return tuple(put(a, mesh, spec) for a, spec in zip(args, specs)), put(g, mesh, TOKENS)


def mlp(layouts, x, w1, b1, w2, b2, scale, shift, recipe="switchback"):
    prologue = LayerNorm(scale, shift)
    return swjax.mlp(x, w1, b1, w2, b2, prologue=prologue, layouts=layouts, recipe=recipe)


MLP_LAYOUTS = (Layout(P("fsdp", "tensor")), Layout(P("tensor", "fsdp")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [slow((8, 1, 1)), slow((2, 4, 1)), (2, 2, 2)], ids=str)
def test_values_of_an_mlp(sizes, kind):
    mesh = make_mesh(sizes, KINDS[kind])
    want = jax.jit(partial(gradients, partial(mlp, (None, None))))(*mlp_arguments())
    with jax.set_mesh(mesh):
        got = jax.jit(partial(gradients, partial(mlp, MLP_LAYOUTS)))(*mlp_arguments(mesh))
    compare(got, want, "bfloat16")


# --- collectives --------------------------------------------------------------------------------------


def ops(found, *names):
    """Those collectives, without what holds scales and biases only."""
    return sorted(
        (op, dtype) for op, dtype, shape in found if op in names and max(shape, default=1) > 1
    )


@pytest.mark.parametrize("kind", ["auto", slow("explicit")])
@pytest.mark.parametrize("name", RECIPES)
def test_collectives_of_data_parallel(name, kind):
    mesh, layout, args, g = sharded("data", kind, dtype="bfloat16")
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        forward = collectives(layer, *args)
        both = collectives(partial(gradients, layer), args, g)
    if name in ("llm_int8_outlier6", "fp8_tensorwise"):  # depend on the whole batch: its maxima
        assert all(op == "all-reduce" and np.prod(shape) <= K for op, _, shape in forward)
    else:
        assert not forward
    assert {op for op, _, _ in both} == {"all-reduce"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("data", "column", "row")])
@pytest.mark.parametrize("name", ["switchback", slow("fp8_switchback")])
def test_collectives_gather_narrow_weights_and_scatter_their_gradients(name, case, kind):
    if kind == "explicit" and name != "switchback":
        pytest.skip("how the layer learns of shardings does not depend on the recipe")
    mesh, layout, args, g = sharded(case, kind, dtype="bfloat16")
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        if kind == "explicit" and "row" in case.split(
            "_"
        ):  # so that x is not cut, nor dx put together
            spec = P(*TOKENS, None, "tensor")
            args = (jax.device_put(args[0], NamedSharding(mesh, spec)), *args[1:])
        programs = compiled(layer, *args), compiled(partial(gradients, layer), args, g)
        for program in programs:
            assert_quantized_gathers(program, weights=[(K, N)])
        forward, both = map(collectives, programs)
    assert ops(forward, "all-gather") == [("all-gather", "s8")]
    assert ("all-reduce", "f32", (1, 1)) in forward  # the largest weight
    # Both products may share one gather: w has one scale, and XLA takes it as it lies.
    assert ops(both, "all-gather") in ([("all-gather", "s8")], [("all-gather", "s8")] * 2)
    assert ops(both, "reduce-scatter") == [("reduce-scatter", "f32")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case, sums", [("data", {"all_reduce"}), ("fsdp_rows", {"reduce_scatter"})]
)
def test_collectives_that_sum_gradients_in_16_bits(case, sums, kind):
    mesh, layout, args, g = sharded(case, kind)
    layer = partial(swjax.switchback, layout=replace(layout, reduce_dtype="bfloat16"))
    with jax.set_mesh(mesh):
        lowered = jax.jit(partial(gradients, layer)).lower(args, g)
        got = lowered.compile()(args, g)
    # As it is asked for: XLA for CPUs adds up in 32 bits what is asked for in 16.
    asked = re.findall(
        r'"stablehlo\.(all_reduce|reduce_scatter)"[^^]*\^\w+\(%\w+: tensor<(\w+)>',
        lowered.as_text(),
    )
    assert {op for op, dtype in asked if dtype == "bf16"} == sums
    compare(got, one_device("switchback"), "bfloat16", exact=(0, 1))
    dw, exact = np.asarray(got[2]), np.asarray(one_device("switchback")[2])
    assert 1e-4 < np.linalg.norm(dw - exact) / np.linalg.norm(exact) < 1e-2  # 8 bits, not 24


@pytest.mark.parametrize("name", ["switchback", "switchback_m", *map(slow, MORE_RECIPES)])
def test_collectives_of_an_mlp(name):
    """Gathers of narrow weights, two scattered gradients; tensor parallel sums y and dx alone."""
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


def train_program(**changes):
    """The train step of a small CLIP: its config, compiled program, state's shapes, and a state and batch."""
    changes = MICRO | {"train.compilation_cache": ""} | changes
    pairs = [(key, str(value)) for key, value in changes.items()]
    config = config_lib.load(f"{ROOT}/configs/openmoji.py", pairs)
    mesh, cfg = setup.check_config(config)
    schedule = make_schedule(config, 6, 1)
    optimizer = make_optimizer(config, schedule)
    init, graphdef = setup.make_init(config, cfg, optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), mesh)
    where = jax.tree.map(lambda x: x.sharding, like)
    rng, size = np.random.default_rng(0), config.train.batch_size
    batch = {
        "image": rng.integers(0, 256, (size, 16, 16, 3), np.uint8),
        "text": rng.integers(1, 100, (size, 8), np.int32),
        "label": np.arange(size, dtype=np.int32),
    }
    batch = sharding.shard_batch(batch, mesh)
    step = make_train_step(config, graphdef, optimizer, schedule)
    step = jax.jit(step, out_shardings=(where, None)).lower(like, batch).compile()
    state = lambda: jax.jit(init, out_shardings=where)()
    return config, cfg, step, like, state, batch


def shapes_of(params):
    """Of the kernels of a block, and of all that is in no block."""
    params = {path_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    kernels = {shape[1:] for name, shape in params.items() if "blocks" in name and "kernel" in name}
    return kernels, {shape for name, shape in params.items() if "blocks" not in name}


def test_collectives_of_a_train_step():
    """All gathers are of parameters, in 8 bits where recipes apply, and of what the loss compares."""
    config, cfg, step, like, _, _ = train_program(**{"mesh.data": 2, "mesh.fsdp": 4})
    kernels, others = shapes_of(like["params"])
    found = [c for c in collectives(step) if c.op == "all-gather" and len(c.shape) > 1]
    # Of three sizes the first counts devices, whose columns come one after the other.
    whole = lambda shape: shape if len(shape) == 2 else (shape[1], shape[0] * shape[2])
    assert {whole(shape) for _, dtype, shape in found if dtype == "s8"} == kernels
    embeddings = (config.train.batch_size, cfg.embed_dim)
    assert {shape for _, dtype, shape in found if dtype != "s8"} <= others | {embeddings}


@pytest.mark.parametrize("accumulation", [1, slow(2)])
def test_collectives_of_a_train_step_that_reduces_once(accumulation):
    """Gradients of kernels are summed as stacks of layers, and the step leaves what it leaves otherwise."""
    shared = {"mesh.data": 4, "mesh.fsdp": 2, "train.accumulation": accumulation}
    shared |= {
        "train.batch_size": 8 * accumulation,
        "model.vision.layers": 2,
        "model.text.layers": 2,
    }
    results, sums = [], []
    for once in (False, True):
        _, _, step, like, state, batch = train_program(**shared, **{"train.reduce_once": once})
        kernels, _ = shapes_of(like["params"])
        parts = {(k // 2, n) for k, n in kernels} | {(k, n // 2) for k, n in kernels}
        found = [shape for op, _, shape in collectives(step) if op == "all-reduce"]
        sums.append(Counter(len(shape) for shape in found if shape[-2:] in parts))
        results.append(step(state(), batch))
    # Six kernels in two layers of two towers; what is in no block is left.
    assert sums[0] - sums[1] == {2: 24} and sums[1][3] == 12
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tensor", [slow(1), 2])
@pytest.mark.parametrize("recipe", ["switchback", slow("standard")])
def test_transformations_a_train_step_that_reduces_once_leaves_the_same(recipe, tensor):
    """Scanned and recomputed, with devices that split a layer's width."""
    changes = {"mesh.data": 8 // tensor, "mesh.tensor": tensor, "model.recipe": recipe}
    changes |= {"model.scan_layers": True, "model.remat": "full", "model.vision.layers": 2}
    results = []
    for once in (False, True):
        _, _, step, _, state, batch = train_program(**changes, **{"train.reduce_once": once})
        results.append(step(state(), batch))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["switchback", "standard", slow("llm_int8_outlier6")])
def test_collectives_sum_the_gradient_of_a_shared_input_once(name, kind):
    """Three column parallel layers of one input: each device has a part of its gradient."""
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


# --- transformations ----------------------------------------------------------------------------------


def loss_of(layer, g):
    return lambda x, w, bias: jnp.sum(layer(x, w, bias) * g)


@pytest.mark.parametrize("policy", [None, "save_weights", "save_quantized", "save_linear"])
@pytest.mark.parametrize("name", [slow("switchback"), "switchback_m"])
def test_transformations_remat(name, policy):
    mesh, layout, args, g = sharded("fsdp_column")
    policy = policy and getattr(swjax.checkpoint_policies, policy)
    layer = partial(swjax.switchback, recipe=name, layout=layout)
    with jax.set_mesh(mesh):
        fn = compiled(partial(gradients, jax.checkpoint(layer, policy=policy)), args, g)
        compare(fn(args, g), one_device(name))
        assert_quantized_gathers(fn, weights=[(K, N)])


@pytest.mark.parametrize("kind", KINDS)
def test_transformations_scan_over_stacked_layers(kind):
    """A column and a row parallel layer a step, rematerialised; auto meshes need no `jax.set_mesh`."""
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
        assert snr_db(a, b) > 38  # a later layer may round to another step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["data", "hybrid", "fsdp_rows"])
def test_transformations_stacks_are_reduced_once(case, kind):
    """The same bits, by one sum of the stack over devices that hold the same of it, and none of a layer."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_transformations_vmap(kind):
    """Over weights (experts) and over tokens; a split mapped axis is named, as for any `jax.shard_map`."""
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


@pytest.mark.parametrize("case", ["hybrid", "column"])
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["hybrid", "fsdp_row", "fsdp_column"])
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
    """What a user's shard_map has taken is the user's; the layer plans for the other axes."""
    mesh, layout, args, g = sharded("fsdp_column")
    given = P(tuple(a for a in taken if a != "tensor"))

    def whole(x, w, bias):
        one = lambda x, w, bias: swjax.switchback(x, w, bias, layout=layout)
        return jax.shard_map(
            one,
            in_specs=(given, P(), P()),
            out_specs=given,
            axis_names=set(taken),
            check_vma=False,
        )(x, w, bias)

    with jax.set_mesh(mesh):
        compare(jax.jit(partial(gradients, whole))(args, g), one_device("switchback"))


@pytest.mark.parametrize("taken", [slow(("data",)), slow(("data", "fsdp")), AXES])
def test_transformations_inside_a_shard_map_that_checks(taken):
    """Gradients within; the sum over the user's axes comes with w's type, as for JAX's own products."""
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
    """Eager calls."""
    mesh, layout, args, g = sharded("fsdp_column")
    with jax.set_mesh(mesh):
        compare(
            gradients(partial(swjax.switchback, layout=layout), args, g), one_device("switchback")
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["hybrid", slow("fsdp_row"), slow("fsdp_column")])
def test_transformations_of_layers_in_flax(case, kind):
    """An injected dot_general that nobody told of shardings, and a layer with Flax's metadata."""
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


# --- losses over a global batch -----------------------------------------------------------------------

LOSSES = {"softmax": swjax.losses.softmax_contrastive, "sigmoid": swjax.losses.sigmoid_contrastive}


def full_matrix(name, image, text, log_scale, bias, labels):
    """The losses as one writes them down, and JAX differentiates them."""
    logits = jnp.exp(log_scale) * jnp.matmul(image, text.T, precision="highest")
    match = labels[:, None] == labels[None]
    if name == "sigmoid":
        logits = logits + bias
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(jnp.where(match, logits, -logits)), axis=1))
    target = match.astype(jnp.float32) / jnp.sum(match, axis=1, dtype=jnp.float32)[:, None]
    log_p = (jax.nn.log_softmax(logits, axis=1) + jax.nn.log_softmax(logits, axis=0)) / 2
    return -jnp.mean(jnp.sum(target * log_p, axis=1))


def loss_arguments(batch=48, width=24):
    image, text = draw(batch, width), draw(batch, width, seed=1)
    text = text + image
    unit = lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True)
    labels = jnp.arange(batch) % (batch - 7)
    return unit(image), unit(text), jnp.float32(2.5), jnp.float32(-3), labels


def contrast(name, image, text, log_scale, bias, labels, **options):
    extra = (bias,) if name == "sigmoid" else ()
    return LOSSES[name](image, text, log_scale, *extra, labels=labels, **options)[0]


LOSS_CASES = (
    ((1, 1, 1), 48 * 48),
    ((2, 1, 1), 48 * 48),  # everything gathered at once
    ((2, 2, 2), 12 * 24),  # two gather, and two such pairs make a ring
    ((4, 2, 1), 6 * 6),  # eight hops
    ((1, 8, 1), 6 * 2),  # eight hops in three parts
)


@pytest.mark.parametrize(
    "name, sizes, pairs, kind",
    [(name, *case, "auto") for name in LOSSES for case in LOSS_CASES]
    + [("softmax", *case, "explicit") for case in LOSS_CASES[::2]],
)
def test_losses_are_those_of_the_whole_matrix(sizes, pairs, name, kind):
    args = loss_arguments()
    differentiate = lambda fn: jax.value_and_grad(fn, argnums=(0, 1, 2, 3))
    want = jax.jit(differentiate(partial(full_matrix, name)))(*args)
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, AXES, axis_types=(KINDS[kind],) * 3, devices=devices)
    with jax.set_mesh(mesh):
        placed = [put(a, mesh, TOKENS if a.ndim else WHOLE) for a in args]
        fn = compiled(differentiate(partial(contrast, name, pairs=pairs)), *placed)
        got = fn(*placed)
        hops = 1 if pairs == 48 * 48 else {12 * 24: 2}.get(pairs, 8)
        found = {op for op, _, _ in collectives(fn)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)
    assert got[1][0].sharding.is_equivalent_to(placed[0].sharding, 2)
    assert ("collective-permute" in found) == (hops > 1)
    assert ("all-gather" in found) == (len(devices) > 1 and hops < 8)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_need_no_more_memory_on_more_devices(name):
    """At 64 pairs a device. Buffers of the ring come with the second one; after that nothing grows."""
    used = {}
    for devices in (1, 2, 8):
        mesh = jax.make_mesh(
            (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
        )
        args = [put(a, mesh, P("data") if a.ndim else P()) for a in loss_arguments(64 * devices)]
        fn = jax.jit(jax.grad(partial(contrast, name, pairs=64 * 64), argnums=(0, 1, 2, 3)))
        used[devices] = fn.lower(*args).compile().memory_analysis().temp_size_in_bytes
    matrix = 4 * (64 * 8) ** 2
    assert used[1] <= used[2] == used[8] < matrix / 4, used


def test_losses_of_a_batch_that_devices_do_not_divide():
    args, mesh = loss_arguments(13), make_mesh((2, 4, 1))
    with jax.set_mesh(mesh):
        got = jax.jit(partial(contrast, "softmax"))(*args)
    np.testing.assert_allclose(got, full_matrix("softmax", *args), rtol=1e-5)


# --- attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes, heads", [((2, 2, 2), 4), ((2, 1, 4), 4), ((2, 2, 2), 3)])
def test_values_of_attention_whose_heads_are_split(sizes, heads, kind):
    """Images and heads are split; heads that devices do not divide lie whole, and so may everything."""
    mesh = make_mesh(sizes, KINDS[kind])
    split = heads % sizes[2] == 0
    arrays = [draw(BATCH, TOKENS_EACH, heads, 16, seed=seed) for seed in range(4)]
    run = partial(gradients, partial(dot_product_attention, implementation="triton", causal=True))
    want = jax.jit(run)(arrays[:3], arrays[3])
    layout = Layout(w=P("fsdp", "tensor"))
    spec = P(("data", "fsdp"), None, "tensor" if split else None)
    placed = [put(a, mesh, spec) for a in arrays]
    run = partial(
        gradients,
        partial(dot_product_attention, implementation="triton", causal=True, layout=layout),
    )
    with jax.set_mesh(mesh):
        fn = compiled(run, placed[:3], placed[3])
        compare(fn(placed[:3], placed[3]), want)
        assert not collectives(fn)
        whole = partial(
            dot_product_attention, implementation="triton", causal=True, layout=Layout(tokens=P())
        )
        compare(jax.jit(whole)(*placed[:3]), want[0])


# --- StableAdamW --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes, spec",
    [
        ((8, 1, 1), P()),
        ((1, 8, 1), P("fsdp")),
        ((1, 8, 1), P(None, "fsdp")),
        ((2, 2, 2), P("fsdp", "tensor")),
        ((2, 2, 2), P("tensor", "fsdp")),
        ((1, 2, 4), P(("tensor", "fsdp"))),
    ],
    ids=str,
)
def test_stable_adamw_has_the_rms_of_whole_tensors(sizes, spec, kind):
    """Gradients surge in one corner, which some devices hold; one RMS a layer of the stack."""
    params = {"blocks": draw(3, 16, 24), "head": draw(16, 24, seed=1), "bias": draw(24, seed=2)}
    specs = {"blocks": P(None, *spec), "head": spec, "bias": P(*spec[1:])}
    grads = [jax.tree.map(lambda p, t=t: 0.1 * jnp.cos(3.0**t * p), params) for t in range(4)]
    grads[-1]["blocks"] = grads[-1]["blocks"].at[1, :8, :12].multiply(1000)
    grads[-1]["head"] = grads[-1]["head"].at[:8, :12].multiply(1000)
    optimizer = stable_adamw(0.05, block_axes={"blocks": 0, "head": None, "bias": None})

    def train(params, grads):
        state = optimizer.init(params)
        for g in grads:
            updates, state = optimizer.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params, rms_by_path(state)

    want, want_rms = jax.jit(train)(params, grads)
    assert want_rms["head"] > 1.1 and want_rms["blocks"][1] > 1.1 > want_rms["blocks"][0]
    mesh = make_mesh(sizes, KINDS[kind])
    place = lambda tree: {name: put(x, mesh, specs[name]) for name, x in tree.items()}
    with jax.set_mesh(mesh):
        got, rms = jax.jit(train)(place(params), [place(g) for g in grads])
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, rms, want_rms)
    jax.tree.map(close, got, want)
    assert got["head"].sharding.is_equivalent_to(place(params)["head"].sharding, 2)
