"""The train step and the loop: same numbers however a run is cut, split or interrupted."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from swjax import diagnostics
from swjax.models import sharding
from swjax.training import config as config_lib
from swjax.training import console, loop, metric_log, step_clock, throughput
from swjax.training import health as health_lib
from swjax.training import optimizer as optimizer_lib
from swjax.training import setup as setup_lib
from swjax.training import step as step_lib
from swjax.training.checkpoint import Checkpoints, lock
from swjax.training.config import ConfigError
from swjax.training.optimizer import combine, split_frozen
from swjax.training.step import make_loss_and_grad, make_train_step, measure_scaling

ROOT = Path(__file__).resolve().parent.parent
MICRO = {
    "data.name": "synthetic",
    "data.image_size": 16,
    "data.context_length": 8,
    "data.synthetic.classes": 20,
    "data.synthetic.examples": 40,
    "model.vision.width": 32,
    "model.vision.layers": 1,
    "model.vision.heads": 2,
    "model.vision.patch_size": 8,
    "model.text.width": 32,
    "model.text.layers": 1,
    "model.text.heads": 2,
    "model.embed_dim": 16,
    "train.batch_size": 8,
    "train.steps": 6,
    "eval.every_steps": 0,
    "eval.batch_size": 16,
    "schedule.name": "constant",  # so that runs of any length share one program
    "schedule.warmup_steps": 1,
    "checkpoint.every_steps": 2,
    "log.every_steps": 2,
    "log.tensorboard": "false",
    "report.enabled": "false",
}

HALF_SCALE = 22  # log2

# Processes compile as this one does, and find what it has compiled.
ENVIRONMENT = os.environ | {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": jax.config.jax_default_matmul_precision,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs are shared, also with processes; compiling them is what takes time here."""
    directory = str(tmp_path_factory.getbasetemp() / "jax_cache")  # of all modules
    options = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_disable_most_optimizations": True,
    }
    old = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield directory
    for name, value in old.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def micro(cache):
    """Builds a config of a very small run, with some keys changed."""

    def build(**changes):
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        overrides = MICRO | {"train.compilation_cache": cache} | changes
        pairs = [(key, str(value)) for key, value in overrides.items()]
        return config_lib.load(f"{ROOT}/configs/openmoji.py", pairs)

    return build


class Interrupt:
    """Asks to stop once it has been looked at some times."""

    def __init__(self, after: int = 10**9):
        self._left = after

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0


def train(config, workdir, after: int = 10**9) -> int:
    workdir.mkdir(exist_ok=True)
    return loop.train(config, workdir, Interrupt(after))


