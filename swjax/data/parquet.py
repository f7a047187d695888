"""Image-text pairs in Parquet files, by number."""

import collections
import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from swjax.data import files
from swjax.data.packages import require
from swjax.data.photographs import Photographs, Record, texts
from swjax.data.skipping import BadExample

_LARGEST_IMAGE = 2**28  # bytes
_GROUPS_KEPT = 4  # row groups in memory, in each process
_THREADS = 16


class Parquet(Photographs):
    """The rows of Parquet files, as img2dataset and Hugging Face write them.

    The image of a row is its bytes, a struct of bytes and path, or a path or address, which is relative to
    the directory of the file. A row is read with its row group, and the last few groups stay in memory. So
    shuffle by `shard`, whose shards are row groups here, unless the groups are small.

    Attributes:
      shards: int64, the rows of each row group.
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
          image_key: column of the images; of several, with ";" between them, the first there is.
          text_key: the same for the captions: a column with one caption, or with a list of them.

        Raises:
          ValueError: no file is found, one is missing or no Parquet file, there are no rows, or no such
            column in the first file.
          ModuleNotFoundError: pyarrow is not installed.
        """
        require("pyarrow", extra="parquet")
        self._split, self._keys = split, (image_key, text_key)
        self._paths = files.expand(split)
        with ThreadPoolExecutor(_THREADS) as pool:
            footers = list(pool.map(_footer, self._paths))
        self._groups = [(i, g) for i, (_, rows) in enumerate(footers) for g in range(len(rows))]
        self._rows = np.array([n for _, rows in footers for n in rows], np.int64)
        self._ends, self.shards = np.cumsum(self._rows), self._rows
        if not len(self):
            raise ValueError(f"there are no rows in {split!r}")
        columns = footers[0][0]
        self._columns = tuple(_column(key, columns, self._paths[0]) for key in self._keys)
        self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def key(self, index: int) -> str:
        """Returns the file and the number of a row in it."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        file, number = self._groups[group]
        first = int(self._ends[group - number] - self._rows[group - number])
        return f"{self._paths[file]}[{index - first}]"

    def record(self, index: int) -> Record:
        """Reads a row, and the image if the row holds its path."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        row = index - int(self._ends[group]) + int(self._rows[group])
        image, text = (column[row].as_py() for column in self._read(group))
        text = str(text) if isinstance(text, int) else text  # a label
        return Record(self._bytes(image, self._paths[self._groups[group][0]]), texts(text))

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

    def _read(self, group: int) -> list:
        """The two columns of a row group."""
        with self._lock:  # threads that want the same group read it once
            if group not in self._kept:
                file, number = self._groups[group]
                with _open(self._paths[file]) as opened:
                    table = opened.read_row_group(number, columns=list(self._columns))
                self._kept[group] = [table.column(name) for name in self._columns]
                while len(self._kept) > _GROUPS_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(group)
            return self._kept[group]

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


def _open(path: str) -> Any:
    """The file, for reading its parts.

    Raises:
      ValueError: there is no such file, or it is no Parquet file.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        if files.is_remote(path):
            return pyarrow.parquet.ParquetFile(files.open_remote(path))
        return pyarrow.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise ValueError(f"cannot open {path}: it does not exist; is the path right?") from None
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no whole Parquet file: {reason}") from None


def _footer(path: str) -> tuple[list[str], list[int]]:
    """The columns of a file, and the rows of each of its row groups."""
    with _open(path) as opened:
        groups = opened.metadata.num_row_groups
        rows = [opened.metadata.row_group(group).num_rows for group in range(groups)]
        return opened.schema_arrow.names, rows


def _column(key: str, columns: list[str], path: str) -> str:
    found = next((name for name in key.split(";") if name in columns), None)
    if found is None:
        raise ValueError(f"{path} has no column {key!r}; it has {', '.join(columns)}")
    return found
