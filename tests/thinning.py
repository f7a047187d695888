"""Which cases of a cross product `make test` runs; the others are marked `release`, for `make test-all`."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

# Recipes that take different paths through the layer: one quantized weight for two products, saved quantized
# arrays, and blocks of rotated tokens.
RECIPES = ("switchback", "switchback_m", "switchback_hadamard")


def thinned(rows: Sequence[Any], columns: Collection[Any], full: Collection[Any]) -> list[Any]:
    """Returns every (row, column) as a parameter of a test.

    `make test` runs each row with the columns in `full`, and with one other column: the first row with the
    first of the others, the second row with the second, and so on. So each column meets some rows. The marks
    of a row that is a `pytest.param` of one value stay.

    >>> pairs = thinned(["a", "b"], [1, 2, 3], full=[1])
    >>> [pair.values for pair in pairs if not pair.marks]
    [('a', 1), ('a', 2), ('b', 1), ('b', 3)]
    """
    others = [column for column in columns if column not in full]
    pairs = []
    for index, row in enumerate(rows):
        value, marks = (row.values[0], row.marks) if hasattr(row, "marks") else (row, ())
        chosen = [*full, *others[index % len(others) :][:1]] if others else full
        for column in columns:
            release = () if column in chosen else (pytest.mark.release,)
            pairs.append(pytest.param(value, column, marks=(*marks, *release)))
    return pairs


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
