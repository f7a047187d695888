"""Ends a run cleanly when the user or the scheduler interrupts it, or its output fails."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

import jax

from swjax.training.faults.errors import ExitCode

Handler = Callable[[int, FrameType | None], None]


_TWICE = 0.5  # seconds: a launcher may pass on a Ctrl-C that the terminal has delivered already


class Interrupt:
    """Records SIGTERM, SIGHUP or SIGINT (Ctrl-C).

    A second Ctrl-C ends the process with code 130. A second signal of another kind does not: a system that
    shuts down sends SIGTERM and SIGHUP.

    Attributes:
      requested: whether a signal has arrived.
      can_save: set by the program when it has something to save. Before, a signal does what it did outside:
        it ends the process, or raises KeyboardInterrupt, as in a notebook.
      before: the handlers outside, by signal.
      output_failed: whether the run was interrupted because its output could not be written.
    """

    def __init__(self):
        self.requested, self.can_save, self.output_failed = False, False, False
        self.before: dict[signal.Signals, Any] = {}
        self._since = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if not self.can_save:
            if callable(before := self.before.get(signal.Signals(signum))):
                return before(signum, frame)
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif not self.requested:
            self.requested, self._since = True, time.monotonic()
            line = b"\nswjax: saving; Ctrl-C again ends at once\n"
            try:
                os.write(1, line)  # `print` is unsafe in a signal handler
            except BlockingIOError:
                pass
            except OSError:  # in `... | tee log`, Ctrl-C ends tee as well
                _divert(1, line)
        elif signum == signal.SIGINT and time.monotonic() - self._since > _TWICE:
            os._exit(ExitCode.INTERRUPTED_TWICE)

    def fail(self) -> None:
        """Interrupts the run, with all its processes, because the output failed."""
        if self.requested:
            return  # a Ctrl-C ends the reader of the output too
        self.output_failed = True
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.requested, self._since = True, time.monotonic()


class _Output:
    """A standard stream. If writing fails, the run saves and ends, and standard error receives the rest."""

    def __init__(self, stream: TextIO, interrupt: Interrupt):
        self._stream, self._interrupt = stream, interrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes at once, so that a failure is seen at once."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except BlockingIOError:  # a slow reader; the stream keeps the text for the next call
            pass
        except OSError as error:
            line = f"swjax: writing the output failed ({error.strerror}); saving\n"
            _divert(self._stream.fileno(), line.encode())
            self._interrupt.fail()
        return len(text)


def _divert(descriptor: int, line: bytes) -> None:
    """Sends later output of a stream to standard error, or nowhere if that fails as well."""
    target = 2
    try:
        if sys.__stderr__ is None:  # closed at the start: the number may belong to another file
            raise BrokenPipeError
        os.write(target, line)
    except OSError:
        target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, descriptor)


def pass_on(signum: int, frame: FrameType | None) -> None:
    """Turns this process's Ctrl-C into SIGTERM, which JAX watches for all processes of a run."""
    signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def catch() -> Iterator[Interrupt]:
    """Yields an `Interrupt` that handles signals inside the context, if this is the main thread.

    SIGHUP, which a closed terminal sends, is a signal as well unless it is ignored, as under `nohup`. In a
    run of several processes `requested` stays False, because JAX watches SIGTERM there; see
    `swjax.training.distributed.shall_stop`.

    >>> with catch() as interrupt:
    ...     interrupt.can_save = True
    ...     signal.raise_signal(signal.SIGTERM)
    ...     interrupt.requested
    True
    """
    interrupt = Interrupt()
    several = jax.process_count() > 1
    handler: Handler = pass_on if several else interrupt
    numbers = [signal.SIGINT] if several else [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup and signal.getsignal(hangup) is not signal.SIG_IGN:
        numbers.append(hangup)
    with contextlib.ExitStack() as stack:
        # Python allows signal handlers only in the main thread.
        with contextlib.suppress(ValueError):
            for number in numbers:
                interrupt.before[number] = signal.signal(number, handler)
            stack.enter_context(contextlib.redirect_stdout(_Output(sys.stdout, interrupt)))
            stack.enter_context(contextlib.redirect_stderr(_Output(sys.stderr, interrupt)))
        try:
            yield interrupt
        finally:
            for number, before in interrupt.before.items():
                signal.signal(number, before)