def records(workdir) -> list[dict]:
    """metrics.jsonl without what a clock measured."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k != "time" and not k.startswith("perf/")}
        for line in lines
    ]


def final_state(config, workdir):
    """The state of the newest checkpoint, and how many batches it has seen."""
    mesh = sharding.make_mesh(**config.mesh)
    like = sharding.abstract_state(jax.eval_shape(setup(config)[0]), mesh)
    checkpoints = Checkpoints(workdir, keep=0)
    return checkpoints.restore(like)


def make_init(config):
    schedule = optimizer_lib.make_schedule(config, config.train.steps, config.schedule.warmup_steps)
    optimizer = optimizer_lib.make_optimizer(config, schedule)
    return setup_lib.make_init(config, setup_lib.model_config(config), optimizer)


def setup(config):
    """(init, step): the first state, and a step that returns its metrics by name."""
    init, step, packer = step_of(config)

    def named(state, batch):
        state, vector = jax.jit(step)(state, batch)
        return state, packer.records({0: np.asarray(vector)})[0]

    return jax.jit(init), named


def step_of(config):
    """(init, step, packer), not compiled."""
    schedule = optimizer_lib.make_schedule(config, config.train.steps, config.schedule.warmup_steps)
    optimizer = optimizer_lib.make_optimizer(config, schedule)
    init, graphdef = setup_lib.make_init(config, setup_lib.model_config(config), optimizer)
    packer = diagnostics.Packer()
    return init, make_train_step(config, graphdef, optimizer, schedule, packer), packer


def batch_of(config, seed=0):
    rng = np.random.default_rng(seed)
    size, side = config.train.batch_size, config.data.image_size
    text = np.zeros((size, config.data.context_length), np.int32)
    text[:, 0], text[:, 1], text[:, 2] = 49406, rng.integers(300, 400, size), 49407
    image = rng.integers(0, 256, (size, side, side, 3), np.uint8)
    label = rng.integers(0, size // 2, size).astype(np.int32)
    return {"image": jnp.asarray(image), "text": jnp.asarray(text), "label": jnp.asarray(label)}


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


# ----------------------------------------------------------------------------------- the step


def test_health_compiles_one_block_of_each_tower(micro, monkeypatch):
    """Whatever their number, and measures what the model's own program would."""

    def program(layers):
        config = micro(diagnostics__every_steps=1, model__vision__layers=layers)
        init, graphdef = make_init(config)
        like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())
        return (
            health_lib.Health(config, graphdef, like["params"], steps=1),
            init,
            like,
            batch_of(config),
        )

    def products(layers):
        health, _, like, batch = program(layers)
        return health._measure.lower(like, batch).as_text().count("dot_general")

    def measured():
        health, init, _, batch = program(2)
        health.before(1, jax.jit(init)(), batch)
        return health.records(1)[1]

    few, scanned = products(2), measured()
    assert products(3) == few
    same = types.SimpleNamespace(replace=lambda cfg, **changes: cfg)
    monkeypatch.setattr(health_lib, "dataclasses", same)
    assert products(3) > few
    unrolled = measured()
    assert scanned.keys() == unrolled.keys() and len(scanned) > 50
    for name, value in unrolled.items():
        assert scanned[name] == pytest.approx(value, rel=0.02, abs=0.02), name


def test_accumulation_gives_the_gradient_of_the_whole_batch(micro):
    results = []
    for parts in (1, 4):
        config = micro(
            data__augment="false",
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
    # The two differ in the order of float32 sums; some gradients are 0 but for rounding.
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(grads_a))
    assert_close(grads_a, grads_b, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize(
    "options",
    [{}, {"train__nan_policy": "skip"}, {"optimizer__loss_scaling": "dynamic", "model__dtype": "float16"}],
    ids=["default", "skip", "dynamic"],
)  # fmt: skip
def test_no_branch_makes_a_gpu_wait_for_the_host(micro, options):
    """XLA for GPUs copies the condition of a branch to the host, which waits for the step until there, and
    begins no other before it ends: see docs/scaling.md."""
    config = micro(**options)
    init, step, _ = step_of(config)
    traced = jax.jit(step).trace(jax.eval_shape(init), jax.eval_shape(lambda: batch_of(config)))
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.dot_general" in program
    assert not re.findall(r"stablehlo\.(?:if|case|while)", program)


def test_micro_batches_share_quantized_weights(micro):
    """What makes int8 of a weight does not depend on the micro-batch: XLA takes it out of the loops."""
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
    """(config, init, step) of a run that freezes, averages and skips."""
    config = micro(
        optimizer__freeze="^vision/,logit_scale", train__ema_decay=0.9, train__nan_policy="skip"
    )
    return config, *setup(config)


def test_frozen_parameters_stay_and_have_no_moments(options):
    config, init, step = options
    state = init()
    moments = [p for p in paths(state["opt_state"]) if "mu" in p.split("/")]
    assert moments and not any("vision" in path for path in moments)
    new, _ = step(step(state, batch_of(config))[0], batch_of(config, 1))
    old = state["params"]
    assert_same_bits(new["params"]["vision"], old["vision"])
    assert_same_bits(new["params"]["logit_scale"], old["logit_scale"])
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), new["params"]["text"], old["text"])
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
    assert new.pop("step") == 2 and state.pop("step") == 1
    assert_same_bits(new, state)


