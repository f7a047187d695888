"""Steps between their dispatch and the log of a run."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from swjax.diagnostics import Rules, Watch
from swjax.training.collapse import Collapse
from swjax.training.console import Console
from swjax.training.health import Health
from swjax.training.inputs import Feed
from swjax.training.metric_log import MetricLog
from swjax.training.packed import PackedMetrics, fetch
from swjax.training.profiling import Profiler
from swjax.training.setup import Parts
from swjax.training.step import Batch, State
from swjax.training.timing import Timing


class StepLog:
    """Dispatched steps, whose metrics stay on the device until they are due, and the log of the others.

    At most two steps are in flight. Metrics are fetched one step late, while the device runs the next step,
    so training does not wait for the log.

    Args:
      config: the run's.
      workdir: directory of the run.
      parts: of the run.
      step: the last step before this part of the run.
      feed: counts the examples that could not be read.
      timing: of the run.
      console: shows the newest record and what happens.

    Raises:
      ConfigError: as `MetricLog`.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        parts: Parts,
        *,
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
        """Begins or ends the profile and measures quantization health, if they are due at this step."""
        self._profiler.begin(step, state)
        self._health.before(step, state, batch)

    def add(self, step: int, metrics: PackedMetrics, *, saving: bool) -> None:
        """Takes a step that was dispatched, and waits until the one before it has finished.

        Args:
          step: its number, from 1.
          metrics: on the device.
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
        gc.collect()
        gc.freeze()  # collecting what compiling left took 0.13 s, about every 1,000 steps
        seconds = self._timing.restart()
        self._console.say(f"step {step} took {seconds:.0f} s, most of it compiling")

    def due(self, step: int, *, now: bool) -> list[dict[str, Any]]:
        """The records that are due after a step; every process of a run must ask after each step.

        Args:
          step: the newest.
          now: whether the newest is due, too. Else those up to the one before it are, where the log has a
            line.

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

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Writes records, oldest first, and shows the newest, loss spikes and a collapse."""
        self._files.write(records)
        for event in [*self._watch.update(records), *self._collapse.update(records)]:
            self._console.say(event)
        self._console.update(records[-1])
        self._timing.lap("log")

    def rewind(self, step: int) -> None:
        """Forgets what came after a step, for a run that goes back to it."""
        self._forget()
        self._files.rewind(step)
        self._watch.restart()
        self._timing.lap("rollback")

    def close(self) -> None:
        """Closes its files, and undoes the change of the garbage collector at the first step."""
        self._profiler.close()
        self._files.close()
        self._console.close()
        gc.unfreeze()


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps, 0: never, happens after this step.

    >>> is_due(4, 2), is_due(5, 2), is_due(4, 0)
    (True, False, False)
    """
    return every > 0 and step % every == 0
