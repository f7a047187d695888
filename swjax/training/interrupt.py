"""Ends a run cleanly when the user or the scheduler interrupts it."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax

from swjax.training.errors import ExitCode

Handler = Callable[[int, FrameType | None], None]


class Interrupt:
    """Records SIGTERM or SIGINT (Ctrl-C); a second signal ends the process with code 130.

    Attributes:
      requested: whether a signal has arrived.
    """

    def __init__(self):
        self.requested = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(ExitCode.INTERRUPTED_TWICE)
        self.requested = True
        # `print` is unsafe in a signal handler
        os.write(1, b"\nswjax: saving; interrupt again to end at once\n")


def pass_on(signum: int, frame: FrameType | None) -> None:
    """Turns this process's Ctrl-C into SIGTERM, which JAX watches for all processes of a run."""
    signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def catch() -> Iterator[Interrupt]:
    """Yields an `Interrupt` that handles signals inside the context, if this is the main thread.

    In a run of several processes `requested` stays False, because JAX watches SIGTERM there; see
    `swjax.training.distributed.shall_stop`.

    >>> with catch() as interrupt:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     interrupt.requested
    True
    """
    interrupt = Interrupt()
    old: dict[signal.Signals, Any] = {}
    handlers: dict[signal.Signals, Handler]
    if jax.process_count() > 1:
        handlers = {signal.SIGINT: pass_on}
    else:
        handlers = {signal.SIGTERM: interrupt, signal.SIGINT: interrupt}
    with contextlib.suppress(ValueError):  # Python allows signal handlers only in the main thread
        for number, handler in handlers.items():
            old[number] = signal.signal(number, handler)
    try:
        yield interrupt
    finally:
        for number, before in old.items():
            signal.signal(number, before)
