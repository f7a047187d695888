"""One example as the arrays of a batch, or the reason why it cannot be used."""

from collections.abc import Callable

import numpy as np

from swjax.data import decoding
from swjax.data.images import fit, random_box
from swjax.data.skipping import BadExample
from swjax.data.sources import Source
from swjax.data.tokenizer import tokenize

_KEPT_BYTES = 2**30  # sources whose scaled images fit are decoded once
_LONGEST_REASON = 400  # bytes
_REASON = f"S{_LONGEST_REASON}"


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

    def _photograph(self, index: int, cut: Callable, choose_caption: Callable) -> dict:
        """Returns the arrays of a photograph; blank ones, and why, if it cannot be read.

        Any exception concerns this one example: data sets from the web contain every kind of damage.
        """
        try:
            source = self._source
            example = source.stored(index) if hasattr(source, "stored") else source[index]
            image, scale = example["image"], decoding.resize_with_pillow
            if isinstance(image, bytes):
                image, scale = decoding.decode(image), decoding.resize
            image = cut(image, self._size, scale)
            caption = choose_caption(example["captions"])
            return self._arrays(index, image, example["label"], caption)
        except Exception as error:
            blank = np.zeros((self._size, self._size, 3), np.uint8)
            why = reason(self._source, index, error).encode(errors="replace")[:_LONGEST_REASON]
            return self._arrays(index, blank, 0, "") | {"error": np.array(why, _REASON)}

    def _drawing(self, index: int) -> dict:
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
            "error": np.array(b"", _REASON),  # of all alike: they become one array
        }


def reason(source: Source, index: int, error: Exception) -> str:
    """The key of an example and why it cannot be used, in one line that prints."""
    key = source.key(index) if hasattr(source, "key") else f"example {index}"
    kind = "" if isinstance(error, BadExample) else f"{type(error).__name__}: "
    text = " ".join(f"{key}: {kind}{error}".split())
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class TrainExample(_Example):
    """An example with a random caption and, of a photograph, a random crop."""

    def __call__(self, index: int, rng: np.random.Generator) -> dict:
        """Returns its arrays, and error: bytes, b"" if there is none."""

        def choose(captions):
            return captions[rng.integers(len(captions))]

        def cut(image, size, resize):
            return resize(image[random_box(image.shape[0], image.shape[1], rng)], size)

        if self._source.photographs:
            return self._photograph(index, cut, choose)
        example = self._drawing(index)
        caption = choose(example["captions"])
        return self._arrays(index, example["image"], example["label"], caption)


class EvalExample(_Example):
    """An example with its first caption and its middle."""

    def __call__(self, position: int) -> dict:
        """Returns its arrays, error as in training, and mask: False for padding after the last."""
        index = min(position, len(self._source) - 1)
        if self._source.photographs:
            arrays = self._photograph(index, fit, lambda captions: captions[0])
        else:
            example = self._drawing(index)
            caption = example["captions"][0]
            arrays = self._arrays(index, example["image"], example["label"], caption)
        if position > index:  # an error of the last example is counted once
            arrays["error"] = np.zeros_like(arrays["error"])
        return arrays | {"mask": np.bool_(position == index)}
