"""What a run records: metrics.jsonl (one line a step), TensorBoard, W&B, and the live line.

Metrics stay on the device, one small vector a step, and are fetched many steps at a time, beside a step
that runs: training does not wait for its own log.
"""

import collections
import contextlib
import hashlib
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jax

from swjax.diagnostics.recorder import number, truncate
from swjax.training.config import ConfigError, read_json

# Dense 16-bit peak, FLOP/s. int8 and fp8 runs are held against it too, so that recipes compare.
PEAK_FLOPS = (
    (r"B200", 2.25e15),
    (r"H100 PCIe", 7.56e14),
    (r"H[12]00|GH200", 9.89e14),
    (r"A100", 3.12e14),
    (r"L40S", 3.62e14),
    (r"\bL4\b", 1.21e14),
    (r"4090", 1.65e14),
    (r"V100", 1.25e14),
    (r"TPU v4", 2.75e14),
    (r"TPU v5 lite", 1.97e14),
    (r"TPU v5", 4.59e14),
    (r"TPU v6", 9.18e14),
)


def peak_flops(device) -> float | None:
    """The device's 16-bit peak in FLOP/s, or None where the table has none (a CPU)."""
    return next((peak for kind, peak in PEAK_FLOPS if re.search(kind, device.device_kind)), None)


class MetricLog:
    """Appends one record a step to metrics.jsonl, and the newest to TensorBoard and W&B.

    Process 0 does; in the others it writes nothing.

    Args:
      workdir: directory of the run.
      config: the run's; `config.log` chooses the writers.
      last_step: records of later steps, left by a run that was killed, are removed.

    Raises:
      ConfigError: `config.log.wandb` is set but the package is not installed.
    """

    def __init__(self, workdir: Path, config, *, last_step: int):
        self._board = self._wandb = self._file = None
        if jax.process_index() != 0:
            return
        if config.log.wandb:
            try:
                import wandb
            except ImportError as error:
                raise ConfigError(
                    f"config.log.wandb={config.log.wandb!r} needs the package wandb: "
                    f"pip install wandb, or set it to ''"
                ) from error
            try:
                self._wandb = wandb.init(
                    project=config.log.wandb,
                    id=hashlib.sha1(str(workdir.absolute()).encode()).hexdigest()[:12],
                    resume="allow",  # the id is the workdir's: a resumed run goes on there too
                    dir=str(workdir),
                    config=config.to_dict(),
                )
            except wandb.Error as error:  # no key, no such project
                raise ConfigError(
                    f"config.log.wandb={config.log.wandb!r}: {' '.join(str(error).split())}: run "
                    f"`wandb login`, name a project of yours, or set it to ''"
                ) from error
        if config.log.tensorboard:
            self._board = Board(workdir / "tensorboard", last_step)
        self._path = workdir / "metrics.jsonl"
        self.rewind(last_step)

    def rewind(self, last_step: int) -> None:
        """Removes the records after `last_step`; the next one written follows it."""
        if jax.process_index() != 0:
            return
        if self._file:
            self._file.close()
        self._offset = truncate(self._path, last_step, read_line)
        self._start = time.perf_counter()
        self._file = open(self._path, "a")

    def write(self, records: list[dict]) -> None:
        """Writes records {"step": int, name: number or None, ...}, oldest first."""
        if self._file is None:
            return
        seconds = round(self._offset + time.perf_counter() - self._start, 3)
        line = {}
        for record in records:
            line = {"step": record["step"], "time": seconds}
            line |= {name: number(value) for name, value in record.items() if name != "step"}
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        shown = {
            k: v
            for k, v in line.items()
            if isinstance(v, (int, float)) and k not in ("step", "time")
        }
        if self._board:
            self._board.write(line["step"], shown)
        if self._wandb:
            self._wandb.log(shown, step=line["step"])

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


