"""The terminal output of a run."""

import re
import shutil
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import jax

# These scores get a permanent line.
_FIRST_RANK = re.compile(r"^(val|zeroshot)/(?!.*_chance_).*_(R@1|top1)$")


class Console:
    """Shows the newest record: on a terminal in one line that is rewritten, elsewhere in separate lines.

    Only process 0 prints. Callers print other output only after `close`.

    Args:
      total: number of steps of the run.
      stream: output stream; None is standard output.
    """

    def __init__(self, total: int, stream: TextIO | None = None):
        self._total = total
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._open = False

    def say(self, text: str) -> None:
        """Prints a permanent line."""
        self._print(("\r\x1b[K" if self._open else "") + text + "\n")
        self._open = False

    def show(self, text: str) -> None:
        """Shows a transient message on a terminal until the next line; prints nothing elsewhere."""
        if self._live:
            columns = shutil.get_terminal_size().columns
            self._print(f"\r\x1b[K{text[: columns - 1]}")  # a wrapped line could not be rewritten
            self._open = True

    def update(self, record: Mapping[str, Any]) -> None:
        """Shows the step, loss and, if present, throughput of the newest record; prints scores to stay."""
        if scores := [f"{name} {record[name]:.1%}" for name in record if _FIRST_RANK.search(name)]:
            self.say(f"step {record['step']}: {', '.join(scores)}")
        line = f"step {record['step']}/{self._total}  loss {record['train/loss']:.4f}"
        if seconds := record["perf/step_seconds"]:
            rate = record["perf/samples_per_sec_per_device"] * jax.device_count()
            line += f"  {rate:.0f} samples/s  data wait {record['perf/data_wait_frac']:.0%}"
            line += f"  ETA {_clock((self._total - record['step']) * seconds)}"
        if memory := device_memory():
            line += f"  memory {memory}"
        if self._live:
            self.show(line)
        else:
            self.say(line)

    def close(self) -> None:
        """Ends the rewritten line with a newline, so that it stays."""
        if self._open:
            self._print("\n")
        self._open = False

    def _print(self, text: str) -> None:
        if jax.process_index() == 0:
            self._stream.write(text)
            self._stream.flush()


def device_memory() -> str:
    """The memory in use and its peak on this process's device with the highest peak; "" on CPUs."""
    devices = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    most: Mapping[str, int] = max(
        devices, key=lambda stats: stats.get("peak_bytes_in_use", 0), default={}
    )
    if "peak_bytes_in_use" not in most:
        return ""
    in_use, peak = (most[key] / 2**30 for key in ("bytes_in_use", "peak_bytes_in_use"))
    return f"{in_use:.1f} GiB, peak {peak:.1f}"


def _clock(seconds: float) -> str:
    """Formats a duration in seconds.

    >>> _clock(3700), _clock(65)
    ('1:01:40', '1:05')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
