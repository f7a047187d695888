"""Batches of a source, in an order that a seed fixes. A loader can start at any position."""

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from numbers import Integral
from typing import Any

import numpy as np

from swjax.data.augmentation import Augmentation
from swjax.data.examples import EvalExample, TrainExample
from swjax.data.images import SHORTEST
from swjax.data.memory import Memory
from swjax.data.processes import Processes
from swjax.data.progress import Position, Progress
from swjax.data.skipping import FIRST, BadData, Skips, logger
from swjax.data.sources import Source
from swjax.fitting import Fitting
from swjax.packages import require

# Least values of arguments of `loader`, 0 for others; a caption has a start and an end token.
_LEAST = {"batch_size": 1, "image_size": 1, "context_length": 2, "process_count": 1}
_THREADS = 2
_CHUNK = 128  # examples per chunk, the unit of loading
_CHUNKS_AHEAD = 4
_MOST_EXAMPLES = 2**31 - 1  # labels are int32
_PATIENCE = 10  # seconds that `close` waits for a chunk that is being loaded
_CROPS = 4  # separates the random stream of captions and crops from the stream of the order
_CROPPED = Augmentation()


class Batches(Iterator):
    """Iterator over the batches of an evaluation, with a `close` method."""

    def __init__(self, chunks: Iterator, skips: Skips):
        self._chunks: Iterator | None = chunks
        self._skips = skips

    def __next__(self) -> dict[str, np.ndarray]:
        if self._chunks is None:
            raise StopIteration
        batch = next(self._chunks)
        self._count(batch["error"])
        batch["mask"] = batch["mask"] & (batch.pop("error") == b"")
        return batch

    def close(self) -> None:
        """Stops the threads and processes."""
        close = getattr(self._chunks, "close", None)
        if close:
            close()
        self._chunks = None

    def _count(self, errors: np.ndarray) -> None:
        """Counts readable and unreadable examples, in their order."""
        after = 0
        for row in np.flatnonzero(errors != b"").tolist():
            self._skips.good(row - after)
            self._skips.bad(errors[row].decode(errors="replace"))
            after = row + 1
        self._skips.good(len(errors) - after)


class TrainBatches(Batches):
    """Endless iterator over training batches that can save its position.

    A thread assembles the next batch while the caller uses the last one."""

    def __init__(self, chunks: Iterator, skips: Skips, batch_size: int, state: Progress):
        super().__init__(chunks, skips)
        self._state, self._taken = state, state.taken
        self._unusable = 0  # examples since the last usable one
        self._ended = threading.Event()
        self._assembled = _assembled(chunks, batch_size, self._ended)
        self._thread = ThreadPoolExecutor(1, "swjax-batches")
        self._coming: Future | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        if self._chunks is None:
            raise StopIteration
        batch = None
        while batch is None:
            coming = self._coming or self._begin()
            batch, errors = coming.result()
            self._coming = None
            self._count(errors)
            self._unusable = 0 if (errors == b"").any() else self._unusable + len(errors)
            if self._unusable > max(self._state.examples, FIRST):
                raise BadData(
                    f"none of the last {self._unusable} examples can be read, more than the data set has: "
                    "`swjax data check` lists the reasons"
                )
            self._taken += len(errors)
        self._state = dataclasses.replace(
            self._state,
            batches=self._state.batches + 1,
            taken=self._taken,
            read=self._skips.read,
            skipped=self._skips.skipped,
        )
        # Started last: once its thread runs, this thread may wait milliseconds for the interpreter or a core.
        self._coming = self._begin()
        return batch

    def _begin(self) -> Future:
        return self._thread.submit(next, self._assembled)

    def close(self) -> None:
        """Stops the threads and processes, and frees the batches that they have loaded."""
        self._ended.set()
        if self._coming:
            wait([self._coming], timeout=_PATIENCE)
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()
        self._coming, self._assembled = None, iter(())

    @property
    def progress(self) -> Progress:
        """The progress of this process after the batches so far."""
        return self._state

    def position(self, gather: Callable[[np.ndarray], np.ndarray] = lambda own: own[None]) -> dict:
        """Returns the position after the batches so far, JSON-serializable, for another loader to continue.

        Args:
          gather: a function: int64 [3] of this process -> [processes, 3], ordered by process. All processes
            must call `position` after the same number of batches. The default serves a single process.
        """
        return self._state.position(gather)


