"""Image-text pairs listed in a CSV, TSV or JSONL file, whose images are files."""

import csv
import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from swjax.data import files
from swjax.data.index import Index, Scan
from swjax.data.photographs import Photographs, Record, json_field, texts
from swjax.data.skipping import BadExample
from swjax.data.sources import spread

_SEPARATORS = {".csv": ",", ".tsv": "\t", ".jsonl": ""}
_LARGEST_IMAGE = 2**28  # bytes
_STEP = 2**23  # bytes read at once


class Table(Photographs):
    """The rows of a table. They stay on disk, so memory use does not grow with their number."""

    def __init__(
        self,
        split: str,
        *,
        data_dir: str = "data",
        image_key: str = "image",
        text_key: str = "caption",
    ):
        """Opens the table.

        Args:
          split: path or fsspec address of a UTF-8 file. A .csv (commas) or .tsv (tabs) file has the column
            names in its first row; a .jsonl file has one object per line.
          data_dir: directory of the stored row positions.
          image_key: column with the image's address, or its path relative to the table's directory.
          text_key: column with the caption; in JSONL, with one caption or a list.

        Raises:
          ValueError: the file does not exist, has another ending, no such column or no rows, or the image
            address in the first row has an unknown protocol.
          ModuleNotFoundError: the package for the protocol of the first row's address is not installed.
        """
        self._arguments = dict(data_dir=data_dir, image_key=image_key, text_key=text_key)
        self._path, self._image_key, self._text_key = split, image_key, text_key
        endings = _SEPARATORS.items()
        self._separator = next((s for end, s in endings if split.lower().endswith(end)), None)
        if self._separator is None:
            raise ValueError(f"a table must end in {', '.join(_SEPARATORS)}, got {split!r}")
        scan = functools.partial(_scan, separator=self._separator)
        self._index = Index([split], scan, kind=f"rows{self._separator}", data_dir=data_dir)
        self._columns, self._first = self._header() if self._separator else ([], 0)
        if len(self) < 1:
            raise ValueError(f"the table {split!r} has no rows{self._index.excuse()}")
        self._check_first()
        self.damage, self.damaged_share = self._index.damage, self._index.damaged_share

    def __len__(self) -> int:
        return len(self._index) - self._first

    def key(self, index: int) -> str:
        """Returns the image's path, or the position of the row if the row is unreadable."""
        try:
            return str(self._row(index)[0])
        except (OSError, ValueError):
            return f"{self._path}: byte {self._index[index + self._first][1]}"

    def outline(self) -> Iterator[str | bytes]:
        """Yields the bytes of the table."""
        size, _ = files.size_and_version(self._path)
        return (files.read(self._path, *block) for block in files.blocks(size))

    def sampled(self, most: int) -> list[int]:
        """Evenly spaced rows, without those whose image a network may fail to give the next time."""
        rows = spread(len(self), most)
        return [i for i in rows if not files.is_remote(files.beside(self.key(i), of=self._path))]

    def record(self, index: int) -> Record:
        """Reads a row, and the image that the row names."""
        captions = self.captions(index)
        return Record(self.image(index), captions)

    def image(self, index: int) -> bytes:
        """Reads the image that a row names, regardless of its text."""
        image, _ = self._row(index)
        if not isinstance(image, str) or not image:
            raise BadExample("the row names no image")
        return files.read_whole(files.beside(image, of=self._path), _LARGEST_IMAGE)

    def value(self, index: int) -> Any:
        """Returns the cell of the text column, in JSONL a value of any type."""
        return self._row(index)[1]

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the captions of a row."""
        return texts(self.value(label))

    def _row(self, index: int) -> tuple:
        data = files.read(*self._index[index + self._first])
        if not self._separator:
            return json_field(data, self._image_key), json_field(data, self._text_key)
        cells = _cells(data, self._separator)
        if len(cells) != len(self._columns):
            more = len(cells) > len(self._columns) and self._separator == ","
            raise BadExample(
                f"the row has {len(cells)} cells for {len(self._columns)} columns"
                + ": put captions with commas in double quotes" * more
            )
        row = dict(zip(self._columns, cells))
        return row[self._image_key], row[self._text_key]

    def _check_first(self) -> None:
        """Checks that the first image's address is readable, because a missing package affects all rows."""
        try:
            image = self._row(0)[0]
        except (OSError, ValueError):
            return  # the loader skips an unreadable row
        if isinstance(image, str):
            files.check_protocol(files.beside(image, of=self._path))

    def _header(self) -> tuple[list[str], int]:
        separator = self._separator or ","
        if not len(self._index):
            why = self._index.excuse() or ": its first row names the columns"
            raise ValueError(f"the table {self._path!r} is empty{why}")
        row = files.read(*self._index[0])
        try:
            if b"\0" in row:
                raise BadExample("the row has zero bytes, as in UTF-16: save it as UTF-8")
            columns = _cells(row, separator)
        except BadExample as error:
            raise ValueError(
                f"the table {self._path!r} has unreadable column names: {error}"
            ) from None
        for key, option in ((self._image_key, "image_key"), (self._text_key, "text_key")):
            if key not in columns:
                remedy = "rename one"
                if key != "label":  # the column of a labelled set has no option
                    remedy += f", or set {option}"
                if len(columns) == 1:
                    remedy = f"separate columns by {'tabs' if separator == chr(9) else 'commas'}"
                raise ValueError(
                    f"the table {self._path!r} has no column {key!r}; it has {', '.join(columns)}: {remedy}"
                )
            if columns.count(key) > 1:
                raise ValueError(
                    f"the table {self._path!r} has several columns {key!r}: rename all but one"
                )
        return columns, 1

    def __reduce__(self) -> tuple:
        return functools.partial(Table, **self._arguments), (self._path,)


def _cells(data: bytes, separator: str) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadExample(f"the row is not UTF-8, {error.reason}: save it as UTF-8") from None
    # A quote that is not closed puts the following rows into one cell. Within a line, csv may guess.
    strict = "\n" in text.rstrip()
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=strict)
    try:
        return next(reader, [])
    except csv.Error as error:
        raise BadExample(f"wrong quotes, {error}: close them, and double those in a cell") from None


def _scan(path: str, size: int, separator: str) -> Scan:
    """Finds the start of each row. A quoted cell may contain line breaks."""
    bounds, ends = [], list[int]()

    def lines():
        # In Latin-1 every byte is a character. Rows in other encodings than UTF-8 are detected when they are
        # read.
        for line in _lines(path, size):
            ends.append(ends[-1] + len(line) if ends else len(line))
            yield line.decode("latin-1")

    rows = csv.reader(lines(), delimiter=separator) if separator else lines()
    trouble, start = "", 0
    try:
        for row in rows:
            # A row of a CSV or TSV file is a list of cells, empty for an empty line. A row of JSONL is a
            # whole line.
            if row if isinstance(row, list) else row.strip():
                bounds.append(start)
            start = ends[-1]
            ends[:] = ends[-1:]
    except csv.Error as error:
        trouble = f"row at byte {start}: {error}"
    return Scan(np.asarray([*bounds, start], np.int64), trouble)


def _lines(path: str, size: int):
    """Yields the lines of a file as bytes, including line ends."""
    rest = b""
    for start in range(0, size, _STEP):
        *whole, rest = (rest + files.read(path, start, min(start + _STEP, size))).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest
