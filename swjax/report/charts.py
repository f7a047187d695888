"""The report's charts. Each is drawn twice, for light and dark pages, and is readable on a phone."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swjax.diagnostics import Rules, names
from swjax.report.records import Series, blocks, smooth
from swjax.safe_files import write_atomically

if TYPE_CHECKING:  # matplotlib is slow to load
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RMS_EVENT = Rules.rms  # threshold above which the patch embedding is "stuck in the past"
PATCH_RMS = f"{names.RMS}vision/patch_embed/kernel"
FEATURES = f"{names.FEATURES}vision"
# Regular expressions of the metrics that the charts and the page read; the log has hundreds of other columns.
METRICS = (
    r"train/",
    r"perf/",
    r"data/skipped$",
    r"zeroshot/",
    r"[^/]+/(image_to_text|text_to_image)_",
    PATCH_RMS + "$",
    FEATURES + "/",
)

Metrics = dict[str, Series]


@dataclasses.dataclass(frozen=True)
class Theme:
    """The colors of a light or dark page."""

    name: str
    surface: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, str, str]
    ramp: tuple[str, str]  # colors of the first and the last block


LIGHT = Theme(
    name="light",
    surface="#ffffff",
    ink="#1b1f24",
    muted="#667085",
    grid="#e4e7ec",
    series=("#2563eb", "#c2410c", "#0f766e"),
    ramp=("#bcd4fb", "#1e3a8a"),
)
DARK = Theme(
    name="dark",
    surface="#171a21",
    ink="#e6e9ef",
    muted="#98a2b3",
    grid="#2b303b",
    series=("#7aa7ff", "#fb923c", "#4fd1b5"),
    ramp=("#2b4a86", "#c9dcff"),
)


_LABEL_HEIGHT = 0.17  # height of two lines of text, as a share of a chart's axis


# Draws data into a figure, in the colors of a theme, and returns the caption.
Draw = Callable[["Figure", Any, Theme], str]


class Missing(Exception):
    """The log lacks the metrics of a chart; the message names them and the config key that enables them."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart of the page.

    Attributes:
      title: text above the chart.
      caption: text below the chart, or the reason why it could not be drawn.
      pictures: {name of the theme: PNG}; {} if it could not be drawn.
    """

    title: str
    caption: str
    pictures: dict[str, bytes]


def draw_all(metrics: Metrics, folder: Path) -> list[Chart]:
    """Draws every chart whose metrics are recorded.

    Args:
      metrics: columns of the log.
      folder: directory for <name>.png and <name>-dark.png; files of charts without metrics are removed.

    Returns:
      The charts in the page's order.
    """
    drawn = {name: drawn_chart(title, draw, metrics) for name, (title, draw) in CHARTS.items()}
    for name, chart in drawn.items():
        for theme, ending in (("light", ".png"), ("dark", "-dark.png")):
            path = folder / f"{name}{ending}"
            if theme in chart.pictures:
                write_atomically(path, chart.pictures[theme])
            else:
                path.unlink(missing_ok=True)
    return list(drawn.values())


def drawn_chart(title: str, draw: Draw, data: Any) -> Chart:
    """Draws a chart, see `pngs`; without its data, its caption says what is missing."""
    try:
        return Chart(title, *pngs(draw, data))
    except Missing as reason:
        return Chart(title, str(reason), {})


def pngs(draw: Draw, data: Any) -> tuple[str, dict[str, bytes]]:
    """Draws a chart for both themes.

    Args:
      draw: draws `data` into a figure, and returns the caption.
      data: what the chart shows.

    Returns:
      (caption, {name of the theme: PNG}).

    Raises:
      Missing: the data of the chart are missing.
    """
    drawn = {theme.name: _png(draw, data, theme) for theme in (LIGHT, DARK)}
    return drawn["light"][0], {name: png for name, (_, png) in drawn.items()}


def _png(draw: Draw, data: Any, theme: Theme) -> tuple[str, bytes]:
    from matplotlib import rc_context  # imported here: slow to load, and only the report needs it
    from matplotlib.figure import Figure

    style: Any = {  # matplotlib's type stubs list every key
        "font.size": 9.5,
        "text.color": theme.ink,
        "axes.labelcolor": theme.muted,
        "axes.edgecolor": theme.grid,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.facecolor": theme.surface,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "text.parse_math": False,  # names of tensors and runs may contain dollars
    }
    file = io.BytesIO()
    with rc_context(style):
        figure = Figure(figsize=(4.8, 2.9), layout="constrained", facecolor=theme.surface)
        caption = draw(figure, data, theme)
        for axes in figure.axes:
            _widen(axes)
        figure.savefig(file, dpi=200, format="png")
    return caption, file.getvalue()


def _widen(axes: "Axes") -> None:
    """Shows the steps from 0 if there is only one, around which matplotlib draws an axis of 5%."""
    first, last = axes.dataLim.intervalx
    if first == last > 0 and axes.get_xlabel() == "step":
        axes.set_xlim(0, 1.02 * last)


def draw_loss(figure: "Figure", metrics: Metrics, theme: Theme) -> str:
    """Draws the training loss of every step, and its running mean."""
    loss = _need(metrics, "train/loss", "the run has not logged a step yet")
    axes = lay_out(figure.subplots(), "step")
    mean = smooth(loss.value, window=max(5, len(loss.value) // 40))
    axes.plot(loss.step, loss.value, color=theme.series[0], alpha=0.3, linewidth=0.8)
    axes.plot(loss.step, mean, color=theme.series[0])
    bad = np.flatnonzero(~np.isfinite(loss.value))
    if len(bad):
        return f"Not finite in {len(bad)} of {len(mean)} steps, first at step {loss.step[bad[0]]}."
    return f"Every step, and a running mean, which ends at {mean[-1]:.3g}."


def draw_accuracy(figure: "Figure", metrics: Metrics, theme: Theme) -> str:
    """Draws zero-shot and retrieval scores of the evaluations during training, of one set each."""
    top1 = _find(metrics, "_top1")
    names = {
        "retrieval R@10": _find(metrics, "/image_to_text_R@10"),
        "zero-shot top-5": _find(metrics, "_top5"),
        "zero-shot top-1": top1,
    }
    shown = {label: metrics[name] for label, name in names.items() if name}
    if not shown:
        raise Missing(
            "No evaluation during training in metrics.jsonl: set config.eval.every_steps to see "
            "accuracy rise."
        )
    axes = lay_out(figure.subplots(), "step")
    for series, color in zip(shown.values(), theme.series, strict=False):
        axes.plot(series.step, 100 * series.value, color=color, marker="o", markersize=3.5)
    axes.yaxis.set_major_formatter("{x:g}%")
    axes.set_ylim(bottom=0)
    steps = [metrics[name].step[-1] for name in ("train/loss", *filter(None, names.values()))
             if name in metrics]  # fmt: skip
    axes.set_xlim(0, 1.02 * max(steps))
    ends = np.array([100 * series.last for series in shown.values()])
    heights = apart(ends, _LABEL_HEIGHT * axes.get_ylim()[1])
    for (label, series), color, height in zip(shown.items(), theme.series, heights, strict=False):
        note(axes, (series.step[-1], height), f"{label}\n{series.last:.1%}", color)
    text = f"In the log: {', '.join(name for name in names.values() if name)}"
    chance = metrics.get(top1.replace("_top1", "_chance_top1")) if top1 else None
    return text + (f"; chance is {percent(chance.last)} for top-1." if chance else ".")


def draw_rms(figure: "Figure", metrics: Metrics, theme: Theme) -> str:
    """Draws the RMS of the patch embedding's update, with the thresholds of clipping and of an RMS event."""
    rms = _need(metrics, PATCH_RMS, "set config.diagnostics.rms; a frozen parameter has none")
    axes = lay_out(figure.subplots(), "step")
    axes.plot(rms.step, rms.value, color=theme.series[0], linewidth=1.0)
    events = rms.value >= RMS_EVENT
    axes.plot(rms.step[events], rms.value[events], ".", color=theme.series[1], markersize=5)
    axes.set_ylim(0, max(3.0, 1.08 * np.nanmax(rms.value, initial=0.0)))
    for level, text in ((1.0, "lags\nabove 1"), (RMS_EVENT, f"RMS event\nfrom {RMS_EVENT}")):
        axes.axhline(level, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
        note(axes, (1, level), text, theme.muted, xycoords=("axes fraction", "data"))
    return (
        f"Above 1 the second moment lags behind the gradient. RMS reached {RMS_EVENT} in "
        f"{int(events.sum())} of {len(events)} steps."
    )


def draw_features(figure: "Figure", metrics: Metrics, theme: Theme) -> str:
    """Draws the mean magnitude of each vision block's output."""
    from matplotlib.colors import LinearSegmentedColormap

    series = blocks(metrics, FEATURES)
    if not series:
        raise Missing(f"No {FEATURES}/<block> in metrics.jsonl: set config.diagnostics.features.")
    axes = lay_out(figure.subplots(), "step")
    ramp = LinearSegmentedColormap.from_list("blocks", theme.ramp)
    window = max(1, len(series[0].value) // 100)
    ends = [smooth(s.value, window) for s in series]
    for i, (block, values) in enumerate(zip(series, ends, strict=True)):
        axes.plot(block.step, values, color=ramp(i / max(1, len(series) - 1)), linewidth=1.4)
    labels = {0: "first block", len(series) - 1: "last block"} if len(series) > 1 else {0: "block"}
    for i, text in labels.items():
        note(axes, (series[i].step[-1], ends[i][-1]), text, theme.ink)
    axes.set_ylim(bottom=0)
    text = (
        f"Mean |x| of the output of each of the {len(series)} vision blocks, from pale (first) "
        f"to strong (last)."
    )
    first, last = ends[0][-1], ends[-1][-1]
    return text + (
        f" At the end, the last block has {last / first:.2g} times the first." if first > 0 else ""
    )


def draw_optimizer(figure: "Figure", metrics: Metrics, theme: Theme) -> str:
    """Draws the learning rate, the gradient norm and the logit scale."""
    labels = {
        "learning rate": "train/learning_rate",
        "gradient norm": "train/grad_norm",
        "logit scale": "train/logit_scale",
    }
    shown = {label: metrics[name] for label, name in labels.items() if name in metrics}
    if not shown:
        raise Missing(
            "No train/learning_rate, train/grad_norm or train/logit_scale in metrics.jsonl."
        )
    rows = np.ravel(figure.subplots(len(shown), sharex=True))
    for axes, (label, series) in zip(rows, shown.items(), strict=True):
        lay_out(axes, "step" if axes is rows[-1] else "")
        axes.plot(series.step, series.value, color=theme.series[0], linewidth=1.2)
        axes.set_title(label, loc="left", fontsize=9.5, color=theme.ink, pad=3)
        axes.locator_params(axis="y", nbins=3)
    is_sigmoid = "train/logit_bias" in metrics  # its logit scale has no limit
    return "" if is_sigmoid else "The logit scale is clipped to at most 100."


def draw_throughput(figure: "Figure", metrics: Metrics, theme: Theme) -> str:
    """Draws samples per second and device, and the share of time spent waiting for data."""
    rate = _need(metrics, "perf/samples_per_sec_per_device", "the run was too short to measure")
    axes = lay_out(figure.subplots(), "step")
    axes.plot(rate.step, rate.value, color=theme.series[0], drawstyle="steps-post")
    axes.set_ylim(bottom=0)
    text = "Samples per second and device, without compilation, evaluation and saving."
    wait = metrics.get("perf/data_wait_frac")
    if wait and np.isfinite(wait.value).any():
        text += f" Waiting for data: {np.nanmean(wait.value):.0%} of the time."
    return text


CHARTS = {
    "loss": ("Training loss", draw_loss),
    "accuracy": ("Accuracy in evaluation", draw_accuracy),
    "rms": ("RMS of the patch embedding", draw_rms),
    "features": ("Feature magnitude by block", draw_features),
    "optimizer": ("Optimizer", draw_optimizer),
    "throughput": ("Throughput", draw_throughput),
}


def lay_out(axes: "Axes", label: str) -> "Axes":
    """Puts the label of the x axis into its corner, where it needs no line of its own."""
    axes.margins(x=0.02)
    if label == "step":
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel(label, loc="right")
    return axes


def apart(heights: np.ndarray, gap: float) -> np.ndarray:
    """Moves labels up until they are `gap` apart, starting with the lowest; NaN is unchanged.

    >>> apart(np.array([64.0, 60.0, 10.0]), 8.0)
    array([68., 60., 10.])
    """
    moved, lowest = heights.copy(), -np.inf
    for i in np.argsort(heights):  # NaN sorts last
        moved[i] = np.maximum(heights[i], lowest)
        lowest = moved[i] + gap
    return moved


def note(axes: "Axes", point: tuple[float, float], text: str, color: str, **kwargs: Any) -> None:
    """Writes text to the right of a point, outside the axes if the point is at their edge."""
    axes.annotate(
        text,
        point,
        xytext=(7, 0),
        textcoords="offset points",
        color=color,
        va="center",
        annotation_clip=False,
        **kwargs,
    )


def _need(metrics: Metrics, name: str, why: str) -> Series:
    if name not in metrics:
        raise Missing(f"No {name} in metrics.jsonl: {why}.")
    if not np.isfinite(metrics[name].value).any():
        raise Missing(f"{name} is not finite at any step.")
    return metrics[name]


def _find(metrics: Metrics, ending: str) -> str | None:
    """The first metric with this ending that is not a chance score."""
    return next((name for name in metrics if name.endswith(ending) and "chance" not in name), None)


def percent(fraction: float | None) -> str:
    """
    >>> percent(0.213), percent(0.00244), percent(None)
    ('21.3%', '0.24%', '')
    """
    if fraction is None:
        return ""
    return f"{fraction:.2%}" if fraction < 0.01 else f"{fraction:.1%}"
