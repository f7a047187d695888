"""The charts of the page about loss spikes."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from swjax.diagnostics.names import OPERANDS, RMS
from swjax.diagnostics.spikes import Analysis, Event
from swjax.report.charts import Draw, Missing, Theme, lay_out, note
from swjax.report.records import Series, at, smooth

if TYPE_CHECKING:  # matplotlib is slow to load
    from matplotlib.figure import Figure

AROUND = 30  # steps before and after an event
PATCH = "vision/patch_embed/kernel"


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of the charts.

    Attributes:
      loss: loss of every step.
      rms: {tensor: RMS at the steps of the loss}.
      metrics: other columns of the log.
      analysis: analysis of the loss and the RMS.
    """

    loss: Series
    rms: dict[str, np.ndarray]
    metrics: dict[str, Series]
    analysis: Analysis


def draw_loss(figure: "Figure", data: Data, theme: Theme) -> str:
    """Draws the loss and its spikes."""
    axes, loss = lay_out(figure.subplots(), "step"), data.loss
    mean = smooth(loss.value, window=max(5, len(loss.value) // 40))
    axes.plot(loss.step, loss.value, color=theme.series[0], alpha=0.35, linewidth=0.8)
    axes.plot(loss.step, mean, color=theme.series[0])
    events = data.analysis.loss
    for event in events:
        axes.axvline(event.start, color=theme.series[1], linewidth=0.8, alpha=0.55, zorder=0)
    finite = [event for event in events if np.isfinite(event.peak)]
    axes.plot([e.start for e in finite], [e.peak for e in finite], ".", color=theme.series[1])
    steps = data.analysis.steps
    _ignored(axes, data, theme, steps[0] - 1 if steps else loss.step[-1])
    return (
        f"Every step, and a running mean. Loss spikes in orange: {len(events)}. "
        f"The losses of grey steps are not judged."
    )


def draw_rms(figure: "Figure", data: Data, theme: Theme) -> str:
    """Draws the RMS of the tensor that best precedes loss spikes, and that of the patch embedding."""
    if not any(np.isfinite(values).any() for values in data.rms.values()):
        raise Missing(
            f"No {RMS} in metrics.jsonl: set config.diagnostics.rms, or record "
            "swjax.diagnostics.rms(opt_state)."
        )
    name = _watched(data)
    axes, rms, rules = lay_out(figure.subplots(), "step"), data.rms[name], data.analysis.rules
    for event in data.analysis.loss:
        axes.axvline(event.start, color=theme.series[1], linewidth=0.8, alpha=0.55, zorder=0)
    axes.plot(data.loss.step, rms, color=theme.series[0], linewidth=0.9)
    axes.axhline(rules.rms, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    note(
        axes,
        (1, rules.rms),
        f"event\nfrom {rules.rms}",
        theme.muted,
        xycoords=("axes fraction", "data"),
    )
    axes.set_ylim(0, max(3.0, 1.08 * np.nanmax(rms, initial=0.0)))
    _ignored(axes, data, theme, rules.ignore)
    count = len(data.analysis.rms.get(name, ()))
    return f"{name}. RMS events: {count}. Loss spikes in orange."


def draw_tensors(figure: "Figure", data: Data, theme: Theme) -> str:
    """Draws the share of spikes that follow each tensor's RMS events, and the share expected by chance."""
    shown = [a for a in data.analysis.alignments if a.loss_events][:10][::-1]
    if not shown:
        raise Missing("There is no loss spike, or no RMS event before one.")
    axes = figure.subplots()
    lay_out(axes, "share of the loss spikes")
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    rows = np.arange(len(shown))
    share = [a.followed / a.loss_events for a in shown]
    axes.barh(rows, share, height=0.62, color=theme.series[0])
    axes.plot([a.chance for a in shown], rows, "|", color=theme.series[1], markersize=11, mew=2)
    axes.set_yticks(rows, [_short(a.name) for a in shown], fontsize=7.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    return "Share of spikes that follow an RMS event of the tensor; orange: expected by chance."


def draw_quantization(figure: "Figure", data: Data, theme: Theme) -> str:
    """Draws the lowest signal-to-quantization-noise ratio over layers, for each operand."""
    prefix = "quantization/sqnr_db/"
    names = [name for name in data.metrics if name.startswith(prefix)]
    axes, worst = None, {}
    # The operands of the weight gradient have the color of x and of g, and dashes.
    colors = (*theme.series, theme.series[0], theme.series[2])
    for operand, color in zip(OPERANDS, colors, strict=True):
        own = [name for name in names if _operand(name) == operand]
        if not own:
            continue
        step = np.unique(np.concatenate([data.metrics[name].step for name in own]))
        values = np.array([at(step, data.metrics[name]) for name in own])
        measured = np.isfinite(values).any(axis=0)
        if not measured.any():
            continue
        step, values = step[measured], values[:, measured]
        axes, lowest = axes or lay_out(figure.subplots(), "step"), np.nanmin(values, axis=0)
        dashes = "--" if operand.startswith("wgrad") else "-"
        axes.plot(step, lowest, dashes, color=color, marker="o", markersize=3)
        note(axes, (step[-1], lowest[-1]), operand, color)
        worst[operand] = own[int(np.nanargmin(values[:, -1]))].removeprefix(prefix)
    if axes is None:
        raise Missing(
            "No quantization/ in metrics.jsonl: set config.diagnostics.every_steps below the number of "
            "steps, or record swjax.diagnostics.measure(...)."
        )
    axes.set_ylabel("dB")
    listed = ", ".join(worst.values())
    return f"Lowest SQNR over layers, by operand. At the end of the run: {listed}."


CHARTS = (
    ("Training loss", draw_loss),
    ("RMS", draw_rms),
    ("Tensors whose RMS events precede loss spikes", draw_tensors),
    ("Quantization noise", draw_quantization),
)


def draw_event(event: Event) -> Draw:
    """Returns a function that draws the steps around an event: the loss above the RMS of leading tensors."""

    def draw(figure, data: Data, theme: Theme) -> str:
        step = data.loss.step
        near = (step >= event.start - AROUND) & (step <= event.end + AROUND)
        names = [name for name, _, _ in event.leaders[:3]]
        rows = np.ravel(figure.subplots(2 if names else 1, sharex=True))
        lay_out(rows[0], "" if names else "step")
        rows[0].plot(step[near], data.loss.value[near], color=theme.series[0])
        rows[0].set_title("loss", loc="left", fontsize=9.5, color=theme.ink, pad=3)
        for axes in rows:
            axes.axvspan(
                event.start - 0.5, event.end + 0.5, color=theme.series[1], alpha=0.18, lw=0
            )
        if names:
            axes = lay_out(rows[1], "step")
            for name, color in zip(names, theme.series, strict=False):
                axes.plot(step[near], data.rms[name][near], color=color, label=_short(name))
            axes.axhline(data.analysis.rules.rms, color=theme.muted, lw=1, ls=(0, (4, 3)))
            axes.set_title("RMS", loc="left", fontsize=9.5, color=theme.ink, pad=3)
            axes.legend(fontsize=7, frameon=False, loc="upper left", labelcolor=theme.ink)
        return ""

    return draw


def usual(data: Data, step: int) -> float:
    """The mean loss over the preceding steps."""
    loss, window = data.loss, data.analysis.rules.window
    before = loss.value[(loss.step < step) & (loss.step >= step - window)]
    return float(np.mean(before[np.isfinite(before)])) if np.isfinite(before).any() else np.nan


def _watched(data: Data) -> str:
    """The tensor that best precedes loss spikes, or else the patch embedding; the page shows its RMS."""
    if data.analysis.loss and data.analysis.alignments:
        return data.analysis.alignments[0].name
    largest = lambda name: np.nanmax(data.rms[name], initial=0.0)
    return PATCH if PATCH in data.rms else max(data.rms, key=largest)


def _ignored(axes, data: Data, theme: Theme, last: int) -> None:
    """Shades the steps up to `last`, which are not judged."""
    before = data.loss.step[0] - 1
    if last > before:
        axes.axvspan(before, last, color=theme.muted, alpha=0.12, lw=0)


def _short(name: str) -> str:
    """Shortens a tensor's path by the parts that many paths share.

    >>> _short("vision/blocks/mlp/fc1/kernel/11")
    'vision mlp/fc1/kernel 11'
    """
    tower, _, rest = name.partition("/blocks/")
    if not rest:
        return name
    path, _, block = rest.rpartition("/")
    return f"{tower} {path} {block}" if block.isdigit() else f"{tower} {rest}"


def _operand(name: str) -> str:
    """
    >>> _operand("quantization/sqnr_db/vision/blocks/mlp/fc1/g/3"), _operand("quantization/sqnr_db/fc/x")
    ('g', 'x')
    """
    *_, before, last = name.split("/")
    return before if last.isdigit() else last
