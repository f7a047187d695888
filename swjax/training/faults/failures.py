"""Reports failures of the disk, the data or another process in one line each."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swjax import data
from swjax.safe_files import DISK, explain
from swjax.training.config import ConfigError, RunError


@contextmanager
def blame_data() -> Iterator[None]:
    """Re-raises as one-line errors: too many unreadable examples, or no remaining loader process.

    Raises:
      ConfigError: replaces `data.BadData`.
      RunError: replaces `data.LostProcess`.
    """
    try:
        yield
    except data.BadData as error:
        raise ConfigError(
            f"config.data: {error}; config.data.max_bad_share and on_bad set the allowed share"
        ) from error
    except data.LostProcess as error:
        raise RunError(
            f"{error}; config.data.workers sets their number. Once fixed, the same command resumes the run"
        ) from error


# Error numbers that show a wrong path for the data, rather than a disk that fails during a write.
WRONG_PATH = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}
WRONG_PATH |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


@contextmanager
def blame_data_path() -> Iterator[None]:
    """Re-raises errors of the data path that the config names as a one-line ConfigError.

    Raises:
      ConfigError: replaces an OSError with a number in `WRONG_PATH`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in WRONG_PATH:
            raise
        raise ConfigError(
            f"config.data: cannot read or write {str(error.filename)!r}: {error.strerror}; "
            f"change config.data.dir, or the path that the data set names"
        ) from error


@contextmanager
def blame_disk(workdir: Path) -> Iterator[None]:
    """Re-raises errors of the disk as a one-line RunError that names the path and the remedy.

    Args:
      workdir: path to report if the error names no path.

    Raises:
      RunError: replaces an OSError with a number in `DISK`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise RunError(f"{explain(error, workdir)}; the same command resumes the run") from error