@pytest.fixture(scope="module")
def half(micro):
    """(config, init, step) of a run in float16 whose scale is too large for some tensors, not for all."""
    config = micro(
        model__dtype="float16",
        model__recipe="standard",
        optimizer__loss_scaling="per_tensor",
        optimizer__loss_scale=2.0**HALF_SCALE,
    )
    return config, *setup(config)


def test_float16_tensors_that_overflow_sit_out_alone(half):
    config, init, step = half
    state = init()
    new, measured = step(state, batch_of(config))
    assert np.isfinite([measured["train/loss"], measured["train/grad_norm"]]).all()
    assert measured["train/loss_scale"] == 2.0**HALF_SCALE
    skipped = {k: v for k, v in measured.items() if k.startswith("stability/skipped/")}
    assert set(skipped.values()) == {0.0, 1.0}
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), new["params"], state["params"])
    for path, here in zip(paths(moved), jax.tree.leaves(moved)):
        blocks = [
            v for k, v in skipped.items() if k.removeprefix("stability/skipped/").startswith(path)
        ]
        assert here == (0.0 in blocks), path


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


def test_a_dynamic_scale_is_the_other_way(micro):
    config = micro(optimizer__loss_scaling="dynamic", optimizer__loss_scale=1024)
    optimizer = optimizer_lib.make_optimizer(config, lambda count: 1e-3)
    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    _, state = optimizer.update(
        params | {"bias": jnp.full(3, jnp.inf)}, optimizer.init(params), params
    )
    measured = {name: float(x) for name, x in measure_scaling("dynamic", state).items()}
    assert measured == {"train/loss_scale": 512.0, "train/scaling_skipped": 1.0}


def test_split_frozen_and_combine_are_inverse():
    params = {"a": {"kernel": 1, "bias": 2}, "b": 3}
    trainable, frozen = split_frozen(params, ("bias$",))
    assert trainable == {"a": {"kernel": 1, "bias": None}, "b": 3}
    assert combine(trainable, frozen) == params
    with pytest.raises(ConfigError, match="finds no parameter"):
        split_frozen(params, ("visoin",))


def paths(tree) -> list[str]:
    return [sharding.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_logit_scale_is_clamped(options):
    config, init, step = options
    state = init()
    for outside, inside in ((10.0, np.log(100)), (-1.0, 0.0)):
        state["params"]["logit_scale"] = jnp.float32(outside)
        new, _ = step(state, batch_of(config))
        assert float(new["params"]["logit_scale"]) == np.float32(inside)


@pytest.mark.parametrize("name", ["adamw", "stable_adamw"])
def test_gradient_clipping_is_the_other_arm(micro, name):
    config = micro(
        optimizer__name=name, optimizer__grad_clip_norm=1e-3, optimizer__clip_threshold=0
    )
    optimizer = optimizer_lib.make_optimizer(config, lambda count: 1e-3)
    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        _, state = optimizer.update(params, optimizer.init(params), params)
    first = [x for path, x in zip(paths(state), jax.tree.leaves(state)) if "mu" in path.split("/")]
    norm = float(jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in first)))
    kept = {"adamw": 0.1, "stable_adamw": 1.0}[name]  # of a first gradient, in m: debiased or not
    np.testing.assert_allclose(norm, kept * 1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_schedule(micro, name):
    config = micro(schedule__name=name, optimizer__learning_rate=1.0)
    schedule = optimizer_lib.make_schedule(config, 110, 10)
    rates = np.array([schedule(step) for step in (0, 4, 9, 10, 60, 110)])
    end = {"cosine": [0.5, 0.0], "constant": [1.0, 1.0]}[name]
    np.testing.assert_allclose(rates, [0.1, 0.46, 0.91, 1.0, *end], atol=1e-6)


# ------------------------------------------------------------------------------- many devices


@pytest.mark.slow
def test_two_devices_compute_what_one_does(micro):
    results = {}
    for name, sizes, accumulation in (
        ("one", (1, 1, 1), 1),
        ("data", (2, 1, 1), 1),
        ("fsdp", (1, 2, 1), 2),
    ):
        config = micro(model__recipe="standard", train__accumulation=accumulation)
        init, step = setup(config)
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
        # The second moment is the squared gradient, averaged over the whole batch.
        nu, expected_nu = (
            [x for p, x in zip(paths(s), jax.tree.leaves(s)) if "/nu/" in p]
            for s in (state, expected)
        )
        largest = max(float(jnp.max(x)) for x in expected_nu)
        assert_close(nu, expected_nu, rtol=0, atol=1e-5 * largest)


def test_every_parameter_needs_a_rule():
    with pytest.raises(ValueError, match="no sharding rule matches parameter 'new/kernel'"):
        sharding.abstract_state({"params": {"new": {"kernel": jnp.ones(2)}}}, sharding.make_mesh())


def test_moments_lie_where_their_parameters_do(micro):
    init, _ = setup(micro(train__ema_decay=0.9))
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh(1, 2, 1))
    name = "vision/blocks/attn/q/kernel"
    found = {
        p: x for p, x in zip(paths(like), jax.tree.leaves(like), strict=True) if p.endswith(name)
    }
    split = {p for p, x in found.items() if x.sharding.spec == jax.P(None, "fsdp", "tensor")}
    assert {p.split("/")[0] for p in split} == {"params", "ema", "opt_state"}
    assert all(len(found[p].shape) != 3 for p in found.keys() - split)  # RMS: one number a block


