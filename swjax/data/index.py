"""Indexes the positions of the records in many files once, and stores the index with the data."""

import contextlib
import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swjax.data import files
from swjax.data.preparation import lock
from swjax.safe_files import replacing, write_atomically

_THREADS = 16  # files indexed at once, so that a slow remote file does not delay the others


class Scan(NamedTuple):
    """The positions of the records in one file.

    Attributes:
      bounds: int64 [records + 1]; record i occupies the bytes from bounds[i] to bounds[i + 1].
      trouble: why the bytes after the last record are unreadable; "" if all are readable.
    """

    bounds: np.ndarray
    trouble: str


class Index:
    """An index of records over many files.

    The bounds of all records are one array on disk, 8 bytes per record, which all processes of a machine
    share. The result of each file is cached until the file's size or modification time changes. So an
    interrupted preparation resumes, and only new files are read.

    Args:
      paths: paths of the files.
      scan: a function: (path, size of the file) -> `Scan` of its records.
      kind: name of the scan function, part of the cache key.
      data_dir: directory of the stored indices.

    Raises:
      ValueError: a file is missing or unreadable.
    """

    def __init__(
        self, paths: list[str], scan: Callable[[str, int], Scan], *, kind: str, data_dir: str
    ):
        self.paths = paths
        files.close_all()
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(checked_size_and_version, paths))
        sizes = [size for size, _ in found]
        places = [path if files.is_remote(path) else os.path.abspath(path) for path in paths]
        keys = [_digest(kind, place, found[i][1]) for i, place in enumerate(places)]
        folder = Path(data_dir) / "index"
        prefix = str(folder / _digest(*keys))
        if not Path(f"{prefix}.json").exists():
            with lock(folder / ".lock"):
                if not Path(f"{prefix}.json").exists():
                    _make(prefix, paths, sizes, keys, scan)
        with _blame(Path(f"{prefix}.json")) as path:
            meta = json.loads(path.read_text())
        with _blame(Path(f"{prefix}.npy")) as path:
            self._bounds = np.load(path, mmap_mode="r")
        self.lengths = np.asarray(meta["lengths"], np.int64)  # number of records per file
        self._ends = np.cumsum(self.lengths)
        self.damage = tuple((paths[i], reason) for i, reason, _ in meta["damage"])
        lost = sum(size for _, _, size in meta["damage"])
        self.damaged_share = lost / max(sum(sizes), 1)  # share of the bytes

    def __len__(self) -> int:
        return int(self._ends[-1])

    def excuse(self) -> str:
        """Returns a suffix for messages that explains why there are fewer records than expected."""
        return f": {': '.join(self.damage[0])}" if self.damage else ""

    def outline(self) -> Iterator[bytes]:
        """Yields the number of records of each file and the bounds of the records, for a fingerprint."""
        yield self.lengths.tobytes()
        for start, stop in files.blocks(self._bounds.nbytes):
            yield self._bounds[start // 8 : -(-stop // 8)].tobytes()

    def __getitem__(self, index: int) -> tuple[str, int, int]:
        """Returns the path of a record's file, its first byte and the byte after its last."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        # Earlier files contribute one bound per record, and one more bound per file.
        start, stop = self._bounds[index + file : index + file + 2].tolist()
        return self.paths[file], start, stop


def checked_size_and_version(path: str) -> tuple[int, str]:
    """Like `files.size_and_version`, with a ValueError of one line if the file cannot be opened."""
    try:
        return files.size_and_version(path)
    except FileNotFoundError:
        raise ValueError(f"cannot open {path}: it does not exist: check the path") from None
    except OSError as error:
        raise ValueError(f"cannot open {path}: {error.strerror or error}") from None


def _make(prefix: str, paths: list, sizes: list, keys: list, scan) -> None:
    """Writes PREFIX.npy and then PREFIX.json, which marks the index as complete."""
    parts = [Path(prefix).parent / "files" / f"{key}.npz" for key in keys]
    missing = [i for i, part in enumerate(parts) if not part.exists()]
    with ThreadPoolExecutor(_THREADS) as pool:
        scans = pool.map(lambda i: _store(parts[i], scan(paths[i], sizes[i])), missing)
        for _ in _tell(scans, len(missing)):
            pass
    lengths, damage = [], []
    with replacing(f"{prefix}.npy") as out:
        total = sum(len(_stored(part).bounds) for part in parts)
        header = {"descr": "<i8", "fortran_order": False, "shape": (total,)}
        np.lib.format.write_array_header_1_0(out, header)
        for i, part in enumerate(parts):
            bounds, trouble = _stored(part)
            out.write(bounds.astype("<i8").tobytes())
            lengths.append(len(bounds) - 1)
            if trouble:
                damage.append((i, trouble, sizes[i] - int(bounds[-1])))
    text = json.dumps({"lengths": lengths, "damage": damage})
    write_atomically(Path(f"{prefix}.json"), text)


def _store(part: Path, found: Scan) -> None:
    part.parent.mkdir(exist_ok=True)
    with replacing(part) as out:
        np.savez(out, bounds=found.bounds, trouble=found.trouble)


def _stored(part: Path) -> Scan:
    with _blame(part), part.open("rb") as file, np.load(file) as stored:
        if any(member.compress_type for member in stored.zip.infolist()):  # it is written without
            raise ValueError("it is compressed, and could inflate to any size")
        return Scan(stored["bounds"], str(stored["trouble"]))


@contextlib.contextmanager
def _blame(path: Path) -> Iterator[Path]:
    """Turns an error that a damaged file of an index causes into one that names the file."""
    try:
        yield path
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"the stored positions {path} are damaged: remove {path}, and those of the same name with other "
            f"endings; they are made again ({error})"
        ) from error


def _tell(done: Iterator, total: int) -> Iterator:
    """Passes an iterator through, with a progress line on a terminal."""
    live = sys.stderr.isatty() and total > 1
    for count, item in enumerate(done, 1):
        if live:
            print(f"\rindexing file {count} of {total}", end="", file=sys.stderr)
        yield item
    if live:
        print(file=sys.stderr)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
