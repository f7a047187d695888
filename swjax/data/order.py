"""The order of the examples: fixed by a seed, shared among processes, resumed anywhere.

The order of a run is one endless sequence of example numbers. It does not depend on batches, processes
or workers, which take turns at its positions. So their number may change between two parts of a run, and
a few numbers describe what was taken.
"""

import bisect
import functools
from typing import Any

import grain
import numpy as np

from swjax.data.mixture import Mixture
from swjax.data.progress import Position
from swjax.data.sources import Source

SHUFFLES = ("global", "shard")


def order(
    source: Source, *, seed: int, shuffle: str = "global", shards: int = 16
) -> grain.MapDataset:
    """Returns the endless sequence of example numbers.

    Each source, and each part of a mixture, is read in epochs, each in another order; no
    example comes again before all have come. Parts of a mixture take turns in proportion to their weights.

    Args:
      source: examples by number.
      seed: of all orders.
      shuffle: global: any example may follow any. shard: files are put in a random order and read a
        few at a time, row by row in turn: file 0, 1, ..., shards - 1, 0, 1, ...; rows are shuffled
        within their file. So N processes, N a divisor of `shards`, read different files. Sources
        that are not in files are shuffled globally.
      shards: files read at a time.

    Raises:
      ValueError: if there is no such way to shuffle, or no file is to be read.
    """
    if shuffle not in SHUFFLES or shards < 1:
        raise ValueError(
            f"shuffle must be one of {', '.join(SHUFFLES)} and shuffle_shards positive; they are "
            f"{shuffle!r} and {shards}"
        )
    if isinstance(source, Mixture):
        parts = [
            order(part, seed=_seed(seed, i), shuffle=shuffle, shards=shards).map(
                functools.partial(_add, int(start))
            )
            for i, (part, start) in enumerate(zip(source.parts, source.starts))
        ]
        return grain.MapDataset.mix(parts, source.weights)
    lengths = getattr(source, "shards", None)
    if shuffle == "shard" and lengths is not None:
        return ShardShuffle(lengths, seed=seed, shards=shards).repeat()
    return grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat()


def _seed(seed: int, part: int) -> int:
    return int(np.random.SeedSequence([seed, part]).generate_state(1)[0])


def _add(start: int, index: int) -> int:
    return start + index


class ShardShuffle(grain.MapDataset):
    """The numbers of the examples of files, epoch after epoch, shuffled with few files open at a time.

    Args:
      lengths: int64 [files], examples in each, numbered from file to file.
      seed: of the order.
      shards: files read at a time.
    """

    def __init__(self, lengths: np.ndarray, *, seed: int, shards: int):
        super().__init__()
        self._lengths, self._seed, self._shards = np.asarray(lengths, np.int64), seed, shards
        # Where threads and neighbouring processes read now; a mixture has a cache for each part.
        self._plan = functools.lru_cache(4)(self._make_plan)
        self._group = functools.lru_cache(4)(self._make_group)

    def __reduce__(self) -> tuple:
        make = functools.partial(ShardShuffle, seed=self._seed, shards=self._shards)
        return make, (self._lengths,)

    def __len__(self) -> int:
        return int(self._lengths.sum())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, position = divmod(index, len(self))
        _, ends = self._plan(epoch)
        group = bisect.bisect_right(ends, position)
        return int(self._group(epoch, group)[position - (ends[group - 1] if group else 0)])

    def _make_plan(self, epoch: int) -> tuple[np.ndarray, list[int]]:
        """Returns an epoch's order of files, and the positions at which groups of them end."""
        files = np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))
        sums = np.cumsum(self._lengths[files])
        last = np.minimum(np.arange(0, len(files), self._shards) + self._shards, len(files)) - 1
        return files, sums[last].tolist()

    def _make_group(self, epoch: int, group: int) -> np.ndarray:
        """Returns the example numbers of a group of files in the order of an epoch."""
        starts = np.cumsum(self._lengths) - self._lengths
        files = self._plan(epoch)[0][group * self._shards : (group + 1) * self._shards]
        rows = [
            starts[file] + np.random.default_rng([self._seed, epoch, file]).permutation(n)
            for file, n in zip(files, self._lengths[files])
        ]
        turns = np.concatenate([np.arange(len(row)) for row in rows])
        return np.concatenate(rows)[np.argsort(turns, kind="stable")]  # file by file in a turn


class ProcessShare(grain.MapDataset):
    """The part of an order that one of several processes takes, from a position on.

    Args:
      parent: the order.
      position: what was taken before, see `Position`.
      process_index, process_count: of this process.
    """

    def __init__(
        self, parent: grain.MapDataset, position: Position, process_index: int, process_count: int
    ):
        super().__init__(parent)
        self._position, self._index, self._count = position, process_index, process_count

    def __len__(self) -> int:
        return (len(self._parent) - self._position.start) // self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[self._position.of(self._index + index * self._count)]
