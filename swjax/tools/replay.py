"""Replays a step of a run bit for bit from the nearest checkpoint, and measures every gradient.

`python -m swjax diagnostics replay` shows a spike's batch and its gradients.
"""

import dataclasses
import operator
from collections.abc import Callable
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from swjax.data import history
from swjax.diagnostics import recorder
from swjax.diagnostics.names import RMS
from swjax.models import clip, sharding
from swjax.optax import path_name
from swjax.training import config as config_lib
from swjax.training.config import ConfigError
from swjax.training.inputs import open_batches, open_source
from swjax.training.keys import KEYS
from swjax.training.log.health import Health
from swjax.training.log.packed import fetch, pack
from swjax.training.log.results import configs_before
from swjax.training.optimizer import split_frozen
from swjax.training.setup import Parts, assemble, use_compilation_cache
from swjax.training.state.checkpoint import Checkpoints, saved_steps
from swjax.training.state.restore import first_state
from swjax.training.step import Batch, State, factor_of_loss, make_loss_and_grad, step_key


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replayed step.

    Attributes:
      step: number of the step.
      start: step of the checkpoint from which the replay started; 0 means the beginning of the run.
      metrics: all metrics that the run records at a step, including quantization health.
      gradients: {tensor, or block of a stacked tensor: (norm, largest |g|)}.
      examples: key of each example in the batch.
      compared: number of replayed steps that metrics.jsonl contains.
      differences: "step: name: logged value, replayed value" for each metric that differs.
    """

    step: int
    start: int
    metrics: dict[str, float]
    gradients: dict[str, tuple[float, float]]
    examples: list[str]
    compared: int
    differences: list[str]

    def tensors(self) -> list[tuple[str, float, float, float]]:
        """Rows (tensor, RMS, gradient norm, largest |g|), largest RMS first; NaN marks a missing value."""
        rows = [
            (name, self.metrics.get(RMS + name, np.nan), norm, largest)
            for name, (norm, largest) in self.gradients.items()
        ]
        return sorted(rows, key=lambda row: -np.nan_to_num(row[1], nan=-1.0))


def replay(
    workdir: str | Path, step: int, say: Callable[[str], None] = lambda text: None
) -> Replay:
    """Restores the nearest checkpoint before a step and trains up to the step, without changing the run.

    On the same kind of device as the run, all metrics are bitwise equal to those in metrics.jsonl.

    Args:
      workdir: directory of the run.
      step: number of the step in the log, from 1.
      say: called with a line that describes the replay.

    Raises:
      ConfigError: the run or the step does not exist, or its data cannot be opened.
    """
    workdir = Path(workdir)
    config, log = load_config(workdir), _log(workdir)
    use_compilation_cache(config)
    parts = assemble(config, open_source(config, "train"))
    if not 1 <= step <= parts.steps:
        raise ConfigError(f"--step={step} must be one of the run's steps, 1 to {parts.steps}")
    state, position = _state_before(config, workdir, step, parts)
    start = int(state["step"])
    say(
        f"from {'the beginning' if start == 0 else f'the checkpoint of step {start}'} to step {step}"
    )

    train_step, recorded = parts.train_step(config), {}
    share = sharding.batch_share(parts.mesh)
    with closing(open_batches(config, parts.source, position, share)) as batches:
        for now in range(start + 1, step + 1):
            host = next(batches)
            batch = sharding.shard_batch(host, parts.mesh)
            if now == step:
                gradients = _gradients(config, parts.graphdef, state, batch)
                with config.unlocked():
                    config.diagnostics.every_steps = step
                health = Health(config, parts.graphdef, parts.like["params"], steps=step)
                health.before(step, state, batch)
            state, recorded[now] = train_step(state, batch)
    records = fetch(recorded)
    changed = [text for record in records for text in differing_metrics(record, log)]
    return Replay(
        step=step,
        start=start,
        metrics=records[-1] | health.records(step).get(step, {}),
        gradients=gradients,
        examples=[history.key(parts.source, int(i)) for i in np.sort(host["index"])],
        compared=sum(record["step"] in log for record in records),
        differences=changed,
    )


def load_config(workdir: Path) -> ConfigDict:
    """Loads the config of a run.

    Raises:
      ConfigError: the workdir has no config.json, or a damaged one.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise ConfigError(f"{workdir} has no config.json: give the workdir of a run of train.py")
    tuples = {name: key.default for name, key in KEYS.items() if key.kind is tuple}
    sections = {name.partition(".")[0]: dict for name in tuples}
    text = path.read_text(encoding="utf-8", errors="replace")
    saved = config_lib.read_json(str(path), text, remedy="restore it from a copy", **sections)
    for name, default in tuples.items():  # JSON has no tuples
        *parents, key = name.split(".")
        section = saved
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = tuple(section.get(key, default))
    tokenizer = workdir / Path(str(saved["data"].get("tokenizer", ""))).name
    if tokenizer.is_file():  # the run's own copy, which has moved with the workdir
        saved["data"]["tokenizer"] = str(tokenizer)
    return ConfigDict(saved).lock()


