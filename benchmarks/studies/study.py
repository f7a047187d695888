"""Code that all studies use: a JSON file of runs, a time limit and confidence intervals.

A study is a list of runs. Each has a key (its settings) and a function that returns its result. The file is
written after every run, and runs whose key it contains are skipped. So an interrupted study resumes, and more
settings extend a finished one. `--merge` joins the files of a study whose parts ran in separate processes.
With `--claims=FOLDER` the same command runs once for each GPU, each with its own `--out`; a process skips the
runs that another has claimed.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for configs/, from wherever the study is started

THIN = 5  # steps per point of a recorded curve

Run = tuple[dict, Callable[[], dict]]


def parser(doc: str) -> argparse.ArgumentParser:
    """The flags of every study."""
    flags = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--out", type=Path, help="JSON file, written after every run and resumed")
    flags.add_argument("--minutes", type=float, default=math.inf, help="no run starts after these")
    flags.add_argument(
        "--claims",
        type=Path,
        metavar="FOLDER",
        help="processes that share this folder divide the runs among them",
    )
    flags.add_argument("--smoke", action="store_true", help="the shortest form, seconds on a CPU")
    flags.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="no run: these files' become --out's"
    )
    return flags


def training_parser(doc: str) -> argparse.ArgumentParser:
    """The flags of the studies that train."""
    flags = parser(doc)
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=1000)
    flags.add_argument("--dtype", default="float32", help="dtype of products without quantization")
    flags.add_argument("--source", default="emoji", help="or synthetic")
    flags.add_argument("--data", default=str(ROOT / "data"), help="prepared data sets")
    return flags


def grid(measure: Callable[..., dict], **values: Iterable) -> list[Run]:
    """Returns a run of `measure` for each combination of values; they are its arguments and the run's key.

    >>> [(key, run()) for key, run in grid(lambda a, b: {"sum": a + b}, a=[1], b=[2, 3])]
    [({'a': 1, 'b': 2}, {'sum': 3}), ({'a': 1, 'b': 3}, {'sum': 4})]
    """
    keys = (dict(zip(values, each, strict=True)) for each in itertools.product(*values.values()))
    return [(key, partial(measure, **key)) for key in keys]


def carry_out(args, runs: Iterable[Run], table: Callable) -> dict:
    """Executes the runs that the file lacks, saves after each, then prints the study.

    Args:
      args: of `parser`.
      runs: (key, function that returns the result, both for JSON).
      table: (results) -> None, prints.

    Returns:
      {"command", "environment", "finished", "runs": [{"key", "seconds", "result"}]}.
    """
    if args.claims and not args.out:
        raise SystemExit("--claims needs --out: each process writes a file of its own")
    study = merge(args.merge) if args.merge else do(args, runs)
    write(args.out, study)
    table(study["runs"])
    return study


def do(args, runs: Iterable[Run]) -> dict:
    """Executes runs until all are done or the time limit is reached; returns the study."""
    start, longest = time.perf_counter(), 0.0
    study = read(args.out)
    done = [run["key"] for run in study["runs"]]
    study["finished"] = False
    for key, function in runs:
        if json.loads(json.dumps(key)) in done:
            continue
        if time.perf_counter() - start + longest > 60 * args.minutes:
            print(f"{args.minutes} minutes are over: the same command continues", flush=True)
            break
        if args.claims and not claim(args.claims, args.out, key):
            continue
        began = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - began
        longest = max(longest, seconds)
        study["runs"].append({"key": key, "seconds": round(seconds, 2), "result": result})
        print(f"{', '.join(f'{k}={v}' for k, v in key.items())}: {seconds:.1f} s", flush=True)
        write(args.out, study)
    else:
        study["finished"] = True
    return study


def claim(folder: Path, out: Path, key: dict) -> bool:
    """Claims a run for the process that writes to `out`; False if another process has claimed it.

    Arms that share their first steps are claimed together, because they continue from the same state.
    """
    claimed = key | {"arm": ""} if key.get("shared") else key
    path = folder / hashlib.sha256(json.dumps(claimed).encode()).hexdigest()[:12]
    owner = str(out.resolve())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder) as file:
        file.write(owner)
        file.flush()
        try:
            os.link(file.name, path)  # a kill or a full disk leaves no claim without an owner
        except FileExistsError:
            return path.read_text() == owner
    return True


def merge(paths: Iterable[Path]) -> dict:
    """Joins studies; a run that several contain is taken from the first."""
    studies = [load(path) for path in paths]
    runs = []
    for run in itertools.chain.from_iterable(study["runs"] for study in studies):
        if run["key"] not in [other["key"] for other in runs]:
            runs.append(run)
    finished = all(study["finished"] for study in studies)
    return {"parts": commands(*studies)} | new() | {"finished": finished, "runs": runs}


def commands(*studies: dict) -> list[dict]:
    """Returns the command and environment of every process behind the studies, each once."""
    found = []
    for study in studies:
        own = {name: value for name, value in study.items() if name not in ("parts", "runs")}
        for part in (*commands(*study.get("parts", ())), own):
            if part not in found:
                found.append(part)
    return found


def read(path: Path | None) -> dict:
    """Reads a study, or returns a new one if the file does not exist.

    If another command or environment made the study, its own becomes a part: later runs are of this process.
    """
    study = now = new()
    if path and path.exists():
        study = load(path)
        if any(study.get(name) != now[name] for name in ("command", "environment")):
            study = {"parts": commands(study)} | now | {"runs": study["runs"]}
    return study


def new() -> dict:
    from swjax.training.log import environment

    lines = environment.describe().splitlines()
    command = environment.command()
    return {"command": command, "environment": lines[1:], "finished": False, "runs": []}


def load(path: Path) -> dict:
    return numbers(json.loads(path.read_text()))


def numbers(value):
    """Converts null, which `dumps` writes for non-finite numbers, to NaN."""
    if isinstance(value, dict):
        return {name: numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return math.nan if value is None else value


def dumps(value) -> str:
    """JSON with a line for each object of a list; numbers that are not finite are null.

    >>> print(dumps({"runs": [{"loss": [1.5, math.nan]}, {"loss": []}]}))
    {"runs": [
    {"loss": [1.5, null]},
    {"loss": []}
    ]}
    """
    if isinstance(value, dict):
        items = (f"{json.dumps(name)}: {dumps(item)}" for name, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        items = [dumps(item) for item in value]
        if value and isinstance(value[0], dict):
            return "[\n" + ",\n".join(items) + "\n]"
        return "[" + ", ".join(items) + "]"
    if isinstance(value, str | int):
        return json.dumps(value)
    return json.dumps(float(value)) if math.isfinite(value) else "null"


def write(path: Path | None, study: dict) -> None:
    """Writes the study if there is a path; a kill leaves the previous file."""
    from swjax.safe_files import write_atomically

    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, dumps(study) + "\n")


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% confidence interval: Student's t over independent runs.

    If a value is not finite, such as the loss of a run that diverged, half the width is NaN.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> mean, round(half, 3)
    (2.0, 2.484)
    """
    values = [float(value) for value in values]
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return statistics.fmean(values), math.nan
    t = student(len(values) - 1)
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def student(freedom: int) -> float:
    """The two-sided 95% point of Student's t.

    >>> round(student(10), 3), round(student(39), 3)
    (2.228, 2.023)
    """
    return float(stats.t.ppf(0.975, freedom))


def thin(values, digits: int = 4, every: int = THIN) -> list[float]:
    """Averages a curve over groups of `every` steps, and rounds to `digits` significant digits.

    >>> thin([1, 2, 3, 4, 5, 6])
    [3.0, 6.0]
    """
    pieces = (values[i : i + every] for i in range(0, len(values), every))
    return [float(f"{sum(map(float, piece)) / len(piece):.{digits}g}") for piece in pieces]


def thinned_steps(curve: list) -> range:
    """The first step of each group of a thinned curve."""
    return range(0, THIN * len(curve), THIN)


def group(runs: Iterable[dict], *names: str) -> dict[tuple, list[dict]]:
    """Groups runs by the named settings of their keys, in order of first occurrence."""
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault(tuple(run["key"].get(name) for name in names), []).append(run)
    return groups
