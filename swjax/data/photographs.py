"""The base class of data sets of encoded photographs with captions."""

import abc
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from swjax.data.decoding import decode
from swjax.data.skipping import BadExample
from swjax.data.sources import spread
from swjax.safe_files import one_line, printable

_LONGEST_JSON = 2**24  # bytes
_NAMED = 50  # number of names in a message
_LONGEST_CAPTION = 2**16  # bytes; longer text is unlikely to be a caption and slow to tokenize


class Record(NamedTuple):
    """A stored example.

    Attributes:
      image: bytes of an encoded image: JPEG, PNG, WebP or another format that Pillow reads.
      captions: texts of the example.
    """

    image: bytes
    captions: tuple[str, ...]


class Photographs(abc.ABC):
    """A source of photographs with captions; subclasses implement the reading of a record.

    Every example is its own class: an image matches only its own captions.

    Attributes:
      class_names: (), because there are no classes.
      templates: ().
      attribution: "".
      photographs: True: the loader crops at random in training, and crops the center in evaluation.
      shards: int64, number of examples per file, in order; None if examples are not in files.
      damage: (file, reason) for each partly unreadable file.
      notes: one line each about files that were left out when the data set was opened.
      damaged_share: share of the data set's bytes in unreadable parts.
    """

    class_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    attribution = ""
    photographs = True
    shards: np.ndarray | None = None
    damage: tuple[tuple[str, str], ...] = ()
    damaged_share = 0.0
    notes: tuple[str, ...] = ()

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def record(self, index: int) -> Record:
        """Reads an example.

        Raises:
          BadExample, OSError, ValueError: the example is unreadable.
        """

    @abc.abstractmethod
    def key(self, index: int) -> str:
        """Returns the name of an example for messages. It must work for unreadable examples, too."""

    def outline(self) -> Iterator[str | bytes]:
        """Yields what is known of all examples without reading them, see `swjax.data.fingerprint`."""
        return iter(())

    def sampled(self, most: int) -> list[int]:
        """Returns at most so many examples that are cheap to read, see `swjax.data.fingerprint`."""
        return spread(len(self), most)

    def stored(self, index: int) -> dict:
        """Returns image (file contents as bytes), label (the index) and captions."""
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
    """Returns the captions that are not empty.

    Args:
      value: one caption or a list of captions, as str or UTF-8 bytes; None is an empty caption.

    Raises:
      BadExample: no caption is left, or one is not text, not UTF-8 or longer than 64 KiB.

    >>> texts([b"a cat ", "", None])
    ('a cat',)
    """
    values = value if isinstance(value, list) else [value]
    values = ["" if text is None else text for text in values]
    for text in values:
        if not isinstance(text, str | bytes):
            raise BadExample(f"the caption must be text, not {type(text).__name__}")
    if any(len(text) > _LONGEST_CAPTION for text in values):
        raise BadExample(f"a caption is longer than the limit of {_LONGEST_CAPTION} bytes")
    try:
        decoded = [text.decode("utf-8-sig") if isinstance(text, bytes) else text for text in values]
        for text in decoded:
            text.encode()  # JSON can contain unpaired surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadExample(f"the caption is not UTF-8: {error.reason}") from None
    captions = tuple(text.strip() for text in decoded if text.strip())
    if not captions:
        raise BadExample("the caption is empty")
    return captions


def json_fields(data: str | bytes) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
      BadExample: the data are not a JSON object, or more than 16 MiB.
    """
    if len(data) > _LONGEST_JSON:
        raise BadExample(f"the JSON has {len(data)} bytes; the limit is {_LONGEST_JSON}")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadExample(f"not JSON: {one_line(error)}") from None
    if not isinstance(fields, dict):
        raise BadExample("the JSON is not an object")
    return fields


def field(fields: dict[str, Any], key: str) -> Any:
    """Returns the field of an object that a key names, see `named`.

    Raises:
      BadExample: there is no such field.
    """
    name = named(key, fields)
    if name is None:
        raise BadExample(f"the JSON has no field {key.split(';')[0]!r}")
    return fields[name]


def named(key: str, names: Iterable[str]) -> str | None:
    """Returns the first of the names in `key`, separated by ";", that exists; exact ones go first.

    >>> named("caption;title", ["title", "Caption"]), named("caption", ["Caption"]), named("a", [])
    ('title', 'Caption', None)
    """
    names = list(names)
    lower = {name.lower(): name for name in reversed(names)}
    wanted = key.split(";")
    found = [name for name in wanted if name in names]
    found += [lower[name.lower()] for name in wanted if name.lower() in lower]
    return found[0] if found else None


def listed(names: Iterable[str]) -> str:
    """Returns the names of columns, features or files for a message."""
    return printable(", ".join(map(str, itertools.islice(names, _NAMED))))
