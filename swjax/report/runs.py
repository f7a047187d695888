"""`swjax runs FOLDER...`: lists the runs in folders, one per line; with --page, plots their curves on a page.

A run is a folder with a config.json of train.py; models that were exported have another one. The table shows
the config keys in which the runs differ.
"""

import argparse
import dataclasses
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from swjax.report import charts, page, records
from swjax.report.records import Series, smooth
from swjax.safe_files import explain, printable, write_atomically

WANTED = re.compile(
    r"train/(loss|learning_rate)$|perf/samples_per_sec_per_device$|zeroshot/.*_top1$"
)
_MOST_WIDTH, _MOST_CELL = 140, 48  # characters of a printed line and of a cell
IGNORED = ("report.", "log.", "diagnostics.")  # sections that do not affect scores


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run's files.

    Attributes:
      name: path of its folder relative to the common parent of all runs.
      config: {key: value}, such as {"train.steps": "20"}.
      metrics: columns of the log.
      finished: whether the run has finished.
      scores: {name: final score}; empty until the run has finished, or if its data have no split to score.
    """

    name: str
    config: dict[str, str]
    metrics: dict[str, Series]
    finished: bool
    scores: dict[str, float]

    @property
    def state(self) -> str:
        """ "finished" or the current step."""
        loss = self.metrics.get("train/loss")
        if loss is None:
            return "no steps yet"
        return f"finished, {loss.step[-1]:,}" if self.finished else f"at step {loss.step[-1]:,}"


def find(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Finds the runs in these folders and their subfolders.

    Returns:
      The runs, sorted by name, and a line for each run that cannot be read.

    Raises:
      ValueError: there is no run.
    """
    folders = list(folders)
    # Absolute, so that folders given in different ways are compared, and a run that is found twice is one.
    files = (path for folder in folders for path in folder.rglob("config.json"))
    paths = sorted({Path(os.path.abspath(path.parent)) for path in files})
    above = os.path.commonpath([path.parent for path in paths]) if paths else ""
    found: list[Run] = []
    damaged: list[str] = []
    for path in paths:
        try:
            found.append(read(path, str(path.relative_to(above))))
        except (ValueError, OSError) as error:
            damaged.append(str(error))
    runs = [run for run in found if any(key.startswith("train.") for key in run.config)]
    if not (runs or damaged):
        raise ValueError(
            f"no run in {', '.join(map(str, folders))}: give folders of runs, or a folder that contains them"
        )
    return runs, damaged


def read(path: Path, name: str) -> Run:
    """Reads a run; missing files are allowed.

    Raises:
      ValueError: a file is damaged.
    """
    config = records.read_object(path / "config.json")
    final = path / "results.json"
    finished = records.exists(final)
    results: dict = {"scores": {}}
    if finished:
        results = records.read_object(final, scores=dict)
        records.check(results, {"scores": {str: float}}, str(final))
    metrics = records.read(path / "metrics.jsonl", WANTED)
    return Run(name, dict(page.flatten(config)), metrics, finished, results["scores"])


def differences(runs: Sequence[Run]) -> list[str]:
    """The config keys that all runs have and in which they differ.

    Runs of another version of swjax may have more keys or fewer.
    """
    keys = [key for key in runs[0].config if all(key in run.config for run in runs)]
    return [
        key
        for key in keys
        if not key.startswith(IGNORED) and len({run.config[key] for run in runs}) > 1
    ]


def short_names(keys: Sequence[str]) -> list[str]:
    """Shortens dotted keys to their last words, as many as keep them distinct.

    >>> short_names(["eval.every_steps", "train.every_steps", "model.recipe"])
    ['eval.every_steps', 'train.every_steps', 'recipe']
    >>> short_names(["data.table.splits.val", "data.icons.splits.val"])
    ['table.splits.val', 'icons.splits.val']
    >>> short_names(["data.name", "model.recipe"])
    ['data.name', 'recipe']
    """
    endings = Counter(ending for key in keys for ending in _endings(key))
    return [next((ending for ending in _endings(key) if endings[ending] == 1), key) for key in keys]


