"""Reads and writes in folders that may come from others, such as a received run; masks credentials.

A name or a link in such a folder may point anywhere. Nothing is written through a link, and only regular
files inside the folder are read. The module needs the standard library only, so all of swjax may import it.
"""

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

# Error numbers of a full, read-only or broken disk or of a wrong path, and the remedy for each.
DISK = {
    errno.ENOSPC: "give it room",
    errno.EDQUOT: "give it room",
    errno.EFBIG: "give it room",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EIO: "repair the disk",
    errno.ENOENT: "give a path that exists or can be created",
    errno.ENOTDIR: "give a directory, not a file",
    errno.EISDIR: "give a file, not a directory",
    errno.EEXIST: "give a directory, not a file",
}

_MOST_BYTES = 64 * 2**20
_MOST_LEVELS = 100  # of nested lists and objects in JSON
# Object stores whose addresses have a container, not a user, before the "@".
_CONTAINERS = r"(?<!\babfs)(?<!\babfss)(?<!\bwasb)(?<!\bwasbs)"
_USER = re.compile(
    r"(?:"
    r"(?P<both>://)[^/\s\"'?#@]*:[^/\s\"'?#]*@"  # user:password@
    rf"|{_CONTAINERS}(?P<user>://)[^/\s\"'?#]*@"  # token@
    # A password with an unescaped "/", "?" or "#". Digits after the colon are a port.
    r"|(?P<odd>://)[^/\s\"'?#@:]*:(?!\d+(?:[/?#]|$))(?:(?!://)[^\s\"'])*@"
    r")"
)
_PARAMETER = re.compile(
    r"([?&][\w.-]*(?:sig|signature|token|key|secret|password|passwd|pwd|credential)[\w.-]*=)[^&\s\"'#]*",
    re.IGNORECASE,
)


def inside(folder: str | Path, name: str) -> Path:
    """Joins a folder and a relative name that comes from a file or from another machine.

    Raises:
      ValueError: the name is absolute or leaves the folder, or a link on its path leaves the folder.

    >>> inside("run", "report/images/00.png").as_posix()
    'run/report/images/00.png'
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or not _encodable(name):
        raise ValueError(
            f"{name[:200]!r} is not the name of a file inside {folder}: use a relative name without '..'"
        )
    path = Path(folder, name)
    if not is_inside(path, folder):
        raise ValueError(f"{path} is a link out of {folder}, which is not followed: copy the file")
    return path


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Whether a path is in a folder after links are resolved; the path need not exist."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return real == root or Path(real).is_relative_to(root)


def _encodable(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def open_inside(folder: str | Path, name: str) -> BinaryIO:
    """Opens a regular file inside a folder for reading.

    Raises:
      ValueError: see `inside`.
      OSError: the file is missing, unreadable or not a regular file, such as a pipe.
    """
    path = inside(folder, name)
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return open(descriptor, "rb")


def read_inside(folder: str | Path, name: str, most: int = _MOST_BYTES) -> bytes:
    """Reads a regular file of at most `most` bytes inside a folder.

    Raises:
      ValueError: see `inside`, or the file is larger.
      OSError: see `open_inside`.
    """
    with open_inside(folder, name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{Path(folder, name)} is larger than {most:,} bytes: give another file")
    return data


def parse_json(text: str | bytes) -> Any:
    """Like `json.loads`; text that nests too deeply is a ValueError too, and every message is one line.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: its JSON nests too deeply
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON nests too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {one_line(error)}") from None
    if is_too_deep(found):
        raise ValueError("its JSON nests too deeply")
    return found


def is_too_deep(tree: Any) -> bool:
    """Whether lists and objects nest so deeply that recursive functions, such as `repr`, may fail."""
    level = [tree]
    for _ in range(_MOST_LEVELS):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def make_folder(folder: str | Path, name: str) -> Path:
    """Makes a subfolder, and its parents inside `folder`, unless it exists.

    Raises:
      ValueError: the subfolder is or contains a link out of `folder`.
      OSError: it cannot be created.
    """
    path = inside(folder, name)
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends; after an error the old file stays.

    The bytes are written to a new file next to `path`. If a link has either name, the link is replaced and
    its target is unchanged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/numbers.bin") as file:
    ...         _ = file.write(b"123")
    ...     os.listdir(folder)
    ['numbers.bin']
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # other processes may write `path` too
    part.unlink(missing_ok=True)
    try:
        with open(part, "xb") as file:  # "x" neither follows a link nor opens an existing file
            yield file
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: str | Path, content: str | bytes) -> Path:
    """Writes a file through `replacing`, so that a full disk or a killed process leaves the old one.

    The function does not fsync: after a power failure the file may be empty.

    Text is UTF-8. Characters that UTF-8 cannot encode, from file names in other encodings, are escaped.

    Returns:
      `path`.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with replacing(path) as file:
        file.write(data)
    return Path(path)


def open_no_follow(path: str | Path, mode: str, **options: Any) -> IO[Any]:
    """Like `open`, for files that are changed in place, such as a lock or a log; refuses a link.

    Raises:
      OSError: `path` is a link, or cannot be opened.
    """
    try:
        return open(
            path, mode, opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o666), **options
        )
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        reason = "Is a link, which is not followed when writing: remove it"
        raise OSError(errno.ELOOP, reason, str(path)) from None


def one_line(error: object) -> str:
    """The text of an error on one line.

    >>> one_line(ValueError("a,\\n  b"))
    'a, b'
    """
    return " ".join(str(error).split())


def explain(error: Exception, path: str | Path = "") -> str:
    """The text of an error on one printable line; of a file that cannot be used, with the remedy.

    Args:
      error: any error.
      path: the file, if the error does not name it.

    >>> explain(FileNotFoundError(errno.ENOENT, "No such file or directory", "a.png"))
    "cannot read or write 'a.png': No such file or directory; give a path that exists or can be created"
    """
    if isinstance(error, OSError) and error.errno in DISK and (path := error.filename or path):
        why = f"cannot read or write {str(path)!r}: {error.strerror}; {DISK[error.errno]}"
        return printable(why)
    return printable(str(error))


def printable(text: str) -> str:
    """Returns one line that a terminal shows as it is: names of files may contain escape sequences.

    >>> printable("a\x1b[2J\tb")
    'a?[2J b'
    """
    return "".join(c if c.isprintable() else "?" for c in one_line(text))


def mask_credentials(text: str) -> str:
    """Replaces the user, the password and the secret parameters of every address in a text by "***".

    >>> mask_credentials("--data=ftp://bob:PASSWORD@host/a.tar https://host/a.tar?sv=1&sig=abc")
    '--data=ftp://***@host/a.tar https://host/a.tar?sv=1&sig=***'
    >>> mask_credentials("s3://bucket/a@b.tar abfs://container@account/a.tar http://host:80/a@b")
    's3://bucket/a@b.tar abfs://container@account/a.tar http://host:80/a@b'
    """
    return _PARAMETER.sub(r"\1***", _USER.sub("://***@", text))
