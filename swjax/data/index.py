"""The positions of the records in many files, found once and stored with the data."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swjax.data import files
from swjax.data.preparation import lock

_THREADS = 16  # files indexed at once: a remote one does not delay the others


class Scan(NamedTuple):
    """The records of one file.

    Attributes:
      bounds: int64 [records + 1]; record i is the bytes from bounds[i] to bounds[i + 1].
      trouble: why what follows the last record cannot be read; "" if all can.
    """

    bounds: np.ndarray
    trouble: str


class Index:
    """The records of files by number.

    The bounds of all records are one array on disk, 8 bytes a record, which all processes of a
    machine share. The result of each file is stored too, until its size or time changes: an interrupted
    preparation continues, and only files that are added are read.

    Args:
      paths: of the files.
      scan: finds the records of a file, given its path and size.
      kind: names what `scan` does; part of the key of the index.
      data_dir: where indices are kept.

    Raises:
      ValueError: if a file is missing or cannot be read.
    """

    def __init__(
        self, paths: list[str], scan: Callable[[str, int], Scan], *, kind: str, data_dir: str
    ):
        self.paths = paths
        files.close_all()
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(_size_and_version, paths))
        sizes = [size for size, _ in found]
        places = [path if files.is_remote(path) else os.path.abspath(path) for path in paths]
        keys = [_digest(kind, place, found[i][1]) for i, place in enumerate(places)]
        folder = Path(data_dir) / "index"
        prefix = str(folder / _digest(*keys))
        if not Path(f"{prefix}.json").exists():
            with lock(folder / ".lock"):
                if not Path(f"{prefix}.json").exists():
                    _make(prefix, paths, sizes, keys, scan)
        meta = json.loads(Path(f"{prefix}.json").read_text())
        self._bounds = np.load(f"{prefix}.npy", mmap_mode="r")
        self.lengths = np.asarray(meta["lengths"], np.int64)  # records of each file
        self._ends = np.cumsum(self.lengths)
        self.damage = tuple((paths[i], reason) for i, reason, _ in meta["damage"])
        lost = sum(size for _, _, size in meta["damage"])
        self.damaged_share = lost / max(sum(sizes), 1)  # of the bytes

    def __len__(self) -> int:
        return int(self._ends[-1])

    def excuse(self) -> str:
        """Returns the end of a message: why there may be fewer records than expected."""
        return f": {self.damage[0][0]} is a {self.damage[0][1]}" if self.damage else ""

    def __getitem__(self, index: int) -> tuple[str, int, int]:
        """Returns the path of a record's file, and its first byte and the one after its last."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        # The bounds before it are those of all earlier records, and one more for each earlier file.
        start, stop = self._bounds[index + file : index + file + 2].tolist()
        return self.paths[file], start, stop


def _size_and_version(path: str) -> tuple[int, str]:
    try:
        return files.size_and_version(path)
    except FileNotFoundError:
        raise ValueError(f"cannot open {path}: it does not exist; is the path right?") from None
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
    with open(f"{prefix}.part", "wb") as out:
        total = sum(_bounds_in(part) for part in parts)
        header = {"descr": "<i8", "fortran_order": False, "shape": (total,)}
        np.lib.format.write_array_header_1_0(out, header)
        for i, part in enumerate(parts):
            with np.load(part) as stored:
                bounds, trouble = stored["bounds"], str(stored["trouble"])
            out.write(bounds.astype("<i8").tobytes())
            lengths.append(len(bounds) - 1)
            if trouble:
                damage.append((i, trouble, sizes[i] - int(bounds[-1])))
    os.replace(f"{prefix}.part", f"{prefix}.npy")
    _write(Path(f"{prefix}.json"), json.dumps({"lengths": lengths, "damage": damage}).encode())


def _store(part: Path, found: Scan) -> None:
    part.parent.mkdir(exist_ok=True)
    with open(f"{part}.part", "wb") as out:
        np.savez(out, bounds=found.bounds, trouble=found.trouble)
    os.replace(f"{part}.part", part)


def _bounds_in(part: Path) -> int:
    with np.load(part) as stored:
        return len(stored["bounds"])


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)


def _tell(done: Iterator, total: int) -> Iterator:
    """Passes an iterator on, and shows its progress on a terminal."""
    live = sys.stderr.isatty() and total > 1
    for count, item in enumerate(done, 1):
        if live:
            print(f"\rlooking through file {count} of {total}", end="", file=sys.stderr)
        yield item
    if live:
        print(file=sys.stderr)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
