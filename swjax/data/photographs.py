"""The base class of data sets of encoded photographs with captions."""

import abc
import json
from typing import Any, NamedTuple

import numpy as np

from swjax.data.decoding import decode
from swjax.data.skipping import BadExample

_LONGEST_CAPTION = 2**16  # bytes; longer text is no caption, and slow to tokenize


class Record(NamedTuple):
    """An example as it is stored.

    Attributes:
      image: the bytes of an encoded image: JPEG, PNG, WebP or another that Pillow reads.
      captions: its texts.
    """

    image: bytes
    captions: tuple[str, ...]


class Photographs(abc.ABC):
    """A source of photographs with captions; subclasses say how to read a record.

    Every example is a class of its own: nothing but its own captions matches an image.

    Attributes:
      class_names: (): there are no classes.
      templates: ().
      attribution: "".
      photographs: True: the loader crops at random in training, and in the middle otherwise.
      shards: int64, the number of examples in each file, in order; None: examples are not in files.
      damage: (file, reason) for each file that can be read in part only.
      damaged_share: the share of the data set's bytes in those unreadable parts.
    """

    class_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    attribution = ""
    photographs = True
    shards: np.ndarray | None = None
    damage: tuple[tuple[str, str], ...] = ()
    damaged_share = 0.0

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def record(self, index: int) -> Record:
        """Reads an example.

        Raises:
          BadExample, OSError, ValueError: if it cannot be read.
        """

    @abc.abstractmethod
    def key(self, index: int) -> str:
        """Returns the name of an example in messages, even of one that cannot be read."""

    def stored(self, index: int) -> dict:
        """Returns image (its file, as bytes), label (the index) and captions."""
        image, captions = self.record(index)
        return {"image": image, "label": index, "captions": captions}

    def __getitem__(self, index: int) -> dict:
        """Returns image (uint8 [h, w, 3]), label and captions."""
        example = self.stored(index)
        return example | {"image": decode(example["image"])}

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the captions of an example."""
        return self.record(label).captions


def texts(value: Any) -> tuple[str, ...]:
    """Returns captions without those that are empty.

    Args:
      value: one, or a list of them, as str or as UTF-8.

    Raises:
      BadExample: if none is left, one is not UTF-8, not text or beyond 64 KiB.

    >>> texts([b"a cat ", ""])
    ('a cat',)
    """
    values = [value] if isinstance(value, str | bytes) else value
    if not isinstance(values, list) or not all(isinstance(text, str | bytes) for text in values):
        raise BadExample(f"the caption is no text but {type(value).__name__}")
    if any(len(text) > _LONGEST_CAPTION for text in values):
        raise BadExample(f"a caption is longer than {_LONGEST_CAPTION} bytes")
    try:
        decoded = [text.decode() if isinstance(text, bytes) else text for text in values]
        for text in decoded:
            text.encode()  # JSON can hold halves of characters
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadExample(f"the caption is not UTF-8: {error.reason}") from None
    captions = tuple(text.strip() for text in decoded if text.strip())
    if not captions:
        raise BadExample("the caption is empty")
    return captions


def json_field(data: bytes, name: str) -> Any:
    """Returns a field of a JSON object.

    Raises:
      BadExample: if the data are no JSON object, or it has no such field.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadExample(f"no JSON: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict) or name not in fields:
        raise BadExample(f"the JSON has no field {name!r}")
    return fields[name]
