"""Reads the members of a tar in place: extracts no files, and uses no member name as a path.

Python's tarfile could do this, at a quarter of the speed and with unbounded work on forged headers. In this
module every step moves forward and stays within the file, so any input either ends or raises BrokenTar.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_MOST_EXTENDED = 2**16  # bytes of a name or of pax records; a path has some hundred

_REGULAR = b"0\0007"
# Links, devices, directories, fifos: no data follow, whatever their header states.
_WITHOUT_DATA = b"123456"
# "directory/first.second.jpg" has the key "directory/first" and the extension "second.jpg".
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)


class BrokenTar(ValueError):
    """The archive is invalid from a byte on.

    Attributes:
      offset: position of that byte; the members before it are complete.
    """

    def __init__(self, offset: int, reason: str):
        super().__init__(f"broken tar at byte {offset}: {reason}")
        self.offset = offset


class Member(NamedTuple):
    """A regular file in a tar: the offsets of its first header and of its data, in bytes."""

    header: int
    name: str
    start: int
    size: int


def members(read: Callable[[int, int], bytes], end: int) -> Iterator[Member]:
    """Yields the regular files of a tar.

    Args:
      read: a function: (start, stop) -> the bytes of that range.
      end: size of the file in bytes.

    Raises:
      BrokenTar: a header is malformed, data extend beyond the end of the file, or another archive follows.
    """
    offset, first = 0, None
    extended: dict[str, Any] = {}
    while offset + _BLOCK <= end:
        header = read(offset, offset + _BLOCK)
        if header == _ZEROS:
            following = _following(read, offset, end)
            if following is not None:
                raise BrokenTar(
                    following, "another archive follows: join tars with tar -A, not cat"
                )
            return
        first = offset if first is None else first
        kind, size = header[156:157], _size(header, offset)
        if kind in _REGULAR and "size" in extended:
            size = extended["size"]
        start = offset + _BLOCK
        stop = start + (0 if kind in _WITHOUT_DATA else size)
        if stop > end:
            raise BrokenTar(first, f"a member of {size} bytes ends {stop - end} beyond the file")
        if kind in b"xL":
            if size > _MOST_EXTENDED:
                raise BrokenTar(first, f"an extended header of {size} bytes exceeds the limit")
            extended |= _extended(kind, read(start, stop), first)
        else:
            if kind in _REGULAR:
                yield Member(first, extended.get("path") or _name(header), start, size)
            # The other kinds do not affect names or sizes; another header follows.
            if kind not in b"gK":
                first, extended = None, {}
        offset = start + -(-(stop - start) // _BLOCK) * _BLOCK
    if first is not None or offset < end:
        raise BrokenTar(first if first is not None else offset, "the file ends within a header")


def _following(read: Callable[[int, int], bytes], offset: int, end: int) -> int | None:
    """The position of a header after the zeros that end an archive; None if other bytes or none follow."""
    while offset + _BLOCK <= end:
        header = read(offset, offset + _BLOCK)
        if header != _ZEROS:
            try:
                _size(header, offset)
            except BrokenTar:
                return None
            return offset
        offset += _BLOCK
    return None


def split_name(name: str) -> tuple[str, str] | None:
    """Returns (sample key, extension), or None for a file that is hidden or belongs to no sample.

    >>> split_name("shard/000.seg.png"), split_name("shard/.DS_Store")
    (('shard/000', 'seg.png'), None)
    """
    found = _KEY.fullmatch(name)
    return (found[1], found[2].lower()) if found else None


def _size(header: bytes, offset: int) -> int:
    """Returns the size in a header, after checking the header's checksum."""
    try:
        stated = int(header[148:156].rstrip(b" \0") or b"-", 8)
        field = header[124:136]
        size = (
            int.from_bytes(field[1:]) if field[0] == 0x80 else int(field.rstrip(b" \0") or b"0", 8)
        )
    except ValueError:
        raise BrokenTar(offset, "not a tar header") from None
    if stated != sum(header) - sum(header[148:156]) + 8 * ord(" ") or size < 0:
        raise BrokenTar(offset, "not a tar header")
    return size


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return _text(name)


def _extended(kind: bytes, data: bytes, offset: int) -> dict:
    """Returns path and size from a GNU long name, or from pax records "<length> <key>=<value>\\n"."""
    if kind == b"L":
        return {"path": _text(data.split(b"\0", 1)[0])}
    found, at = dict[str, Any](), 0
    while at < len(data) and data[at]:
        length = re.match(rb"([0-9]{1,5}) ", data[at : at + 6])
        if length is None:
            raise BrokenTar(offset, "malformed pax record")
        record = data[at : at + int(length[1])]
        key, equals, value = record[len(length[0]) : -1].partition(b"=")
        if not equals or record[-1:] != b"\n":
            raise BrokenTar(offset, "malformed pax record")
        if key == b"path":
            found["path"] = _text(value)
        if key == b"size":
            if not re.fullmatch(rb"[0-9]{1,18}", value):
                raise BrokenTar(offset, "malformed pax size")
            found["size"] = int(value)
        if key.startswith(b"GNU.sparse"):
            raise BrokenTar(offset, "sparse files are not supported")
        at += int(length[1])
    return found


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
