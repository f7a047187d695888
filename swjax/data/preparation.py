"""Prepares a data set once and atomically, even with interruptions and several processes."""

import contextlib
import fcntl
import io
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swjax.safe_files import open_no_follow


def prepared(make_builder: Callable, data_dir: str | Path, name: str) -> Any:
    """Returns a TFDS builder whose data set is on disk. The first call prepares the data set.

    TFDS writes into a temporary directory and renames it at the end. The next call removes the leftovers of
    an interrupted preparation. One process prepares while others wait. The version is part of the path, so a
    new version does not replace an old one.

    Args:
      make_builder: a function: data_dir -> builder.
      data_dir: directory of prepared data sets.
      name: name of the data set and of its directory.
    """
    with _quiet():
        builder = make_builder(data_dir)
        if builder.is_prepared():
            return builder
    with _quiet(), lock(Path(data_dir) / f".{name}.lock"):
        for leftover in Path(builder.data_dir).parent.glob("incomplete.*"):
            shutil.rmtree(leftover)
        # Another process may have prepared the data set meanwhile. A builder checks the disk only when
        # created.
        builder = make_builder(data_dir)
        if not builder.is_prepared():
            builder.download_and_prepare()
    return builder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the progress bars, announcements and warnings of TFDS."""
    import tensorflow_datasets as tfds

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()
        logger.setLevel(level)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Holds a lock that the operating system releases when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_no_follow(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that prepares {path.parent}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
