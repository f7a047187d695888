"""Data sets by name."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

# A module is imported when its data set is asked for: most bring a large library.
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
    """A data set as loaders, evaluators and the report read it: examples by number.

    Attributes:
      class_names: name of each label; () where examples belong to no classes.
      templates: prompts for zero-shot classification, such as "a drawing of {}".
      attribution: authors and licences, for the report.
      photographs: whether the loader crops the images at random in training.
    """

    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    attribution: str
    photographs: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict:
        """Returns at least image (uint8 [h, w, 3 or 4]), label (int), captions (of strings)."""

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns all captions of a label's images, the plainest first."""


def source(name: str, split: str, *, data_dir: str = "data", **options: Any) -> Source:
    """Opens a split of a data set, and prepares the data set at its first use.

    Args:
      name: emoji, icons, synthetic, tfds, webdataset, table, parquet, folders or huggingface.
      split: train, val or test; of icons also test_sets or test_both; of tfds as the data set has it; of
        the others the path of tars, of a table, of Parquet files, of a folder.
      data_dir: where prepared data sets are kept.
      **options: of emoji: task, config; of icons: config, archive; of synthetic: image_size, classes,
        examples; of tfds: builder, image_key, text_key; of folders: template; of the others: image_key,
        text_key.

    Raises:
      ValueError: if there is no such data set, split or option.
      ModuleNotFoundError: if a package that it needs is not installed; the message names it.

    >>> patterns = source("synthetic", "val", image_size=8, classes=10, examples=25)
    >>> len(patterns), patterns[12]["label"], patterns[12]["captions"]
    (25, 2, ('pattern 2',))
    """
    make: Callable[..., Source] = _class_of(name)
    signature = inspect.signature(make)
    if "data_dir" in signature.parameters:
        options["data_dir"] = data_dir
    try:
        signature.bind(split, **options)
    except TypeError as error:
        raise ValueError(f"options of the data set {name!r}: {error}") from None
    return make(split, **options)


def prepare(name: str, *, data_dir: str = "data", **options: Any) -> None:
    """Prepares a data set ahead of its first use; at once if that was done."""
    source(name, "train", data_dir=data_dir, **options)


def templates(name: str) -> tuple[str, ...]:
    """Returns the prompts of a data set, without opening it; () if it has none, as a mixture.

    >>> templates("synthetic"), templates("mixture")
    (('{}',), ())
    """
    return _class_of(name).templates if name in _SOURCES else ()


def _class_of(name: str) -> type[Source]:
    if name not in _SOURCES:
        raise ValueError(f"there is no data set {name!r}; there are {', '.join(_SOURCES)}")
    module, class_name = _SOURCES[name]
    return getattr(importlib.import_module(module), class_name)
