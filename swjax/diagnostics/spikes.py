"""Finds loss spikes and RMS events, during a run or in its log, and tests whether spikes follow events.

The module needs only numpy. The rules are those of arXiv 2304.13013, where 28 of 30 loss spikes follow an RMS
event of the patch embedding by 1 to 8 steps. `Rules` marks the choices that the paper leaves open.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from swjax.diagnostics.names import RMS


@dataclasses.dataclass(frozen=True)
class Rules:
    """The definition of an event; all values except the first two are in steps.

    Attributes:
      rms: threshold of an RMS event; 2.3 is from section 3.4 of the paper.
      sigmas: a loss deviates if it exceeds running mean + `sigmas` running standard deviations.
      window: number of previous finite losses in the running statistics; swjax's choice. A step with fewer
        is not judged.
      deviations: number of deviations within `merge` steps that make a loss event; the paper's "multiple".
      merge: events at most this far apart are merged.
      ignore: number of steps at the beginning that are ignored.
      lead: first and last delay at which a loss event counts as following the start of an RMS event.
    """

    rms: float = 2.3
    sigmas: float = 3.2
    window: int = 100
    deviations: int = 2
    merge: int = 10
    ignore: int = 1000
    lead: tuple[int, int] = (1, 8)

    def __post_init__(self) -> None:
        least = {"rms": 0, "sigmas": 0, "window": 2, "deviations": 1, "merge": 1, "ignore": 0}
        for name, number in least.items():
            if not getattr(self, name) >= number:  # also refuses NaN
                raise ValueError(
                    f"Rules: {name} must be at least {number}, got {getattr(self, name)}"
                )
        if not 0 <= self.lead[0] <= self.lead[1]:
            raise ValueError(
                f"Rules: lead must be the first and the last number of steps, got {self.lead}"
            )

    @classmethod
    def of_run(cls, steps: int, **changes: Any) -> "Rules":
        """The rules for a run of `steps` steps; they ignore the first 1 in 20 steps, as the paper does.

        >>> Rules.of_run(20_000).ignore, Rules.of_run(600).ignore
        (1000, 30)
        """
        return cls(**({"ignore": min(1000, steps // 20)} | changes))


@dataclasses.dataclass
class Event:
    """A group of nearby steps at which one series deviates.

    Attributes:
      name: name of the series: "loss" or a tensor.
      start, end: first and last step that deviates.
      peak: largest finite value of the event; infinity if there is none.
      leaders: for a loss event, (tensor, largest RMS in the previous steps, step of that RMS), largest first.
    """

    name: str
    start: int
    end: int
    peak: float
    leaders: list[tuple[str, float, int]] = dataclasses.field(default_factory=list)


class Detector:
    """Finds events while a run trains.

    Args:
      rules: definition of an event.

    Attributes:
      loss: loss events so far, oldest first.
      rms: {tensor: its RMS events so far}.
      first: first step whose loss was judged, after `Rules.ignore` and a full window; None if there is none.

    >>> detector = Detector(Rules(ignore=0, window=20))
    >>> for step in range(1, 61):
    ...     spike = step in (50, 51)
    ...     loss = 5.0 if spike else 1.0 + 0.01 * (step % 7)
    ...     rms = {"patch_embed": 3.1 if step == 47 else 0.9, "head": 1.1}
    ...     for event in detector.update(step, loss, rms):
    ...         print(event.name, event.start, event.leaders[:1])
    patch_embed 47 []
    loss 50 [('patch_embed', 3.1, 47)]
    """

    def __init__(self, rules: Rules | None = None):
        self.rules = rules or Rules()
        self.loss: list[Event] = []
        self.rms: dict[str, list[Event]] = {}
        self._losses = _Losses(self.rules)
        self._merging = _Merging("loss", self.rules, self.rules.deviations, self.loss)
        self._merging_rms: dict[str, _Merging] = {}
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque(
            maxlen=self.rules.merge + self.rules.lead[1]
        )
        self._last = -math.inf

    @property
    def first(self) -> int | None:
        return self._losses.first

    def update(self, step: int, loss: float, rms: Mapping[str, float] | None = None) -> list[Event]:
        """Adds the values of one step.

        Args:
          step: number of the step, larger than that of the previous call.
          loss: the loss; NaN counts as a deviation.
          rms: {tensor: RMS}.

        Returns:
          Events that this step has completed or started. A loss event needs several deviations, so it may
          have started some steps earlier. Events grow as further steps deviate.

        Raises:
          ValueError: the step is not larger than the previous step.
        """
        if step <= self._last:
            raise ValueError(
                f"steps must increase, got {step} after {self._last}: after a rollback, create a new "
                f"Detector, and truncate the log"
            )
        self._last, rms = step, rms or {}
        found = [] if step <= self.rules.ignore else self._rms_events(step, rms)
        self._recent.append((step, rms))
        if self._losses.deviates(step, loss) and (event := self._merging.add(step, loss)):
            event.leaders = leaders(self._recent, event.start, self.rules)
            found.append(event)
        return found

    def _rms_events(self, step: int, rms: Mapping[str, float]) -> list[Event]:
        found = []
        for name, value in rms.items():
            if not value >= self.rules.rms:
                continue
            if name not in self._merging_rms:
                self.rms[name] = []
                self._merging_rms[name] = _Merging(name, self.rules, 1, self.rms[name])
            found.append(self._merging_rms[name].add(step, value))
        return [event for event in found if event]


class Watch:
    """Describes each loss event of a run in one line, while its records arrive.

    Args:
      rules: definition of an event.
    """

    def __init__(self, rules: Rules):
        self._rules = rules
        self.restart()

    def restart(self) -> None:
        """Discards all records, for a run that returns to an earlier step."""
        self._detector = Detector(self._rules)

    def update(self, records: Iterable[Mapping[str, Any]]) -> list[str]:
        """Adds records {"step", "train/loss", "stability/rms/<tensor>", ...}; returns a line per event.

        A value that is not finite may be None, as in metrics.jsonl. Records without a loss are skipped.

        >>> watch = Watch(Rules(ignore=0, deviations=1))
        >>> watch.update([{"step": 1, "train/loss": 5.0}, {"step": 2, "train/loss": None}])
        ['loss spike at step 2, not finite']
        """
        lines = []
        for record in records:
            if "train/loss" not in record:  # as of a step that was only measured
                continue
            values = {name: math.nan if x is None else x for name, x in record.items()}
            rms = {name.removeprefix(RMS): x for name, x in values.items() if name.startswith(RMS)}
            found = self._detector.update(record["step"], values["train/loss"], rms)
            lines += [describe(event) for event in found if event.name == "loss"]
        return lines


def describe(event: Event) -> str:
    """Describes a loss event in one line.

    >>> describe(Event("loss", 512, 514, 6.25, [("vision/patch_embed/kernel", 4.1, 509)]))
    'loss spike at step 512, up to 6.25; before it the RMS of vision/patch_embed/kernel was 4.1 (step 509)'
    """
    height = f"up to {event.peak:.3g}" if math.isfinite(event.peak) else "not finite"
    text = f"loss spike at step {event.start}, {height}"
    for name, rms, step in event.leaders[:1]:
        text += f"; before it the RMS of {name} was {rms:.2g} (step {step})"
    return text


class _Losses:
    """Detects losses that deviate from the previous losses."""

    def __init__(self, rules: Rules):
        self.first: int | None = None
        self._rules = rules
        self._window: deque[float] = deque(maxlen=rules.window)

    def deviates(self, step: int, loss: float) -> bool:
        judged = step > self._rules.ignore and len(self._window) == self._rules.window
        if judged and self.first is None:
            self.first = step
        before = np.array(self._window)
        if math.isfinite(loss):
            self._window.append(loss)
        elif step > self._rules.ignore:
            return True
        return judged and bool(loss > before.mean() + self._rules.sigmas * before.std())


class _Merging:
    """Merges the deviating steps of a series into events."""

    def __init__(self, name: str, rules: Rules, needed: int, events: list[Event]):
        self._name, self._rules, self._needed = name, rules, needed
        self._events = events
        self._waiting: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> Event | None:
        """Adds a deviating step; returns the event if this step completes a new one."""
        merge = self._rules.merge
        if self._events and step - self._events[-1].end <= merge:
            last = self._events[-1]
            last.end, last.peak = step, _peak([last.peak, value])
            return None
        waiting = [(s, v) for s, v in self._waiting if step - s < merge]
        self._waiting = [*waiting, (step, value)]
        if len(self._waiting) < self._needed:
            return None
        steps, values = zip(*self._waiting)
        self._waiting = []
        self._events.append(Event(self._name, steps[0], step, _peak(values)))
        return self._events[-1]


def _peak(values: Iterable[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.inf)


def leaders(
    recent: Iterable[tuple[int, Mapping[str, float]]], start: int, rules: Rules
) -> list[tuple[str, float, int]]:
    """The five tensors whose RMS was largest before a loss event.

    Args:
      recent: (step, {tensor: RMS}) pairs, at least of the steps in the range `rules.lead`.
      start: first step of the loss event.
      rules: give the range of preceding steps.

    Returns:
      (tensor, its largest RMS, the step of that RMS), largest first.
    """
    first, last = rules.lead
    best: dict[str, tuple[float, int]] = {}
    for step, rms in recent:
        if start - last <= step <= start - first:
            for name, value in rms.items():
                if math.isfinite(value) and value > best.get(name, (-math.inf,))[0]:
                    best[name] = (value, step)
    ranked = sorted(best.items(), key=lambda item: -item[1][0])
    return [(name, value, step) for name, (value, step) in ranked[:5]]


@dataclasses.dataclass(frozen=True)
class Alignment:
    """How often loss events follow the RMS events of one tensor, compared with chance.

    Attributes:
      name: name of the tensor.
      rms_events: number of its RMS events.
      followed: number of loss events that start `Rules.lead` steps after one of them.
      loss_events: number of loss events in the run.
      chance: expected share of followed loss events if the RMS events were at other steps.
      p_value: probability of `followed` or more by chance.
    """

    name: str
    rms_events: int
    followed: int
    loss_events: int
    chance: float
    p_value: float


def align(
    name: str, rms: Iterable[int], losses: Iterable[int], steps: tuple[int, int], rules: Rules
) -> Alignment:
    """Tests whether loss events follow RMS events more often than by chance.

    The chance is exact, not sampled: the RMS events are shifted cyclically by every possible number of steps,
    so both series keep their clusters. The p-value is the share of the shifts, including no shift, that give
    at least as many followed loss events as observed.

    Args:
      name: name of the tensor.
      rms, losses: first steps of the events.
      steps: the first and the last step to consider.
      rules: the function reads `lead`.

    >>> align("patch_embed", [100, 500], [103, 700], (1, 1000), Rules())
    Alignment(name='patch_embed', rms_events=2, followed=1, loss_events=2, chance=0.016, p_value=0.027)
    """
    first, last = steps
    length, rms, losses = last - first + 1, list(rms), list(losses)
    covered = np.zeros(max(length, 1), bool)
    after: set[int] = set()  # unlike `covered`, does not continue at the first step after the last
    for lead in range(rules.lead[0], rules.lead[1] + 1):
        covered[[(step + lead - first) % length for step in rms]] = True
        after.update(step + lead for step in rms)
    shifts = np.arange(len(covered))
    counts = sum(
        (covered[(step - first - shifts) % length].astype(int) for step in losses), 0 * shifts
    )
    followed = sum(step in after for step in losses)
    return Alignment(
        name=name,
        rms_events=len(rms),
        followed=followed,
        loss_events=len(losses),
        chance=float(covered.mean()),
        p_value=float(np.mean(counts >= followed)),
    )


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The result of `analyse`.

    Attributes:
      rules: the rules of the analysis.
      steps: the first and the last step whose loss was judged; None if there is none.
      finite: number of steps with a finite loss.
      loss: loss events, oldest first. A loss that is not finite is an event also before `steps`.
      rms: {tensor: its RMS events after `Rules.ignore`}, for tensors with events.
      alignments: alignments of the events in `steps`, smallest p-value first.
    """

    rules: Rules
    steps: tuple[int, int] | None
    finite: int
    loss: list[Event]
    rms: dict[str, list[Event]]
    alignments: list[Alignment]


