"""Random access to image-text pairs in Parquet files."""

import collections
import functools
import json
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from swjax.data import files
from swjax.data.photographs import Photographs, Record, listed, named, texts
from swjax.data.skipping import BadExample
from swjax.data.sources import spread
from swjax.packages import require
from swjax.safe_files import one_line

_LARGEST_VALUES = 2**20  # bytes of the values of a column that are decoded at once
_BYTES_KEPT = 2**29  # limit of the cached parts, per process
_LEAST_ROWS = 64  # rows decoded at once; fewer take too long
_PARTS_KEPT = 4  # minimum number of cached parts, so a part has at most a quarter of the limit
_THREADS = 16


class Part(NamedTuple):
    """Consecutive rows of a row group, which are read together.

    Attributes:
      file: index of the file.
      group: index of the row group in the file.
      start: the first row, counted within the group.
      row: the first row, counted within the file.
      rows: number of rows.
      whole: whether the part is the whole group.
    """

    file: int
    group: int
    start: int
    row: int
    rows: int
    whole: bool


class Parquet(Photographs):
    """The rows of Parquet files in the layout of img2dataset or Hugging Face.

    The image of a row is bytes, a struct of bytes and path, or a path or address relative to the directory of
    the file. A read loads the two columns of the row's whole row group. Each process caches the last groups,
    at most 512 MiB. A group above 128 MiB is read in equal parts; reading a part decodes the group from its
    first row and briefly allocates up to 512 MiB more. So shuffle by `shard`, whose shards are groups or
    parts, unless the groups are small, and write groups of at most 128 MiB.

    Attributes:
      shards: int64, number of rows of each row group, or of each part of a large group.
    """

    def __init__(
        self,
        split: str,
        *,
        image_key: str = "image;jpg;jpeg;png;webp",
        text_key: str = "caption;text;txt;title",
    ):
        """Reads the footers of the files.

        Args:
          split: paths or addresses, such as "laion/{00000..00127}.parquet".
          image_key: column of the images; with several names, separated by ";", the first existing column.
          text_key: column of the captions, chosen as above; it contains one caption or a list per row.

        Raises:
          ValueError: no file matches, a file is missing or not a Parquet file, there are no rows, or a
            file has no such column, or two of that name.
          ModuleNotFoundError: pyarrow is not installed.
        """
        require("pyarrow", extra="parquet")
        self._split, self._keys = split, (image_key, text_key)
        self._paths = files.expand(split)
        with _open(self._paths[0]) as opened:
            columns = opened.schema_arrow.names
        self._columns = tuple(_column(key, columns, self._paths[0]) for key in self._keys)
        with ThreadPoolExecutor(_THREADS) as pool:
            groups = list(pool.map(functools.partial(_groups, columns=self._columns), self._paths))
        self._parts = [part for file, sizes in enumerate(groups) for part in _parts(file, sizes)]
        self.shards = np.array([part.rows for part in self._parts], np.int64)
        self._ends = np.cumsum(self.shards)
        if not len(self):
            raise ValueError(f"{split!r} has no rows")
        self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def key(self, index: int) -> str:
        """Returns the file and the number of the row in it."""
        number, row = self._place(index)
        part = self._parts[number]
        return f"{self._paths[part.file]}[{part.row + row}]"

    def outline(self) -> Iterator[str | bytes]:
        """Yields the rows and the sizes of both columns of each row group."""
        for path in self._paths:
            with _open(path) as opened:
                for number in range(opened.metadata.num_row_groups):
                    group = opened.metadata.row_group(number)
                    sizes = [chunk.total_compressed_size for chunk in _chunks(group, self._columns)]
                    yield f"{group.num_rows} rows of {sizes} bytes"

    def sampled(self, most: int) -> list[int]:
        """Rows of few parts, because reading a row loads its whole part."""
        starts = (self._ends - self.shards).tolist()
        return [
            starts[part] + row
            for part in spread(len(self._parts), _PARTS_KEPT)
            for row in spread(self._parts[part].rows, most // _PARTS_KEPT)
        ]

    def record(self, index: int) -> Record:
        """Reads a row, and its image file if the row contains a path."""
        number, row = self._place(index)
        text = self._read(number).columns[1][row].as_py()
        return Record(self.image(index), texts(text))

    def image(self, index: int) -> bytes:
        """Reads the image of a row, regardless of its text."""
        number, row = self._place(index)
        image = self._read(number).columns[0][row].as_py()
        return self._bytes(image, self._paths[self._parts[number].file])

    def values(self) -> tuple[list, tuple[str, ...]]:
        """Reads the text column without reading the images.

        Returns:
          The value of each row; and the names that Hugging Face's `ClassLabel` gives to the numbers of the
          column, or ().
        """
        column, values = self._columns[1], []
        for path in self._paths:
            with _open(path) as opened:
                for batch in opened.iter_batches(_LEAST_ROWS, columns=[column]):
                    if batch.nbytes > _LARGEST_VALUES:
                        raise ValueError(
                            f"{_LEAST_ROWS} values of the column {column!r} of {path} have "
                            f"{batch.nbytes} bytes; at most {_LARGEST_VALUES} are read"
                        )
                    values += batch.column(0).to_pylist()
        with _open(self._paths[0]) as opened:
            metadata = opened.schema_arrow.metadata or {}
        features = (
            json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        )
        feature = features.get(column, {})  # a list for a column of lists
        return values, tuple(feature.get("names", ())) if isinstance(feature, dict) else ()

    def _place(self, index: int) -> tuple[int, int]:
        """The index of the part that contains a row, and the row's position in the part."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self._ends[number]) + self._parts[number].rows

    def _read(self, number: int) -> Any:
        """Reads a part as a table of the two columns."""
        with self._lock:  # the lock makes threads read a shared part only once
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
            part = self._parts[number]
            with _open(self._paths[part.file], in_memory=part.whole) as opened:
                table = self._kept[number] = _table(opened, part, self._columns)
            while self._bytes_kept() > _BYTES_KEPT:
                self._kept.popitem(last=False)
            return table

    def _bytes_kept(self) -> int:
        return sum(table.get_total_buffer_size() for table in self._kept.values())

    def _bytes(self, image: Any, path: str) -> bytes:
        if isinstance(image, dict):  # the layout of Hugging Face
            image = image.get("bytes") or image.get("path")
        if isinstance(image, str) and image:
            return files.read_whole(files.beside(image, of=path))
        if not isinstance(image, bytes) or not image:
            raise BadExample(f"the image must be bytes or a path, not {type(image).__name__}")
        return image

    def __reduce__(self) -> tuple:
        image_key, text_key = self._keys
        return functools.partial(Parquet, image_key=image_key, text_key=text_key), (self._split,)


def _open(path: str, *, in_memory: bool = True) -> Any:
    """Opens a file to read its parts.

    Args:
      path: path or address of the file.
      in_memory: whether one request loads the columns of a row group before decoding; if not, they are loaded
        1 MiB at a time.

    Raises:
      ValueError: the file does not exist, or is not a Parquet file.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        opened = files.open_remote(path) if files.is_remote(path) else path
        return pyarrow.parquet.ParquetFile(opened, buffer_size=0 if in_memory else 2**20)
    except FileNotFoundError:
        raise ValueError(f"cannot open {path}: it does not exist: check the path") from None
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = one_line(error)
        raise ValueError(f"{path} is not a complete Parquet file: {reason}") from None


def _groups(path: str, columns: Sequence[str]) -> list[tuple[int, int]]:
    """(rows, uncompressed bytes of the columns) of each row group of a file."""
    sizes = []
    with _open(path) as opened:
        names = opened.schema_arrow.names
        for column in columns:
            if names.count(column) != 1:
                raise ValueError(
                    f"{path} must have one column {column!r}, as the first file, and has "
                    f"{names.count(column)} among {listed(names)}: rename its columns"
                )
        for number in range(opened.metadata.num_row_groups):
            group = opened.metadata.row_group(number)
            size = sum(chunk.total_uncompressed_size for chunk in _chunks(group, columns))
            sizes.append((group.num_rows, size))
    return sizes


def _chunks(group: Any, columns: Sequence[str]) -> list:
    """The column chunks of a row group that belong to the columns."""
    chunks = [group.column(i) for i in range(group.num_columns)]
    return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]


