"""Labelled image sets for zero-shot classification: folders, WebDataset tars, tables, Parquet, TFDS builders.

A set is named by an address, `[NAME=]KIND:WHERE`:

  folders:pets/val                         one folder of images per class
  in1k=webdataset:in1k/{0..63}.tar         tars with an image and a .cls file per sample
  table:pets/val.csv                       a .csv, .tsv or .jsonl file with the columns image and label
  parquet:pets/val-{0..3}.parquet          Parquet files with the columns image and label, as Hugging Face
                                           writes them
  tfds:imagenet2012/validation             a prepared TensorFlow Datasets builder, and its split

A file `classnames.txt` in the folder of the images, tars or tables lists the class names, one per line, in
the order of the labels. `zeroshot_classification_templates.txt` lists prompts, with "{}" or "{c}" for the
name.
"""

import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swjax.data import files, imagenet
from swjax.data.parquet import Parquet
from swjax.data.photographs import Photographs, Record
from swjax.data.skipping import BadExample
from swjax.data.table import Table
from swjax.data.tfds_source import LabelledTFDS
from swjax.data.webdataset import WebDataset

KINDS = ("folders", "webdataset", "table", "parquet", "tfds")
TEMPLATES: tuple[str, ...] = ("a photo of a {}.",)  # for sets without prompts
NAMES, PROMPTS = "classnames.txt", "zeroshot_classification_templates.txt"
_SYNSET = re.compile(r"n\d{8}")
_INTEGER = re.compile(r"\d{1,18}", re.ASCII)
_NEGATIVE = re.compile(r"-\d+")  # -1 is a missing label in data sets of Hugging Face
_FRACTION = re.compile(r"\d+\.\d*")  # pandas writes 1.0 for 1 if a label is missing
_LARGEST_LIST = 2**24  # bytes of a file of names or prompts


class Address(NamedTuple):
    """The address of a labelled set.

    Attributes:
      name: prefix of the names of its scores.
      kind: one of `KINDS`.
      where: a folder, a pattern of tars or Parquet files, a table, or BUILDER/SPLIT.
    """

    name: str
    kind: str
    where: str


def address(text: str) -> Address:
    """Parses the address of a labelled set.

    The default name is the name of the folder, the folder of the tars or Parquet files, the table, or the
    builder.

    Raises:
      ValueError: the text is not an address.

    >>> address("folders:pets/val")
    Address(name='val', kind='folders', where='pets/val')
    >>> address("in1k=tfds:imagenet2012:5.1.0/validation[:100]")
    Address(name='in1k', kind='tfds', where='imagenet2012:5.1.0/validation[:100]')
    """
    head, _, where = text.partition(":")
    name, equals, kind = head.rpartition("=")
    if kind not in KINDS or not where or (equals and not re.fullmatch(r"[\w.-]+", name)):
        raise ValueError(
            f"{text!r} is not an address of a labelled set: write [NAME=]KIND:WHERE, where KIND is one of "
            f"{', '.join(KINDS)}, as in pets=folders:pets/val"
        )
    if kind == "tfds" and not all(where.rpartition("/")[::2]):
        raise ValueError(f"{text!r} names no split: write tfds:BUILDER/SPLIT")
    default = re.split("[/:]", where)[0] if kind == "tfds" else _folder(kind, where).name
    default = Path(where).stem if kind == "table" else default
    return Address(name or default or kind, kind, where)


def _folder(kind: str, where: str) -> Path:
    return Path(where) if kind == "folders" else Path(where).parent