def _assembled(
    chunks: Iterator, size: int, ended: threading.Event
) -> Iterator[tuple[dict | None, np.ndarray]]:
    """Assembles batches of readable rows, each with the error, or b"", of every row read for the batch.

    If most rows are bad, it yields None with the errors so far, because they may be a reason to stop."""
    memory = Memory()
    chunk, at = {"error": np.empty(0, "S")}, 0  # rows before `at` are consumed
    while True:
        pieces, errors, missing = [], [], size
        while missing:
            if at == len(chunk["error"]):
                if ended.is_set():
                    return
                chunk, at = next(chunks), 0
            good = np.flatnonzero(chunk["error"][at:] == b"")[:missing]
            taken = good[-1] + 1 if len(good) == missing else len(chunk["error"]) - at
            # A slice is a view; indexing by rows copies.
            rows = slice(at, at + taken) if len(good) == taken else at + good
            pieces.append({name: array[rows] for name, array in chunk.items() if name != "error"})
            errors.append(chunk["error"][at : at + taken])
            at, missing = at + taken, missing - len(good)
            if missing and sum(map(len, errors)) > 2 * size:
                yield None, np.concatenate(errors)
                errors = []
        joined = (memory.joined([piece[name] for piece in pieces]) for name in pieces[0])
        yield dict(zip(pieces[0], joined, strict=True)), np.concatenate(errors)


def loader(
    source: Source,
    *,
    batch_size: int,
    seed: int = 0,
    start_step: int = 0,
    position: dict | None = None,
    train: bool = True,
    context_length: int = 77,
    tokenizer: str = "",
    image_size: int = 224,
    fitting: Fitting = SHORTEST,
    augmentation: Augmentation = _CROPPED,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
    shuffle: str = "global",
    shuffle_shards: int = 16,
    on_bad: str = "skip",
    max_bad_share: float = 0.01,
) -> Batches:
    """Returns an iterator over this process's share of every batch.

    In training the iterator never ends. Each epoch has another order, and each image gets a random one of its
    captions. The batches depend only on the seed and the position, neither on the number of workers nor on
    interruptions. In evaluation the iterator makes one pass in order, and each image has its first caption.
    All processes yield the same number of batches, and the last batches are padded.

    An unreadable example is counted, logged with its key and skipped. In training the next example replaces
    it, but no example appears twice in an epoch. In evaluation a mask marks it.

    Args:
      source: examples by index.
      batch_size: examples per batch of this process.
      seed: seed of the order, the captions, the crops and the augmentation.
      start_step: number of batches to skip.
      position: `position()` of an earlier loader, from which this loader continues. The number of processes
        and the batch size may differ. Not together with start_step.
      train: whether to train or to evaluate, see above.
      context_length: tokens per caption.
      tokenizer: see `swjax.data.tokenize`.
      image_size: pixels, height = width.
      fitting: how pictures of any shape become squares.
      augmentation: how photographs change at random in training.
      process_index: index of this process, which takes every process_count-th example.
      process_count: number of processes that share the examples.
      workers: number of loader processes, at most one per core; 0 loads in threads. The processes are
        spawned, so a script must start training below `if __name__ == "__main__":`.
      shuffle, shuffle_shards: see `swjax.data.order.order`.
      on_bad, max_bad_share: see `swjax.data.skipping.Skips`.

    Returns:
      An iterator over dicts of arrays, with close() and, in training, position(). The arrays are image uint8
      [b, image_size, image_size, 3 or 4], text int32 [b, context_length], label int32 [b], index int64 [b]
      (index in the source) and, in evaluation, mask bool [b] (False for padding).

    Raises:
      ValueError: in training the source has fewer examples than a batch of all processes, an argument is out
        of range, the augmentation is not for drawings, or the position belongs to another data set.
      BadData: raised by the iterator if too many examples are unreadable.
      LostProcess: raised by the iterator if a loader process was killed.

    >>> from swjax.data import source
    >>> patterns = source("synthetic", "train", image_size=8, examples=10)
    >>> batches = loader(patterns, batch_size=4, train=False, context_length=6, image_size=8)
    >>> [batch["index"][batch["mask"]].tolist() for batch in batches]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    require("grain", "PIL", "ftfy", "regex")
    require(*(["simplejpeg"] if hasattr(source, "stored") else []))
    sizes = {"context_length": context_length, "image_size": image_size}
    _check(
        source,
        position,
        batch_size=batch_size,
        **sizes,
        process_index=process_index,
        process_count=process_count,
        workers=workers,
        start_step=start_step,
        seed=seed,
    )
    arrays: dict[str, Any] = {**sizes, "fitting": fitting, "tokenizer": tokenizer}
    workers = _bounded(workers)
    share = process_index, process_count
    skips = Skips(on_bad, max_bad_share, examples=-(-len(source) // process_count))
    skips.damage(getattr(source, "damage", ()), getattr(source, "damaged_share", 0.0))
    for note in getattr(source, "notes", ()) if train else ():
        logger.warning("%s", note)
    if not train:
        rows = _evaluation(source, batch_size, share, **arrays)[start_step * batch_size :]
        return Batches(_iterate(rows, batch_size, batch_size, workers), skips)
    whole = batch_size * process_count
    check_batch_size(whole, len(source))
    check_augmentation(augmentation, source)
    if position:
        state = Progress.of(position, len(source), *share)
    else:
        start = Position(start=start_step * whole)
        state = Progress(len(source), process_count, start, batches=start_step)
    skips.read, skips.skipped = state.read, state.skipped
    shuffling = {"seed": seed, "shuffle": shuffle, "shards": shuffle_shards}
    rows = _training(source, state, share, shuffling, **arrays, augmentation=augmentation)
    chunks = _iterate(rows, min(batch_size, _CHUNK), batch_size, workers)
    return TrainBatches(chunks, skips, batch_size, state)


def _check(source: Source, position: dict | None, **numbers: int) -> None:
    """Raises an error that names the first invalid argument of `loader`."""
    if isinstance(source, str | os.PathLike):
        raise TypeError(f"loader needs a source, got {source!r}: open it with swjax.data.source")
    for name, value in numbers.items():
        least = _LEAST.get(name, 0)
        if not isinstance(value, Integral) or value < least:
            raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")
    index, count = numbers["process_index"], numbers["process_count"]
    if index >= count:
        raise ValueError(f"process_index must be below process_count, got {index} and {count}")
    if numbers["start_step"] and position:
        raise ValueError(
            f"start_step is {numbers['start_step']} and there is a position: pass one of them"
        )
    if position and not (isinstance(position, dict) and "examples" in position):
        raise ValueError(f"position must come from position() of a loader, got {position!r}")
    if len(source) > _MOST_EXAMPLES:
        raise ValueError(f"the data set has {len(source)} examples; {_MOST_EXAMPLES} is the most")


def check_batch_size(whole: int, examples: int) -> None:
    """Raises a ValueError if a batch over all processes is larger than the data set."""
    if whole > examples:
        raise ValueError(
            f"the data set has {examples} examples, fewer than a batch of {whole}: set train.batch_size, "
            f"of all processes, to {examples} or less"
        )


def check_augmentation(augmentation: Augmentation, source: Source) -> None:
    """Raises a ValueError if an augmentation other than the default is to change drawings."""
    defaults = dataclasses.asdict(_CROPPED)
    given = {k: v for k, v in dataclasses.asdict(augmentation).items() if v != defaults[k]}
    if given and not source.photographs:
        raise ValueError(
            f"augmentation of photographs does not apply to drawings, got {given}: leave it out; drawings "
            "are changed on the device"
        )


def _bounded(workers: int) -> int:
    """Limits the number of processes to the number of cores, with a warning."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cores = len(affinity) or os.cpu_count() or 1
    if workers > cores:
        logger.warning(
            "workers=%d is more than the %d cores of this machine: %d processes load",
            workers,
            cores,
            cores,
        )
    return min(workers, cores)


