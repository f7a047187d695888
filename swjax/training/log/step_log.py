"""Collects the metrics of dispatched steps, logs them, and warns of a run that learns nothing."""

import gc
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from swjax.diagnostics import Rules, Watch
from swjax.training.inputs import Feed
from swjax.training.log.console import Console
from swjax.training.log.health import Health
from swjax.training.log.metric_log import MetricLog
from swjax.training.log.packed import PackedMetrics, fetch
from swjax.training.log.profiling import Profiler
from swjax.training.log.timing import Timing, is_due
from swjax.training.setup import Parts
from swjax.training.step import Batch, State

COLLAPSE_STEPS = 100
_CHANCE_TOLERANCE = 2e-3  # relative to the chance loss
_SMALL_GRADIENT = 0.02  # gradient norm; a CLIP model that learns has a norm above 0.3


class StepLog:
    """Keeps the metrics of dispatched steps on the device until they are due, then logs them.

    At most two steps are in flight. Metrics are fetched one step late, while the device runs the next step,
    so training does not wait for the log.

    Args:
      config: the config of the run.
      workdir: directory of the run.
      parts: the parts of the run.
      step: the last step that an earlier process has finished; 0 at the beginning.
      feed: counts the unreadable examples.
      timing: clock of the run.
      console: shows the newest record and prints events.

    Raises:
      ConfigError: see `MetricLog`.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        parts: Parts,
        step: int,
        feed: Feed,
        timing: Timing,
        console: Console,
    ):
        self._every = config.log.every_steps
        self._health = Health(config, parts.graphdef, parts.like["params"], steps=parts.steps)
        self._files = MetricLog(workdir, config, last_step=step)
        self._watch = Watch(Rules.of_run(parts.steps))
        self._collapse = Collapse(config.train.loss, config.train.batch_size)
        self._profiler = Profiler(config, workdir, step=step, timing=timing, console=console)
        self._feed, self._timing, self._console = feed, timing, console
        self._previous: PackedMetrics | None = None
        self._forget()
        console.show("compiling the first step")
        timing.restart()

    def _forget(self) -> None:
        self._metrics: dict[int, PackedMetrics] = {}
        self._unreadable: dict[int, int] = {}
        self._times: dict[int, dict[str, Any]] = {}

    def before(self, step: int, state: State, batch: Batch) -> None:
        """Starts or stops the profile and measures quantization health, if they are due at this step."""
        self._profiler.begin(step, state)
        if self._health.compiles_at(step):
            self._compile_health(step, state, batch)
        self._health.before(step, state, batch)

    def add(self, step: int, metrics: PackedMetrics, *, saving: bool) -> None:
        """Adds a dispatched step, and waits until the previous step has finished.

        Args:
          step: number of the step, from 1.
          metrics: metrics on the device.
          saving: whether a checkpoint is being written in the background.
        """
        self._metrics[step], self._unreadable[step] = metrics, self._feed.skipped
        if self._previous is None:
            self._finish_compiling(step, metrics)
        self._timing.lap("dispatch")
        jax.block_until_ready(self._previous)
        self._previous = metrics
        self._timing.lap("device")
        self._times[step] = self._timing.step(saving=saving)

    def _finish_compiling(self, step: int, metrics: PackedMetrics) -> None:
        jax.block_until_ready(metrics)
        _keep_objects()
        seconds = self._timing.restart()
        self._console.say(f"step {step} took {seconds:.0f} s, most of it compiling")

    def _compile_health(self, step: int, state: State, batch: Batch) -> None:
        jax.block_until_ready(self._previous)
        self._timing.lap("device")
        self._console.show("compiling the measurement of quantization health")
        self._health.compile(state, batch)
        _keep_objects()
        seconds = self._timing.lap("compilation")
        self._console.say(f"step {step}: compiling quantization health took {seconds:.0f} s")

    def due(self, step: int, *, now: bool) -> list[dict[str, Any]]:
        """Returns the records that are due after a step. All processes must call it after each step.

        Args:
          step: the newest step.
          now: whether to include the newest step. Otherwise the function returns the records up to the
            previous step, if that step is a multiple of `log.every_steps`.

        Returns:
          {"step": int, metric: number or None, ...} for each step, oldest first; [] if none is due.
        """
        last = step if now else step - 1
        if last not in self._metrics or not (now or is_due(last, self._every)):
            return []
        done = [s for s in self._metrics if s <= last]
        records = fetch({s: self._metrics.pop(s) for s in done})
        own = np.array([self._unreadable.pop(s) for s in done], np.int64)
        unreadable = self._feed.of_readers(own).sum(axis=0).tolist()
        health, perf = self._health.records(last), self._timing.window()
        for record, count in zip(records, unreadable, strict=True):
            measured = health.get(record["step"], {})
            record |= {"data/skipped": count} | self._times.pop(record["step"]) | measured | perf
        self._timing.lap("log")
        return records

    def write(self, records: Sequence[dict[str, Any]], *, last: bool = True) -> None:
        """Writes records, oldest first; prints the newest record, loss spikes and a collapse.

        Args:
          records: the records.
          last: whether the newest one is shown on the console and in TensorBoard. Otherwise the record that
            follows is written soon.
        """
        if not records:
            return
        self._files.write(records, last=last)
        for event in [*self._watch.update(records), *self._collapse.update(records)]:
            self._console.say(event)
        if last:
            self._console.update(records[-1])
        self._timing.lap("log")

    def rewind(self, step: int) -> None:
        """Discards the steps after `step`, for a rollback."""
        self._forget()
        self._files.rewind(step)
        self._watch.restart()
        self._collapse.restart()
        self._timing.lap("rollback")

    def close(self) -> None:
        """Closes the files, and restores the garbage collector's settings from before the first step."""
        self._profiler.close()
        self._files.close()
        self._console.close()
        gc.unfreeze()


