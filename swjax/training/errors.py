"""The errors that end a run, each with the exit code of the process."""

import contextlib
import enum
import os
import sys
from collections.abc import Iterator


class ExitCode(enum.IntEnum):
    """What a process of a run returns to the shell."""

    FINISHED = 0  # or saved and interrupted
    DIVERGED = 1
    WRONG_CONFIG = 2  # or a wrong command line
    FAILED = 3  # the disk or another process; the same command resumes
    INTERRUPTED_TWICE = 130
    UNREAD = 141  # nobody reads the output any more, as in `... | head`; what a shell reports for SIGPIPE


class ConfigError(ValueError):
    """A mistake in a config or on the command line; `str(error)` is one line for the user."""

    exit_code = ExitCode.WRONG_CONFIG


class OtherArrays(ConfigError):
    """A checkpoint holds other arrays than the config describes."""


class RunError(RuntimeError):
    """What a run depends on failed, such as its disk; `str(error)` is one line for the user."""

    exit_code = ExitCode.FAILED


@contextlib.contextmanager
def output_may_end() -> Iterator[None]:
    """Ends the process without a traceback if the reader of its output has left, as in `... | head`.

    Raises:
      SystemExit: with `ExitCode.UNREAD`.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        raise SystemExit(ExitCode.UNREAD) from None
