"""Measures the throughput of a run, and the time of each step."""

import contextlib
from collections.abc import Iterator
from typing import Any

from swjax.models import clip
from swjax.training.step_clock import StepClock
from swjax.training.throughput import Meter

# Laps that throughput excludes.
NO_TRAINING = ("compilation", "evaluation", "saving", "rollback", "profile")


class Timing:
    """Throughput between two log lines, and the laps of each step.

    Args:
      batch_size: examples per step, over all devices.
      model: the model configuration, which determines the FLOPs of a step, forward and backward.
    """

    def __init__(self, batch_size: int, model: clip.CLIPConfig):
        self._meter = Meter(batch_size, 3 * clip.flops_per_example(model))
        self._clock = StepClock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside the context as one step's wait for data."""
        with self._meter.waiting():
            yield
        self._clock.lap("data")

    def lap(self, name: str) -> float:
        """Assigns the time since the previous lap to `name`, one of `NO_TRAINING` or a part of training.

        Returns:
          The time in s.
        """
        seconds = self._clock.lap(name)
        if name in NO_TRAINING:
            self._meter.leave_out(seconds)
        return seconds

    def step(self, *, saving: bool) -> dict[str, Any]:
        """Ends a step; see `StepClock.step`."""
        return self._clock.step(saving=saving)

    def restart(self) -> float:
        """Starts a new window of throughput; returns the seconds of the previous window."""
        return self._meter.restart()

    def window(self) -> dict[str, float | None]:
        """Returns the throughput of the window, see `Meter.read`, and starts a new window."""
        measured = self._meter.read()
        self._meter.restart()
        return measured

    def close(self) -> None:
        """Closes the file of scheduler statistics."""
        self._clock.close()
