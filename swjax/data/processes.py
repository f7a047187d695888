"""Chunks of examples, made by several processes in shared memory."""

import contextlib
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection, reduction, util
from typing import Any, NamedTuple

import numpy as np

from swjax.data.memory import when_gone

_GIVEN = 2  # chunks that a process has at once: one that it makes, and the next
_AHEAD = 4  # chunks for each process that are made or being made
_ALIGNMENT = 64  # bytes
_NICE = 5  # the process that trains has priority, since a device waits for it
_ENDS = {
    -signal.SIGKILL: ", killed, as by a machine that runs out of memory: fewer workers need less",
    1: '; it printed why: is what starts it, in a script, below `if __name__ == "__main__":`?',
}


class LostProcess(RuntimeError):
    """A process that loads examples has ended."""


class Field(NamedTuple):
    """The place of one array in the memory of a chunk."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes
    stop: int

    def of(self, memory: np.ndarray) -> np.ndarray:
        return memory[self.start : self.stop].view(self.dtype).reshape(self.shape)


class Processes(Iterator):
    """Iterator over the chunks of examples, in order.

    A process gets the next chunk when it has finished one, so that a slow core delays few. Processes write
    into anonymous shared memory (/dev/shm has only 64 MB in a container), which is used again when a chunk
    and all views of it are freed. They end with their parent process, ignore SIGINT and SIGTERM, and run at
    a lower priority than it.

    Args:
      rows: examples by number, each a dict of arrays of the same shapes and dtypes; it can be pickled.
      chunk: examples in a chunk; an incomplete chunk at the end is dropped.
      count: processes.
      held: chunks that the caller uses at once; further ones are copied.

    Raises:
      LostProcess: from the iterator, if a process was ended from outside.
      RuntimeError: from the iterator, with the error of a process.
    """

    def __init__(self, rows: Sequence[dict], chunk: int, count: int, held: int):
        import cloudpickle

        self._total = len(rows) // chunk
        self._given = self._taken = 0  # chunks, in order
        self._fields, self._size = _fields(rows[0], chunk) if self._total else ({}, _ALIGNMENT)
        slots = _AHEAD * count + held
        self._free, self._slots = deque(range(slots)), dict[int, int]()
        self._made: set[int] = set()
        file = _unnamed_file(slots * self._size)
        self._memory = mmap.mmap(file, slots * self._size)
        context = multiprocessing.get_context("spawn")  # this process has threads
        packed = cloudpickle.dumps((rows, chunk, self._fields, self._size))
        self._processes: dict[Any, Any] = {}  # by their pipes
        self._load: dict[Any, int] = {}
        self._end = util.Finalize(self, _end, [self._processes], exitpriority=0)
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_make, args=(there, packed), daemon=True)
            process.start()
            there.close()
            self._processes[here], self._load[here] = process, 0
            with contextlib.suppress(OSError):  # it has ended; __next__ says how
                reduction.send_handle(here, file, process.pid)
        os.close(file)  # the mapping stays

    def __next__(self) -> dict[str, np.ndarray]:
        if self._taken == self._total:
            raise StopIteration
        self._receive(timeout=0)
        self._give()
        while self._taken not in self._made:
            self._receive(timeout=None)
            self._give()
        self._made.remove(self._taken)
        slot = self._slots.pop(self._taken)
        self._taken += 1
        memory = np.frombuffer(self._memory, np.uint8, self._size, slot * self._size)
        chunk = {name: field.of(memory) for name, field in self._fields.items()}
        if self._free:
            when_gone(memory, self._free.append, slot)
            return chunk
        chunk = {name: array.copy() for name, array in chunk.items()}
        self._free.append(slot)
        return chunk

    def close(self) -> None:
        """Ends the processes."""
        self._total = self._taken
        self._end()

    def _give(self) -> None:
        """Assigns chunks to the processes that have fewest, as long as there is memory for them."""
        while self._free and self._given < self._total:
            pipe = min(self._load, key=self._load.__getitem__)
            if self._load[pipe] == _GIVEN:
                return
            slot = self._slots[self._given] = self._free.popleft()
            try:
                pipe.send((self._given, slot))
            except OSError:
                raise self._lost(pipe) from None
            self._load[pipe] += 1
            self._given += 1

    def _receive(self, timeout: float | None) -> None:
        """Receives finished chunks; waits for one without a timeout."""
        pipe: Any
        for pipe in connection.wait(self._load, timeout):
            try:
                number, trouble = pipe.recv()
            except (EOFError, OSError):
                raise self._lost(pipe) from None
            if trouble:
                self.close()
                raise RuntimeError(f"a loader process failed:\n{trouble}")
            self._load[pipe] -= 1
            self._made.add(number)

    def _lost(self, pipe) -> LostProcess:
        process = self._processes[pipe]
        process.join(timeout=5)
        why = _ENDS.get(process.exitcode, "")
        return LostProcess(
            f"loader process {process.pid} ended with exit code {process.exitcode}{why}"
        )


def _fields(example: dict, chunk: int) -> tuple[dict[str, Field], int]:
    """Returns the places of the arrays of a chunk, and its size in bytes."""
    fields, at = {}, 0
    for name, value in example.items():
        value = np.asarray(value)
        fields[name] = Field(value.dtype, (chunk, *value.shape), at, at + chunk * value.nbytes)
        at = -(-fields[name].stop // _ALIGNMENT) * _ALIGNMENT
    return fields, at


def _unnamed_file(size: int) -> int:
    """Returns the descriptor of a file in memory; pages exist once they are written.

    `multiprocessing.shared_memory` does the same in /dev/shm, which has 64 MB in a container.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("swjax-data")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.ftruncate(file, size)
    return file


def _end(processes: dict) -> None:
    for process in processes.values():
        process.kill()  # nothing that it has is lost
    for process in processes.values():
        process.join()


def _end_with_parent() -> None:
    """Ends this process at once when the process that started it has ended, whatever it is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by another"
    connection.wait([parent.sentinel])
    os._exit(0)


def _make(pipe, packed: bytes) -> None:
    """Makes the requested chunks, until the parent process has ended."""
    import cloudpickle

    for kind in (signal.SIGINT, signal.SIGTERM):  # for all: the process that asks ends this one
        signal.signal(kind, signal.SIG_IGN)
    os.nice(_NICE)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        file = reduction.recv_handle(pipe)
    except (EOFError, OSError):
        return
    shared = mmap.mmap(file, os.fstat(file).st_size)
    os.close(file)
    rows = None
    while True:
        try:
            number, slot = pipe.recv()
        except (EOFError, OSError):
            return
        trouble = None
        try:
            if rows is None:
                rows, chunk, fields, size = cloudpickle.loads(packed)
            examples = [rows[i] for i in range(number * chunk, (number + 1) * chunk)]
            memory = np.frombuffer(shared, np.uint8, size, slot * size)
            for name, field in fields.items():
                np.stack(
                    [example[name] for example in examples], out=field.of(memory), casting="no"
                )
        except Exception:
            trouble = traceback.format_exc()
        try:
            pipe.send((number, trouble))
        except OSError:
            return
