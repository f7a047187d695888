"""Replaces JAX's abort of a process that lost a peer by one line and exit code 3.

JAX's coordination client logs about ten lines and calls `abort()` from a C++ thread; its callback for this
event throws `std::bad_cast` in jax 0.10. So this module handles SIGABRT, and delays by one second what C++
code writes to file descriptor 2. Before an abort, it drops JAX's lines and passes on all other output.
"""

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from typing import Any

from swjax.training.faults.errors import ExitCode

# What JAX writes when another process has ended: in its log before it aborts, and in errors of collectives.
_TEXTS = {
    "log": r"JAX distributed service detected fatal errors",
    "error": r"Gloo|NCCL|nccl|Connection (reset|closed)|UNAVAILABLE|DEADLINE_EXCEEDED|coordination service",
}
_SECOND = 1.0
_installed: "_Stderr | None" = None


def is_loss(text: str, *, of: str) -> bool:
    """Whether a text of JAX reports a lost peer.

    JAX has neither a type nor a code for it, so this function, and no other, knows its texts.

    Args:
      text: output of the process, or the message of a JaxRuntimeError.
      of: "log" or "error".

    >>> is_loss("UNAVAILABLE: connection to the leader", of="error")
    True
    """
    return re.search(_TEXTS[of], text) is not None


class _Stderr:
    """Replaces file descriptor 2 by a pipe, and copies the pipe to the original descriptor one second later.

    Python's own `sys.stderr` writes to the original descriptor without delay.
    """

    def __init__(self):
        self.old = os.dup(2)
        self.handler: Any = None  # the C callback that `watch` installs
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
        """The output that is currently delayed."""
        with self._lock:
            return b"".join(data for _, data in self._held)

    def flush(self, before: float = float("inf")) -> None:
        """Passes on output that was due before a time, in seconds of `time.monotonic`."""
        with self._lock:
            due = [data for until, data in self._held if until <= before]
            self._held = self._held[len(due) :]
        with contextlib.suppress(OSError):  # the reader is gone
            for data in due:
                os.write(self.old, data)


def watch(line: str) -> None:
    """Makes an abort by JAX because of a lost peer print one line and exit with code 3.

    Any other abort prints its usual output and ends the process by SIGABRT.

    Args:
      line: the line to print, without a newline.
    """
    global _installed
    stderr = _Stderr()

    def on_abort(signal_number: int) -> None:
        time.sleep(_SECOND / 10)  # until the reader thread has read the pipe
        if is_loss(stderr.held().decode(errors="replace"), of="log"):
            if not _told.is_set():
                os.write(stderr.old, line.encode() + b"\n")
                os._exit(ExitCode.FAILED)
            time.sleep(10 * _SECOND)  # the main thread reports the loss and ends the process
            os._exit(ExitCode.FAILED)
        stderr.flush()
        libc.signal(signal.SIGABRT, None)  # `abort` then ends the process by SIGABRT

    # The reference keeps the callback alive for C.
    stderr.handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, stderr.handler)
    _installed = stderr
    atexit.register(finish)


_told = threading.Event()


def told() -> None:
    """Records that the main thread has detected the lost peer and prints its own line."""
    _told.set()


def finish() -> None:
    """Passes on the delayed output when a process ends without a lost peer."""
    if _installed and not _told.is_set():
        time.sleep(_SECOND / 10)
        _installed.flush()
