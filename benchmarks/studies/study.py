"""What the studies share: runs that are kept one by one in a JSON file, a time limit, intervals, plots.

A study is a list of runs, each with a key (its settings) and a function that returns its result. The file
is written after every run; a run whose key is in it already is not done again, so that a study which was
cut off, or is extended by more settings, goes on.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for configs/, from wherever the study is started

# Two-sided 95% points of Student's t by degrees of freedom; SciPy would be one more dependency.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

Run = tuple[dict, Callable[[], dict]]


def parser(doc: str) -> argparse.ArgumentParser:
    """The flags of every study."""
    flags = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--out", type=Path, help="JSON file: written after every run, gone on with")
    flags.add_argument("--plot", type=Path, help="PNG file, drawn from the JSON file or the runs")
    flags.add_argument("--minutes", type=float, default=math.inf, help="no run starts after these")
    flags.add_argument("--smoke", action="store_true", help="the shortest form, seconds on a CPU")
    return flags


def carry_out(args, runs: Iterable[Run], draw: Callable) -> dict:
    """Does the runs that are not done yet, saves after each, and draws.

    Args:
      args: of `parser`.
      runs: (key, function that returns the result, both for JSON).
      draw: (figure, results) -> None.

    Returns:
      {"command", "environment", "finished", "runs": [{"key", "seconds", "result"}]}.
    """
    start, longest = time.perf_counter(), 0.0
    study = read(args.out)
    done = [run["key"] for run in study["runs"]]
    study["finished"] = True
    for key, function in runs:
        if json.loads(json.dumps(key)) in done:
            continue
        if time.perf_counter() - start + longest > 60 * args.minutes:
            study["finished"] = False
            print(f"{args.minutes} minutes are over: the same command goes on", flush=True)
            break
        began = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - began
        longest = max(longest, seconds)
        study["runs"].append({"key": key, "seconds": round(seconds, 2), "result": result})
        print(f"{', '.join(f'{k}={v}' for k, v in key.items())}: {seconds:.1f} s", flush=True)
        write(args.out, study)
    write(args.out, study)
    if args.plot and study["runs"]:
        save(draw, study, args.plot)
    return study


def read(path: Path | None) -> dict:
    """The study in a file, or a new one."""
    from swjax import environment

    if path and path.exists():
        return json.loads(path.read_text())
    lines = environment.describe().splitlines()
    command = ["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]
    return {"command": command, "environment": lines[1:], "finished": False, "runs": []}


def write(path: Path | None, study: dict) -> None:
    """In one piece: a study that is killed leaves the file of the run before."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(study, indent=1, default=float) + "\n")
        part.rename(path)


def save(draw: Callable, study: dict, path: Path) -> None:
    """Draws a figure in the style of the run's report."""
    from matplotlib.figure import Figure

    from swjax.report import charts

    with style():
        figure = Figure(figsize=(8, 3.4), layout="constrained", facecolor=charts.LIGHT.surface)
        draw(figure, study["runs"])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


@contextmanager
def style():
    """matplotlib's settings within."""
    from matplotlib import rc_context

    from swjax.report.charts import LIGHT

    spines = {f"axes.spines.{side}": False for side in ("top", "right")}
    grid = {"axes.grid": True, "grid.color": LIGHT.grid, "axes.axisbelow": True}
    text = {"font.size": 9, "legend.frameon": False, "legend.fontsize": 8, "lines.linewidth": 1.5}
    with rc_context(spines | grid | text):
        yield


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% confidence interval: Student's t over independent runs.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> mean, round(half, 3)
    (2.0, 2.484)
    """
    values = [float(value) for value in values]
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    t = T_95[min(len(values) - 2, len(T_95) - 1)]
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def group(runs: Iterable[dict], *names: str) -> dict[tuple, list[dict]]:
    """Runs by some of the settings in their keys, in the order in which they first come."""
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault(tuple(run["key"].get(name) for name in names), []).append(run)
    return groups
