"""Ends a run cleanly when the user or the scheduler interrupts it, or its output fails."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

import jax

from swjax.training.faults.errors import ExitCode

_TWICE = 0.5  # seconds: a launcher may pass on a Ctrl-C that the terminal has delivered already
_LINE = b"\nswjax: saving after this step or compilation; Ctrl-C again ends at once\n"


class Interrupt:
    """Records SIGTERM, SIGHUP or SIGINT (Ctrl-C), also while the main thread waits for XLA.

    Python calls signal handlers only between its own instructions, so not during a compilation. But a signal
    is at once written to a pipe, which a thread reads.

    A second Ctrl-C ends the process with code 130. A second signal of another kind does not: a system that
    shuts down sends SIGTERM and SIGHUP. SIGHUP, which a closed terminal sends, counts unless it is ignored,
    as under `nohup`. In a run of several processes JAX watches SIGTERM for all of them, see
    `swjax.training.distributed.should_stop`; other signals turn into SIGTERM, and `requested` stays False.

    Attributes:
      requested: whether a signal has arrived.
      output_failed: whether the run was interrupted because its output could not be written.
    """

    def __init__(self):
        self.requested, self.output_failed = False, False
        self._several = jax.process_count() > 1
        self._before: dict[int, Any] = {}  # the handlers outside, by signal
        self._since = 0.0  # time of the first signal, or 0
        self._pipe = self._outer = -1  # where signals are written to, here and outside

    def handle(self) -> None:
        """Handles signals from now on, because the run has something to save; before, they do as outside."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers only in the main thread
        numbers = [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        if hangup and signal.getsignal(hangup) is not signal.SIG_IGN:
            numbers.append(hangup)
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._outer = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        for number in numbers:
            self._before[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Restores the handlers outside."""
        if self._before:
            for number, before in self._before.items():
                signal.signal(number, before)
            signal.set_wakeup_fd(self._outer)
            os.close(self._pipe)  # ends the thread

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.requested = not self._several

    def _watch(self, reader: int) -> None:
        """Reads the numbers of signals until the pipe is closed."""
        while number := os.read(reader, 1):
            if self._outer >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._outer, number)
            if number[0] in self._before:
                self._receive(number[0])
        os.close(reader)

    def _receive(self, signum: int) -> None:
        if not self._since:
            self._since = time.monotonic()
            self.requested = not self._several
            if self._several:
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                os.write(1, _LINE)
            except BlockingIOError:
                pass
            except OSError:  # in `... | tee log`, Ctrl-C ends tee as well
                _divert(1, _LINE)
        elif signum == signal.SIGINT and time.monotonic() - self._since > _TWICE:
            os._exit(ExitCode.INTERRUPTED_TWICE)

    def fail(self) -> None:
        """Interrupts the run, with all its processes, because the output failed."""
        if self.requested:
            return  # a Ctrl-C ends the reader of the output too
        self.output_failed = True
        if self._several:
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


@contextlib.contextmanager
def catch() -> Iterator[Interrupt]:
    """Yields an `Interrupt` for the signals inside the context, if this is the main thread.

    >>> with catch() as interrupt:
    ...     interrupt.handle()
    ...     signal.raise_signal(signal.SIGTERM)
    ...     interrupt.requested
    True
    """
    interrupt = Interrupt()
    with contextlib.ExitStack() as stack:
        stack.callback(interrupt.release)
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(contextlib.redirect_stdout(_Output(sys.stdout, interrupt)))
            stack.enter_context(contextlib.redirect_stderr(_Output(sys.stderr, interrupt)))
        if jax.process_count() > 1:  # a signal to one process must stop all
            interrupt.handle()
        yield interrupt
