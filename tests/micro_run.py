"""A very small run that the tests of the trainer share: its config, its parts, and how to train it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swjax.models import sharding
from swjax.optax import path_name
from swjax.training import config as config_lib
from swjax.training import loop, setup
from swjax.training.log.packed import fetch
from swjax.training.optimizer import make_optimizer, make_schedule
from swjax.training.state.checkpoint import Checkpoints
from swjax.training.state.mirror import Mirror
from swjax.training.step import make_train_step

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
    "schedule.name": "constant",  # so that runs of different lengths share one compiled program
    "schedule.warmup_steps": 1,
    "checkpoint.every_steps": 2,
    "log.every_steps": 2,
    "log.tensorboard": "false",
    "report.enabled": "false",
    "diagnostics.rms": "false",  # they take time to trace
    "diagnostics.features": "false",
}

# More of that, for tests that compile a train step of their own.
UNDIAGNOSED = {"diagnostics.norms": "false", "diagnostics.every_steps": 0}

# Processes compile with the same options as this one, so that they share its compilation cache.
ENVIRONMENT = os.environ | {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": jax.config.jax_default_matmul_precision,
}


def micro_config(cache: str, **changes):
    """Returns the config of a very small run with some keys changed; "__" in a name stands for ".".

    Args:
      cache: directory of the compilation cache.
    """
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    overrides = MICRO | {"train.compilation_cache": cache} | changes
    pairs = [(key, str(value)) for key, value in overrides.items()]
    return config_lib.load(f"{ROOT}/configs/openmoji.py", pairs)


class Interrupt:
    """Stands in for the trainer's signal handler: requests a stop at the `after`-th check."""

    def __init__(self, after: int = 10**9):
        self._left = after

    def handle(self) -> None:
        """The stand-in watches no signals."""

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0


def train(config, workdir, after: int = 10**9) -> int:
    workdir.mkdir(exist_ok=True)
    return loop.train(config, workdir, Interrupt(after), Mirror("", workdir))


def as_interrupted(workdir, copy) -> None:
    """Copies the `reference` run as it would be if it had been interrupted after step 4 of 6."""
    shutil.copytree(workdir, copy)
    shutil.rmtree(copy / "checkpoints" / "6")
    (copy / "results.json").unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:4]))


def records(workdir) -> list[dict]:
    """Returns the records of metrics.jsonl without measured times."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k != "time" and not k.startswith("perf/")}
        for line in lines
    ]


def final_state(config, workdir):
    """Returns the state of the newest checkpoint, and its position in the data without measured times."""
    mesh = sharding.make_mesh(**config.mesh)
    like = sharding.abstract_state(jax.eval_shape(make_init(config)[0]), mesh)
    state, position = Checkpoints(workdir, keep=0).restore(like)
    position.pop("unscored", None)
    return state, position


def optimizer_of(config):
    """Returns (schedule, optimizer) of a run."""
    schedule = make_schedule(config, config.train.steps, config.schedule.warmup_steps)
    return schedule, make_optimizer(config, schedule)


def make_init(config):
    """Returns (init, graphdef) of a run."""
    _, optimizer = optimizer_of(config)
    return setup.make_init(config, setup.model_config(config), optimizer)


def init_and_step(config):
    """Returns (init, step), compiled: `init` makes the first state, `step` returns metrics by name."""
    init, step = step_of(config)

    def named(state, batch):
        state, metrics = jax.jit(step)(state, batch)
        return state, fetch({0: metrics})[0]

    return jax.jit(init), named


def step_of(config):
    """Returns (init, step), not compiled."""
    schedule, optimizer = optimizer_of(config)
    init, graphdef = setup.make_init(config, setup.model_config(config), optimizer)
    return init, make_train_step(config, graphdef, optimizer, schedule)


def products_of(config) -> set[str]:
    """Returns the shapes of all matrix products in a compiled step."""
    init, step = step_of(config)
    text = jax.jit(step).lower(jax.eval_shape(init), batch_of(config)).compile().as_text()
    return set(re.findall(r"= \w+(\[[\d,]*\])\S* (?:dot|custom-call)\(", text))


def batch_of(config, seed=0):
    rng = np.random.default_rng(seed)
    size, side = config.train.batch_size, config.data.image_size
    text = np.zeros((size, config.data.context_length), np.int32)
    text[:, 0], text[:, 1], text[:, 2] = 49406, rng.integers(300, 400, size), 49407
    image = rng.integers(0, 256, (size, side, side, 3), np.uint8)
    label = rng.integers(0, size // 2, size).astype(np.int32)
    return {"image": jnp.asarray(image), "text": jnp.asarray(text), "label": jnp.asarray(label)}


def paths(tree) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def command_of(workdir, **changes) -> list[str]:
    """Returns the command line of train.py for a very small run; "__" in a name stands for "."."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    flags = [f"--config.{key}={value}" for key, value in (MICRO | changes).items()]
    script, config = str(ROOT / "train.py"), f"--config={ROOT}/configs/openmoji.py"
    return [sys.executable, script, config, f"--workdir={workdir}", *flags]


def start(workdir, **changes) -> subprocess.Popen:
    """Starts train.py for a run that does not end; returns the process once it has written metrics."""
    command = command_of(workdir, **{"train.steps": 100_000} | changes)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 600  # of a busy machine
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        if process.poll() is not None:
            break  # the test shows what it printed
        time.sleep(0.05)
    return process
