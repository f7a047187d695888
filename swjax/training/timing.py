"""What the clock says about a run: its throughput, and the time of each step."""

import contextlib
from collections.abc import Iterator
from typing import Any

from swjax.models import clip
from swjax.training.step_clock import StepClock
from swjax.training.throughput import Meter

NO_TRAINING = ("evaluation", "rollback", "profile")  # laps that throughput leaves out


class Timing:
    """Throughput between two lines of the log, and the laps of each step.

    Args:
      batch_size: examples a step, over all devices.
      model: its FLOPs, forward and backward, are those of the step.
    """

    def __init__(self, batch_size: int, model: clip.CLIPConfig):
        self._meter = Meter(batch_size, 3 * clip.flops_per_example(model))
        self._clock = StepClock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in this context is one step's wait for data."""
        with self._meter.waiting():
            yield
        self._clock.lap("data")

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`, one of `NO_TRAINING` or a part of training."""
        if name in NO_TRAINING:
            self._meter.restart()
        self._clock.lap(name)

    def step(self, *, saving: bool) -> dict[str, Any]:
        """Ends a step; see `StepClock.step`."""
        return self._clock.step(saving=saving)

    def restart(self) -> float:
        """Begins a new window of throughput; returns the seconds of the old one."""
        return self._meter.restart()

    def window(self) -> dict[str, float | None]:
        """The throughput since the last window, see `Meter.read`, and begins a new window."""
        measured = self._meter.read()
        self._meter.restart()
        return measured

    def close(self) -> None:
        """Closes what it reads times from."""
        self._clock.close()