# ----------------------------------------------------------------------------------- the loop


@pytest.fixture(scope="module")
def reference(micro, tmp_path_factory):
    """A run that nothing disturbed: its config and workdir, to be read only."""
    workdir = tmp_path_factory.mktemp("reference")
    assert train(micro(), workdir) == 0
    return micro(), workdir


def test_a_run_leaves_everything_behind(reference):
    config, workdir = reference
    assert [r["step"] for r in records(workdir)] == [1, 2, 3, 4, 5, 6]
    first = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("train/loss", "train/learning_rate", "perf/data_wait_frac", "time",
                 "stability/rms/vision/patch_embed/kernel", "stability/rms/vision/blocks/attn/q/kernel/0",
                 "stability/feature_max_abs/text/0"):  # fmt: skip
        assert np.isfinite(first[name])
    assert first["perf/mfu"] is None  # a CPU has no peak in the table
    assert "test/image_to_text_R@1" in json.loads((workdir / "results.json").read_text())["scores"]
    assert "val/image_to_text_R@1" in records(workdir)[-1]
    assert config_lib.changes((workdir / "config.json").read_text(), config) == []
    assert "command: python" in (workdir / "env.txt").read_text()
    steps = sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    assert steps == [4, 6]


def test_what_counts_as_another_config():
    """A key of another version of swjax does not; a part of a mixture, which the user names, does."""
    parts = {"photos": {"name": "webdataset", "weight": 1.0}}
    saved = json.dumps({"train": {"steps": 6, "gone": 1}, "data": {"mixture": parts}})

    def changes(train, mixture):
        return config_lib.changes(saved, ConfigDict({"train": train, "data": {"mixture": mixture}}))

    assert changes({"steps": 6, "new": True}, parts) == []
    assert changes({"steps": 7}, parts) == ["train.steps: 6 -> 7"]
    (added,) = changes({"steps": 6}, parts | {"drawings": {"name": "emoji", "weight": 1.0}})
    assert added.startswith("data.mixture.drawings: None -> {")
    (removed,) = changes({"steps": 6}, {})
    assert removed.startswith("data.mixture.photos: {")
    (told,) = changes({"steps": 6}, {"photos": parts["photos"] | {"text_key": "caption"}})
    assert told == "data.mixture.photos.text_key: None -> 'caption'"


def test_interrupted_and_resumed_is_the_same_run(reference, tmp_path, capsys):
    config, workdir = reference
    assert train(config, tmp_path, after=3) == 0
    assert "step 4 is saved" in capsys.readouterr().out
    assert not (tmp_path / "results.json").exists()
    # What a kill after the checkpoint would leave, the second run writes again.
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "time": 1.0, "train/loss": 0.0}) + '\n{"step": 6, "ti')
    assert train(config, tmp_path) == 0
    assert records(tmp_path) == records(workdir)
    (a, position_a), (b, position_b) = (final_state(config, d) for d in (tmp_path, workdir))
    assert_same_bits(a, b)
    assert position_a == position_b and position_a["batches"] == 6


