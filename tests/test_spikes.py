"""Detection of planted spikes, and the paper's count of loss spikes that follow RMS events."""

import math

import numpy as np
import pytest

from swjax.diagnostics.spikes import Detector, Rules, Watch, align, analyse

PATCH, MIDDLE = "vision/patch_embed/kernel", "vision/blocks/attn/q/kernel/14"


def run(steps=20_000, seed=0):
    """Returns (steps, loss) of a run without spikes: a falling, noisy loss."""
    rng = np.random.default_rng(seed)
    step = np.arange(1, steps + 1)
    return step, 1 + 8 * np.exp(-step / 4000) + 0.05 * rng.standard_normal(steps)


def planted(loss_spikes=30, followed=28, seed=0):
    """Returns a series as in the paper: random loss spikes, most of them 1 to 8 steps after an RMS event."""
    rng = np.random.default_rng(seed)
    step, loss = run(seed=seed)
    patch, middle = (rng.uniform(0.7, 1.2, len(step)) for _ in range(2))
    starts = rng.choice(np.arange(1200, 19_900, 60), loss_spikes, replace=False)
    for i, start in enumerate(starts):
        loss[start - 1 : start + 4] += 0.6
        if i < followed:
            patch[start - 1 - rng.integers(1, 9)] = rng.uniform(2.4, 6)
    middle[rng.choice(np.arange(1200, 19_900, 60) + 30, 30, replace=False)] = 3.0
    return step, loss, {PATCH: patch, MIDDLE: middle}, np.sort(starts)


def test_the_papers_count():
    """28 of 30 loss spikes follow an RMS event of the patch embedding, about 1% by chance; none another's."""
    step, loss, rms, starts = planted()
    found = analyse(step, loss, rms)
    assert [event.start for event in found.loss] == starts.tolist()
    patch, middle = found.alignments
    assert (patch.name, patch.followed, patch.loss_events) == (PATCH, 28, 30)
    assert patch.rms_events == 28
    assert 0.005 < patch.chance < 0.02
    assert patch.p_value == 1 / 19_000  # the smallest possible: no other shift has as many matches
    assert (middle.name, middle.followed) == (MIDDLE, 0) and middle.p_value == 1
    led = [event for event in found.loss if event.leaders[0][0] == PATCH]
    assert len(led) >= 28


def test_no_events_in_noise():
    found = analyse(*run())
    assert found.loss == [] and found.rms == {} and found.alignments == []
    assert found.rules == Rules() and found.steps == (1001, 20_000)


def test_chance_is_what_random_placement_gives():
    """The share that `align` expects by chance is the mean share of randomly placed RMS events."""
    rng = np.random.default_rng(0)
    losses = rng.choice(np.arange(1, 2001), 40, replace=False).tolist()
    rms = np.arange(50, 2000, 100).tolist()
    expected = align("x", rms, losses, (1, 2000), Rules()).chance
    placed = [
        align("x", rng.choice(1990, 20).tolist(), losses, (1, 2000), Rules()) for _ in range(200)
    ]
    counts = [a.followed / a.loss_events for a in placed]
    assert expected == 20 * 8 / 2000
    assert abs(np.mean(counts) - expected) < 4 * np.std(counts) / math.sqrt(len(counts)) + 0.002
    assert np.mean([a.p_value < 0.05 for a in placed]) <= 0.1  # the p-value is calibrated


@pytest.mark.parametrize(
    ("deviating", "events"),
    [
        ([500], []),  # one deviation is noise
        ([500, 509], [(500, 509)]),
        ([500, 510], []),  # 10 steps apart
        ([500, 501, 511], [(500, 511)]),  # merged, because they are within 10 steps
        ([500, 501, 512, 513], [(500, 501), (512, 513)]),
    ],
)
def test_several_deviations_make_a_loss_event_and_near_ones_merge(deviating, events):
    loss = 1 + 0.01 * np.sin(np.arange(1, 801))
    loss[np.array(deviating) - 1] = 2
    found = analyse(np.arange(1, 801), loss)
    assert [(event.start, event.end) for event in found.loss] == events


@pytest.mark.parametrize(("step", "follows"), [(499, 1), (492, 1), (491, 0), (500, 0)])
def test_what_follows_lies_one_to_eight_steps_later(step, follows):
    loss = 1 + 0.01 * np.sin(np.arange(1, 801))
    loss[499:502] = 2
    rms = np.ones(800)
    rms[step - 1] = 2.3
    (alignment,) = analyse(np.arange(1, 801), loss, {"a": rms}).alignments
    assert alignment.followed == follows


def test_an_event_at_the_end_is_not_followed_by_a_spike_at_the_beginning():
    """The shifts of the test wrap around the run, the observed events do not."""
    found = align("w", [98], [2, 50], (1, 100), Rules())
    assert (found.followed, found.p_value) == (0, 1.0)


def test_the_beginning_is_ignored():
    step, loss, rms, _ = planted()
    loss[500:505] += 5
    rms[PATCH][495] = 9
    found = analyse(step, loss, rms)
    assert min(event.start for event in found.loss) > 1000
    assert min(event.start for event in found.rms[PATCH]) > 1000


