"""Data sets by name."""

import hashlib
import importlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

# A module is imported when its data set is opened, because most modules import a large library.
_SOURCES = {
    "emoji": ("swjax.data.emoji.source", "Emoji"),
    "icons": ("swjax.data.icons.source", "Icons"),
    "synthetic": ("swjax.data.synthetic", "Synthetic"),
    "tfds": ("swjax.data.tfds_source", "TFDS"),
    "webdataset": ("swjax.data.webdataset", "WebDataset"),
    "table": ("swjax.data.table", "Table"),
    "parquet": ("swjax.data.parquet", "Parquet"),
    "folders": ("swjax.data.folders", "Folders"),
    "huggingface": ("swjax.data.huggingface", "HuggingFace"),
    "labelled": ("swjax.data.labelled", "Labelled"),
}
_SAMPLED = 256  # examples that a fingerprint reads
_SAMPLED_BYTES = 2**30  # a fingerprint reads no further example after so many bytes of pictures
_THREADS = 16


class Source(Protocol):
    """The interface of a data set for loaders, evaluators and the report: examples by index.

    Attributes:
      class_names: name of each label; () if examples have no classes.
      templates: prompts for zero-shot classification, such as "a drawing of {}".
      attribution: authors and licenses, for the report.
      photographs: whether the loader crops the images at random in training.

    Optional members, read with `hasattr` or `getattr`:

    =================  ======================================================================================
    stored(index)      the example with its image as the bytes of a file, which the loader decodes
    key(index)         a readable name of an example, for messages; also of an unreadable one
    shards             [files] numbers of examples per file, in order, for `data.shuffle="shard"`
    outline()          yields bytes and texts that describe all examples without their pictures, for
                       `fingerprint`
    sampled(most)      at most that many indices of examples that are cheap to read, for `fingerprint`
    damage             (file, reason) of each partly unreadable file
    damaged_share      share of the data set's bytes in unreadable parts
    notes              lines about files that were left out, for the log
    parts              the sources of a mixture, with their `names` and `weights`
    =================  ======================================================================================
    """

    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    attribution: str
    photographs: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict:
        """Returns at least image (uint8 [h, w, 3 or 4]), label (int) and captions (strings)."""

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns all captions of a label's images, the plainest first."""


def source(
    name: str, split: str | os.PathLike, *, data_dir: str = "data", **options: Any
) -> Source:
    """Opens a split of a data set, and prepares the data set at its first use.

    Args:
      name: emoji, icons, synthetic, tfds, webdataset, table, parquet, folders, huggingface or labelled.
      split: "train", "val" or "test". icons also has "test_sets" and "test_both"; tfds has the splits of the
        builder. The other data sets expect the path of tars, a table, Parquet files or a folder; huggingface
        also takes a name on the hub.
      data_dir: directory of prepared data sets.
      **options: emoji: task, config. icons: config, archive. synthetic: image_size, classes, examples. tfds:
        builder, image_key, text_key. folders: template. Others: image_key, text_key.

    Raises:
      TypeError: the split is no text or path.
      ValueError: the data set, the split or an option does not exist.
      ModuleNotFoundError: a required package is not installed; the message names it.

    >>> patterns = source("synthetic", "val", image_size=8, classes=10, examples=25)
    >>> len(patterns), patterns[12]["label"], patterns[12]["captions"]
    (25, 2, ('pattern 2',))
    """
    make: Callable[..., Source] = _class_of(name)
    if not isinstance(split, str | os.PathLike):
        raise TypeError(f"the split must be one text or path, got {split!r}")
    split = os.fspath(split)
    signature = inspect.signature(make)
    if "data_dir" in signature.parameters:
        options["data_dir"] = data_dir
    try:
        signature.bind(split, **options)
    except TypeError as error:
        known = [option for option in signature.parameters if option not in ("split", "data_dir")]
        raise ValueError(
            f"options of the data set {name!r}: {error}; it has {', '.join(known) or 'none'}"
        ) from None
    return make(split, **options)


def templates(name: str) -> tuple[str, ...]:
    """Returns the prompts of a data set without opening it; () if it has none, like a mixture.

    >>> templates("synthetic"), templates("mixture")
    (('{}',), ())
    """
    return _class_of(name).templates if name in _SOURCES else ()


def fingerprint(source: Source) -> str:
    """Returns a hash of what a source reads, to tell whether a run resumes with the same data.

    It covers the number and the order of the examples, the class names, what the source knows of all examples
    without reading them, and the captions and pictures of 256 evenly spaced examples:

    =============  ==========================================================================================
    folders        the paths of all files relative to the folder, and the sizes of 20,000 of them
    table          the table's bytes: all up to 256 MiB, else 256 evenly spaced MiB of them
    webdataset     the sizes of all samples (of 33 million of them, evenly spaced)
    parquet        the rows and the sizes of both columns in each row group; examples of 4 groups are read
    tfds           the number of examples in each file
    huggingface    the sizes of the Arrow files
    labelled       as its kind; all labels of tables and Parquet files
    mixture        the names and weights of its parts, and their fingerprints
    =============  ==========================================================================================

    The paths of the data set itself are not part of it, so a data set that was moved keeps its fingerprint. A
    source of another class needs only the methods of `Source`. Reading stops after 1 GiB of pictures.

    It does not detect: a change that keeps the size of a file that it does not read; a change of a picture at
    a URL in a table; a decoder that decodes the same bytes differently.

    >>> patterns = [source("synthetic", "train", image_size=8, classes=n) for n in (5, 5, 6)]
    >>> same, again, other = map(fingerprint, patterns)
    >>> same == again, same == other, len(same)
    (True, False, 32)
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _described(source):
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _described(source: Any) -> Iterator[str | bytes]:
    yield f"{len(source)} examples, photographs: {source.photographs}"
    yield from source.class_names
    if hasattr(source, "parts"):
        for name, part, weight in zip(source.names, source.parts, source.weights, strict=True):
            yield from (name, str(weight), fingerprint(part))
        return
    yield from source.outline() if hasattr(source, "outline") else ()
    most = min(_SAMPLED, len(source))
    indices = source.sampled(most) if hasattr(source, "sampled") else spread(len(source), most)
    read = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(indices), _THREADS):
            some = indices[start : start + _THREADS]
            for contents in pool.map(_contents, itertools.repeat(source), some):
                yield from contents
                read += len(contents[-1])
            if read > _SAMPLED_BYTES:
                return


def _contents(source: Any, index: int) -> list[str | bytes]:
    """Returns the label, the captions and the picture of an example."""
    try:
        example = source.stored(index) if hasattr(source, "stored") else source[index]
        image = example["image"]
        if not isinstance(image, bytes):
            image = str(image.shape).encode() + image.tobytes()
        return [f"{index} {example['label']}", *example["captions"], image]
    except Exception:  # any kind of damage, as in training; its message may name a path
        return [f"{index} is unreadable", b""]


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` evenly spaced indices of `count` examples.

    >>> spread(10, 4), spread(3, 4)
    ([0, 3, 6, 9], [0, 1, 2])
    """
    return np.linspace(0, count - 1, min(most, count)).astype(np.int64).tolist()


def _class_of(name: str) -> type[Source]:
    if name not in _SOURCES:
        raise ValueError(f"there is no data set {name!r}: choose one of {', '.join(_SOURCES)}")
    module, class_name = _SOURCES[name]
    return getattr(importlib.import_module(module), class_name)
