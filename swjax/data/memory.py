"""Reuses memory for large arrays, because touching fresh pages takes longer than copying into them."""

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

_LARGE = 2**20  # bytes; malloc keeps the pages of smaller arrays itself


class Memory:
    """A pool of buffers for the arrays of batches, which have the same few sizes each time.

    >>> memory = Memory()
    >>> memory.joined([np.zeros((1, 2)), np.ones((1, 2))]).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self):
        self._free: dict[int, list[mmap.mmap]] = {}  # free buffers by size in bytes

    def joined(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Concatenates arrays along their first axis; returns a single array unchanged.

        The memory of a large result is reused once the result and all its views are freed.
        """
        if len(pieces) == 1:
            return pieces[0]
        size = sum(piece.nbytes for piece in pieces)
        if size < _LARGE:
            return np.concatenate(pieces)
        rows = sum(map(len, pieces))
        out = self._array(size, pieces[0].dtype).reshape(rows, *pieces[0].shape[1:])
        return np.concatenate(pieces, out=out)

    def _array(self, size: int, dtype: np.dtype) -> np.ndarray:
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else mmap.mmap(-1, size)
        array = np.frombuffer(memory, dtype)
        when_gone(array, free.append, memory)
        return array


def when_gone(array: np.ndarray, call: Callable, value: Any) -> None:
    """Calls `call(value)` once an array over a buffer, and all views of it, are freed.

    Views keep the array alive, because each of them references it through `base`.
    """
    weakref.finalize(array, call, value).atexit = False
