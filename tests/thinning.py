"""Which cases of a cross product `make test` runs; the others are marked `release`, for `make test-all`."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import pytest

# Recipes that take different paths through the layer: one quantized weight for two products, saved quantized
# arrays, and blocks of rotated tokens.
RECIPES = ("switchback", "switchback_m", "switchback_hadamard")


def thinned(rows: Sequence[Any], columns: Collection[Any], full: Collection[Any]) -> list[Any]:
    """Returns every (row, column) as a parameter of a test.

    `make test` runs each row with the columns in `full` and with one other column, and each column with at
    least one row if there are as many rows as others. A hash of the two names chooses: a new row or column
    does not change the other choices, unless it is chosen in their place. The marks of a row that is a
    `pytest.param` of one value stay.

    >>> pairs = thinned(["a", "b"], [1, 2, 3], full=[1])
    >>> [pair.values for pair in pairs if not pair.marks]
    [('a', 1), ('a', 3), ('b', 1), ('b', 2)]
    """
    values = [(row.values[0], row.marks) if hasattr(row, "marks") else (row, ()) for row in rows]
    names = [_name(value) for value, _ in values]
    others = [_name(column) for column in columns if column not in full]
    chosen = {(row, max(others, key=partial(_rank, row))) for row in names if others}
    if len(others) <= len(rows):
        unmet = set(others) - {column for _, column in chosen}
        chosen |= {(max(names, key=partial(_rank, column=column)), column) for column in unmet}
    pairs = []
    for (value, marks), row in zip(values, names):
        for column in columns:
            kept = column in full or (row, _name(column)) in chosen
            release = () if kept else (pytest.mark.release,)
            pairs.append(pytest.param(value, column, marks=(*marks, *release)))
    return pairs


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_name, value))
    return getattr(value, "__name__", str(value))


def _rank(row: str, column: str) -> bytes:
    return hashlib.sha256(f"{row}, {column}".encode()).digest()


def kept(values: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Returns the values as parameters of a test, of which `make test` runs those in `few`.

    A tuple has a value for each argument of the test.

    >>> [bool(value.marks) for value in kept("abc", few="b")]
    [True, False, True]
    """
    return [_parameter(value, is_kept=value in few) for value in values]


def first(values: Sequence[Any], count: int = 1) -> list[Any]:
    """Returns parameters as `kept` does, of which `make test` runs the first `count`.

    >>> [bool(value.marks) for value in first("abc", 2)]
    [False, False, True]
    """
    return [_parameter(value, is_kept=index < count) for index, value in enumerate(values)]


def _parameter(value: Any, is_kept: bool) -> Any:
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=() if is_kept else pytest.mark.release)
