"""Image-text pairs in Parquet files, by number."""

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
from swjax.data.packages import require
from swjax.data.photographs import Photographs, Record, texts
from swjax.data.skipping import BadExample

_LARGEST_IMAGE = 2**28  # bytes
_BYTES_KEPT = 2**29  # of parts in memory, in each process
_PARTS_KEPT = 4  # at least, so a part has at most a quarter of these bytes
_THREADS = 16


class Part(NamedTuple):
    """Consecutive rows of a row group, which are read together.

    Attributes:
      file: number of the file.
      group: number of the row group in the file.
      start: the first row, counted in the group.
      row: the first row, counted in the file.
      rows: how many.
      whole: whether these are all rows of the group.
    """

    file: int
    group: int
    start: int
    row: int
    rows: int
    whole: bool


class Parquet(Photographs):
    """The rows of Parquet files, as img2dataset and Hugging Face write them.

    The image of a row is its bytes, a struct of bytes and path, or a path or address, which is relative to
    the directory of the file. A row is read with the two columns of its row group. Each process keeps the
    groups that it read last, at most 512 MiB of them. A group with more than 128 MiB is read in equal
    parts. Reading a part decodes the group from its first row and briefly allocates up to 512 MiB more. So
    shuffle by `shard`, whose shards are groups or their parts, unless the groups are small, and write
    groups of at most 128 MiB.

    Attributes:
      shards: int64, the rows of each row group, or of each part of a large one.
    """

    def __init__(
        self,
        split: str,
        *,
        image_key: str = "image;jpg;jpeg;png;webp",
        text_key: str = "caption;text;txt",
    ):
        """Reads the footers of the files.

        Args:
          split: paths or addresses, as in "laion/{00000..00127}.parquet".
          image_key: column of the images; of several, separated by ";", the first that exists.
          text_key: the same for the captions: a column with one caption, or with a list of them.

        Raises:
          ValueError: no file is found, one is missing or no Parquet file, there are no rows, or no such
            column in the first file.
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
            raise ValueError(f"there are no rows in {split!r}")
        self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def key(self, index: int) -> str:
        """Returns the file and the number of a row in it."""
        number, row = self._place(index)
        part = self._parts[number]
        return f"{self._paths[part.file]}[{part.row + row}]"

    def record(self, index: int) -> Record:
        """Reads a row, and the image if the row holds its path."""
        number, row = self._place(index)
        text = self._read(number).columns[1][row].as_py()
        return Record(self.image(index), texts(text))

    def image(self, index: int) -> bytes:
        """Reads the image of a row, whatever its text is."""
        number, row = self._place(index)
        image = self._read(number).columns[0][row].as_py()
        return self._bytes(image, self._paths[self._parts[number].file])

    def values(self) -> tuple[list, tuple[str, ...]]:
        """What the text column holds in each row, and the names of its numbers.

        Returns:
          The values, without the images being read; the names that Hugging Face's `ClassLabel` gives the
          numbers of that column, or ().
        """
        column, values = self._columns[1], []
        for path in self._paths:
            with _open(path) as opened:
                values += opened.read(columns=[column]).column(column).to_pylist()
        with _open(self._paths[0]) as opened:
            metadata = opened.schema_arrow.metadata or {}
        features = (
            json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        )
        return values, tuple(features.get(column, {}).get("names", ()))

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the part that holds a row, and the row's position in it."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self._ends[number]) + self._parts[number].rows

    def _read(self, number: int) -> Any:
        """A part, as a table of the two columns."""
        with self._lock:  # threads that want the same part read it once
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
        if isinstance(image, dict):  # of Hugging Face
            image = image.get("bytes") or image.get("path")
        if isinstance(image, str) and image:
            return files.read_whole(files.beside(image, of=path), _LARGEST_IMAGE)
        if not isinstance(image, bytes) or not image:
            raise BadExample(f"the image is neither bytes nor a path but {type(image).__name__}")
        return image

    def __reduce__(self) -> tuple:
        image_key, text_key = self._keys
        return functools.partial(Parquet, image_key=image_key, text_key=text_key), (self._split,)


def _open(path: str, *, in_memory: bool = True) -> Any:
    """The file, for reading its parts.

    Args:
      path: or address.
      in_memory: whether the columns of a row group are loaded before they are decoded, in one request; if
        not, they are loaded 1 MiB at a time.

    Raises:
      ValueError: there is no such file, or it is no Parquet file.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        opened = files.open_remote(path) if files.is_remote(path) else path
        return pyarrow.parquet.ParquetFile(opened, buffer_size=0 if in_memory else 2**20)
    except FileNotFoundError:
        raise ValueError(f"cannot open {path}: it does not exist; is the path right?") from None
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no whole Parquet file: {reason}") from None


def _groups(path: str, columns: Sequence[str]) -> list[tuple[int, int]]:
    """(rows, uncompressed bytes of the columns) of each row group of a file."""
    sizes = []
    with _open(path) as opened:
        for number in range(opened.metadata.num_row_groups):
            group = opened.metadata.row_group(number)
            chunks = [group.column(i) for i in range(group.num_columns)]
            size = sum(
                chunk.total_uncompressed_size
                for chunk in chunks
                if chunk.path_in_schema.split(".")[0] in columns
            )
            sizes.append((group.num_rows, size))
    return sizes


def _parts(file: int, groups: Sequence[tuple[int, int]]) -> Iterator[Part]:
    """The row groups of a file, large ones in parts of equal numbers of rows.

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
    """The rows of a part; the rows of its group before them are decoded and dropped."""
    import pyarrow

    batches, end = [], 0
    for batch in opened.iter_batches(part.rows, row_groups=[part.group], columns=list(columns)):
        first, end = end, end + len(batch)
        if end > part.start:
            skipped = max(part.start - first, 0)
            batches.append(batch.slice(skipped, part.start + part.rows - first - skipped))
        if end >= part.start + part.rows:
            break
    return pyarrow.Table.from_batches(batches).select(list(columns))


def _column(key: str, columns: list[str], path: str) -> str:
    found = next((name for name in key.split(";") if name in columns), None)
    if found is None:
        raise ValueError(f"{path} has no column {key!r}; it has {', '.join(columns)}")
    return found