def as_json(record: dict[str, Any]) -> dict[str, Any]:
    """A record with Python numbers, for `json`, which reads them back as they are, NaN included."""
    return {name: x.item() if hasattr(x, "item") else x for name, x in record.items()}


def _keep_objects() -> None:
    """Excludes the compiler's objects from garbage collection, where they cost 0.13 s every 1,000 steps."""
    gc.collect()
    gc.freeze()


class Collapse:
    """Watches for a loss at the value of equal embeddings, with a vanishing gradient.

    Equal embeddings have equal logits, so the softmax loss of a batch of b pairs is ``ln(b)``, and its
    gradient is almost 0. Deep towers collapse in their first steps if the learning rate rises too fast or
    is too high for the batch size, and may not recover before the run ends.

    Args:
      loss: `train.loss`; the class ignores a sigmoid loss.
      batch_size: b, the number of pairs.

    >>> watch = Collapse("softmax", batch_size=8)
    >>> records = [{"step": i, "train/loss": 2.0794, "train/grad_norm": 1e-3} for i in range(100)]
    >>> print(watch.update(records)[0])
    step 99: the embeddings have collapsed: for 100 steps the loss has been ln(batch_size) = 2.079, with a \
gradient norm of 0.001; lower optimizer.learning_rate or raise schedule.warmup_steps, and start again
    """

    def __init__(self, loss: str, batch_size: int):
        self._chance = math.log(batch_size) if loss == "softmax" and batch_size > 1 else math.nan
        self._norms: deque[float] = deque(maxlen=COLLAPSE_STEPS)
        self._told = False

    def restart(self) -> None:
        """Discards all records, for a run that returns to an earlier step; a warning is not repeated."""
        self._norms.clear()

    def update(self, records: Iterable[Mapping[str, Any]]) -> list[str]:
        """Returns a line for the terminal the first time the run has collapsed, else no lines.

        Args:
          records: the records of the next steps, oldest first.
        """
        for record in records:
            loss, norm = record["train/loss"], record["train/grad_norm"]
            if loss is None or norm is None or not self._is_chance(loss):
                self._norms.clear()
                continue
            self._norms.append(norm)
            if (
                len(self._norms) == COLLAPSE_STEPS
                and median(self._norms) < _SMALL_GRADIENT
                and not self._told
            ):
                self._told = True
                return [
                    f"step {record['step']}: the embeddings have collapsed: for {COLLAPSE_STEPS} steps "
                    f"the loss has been ln(batch_size) = {self._chance:.3f}, with a gradient norm of "
                    f"{median(self._norms):.2g}; lower optimizer.learning_rate or raise "
                    "schedule.warmup_steps, and start again"
                ]
        return []

    def _is_chance(self, loss: float) -> bool:
        return abs(loss - self._chance) <= _CHANCE_TOLERANCE * self._chance
