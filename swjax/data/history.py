"""Computes the examples of any batch of a run from the seed, without recorded data."""

import numpy as np

from swjax.data.order import order
from swjax.data.progress import Position
from swjax.data.sources import Source


def batch_indices(
    source: Source,
    number: int,
    *,
    batch_size: int,
    seed: int,
    shuffle: str = "global",
    shuffle_shards: int = 16,
    position: dict | None = None,
) -> np.ndarray:
    """Computes the examples of one global batch of a run, without reading examples.

    The result is correct if no example was skipped since the start, or since `position`, which accounts for
    earlier skips.

    Args:
      source: the training source of the run.
      number: number of the batch, from 0; with a position, it counts the batches after the position.
      batch_size: examples per batch, over all processes.
      seed, shuffle, shuffle_shards: settings of the run, see `loader`.
      position: `position()` of the loader at an earlier batch, from a checkpoint; None is the beginning.

    Returns:
      int64 [batch_size], indices of examples in the source; the processes take them in turn.

    Raises:
      ValueError: at the position, the processes have skipped different numbers of examples.

    >>> from swjax.data import loader, source
    >>> patterns = source("synthetic", "train", image_size=8, examples=10)
    >>> batches = loader(patterns, batch_size=4, seed=3, image_size=8, context_length=6)
    >>> given = [next(batches)["index"].tolist() for _ in range(5)]
    >>> given[4] == batch_indices(patterns, 4, batch_size=4, seed=3).tolist()
    True
    """
    base, before = Position(), 0
    if position is not None:
        base, taken = Position(position["left"], position["start"]), position["taken"]
        if len(set(taken)) > 1:
            raise ValueError(
                f"processes have taken {taken} examples each, because some could not be read: "
                f"replay the step to see its batch"
            )
        before = sum(taken)
    numbers = order(source, seed=seed, shuffle=shuffle, shards=shuffle_shards)
    turns = before + number * batch_size + np.arange(batch_size)
    return np.array([numbers[base.of(int(turn))] for turn in turns], np.int64)


def key(source: Source, index: int) -> str:
    """A readable name of an example: its key if the source has keys, else its index and caption."""
    if hasattr(source, "key"):
        return str(source.key(index))
    example = source[index]
    return " ".join(filter(None, (f"{index}:", example["captions"][0], example.get("style"))))
