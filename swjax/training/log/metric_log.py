"""Writes the metrics of a run: metrics.jsonl (one line per step), TensorBoard and W&B."""

import hashlib
import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from swjax.diagnostics.recorder import append, number, truncate
from swjax.safe_files import one_line
from swjax.training.config import ConfigError, RunError, blame_damage, to_json


class MetricLog:
    """Appends one record per step to metrics.jsonl, and sends the newest values to TensorBoard and W&B.

    A metric that only some steps have, such as quantization health, is sent with the next step that is sent.
    Only process 0 writes; in other processes the class does nothing.

    Args:
      workdir: directory of the run.
      config: the config of the run; `config.log` chooses the writers.
      last_step: records after this step, which a killed run may have left, are removed.

    Raises:
      ConfigError: `config.log.wandb` is set, but the package is not installed, or W&B refuses the run; or a
        line of metrics.jsonl is damaged.
      RunError: in `write`, the file no longer exists.
      OSError: in `write`, as of a full disk; the file is unchanged.
    """

    def __init__(self, workdir: Path, config: ConfigDict, *, last_step: int):
        self._board: Board | None = None
        self._wandb: Any = None
        self._file: io.FileIO | None = None
        self._unsent: dict[str, Any] = {}
        if jax.process_index() != 0:
            return
        if config.log.wandb:
            self._wandb = _start_wandb(workdir, config)
        if config.log.tensorboard:
            self._board = Board(workdir / "tensorboard")
        self._path = workdir / "metrics.jsonl"
        self.rewind(last_step)

    def rewind(self, last_step: int) -> None:
        """Removes the records after `last_step`; the next record continues from there."""
        if jax.process_index() != 0:
            return
        if self._file:
            self._file.close()
        if self._board:
            self._board.rewind(last_step)
        with blame_damage():
            last = truncate(self._path, last_step, time=int | float)
        self._offset = last.get("time", 0.0)
        self._start = time.perf_counter()
        self._file = open(self._path, "ab", buffering=0)

    def write(self, records: Sequence[dict[str, Any]], *, last: bool = True) -> None:
        """Writes records {"step": int, metric: number, name or None, ...}, oldest first.

        Args:
          records: the records.
          last: whether the newest values are sent now. Otherwise they are sent with the next records.
        """
        if self._file is None:
            return
        if not self._path.exists():
            raise RunError(
                f"workdir {str(self._path.parent)!r} must stay in place during a run, and its metrics.jsonl "
                "is missing: move the folder back if it was moved, then the same command resumes the run"
            )
        seconds = round(self._offset + time.perf_counter() - self._start, 3)
        newest, lines = self._unsent, []
        for record in records:
            line = {"step": record["step"], "time": seconds}
            line |= {name: number(value) for name, value in record.items() if name != "step"}
            lines.append(json.dumps(line) + "\n")
            newest |= line
        append(self._file, "".join(lines).encode())
        self._unsent = {} if last else newest
        if not last:
            return
        shown = {
            k: v
            for k, v in newest.items()
            if isinstance(v, (int, float)) and k not in ("step", "time")
        }
        if self._board:
            self._board.write(newest["step"], shown)
        if self._wandb:
            self._wandb.log({"step": newest["step"]} | shown)

    def close(self) -> None:
        """Closes all files."""
        if self._file:
            self._file.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


class Board:
    """Writes scalars to a TensorBoard event file, synchronously.

    tensorboardX's own SummaryWriter passes scalars to a thread. If the disk is full, the thread ends and the
    writer waits for it forever.

    Args:
      directory: directory of the event files; this process adds one file.
    """

    def __init__(self, directory: Path):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(exist_ok=True)
        self._event, self._start = Event, SessionLog(status=SessionLog.START)
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}")

    def rewind(self, last_step: int) -> None:
        """Makes TensorBoard hide the events of later steps, also those that earlier processes wrote."""
        self._add(self._event(step=last_step + 1, wall_time=time.time(), session_log=self._start))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Writes the scalars {name: value} of a step."""
        event = self._event(step=step, wall_time=time.time())
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._add(event)

    def _add(self, event) -> None:
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _start_wandb(workdir: Path, config: ConfigDict) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"config.log.wandb={config.log.wandb!r} needs the package wandb: "
            f"pip install wandb, or set it to ''"
        ) from error
    try:
        run = wandb.init(
            project=config.log.wandb,
            id=hashlib.sha1(str(workdir.absolute()).encode()).hexdigest()[:12],
            resume="allow",  # the workdir determines the id, so a resumed run continues its W&B run
            dir=str(workdir),
            config=json.loads(to_json(config)),
        )
        # W&B's own step must increase, but a rollback or a killed process repeats steps.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run
    except wandb.Error as error:  # such as a missing API key or project
        raise ConfigError(
            f"config.log.wandb={config.log.wandb!r}: {one_line(error)}: run "
            f"`wandb login`, name one of your projects, or set it to ''"
        ) from error
