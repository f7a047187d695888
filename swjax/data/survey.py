"""Reads examples of a data set before a run, so that a bad set is refused at the start."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from swjax.data.examples import fault, look
from swjax.data.skipping import too_many
from swjax.data.sources import Source

SAMPLE = 1000  # examples that are read; a set of at most so many is read as a whole
_SECONDS = 5.0  # a survey ends after so long, with what it has read
_THREADS = 16
# A sample refuses a set if the count of bad examples exceeds the limit by so many standard deviations.
_DEVIATIONS = 3.0


class Survey(NamedTuple):
    """What some examples of a data set show.

    Attributes:
      examples: number of examples in the data set.
      chosen: number of examples to read.
      read: number of examples that were read in time.
      bad: key and reason of each that training would skip.
    """

    examples: int
    chosen: int
    read: int
    bad: tuple[tuple[str, str], ...]


def sample(source: Source, most: int = SAMPLE) -> list[int]:
    """Returns at most `most` indices of a source in ascending order, the same ones at every call.

    >>> sample(range(3)), len(set(sample(range(10**9), 50)))
    ([0, 1, 2], 50)
    """
    count = len(source)
    if count <= most:
        return list(range(count))
    chosen = np.random.default_rng(0).choice(count, most, replace=False, shuffle=False)
    return np.sort(chosen).tolist()


def survey(source: Source, *, part: int = 0, parts: int = 1, seconds: float = _SECONDS) -> Survey:
    """Reads and decodes examples as training does: all if there are at most 1,000, else a sample of 1,000.

    The order of reading is random, so that the examples read in a limited time represent all.

    Args:
      source: the data set.
      part, parts: this process reads every `parts`-th example of the sample, from the `part`-th on.
      seconds: time after which no further example is read.
    """
    if len(source) > SAMPLE and hasattr(source, "sampled"):  # others are slow to read
        indices = source.sampled(SAMPLE)
    else:
        indices = np.random.default_rng(1).permutation(sample(source)).tolist()
    indices, end = indices[part::parts], time.monotonic() + seconds
    read, bad = 0, []
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(indices), _THREADS):
            found = list(pool.map(lambda index: _fault(source, index), indices[start:][:_THREADS]))
            read += len(found)
            bad += [each for each in found if each]
            if time.monotonic() > end:
                break
    return Survey(len(source), len(indices), read, tuple(bad))


def _fault(source: Source, index: int) -> tuple[str, str] | None:
    try:
        look(source, index)
    except Exception as error:  # any error makes the example bad, as in training
        return fault(source, index, error)
    return None


def refusal(bad: int, read: int, examples: int, share: float) -> str:
    """Returns why training would end because of bad examples, or "".

    A sample refuses a set only if chance cannot explain what it shows: the number of bad examples in it is a
    Poisson variable, so three standard deviations are subtracted before it stands for all.

    Args:
      bad, read: numbers of bad examples and of all examples that were read.
      examples: number of examples in the data set.
      share: share of bad examples that training skips.

    >>> refusal(20, 21, 21, 0.01)
    '20 of 21 examples are bad, more than the share of 0.01 that training skips (max_bad_share)'
    >>> refusal(15, 1000, 10**6, 0.01), bool(refusal(30, 1000, 10**6, 0.01))
    ('', True)
    """
    scale = examples / max(read, 1)
    surely = bad if read >= examples else max(bad, (bad - _DEVIATIONS * math.sqrt(bad)) * scale)
    if not too_many(surely, examples, share):
        return ""
    about = "" if read >= examples else "about "
    return (
        f"{about}{bad * scale:,.0f} of {examples:,} examples are bad, more than the share of "
        f"{share} that training skips (max_bad_share)"
    )
