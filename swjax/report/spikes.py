"""The page about the loss spikes of a run: their steps, and the RMS events and batches before each.

It needs a metrics.jsonl with train/loss and stability/rms/<tensor>, written by train.py or by
`swjax.diagnostics.Recorder`.
"""

import re
import shlex
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from swjax.diagnostics.names import RMS
from swjax.diagnostics.spikes import Alignment, Analysis, Event, Rules, analyse
from swjax.report import charts, page, records, spike_charts
from swjax.safe_files import make_folder, mask_credentials, printable, write_atomically

METRICS = re.compile(rf"train/loss$|{RMS}|quantization/sqnr_db/")
MOST_EVENTS = 12  # number of events with plots
MOST_ROWS = 12  # number of tensors in the table

Examples = Callable[[int], list[str]]


def write(
    workdir: str | Path, *, examples: Examples | None = None, **rules: Any
) -> tuple[Path, Analysis]:
    """Writes WORKDIR/report/spikes.html, a self-contained page.

    Args:
      workdir: directory of a run.
      examples: step -> the examples of its batch; raises a ValueError if they are unknown. None for runs that
        train.py did not write, which cannot be replayed.
      **rules: changes to `swjax.diagnostics.Rules.of_run`.

    Returns:
      Path of the page, and the analysis.

    Raises:
      ValueError: the log has no loss, lacks most steps, repeats a step, or has a value of a wrong type.
      OSError: the log cannot be read, or the page cannot be written.
    """
    workdir = Path(workdir)
    log = workdir / "metrics.jsonl"
    metrics = records.read(log, METRICS)
    if "train/loss" not in metrics:
        raise ValueError(
            f"{log} has no train/loss: give the workdir of a run, or record the loss under this name "
            "with swjax.diagnostics.Recorder"
        )
    loss = metrics["train/loss"]
    rms = {
        name.removeprefix(RMS): records.at(loss.step, series)
        for name, series in metrics.items()
        if name.startswith(RMS)
    }
    used = Rules.of_run(int(loss.step[-1]), **rules)
    try:
        analysis = analyse(loss.step, loss.value, rms, used)
    except ValueError as error:
        raise ValueError(f"{log}: {error}") from error
    text = _render(workdir, spike_charts.Data(loss, rms, metrics, analysis), examples)
    return write_atomically(make_folder(workdir, "report") / "spikes.html", text), analysis


def summary(analysis: Analysis) -> list[str]:
    """Summarizes the findings in a few lines."""
    if analysis.steps is None:
        found = f"{_count(len(analysis.loss))} with losses that are not finite"
        return [_unjudged(analysis), *([found] if analysis.loss else [])]
    first, last = analysis.steps
    early = sum(event.start < first for event in analysis.loss)
    judged = len(analysis.loss) - early
    lines = [f"{_count(judged)} in steps {first} to {last}"]
    if judged:
        sentences = (_sentence(a, _lead(analysis.rules)) for a in analysis.alignments[:3])
        lines += [f"  {printable(sentence)}" for sentence in sentences]
    if early:
        lines.append(f"{_count(early)} before step {first}, with losses that are not finite")
    return lines


def _count(spikes: int) -> str:
    return f"{spikes} loss spike{'' if spikes == 1 else 's'}"


def _unjudged(analysis: Analysis) -> str:
    """Says why no step could be judged, and the remedy."""
    rules = analysis.rules
    steps = f"{analysis.finite} step{'' if analysis.finite == 1 else 's'}"
    text = f"no step could be judged: the log has {steps} with a finite loss"
    if analysis.finite <= rules.window:
        return f"{text}, and the window before a judged step takes {rules.window}: lower --window"
    return f"{text}, and the steps up to {rules.ignore} do not count: lower --ignore"


def _sentence(a: Alignment, lead: str) -> str:
    return (
        f"{a.followed} of {a.loss_events} follow an RMS event of {a.name} by {lead} steps "
        f"(chance {a.chance:.1%} each, p = {a.p_value:.2g})"
    )


def _lead(rules: Rules) -> str:
    return f"{rules.lead[0]} to {rules.lead[1]}"


# ------------------------------------------------------------------------------------- the page


def _render(workdir: Path, data: spike_charts.Data, examples) -> str:
    analysis = data.analysis
    events = sorted(analysis.loss, key=lambda event: -event.peak)[:MOST_EVENTS]
    cards = [
        _event(workdir, data, event, examples)
        for event in sorted(events, key=lambda event: event.start)
    ]
    if len(analysis.loss) > len(cards):
        rest = [str(event.start) for event in analysis.loss if event not in events]
        cards.append(
            f"<p>The {len(cards)} highest are shown; others start at steps {', '.join(rest)}.</p>"
        )
    return page.fill(
        "spikes.html",
        title=f"Loss spikes of {workdir.resolve().name}",
        subtitle=_subtitle(data),
        tiles="".join(_tiles(analysis)),
        charts="".join(
            page.chart(charts.drawn_chart(*chart, data)) for chart in spike_charts.CHARTS
        ),
        alignments=_alignments(analysis),
        events="".join(cards) or _none(analysis, "There are none by these rules."),
        rules=_rules(analysis.rules),
    )


def _subtitle(data: spike_charts.Data) -> str:
    steps = data.analysis.steps
    text = f"steps {steps[0]:,} to {steps[1]:,}" if steps else _unjudged(data.analysis)
    return f"{text} · RMS of {len(data.rms)} tensors"


