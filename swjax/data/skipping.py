"""Examples that cannot be read: each is counted and logged, and skipped or the end of the run."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

POLICIES = ("skip", "stop")
_FIRST = 1000  # examples that the share is taken of at least: the tenth may be bad by bad luck
_SHOWN = 10  # bad examples that are shown singly; after them, each time their number has doubled

logger = logging.getLogger("swjax.data")


class BadExample(ValueError):
    """An example that cannot be used; the message says why."""


class BadData(ValueError):
    """More examples than allowed cannot be read; the message has their number and the last key."""


class Skips:
    """Counts the bad examples of a run, and stops it when they are too many.

    Each is logged with its key, to the logger "swjax.data": the first ones as warnings, and all at
    level INFO.

    Args:
      policy: skip: leave them out. stop: the first one ends the run.
      max_share: the share of the examples read, and of the first 1,000, that may be bad.
      read, skipped: counts to continue from.
    """

    def __init__(self, policy: str, max_share: float, read: int = 0, skipped: int = 0):
        if policy not in POLICIES or not 0 <= max_share <= 1:
            raise ValueError(
                f"the policy for bad examples must be one of {', '.join(POLICIES)} and the share "
                f"that may be bad must be in [0, 1]; they are {policy!r} and {max_share}"
            )
        self._policy, self._share = policy, max_share
        self.read, self.skipped = read, skipped

    def good(self, count: int) -> None:
        """Counts examples that are used."""
        self.read += count

    def bad(self, reason: str) -> None:
        """Counts and logs an example that is not.

        Raises:
          BadData: if the policy ends the run.
        """
        self.read, self.skipped = self.read + 1, self.skipped + 1
        shown = self.skipped <= _SHOWN or self.skipped.bit_count() == 1
        logger.log(
            logging.WARNING if shown else logging.INFO,
            "skipped %s (%d of %d)", reason, self.skipped, self.read,
        )  # fmt: skip
        if self._policy == "stop":
            raise BadData(f"cannot read {reason}: repair it, or let bad examples be skipped")
        if self.skipped > self._share * max(self.read, _FIRST):
            raise BadData(
                f"{self.skipped} of {self.read} examples cannot be read, more than the share of "
                f"{self._share} that may be skipped; the last is {reason}"
            )

    def damage(self, files: tuple[tuple[str, str], ...], share: float) -> None:
        """Logs files that end early, and checks the share of all bytes that is lost.

        Raises:
          BadData: if that is too much.
        """
        for path, reason in files:
            logger.warning("%s: %s; what comes before is used", path, reason)
        if files and (self._policy == "stop" or share > self._share):
            raise BadData(
                f"{len(files)} damaged files, {share:.2%} of the bytes, more than may be skipped; "
                f"the last is {': '.join(files[-1])}"
            )


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Appends all bad examples to a file, which the first one creates, and prints some to stderr."""
    file, stderr = logging.FileHandler(path, delay=True), logging.StreamHandler()
    stderr.setLevel(logging.WARNING)
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in (file, stderr):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, stderr):
            logger.removeHandler(handler)
            handler.close()
        logger.level, logger.propagate = before
