"""Failures of the disk, the data or another process, each reported in one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swjax import data
from swjax.training.config import ConfigError, RunError

# What a disk that is full, read-only or broken answers: the remedy.
DISK = {
    errno.ENOSPC: "give it room",
    errno.EDQUOT: "give it room",
    errno.EFBIG: "give it room",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EIO: "repair the disk",
    errno.ENOENT: "name a path that exists or can be made",
    errno.ENOTDIR: "name a directory, not a file",
    errno.EEXIST: "name a directory, not a file",
}


@contextmanager
def blame_data() -> Iterator[None]:
    """Says in one line that too many examples cannot be read, or that no loader process is left.

    Raises:
      ConfigError: in place of `data.BadData`.
      RunError: in place of `data.LostProcess`.
    """
    try:
        yield
    except data.BadData as error:
        raise ConfigError(
            f"config.data: {error}; config.data.max_bad_share and on_bad say what is allowed"
        ) from error
    except data.LostProcess as error:
        raise RunError(
            f"{error}; config.data.workers is their number. With that fixed, the same command resumes the run"
        ) from error


# What names a path that cannot hold the data, as opposed to a disk that fails while it is written.
WRONG_PATH = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}
WRONG_PATH |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


@contextmanager
def blame_data_path() -> Iterator[None]:
    """Says in one line that data cannot be read from, or prepared in, the path that the config names.

    Raises:
      ConfigError: in place of the errors in `WRONG_PATH`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in WRONG_PATH:
            raise
        raise ConfigError(
            f"config.data: cannot read or write {str(error.filename)!r}: {_reason(error)}; "
            f"change config.data.dir, or the path that the data set names"
        ) from error


@contextmanager
def blame_disk(workdir: Path) -> Iterator[None]:
    """Says in one line that a path cannot be read or written, and what to do.

    Args:
      workdir: named where the system names no path.

    Raises:
      RunError: in place of the errors in `DISK`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        remedy = DISK[error.errno]
        path = error.filename or str(workdir)
        raise RunError(
            f"cannot read or write {path!r}: {_reason(error)}; {remedy}; the same command resumes the run"
        ) from error


def _reason(error: OSError) -> str | None:
    """Why the system cannot use a path."""
    return "it does not exist" if error.errno == errno.ENOENT else error.strerror
