"""Random access to image-text pairs in WebDataset tars, as img2dataset writes them."""

import functools
from collections.abc import Iterator

import numpy as np

from swjax.data import files, tar
from swjax.data.index import Index, Scan
from swjax.data.photographs import Photographs, Record, field, json_fields, listed, texts
from swjax.data.skipping import BadExample

_LARGEST_SAMPLE = 2**28  # bytes
# The first bytes of a compressed file, and the program that unpacks it.
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"(\xb5/\xfd": "unzstd",
}
_STEP_LOCAL, _STEP_REMOTE = 2**14, 2**23  # bytes per read when scanning for headers


class WebDataset(Photographs):
    """The samples of tars: consecutive files with a common name up to the first dot.

    A file whose name and extension are those of an earlier file of the sample starts another sample.

    The first use scans the tars' headers for the position of each sample, and stores the positions.
    Afterwards a sample is one read of its bytes, so local tars can be shuffled without conversion. A tar
    behind an fsspec address needs one request per sample.

    The class extracts nothing to disk and unpickles nothing.
    """

    def __init__(
        self,
        split: str,
        *,
        data_dir: str = "data",
        image_key: str = "jpg;jpeg;png;webp",
        text_key: str = "txt",
    ):
        """Opens the tars.

        Args:
          split: paths or addresses, such as "cc12m/{00000..01242}.tar" or "gs://bucket/laion/*.tar".
          data_dir: directory of the stored sample positions.
          image_key: extension of the image; with several, separated by ";", the first existing file.
          text_key: extension of the caption, chosen as above; "json/caption" is a field of a JSON file.

        Raises:
          ValueError: no tar matches, a tar is missing, or the tars have no samples.
        """
        self._arguments = dict(data_dir=data_dir, image_key=image_key, text_key=text_key)
        self._split = split
        self._image_keys = [_extension(key) for key in image_key.split(";")]
        self._text_keys = [_extension(key) for key in text_key.split(";")]
        # The kind has the version of `scan`, because positions that another version stored differ.
        self._index = Index(files.expand(split), scan, kind="webdataset 2", data_dir=data_dir)
        if not len(self._index):
            raise ValueError(f"the tars {split!r} have no samples{self._index.excuse()}")
        self.shards = self._index.lengths
        self.damage, self.damaged_share = self._index.damage, self._index.damaged_share

    def __len__(self) -> int:
        return len(self._index)

    def key(self, index: int) -> str:
        """Returns the tar and the sample's name, or the sample's position if it is unreadable."""
        path, start, _ = self._index[index]
        try:
            return f"{path}:{self._sample(index)[0]}"
        except (OSError, ValueError):
            return f"{path}: byte {start}"

    def outline(self) -> Iterator[str | bytes]:
        """Yields the positions of the samples."""
        return self._index.outline()

    def record(self, index: int) -> Record:
        """Reads a sample's image and caption."""
        return self._pick(self._sample(index)[1])

    def _sample(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Reads a sample; returns its name and its files by extension."""
        path, start, stop = self._index[index]
        if stop - start > _LARGEST_SAMPLE:
            raise BadExample(f"the sample has {stop - start} bytes; the limit is {_LARGEST_SAMPLE}")
        data = files.read(path, start, stop)
        key, found = "", {}
        for member in tar.members(lambda a, b: data[a:b], len(data)):
            name = tar.split_name(member.name)
            if name and key not in ("", name[0]):
                raise BadExample(
                    f"files of {key} and {name[0]}: the tar has changed since its positions were stored"
                )
            if name:
                key = name[0]
                found[name[1]] = data[member.start : member.start + member.size]
        return key, found

    def _pick(self, found: dict[str, bytes]) -> Record:
        """Selects the image and the caption among the files of a sample."""
        image = next((found[name] for name in self._image_keys if name in found), None)
        if image is None:
            raise BadExample(f"no {'/'.join(self._image_keys)} file, only {listed(found)}")
        for key in self._text_keys:
            extension, _, name = key.partition("/")
            if extension in found:
                text = found[extension]
                text = field(json_fields(text), name) if name else text
                return Record(image, texts(text))
        raise BadExample(f"no {'/'.join(self._text_keys)} file, only {listed(found)}")

    def __reduce__(self) -> tuple:
        return functools.partial(WebDataset, **self._arguments), (self._split,)


def _extension(key: str) -> str:
    """The extension as members have it: in lower case, without the first dot; a field after it stays.

    >>> _extension(".JPG"), _extension("json/Caption")
    ('jpg', 'json/Caption')
    """
    extension, slash, name = key.strip().removeprefix(".").partition("/")
    return extension.lower() + slash + name


def scan(path: str, size: int) -> Scan:
    """Finds the start of each sample of a tar, and of an unreadable part.

    Raises:
      ValueError: the tar is compressed.
    """
    first = files.read(path, 0, min(size, 5))
    for magic, program in _COMPRESSED.items():
        if first.startswith(magic):
            raise ValueError(
                f"{path} is compressed, but compressed tars have no random access: unpack it "
                f"with {program} and name the .tar"
            )
    step = _STEP_REMOTE if files.is_remote(path) else _STEP_LOCAL
    bounds, last, end, trouble = [], None, 0, ""
    held = set[str]()  # extensions of the current sample
    try:
        for member in tar.members(files.Window(path, size, step), size):
            name = tar.split_name(member.name)
            if name and (name[0] != last or name[1] in held):
                bounds.append(member.header)
                last, held = name[0], set()
            if name:
                held.add(name[1])
            end = member.start + member.size
    except tar.BrokenTar as error:
        trouble = str(error)
    return Scan(np.asarray([*bounds, end], np.int64), trouble)
