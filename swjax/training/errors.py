"""The errors that end a run, each with the exit code of the process."""

import enum


class ExitCode(enum.IntEnum):
    """What a process of a run returns to the shell."""

    FINISHED = 0  # or saved and interrupted
    DIVERGED = 1
    WRONG_CONFIG = 2  # or a wrong command line
    FAILED = 3  # the disk or another process; the same command resumes
    INTERRUPTED_TWICE = 130


class ConfigError(ValueError):
    """A mistake in a config or on the command line; `str(error)` is one line for the user."""

    exit_code = ExitCode.WRONG_CONFIG


class OtherArrays(ConfigError):
    """A checkpoint holds other arrays than the config describes."""


class RunError(RuntimeError):
    """What a run depends on failed, such as its disk; `str(error)` is one line for the user."""

    exit_code = ExitCode.FAILED
