"""Files: expands path patterns and reads byte ranges, from disk or through fsspec."""

import errno
import functools
import glob
import importlib.util
import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from swjax.packages import MissingPackage, require
from swjax.safe_files import is_inside, one_line

HEIF_REMEDY = "pip install 'swjax[heif]' to read HEIC"
_HEIC = (".heic", ".heif")
# Endings of pictures that are not read, and the names of their formats.
_UNREAD = {
    ".heic": "HEIC", ".heif": "HEIC", ".jpx": "JPEG 2000", ".jxl": "JPEG XL", ".svg": "SVG",
    ".psd": "Photoshop", ".ico": "icon", ".tga": "TGA", ".ppm": "PPM", ".pgm": "PPM", ".exr": "EXR",
    ".hdr": "HDR", ".dng": "raw", ".cr2": "raw", ".cr3": "raw", ".nef": "raw", ".arw": "raw",
}  # fmt: skip
# What fsspec needs for an address; no extra of swjax contains it.
_PACKAGES = {
    "http": "requests aiohttp", "https": "requests aiohttp", "s3": "s3fs", "s3a": "s3fs",
    "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "hf": "huggingface_hub",
    "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
}  # fmt: skip
_ENDINGS = 5  # number of endings that are named
_LARGEST = 2**28  # bytes of a picture
_OPEN_FILES = 256  # limit per process
# What a fingerprint covers: number and bytes of the parts of a large file, sizes of files in a folder.
_BLOCKS, _BLOCK, _SIZES = 256, 2**20, 20_000
_BRACES = re.compile(r"\{([^{}]*)\}")


@functools.cache
def has_heif() -> bool:
    """Whether pillow-heif is installed, which reads HEIC."""
    return importlib.util.find_spec("pillow_heif") is not None


# Endings of the pictures that are read.
PICTURES = (
    ".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2", ".j2k",
    *(_HEIC if has_heif() else ()),
)  # fmt: skip


def expand(pattern: str) -> list[str]:
    """Returns the paths that match a pattern, in order.

    Args:
      pattern: a path or an fsspec address. {000..041} expands to numbers, {a,b} to alternatives, and *, ? and
        [...] to existing files.

    Raises:
      ValueError: a wildcard matches nothing, or the pattern names a file twice.

    >>> expand("gs://bucket/{train,more}/{08..10}.tar")[:4]
    ['gs://bucket/train/08.tar', 'gs://bucket/train/09.tar', 'gs://bucket/train/10.tar', 'gs://bucket/more/08.tar']
    """
    parts = _BRACES.split(pattern)  # literal text and brace contents alternate
    choices = [_inside(part) if i % 2 else [part] for i, part in enumerate(parts)]
    named = ["".join(chosen) for chosen in itertools.product(*choices)]
    paths = [path for name in named for path in (_found(name) if glob.has_magic(name) else [name])]
    if not paths:
        raise ValueError(f"no file matches {pattern!r}: check the path")
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"{pattern!r} names {twice!r} twice: its examples would be seen twice")
    return paths


def below(folder: str, endings: tuple[str, ...]) -> list[str]:
    """Lists the files in a folder and its subfolders that have one of the given endings, ignoring case.

    Hidden files and folders, such as `.ipynb_checkpoints` and the `._*` files of macOS, are left out. Links
    to files and folders are followed, but each folder is listed once: by its own path if that is in `folder`,
    else by the first link to it. A link to a folder that contains the link, or `folder`, is not followed.

    Args:
      folder: a local folder.
      endings: lower-case endings, such as `PICTURES`; ("",) lists all files.

    Returns:
      Their paths relative to the folder, sorted.

    Raises:
      OSError: a folder is unreadable.
    """
    found, links, listed = list[str](), [os.fspath(folder)], set()
    while links:
        tops, links = sorted(links), []
        for top in tops:  # os.walk lists a link among the folders, and does not enter it
            for inside, folders, names in os.walk(top, onerror=_fail):
                status = os.stat(inside)
                if (status.st_dev, status.st_ino) in listed:
                    folders.clear()
                    continue
                listed.add((status.st_dev, status.st_ino))
                folders[:] = [name for name in folders if name[0] != "."]
                paths = (os.path.join(inside, name) for name in folders)
                links += [p for p in paths if os.path.islink(p) and not _is_above(p, folder)]
                where = os.path.relpath(inside, folder)
                shown = [n for n in names if n[0] != "." and n.lower().endswith(endings)]
                found += [os.path.normpath(f"{where}/{name}") for name in shown]
    return sorted(found)


