"""Batches of a source, in an order that a seed fixes, from any step on."""

from collections.abc import Iterator

import numpy as np

from swjax.data.images import fit, random_resized_crop
from swjax.data.packages import require
from swjax.data.sources import Source
from swjax.data.tokenizer import tokenize

_THREADS = 2
_BATCHES_AHEAD = 4
_KEPT_BYTES = 2**30  # sources whose scaled images fit are decoded once


class Batches(Iterator):
    """Iterator over batches that can be closed."""

    def __init__(self, batches: Iterator):
        self._batches = batches

    def __next__(self) -> dict[str, np.ndarray]:
        if self._batches is None:
            raise StopIteration
        return next(self._batches)

    def close(self) -> None:
        """Ends its threads and processes."""
        if hasattr(self._batches, "close"):
            self._batches.close()
        self._batches = None


def loader(
    source: Source,
    *,
    batch_size: int,
    seed: int = 0,
    start_step: int = 0,
    train: bool = True,
    context_length: int = 77,
    image_size: int = 224,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
) -> Batches:
    """Returns an iterator over this process's part of every batch.

    In training it never ends: epoch after epoch, each in an order of its own, with one caption of
    each image at random. Batch n depends on the seed and n alone, neither on start_step nor on
    workers. Otherwise it is one pass in order, each image with its first caption; all processes
    give the same number of batches, the last ones padded.

    Args:
      source: examples by number.
      batch_size: examples in a batch of this process.
      seed: of order, captions and crops.
      start_step: batches to leave out: a resumed run goes on here.
      train: see above.
      context_length: tokens of a caption.
      image_size: pixels, height = width.
      process_index: of this process, which takes every process_count-th example.
      process_count: processes that share the examples.
      workers: processes that load; 0: threads.

    Returns:
      An iterator, with close(), over dicts of arrays: image uint8 [b, image_size, image_size,
      3 or 4], text int32 [b, context_length], label int32 [b], index int64 [b] (in the source),
      and, unless training, mask bool [b] (False for padding).

    Raises:
      ValueError: if the source has fewer examples than a batch of all processes, in training; if
        a number makes no sense.

    >>> from swjax.data import source
    >>> patterns = source("synthetic", "train", image_size=8, examples=10)
    >>> batches = loader(patterns, batch_size=4, train=False, context_length=6, image_size=8)
    >>> [batch["index"][batch["mask"]].tolist() for batch in batches]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    require("grain", "PIL")
    import grain
    from absl import flags

    if batch_size < 1 or workers < 0 or not 0 <= process_index < process_count:
        raise ValueError(
            f"batch_size must be positive, workers not negative and process_index below "
            f"process_count; they are {batch_size}, {workers}, {process_index}, {process_count}"
        )
    if start_step < 0:
        raise ValueError(f"start_step must not be negative; it is {start_step}")
    size = len(source)
    if train:
        if batch_size * process_count > size:
            raise ValueError(
                f"a batch of {batch_size * process_count} is larger than the data set of {size} "
                "examples: lower the batch size"
            )
        examples = grain.MapDataset.range(size).seed(seed).shuffle().repeat()
        examples = examples[process_index::process_count].random_map(
            _TrainExample(source, context_length, image_size)
        )
    else:
        whole = batch_size * process_count
        positions = grain.MapDataset.range(-(-size // whole) * whole)
        examples = positions[process_index::process_count].map(
            _EvalExample(source, context_length, image_size)
        )
    batches = examples.batch(batch_size, drop_remainder=True)[start_step:]
    if workers == 0:
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_BATCHES_AHEAD)
        return Batches(iter(batches.to_iter_dataset(options)))
    if not flags.FLAGS.is_parsed():  # grain's processes read flags, even where there is no absl app
        flags.FLAGS.mark_as_parsed()
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BATCHES_AHEAD)
    dataset = batches.to_iter_dataset(options).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    )
    return Batches(iter(dataset))


class _Example:
    """Reads an example of a source and brings its image to size."""

    def __init__(self, source: Source, context_length: int, image_size: int):
        self._source = source
        self._context_length, self._size = context_length, image_size
        self._kept: dict[int, dict] | None = None
        if not source.photographs and len(source) * image_size**2 * 4 <= _KEPT_BYTES:
            self._kept = {}

    def __getstate__(self):
        return self.__dict__ | {"_kept": None if self._kept is None else {}}

    def _read(self, index: int) -> dict:
        """Returns an example with its image fitted; decoded once where that can be kept."""
        if self._kept is not None and index in self._kept:
            return self._kept[index]
        example = self._source[index]
        example = example | {"image": fit(example["image"], self._size)}
        if self._kept is not None:
            self._kept[index] = example
        return example

    def _arrays(self, index: int, image: np.ndarray, label: int, caption: str) -> dict:
        return {
            "image": image,
            "text": tokenize(caption, self._context_length)[0],
            "label": np.int32(label),
            "index": np.int64(index),
        }


class _TrainExample(_Example):
    def __call__(self, index: int, rng: np.random.Generator) -> dict:
        if self._source.photographs:
            example = self._source[index]
            image = random_resized_crop(example["image"], rng, self._size)
        else:
            example = self._read(index)
            image = example["image"]
        caption = example["captions"][rng.integers(len(example["captions"]))]
        return self._arrays(index, image, example["label"], caption)


class _EvalExample(_Example):
    def __call__(self, position: int) -> dict:
        index = min(position, len(self._source) - 1)
        example = self._read(index)
        arrays = self._arrays(index, example["image"], example["label"], example["captions"][0])
        return arrays | {"mask": np.bool_(position < len(self._source))}