class Board:
    """Scalars for TensorBoard, written when they come.

    tensorboardX's own SummaryWriter hands them to a thread, which a full disk ends, and then waits for it.

    Args:
      directory: of the event files; this process adds one.
      last_step: what earlier processes wrote of later steps is hidden.
    """

    def __init__(self, directory: Path, last_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(exist_ok=True)
        self._event = Event
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        start = SessionLog(status=SessionLog.START)
        self._add(Event(step=last_step + 1, wall_time=time.time(), session_log=start))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        event = self._event(step=step, wall_time=time.time())
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._add(event)

    def _add(self, event) -> None:
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_line(number: int, line: str) -> dict:
    what, remedy = f"metrics.jsonl, line {number},", "mend the line, or remove it"
    return read_json(what, line, remedy=remedy, step=int, time=int | float)


class Meter:
    """Measures throughput over a window of steps.

    Args:
      batch_size: examples a step, over all devices.
      flops_per_example: model FLOPs of one example, forward and backward.
    """

    def __init__(self, batch_size: int, flops_per_example: float):
        self._batch_size, self._flops = batch_size, flops_per_example
        self.restart()

    def restart(self) -> float:
        """Begins a window; returns the seconds since the last one began."""
        now = time.perf_counter()
        seconds = now - getattr(self, "_start", now)
        self._start, self._wait, self._steps = now, 0.0, 0
        return seconds

    @contextlib.contextmanager
    def waiting(self):
        """Time in this context is one step's waiting for data."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start
        self._steps += 1

    def read(self) -> dict:
        """The perf/ metrics of the window; None where a window without steps has none."""
        seconds = time.perf_counter() - self._start
        rate = self._steps * self._batch_size / seconds / jax.device_count()
        peak = peak_flops(jax.devices()[0])
        metrics = {
            "perf/samples_per_sec_per_device": rate,
            "perf/mfu": rate * self._flops / peak if peak else None,
            "perf/data_wait_frac": self._wait / seconds,
            "perf/step_seconds": seconds / max(self._steps, 1),
        }
        return metrics if self._steps else dict.fromkeys(metrics)


class StepClock:
    """Times every step, and says where the time went of one that took longer than 3 times the median of
    those before it.

    A step lasts from when the one before it was handed to the device to when it is, so that what happens
    between them (evaluation, a checkpoint, the log) is part of the next one. Laps divide it without rest.
    In each, the time in which this thread could run but had no core is counted apart: else whatever is done
    while others have the cores would seem slow itself.
    """

    _LEAST, _MOST = 20, 101  # steps before it that a median needs, and is taken of

    def __init__(self):
        self._spent = collections.deque(maxlen=self._MOST)
        self._laps: dict[str, float] = {}
        self._queue = CoreQueue()
        self._last = self._now()

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`."""
        now = self._now()
        passed, queued = (after - before for before, after in zip(self._last, now))
        self._last = now
        for part, seconds in ((name, passed - queued), ("waiting for a core", queued)):
            self._laps[part] = self._laps.get(part, 0.0) + seconds

    def step(self, *, saving: bool) -> dict:
        """Ends a step, at the end of a lap.

        Args:
          saving: a checkpoint is being written in the background.

        Returns:
          {"perf/seconds": its time}, and "perf/slow": where it went, if it took so long.
        """
        laps, self._laps = self._laps, {}
        seconds = sum(laps.values())
        told = {"perf/seconds": seconds}
        if len(self._spent) >= self._LEAST:
            if seconds > 3 * statistics.median(sum(other.values()) for other in self._spent):
                told["perf/slow"] = _where(laps, self._spent)
                told["perf/slow"] += " while a checkpoint was written" * saving
        self._spent.append(laps)
        return told

    def close(self) -> None:
        self._queue.close()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._queue.seconds()


class CoreQueue:
    """How long the thread that made it has waited for a core: what Linux counts, elsewhere nothing."""

    def __init__(self):
        try:
            self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)
        except OSError:
            self._file = None

    def seconds(self) -> float:
        """Since the thread began."""
        # Computed for, waited for a core for (nanoseconds), times that it got one.
        return int(os.pread(self._file.fileno(), 80, 0).split()[1]) / 1e9 if self._file else 0.0

    def close(self) -> None:
        if self._file:
            self._file.close()


def _where(laps: dict[str, float], before: Iterable[dict[str, float]]) -> str:
    """The parts that took longer than usual, longest first: as few as make half of what is more.

    >>> usual = [{"data": 0.1, "device": 0.9}] * 3
    >>> _where({"data": 0.2, "device": 2.9}, usual), _where({"data": 1.1, "log": 0.9, "device": 0.9}, usual)
    ('device', 'data')
    """
    more = {
        name: seconds - statistics.median(other.get(name, 0.0) for other in before)
        for name, seconds in laps.items()
    }
    half, named = sum(max(seconds, 0.0) for seconds in more.values()) / 2, []
    for name in sorted(more, key=more.get, reverse=True):
        named.append(name)
        half -= more[name]
        if half <= 0:
            break
    return ", ".join(named)


class Progress:
    """Tells a person how the run goes: one rewritten line on a terminal, plain lines elsewhere.

    Args:
      total: steps of the run.
      stream: where to.
    """

    def __init__(self, total: int, stream=None):
        self._total = total
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._open = False

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._print(("\r\x1b[K" if self._open else "") + text + "\n")
        self._open = False

    def update(self, record: dict) -> None:
        """Shows the newest record."""
        line = f"step {record['step']}/{self._total}  loss {record['train/loss']:.4f}"
        if seconds := record["perf/step_seconds"]:
            rate = record["perf/samples_per_sec_per_device"] * jax.device_count()
            line += f"  {rate:.0f} samples/s  data wait {record['perf/data_wait_frac']:.0%}"
            line += f"  ETA {_clock((self._total - record['step']) * seconds)}"
        self._print(f"\r\x1b[K{line}" if self._live else line + "\n")
        self._open = self._live

    def _print(self, text: str) -> None:
        if jax.process_index() == 0:
            self._stream.write(text)
            self._stream.flush()


def _clock(seconds: float) -> str:
    """
    >>> _clock(3700), _clock(65)
    ('1:01:40', '1:05')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