def _parts(file: int, groups: Sequence[tuple[int, int]]) -> Iterator[Part]:
    """Splits the row groups of a file into parts; large groups into parts of equal numbers of rows.

    >>> [tuple(part) for part in _parts(0, [(3, 10), (8, 2**28)])]
    [(0, 0, 0, 0, 3, True), (0, 1, 0, 3, 4, False), (0, 1, 4, 7, 4, False)]
    """
    row = 0
    for group, (rows, size) in enumerate(groups):
        count = math.ceil(size / (_BYTES_KEPT // _PARTS_KEPT))
        step = max(math.ceil(rows / max(count, 1)), 1)
        for start in range(0, rows, step):
            part_rows = min(step, rows - start)
            yield Part(file, group, start, row + start, part_rows, part_rows == rows)
        row += rows


def _table(opened: Any, part: Part, columns: Sequence[str]) -> Any:
    """Reads the rows of a part; decodes and drops the rows of its group before them."""
    import pyarrow

    batches, end, size = [], 0, 0
    group = _chunks(opened.metadata.row_group(part.group), columns)
    stated = sum(chunk.total_uncompressed_size for chunk in group)
    # A dictionary may repeat one large value in all rows, which few bytes describe.
    rows = min(part.rows, max(_BYTES_KEPT // max(stated, 1), _LEAST_ROWS))
    for batch in opened.iter_batches(rows, row_groups=[part.group], columns=list(columns)):
        size += batch.nbytes if end + len(batch) > part.start else 0
        if size > _BYTES_KEPT:
            raise BadExample(
                f"{part.rows} rows decode to more than {_BYTES_KEPT} bytes: write smaller row groups"
            )
        first, end = end, end + len(batch)
        if end > part.start:
            skipped = max(part.start - first, 0)
            batches.append(batch.slice(skipped, part.start + part.rows - first - skipped))
        if end >= part.start + part.rows:
            break
    return pyarrow.Table.from_batches(batches).select(list(columns))


def _column(key: str, columns: list[str], path: str) -> str:
    found = named(key, columns)
    if found is None:
        raise ValueError(f"{path} has no column {key!r}; it has {listed(columns)}")
    return found
