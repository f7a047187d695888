"""The order of the examples: fixed by a seed, shared among processes, resumable at any position.

The order of a run is one endless sequence of example indices. It is independent of batches, processes and
workers; the processes take its positions in turn. So the number of processes may change when a run resumes,
and a few numbers describe the consumed positions.
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
    """Returns the endless sequence of example indices.

    Each source, or each source of a mixture, is read in epochs with a new order per epoch. No example repeats
    within an epoch. The sources of a mixture alternate in proportion to their weights.

    Args:
      source: examples by index.
      seed: seed of all orders.
      shuffle: "global" permutes all examples. "shard" visits files in random order, with `shards` files open
        at a time. It takes one row per open file in turn (file 0, 1, ..., shards - 1, 0, 1, ...), and
        shuffles rows within their file. So N processes read different files if N divides `shards`. Sources
        without files are shuffled globally.
      shards: number of files read at a time.

    Raises:
      ValueError: `shuffle` is unknown, or `shards` is not positive.
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
    """Indices of the examples in files, epoch after epoch, shuffled with few files open at a time.

    Args:
      lengths: int64 [files], number of examples per file; indices continue from file to file.
      seed: seed of the order.
      shards: number of files read at a time.
    """

    def __init__(self, lengths: np.ndarray, *, seed: int, shards: int):
        super().__init__()
        self._lengths, self._seed, self._shards = np.asarray(lengths, np.int64), seed, shards
        # Threads and neighboring processes read near the same position. Each part of a mixture has its own
        # cache.
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
        """Returns the order of files in an epoch, and the position at which each group of files ends."""
        files = np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))
        sums = np.cumsum(self._lengths[files])
        last = np.minimum(np.arange(0, len(files), self._shards) + self._shards, len(files)) - 1
        return files, sums[last].tolist()

    def _make_group(self, epoch: int, group: int) -> np.ndarray:
        """Returns the example indices of a group of files in the order of an epoch."""
        starts = np.cumsum(self._lengths) - self._lengths
        files = self._plan(epoch)[0][group * self._shards : (group + 1) * self._shards]
        rows = [
            starts[file] + np.random.default_rng([self._seed, epoch, file]).permutation(n)
            for file, n in zip(files, self._lengths[files])
        ]
        turns = np.concatenate([np.arange(len(row)) for row in rows])
        # Each turn takes one row per file.
        return np.concatenate(rows)[np.argsort(turns, kind="stable")]


class ProcessShare(grain.MapDataset):
    """The examples of an order that one of several processes takes, starting at a position.

    Args:
      parent: the order of all examples.
      position: the positions consumed so far, see `Position`.
      process_index, process_count: index of this process, and number of processes.
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
