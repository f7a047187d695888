"""The train step: accumulation, diagnostics, skipped steps, frozen parameters, loss scaling."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from micro_run import (
    assert_close,
    assert_same_bits,
    batch_of,
    init_and_step,
    make_init,
    paths,
    step_of,
)

from swjax.models import sharding
from swjax.training.log import health as health_lib
from swjax.training.state.checkpoint import Checkpoints
from swjax.training.step import limit_logit_scale, make_loss_and_grad

HALF_SCALE = 22  # log2


@pytest.mark.release
def test_health_compiles_one_block_of_each_tower(micro, monkeypatch):
    """One block is compiled for any number of blocks; measurements equal those of the unscanned program."""

    def program(layers):
        config = micro(diagnostics__every_steps=1, model__vision__layers=layers)
        init, graphdef = make_init(config)
        like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())
        health = health_lib.Health(config, graphdef, like["params"], steps=1)
        return health, jax.jit(init), batch_of(config)

    def products(health, state, batch):
        return health._measure.lower(state, batch).as_text().count("dot_general")

    def measured(health, state, batch):
        health.before(1, state, batch)
        return health.records(1)[1]

    health, init, batch = program(2)
    state = init()
    few, scanned = products(health, state, batch), measured(health, state, batch)
    deeper, init, batch = program(3)
    assert products(deeper, jax.eval_shape(init), batch) == few
    same = types.SimpleNamespace(replace=lambda cfg, **changes: cfg)
    monkeypatch.setattr(health_lib, "dataclasses", same)
    health, _, batch = program(2)
    assert products(health, state, batch) > few
    unrolled = measured(health, state, batch)
    assert scanned.keys() == unrolled.keys() and len(scanned) > 50
    for name, value in unrolled.items():
        assert scanned[name] == pytest.approx(value, rel=0.02, abs=0.02), name


@pytest.mark.release
def test_health_of_a_float16_run_has_its_loss_scale(micro):
    """Without it, gradients this small are 0 in float16, and have no quantization error."""
    config = micro(
        model__dtype="float16",
        optimizer__loss_scaling="dynamic",
        optimizer__loss_scale=2.0**30,
        diagnostics__every_steps=1,
    )
    init, graphdef = make_init(config)
    state = jax.jit(init)()
    state["params"]["logit_scale"] -= 20.0
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())
    health = health_lib.Health(config, graphdef, like["params"], steps=1)
    health.before(1, state, batch_of(config))
    assert health.records(1)[1]["quantization/sqnr_db/vision/blocks/mlp/fc1/g/0"] > 30


def test_a_failed_measurement_says_how_to_train_without_it(micro, monkeypatch):
    config = micro(diagnostics__every_steps=2)
    init, graphdef = make_init(config)
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())
    health = health_lib.Health(config, graphdef, like["params"], steps=2)

    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(health, "_measure", types.SimpleNamespace(lower=fail))
    health.before(1, like, None)  # not due
    assert health.compiles_at(2) and not health.compiles_at(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory") as caught:
        health.before(2, like, None)
    assert "--config.diagnostics.every_steps=0" in caught.value.__notes__[0]


def test_accumulation_gives_the_gradient_of_the_whole_batch(micro):
    results = []
    for parts in (1, 4):
        config = micro(
            data__augment__drawings="false",
            diagnostics__features="true",
            model__recipe="standard",
            train__loss="sigmoid",
            train__accumulation=parts,
        )
        init, graphdef = make_init(config)
        params, batch = jax.jit(init)()["params"], batch_of(config)
        none = jax.tree.map(lambda _: None, params)
        loss_and_grad = jax.jit(make_loss_and_grad(config, graphdef))
        results.append(loss_and_grad(params, none, batch, jax.random.key(0)))
    (loss_a, measured_a, grads_a), (loss_b, measured_b, grads_b) = results
    np.testing.assert_allclose(loss_a, loss_b, rtol=1e-6)
    assert len([name for name in measured_a if "feature_" in name]) == 4
    assert_close(measured_a, measured_b, rtol=1e-5)
    # float32 sums have different orders, and some gradients are 0 up to rounding.
    largest = max(np.abs(np.asarray(x)).max() for x in jax.tree.leaves(grads_a))
    assert_close(grads_a, grads_b, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize(
    "options",
    thinning.first(
        [
            {"optimizer__loss_scaling": "dynamic", "model__dtype": "float16"},
            {"train__nan_policy": "skip"},
            {},
        ]
    ),
    ids=["dynamic", "skip", "default"],
)  # fmt: skip
def test_no_branch_makes_a_gpu_wait_for_the_host(micro, options):
    """A step contains no branch: XLA for GPUs copies its condition to the host, which must then wait.

    The next step could not be queued meanwhile: see benchmarks/notes/scaling.md.
    """
    config = micro(**options)
    init, step = step_of(config)
    traced = jax.jit(step).trace(jax.eval_shape(init), jax.eval_shape(lambda: batch_of(config)))
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.dot_general" in program
    assert not re.findall(r"stablehlo\.(?:if|case|while)", program)


@pytest.mark.release
def test_micro_batches_share_quantized_weights(micro):
    """Weights are quantized once a step: XLA moves their quantization out of the loop over micro-batches."""
    config = micro(
        train__accumulation=2, train__batch_size=10
    )  # so that no activation has a weight's shape
    init, graphdef = make_init(config)
    params = jax.eval_shape(init)["params"]
    none = jax.tree.map(lambda _: None, params)
    lowered = jax.jit(make_loss_and_grad(config, graphdef)).lower(
        params, none, batch_of(config), jax.random.key(0)
    )
    program = lowered.compile().as_text()
    shapes = {leaf.shape[-2:] for leaf in jax.tree.leaves(params["vision"]["blocks"])}
    made = rf" = s8\[({'|'.join(f'{a},{b}' for a, b in shapes)})\]\S* fusion\("
    bodies = set(re.findall(r"body=%?([\w.-]+)", program))
    found = {True: 0, False: 0}
    for name, text in re.findall(
        r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", program, re.M | re.S
    ):
        found[name in bodies] += len(re.findall(made, text))
    assert bodies and found[False] and not found[True], found


@pytest.fixture(scope="module")
def options(micro):
    """(config, init, step) of a run with frozen parameters, averaged parameters and skipped steps."""
    config = micro(
        optimizer__freeze="^vision/,logit_scale",
        train__ema_decay=0.9,
        train__nan_policy="skip",
        schedule__warmup_steps=4,
    )
    return config, *init_and_step(config)


def test_frozen_parameters_stay_and_have_no_moments(options):
    config, init, step = options
    state = init()
    state["params"]["logit_scale"] = jnp.float32(10.0)  # beyond the limit of trained scales
    moments = [p for p in paths(state["opt_state"]) if "mu" in p.split("/")]
    assert moments and not any("vision" in path for path in moments)
    new, _ = step(step(state, batch_of(config))[0], batch_of(config, 1))
    old = state["params"]
    assert_same_bits(new["params"]["vision"], old["vision"])
    assert_same_bits(new["params"]["logit_scale"], old["logit_scale"])
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), new["params"]["text"], old["text"])
    assert all(jax.tree.leaves(moved))


def test_average_follows_the_parameters(options):
    config, init, step = options
    state = init()
    expected = state["params"]
    for t in range(3):
        state, _ = step(state, batch_of(config, t))
        decay = min(0.9, (1 + t) / (10 + t))
        expected = jax.tree.map(
            lambda e, p, d=decay: d * e + (1 - d) * p, expected, state["params"]
        )
    assert_close(state["ema"], expected, rtol=1e-5, atol=1e-7)


def test_a_step_with_a_bad_gradient_is_skipped(options):
    config, init, step = options
    state, measured = step(init(), batch_of(config))
    assert measured["train/skipped"] == 0
    state["params"]["text"]["ln_final"]["bias"] *= jnp.float32(jnp.nan)
    new, measured = step(state, batch_of(config))
    assert measured["train/skipped"] == 1
    assert new["step"] == 2 and state.pop("step") == 1
    # The optimizer counts its updates, so the next step has the learning rate of the skipped one.
    again = step(new, batch_of(config))[1]
    assert again["train/learning_rate"] == measured["train/learning_rate"]
    new.pop("step")
    assert_same_bits(new, state)


@pytest.fixture(scope="module")
def half(micro):
    """(config, init, step) of a float16 run whose loss scale makes some, not all, gradients overflow."""
    config = micro(
        model__dtype="float16",
        model__recipe="standard",
        optimizer__loss_scaling="per_tensor",
        optimizer__loss_scale=2.0**HALF_SCALE,
    )
    return config, *init_and_step(config)


@pytest.mark.release
def test_float16_tensors_that_overflow_sit_out_alone(half):
    config, init, step = half
    state = init()
    new, measured = step(state, batch_of(config))
    assert np.isfinite([measured["train/loss"], measured["train/grad_norm"]]).all()
    assert measured["train/loss_scale"] == 2.0**HALF_SCALE
    skipped = {k: v for k, v in measured.items() if k.startswith("stability/skipped/")}
    assert set(skipped.values()) == {0.0, 1.0} and 0 < measured["train/skipped"] < 1
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), new["params"], state["params"])
    for path, here in zip(paths(moved), jax.tree.leaves(moved)):
        blocks = [
            v for k, v in skipped.items() if k.removeprefix("stability/skipped/").startswith(path)
        ]
        assert here == (0.0 in blocks), path


@pytest.mark.release
def test_float16_resumes_exactly(half, tmp_path):
    config, init, step = half
    state = init()
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())
    saved = Checkpoints(tmp_path, keep=1)
    for t in range(4):
        if t == 2:
            saved.save(t, state, {})
        state, expected = step(state, batch_of(config, t))
    resumed = jax.tree.map(np.asarray, saved.restore(like)[0])
    saved.close()
    for t in (2, 3):
        resumed, measured = step(jax.tree.map(jnp.asarray, resumed), batch_of(config, t))
    assert_same_bits(resumed, state)
    assert measured == expected


@pytest.mark.release
def test_a_trained_logit_scale_is_clamped_for_the_softmax_loss(half, micro):
    config, init, step = half
    state = init()
    for outside, inside in ((10.0, np.log(100)), (-1.0, 0.0)):
        state["params"]["logit_scale"] = jnp.float32(outside)
        new, _ = step(state, batch_of(config))
        assert float(new["params"]["logit_scale"]) == np.float32(inside)
    siglip = {"logit_scale": jnp.float32(np.log(112.33))}
    assert limit_logit_scale(micro(train__loss="sigmoid"), siglip) is siglip


@pytest.mark.release
def test_two_devices_compute_what_one_does(micro):
    results = {}
    for name, sizes, accumulation in (
        ("one", (1, 1, 1), 1),
        ("data", (2, 1, 1), 1),
        ("fsdp", (1, 2, 1), 2),
    ):
        config = micro(model__recipe="standard", train__accumulation=accumulation)
        init, step = init_and_step(config)
        mesh = sharding.make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
        like = sharding.abstract_state(jax.eval_shape(init), mesh)
        state = jax.device_put(init(), jax.tree.map(lambda x: x.sharding, like))
        batch = sharding.shard_batch(jax.tree.map(np.asarray, batch_of(config)), mesh)
        results[name] = step(state, batch)
    for name in ("data", "fsdp"):
        state, measured = results[name]
        kernel = state["params"]["vision"]["blocks"]["mlp"]["fc1"]["kernel"]
        assert kernel.sharding.is_fully_replicated == (name == "data")
        expected, expected_measured = results["one"]
        for key in ("train/loss", "train/grad_norm", "train/update_norm"):
            np.testing.assert_allclose(measured[key], expected_measured[key], rtol=1e-4)
        # After one step the second moment is the square of the whole batch's gradient.
        nu, expected_nu = (
            [x for p, x in zip(paths(s), jax.tree.leaves(s)) if "/nu/" in p]
            for s in (state, expected)
        )
        largest = max(float(jnp.max(x)) for x in expected_nu)
        assert_close(nu, expected_nu, rtol=0, atol=1e-5 * largest)


def test_every_parameter_needs_a_rule():
    with pytest.raises(ValueError, match="no sharding rule matches parameter 'new/kernel'"):
        sharding.abstract_state({"params": {"new": {"kernel": jnp.ones(2)}}}, sharding.make_mesh())


@pytest.mark.parametrize(
    "size, spec", [(8, jax.P(("data", "fsdp"), None)), (6, jax.P("data", None))]
)
def test_a_rule_may_split_a_dimension_over_several_axes(size, spec):
    mesh = jax.sharding.AbstractMesh((2, 2, 1), sharding.AXES)
    state = {"params": {"w": jax.ShapeDtypeStruct((size, 3), jnp.float32)}}
    like = sharding.abstract_state(state, mesh, ((r"^w$", jax.P(("data", "fsdp"))),))
    assert like["params"]["w"].sharding.spec == spec


def test_moments_are_sharded_as_their_parameters(micro):
    init, _ = init_and_step(micro(train__ema_decay=0.9))
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh(1, 2, 1))
    name = "vision/blocks/attn/q/kernel"
    found = {
        p: x for p, x in zip(paths(like), jax.tree.leaves(like), strict=True) if p.endswith(name)
    }
    split = {p for p, x in found.items() if x.sharding.spec == jax.P(None, "fsdp", "tensor")}
    assert {p.split("/")[0] for p in split} == {"params", "ema", "opt_state"}
    assert all(len(found[p].shape) != 3 for p in found.keys() - split)  # RMS: one a block
