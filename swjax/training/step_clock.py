"""How long each step took, and where the time of a slow one went."""

import collections
import os
import statistics
import time
from collections.abc import Iterable


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