def _training(source: Source, state: Progress, share: tuple, shuffling: dict, **arrays: Any):
    """Returns this process's remaining examples as an endless Grain dataset."""
    from swjax.data.order import ProcessShare, order

    crops = np.random.SeedSequence([shuffling["seed"], _CROPS]).generate_state(1)[0]
    examples = order(source, **shuffling).random_map(TrainExample(source, **arrays), seed=crops)
    return ProcessShare(examples, state.base, *share)[state.taken :]


def _evaluation(source: Source, batch_size: int, share: tuple, **arrays: Any):
    """Returns this process's examples as a Grain dataset, padded to whole batches."""
    import grain

    process_index, process_count = share
    whole = batch_size * process_count
    positions = grain.MapDataset.range(-(-len(source) // whole) * whole)
    return positions[process_index::process_count].map(EvalExample(source, **arrays))


def _iterate(rows, chunk: int, batch_size: int, workers: int) -> Iterator:
    """Assembles examples into chunks, and prefetches chunks in threads or processes."""
    of_batch = -(-batch_size // chunk)
    if workers:
        return Processes(rows, chunk, workers, held=2 * of_batch)
    import grain

    options = grain.ReadOptions(
        num_threads=_THREADS, prefetch_buffer_size=max(_CHUNKS_AHEAD, 2 * of_batch)
    )
    return iter(rows.batch(chunk, drop_remainder=True).to_iter_dataset(options))
