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
from html import escape
from pathlib import Path

from swjax.report import charts, page, records
from swjax.report.records import Series, smooth

WANTED = re.compile(
    r"train/(loss|learning_rate)$|perf/samples_per_sec_per_device$|zeroshot/.*_top1$"
)
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
    finished = final.exists()
    scores = records.read_object(final, scores=dict)["scores"] if finished else {}
    metrics = records.read(path / "metrics.jsonl", WANTED)
    return Run(name, dict(page.flatten(config)), metrics, finished, scores)


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
    names = [name for name in _score_names(runs) if name.endswith(page.HEADLINES)]
    differing = differences(runs)
    header = ["run", "state", "loss", *map(page.label, names), "samples/s", "time"]
    rows = [[*header, *short_names(differing)]]
    for run in runs:
        loss, rate, time = (
            run.metrics.get(name)
            for name in ("train/loss", "perf/samples_per_sec_per_device", "time")
        )
        row = [run.name, run.state, f"{loss.last:.3f}" if loss else ""]
        row += [page.percent(run.scores.get(name)) for name in names]
        newest = rate.last_finite if rate else None
        row += [
            "" if newest is None else f"{newest:,.0f}",
            page.duration(time.last) if time else "",
        ]
        rows.append([*row, *(run.config[key] for key in differing)])
    return rows


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Writes a self-contained page: the losses in one chart, the scores, and the config differences."""
    urls = {}
    for theme in (charts.LIGHT, charts.DARK):
        picture = path.with_suffix(f".{theme.name}.png")
        caption = charts.save(lambda *args: _draw(runs, *args), {}, theme, picture)
        urls[theme.name] = page.data_url(picture)
        picture.unlink()
    header, *rows = table(runs)
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    text = page.fill(
        "runs.html",
        title=f"{len(runs)} runs",
        subtitle=", ".join(run.name for run in runs[:6]) + (", ..." if len(runs) > 6 else ""),
        tiles="",
        chart=page.chart(charts.Chart("loss", "Training loss", caption), urls),
        table=f'<table class="numbers"><tr>{head}</tr>{cells}</table>',
    )
    path.write_text(text, encoding="utf-8")


def _draw(runs: Sequence[Run], figure, metrics, theme: charts.Theme) -> str:
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


def _score_names(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.scores)
    return [name for name in names if "chance" not in name]


def text_table(rows: list[list[str]]) -> str:
    """Aligns columns: the first to the left, the others to the right.

    >>> print(text_table([["run", "loss"], ["a", "0.25"], ["long", "1"]]))
    run   loss
    a     0.25
    long     1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


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
            print(f"swjax runs: {line}", file=sys.stderr)
        if not runs:
            return 2
        text = text_table(table(runs))
        if args.page:
            write_page(runs, args.page)
    except (ValueError, OSError) as error:
        print(f"swjax runs: {error}", file=sys.stderr)
        return 2
    print(text)
    if args.page:
        print(args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