class Labelled(Photographs):
    """A set of labelled images. Each image has one caption, the name of its class."""

    def __init__(self, split: str, *, data_dir: str = "data"):
        """Opens the set.

        Args:
          split: address of the set, see `address`.
          data_dir: directory of prepared TFDS builders and of the positions of samples in tars.

        Raises:
          ValueError: the set does not exist, has no images, its classes have no names, or a prompt has no
            place for the name.
        """
        self._split, self._data_dir = split, data_dir
        self.set_name, kind, where = address(split)
        if kind == "folders":
            self._images: Photographs = ImageFolders(where)
        elif kind == "webdataset":
            self._images = WebDataset(where, data_dir=data_dir, text_key="cls")
        elif kind in ("table", "parquet"):
            names = _lines(_folder(kind, where), NAMES)
            self._images = LabelledRows(where, kind, data_dir=data_dir, class_names=names)
        else:
            builder, _, part = where.rpartition("/")
            self._images = LabelledTFDS(part, data_dir=data_dir, builder=builder)
        folder = None if kind == "tfds" else _folder(kind, where)
        names_file = NAMES if folder is None else folder / NAMES
        found = tuple(_lines(folder, NAMES) or self._images.class_names)
        if not found and self.set_name.startswith(("imagenet", "in1k")):
            found = tuple(imagenet.class_names())
        if not found:
            raise ValueError(
                f"the classes of {split!r} have no names: write them to {names_file}, one per line, in "
                "the order of the labels"
            )
        if isinstance(self._images, LabelledRows):
            self._images.check_first_label(len(found))
        known = len(self._images.class_names)
        if known and len(found) != known:
            raise ValueError(f"{names_file} names {len(found)} of {known} classes: name each")
        if kind == "folders" and found != self._images.class_names:
            _check_folders(self._images.class_names, found, names_file)
        shipped = tuple(imagenet.class_names())
        if len(found) == len(shipped) and all(map(_SYNSET.fullmatch, found)):
            if list(found) != sorted(found):
                raise ValueError(
                    f"the synsets in {names_file} are not sorted, as ImageNet's labels are: write names there"
                )
            found = shipped  # sorted synsets have the order of ImageNet's labels
        self.class_names = found
        prompts = _lines(folder, PROMPTS) or (
            imagenet.templates() if found == shipped else TEMPLATES
        )
        self.templates = tuple(prompt.replace("{c}", "{}") for prompt in prompts)
        nameless = next((prompt for prompt in self.templates if "{}" not in prompt), None)
        if nameless is not None:
            raise ValueError(
                f'{folder}/{PROMPTS}: the prompt {nameless!r} has no place for the name: write "{{}}" there'
            )
        self.attribution, self.notes = self._images.attribution, self._images.notes
        self.damage, self.damaged_share = self._images.damage, self._images.damaged_share

    def __len__(self) -> int:
        return len(self._images)

    def key(self, index: int) -> str:
        """Returns the key of an image, for messages."""
        return self._images.key(index)

    def outline(self) -> Iterator[str | bytes]:
        """Yields what the kind of the set knows of all images."""
        return self._images.outline()

    def sampled(self, most: int) -> list[int]:
        """Returns indices of images that are cheap to read."""
        return self._images.sampled(most)

    def record(self, index: int) -> Record:
        """Reads an image and the name of its class."""
        image, _, name = self._read(index)
        return Record(image, (name,))

    def stored(self, index: int) -> dict:
        """Returns image (file contents as bytes), label (its class) and captions (the class name)."""
        image, label, name = self._read(index)
        return {"image": image, "label": label, "captions": (name,)}

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the name of a class."""
        return (self.class_names[label],)

    def _read(self, index: int) -> tuple[bytes, int, str]:
        image, (text, *_) = self._images.record(index)
        label = int(text) if text.isdecimal() else -1
        if not 0 <= label < len(self.class_names):
            raise BadExample(
                f"the label {text!r} is not one of the {len(self.class_names)} classes"
            )
        return image, label, self.class_names[label]

    def __reduce__(self) -> tuple:
        return functools.partial(Labelled, data_dir=self._data_dir), (self._split,)


class ImageFolders(Photographs):
    """Images in one folder per class; an image's caption is its label's number.

    The folders are in alphabetical order, or in the order of the numbers if all their names are integers.
    """

    def __init__(self, split: str):
        """Lists the images.

        Args:
          split: folder that contains one folder per class; "_" in the class folders' names stands for a
            space.

        Raises:
          ValueError: the folder does not exist, or its subfolders contain no image.
        """
        self._root = split
        if not Path(split).is_dir():
            raise ValueError(f"{split!r} is not a folder: give one with a folder per class")
        folders = (entry.name for entry in os.scandir(split) if entry.is_dir())
        classes = in_order(name for name in folders if not name.startswith("."))
        self._paths: list[tuple[int, str]] = []
        others = list[str]()
        for label, name in enumerate(classes):
            folder = os.path.join(split, name)
            for path in files.below(folder, ("",)):
                if path.lower().endswith(files.PICTURES):
                    self._paths.append((label, os.path.join(folder, path)))
                else:
                    others.append(path)
        other = files.not_read(others)
        if not self._paths:
            raise ValueError(
                f"{split!r} has no images in folders: put each class into a folder with its name"
                + f"; {other}" * bool(other)
            )
        self.notes = (other,) if other else ()
        self.class_names = tuple(name.replace("_", " ") for name in classes)

    def __len__(self) -> int:
        return len(self._paths)

    def key(self, index: int) -> str:
        """Returns the path of an image."""
        return self._paths[index][1]

    def outline(self) -> Iterator[str | bytes]:
        """Yields the images' paths relative to the folder, and their sizes."""
        return files.outline(self._root, [os.path.relpath(p, self._root) for _, p in self._paths])

    def record(self, index: int) -> Record:
        """Reads an image."""
        label, path = self._paths[index]
        return Record(files.read_whole(path), (str(label),))

    def __reduce__(self) -> tuple:
        return ImageFolders, (self._root,)


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names: integers by value if all are integers, else as texts.

    >>> in_order(["10", "2", "0"]), in_order(["10", "2", "a"])
    (['0', '2', '10'], ['10', '2', 'a'])
    """
    names = sorted(names)
    return sorted(names, key=int) if all(map(_INTEGER.fullmatch, names)) else names


class LabelledRows(Photographs):
    """Rows with the columns image and label; the caption of an image is the number of its label.

    Numeric labels are used as they are; a negative number is no label. Other labels are names; their numbers
    follow the order of `class_names` if it contains all names, and alphabetical order if it contains none.
    """

    def __init__(
        self,
        split: str,
        kind: str = "table",
        *,
        data_dir: str = "data",
        class_names: Sequence[str] = (),
    ):
        """Reads the labels.

        Args:
          split: path of a .csv, .tsv or .jsonl file, or of Parquet files.
          kind: "table" or "parquet".
          data_dir: directory of the positions of a table's rows.
          class_names: names in the order of the labels; () uses the names of Hugging Face's `ClassLabel`, if
            the Parquet files have it.

        Raises:
          ValueError: see `swjax.data.table.Table` and `swjax.data.parquet.Parquet`; or no row has a label, a
            row has several, `class_names` contains only a part of the names or one of them twice, a number
            is not whole, or some labels are numbers, others names, and `class_names` contains neither.
        """
        self._arguments = split, kind, data_dir, class_names
        known: tuple[str, ...] = ()
        if kind == "table":
            self._rows: Table | Parquet = Table(split, data_dir=data_dir, text_key="label")
            self._labels = [_label(self._rows, index) for index in range(len(self._rows))]
        else:
            self._rows = Parquet(split, text_key="label")
            values, known = self._rows.values()
            several = next((value for value in values if isinstance(value, list | dict)), None)
            if several is not None:
                raise ValueError(
                    f"the label {several!r:.40} of {split!r} must be one number or text: a set has one class "
                    "per image"
                )
            self._labels = [_text(value) for value in values]
        self._labels = ["" if _NEGATIVE.fullmatch(label) else label for label in self._labels]
        names = sorted(set(self._labels) - {""})
        if not names:
            raise ValueError(f"no row of {split!r} has a label")
        if not all(name.isdecimal() for name in names):
            _check_names(names, class_names, split)
            names = list(class_names) if set(names) <= set(class_names) else names
            self.class_names = tuple(names)
            number = {name: str(i) for i, name in enumerate(names)}
            self._labels = [number.get(label, "") for label in self._labels]
        elif known and not class_names:
            self.class_names = tuple(name.replace("_", " ") for name in known)
        self.damage, self.damaged_share = self._rows.damage, self._rows.damaged_share

    def check_first_label(self, classes: int) -> None:
        """Checks that labels count from 0.

        Raises:
          ValueError: the labels are from 1 to the number of classes, so that each would have the next name.
        """
        numbers = [int(label) for label in self._labels if label]
        if min(numbers) > 0 and max(numbers) == classes:
            raise ValueError(
                f"the labels of {self._arguments[0]!r} must be 0 to {classes - 1}, and are {min(numbers)} to "
                f"{classes}: subtract 1"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, index: int) -> str:
        """Returns the path of an image, or the file and the row if the row has no path."""
        return self._rows.key(index)

    def outline(self) -> Iterator[str | bytes]:
        """Yields the labels, and what the table or the Parquet files know of all rows."""
        yield from self._labels
        yield from self._rows.outline()

    def sampled(self, most: int) -> list[int]:
        """Returns indices of rows that are cheap to read."""
        return self._rows.sampled(most)

    def record(self, index: int) -> Record:
        """Reads an image."""
        if not self._labels[index]:
            raise BadExample("the row has no label")
        return Record(self._rows.image(index), (self._labels[index],))

    def __reduce__(self) -> tuple:
        split, kind, data_dir, names = self._arguments
        make = functools.partial(LabelledRows, kind=kind, data_dir=data_dir, class_names=names)
        return make, (split,)


def _check_folders(folders: Sequence[str], names: Sequence[str], path: str | Path) -> None:
    """Raises an error if names of class folders contradict the lines of a file, which name them in order."""
    if sorted(folders) == sorted(names):
        raise ValueError(
            f"{path} has the names of the folders in another order, and labels follow the folders: write "
            f"them in the order {', '.join(folders[:3])}, ..."
        )
    if all(map(_INTEGER.fullmatch, folders)):
        numbers = [int(folder) for folder in folders]
        if numbers not in (list(range(len(folders))), list(range(1, len(folders) + 1))):
            raise ValueError(
                f"{path} names {len(names)} folders, whose numbers must be 0 to {len(names) - 1} or 1 to "
                f"{len(names)} without gaps, got {numbers[0]} to {numbers[-1]}: name the folders instead"
            )


def _label(table: Table, index: int) -> str:
    """The label of a row; "" for an unreadable row, which the loader skips."""
    try:
        value = table.value(index)
    except (OSError, ValueError):
        return ""
    return _text(value) if isinstance(value, str | int | float) else ""


def _text(value: Any) -> str:
    """A label as text; "" for None and NaN."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return "" if value is None or value != value else text.strip()


