"""Throughput of training: samples per second, model FLOP utilization, and the time of waiting for data."""

import contextlib
import re
import time
from collections.abc import Iterator

import jax

# Dense 16-bit peak in FLOP/s. int8 and fp8 runs use the same peak, so that recipes are comparable.
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


def peak_flops(device: jax.Device) -> float | None:
    """The device's dense 16-bit peak in FLOP/s, or None if it is unknown, as for CPUs."""
    return next((peak for kind, peak in PEAK_FLOPS if re.search(kind, device.device_kind)), None)


class Meter:
    """Measures throughput over a window of steps.

    Args:
      batch_size: examples per step, over all devices.
      flops_per_example: model FLOPs per example, forward and backward.
    """

    def __init__(self, batch_size: int, flops_per_example: float):
        self._batch_size, self._flops = batch_size, flops_per_example
        self.restart()

    def restart(self) -> float:
        """Starts a window; returns the seconds since the previous window started."""
        now = time.perf_counter()
        seconds = now - getattr(self, "_start", now)
        self._start, self._wait, self._steps = now, 0.0, 0
        return seconds

    def leave_out(self, seconds: float) -> None:
        """Excludes an interval without training, of so many seconds, from the window."""
        self._start += seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside the context as one step's wait for data."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start
        self._steps += 1

    def read(self) -> dict[str, float | None]:
        """The metrics of the window, all None if the window has no step.

        Returns:
          {"perf/samples_per_sec_per_device": examples/s, "perf/mfu": fraction of the peak (None if the peak
          is unknown), "perf/data_wait_frac": fraction of the time, "perf/step_seconds": s}.
        """
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