def batch_examples(workdir: str | Path) -> Callable[[int], list[str]]:
    """Returns a function: step -> the keys of its batch's examples, computed without reading other batches.

    Args:
      workdir: directory of a run.

    Raises:
      ConfigError: the run or its data cannot be opened. The returned function raises it if the batch depends
        on skipped unreadable examples or a rollback, which only `replay` can reproduce, or on batches of
        several sizes or orders, because the config has changed since the nearest checkpoint.
    """
    workdir = Path(workdir)
    config, log = load_config(workdir), _log(workdir)
    source = open_source(config, "train")

    def settings(config):
        train, data = config["train"], config["data"]
        return {
            "batch_size": train["batch_size"],
            "seed": train["seed"],
            "shuffle": data["shuffle"],
            "shuffle_shards": data["shuffle_shards"],
        }

    def examples(step: int) -> list[str]:
        start, position = _position_before(config, workdir, step, source)
        skipped = [log.get(s, {}).get("data/skipped", 0) for s in (start, step)]
        if skipped[0] != skipped[1] or (position is None and config.train.nan_policy == "rollback"):
            raise ConfigError(f"step {step} depends on examples skipped before it: replay the step")
        configs = configs_before(workdir, step)
        first = max(0, sum(entry["step"] <= start for entry in configs) - 1)
        used = [settings(entry["config"]) for entry in configs[first:]] or [settings(config)]
        if any(each != used[0] for each in used):
            raise ConfigError(
                f"step {step} depends on a checkpoint of step {configs[-1]['step']}, after which the config "
                "changed the batches, and which was removed: raise config.checkpoint.keep"
            )
        number = step - 1 - start
        indices = history.batch_indices(source, number, position=position, **used[0])
        return [history.key(source, int(i)) for i in np.sort(indices)]

    return examples


def _state_before(
    config: ConfigDict, workdir: Path, step: int, parts: Parts
) -> tuple[State, dict | None]:
    """Loads the train state and the data position of the nearest checkpoint, or initializes them."""
    with _checkpoint_before(config, workdir, step) as found:
        if found:
            checkpoints, earlier = found
            state, position = checkpoints.restore(parts.like, earlier)
            return state, _of_these(parts.source, position, checkpoints, workdir)
    return first_state(config, parts.init, parts.like), None


def _of_these(source, position: dict, checkpoints: Checkpoints, workdir: Path) -> dict | None:
    """The data position, or None if that of another workdir belongs to other data: see `Feed`."""
    other = not checkpoints.directory.parent.samefile(workdir)
    return None if other and position["examples"] != len(source) else position


def _position_before(config, workdir: Path, step: int, source) -> tuple[int, dict | None]:
    with _checkpoint_before(config, workdir, step) as found:
        if found:
            checkpoints, earlier = found
            position = checkpoints.position(earlier)
            return earlier, _of_these(source, position, checkpoints, workdir)
    return 0, None


@contextmanager
def _checkpoint_before(config, workdir: Path, step: int):
    """Yields (checkpoints, nearest step before `step`) of the run or of the run that it resumed from.

    Yields None if the run started from scratch and has no such checkpoint.
    """
    runs = {"workdir": str(workdir), "checkpoint.resume": config.checkpoint.resume}
    for key, folder in runs.items():
        if earlier := [s for s in saved_steps(folder) if s < step] if folder else ():
            with closing(Checkpoints.of(key, folder)) as checkpoints:
                yield checkpoints, max(earlier)
            return
    if config.checkpoint.resume:
        raise ConfigError(
            f"no checkpoint of {workdir} or config.checkpoint.resume={config.checkpoint.resume!r} is "
            f"older than step {step}: give a later step"
        )
    yield None


def _gradients(
    config: ConfigDict, graphdef: nnx.GraphDef, state: State, batch: Batch
) -> dict[str, tuple[float, float]]:
    """The norm and the largest |g| of every tensor's gradient, keyed like the RMS metrics."""
    loss_and_grad = make_loss_and_grad(config, graphdef)

    @partial(jax.jit, compiler_options=sharding.compiler_options())
    def measure(state, batch):
        trainable, frozen = split_frozen(state["params"], config.optimizer.freeze)
        key, scale = step_key(config, state["step"]), factor_of_loss(config, state)
        grads = loss_and_grad(trainable, frozen, batch, key, scale).grads
        # None is the block axis of a single tensor, and the gradient of a frozen one.
        is_none = partial(operator.is_, None)
        stacked = jax.tree.leaves(clip.block_axes(grads), is_leaf=is_none)
        named = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_none)
        norms, largest = {}, {}
        for (path, g), axis in zip(named, stacked, strict=True):
            if g is None:
                continue
            reduced = tuple(range(0 if axis is None else 1, g.ndim))
            magnitude, name = jnp.abs(g) / scale, path_name(path)
            norms[name] = jnp.sqrt(jnp.sum(jnp.square(magnitude), reduced))
            # The maximum over devices drops NaN, unlike the sum.
            largest[name] = jnp.where(jnp.isnan(norms[name]), jnp.nan, jnp.max(magnitude, reduced))
        return pack(norms), pack(largest)

    norms, largest = (fetch({0: packed})[0] for packed in measure(state, batch))
    return {name: (norms[name], largest[name]) for name in norms if name != "step"}


def _log(workdir: Path) -> dict[int, dict[str, Any]]:
    """The records of metrics.jsonl by step, up to an incomplete last line.

    Raises:
      ConfigError: a line is damaged.
    """
    with config_lib.blame_damage():
        lines = recorder.read_lines(workdir / "metrics.jsonl")
        return {record["step"]: record for record, _ in lines}


def differing_metrics(record: dict[str, Any], log: dict[int, dict[str, Any]]) -> list[str]:
    """Lists the metrics of a record that differ from the logged values.

    Args:
      record: record of a replayed step.
      log: {step: record in metrics.jsonl}.

    Returns:
      One line "step 3: train/loss: 1.5 there, 1.25 here" per metric: the logged, then the replayed value.
    """
    there = log.get(record["step"], {})
    return [
        f"step {record['step']}: {name}: {there[name]} there, {recorder.number(value)} here"
        for name, value in record.items()
        if name in there and there[name] != recorder.number(value)
    ]
