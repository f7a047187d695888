"""How long each step took, and where the time of a slow one went."""

import collections
import contextlib
import io
import os
import statistics
import time
from collections.abc import Iterable
from typing import Any


class StepClock:
    """Times every step, and says where the time of a slow one went.

    A step is slow if it took longer than 3 times the median of those before it. It lasts from one dispatch
    to the next, so what happens between them (evaluation, a checkpoint, the log) is part of the later step.
    Laps divide it completely. The time in which this thread could run but had no core is a lap of its own:
    no part of a step seems slow because other processes have the cores.
    """

    _LEAST, _MOST = 20, 101  # fewest and most steps that the median is taken of

    def __init__(self):
        self._spent: collections.deque[dict[str, float]] = collections.deque(maxlen=self._MOST)
        self._laps: dict[str, float] = {}
        self._queue = CoreQueue()
        self._last = self._now()

    def lap(self, name: str) -> None:
        """Ends a lap: the time since the last one was spent on `name`."""
        now = self._now()
        passed, queued = (after - before for before, after in zip(self._last, now))
        self._last = now
        for part, seconds in ((name, passed - queued), ("waiting for a core", queued)):
            self._laps[part] = self._laps.get(part, 0.0) + seconds

    def step(self, *, saving: bool) -> dict[str, Any]:
        """Ends a step, at the end of a lap.

        Args:
          saving: whether a checkpoint is being written in the background.

        Returns:
          {"perf/seconds": its time}, and of a slow step "perf/slow": the laps that took it.
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
        """Closes what it reads times from."""
        self._queue.close()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._queue.seconds()


class CoreQueue:
    """How long the thread that made it has waited for a core: Linux counts it; elsewhere it is 0."""

    def __init__(self):
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)

    def seconds(self) -> float:
        """Since the thread began."""
        # Nanoseconds of computing, nanoseconds of waiting for a core, times that it got one.
        return int(os.pread(self._file.fileno(), 80, 0).split()[1]) / 1e9 if self._file else 0.0

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()


def _where(laps: dict[str, float], before: Iterable[dict[str, float]]) -> str:
    """The laps that took longer than usual, longest first: as few as explain half of the excess.

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
