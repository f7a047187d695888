"""Image-text pairs listed in a CSV, TSV or JSONL file, whose images are files."""

import contextlib
import csv
import functools
import io
import itertools
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from swjax.data import files
from swjax.data.index import Index, Scan, checked_size_and_version
from swjax.data.photographs import Photographs, Record, field, json_fields, listed, named, texts
from swjax.data.skipping import BadExample
from swjax.data.sources import spread

_SEPARATORS = {".csv": ",", ".tsv": "\t", ".jsonl": ""}
_LONGEST_ROW = 2**24  # bytes
_MOST_LINES = 64  # of a row; a quote that is not closed would put all following rows into one cell
_STEP = 2**23  # bytes read at once
_BLANK = b"\0 \t\r\n\xff\xfe\xef\xbb\xbf"  # bytes of an empty line, with byte order marks
_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
IMAGES = "image;filepath;file_name;image_path"
TEXTS = "caption;text;title"


class Layout:
    """How the rows of a table are written.

    Attributes:
      separator: of the cells; "" for a JSON object per line.
      encoding: "utf-8-sig", or "utf-16-le" or "utf-16-be" if the file starts with that byte order mark.
      line_end: the bytes of a line feed.
      columns: names of the columns; () in JSONL, where each row has its own.
    """

    def __init__(self, path: str, size: int):
        """Reads the first row.

        Raises:
          ValueError: the file has another ending, is empty, or its first row does not name columns.
        """
        self._path = path
        separators = [s for end, s in _SEPARATORS.items() if path.lower().endswith(end)]
        if not separators:
            raise ValueError(f"a table must end in {', '.join(_SEPARATORS)}, got {path!r}")
        (self.separator,) = separators
        start = files.read(path, 0, min(size, 2)) if size else b""
        self.encoding = _BYTE_ORDER_MARKS.get(start, "utf-8-sig")
        self.line_end = "\n".encode(self.encoding.removesuffix("-sig"))
        self.columns: tuple[str, ...] = ()
        if not self.separator:
            return
        row = next((row for row, _ in self._rows(size) if row.strip(_BLANK)), b"")
        if not row:
            raise ValueError(f"the table {path!r} is empty: its first row names the columns")
        try:
            first = self._text(row)
            if "\r" in first.strip():
                raise BadExample("its lines end in CR alone: save it with LF or CRLF")
            if "\0" in first:
                raise BadExample(
                    "the row has zero bytes, as in UTF-16 without its mark: save it as UTF-8"
                )
            if "\t" in first and "," not in first:  # the default of open_clip, in a .csv
                self.separator = "\t"
            self.columns = tuple(name.strip() for name in self._cells(row))
        except BadExample as error:
            raise ValueError(f"the table {path!r} has unreadable column names: {error}") from None

    def scan(self, size: int) -> Scan:
        """Finds the start of each row of a file of this size. A quoted cell may contain line breaks.

        A row of more than 64 lines, or whose quotes are wrong, is cut at the end of its first line, so that
        a quote that is not closed spoils only its own row.
        """
        bounds, stop = [], 0
        for row, start in self._rows(size):
            if row.strip(_BLANK):
                bounds.append(start)
            stop = start + len(row)
        return Scan(np.asarray([*bounds, stop], np.int64), "")

    def row(self, data: bytes) -> dict[str, Any]:
        """Returns the cells of a row by column.

        Raises:
          BadExample: the row cannot be read, or has another number of cells than there are columns.
        """
        if not self.separator:
            return json_fields(self._text(data))
        cells = self._cells(data)
        if len(cells) != len(self.columns):
            more = len(cells) > len(self.columns) and self.separator == ","
            raise BadExample(
                f"the row has {len(cells)} cells for {len(self.columns)} columns"
                + ": put captions with commas in double quotes" * more
            )
        return dict(zip(self.columns, cells, strict=True))

    def column(self, key: str, option: str) -> str:
        """Returns the column that a key names, see `named`; in JSONL the key.

        Raises:
          ValueError: there is no such column, or several.
        """
        if not self.separator:
            return key
        name = named(key, self.columns)
        if name is None:
            remedy = f"rename one, or set {option}" if option else "rename one"
            if len(self.columns) == 1:
                remedy = f"separate columns by {'tabs' if self.separator == chr(9) else 'commas'}"
            raise ValueError(
                f"the table {self._path!r} has no column {key.split(';')[0]!r}; it has "
                f"{listed(self.columns)}: {remedy}"
            )
        if self.columns.count(name) > 1:
            raise ValueError(
                f"the table {self._path!r} has several columns {name!r}: rename all but one"
            )
        return name

    def _text(self, data: bytes) -> str:
        try:
            return data.decode(self.encoding).removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise BadExample(
                f"the row is not {self.encoding[:6].upper().strip('-')}, {error.reason}: save it as UTF-8"
            ) from None

    def _cells(self, data: bytes) -> list[str]:
        text = self._text(data)
        if "\r" in text.strip() and '"' not in text:
            raise BadExample("a cell has a carriage return: put the cell in double quotes")
        # Within a line, csv may guess: of "a "red" fox" the inner quotes are text.
        strict = "\n" in text.rstrip() or self._is_open(text)
        try:
            return next(self._reader(io.StringIO(text, newline=""), strict=strict), [])
        except csv.Error as error:
            why = str(error).replace("\t", "a tab")
            if len(text) > csv.field_size_limit():
                raise BadExample(
                    f"a cell has more than {csv.field_size_limit()} characters, or its quotes are not closed"
                ) from None
            raise BadExample(
                f"wrong quotes, {why}: close them, and double those in a cell"
            ) from None

    def _is_open(self, line: str) -> bool:
        """Whether a cell continues on the next line."""
        reader = self._reader([line, ""], strict=False)
        try:
            next(reader, None)
        except csv.Error:
            return False
        return reader.line_num > 1

    def _reader(self, lines: Any, strict: bool) -> Any:
        comma = self.separator == ","
        return csv.reader(lines, delimiter=self.separator, strict=strict, skipinitialspace=comma)

    def _rows(self, size: int) -> Iterator[tuple[bytes, int]]:
        """Yields each row and its first byte, also the empty ones."""
        lines, ahead, start = self._lines(size), deque[bytes](), 0

        def following() -> Iterator[str]:
            """Yields the lines of a row, which stay in `ahead`. In Latin-1 every byte is a character."""
            encoding = "latin-1" if self.encoding == "utf-8-sig" else self.encoding
            for number in range(_MOST_LINES):
                if number == len(ahead):
                    ahead.extend(itertools.islice(lines, 1))
                if number == len(ahead) or sum(map(len, ahead)) > _LONGEST_ROW:
                    return
                yield ahead[number].decode(encoding, "replace")

        while True:
            if not ahead:
                ahead.extend(itertools.islice(lines, 1))
            if not ahead:
                return
            count = 1
            if self.separator and b'"' in ahead[0]:
                reader = self._reader(following(), strict=True)
                with contextlib.suppress(csv.Error):
                    cells: list[str] = next(reader, [])
                    if len(cells) == len(self.columns) or not self.columns:
                        count = reader.line_num or 1
            row = b"".join(ahead.popleft() for _ in range(count))
            yield row, start
            start += len(row)

    def _lines(self, size: int) -> Iterator[bytes]:
        """Yields the lines of the file, including line ends; cuts lines that are longer than any row."""
        unit = {"utf-16-le": "<u2", "utf-16-be": ">u2"}.get(self.encoding, "u1")
        width, rest = np.dtype(unit).itemsize, b""
        for start in range(0, size, _STEP):
            data = rest + files.read(self._path, start, min(start + _STEP, size))
            units = np.frombuffer(data, unit, len(data) // width)
            ends = ((np.flatnonzero(units == ord("\n")) + 1) * width).tolist()
            yield from (data[a:b] for a, b in itertools.pairwise([0, *ends]))
            rest = data[ends[-1] :] if ends else data
            if len(rest) > _LONGEST_ROW:
                yield rest
                rest = b""
        if rest:
            yield rest


class Table(Photographs):
    """The rows of a table. They stay on disk, so memory use does not grow with their number.

    Names of columns are found in any case. If an image's path has backslashes and names no file, they stand
    for slashes.
    """

    def __init__(
        self, split: str, *, data_dir: str = "data", image_key: str = IMAGES, text_key: str = TEXTS
    ):
        """Opens the table.

        Args:
          split: path or fsspec address of a file in UTF-8, or in UTF-16 with a byte order mark. A .csv
            (commas, or tabs alone) or .tsv (tabs) file has the column names in its first row; a .jsonl file
            has one object per line.
          data_dir: directory of the stored row positions.
          image_key: column with the image's address, or its path relative to the table's directory; with
            several names, separated by ";", the first existing column.
          text_key: column with the caption, chosen as above; in JSONL, with one caption or a list.

        Raises:
          ValueError: the file does not exist, has another ending, no such column or no rows, or the image
            address in the first row has an unknown protocol.
          ModuleNotFoundError: the package for the protocol of the first row's address is not installed.
        """
        self._arguments = dict(data_dir=data_dir, image_key=image_key, text_key=text_key)
        self._path = split
        files.close_all()  # the file may have been replaced since it was read last
        self._layout = Layout(split, checked_size_and_version(split)[0])
        kind = f"rows 2{self._layout.separator}"  # 2 is the version of `scan`
        self._index = Index(
            [split], lambda _, size: self._layout.scan(size), kind=kind, data_dir=data_dir
        )
        self._image_key = self._layout.column(image_key, "image_key")
        # the column of a labelled set has no option
        self._text_key = self._layout.column(text_key, "text_key" if text_key != "label" else "")
        self._first = 1 if self._layout.columns else 0
        if len(self) < 1:
            raise ValueError(f"the table {split!r} has no rows")
        self._check_first()

    def __len__(self) -> int:
        return len(self._index) - self._first

    def key(self, index: int) -> str:
        """Returns the image's path, or the position of the row if it has none or is unreadable."""
        with contextlib.suppress(OSError, ValueError):
            image = self._cell(index, self._image_key)
            if image:
                return str(image)
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
        image = self._cell(index, self._image_key)
        if not isinstance(image, str) or not image.strip():
            raise BadExample("the row names no image")
        path = files.beside(image.strip(), of=self._path)
        if "\\" in path and not os.path.exists(path):
            path = files.beside(image.strip().replace("\\", "/"), of=self._path)
        return files.read_whole(path)

    def value(self, index: int) -> Any:
        """Returns the cell of the text column, in JSONL a value of any type."""
        return self._cell(index, self._text_key)

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the captions of a row."""
        return texts(self.value(label))

    def _cell(self, index: int, key: str) -> Any:
        path, start, stop = self._index[index + self._first]
        if stop - start > _LONGEST_ROW:
            raise BadExample(f"the row has {stop - start} bytes; the limit is {_LONGEST_ROW}")
        end = self._layout.line_end
        before = min(start, len(end))
        data = files.read(path, start - before, stop)
        is_last = index == len(self) - 1  # it may lack a line end
        if data[:before] != end[:before] or not (is_last or data.endswith(end)):
            raise BadExample("the table has changed since its rows were found: start again")
        return field(self._layout.row(data[before:]), key)

    def _check_first(self) -> None:
        """Checks that the first image's address is readable, because a missing package affects all rows."""
        try:
            image = self._cell(0, self._image_key)
        except (OSError, ValueError):
            return  # the loader skips an unreadable row
        if isinstance(image, str):
            files.check_protocol(files.beside(image, of=self._path))

    def __reduce__(self) -> tuple:
        return functools.partial(Table, **self._arguments), (self._path,)