def test_a_loss_that_is_not_finite_is_an_event_and_leaves_the_statistics_alone():
    loss = 1 + 0.01 * np.sin(np.arange(1, 801))
    loss[[400, 402]] = np.nan, np.inf
    loss[600:603] = 2
    found = analyse(np.arange(1, 801), loss)
    assert [(event.start, event.peak) for event in found.loss] == [(401, math.inf), (601, 2.0)]


def test_online_finds_what_the_log_shows():
    step, loss, rms, _ = planted(seed=1)
    detector, reported = Detector(), []
    for i in range(len(step)):
        values = {name: float(column[i]) for name, column in rms.items()}
        reported += detector.update(int(step[i]), float(loss[i]), values)
    found = analyse(step, loss, rms)
    assert detector.loss == found.loss and detector.rms == found.rms
    assert sorted(e.start for e in reported if e.name == "loss") == [e.start for e in found.loss]


def test_mistakes_are_said_in_one_line():
    detector = Detector()
    detector.update(5, 1.0)
    with pytest.raises(ValueError, match=r"^steps must increase, got 5 after 5: .*"):
        detector.update(5, 1.0)
    with pytest.raises(ValueError, match=r"^'x' must have one value per step, 3, got 2$"):
        analyse(np.arange(3), np.ones(3), {"x": np.ones(2)})
    with pytest.raises(ValueError, match="^Rules: deviations must be at least 1, got 0$"):
        Rules(deviations=0)
    for name, value in (("rms", -1), ("rms", math.nan), ("sigmas", -1.0), ("sigmas", math.nan)):
        with pytest.raises(ValueError, match=f"^Rules: {name} must be at least 0, got {value}$"):
            Rules(**{name: value})
    with pytest.raises(ValueError, match=r"^Rules: lead must be .*, got \(8, 1\)$"):
        Rules(lead=(8, 1))


def test_a_log_without_steps():
    found = analyse(np.array([], int), np.array([]))
    assert found.loss == [] and found.alignments == [] and found.steps is None


def short(first, steps):
    """Returns (steps, loss, {"a": RMS}): a loss spike at the 221st step, 3 steps after an RMS event."""
    step = np.arange(first, first + steps)
    loss = 1 + 0.01 * np.sin(np.arange(steps))
    rms = np.ones(steps)
    loss[220:223], rms[[40, 217]] = 2, 3
    return step, loss, {"a": rms}


@pytest.mark.parametrize("first", [1, 5001])
def test_the_range_begins_at_the_first_judged_step(first):
    """It is the first with a full window, wherever the log starts; chance and p are those of the range."""
    found = analyse(*short(first, 400))
    assert found.steps == (first + 100, first + 399)
    assert [event.start for event in found.loss] == [first + 220]
    (alignment,) = found.alignments  # the RMS event before the range does not count
    assert (alignment.rms_events, alignment.followed, alignment.loss_events) == (1, 1, 1)
    assert alignment.chance == pytest.approx(8 / 300)
    assert alignment.p_value == pytest.approx(8 / 300)


def test_losses_that_are_not_finite_are_not_in_the_window():
    step, loss, rms = short(1, 400)
    loss[10] = np.nan  # ignored
    loss[50] = np.nan  # an event before the first judged step
    found = analyse(step, loss, rms)
    assert found.steps == (103, 400) and found.finite == 398
    assert [event.start for event in found.loss] == [221]  # one deviation alone is none
    loss[51] = np.nan
    found = analyse(step, loss, rms)
    assert [event.start for event in found.loss] == [51, 221]
    assert found.alignments[0].loss_events == 1


@pytest.mark.parametrize(("steps", "changes"), [(90, {}), (100, {}), (400, {"ignore": 400})])
def test_no_step_could_be_judged(steps, changes):
    loss = np.ones(steps)
    loss[50:53] = 1000
    found = analyse(np.arange(1, steps + 1), loss, rules=Rules.of_run(steps, **changes))
    assert found.steps is None and found.finite == steps and found.loss == []


def test_every_step_is_needed():
    step, loss, _ = short(1, 400)
    with pytest.raises(ValueError, match="need the loss of every step, .* has one step in 10: log"):
        analyse(10 * step, loss)
    kept = np.arange(400) % 50 != 0  # some steps may be missing
    assert analyse(step[kept], loss[kept]).steps == (104, 400)


def test_watch_reads_records_of_a_log():
    """null stands for a value that is not finite."""
    watch = Watch(Rules(ignore=0, window=20))
    lines = []
    for step in range(1, 61):
        record = {"step": step, "train/loss": 1.0, "train/grad_norm": 9.0, "train/nonfinite": "w"}
        record |= {"stability/rms/a": 3.0 if step == 47 else None}
        record |= {"train/loss": None} if step in (50, 51) else {}
        lines += watch.update([record, {"step": step, "quantization/sqnr": 40.0}])
    assert lines == ["loss spike at step 50, not finite; before it the RMS of a was 3 (step 47)"]
