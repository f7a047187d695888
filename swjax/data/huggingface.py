"""Image-text pairs of a Hugging Face data set, by name or on disk (Arrow)."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swjax.data import files, hub_cache
from swjax.data.photographs import Photographs, Record, listed, named, texts
from swjax.data.skipping import BadExample
from swjax.packages import require
from swjax.safe_files import one_line

# OWNER/NAME[@REVISION][/CONFIG]/SPLIT
_NAME = re.compile(
    r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w.-]+))?(?:/([\w.-]+))?/([\w.-]+(?:\[[^\]]*\])?)"
)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\b.*")


class HuggingFace(Photographs):
    """A data set of the Hugging Face hub, or one that `datasets.Dataset.save_to_disk` wrote.

    Its citation is the attribution. The class runs no code of the data set.
    """

    def __init__(
        self, split: str, *, image_key: str = "image", text_key: str = "caption;text;title"
    ):
        """Opens the data set.

        Args:
          split: directory of the data set; for a saved `DatasetDict`, the directory of one split. Or a name,
            OWNER/NAME[@REVISION][/CONFIG]/SPLIT, whose split may be a part such as train[:90%]. A named data
            set is read from Hugging Face's cache, into which it is downloaded where there is a network.
          image_key: column of images, with the feature Image or with bytes.
          text_key: column with one caption or a list of captions; with several names, separated by ";", the
            first existing column.

        Raises:
          ValueError: the data set or a column does not exist, the data set has no rows, or it is not in the
            cache and cannot be downloaded.
          ModuleNotFoundError: the package datasets is not installed.
        """
        require("datasets", extra="huggingface")
        import datasets

        self._split = split
        name = _NAME.fullmatch(split)
        if (Path(split) / "state.json").is_file():
            rows = datasets.Dataset.load_from_disk(split)
        elif name and not Path(name[1].partition("/")[0]).exists():
            rows = _of_hub(*name.groups())
        else:
            raise ValueError(
                f"{split!r} contains no Hugging Face data set: give a directory that save_to_disk "
                "wrote, for a DatasetDict that of a split, or a name, OWNER/NAME/SPLIT"
            )
        # A saved data set keeps its format, which may hide columns or return other types.
        rows = rows.with_format(None)
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


def _of_hub(repository: str, revision: str | None, config: str | None, split: str) -> Any:
    """Loads a split of a data set from Hugging Face's cache, or else from the hub."""
    import datasets

    command = f"hf download {repository} --repo-type dataset"
    command += f" --revision {revision}" if revision else ""
    remedy = f"where there is a network, run `{command}`, and copy Hugging Face's cache {hub_cache.folder()}"
    snapshot = hub_cache.snapshot(repository, revision or "main", "datasets")
    try:
        if snapshot.is_dir():
            _check_shards(snapshot, repository, remedy)
            return datasets.load_dataset(str(snapshot), config, split=split)
        if hub_cache.is_offline() or hub_cache.is_reachable():
            return datasets.load_dataset(repository, config, split=split, revision=revision)
    # OSError: the network or the disk failed.
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = one_line(error)
        raise ValueError(
            f"the data set {repository} is not in the cache and cannot be downloaded "
            f"({type(error).__name__}: {reason:.120}): check the name, or {remedy}"
        ) from error
    raise ValueError(f"the data set {repository} is not in the cache: {remedy}")


def _check_shards(snapshot: Path, repository: str, remedy: str) -> None:
    """Raises a ValueError if shards of a data set are missing, which `datasets` would leave out silently."""
    shards: dict[tuple[str, int], int] = {}
    for path in snapshot.rglob("*"):
        found = _SHARD.fullmatch(path.relative_to(snapshot).as_posix())
        if found and path.exists():  # not a link to a file that was removed
            key = found[1], int(found[3])
            shards[key] = shards.get(key, 0) + 1
    for (start, count), have in sorted(shards.items()):
        if have < count:
            raise ValueError(
                f"the cache holds {have} of the {count} files {start}-* of {repository}: {remedy}"
            )