def _endings(key: str) -> list[str]:
    """The last word of a dotted key, its last two words, and so on; "name" alone would not say of what."""
    words = key.split(".")
    endings = [".".join(words[i:]) for i in reversed(range(len(words)))]
    return [ending for ending in endings if ending != "name"]


def table(runs: Sequence[Run]) -> list[list[str]]:
    """A header, and a row per run: state, loss, scores, throughput, time and differing config keys."""
    scores = dict.fromkeys(name for run in runs for name in run.scores)
    names = [n for n in scores if n.endswith(page.HEADLINES) and "chance" not in n]
    differing = differences(runs)
    header = ["run", "state", "loss", *map(page.label, names), "samples/s/device", "time"]
    rows = [[*header, *short_names(differing)]]
    for run in runs:
        loss, rate, time = (
            run.metrics.get(name)
            for name in ("train/loss", "perf/samples_per_sec_per_device", "time")
        )
        row = [run.name, run.state, f"{loss.last:.3f}" if loss else ""]
        row += [charts.percent(run.scores.get(name)) for name in names]
        newest = rate.last_finite if rate else None
        row += [
            "" if newest is None else f"{newest:,.0f}",
            page.duration(time.last) if time else "",
        ]
        rows.append([*row, *(run.config[key] for key in differing)])
    return rows


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Writes a self-contained page: the losses in one chart, the scores, and the config differences."""
    header, *rows = table(runs)
    text = page.fill(
        "runs.html",
        title="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        subtitle=", ".join(run.name for run in runs[:6]) + (", ..." if len(runs) > 6 else ""),
        tiles="",
        chart=page.chart(charts.drawn_chart("Training loss", _draw, runs)),
        table=page.numbers(header, rows),
    )
    write_atomically(path, text)


def _draw(figure, runs: Sequence[Run], theme: charts.Theme) -> str:
    import matplotlib

    axes = charts.lay_out(figure.subplots(), "step")
    colors = [*theme.series, *matplotlib.color_sequences["tab10"][3:]]
    for number, run in enumerate(runs):
        loss = run.metrics.get("train/loss")
        if loss is not None:
            mean = smooth(loss.value, window=max(5, len(loss.value) // 40))
            axes.plot(loss.step, mean, color=colors[number % len(colors)], label=run.name)
    if axes.lines:
        axes.legend(fontsize=7, frameon=False)
    return "Running means of the loss of every step."


def text_table(rows: list[list[str]], most: int = _MOST_WIDTH) -> str:
    """Aligns columns: the first to the left, the others to the right.

    Args:
      rows: the header, and the rows.
      most: width of a line; columns beyond it are only named.

    >>> print(text_table([["run", "loss", "recipe"], ["a", "0.25", "int8"], ["long", "1", "bf16"]], most=16))
    run   loss
    a     0.25
    long     1
    1 column more, which --page shows: recipe
    """
    rows = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = np.cumsum(widths) + 2 * np.arange(len(widths))
    shown = max(1, int(np.sum(ends <= most)))
    lines = [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row[:shown], widths[:shown], strict=True))
        ).rstrip()
        for row in rows
    ]
    if rest := rows[0][shown:]:
        names = ", ".join(rest[:6]) + (", ..." if len(rest) > 6 else "")
        columns = "column" if len(rest) == 1 else "columns"
        lines.append(f"{len(rest)} {columns} more, which --page shows: {names}")
    return "\n".join(lines)


def _cell(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _MOST_CELL else f"{text[: _MOST_CELL - 3]}..."


def main() -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="swjax runs", description=__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, help="folders of runs, or folders that contain runs"
    )
    parser.add_argument("--page", type=page.new_page, metavar="FILE.html", help="page to write")
    args = parser.parse_args()
    try:
        runs, damaged = find(args.folders)
        for line in damaged:
            print(f"swjax runs: {printable(line)}", file=sys.stderr)
        if not runs:
            return 2
        text = text_table(table(runs))
        if args.page:
            write_page(runs, args.page)
    except (ValueError, OSError) as error:
        print(f"swjax runs: {explain(error)}", file=sys.stderr)
        return 2
    print(text)
    if args.page:
        print(args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
