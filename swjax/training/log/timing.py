"""Times a run: the throughput between two log lines, the duration of each step, and what made it slow."""

import collections
import contextlib
import io
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from swjax.kernels import chips
from swjax.models import clip

# Laps that throughput excludes.
NO_TRAINING = ("compilation", "evaluation", "saving", "rollback", "profile")


def peak_flops(device: jax.Device) -> float | None:
    """The dense 16-bit peak of a JAX device in FLOP/s, or None if it is unknown, as for CPUs.

    int8 and fp8 runs use the same peak, so that recipes are comparable.
    """
    chip = chips.find(device.device_kind)
    return chip.bf16 * 1e12 / chip.devices if chip else None


def is_due(step: int, every: int) -> bool:
    """Whether an event is due after this step, if it happens every `every` steps (0: never).

    >>> is_due(4, 2), is_due(5, 2), is_due(4, 0)
    (True, False, False)
    """
    return every > 0 and step % every == 0


class Timing:
    """Throughput over a window of steps, and the laps of each step.

    Args:
      batch_size: examples per step, over all devices.
      model: the model configuration, which determines the FLOPs of a step, forward and backward.
    """

    def __init__(self, batch_size: int, model: clip.CLIPConfig):
        self._batch_size, self._flops = batch_size, 3 * clip.flops_per_example(model)
        self._clock = StepClock()
        self._start = time.perf_counter()
        self.restart()

    def restart(self) -> float:
        """Starts a new window of throughput; returns the seconds of the previous window."""
        now = time.perf_counter()
        seconds = now - self._start
        self._start, self._wait, self._steps = now, 0.0, 0
        return seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside the context as one step's wait for data."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start
        self._steps += 1
        self._clock.lap("data")

    def lap(self, name: str) -> float:
        """Assigns the time since the previous lap to `name`, one of `NO_TRAINING` or a part of training.

        Returns:
          The time in s.
        """
        seconds = self._clock.lap(name)
        if name in NO_TRAINING:
            # The lap may have begun before the window, as that of an evaluation before the first step.
            self._start = min(self._start + seconds, time.perf_counter())
        return seconds

    def step(self, *, saving: bool) -> dict[str, Any]:
        """Ends a step; see `StepClock.step`."""
        return self._clock.step(saving=saving)

    def window(self) -> dict[str, float | None]:
        """Returns the throughput of the window and starts a new one; all None if the window has no step.

        Returns:
          {"perf/samples_per_sec_per_device": examples/s, "perf/mfu": fraction of the peak (None if the peak
          is unknown), "perf/data_wait_frac": fraction of the time, "perf/step_seconds": s}.
        """
        wait, steps = self._wait, self._steps
        seconds = self.restart()
        rate = steps * self._batch_size / seconds / jax.device_count()
        peak = peak_flops(jax.devices()[0])
        metrics = {
            "perf/samples_per_sec_per_device": rate,
            "perf/mfu": rate * self._flops / peak if peak else None,
            "perf/data_wait_frac": wait / seconds,
            "perf/step_seconds": seconds / max(steps, 1),
        }
        return metrics if steps else dict.fromkeys(metrics)

    def close(self) -> None:
        """Closes the file of scheduler statistics."""
        self._clock.close()


class StepClock:
    """Times every step and reports which parts made a slow step slow.

    A step is slow if it takes longer than 3 times the median of the previous steps. It lasts from one
    dispatch to the next, so it includes the work between them (evaluation, a checkpoint, the log). Laps
    divide the whole step. The time in which this thread was ready to run but had no core is a separate lap,
    so that no other part looks slow because other processes use the cores.
    """

    _LEAST, _MOST = 20, 101  # fewest and most steps in the median

    def __init__(self):
        self._spent: collections.deque[dict[str, float]] = collections.deque(maxlen=self._MOST)
        self._laps: dict[str, float] = {}
        self._queue = CoreQueue()
        self._last = self._now()

    def lap(self, name: str) -> float:
        """Ends a lap, assigns the time since the previous lap to `name`, and returns it in s."""
        now = self._now()
        passed, queued = (after - before for before, after in zip(self._last, now))
        self._last = now
        for part, seconds in ((name, passed - queued), ("waiting for a core", queued)):
            self._laps[part] = self._laps.get(part, 0.0) + seconds
        return passed

    def step(self, *, saving: bool) -> dict[str, Any]:
        """Ends a step. The caller ends a lap first.

        Args:
          saving: whether a checkpoint is being written in the background.

        Returns:
          {"perf/seconds": duration in s}, and for a slow step "perf/slow": the laps that caused the delay.
        """
        laps, self._laps = self._laps, {}
        seconds = sum(laps.values())
        record: dict[str, Any] = {"perf/seconds": seconds}
        if len(self._spent) >= self._LEAST:
            if seconds > 3 * statistics.median(sum(other.values()) for other in self._spent):
                record["perf/slow"] = _where(laps, self._spent)
                record["perf/slow"] += " while a checkpoint was written" * saving
        self._spent.append(laps)
        return record

    def close(self) -> None:
        """Closes the file of scheduler statistics."""
        self._queue.close()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._queue.seconds()


class CoreQueue:
    """The time that the creating thread has waited for a core, as Linux reports it; 0 on other systems."""

    def __init__(self):
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)

    def seconds(self) -> float:
        """Seconds of waiting since the thread began."""
        # The fields are: nanoseconds on a core, nanoseconds of waiting for a core, and the number of time
        # slices.
        return int(os.pread(self._file.fileno(), 80, 0).split()[1]) / 1e9 if self._file else 0.0

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()


def _where(laps: dict[str, float], before: Iterable[dict[str, float]]) -> str:
    """The laps that took longer than usual, longest first: the fewest that explain half of the delay.

    >>> usual = [{"data": 0.1, "device": 0.9}] * 3
    >>> _where({"data": 0.2, "device": 2.9}, usual), _where({"data": 1.1, "log": 0.9, "device": 0.9}, usual)
    ('device', 'data')
    """
    more = {
        name: seconds - statistics.median(other.get(name, 0.0) for other in before)
        for name, seconds in laps.items()
    }
    half, named = sum(max(seconds, 0.0) for seconds in more.values()) / 2, []
    for name in sorted(more, key=lambda name: more[name], reverse=True):
        named.append(name)
        half -= more[name]
        if half <= 0:
            break
    return ", ".join(named)