def analyse(
    step: np.ndarray,
    loss: np.ndarray,
    rms: Mapping[str, np.ndarray] | None = None,
    rules: Rules | None = None,
) -> Analysis:
    """Finds the events of a whole run, and the tensors whose RMS events the loss events follow.

    Args:
      step: int [n], ascending; every step of a run, or of a part of it.
      loss: float [n]; NaN counts as a deviation.
      rms: {tensor: float [n]}; NaN at steps without an RMS.
      rules: definition of an event; default `Rules.of_run` of the last step.

    Raises:
      ValueError: the steps do not increase, most of them are missing, or lengths differ.

    >>> step = np.arange(1, 401)
    >>> loss = 1 + 0.01 * np.sin(step)
    >>> patch = np.full(400, 0.9)
    >>> for spike in (150, 300):
    ...     loss[spike : spike + 3] += 1
    ...     patch[spike - 4] = 2.9
    >>> found = analyse(step, loss, {"patch_embed": patch})
    >>> [event.start for event in found.loss], found.alignments[0].followed
    ([151, 301], 2)
    """
    rms = rms or {}
    for name, values in {"loss": loss, **rms}.items():
        if len(values) != len(step):
            raise ValueError(
                f"{name!r} must have one value per step, {len(step)}, got {len(values)}"
            )
    _require_every_step(step)
    rules = rules or Rules.of_run(int(step[-1]) if len(step) else 0)
    detector = Detector(rules)
    # Only the steps that a rule reads, which are a small part of a long log.
    high: list[dict[str, float]] = [{} for _ in step]
    for name, values in rms.items():
        for i in np.flatnonzero(np.asarray(values) >= rules.rms).tolist():
            high[i][name] = float(values[i])
    for i in range(len(step)):
        for event in detector.update(int(step[i]), float(loss[i]), high[i]):
            if event.name == "loss":
                event.leaders = _leaders(step, rms, event.start, rules)
    steps = None if detector.first is None else (detector.first, int(step[-1]))
    finite = int(np.isfinite(loss).sum())
    return Analysis(
        rules, steps, finite, detector.loss, detector.rms, _alignments(detector, steps, rules)
    )


def _require_every_step(step: np.ndarray) -> None:
    distance = int(np.median(np.diff(step))) if len(step) > 1 else 1
    if distance > 1:
        raise ValueError(
            f"the rules for loss spikes need the loss of every step, but the log has one step in {distance}: "
            f"log every step"
        )


def _alignments(detector: Detector, steps: tuple[int, int] | None, rules: Rules) -> list[Alignment]:
    """The alignments of the events that start in `steps`, smallest p-value first."""
    if steps is None:
        return []
    starts = lambda events: [event.start for event in events if event.start >= steps[0]]
    rms = {name: starts(events) for name, events in detector.rms.items()}
    losses = starts(detector.loss)
    found = [align(name, events, losses, steps, rules) for name, events in rms.items() if events]
    return sorted(found, key=lambda a: (a.p_value, -a.followed, -a.rms_events))


def _leaders(step, rms, start: int, rules: Rules):
    near = np.flatnonzero((step >= start - rules.lead[1]) & (step <= start - rules.lead[0]))
    recent = [
        (int(step[i]), {name: float(values[i]) for name, values in rms.items()}) for i in near
    ]
    return leaders(recent, start, rules)
