"""Counts and logs unreadable examples, and skips them or ends the run."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from swjax.safe_files import open_no_follow

POLICIES = ("skip", "stop")
# Minimum denominator of the share, so that a bad tenth example does not count as 10 %.
FIRST = 1000
# Number of bad examples to show one by one; after them, one is shown whenever the number has doubled.
_SHOWN = 10

logger = logging.getLogger("swjax.data")


class BadExample(ValueError):
    """An unusable example; the message gives the reason."""


class BadData(ValueError):
    """More examples than allowed are unreadable; the message has their number and the last key."""


def too_many(bad: float, examples: float, share: float) -> bool:
    """Whether so many bad examples end a run: more than the share of all, counted as at least 1,000.

    >>> too_many(10, 42, share=0.01), too_many(11, 42, share=0.01), too_many(11, 2000, share=0.01)
    (False, True, False)
    """
    return bad > share * max(examples, FIRST)


class Skips:
    """Counts the bad examples of a run, and stops the run if they are too many.

    Each bad example is logged with its key to the logger "swjax.data": the first ones as warnings, all at
    level INFO.

    Args:
      policy: "skip" skips bad examples; "stop" ends the run at the first one.
      max_share: largest allowed share of bad examples among the examples read, counted as at least 1,000 in
        each epoch. An example that is bad in every epoch therefore counts like one that is read once.
      examples: number of examples of an epoch; 0: there is one epoch.

    Attributes:
      read, skipped: the counts.
    """

    def __init__(self, policy: str, max_share: float, examples: int = 0):
        if policy not in POLICIES or not 0 <= max_share <= 1:
            raise ValueError(
                f"the policy for bad examples must be one of {', '.join(POLICIES)} and the share "
                f"that may be bad must be in [0, 1]; they are {policy!r} and {max_share}"
            )
        self._policy, self._share, self._examples = policy, max_share, examples
        self.read = self.skipped = 0

    def good(self, count: int) -> None:
        """Counts usable examples."""
        self.read += count

    def bad(self, reason: str) -> None:
        """Counts and logs an unusable example.

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
            raise BadData(f"cannot read {reason}: repair it, or set the policy to skip")
        epochs = -(-self.read // self._examples) if self._examples else 1
        if too_many(self.skipped / epochs, self.read / epochs, self._share):
            raise BadData(
                f"{self.skipped} of {self.read} examples cannot be read, more than the share of "
                f"{self._share} that may be skipped; the last is {reason}"
            )

    def damage(self, files: tuple[tuple[str, str], ...], share: float) -> None:
        """Logs truncated files, and checks the share of bytes that is lost.

        Raises:
          BadData: the share is larger than allowed.
        """
        for path, reason in files:
            logger.warning("%s: %s; the part before it is used", path, reason)
        if files and (self._policy == "stop" or share > self._share):
            raise BadData(
                f"{len(files)} damaged files, {share:.2%} of the bytes, more than may be skipped; "
                f"the last is {': '.join(files[-1])}"
            )


class _File(logging.FileHandler):
    """Writes to a file, but not through a link."""

    def _open(self):
        return open_no_follow(self.baseFilename, self.mode)


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Appends all bad examples to a file, created at the first one, and prints some to stderr."""
    file, stderr = _File(path, delay=True), logging.StreamHandler()
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