def _check_names(labels: Sequence[str], class_names: Sequence[str], split: str) -> None:
    """Raises an error if the number of a label would depend on a mistake in its spelling."""
    unknown = [label for label in labels if label not in class_names]
    number = next((label for label in unknown if _FRACTION.fullmatch(label)), None)
    if number is not None:
        raise ValueError(
            f"the label {number!r} of {split!r} must be a whole number, as {number.partition('.')[0]}, or a "
            f"name that {NAMES} contains"
        )
    if 0 < len(unknown) < len(labels):
        raise ValueError(
            f"the label {unknown[0]!r} of {split!r} is not in {NAMES}, which contains others of its labels: "
            "write all as they are there"
        )
    number = next((label for label in labels if label.isdecimal()), None)
    if class_names and unknown and number is not None:
        name = next(label for label in labels if not label.isdecimal())
        raise ValueError(
            f"{split!r} has the labels {number!r} and {name!r}, and {NAMES} contains neither: write all as "
            "numbers, or all as they are there"
        )
    twice = next((label for label in labels if class_names.count(label) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{NAMES} contains {twice!r} twice, a label of {split!r}: rename one, or use numbers as labels"
        )


def _lines(folder: Path | None, name: str) -> Sequence[str]:
    """The non-empty lines of a file in a local folder; () if the file does not exist."""
    if folder is None or not (folder / name).is_file():
        return ()
    if not files.belongs(folder / name, folder):
        raise ValueError(f"{folder / name} is a link out of its folder: copy the file there")
    try:
        text = files.read_whole(str(folder / name), _LARGEST_LIST).decode("utf-8-sig")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{folder / name} is not UTF-8, {error.reason}: save it as UTF-8"
        ) from error
    while lines and not lines[-1].strip():
        lines.pop()
    empty = next((number for number, line in enumerate(lines, 1) if not line.strip()), 0)
    if empty and name == NAMES:
        raise ValueError(
            f"{folder / name}: line {empty} is empty, and would move the names after it to other labels: "
            "write a name there, or remove the line"
        )
    return tuple(line.strip() for line in lines if line.strip())