def loaders_of(process) -> list[int]:
    """The processes that load for one."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            parent = int((command.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == process.pid and "spawn_main" in command.read_text():
                found.append(int(command.parent.name))
    return found


@pytest.fixture
def started(micro, tmp_path):
    """Starts train.py for a run without end; returns the process once it has written metrics."""
    processes = []

    def start(*flags) -> subprocess.Popen:
        flags = [f"--config.{k}={v}" for k, v in MICRO.items() if k != "train.steps"] + list(flags)
        flags += [f"--config.train.compilation_cache={micro().train.compilation_cache}"]
        command = [sys.executable, str(ROOT / "train.py"), f"--config={ROOT}/configs/openmoji.py"]
        command += [*flags, "--config.train.steps=100000", f"--workdir={tmp_path}"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)
        processes.append(process)
        metrics = tmp_path / "metrics.jsonl"
        deadline = time.monotonic() + 180
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        return process

    yield start
    for process in processes:
        process.kill()


def test_sigterm_saves_and_says_how_to_go_on(started, tmp_path):
    process = started()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0
    last = records(tmp_path)[-1]["step"]
    assert f"interrupted: step {last} is saved" in output
    assert (tmp_path / "checkpoints" / str(last)).is_dir()


def test_sigterm_to_loader_processes_too_saves(started, tmp_path):
    process = started("--config.data.workers=1")
    loaders = loaders_of(process)
    assert loaders
    for pid in [*loaders, process.pid]:
        os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0
    assert f"interrupted: step {records(tmp_path)[-1]['step']} is saved" in output


def test_a_lost_loader_process_is_one_line(started):
    process = started("--config.data.workers=1")
    for pid in loaders_of(process):
        os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 3
    last = errors.splitlines()[-1]
    assert "train.py: loader process" in last and "exit code -9, killed, as by a machine" in last
    assert "the same command goes on" in last and "Traceback" not in errors


def test_second_interrupt_ends_at_once():
    code = (
        "import signal, time\n"
        "from swjax.training.interrupt import catch\n"
        "with catch() as interrupt:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    assert interrupt.requested\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=50)
    assert done.returncode == 130 and b"again" in done.stdout


# ------------------------------------------------------------------------ trouble and choices


@pytest.fixture
def bad_step_4(monkeypatch):
    """Makes the loss of step 4 look like NaN, once."""
    real, left = diagnostics.Packer.records, [1]

    def spoiled(self, vectors):
        found = real(self, vectors)
        for record in found:
            if record["step"] == 4 and left and left.pop():
                record["train/loss"] = float("nan")
        return found

    monkeypatch.setattr(diagnostics.Packer, "records", spoiled)


def test_log_is_written_beside_the_next_step(micro, monkeypatch, tmp_path):
    """The device has something to do meanwhile."""
    begun, written = [], []
    compile_step, write = setup_lib.compile_step, metric_log.MetricLog.write

    def counted(*args):
        step = compile_step(*args)
        return lambda *args: [begun.append(1), step(*args)][1]

    def noted(self, records):
        written.append(([record["step"] for record in records], len(begun)))
        write(self, records)

    monkeypatch.setattr(loop, "compile_step", counted)
    monkeypatch.setattr(metric_log.MetricLog, "write", noted)
    train(micro(checkpoint__every_steps=5), tmp_path)
    assert written == [([1, 2], 3), ([3, 4, 5], 5), ([6], 6)]  # with a checkpoint, at once


def test_collections_leave_out_what_compiling_left(micro, monkeypatch, tmp_path):
    frozen, write = [], metric_log.MetricLog.write

    def noted(self, records):
        frozen.append(gc.get_freeze_count())
        write(self, records)

    monkeypatch.setattr(metric_log.MetricLog, "write", noted)
    train(micro(train__steps=2), tmp_path)
    assert frozen[0] > 100_000 and gc.get_freeze_count() == 0


def test_nan_stops_the_run(micro, bad_step_4, tmp_path, capsys):
    assert train(micro(), tmp_path) == 1
    assert "train/loss is nan at step 4: stopped;" in capsys.readouterr().out
    assert Checkpoints(tmp_path, keep=0).latest_step() == 2  # nothing broken is saved
    assert [r["train/loss"] is None for r in records(tmp_path)] == [False, False, False, True]


def test_nan_rolls_back_past_the_data(micro, bad_step_4, reference, tmp_path, capsys):
    config = micro(train__nan_policy="rollback")
    assert train(config, tmp_path) == 0
    assert "train/loss is nan at step 4: back to step 2" in capsys.readouterr().out
    rolled, straight = records(tmp_path), records(reference[1])
    assert [r["step"] for r in rolled] == [1, 2, 3, 4, 5, 6]
    assert rolled[:2] == straight[:2] and rolled[2] != straight[2]
    state, position = final_state(config, tmp_path)
    assert int(state["step"]) == 6 and position["batches"] == 8  # batches 3 and 4 were left out


def test_first_bad_step_is_named():
    record = {"step": 3, "train/loss": 1.0, "train/grad_norm": float("inf")}
    assert loop.first_bad([record | {"train/grad_norm": 1.0}]) == ""
    assert loop.first_bad([record]) == "train/grad_norm is inf at step 3"
    assert loop.first_bad([record], kind="parameter") == ""


@pytest.fixture
def planted(monkeypatch):
    """NaN in the batch of step 2, a gradient of 3 and an update of 4, infinity in a parameter of 5."""
    at = {}

    def spoil(x, step, value=jnp.nan):
        return jnp.where(at["step"] == step - 1, jnp.full_like(x, value), x)

    def spoil_leaf(tree, *keys, **how):
        *outer, last = keys
        part = tree = jax.tree.map(lambda x: x, tree)
        for key in outer:
            part = part[key]
        part[last] = spoil(part[last], **how)
        return tree

    names = ("make_train_step", "make_loss_and_grad", "make_optimizer")
    homes = (step_lib, step_lib, setup_lib)
    real = {name: getattr(home, name) for home, name in zip(homes, names)}
    preprocess = step_lib.data.preprocess

    def make_train_step(*args):
        step = real["make_train_step"](*args)

        def with_parameter(state, batch):
            at["step"] = state["step"]
            keys = ("params", "text", "ln_final", "bias")
            return step(spoil_leaf(state, *keys, step=5, value=jnp.inf), batch)

        return with_parameter

    def make_loss_and_grad(*args):
        loss_and_grad = real["make_loss_and_grad"](*args)

        def with_gradient(*args):
            loss, aux, grads = loss_and_grad(*args)
            return loss, aux, spoil_leaf(grads, "vision", "patch_embed", "kernel", step=3)

        return with_gradient

    def make_optimizer(*args):
        optimizer = real["make_optimizer"](*args)

        def update(*args):
            updates, state = optimizer.update(*args)
            return spoil_leaf(updates, "text", "ln_final", "scale", step=4), state

        return optimizer._replace(update=update)

    monkeypatch.setattr(setup_lib, "make_optimizer", make_optimizer)
    monkeypatch.setattr(loop, "make_train_step", make_train_step)
    monkeypatch.setattr(step_lib, "make_loss_and_grad", make_loss_and_grad)
    monkeypatch.setattr(step_lib.data, "preprocess", lambda *a: spoil(preprocess(*a), 2))


def test_what_is_not_finite_is_named_at_its_step(micro, planted, tmp_path, capsys):
    options = {"train__nan_policy": "skip", "diagnostics__norms": "false"}
    options |= {"log__every_steps": 1, "checkpoint__every_steps": 4, "train__steps": 7}
    assert train(micro(**options), tmp_path) == 1
    said = capsys.readouterr().out
    for text in (
        "train/loss is nan at step 2, where batch image is not finite: skipped",
        "grad_norm is nan at step 3, where gradient vision/patch_embed/kernel is not finite: skipped",
        "at step 5, where parameter text/ln_final/bias is not finite: stopped",
    ):
        assert text in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    named = {line["step"]: line["train/nonfinite"] for line in lines if "train/nonfinite" in line}
    assert list(named) == [2, 3, 4, 5] and named[2] == "batch image"
    assert named[4] == "update text/ln_final/scale"  # logged with step 3, that a line was about
    assert Checkpoints(tmp_path, keep=0).latest_step() == 4  # nothing broken is saved


def test_a_finished_run_is_left_alone(reference, monkeypatch, capsys):
    config, workdir = reference
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.name != ".lock"}
    monkeypatch.setattr(loop, "train", None)
    assert loop.train_and_evaluate(config, workdir) == 0
    assert "finished after 6 steps" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.name != ".lock"}
    assert {p: t for p, t in after.items() if p.is_file()} == {
        p: t for p, t in before.items() if p.is_file()
    }


def test_a_finished_run_of_another_config_is_not_mistaken(reference, micro):
    _, workdir = reference
    with pytest.raises(ConfigError, match="model.recipe: 'switchback' -> 'standard'"):
        loop.train_and_evaluate(micro(model__recipe="standard"), workdir)
    loop.train_and_evaluate(micro(log__every_steps=3), workdir)  # computes the same


def test_a_workdir_serves_one_process(micro, tmp_path):
    with lock(tmp_path):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
            loop.train_and_evaluate(micro(), tmp_path)
    lock(tmp_path).close()  # free again


def test_resume_goes_on_with_another_workdirs_run(reference, micro, tmp_path):
    config, workdir = reference
    train(config, tmp_path / "first", after=1)
    assert train(micro(checkpoint__resume=str(tmp_path / "first")), tmp_path / "second") == 0
    assert records(tmp_path / "second") == records(workdir)[2:]


def test_init_from_takes_the_parameters_only(reference, micro, tmp_path):
    _, workdir = reference
    config = micro(checkpoint__init_from=str(workdir))
    init, _ = setup(config)
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())
    own = Checkpoints(tmp_path / "own", keep=1)
    state, position = setup_lib.init_or_restore(config, own, init, like)
    first, _ = final_state(micro(), workdir)
    assert_same_bits(state["params"], first["params"])
    assert int(state["step"]) == 0 and position is None
    moments = [x for p, x in zip(paths(state), jax.tree.leaves(state)) if "/mu/" in p]
    assert moments and not any(jnp.any(x) for x in moments)


def test_a_checkpoint_of_another_model_is_one_line(reference, micro, tmp_path):
    _, workdir = reference
    config = micro(checkpoint__resume=str(workdir), model__vision__width=64)
    with pytest.raises(
        ConfigError, match=r"another model.*is \(.*32.*\) there and \(.*64.*\) here"
    ) as error:
        train(config, tmp_path / "other")
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------- what is told


class Stream:
    def __init__(self, terminal):
        self.text, self._terminal = "", terminal

    def isatty(self):
        return self._terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    "laps, saving, reason",
    [
        ({"data": 2.0, "device": 1.0}, True, None),
        ({"data": 2.0, "device": 1.1}, False, "data"),
        ({"data": 0.1, "device": 3.0}, True, "device while a checkpoint was written"),
        # Which is long every time, such as the device, is no reason.
        ({"data": 0.1, "device": 1.6, "log": 1.4}, False, "log"),
        ({"data": 0.8, "device": 1.6, "log": 0.8}, False, "log, data"),
        ({"queue": 2.0, "data": 2.2, "device": 0.9}, False, "waiting for a core"),
    ],
)
def test_a_slow_step_says_where_its_time_went(monkeypatch, laps, saving, reason):
    """After steps of a second, of which the device takes 0.9."""
    now, queued = [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(step_clock.CoreQueue, "seconds", lambda self: queued[0])
    with closing(step_clock.StepClock()) as clock:

        def take(laps, saving=False):
            for name, seconds in laps.items():
                if name == "queue":  # a part of the lap after it
                    queued[0] += seconds
                else:
                    now[0] += seconds
                    clock.lap(name)
            return clock.step(saving=saving)

        for _ in range(30):
            assert take({"data": 0.1, "device": 0.9}) == {"perf/seconds": pytest.approx(1.0)}
        told = take(laps, saving)
        assert told["perf/seconds"] == pytest.approx(sum(laps.values()) - laps.get("queue", 0.0))
        assert told.get("perf/slow") == reason


def counts_waiting() -> bool:
    """Whether the system does: Linux, unless it is an old one that says 0 0 0."""
    file = Path("/proc/thread-self/schedstat")
    return file.exists() and file.read_text().split()[0] != "0"


@pytest.mark.skipif(not counts_waiting(), reason="this system does not count it")
def test_waiting_for_a_core_is_counted():
    """A thread that shares its core with a process that never rests."""
    core = min(os.sched_getaffinity(0))
    rests_never = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"

    def compute(until):
        os.sched_setaffinity(0, {core})  # this thread's alone
        with closing(step_clock.CoreQueue()) as queue:
            before = queue.seconds()
            while queue.seconds() < before + 0.1 and time.monotonic() < until:
                pass
            return queue.seconds() - before

    with ThreadPoolExecutor(1) as pool:
        process = subprocess.Popen([sys.executable, "-c", rests_never])
        try:
            assert pool.submit(compute, time.monotonic() + 60).result() >= 0.1
        finally:
            process.kill()
            process.wait()


def test_console_rewrites_a_terminals_line_and_prints_plain_ones_elsewhere():
    record = {"step": 5, "train/loss": 1.5, "perf/step_seconds": 2.0,
              "perf/samples_per_sec_per_device": 32.0, "perf/data_wait_frac": 0.25}  # fmt: skip
    for terminal in (True, False):
        stream = Stream(terminal)
        progress = console.Console(65, stream)
        progress.update(record)
        progress.update(record | {"step": 6})
        progress.say("saved")
        assert stream.text.count("\n") == (1 if terminal else 3)
        assert ("\x1b" in stream.text) == terminal
        assert "step 5/65  loss 1.5000  64 samples/s  data wait 25%  ETA 2:00" in stream.text


def test_throughput_counts_training_only(monkeypatch):
    now = np.zeros(1)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = throughput.Meter(batch_size=10, flops_per_example=1.0)
    now += 20  # compiling
    assert meter.restart() == 20
    now += 1
    assert set(meter.read().values()) == {None}
    with meter.waiting():
        now += 1
    now += 2
    read = meter.read()
    rate = 10 / read["perf/step_seconds"] / jax.device_count()
    assert read["perf/samples_per_sec_per_device"] == pytest.approx(rate)
    assert read["perf/step_seconds"] == 4 and read["perf/data_wait_frac"] == 0.25


def test_wandb_missing_is_one_line(micro, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        metric_log.MetricLog(tmp_path, micro(log__wandb="project"), last_step=0)


def test_wandb_is_told_the_newest_record(micro, tmp_path, monkeypatch):
    calls = []

    class Run:
        log = staticmethod(lambda record, step: calls.append((record, step)))
        finish = staticmethod(lambda: calls.append("finished"))

    fake = types.SimpleNamespace(init=lambda **options: calls.append(options) or Run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):  # the second resumes the first
        log = metric_log.MetricLog(tmp_path, micro(log__wandb="project"), last_step=0)
        log.write([{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": 0.25}])
        log.close()
    first, told, finished, second = calls[:4]
    assert told == ({"train/loss": 0.25}, 2) and finished == "finished"
    assert first["project"] == "project" and first["id"] == second["id"]


def test_tensorboard_gets_the_newest_record(micro, tmp_path):
    log = metric_log.MetricLog(tmp_path, micro(log__tensorboard="true"), last_step=0)
    log.write([{"step": 1, "train/loss": float("nan")}, {"step": 2, "train/loss": 0.1}])
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines] == [None, 0.1]
    assert list((tmp_path / "tensorboard").iterdir())
