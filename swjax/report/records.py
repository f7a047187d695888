"""Reads the files of a run: metrics.jsonl into columns, and JSON objects."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from swjax.diagnostics.recorder import json_object
from swjax.safe_files import is_too_deep, open_inside, read_inside

REMEDY = "restore the file from a copy, or move it away"
_MOST_STEPS = 2**53  # above, a float does not hold every integer


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric over a run.

    Attributes:
      step: int64 [n], ascending.
      value: float64 [n]; NaN where the value is not finite.
    """

    step: np.ndarray
    value: np.ndarray

    @property
    def last(self) -> float:
        return float(self.value[-1])

    @property
    def last_finite(self) -> float | None:
        """The newest finite value, or None if no value is finite."""
        finite = self.value[np.isfinite(self.value)]
        return float(finite[-1]) if len(finite) else None


def read(path: Path, wanted: re.Pattern) -> dict[str, Series]:
    """Reads the metrics whose names `wanted` matches at their start, and "time", into columns by name.

    Damaged lines at the end, as a crash leaves them, are ignored. A missing log gives no metrics. Text
    values, such as the name of a non-finite tensor, are ignored.

    Raises:
      ValueError: a line before the last record is damaged, a step is not an integer, a metric is not a
        number, or the file is a link out of its folder.
      OSError: the file cannot be read.
    """
    columns: dict[str, tuple[list, list]] = {}
    damaged = 0
    if not exists(path):
        return {}
    with io.TextIOWrapper(open_inside(path.parent, path.name), "utf-8", "replace") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                step = record["step"]
            except (ValueError, TypeError, KeyError, RecursionError):
                damaged = damaged or number
                continue
            if damaged:
                raise ValueError(
                    f"{path}, line {damaged}, is damaged: correct the line, or remove it"
                )
            where = f"{path}, line {number}"
            if not is_number(step) or step % 1 or not 0 <= step <= _MOST_STEPS:
                raise ValueError(
                    f"{where}: step must be an integer, got {_short(step)}: correct the line"
                )
            for name, value in record.items():
                if (name == "time" or wanted.match(name)) and not isinstance(value, str):
                    if value is not None and not is_number(value):
                        raise ValueError(
                            f"{where}: {name[:80]} must be a number, got {_short(value)}: correct the line"
                        )
                    steps, values = columns.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(np.nan if value is None else value)
    return {
        name: Series(np.array(steps, np.int64), np.array(values, np.float64))
        for name, (steps, values) in columns.items()
    }


def exists(path: Path) -> bool:
    """Whether a file of a run exists, also as a link, which is then refused and not taken for missing."""
    return path.is_symlink() or path.exists()


def read_object(path: Path, **types: Any) -> dict:
    """Reads the JSON object in a file of a run; `types` are required keys and the type of each.

    Raises:
      ValueError: the file is damaged, or is a link out of its folder.
      OSError: the file cannot be read.
    """
    text = read_inside(path.parent, path.name).decode(errors="replace")
    found = json_object(str(path), text, remedy=REMEDY, **types)
    if is_too_deep(found):
        raise ValueError(f"{path} is damaged: its JSON nests too deeply: {REMEDY}")
    return found


def config_changes(path: Path) -> list[tuple[str, str]]:
    """Reads config_history.jsonl: ("after step 4", "key: old -> new") for each change of the config.

    Raises:
      ValueError, OSError: see `read_object`.
    """
    if not exists(path):
        return []
    found = []
    for number, line in enumerate(read_inside(path.parent, path.name).splitlines(), 1):
        where = f"{path}, line {number},"
        entry = json_object(where, line.decode(errors="replace"), remedy=REMEDY)
        check(entry, {"step": int, "changes": [str]}, where)
        found += [(f"after step {entry['step']}", change) for change in entry["changes"]]
    return found


def check(value: Any, shape: Any, where: str) -> None:
    """Checks the types in JSON: `shape` is a type, a list of one shape, or a dict of shapes by key.

    The key `str` stands for any key, and a dict may have further keys. `float` accepts integers.

    Raises:
      ValueError: a type differs; the message begins with `where`.

    >>> check({"step": 1, "scores": {"a": 1}}, {"scores": {str: float}}, "results.json")
    """

    def walk(value, shape, path):
        kind = shape if isinstance(shape, type) else type(shape)
        if not (is_number(value) if kind is float else isinstance(value, kind)):
            raise ValueError(
                f"{where} is damaged: {path.lstrip('.')} must be {kind.__name__}, got "
                f"{_short(value)}: {REMEDY}"
            )
        if isinstance(shape, list):
            for i, part in enumerate(value):
                walk(part, shape[0], f"{path}[{i}]")
        elif isinstance(shape, dict):
            for key in value if str in shape else shape:
                walk(value.get(key), shape.get(key, shape.get(str)), f"{path}.{key[:80]}")

    walk(value, shape, "")


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that float64 holds, perhaps NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        math.isnan(value)
    except OverflowError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def at(steps: np.ndarray, series: Series) -> np.ndarray:
    """The values of a metric at the given steps; NaN at steps without a record.

    >>> at(np.array([1, 2, 3]), Series(np.array([2, 4]), np.array([0.5, 0.7])))
    array([nan, 0.5, nan])
    """
    values = np.full(len(steps), np.nan)
    _, here, there = np.intersect1d(steps, series.step, return_indices=True)
    values[here] = series.value[there]
    return values


def blocks(metrics: dict[str, Series], prefix: str) -> list[Series]:
    """The metrics "<prefix>/0", "<prefix>/1", ..., in this order."""
    found = (re.fullmatch(re.escape(prefix) + r"/(\d+)", name) for name in metrics)
    numbers = sorted(int(match[1]) for match in found if match)
    return [metrics[f"{prefix}/{i}"] for i in numbers]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """A centered running mean over the finite values, with a shorter window at both ends.

    >>> smooth(np.array([0.0, 3.0, np.nan, 6.0]), 3)
    array([1.5, 1.5, 4.5, 6. ])
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    center = np.arange(len(values))
    low = np.maximum(center - window // 2, 0)
    high = np.minimum(center + window // 2 + 1, len(values))
    count = counts[high] - counts[low]
    mean = (sums[high] - sums[low]) / np.maximum(count, 1)
    return np.where(count > 0, mean, np.nan)
