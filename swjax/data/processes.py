"""Loads chunks of examples in several processes, into shared memory."""

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

_GIVEN = 2  # chunks assigned to a process: the current one and the next
_AHEAD = 4  # chunks per process that are finished or in progress
_ALIGNMENT = 64  # bytes
_NICE = 5  # the training process has priority, because a device waits for it
_ENDS = {
    -signal.SIGKILL: " (killed, probably because the machine ran out of memory): use fewer workers",
    1: ': see its output; a script must start it below `if __name__ == "__main__":`',
}


class LostProcess(RuntimeError):
    """A process that loads examples has ended unexpectedly."""


class Field(NamedTuple):
    """The location of one array in the memory of a chunk."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes
    stop: int

    def of(self, memory: np.ndarray) -> np.ndarray:
        return memory[self.start : self.stop].view(self.dtype).reshape(self.shape)


class Processes(Iterator):
    """Iterator over the chunks of examples, in order.

    A process gets its next chunk when it has finished one, so that a slow core delays few chunks. The
    processes write into anonymous shared memory (/dev/shm has only 64 MB in a container). The memory is
    reused once a chunk and all its views are freed. The processes end with their parent, ignore SIGINT,
    SIGTERM and SIGHUP, and run at a lower priority than the parent.

    Args:
      rows: examples by index, each a dict of arrays of the same shapes and dtypes; must be picklable.
      chunk: examples per chunk; an incomplete last chunk is dropped.
      count: number of processes.
      held: number of chunks that the caller uses at once; further chunks are copied.

    Raises:
      LostProcess: raised by the iterator if a process was killed.
      RuntimeError: raised by the iterator with the error of a process.
    """

    def __init__(self, rows: Sequence[dict], chunk: int, count: int, held: int):
        import cloudpickle

        self._total = len(rows) // chunk
        self._given = self._taken = 0  # numbers of chunks, in order
        self._fields, self._size = _fields(rows[0], chunk) if self._total else ({}, _ALIGNMENT)
        slots = _AHEAD * count + held
        self._free, self._slots = deque(range(slots)), dict[int, int]()
        self._made: set[int] = set()
        # The rows are in the shared memory, after the chunks. As an argument of a process they would fill its
        # pipe, and `start` would return only after the process has read them, which takes 0.5 s.
        packed = cloudpickle.dumps((rows, chunk, self._fields, self._size))
        end = slots * self._size
        file = _unnamed_file(end + len(packed))
        with open(file, "r+b", closefd=False) as memory:
            memory.seek(end)
            memory.write(packed)
        self._memory = mmap.mmap(file, end)
        # Fork is unsafe, because this process has threads.
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Any, Any] = {}  # processes by pipe
        self._load: dict[Any, int] = {}
        self._end = util.Finalize(self, _end, [self._processes], exitpriority=0)
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_make, args=(there, end), daemon=True)
            process.start()
            there.close()
            self._processes[here], self._load[here] = process, 0
            with contextlib.suppress(OSError):  # the process has ended; __next__ reports how
                reduction.send_handle(here, file, process.pid)
        os.close(file)  # the mapping stays valid

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
        """Assigns chunks to the least loaded processes, as long as there is memory."""
        while self._free and self._given < self._total:
            pipe = min(self._load, key=self._load.__getitem__)
            if self._load[pipe] == _GIVEN:
                return
            slot = self._slots[self._given] = self._free.popleft()
            if not _sent(pipe, (self._given, slot)):
                raise self._lost(pipe)
            self._load[pipe] += 1
            self._given += 1

    def _receive(self, timeout: float | None) -> None:
        """Receives finished chunks; without a timeout, it waits for at least one."""
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


def _sent(pipe, message: tuple[int, int]) -> bool:
    """Sends a message; returns whether the other end is open.

    The error of a closed end is dropped here. If another error kept it, Python 3.13 could print a BufferError
    when it frees the buffer of the message.
    """
    try:
        pipe.send(message)
    except OSError:
        return False
    return True


def _fields(example: dict, chunk: int) -> tuple[dict[str, Field], int]:
    """Returns the location of each array of a chunk, and the chunk's size in bytes."""
    fields, at = {}, 0
    for name, value in example.items():
        value = np.asarray(value)
        fields[name] = Field(value.dtype, (chunk, *value.shape), at, at + chunk * value.nbytes)
        at = -(-fields[name].stop // _ALIGNMENT) * _ALIGNMENT
    return fields, at


def _unnamed_file(size: int) -> int:
    """Returns the descriptor of an unnamed file in memory, whose pages are allocated when written.

    `multiprocessing.shared_memory` would use /dev/shm, which has 64 MB in a container.
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
        process.kill()  # the process has no state to save
    for process in processes.values():
        process.join()


def end_with_parent() -> None:
    """Starts a thread that ends this process immediately when its parent process has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process has a parent process"

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _make(pipe, end: int) -> None:
    """Produces the requested chunks until the parent process ends.

    Args:
      pipe: connection to the parent process, which sends the shared memory first.
      end: bytes of the shared memory for chunks; the pickled rows follow.
    """
    import cloudpickle

    # A signal reaches the whole group; the parent ends this process.
    for kind in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, kind):  # Windows has no SIGHUP
            signal.signal(getattr(signal, kind), signal.SIG_IGN)
    os.nice(_NICE)
    end_with_parent()
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
                rows, chunk, fields, size = cloudpickle.loads(shared[end:])
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
