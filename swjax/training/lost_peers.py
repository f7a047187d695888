"""One line and exit code 3 in place of the abort with which JAX ends a process that lost a peer.

JAX's coordination client logs about ten lines and calls `abort()` from a C++ thread; its callback for this
event throws `std::bad_cast` in jax 0.10. So this module handles SIGABRT, and holds back for a second what
C++ writes to file descriptor 2: what JAX wrote before an abort is dropped, anything else is passed on.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

from swjax.training.errors import ExitCode

# What JAX writes when another process has ended. Its log lines have no other mark.
_GONE = b"JAX distributed service detected fatal errors"
_SECOND = 1.0
_installed: "_Stderr | None" = None


class _Stderr:
    """File descriptor 2 as a pipe whose lines reach the old one a second later.

    Python's own `sys.stderr` writes to the old one at once.
    """

    def __init__(self):
        self.old = os.dup(2)
        self.handler: Any = None  # what `watch` gives to C
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        sys.stderr = os.fdopen(os.dup(self.old), "w", buffering=1, errors="backslashreplace")
        self._reader = reader
        self._held: list[tuple[float, bytes]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _read(self) -> None:
        while data := os.read(self._reader, 65536):
            with self._lock:
                self._held.append((time.monotonic() + _SECOND, data))

    def _pass_on(self) -> None:
        while True:
            time.sleep(_SECOND / 5)
            self.flush(before=time.monotonic())

    def held(self) -> bytes:
        """The output that is delayed now."""
        with self._lock:
            return b"".join(data for _, data in self._held)

    def flush(self, before: float = float("inf")) -> None:
        """Passes on what is held until a time, in seconds of `time.monotonic`."""
        with self._lock:
            due = [data for until, data in self._held if until <= before]
            self._held = self._held[len(due) :]
        for data in due:
            os.write(self.old, data)


def watch(line: str) -> None:
    """From now on an abort by JAX because of a lost peer prints one line and exits with code 3.

    Any other abort prints what it printed before, and ends by SIGABRT.

    Args:
      line: what to print, without a newline.
    """
    global _installed
    stderr = _Stderr()

    def on_abort(signal_number: int) -> None:
        time.sleep(_SECOND / 10)  # until what was written has come through the pipe
        if _GONE in stderr.held():
            if not _told.is_set():
                os.write(stderr.old, line.encode() + b"\n")
                os._exit(ExitCode.FAILED)
            time.sleep(10 * _SECOND)  # the main thread has reported it, and ends the process
            os._exit(ExitCode.FAILED)
        stderr.flush()
        libc.signal(signal.SIGABRT, None)  # what `abort` does next

    stderr.handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)  # kept, or C calls freed memory
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, stderr.handler)
    _installed = stderr
    atexit.register(finish)


_told = threading.Event()


def told() -> None:
    """Records that the main thread has found the lost peer, and reports it in a line of its own."""
    _told.set()


def finish() -> None:
    """Passes on the delayed output, at the end of a process that lost no peer."""
    if _installed and not _told.is_set():
        time.sleep(_SECOND / 10)
        _installed.flush()
