"""Which parts of a cross product run in `make test`; the rest carry the marker `release`, for `make test-all`."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest


def thinned(rows: Sequence[Any], columns: Collection[Any], full: Collection[Any]) -> Iterator[Any]:
    """Returns every (row, column) as a parameter of a test.

    `make test` runs each row with the columns in `full`, and with one other column: the first row with the
    first of the others, the second row with the second, and so on. So each column meets some rows.

    >>> pairs = list(thinned(["a", "b"], [1, 2, 3], full=[1]))
    >>> [pair.values for pair in pairs if not pair.marks]
    [('a', 1), ('a', 2), ('b', 1), ('b', 3)]
    """
    others = [column for column in columns if column not in full]
    for index, row in enumerate(rows):
        chosen = {*full, *others[index % len(others) :][:1]} if others else set(full)
        for column in columns:
            marks = () if column in chosen else pytest.mark.release
            yield pytest.param(row, column, marks=marks)


def first(values: Sequence[Any], count: int = 1) -> Iterator[Any]:
    """Returns the values as parameters of a test, of which `make test` runs the first `count`.

    >>> [bool(value.marks) for value in first("abc", 2)]
    [False, False, True]
    """
    for index, value in enumerate(values):
        yield pytest.param(value, marks=() if index < count else pytest.mark.release)