def _is_above(link: str, folder: str) -> bool:
    """Whether a link leads to a folder that contains the link or `folder`."""
    return is_inside(os.path.dirname(link), link) or is_inside(folder, link)


def belongs(path: str | Path, folder: str | Path) -> bool:
    """Whether a file is in a folder once its links are resolved, so that a folder from others may name it.

    The files of a snapshot in a cache of Hugging Face are links to `blobs` in the same cache; they belong.
    """
    real = os.path.realpath(path)
    cache, blobs = os.path.split(os.path.dirname(real))
    snapshots = os.path.join(cache, "snapshots")
    return is_inside(real, folder) or (blobs == "blobs" and is_inside(folder, snapshots))


def not_read(paths: Iterable[str]) -> str:
    """Returns a line that counts files by ending; "" for none.

    >>> not_read(["a.JXL", "b.jxl", "LICENSE"])
    '3 files are not read: 2 .jxl, 1 without ending; convert JPEG XL pictures to JPEG or PNG'
    """
    endings = Counter(os.path.splitext(path)[1].lower() for path in paths)
    if not endings:
        return ""
    counts = ", ".join(f"{n} {e or 'without ending'}" for e, n in endings.most_common(_ENDINGS))
    more = f", and {len(endings) - _ENDINGS} other endings" if len(endings) > _ENDINGS else ""
    kinds = ", ".join(sorted({_UNREAD[ending] for ending in endings if ending in _UNREAD}))
    remedy = f"; convert {kinds} pictures to JPEG or PNG" if kinds else ""
    remedy += f", or {HEIF_REMEDY}" if endings.keys() & set(_HEIC) else ""
    total = sum(endings.values())
    return f"{total} file{'s are' if total > 1 else ' is'} not read: {counts}{more}{remedy}"


def _fail(error: OSError) -> None:
    raise error


def _inside(braces: str) -> list[str]:
    counted = re.fullmatch(r"(\d+)\.\.(\d+)", braces)
    if not counted:
        return braces.split(",")
    first, last = counted.groups()
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def _found(path: str) -> list[str]:
    if not is_remote(path):
        return sorted(glob.glob(path, recursive=True))
    fs, inside = _filesystem(path)
    return sorted(fs.unstrip_protocol(found) for found in fs.glob(inside))


def is_remote(path: str) -> bool:
    """Whether a path is an fsspec address.

    >>> is_remote("s3://bucket/00000.tar"), is_remote("/disk/00000.tar")
    (True, False)
    """
    return "://" in path


def check_protocol(path: str) -> None:
    """Raises an error if this machine cannot read the protocol of an address; does not open the file.

    Raises:
      ModuleNotFoundError: a package that the protocol needs is not installed.
      ValueError: the protocol does not exist.
    """
    if is_remote(path):
        _filesystem(path)


def beside(path: str, of: str) -> str:
    """Resolves a path that is given relative to the directory of another file.

    >>> beside("images/1.jpg", of="/disk/train.csv")
    '/disk/images/1.jpg'
    """
    if is_remote(path) or Path(path).is_absolute():
        return path
    return f"{of.rpartition('/')[0]}/{path}" if "/" in of else path


def size_and_version(path: str) -> tuple[int, str]:
    """Returns a file's size in bytes, and a text that changes whenever the file changes.

    Raises:
      OSError: the file does not exist, or is a directory or a pipe.
    """
    if not is_remote(path):
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory: name the files in it", path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file: write its content to a file", path)
        return status.st_size, f"{status.st_size} {status.st_mtime_ns}"
    fs, inside = _filesystem(path)
    return fs.size(inside), fs.ukey(inside)


