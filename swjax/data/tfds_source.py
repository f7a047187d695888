"""Image-text pairs of any prepared TensorFlow Datasets builder, without TensorFlow."""

import contextlib
import functools
from collections.abc import Iterator

import numpy as np

from swjax.data.photographs import Photographs, Record, listed, texts
from swjax.packages import require


class TFDS(Photographs):
    """One split of a data set of photographs with captions; the attribution is the data set's citation."""

    def __init__(
        self,
        split: str,
        *,
        data_dir: str = "data",
        builder: str,
        image_key: str = "image",
        text_key: str = "caption;captions/text;captions;text",
    ):
        """Opens the data set.

        Args:
          split: split in TFDS notation, such as "train" or "train[:90%]".
          data_dir: directory of the prepared data set, in the format array_record.
          builder: name of the builder, such as "coco_captions" or "name/config:version".
          image_key: feature with the image; a nested feature is written "outer/inner".
          text_key: feature with one caption or several. With several features, separated by ";", the first
            existing one counts. COCO has "captions/text".

        Raises:
          ValueError: the data set, the split or a feature does not exist, or the format has no random access.
        """
        self._arguments = dict(
            data_dir=data_dir, builder=builder, image_key=image_key, text_key=text_key
        )
        opened = _open(builder, data_dir)
        if split.partition("[")[0] not in opened.info.splits:
            raise ValueError(
                f"{builder!r} has no split {split!r}; it has {listed(opened.info.splits)}"
            )
        features = opened.info.features
        text_key = _first_feature(features, text_key.split(";"), builder)
        _check_feature(features, image_key, builder)
        self._split, self._image_key, self._text_key = split, image_key, text_key
        try:
            self._records = opened.as_data_source(split=split, decoders=_undecoded(image_key))
        except NotImplementedError:  # TFDS raises it for formats without random access
            raise ValueError(
                f"{builder!r} was prepared in the format {opened.info.file_format.value}, which "
                'has no random access: prepare it again with file_format="array_record"'
            ) from None
        self.attribution = opened.info.citation
        self._lengths = list(opened.info.splits[split.partition("[")[0]].shard_lengths)
        if "[" not in split:
            self.shards = np.asarray(self._lengths, np.int64)

    def __len__(self) -> int:
        return len(self._records)

    def key(self, index: int) -> str:
        """Returns the data set, the split, the index and, if it exists, the value of the feature `key`."""
        name = f"{self._arguments['builder']}/{self._split}[{index}]"
        try:
            return f"{name} {_captions(self._records[index]['key'])[0]}"
        except Exception:  # the feature does not exist, or the record is unreadable
            return name

    def outline(self) -> Iterator[str | bytes]:
        """Yields the split, the features and the number of examples in each file."""
        yield from (self._split, self._image_key, self._text_key, *map(str, self._lengths))

    def record(self, index: int) -> Record:
        """Reads an example."""
        record = self._records[index]
        return Record(_at(record, self._image_key), _captions(_at(record, self._text_key)))

    def __reduce__(self) -> tuple:
        return functools.partial(TFDS, **self._arguments), (self._split,)


class LabelledTFDS(TFDS):
    """One split of a data set of labelled images; the caption of an image is the number of its label.

    Attributes:
      class_names: names of the feature `label`; () if it has none.
    """

    def __init__(self, split: str, *, data_dir: str = "data", builder: str):
        """Opens the data set, whose features are `image` and `label`; see `TFDS`."""
        super().__init__(split, data_dir=data_dir, builder=builder, text_key="label")
        label = _open(builder, data_dir).info.features["label"]
        self.class_names = tuple(getattr(label, "names", None) or ())

    def record(self, index: int) -> Record:
        """Reads an example."""
        record = self._records[index]
        return Record(_at(record, self._image_key), (str(int(record["label"])),))

    def __reduce__(self) -> tuple:
        places = {name: self._arguments[name] for name in ("data_dir", "builder")}
        return functools.partial(LabelledTFDS, **places), (self._split,)


def _open(name: str, data_dir: str):
    """Opens a data set from its files, because the code of its builder may need TensorFlow."""
    require("tensorflow_datasets", "array_record", "importlib_resources", "PIL")
    import tensorflow_datasets as tfds

    if not name:
        raise ValueError(
            "builder is empty: name the TFDS data set, such as builder='coco_captions'"
        )
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        raise ValueError(
            f"no TFDS data set {name!r} in {str(data_dir)!r}: prepare it there with tfds.builder("
            f'{name!r}, data_dir={str(data_dir)!r}, file_format="array_record")'
            ".download_and_prepare()"
        ) from None
    except ValueError as error:  # its message has several lines
        raise ValueError(
            f"builder={name!r} is not a name of a TFDS data set: write 'name', 'name/config' or "
            f"'name/config:1.0.0' ({str(error).splitlines()[0]})"
        ) from None


def _first_feature(features, paths: list[str], builder: str) -> str:
    """The first of the given paths that names a feature."""
    *others, last = paths
    for path in others:
        with contextlib.suppress(ValueError):
            _check_feature(features, path, builder)
            return path
    _check_feature(features, last, builder)
    return last


def _check_feature(features, path: str, builder: str) -> None:
    for key in path.split("/"):
        inner = getattr(features, "feature", features)  # a Sequence contains one feature
        if key not in getattr(inner, "keys", tuple)():
            raise ValueError(
                f"{builder!r} has no feature {path!r}; the features there are "
                f"{listed(getattr(inner, 'keys', tuple)()) or 'no inner features'}"
            )
        features = inner[key]


def _undecoded(path: str) -> dict:
    """Returns TFDS decoders that leave one feature undecoded."""
    import tensorflow_datasets as tfds

    decoders = tfds.decode.SkipDecoding()
    for key in reversed(path.split("/")):
        decoders = {key: decoders}
    return decoders


def _at(record: dict, path: str):
    return functools.reduce(lambda tree, key: tree[key], path.split("/"), record)


def _captions(value) -> tuple[str, ...]:
    return texts(np.atleast_1d(np.asarray(value, object)).tolist())