def _none(analysis: Analysis, text: str) -> str:
    """Why a part of the page is empty: `text`, if the steps could be judged."""
    return f"<p class='missing'>{text if analysis.steps else 'No step could be judged.'}</p>"


def _tiles(analysis: Analysis) -> Iterable[str]:
    if analysis.loss or analysis.steps:
        yield page.tile("Loss spikes", str(len(analysis.loss)), "")
    tensors = len(analysis.rms)
    total = sum(map(len, analysis.rms.values()))
    yield page.tile("RMS events", str(total), f"in {tensors} tensor{'' if tensors == 1 else 's'}")
    if analysis.alignments and analysis.alignments[0].loss_events:
        best = analysis.alignments[0]
        note = f"an RMS event of {best.name} by {_lead(analysis.rules)} steps"
        yield page.tile("Spikes that follow", f"{best.followed} of {best.loss_events}", note)
        yield page.tile(
            "By chance", charts.percent(best.chance), f"of them; p = {best.p_value:.2g}"
        )


def _alignments(analysis: Analysis) -> str:
    rules = analysis.rules
    if not analysis.loss or not analysis.steps:
        return _none(analysis, "There are no loss spikes.")
    first, last = analysis.steps
    if not analysis.alignments:
        return _none(analysis, f"No tensor's RMS reached {rules.rms} in steps {first} to {last}.")
    head = "".join(
        f"<th>{text}</th>" for text in ("Tensor", "RMS events", "Spikes that follow", "Chance", "p")
    )
    rows = "".join(
        f"<tr{' class=chance' if a.p_value > 0.05 else ''}><td class='name'>{escape(a.name)}</td>"
        f"<td>{a.rms_events}</td><td>{a.followed} of {a.loss_events}</td>"
        f"<td>{a.chance:.1%}</td><td>{a.p_value:.2g}</td></tr>"
        for a in analysis.alignments[:MOST_ROWS]
    )
    tested = len(analysis.alignments)
    return (
        f"<p>How many of the {_count(analysis.alignments[0].loss_events)} in steps {first} to {last} begin "
        f"{_lead(rules)} steps after an RMS event of a tensor in these steps, sorted by p. The chance is "
        f"exact: the tensor's events are shifted around these steps by every number of steps. {tested} "
        f"tensors had events; with so many tests, a p below {0.05 / tested:.1g} is remarkable. "
        f"Grey: p above 0.05.</p>"
        f'<div class="wide"><table class="numbers"><tr>{head}</tr>{rows}</table></div>'
        + (f"<p>{tested - MOST_ROWS} more have a larger p.</p>" if tested > MOST_ROWS else "")
    )


def _event(workdir: Path, data, event: Event, examples: Examples | None) -> str:
    _, pictures = charts.pngs(spike_charts.draw_event(event), data)
    picture = page.picture(pictures, f"loss and RMS around step {event.start}")
    steps = f"Step {event.start}" + (f" to {event.end}" if event.end > event.start else "")
    peak = "not finite" if np.isinf(event.peak) else f"up to {event.peak:.3g}"
    before = spike_charts.usual(data, event.start)
    peak += "" if np.isnan(before) else f", {before:.3g} before"
    return (
        f'<section class="card event"><h3>{steps}: loss {peak}</h3>'
        f"<div>{picture}</div><div>{_leaders(event, data.analysis.rules)}"
        f"{_batches(workdir, event, examples)}</div></section>"
    )


def _leaders(event: Event, rules: Rules) -> str:
    if not event.leaders:
        return "<p class='missing'>No RMS was recorded before it.</p>"
    rows = "".join(
        f"<tr><td class='name'>{escape(name)}</td><td>{rms:.2f}</td><td>{step}</td></tr>"
        for name, rms, step in event.leaders
    )
    return (
        f'<table class="numbers"><tr><th>Largest RMS {_lead(rules)} steps before</th><th>RMS</th>'
        f"<th>Step</th></tr>{rows}</table>"
    )


def _batches(workdir: Path, event: Event, examples: Examples | None) -> str:
    """The batches of the leading step and of the first high loss, and the command that replays them."""
    if examples is None:
        return ""
    led = event.leaders[0][2] if event.leaders else event.start
    command = f"python -m swjax diagnostics replay {shlex.quote(str(workdir))} --step={led}"
    text = f"<pre>{escape(command)}</pre>"
    for step in dict.fromkeys((led, event.start)):
        try:
            keys = examples(step)
        except ValueError as error:
            reason = escape(mask_credentials(str(error)))
            text += f"<p class='missing'>{reason}: replay to see the batch.</p>"
            continue
        items = "".join(f"<li>{escape(mask_credentials(key))}</li>" for key in keys)
        text += (
            f"<details><summary>Batch of step {step}: {len(keys)} examples</summary>"
            f"<ul>{items}</ul></details>"
        )
    return text


def _rules(rules: Rules) -> str:
    return (
        f"<p>An RMS event: RMS of at least {rules.rms}. A loss spike: the loss above its running mean by "
        f"{rules.sigmas} running standard deviations, of the {rules.window} steps before, "
        f"{rules.deviations} times within {rules.merge} steps. Events within {rules.merge} steps are "
        f"one. The first {rules.ignore:,} steps do not count. A loss is judged if {rules.window} finite "
        f"losses precede it; a loss that is not finite always deviates. These are the rules of "
        f"arXiv 2304.13013, section 3.4 and appendix D; window and the number of times are ours.</p>"
    )
