"""Image-text pairs of a Hugging Face data set on disk (Arrow)."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from swjax.data import files
from swjax.data.photographs import Photographs, Record, listed, named, texts
from swjax.data.skipping import BadExample
from swjax.packages import require


class HuggingFace(Photographs):
    """A data set that `datasets.Dataset.save_to_disk` wrote. Its citation is the attribution.

    The class downloads nothing and runs no code of the data set.
    """

    def __init__(
        self, split: str, *, image_key: str = "image", text_key: str = "caption;text;title"
    ):
        """Opens the data set.

        Args:
          split: directory of the data set; for a saved `DatasetDict`, the directory of one split.
          image_key: column of images, with the feature Image or with bytes.
          text_key: column with one caption or a list of captions; with several names, separated by ";", the
            first existing column.

        Raises:
          ValueError: the data set or a column does not exist, or the data set has no rows.
          ModuleNotFoundError: the package datasets is not installed.
        """
        require("datasets", extra="huggingface")
        import datasets

        self._split = split
        if not (Path(split) / "state.json").is_file():
            raise ValueError(
                f"{split!r} contains no Hugging Face data set: give a directory that save_to_disk "
                "wrote; for a DatasetDict, the directory of a split"
            )
        # A saved data set keeps its format, which may hide columns or return other types.
        rows = datasets.Dataset.load_from_disk(split).with_format(None)
        columns = list[str]()
        for key in (image_key, text_key):
            column = named(key, rows.column_names)
            if column is None:
                raise ValueError(
                    f"{split!r} has no column {key.split(';')[0]!r}; it has {listed(rows.column_names)}"
                )
            columns.append(column)
        self._image_key, self._text_key = columns
        if not len(rows):
            raise ValueError(f"{split!r} has no rows")
        rows = rows.select_columns(columns)
        if isinstance(rows.features[columns[0]], datasets.Image):
            rows = rows.cast_column(columns[0], datasets.Image(decode=False))
        self._rows, self.attribution = rows, rows.info.citation

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, index: int) -> str:
        """Returns the directory and the row."""
        return f"{self._split}[{index}]"

    def outline(self) -> Iterator[str | bytes]:
        """Yields the sizes of the Arrow files."""
        return (str(os.path.getsize(file["filename"])) for file in self._rows.cache_files)

    def record(self, index: int) -> Record:
        """Reads a row, and its image file if the row contains a path."""
        row = self._rows[index]
        image = row[self._image_key]
        if isinstance(image, dict):
            path = image["path"]
            image = image["bytes"]
            if image is None and path:
                image = files.read_whole(path)
        if not isinstance(image, bytes):
            raise BadExample(f"the image must be bytes, not {type(image).__name__}")
        return Record(image, texts(row[self._text_key]))

    def __reduce__(self) -> tuple:
        keys = dict(image_key=self._image_key, text_key=self._text_key)
        return functools.partial(HuggingFace, **keys), (self._split,)
