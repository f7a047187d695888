"""Converts one example to the arrays of a batch, or to the reason why it is unusable."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from swjax.data import decoding
from swjax.data.augmentation import Augmentation
from swjax.data.images import SHORTEST, fit, random_fit
from swjax.data.skipping import BadExample
from swjax.data.sources import Source
from swjax.data.tokenizer import tokenize
from swjax.fitting import Fitting
from swjax.safe_files import printable

_KEPT_BYTES = 2**30  # images of a source are decoded once if all fit after resizing
_LONGEST_REASON = 400  # bytes
_REASON = f"S{_LONGEST_REASON}"


class _Example:
    """Reads an example of a source and resizes its image."""

    def __init__(
        self,
        source: Source,
        context_length: int,
        image_size: int,
        fitting: Fitting = SHORTEST,
        tokenizer: str = "",
    ):
        self._source, self._fitting, self._tokenizer = source, fitting, tokenizer
        self._context_length, self._size = context_length, image_size
        self._kept: dict[int, dict] | None = None
        if not source.photographs and len(source) * image_size**2 * 4 <= _KEPT_BYTES:
            self._kept = {}

    def __getstate__(self):
        return self.__dict__ | {"_kept": None if self._kept is None else {}}

    def _photograph(self, index: int, cut: Callable, choose_caption: Callable) -> dict:
        """Returns the arrays of a photograph; if it is unreadable, blank arrays and the reason.

        Every exception is handled as damage of this example, because data sets from the web contain all
        kinds.
        """
        try:
            example, image = look(self._source, index)
            encoded = isinstance(example["image"], bytes)
            image = cut(
                image, self._size, decoding.resize if encoded else decoding.resize_with_pillow
            )
            caption = choose_caption(example["captions"])
            return self._arrays(index, image, example["label"], caption)
        except Exception as error:
            blank = np.zeros((self._size, self._size, 3), np.uint8)
            why = reason(self._source, index, error).encode(errors="replace")[:_LONGEST_REASON]
            return self._arrays(index, blank, 0, "") | {"error": np.array(why, _REASON)}

    def _drawing(self, index: int) -> dict:
        """Returns an example with a resized image, decoded only once if the source fits in memory."""
        if self._kept is not None and index in self._kept:
            return self._kept[index]
        example = self._source[index]
        example = example | {"image": fit(example["image"], self._size, fitting=self._fitting)}
        if self._kept is not None:
            self._kept[index] = example
        return example

    def _arrays(self, index: int, image: np.ndarray, label: int, caption: str) -> dict:
        return {
            "image": image,
            "text": tokenize(caption, self._context_length, self._tokenizer)[0],
            "label": np.int32(label),
            "index": np.int64(index),
            "error": np.array(b"", _REASON),  # one dtype for all, so that they stack
        }


def look(source: Source, index: int) -> tuple[dict, np.ndarray]:
    """Reads an example as training does.

    Returns:
      The example, whose image may be the bytes of a file, and the pixels, uint8 [h, w, 3 or 4].

    Raises:
      Exception: whatever makes the example unusable.
    """
    example = source.stored(index) if hasattr(source, "stored") else source[index]
    image = example["image"]
    if not len(example["captions"]):
        raise BadExample("there is no caption")
    return example, decoding.decode(image) if isinstance(image, bytes) else image


def reason(source: Source, index: int, error: Exception) -> str:
    """One printable line with the key of an example and the reason why it is unusable."""
    return ": ".join(fault(source, index, error))


def fault(source: Source, index: int, error: Exception) -> tuple[str, str]:
    """Returns the key of an example and the reason why it is unusable, as printable lines.

    The reason has no path, so that equal faults of different files have equal reasons. If the faulty file is
    not the one that the key names, the key is followed by its path.
    """
    key = source.key(index) if hasattr(source, "key") else f"example {index}"
    kind = "" if isinstance(error, BadExample) else f"{type(error).__name__}: "
    path, why = getattr(error, "filename", None), str(error)
    if isinstance(path, str) and isinstance(error, OSError) and error.strerror:
        why = error.strerror
        key += "" if path in key or key in path else f" ({path})"
    return printable(key), printable(f"{kind}{why}")


class TrainExample(_Example):
    """Reads an example with a random caption and, for photographs, a random crop and random changes."""

    def __init__(self, *args: Any, augmentation: Augmentation, **options: Any):
        super().__init__(*args, **options)
        self._augmentation = augmentation

    def __call__(self, index: int, rng: np.random.Generator) -> dict:
        """Returns the arrays of an example, and error: bytes, b"" without an error."""

        def choose(captions):
            return captions[rng.integers(len(captions))]

        def cut(image, size, resize):
            how = self._augmentation
            crop = random_fit(image, size, resize, rng, self._fitting, how.scale, how.ratio)
            return how(crop, rng)

        if self._source.photographs:
            return self._photograph(index, cut, choose)
        example = self._drawing(index)
        caption = choose(example["captions"])
        return self._arrays(index, example["image"], example["label"], caption)


class EvalExample(_Example):
    """Reads an example with its first caption and a center crop."""

    def __call__(self, position: int) -> dict:
        """Returns the arrays of an example, error as in training, and mask: False for padding at the end."""
        index = min(position, len(self._source) - 1)
        if self._source.photographs:
            cut = functools.partial(fit, fitting=self._fitting)
            arrays = self._photograph(index, cut, lambda captions: captions[0])
        else:
            example = self._drawing(index)
            caption = example["captions"][0]
            arrays = self._arrays(index, example["image"], example["label"], caption)
        if position > index:  # padding repeats the last example, whose error counts only once
            arrays["error"] = np.zeros_like(arrays["error"])
        return arrays | {"mask": np.bool_(position == index)}
