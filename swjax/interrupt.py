"""Ends a run cleanly when the user or the scheduler asks."""

import contextlib
import os
import signal


class Interrupt:
    """Whether SIGTERM or SIGINT (Ctrl-C) has come; a second one ends the process, with code 130."""

    def __init__(self):
        self.requested = False

    def __call__(self, signum, frame):
        if self.requested:
            os._exit(130)
        self.requested = True
        os.write(
            1, b"\nswjax: saving; interrupt again to end at once\n"
        )  # print is unsafe in a handler


@contextlib.contextmanager
def catch():
    """Gives an `Interrupt` that listens inside the context, where this is the main thread.

    >>> with catch() as interrupt:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     interrupt.requested
    True
    """
    interrupt, old = Interrupt(), {}
    with contextlib.suppress(ValueError):  # not the main thread: Python allows no handlers there
        for number in (signal.SIGTERM, signal.SIGINT):
            old[number] = signal.signal(number, interrupt)
    try:
        yield interrupt
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
