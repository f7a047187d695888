"""Errors that end a run, and the exit code of each."""

import contextlib
import enum
import errno
import os
import sys
from collections.abc import Iterator


class ExitCode(enum.IntEnum):
    """Exit codes of a process of a run."""

    FINISHED = 0  # or saved and interrupted
    DIVERGED = 1
    WRONG_CONFIG = 2  # or a wrong command line
    FAILED = 3  # the disk, the output or another process failed; the same command resumes the run
    INTERRUPTED_TWICE = 130
    UNREAD = 141  # the reader of the output closed it, as in `... | head` (128 + SIGPIPE)


class ConfigError(ValueError):
    """The config or the command line has a mistake; `str(error)` is one line for the user."""

    exit_code = ExitCode.WRONG_CONFIG


class OtherArrays(ConfigError):
    """A checkpoint holds other arrays than the config describes."""


class RunError(RuntimeError):
    """A resource of the run failed, such as its disk; `str(error)` is one line for the user."""

    exit_code = ExitCode.FAILED


@contextlib.contextmanager
def output_may_end() -> Iterator[None]:
    """Ends the process without a traceback if its output is closed, as in `... | head`, or its disk is full.

    Characters that a stream cannot encode are escaped. A stream that is closed from the start, as by `>&-`,
    becomes the null device.

    Raises:
      SystemExit: with `ExitCode.UNREAD` if the reader closed the output, or `FAILED` if the disk is full.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        if hasattr(stream := getattr(sys, name), "reconfigure"):  # notebooks have other streams
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        # The flush at exit then writes to the null device, and succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise SystemExit(ExitCode.UNREAD) from None
        print(f"swjax: writing the output failed ({error.strerror})", file=sys.stderr)
        raise SystemExit(ExitCode.FAILED) from None
