"""The page of `python -m swjax compare`."""

import math
from collections.abc import Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swjax.report import charts, page
from swjax.report.charts import Theme
from swjax.safe_files import write_atomically

if TYPE_CHECKING:  # matplotlib is slow to load
    from matplotlib.figure import Figure

KINDS = {
    "output": "Outputs of linear layers",
    "gradient": "Gradients at these outputs",
    "weight": "Gradients of parameters",
}


def write(result: dict, workdir: Path) -> Path:
    """Writes WORKDIR/compare_precision.html, a self-contained page.

    Args:
      result: result of `swjax.tools.compare_precision.compare`.
      workdir: an existing directory.

    Returns:
      Path of the page.
    """
    layers = [(title, partial(draw_errors, kind=kind)) for kind, title in KINDS.items()]
    losses = [("Training loss", draw_losses), ("Distance from the reference", draw_gap)]

    def draw(title, function) -> str:
        return page.chart(charts.drawn_chart(title, function, result))

    text = page.fill(
        "precision.html",
        title=f"{', '.join(result['layers'])} compared with {result['reference']}",
        subtitle=f"{result['examples']} examples for the layers, batches of {result['batch_size']}",
        tiles="".join(
            page.tile(f"{arm}: {kind}", f"{middle(result, arm, kind):.2%}", "median relative error")
            for arm in result["layers"]
            for kind in KINDS
        ),
        layers="".join(draw(*chart) for chart in layers),
        losses="".join(draw(*chart) for chart in losses)
        if result["losses"]
        else "<p class='missing'>No training, because of --steps=0.</p>",
        summary=page.numbers(["", *result["layers"]], _summary_rows(result)),
        table=page.numbers(["", *result["layers"]], _all_rows(result)),
        environment="<pre>" + escape("\n".join(result["environment"])) + "</pre>",
    )
    return write_atomically(workdir / "compare_precision.html", text)


def summary(result: dict) -> Iterable[str]:
    """Summarizes the comparison in a few lines of text."""
    for arm, errors in result["layers"].items():
        # NaN counts as the largest.
        names, largest = list(errors), [np.max(e) for e in errors.values()]
        worst = int(np.argmax(largest))
        medians = ", ".join(f"{kind} {middle(result, arm, kind):.2%}" for kind in KINDS)
        yield f"{arm}: median relative error {medians}; largest {largest[worst]:.2%}, {names[worst]}"
    for arm in result["losses"]:
        text = f"{arm}: loss {gap(result, arm):+.4f} from the reference"
        seeds = len(result["seeds"])
        text += f"; {seeds} seeds spread by {spread(result):.4f}" if seeds > 1 else ""
        yield text + (f"; {diverged}" if (diverged := divergence(result, arm)) else "")


def middle(result: dict, arm: str, kind: str) -> float:
    """The median of the relative errors of one kind; NaN if any error is NaN."""
    return float(np.median([e for _, e in _errors(result, arm, kind)]))


def gap(result: dict, arm: str) -> float:
    """The arm's loss minus the reference's loss with the same seed, over the last quarter of the steps."""
    difference = np.subtract(result["losses"][arm], result["seeds"][0])
    return float(np.mean(difference[-max(1, len(difference) // 4) :]))


def divergence(result: dict, arm: str) -> str:
    """The first step at which the loss of the arm or the reference is not finite, or "" if there is none."""
    curves = {arm: result["losses"][arm], result["reference"]: result["seeds"][0]}
    first = (
        f"{name} is not finite at step {np.argmin(np.isfinite(curve)) + 1}"
        for name, curve in curves.items()
        if not np.all(np.isfinite(curve))
    )
    return ", ".join(first)


def spread(result: dict) -> float:
    """Standard deviation of the reference's loss over seeds, in the last quarter; NaN for one seed."""
    seeds = np.array(result["seeds"])
    late = seeds[:, -max(1, seeds.shape[1] // 4) :].mean(1)
    return float(np.std(late, ddof=1)) if len(late) > 1 else math.nan


def draw_errors(figure: "Figure", result: dict, theme: Theme, *, kind: str) -> str:
    """Draws the errors of all arrays of a kind, in the model's order from the first block to the last."""
    axes = charts.lay_out(figure.subplots(), "array")
    for arm, color in zip(result["layers"], _colors(theme), strict=False):
        errors = [e for _, e in _errors(result, arm, kind)]
        axes.plot(np.maximum(errors, 1e-9), ".", color=color, markersize=4, label=arm)
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    return "Relative error of each array, by tower, layer and block."


def draw_losses(figure: "Figure", result: dict, theme: Theme) -> str:
    """Every curve."""
    axes = charts.lay_out(figure.subplots(), "step")
    seeds = np.array(result["seeds"])
    steps = np.arange(1, seeds.shape[1] + 1)
    axes.fill_between(steps, seeds.min(0), seeds.max(0), color=theme.grid)
    axes.plot(steps, seeds[0], color=theme.muted, linewidth=1, label=result["reference"])
    for arm, color in zip(result["losses"], _colors(theme), strict=False):
        axes.plot(steps, result["losses"][arm], color=color, linewidth=1, label=arm)
    axes.legend(frameon=False, fontsize=8)
    return f"Grey: range of the reference over {len(seeds)} seeds."


def draw_gap(figure: "Figure", result: dict, theme: Theme) -> str:
    """Draws |loss - reference| for the same seed and for other seeds."""
    axes = charts.lay_out(figure.subplots(), "step")
    seeds = np.array(result["seeds"])
    steps = np.arange(1, seeds.shape[1] + 1)
    for other in seeds[1:]:
        axes.plot(steps, np.abs(other - seeds[0]), color=theme.grid, linewidth=1)
    for arm, color in zip(result["losses"], _colors(theme), strict=False):
        distance = np.abs(np.subtract(result["losses"][arm], seeds[0]))
        axes.plot(steps, np.maximum(distance, 1e-9), color=color, linewidth=1, label=arm)
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    return "Grey: the reference with other seeds and batches."


def _colors(theme: Theme) -> list[str]:
    return [*theme.series, theme.ink, theme.muted, *(f"C{i}" for i in range(10))]


def _errors(result: dict, arm: str, kind: str) -> list[tuple[str, float]]:
    """(name, relative error) of every array of a kind, with one entry per block."""
    return [
        (name if len(errors) == 1 else f"{name}, block {i}", error)
        for name, errors in result["layers"][arm].items()
        if name.startswith(f"{kind}/")
        for i, error in enumerate(errors)
    ]


def _summary_rows(result: dict) -> Iterable[list[str]]:
    for kind, title in KINDS.items():
        columns = [[e for _, e in _errors(result, arm, kind)] for arm in result["layers"]]
        yield [f"{title}, median", *(f"{np.median(c):.3%}" for c in columns)]
        yield [f"{title}, largest", *(f"{np.max(c):.3%}" for c in columns)]
    if result["losses"]:
        yield ["Loss above the reference's", *(f"{gap(result, a):+.4f}" for a in result["losses"])]
        yield ["First loss that is not finite", *(divergence(result, a) for a in result["losses"])]
        yield ["Spread of seeds", *(f"{spread(result):.4f}" for _ in result["losses"])]


def _all_rows(result: dict) -> Iterable[list[str]]:
    arms = list(result["layers"])
    for kind in KINDS:
        columns = [_errors(result, arm, kind) for arm in arms]
        for cells in zip(*columns, strict=True):
            yield [cells[0][0], *(f"{error:.3%}" for _, error in cells)]