def read(path: str, start: int, stop: int) -> bytes:
    """Returns the bytes from start to stop. Thread-safe, because it uses no file position.

    Raises:
      OSError: the file is missing, unreadable or shorter than `stop`.
    """
    if is_remote(path):
        fs, inside = _filesystem(path)
        data = fs.cat_file(inside, start, stop)
    else:
        handle = _open(path)  # the reference keeps the file open if the cache evicts it
        data = os.pread(handle.descriptor, stop - start, start)
    if len(data) < stop - start:
        raise OSError(errno.ENODATA, f"The file ends before byte {stop}", path)
    return data


def read_whole(path: str, most: int = _LARGEST) -> bytes:
    """Returns all bytes of a file of at most `most` bytes.

    Raises:
      OSError: the file is missing, unreadable, no regular file or larger than `most`.
    """
    if is_remote(path):
        fs, inside = _filesystem(path)
        data = fs.cat_file(inside, 0, most + 1)
    else:
        size_and_version(path)  # opening a pipe would wait for a writer
        with open(path, "rb") as file:
            data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"The file is larger than {most} bytes", path)
    return data


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of the parts of a file that a fingerprint covers: all of it up to 256 MiB.

    >>> list(blocks(3)), sum(stop - start for start, stop in blocks(2**40)) == 2**28
    ([(0, 3)], True)
    """
    for number in range(_BLOCKS):
        start = number * _BLOCK
        if size > _BLOCKS * _BLOCK:
            start = number * (size - _BLOCK) // (_BLOCKS - 1)
        if start >= size:
            return
        yield start, min(start + _BLOCK, size)


def outline(folder: str, names: list[str]) -> Iterator[str]:
    """Yields the relative paths of files in a folder, and the sizes of 20,000 of them, for a fingerprint."""
    yield from names
    for name in names[:: -(-len(names) // _SIZES)]:
        path = os.path.join(folder, name)
        yield str(os.stat(path).st_size) if os.path.exists(path) else "no file"  # a broken link


def open_remote(path: str) -> Any:
    """Opens an fsspec address for reading at any position.

    Raises:
      FileNotFoundError, OSError: the file does not exist, or cannot be read.
      ModuleNotFoundError: a package that its protocol needs is not installed.
    """
    fs, inside = _filesystem(path)
    return fs.open(inside, "rb")


class Window:
    """Reads a file forward in few large steps; calls have the arguments of `read`.

    Args:
      path: path of the file.
      size: size of the file in bytes.
      step: bytes per read; the next read discards them.
    """

    def __init__(self, path: str, size: int, step: int):
        self._path, self._size, self._step = path, size, step
        self._start, self._data = 0, b""

    def __call__(self, start: int, stop: int) -> bytes:
        if not self._start <= start <= stop <= self._start + len(self._data):
            self._data = read(self._path, start, max(stop, min(start + self._step, self._size)))
            self._start = start
        return self._data[start - self._start : stop - self._start]


class _Handle:
    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@functools.lru_cache(_OPEN_FILES)
def _open(path: str) -> _Handle:
    return _Handle(path)


def close_all() -> None:
    """Closes the files that `read` keeps open.

    Called before files are indexed, because a path may meanwhile name another file: the file was replaced or
    the working directory changed.
    """
    _open.cache_clear()


def _filesystem(path: str):
    """Returns the file system of an address, and the path inside it.

    Raises:
      ModuleNotFoundError: a package that its protocol needs is not installed.
      ValueError: the protocol does not exist.
    """
    require("fsspec")
    import fsspec

    try:
        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        reason = one_line(error)
        packages = _PACKAGES.get(path.partition("://")[0])
        remedy = f": pip install {packages}" if packages else ""
        raise MissingPackage(f"cannot read {path}: {reason}{remedy}", name=error.name) from None
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
