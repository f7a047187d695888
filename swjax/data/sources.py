"""Data sets by name."""

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any, Protocol

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


class Source(Protocol):
    """The interface of a data set for loaders, evaluators and the report: examples by index.

    Attributes:
      class_names: name of each label; () if examples have no classes.
      templates: prompts for zero-shot classification, such as "a drawing of {}".
      attribution: authors and licenses, for the report.
      photographs: whether the loader crops the images at random in training.
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
      name: emoji, icons, synthetic, tfds, webdataset, table, parquet, folders or huggingface.
      split: "train", "val" or "test". icons also has "test_sets" and "test_both"; tfds has the splits of the
        builder. The other data sets expect the path of tars, a table, Parquet files or a folder.
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
        raise ValueError(f"options of the data set {name!r}: {error}") from None
    return make(split, **options)


def prepare(name: str, *, data_dir: str = "data", **options: Any) -> None:
    """Prepares a data set before its first use; returns at once if it is prepared."""
    source(name, "train", data_dir=data_dir, **options)


def templates(name: str) -> tuple[str, ...]:
    """Returns the prompts of a data set without opening it; () if it has none, like a mixture.

    >>> templates("synthetic"), templates("mixture")
    (('{}',), ())
    """
    return _class_of(name).templates if name in _SOURCES else ()


def _class_of(name: str) -> type[Source]:
    if name not in _SOURCES:
        raise ValueError(f"there is no data set {name!r}: choose one of {', '.join(_SOURCES)}")
    module, class_name = _SOURCES[name]
    return getattr(importlib.import_module(module), class_name)
