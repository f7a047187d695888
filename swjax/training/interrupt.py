"""Ends a run cleanly when the user or the scheduler asks."""

import contextlib
import os
import signal

import jax

from swjax.training.errors import ExitCode


class Interrupt:
    """Whether SIGTERM or SIGINT (Ctrl-C) has come; a second one ends the process, with code 130."""

    def __init__(self):
        self.requested = False

    def __call__(self, signum, frame):
        if self.requested:
            os._exit(ExitCode.INTERRUPTED_TWICE)
        self.requested = True
        os.write(
            1, b"\nswjax: saving; interrupt again to end at once\n"
        )  # print is unsafe in a handler


def pass_on(signum, frame):
    """Turns this process's Ctrl-C into SIGTERM, which JAX watches for all processes of a run."""
    signal.signal(signum, signal.SIG_DFL)  # the second ends it
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def catch():
    """Gives an `Interrupt` that listens inside the context, where this is the main thread.

    In a run of several processes it never asks for anything: see `swjax.training.distributed.shall_stop`.

    >>> with catch() as interrupt:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     interrupt.requested
    True
    """
    interrupt, old = Interrupt(), {}
    handlers = {signal.SIGTERM: interrupt, signal.SIGINT: interrupt}
    if jax.process_count() > 1:
        handlers = {signal.SIGINT: pass_on}
    with contextlib.suppress(ValueError):  # not the main thread: Python allows no handlers there
        for number, handler in handlers.items():
            old[number] = signal.signal(number, handler)
    try:
        yield interrupt
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
