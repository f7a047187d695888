"""The icons data set: 330,000 drawings of 100,000 concepts, with their names."""

import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from swjax.data.icons import sets, shards
from swjax.data.icons.shards import SPLITS
from swjax.packages import require

CONFIGS = ("full", "slice")
TEMPLATES = ("{}", "an icon of {}", "a drawing of {}", "a small picture of {}")
_VERSION = "2.2.535-1"  # version of the npm package, and revision of this data set


class Icons:
    """One split of the drawings of open-source icon sets.

    A name says what a drawing shows, without words for its style or size. Training excludes 8 % of the names,
    and also some sets, whose styles are therefore unseen::

      split       sets      names
      train       seen      seen
      val         seen      held out: 2 %
      test        seen      held out: 6 %
      test_sets   held out  seen
      test_both   held out  held out, as in test

    No two splits share a drawing with equal pixels. Labels number the names of the split.

    Attributes:
      templates: prompts for zero-shot classification.
      attribution: artists and licenses.
      photographs: False, because `preprocess` augments drawings on the device.
    """

    templates = TEMPLATES
    photographs = False

    def __init__(
        self, split: str, *, data_dir: str = "data", config: str = "full", archive: str = ""
    ):
        """Opens a split. Its first use draws the icons: 81 s on 16 cores, or 23 s on 2 cores for the slice.

        Args:
          split: one of `SPLITS`.
          data_dir: directory of prepared data sets.
          config: "full", or "slice": 8 sets with 15,000 drawings.
          archive: path of the npm package; "" means DATA_DIR/`swjax.data.icons.sets.PACKAGE`.

        Raises:
          ValueError: the split or configuration does not exist, or the package is missing or has another
            version.
        """
        for name, value, known in (("split", split, SPLITS), ("config", config, CONFIGS)):
            if value not in known:
                raise ValueError(
                    f"{name} of the icons data set is {value!r}; it must be in {known}"
                )
        self._arguments = (split, data_dir, config, archive)
        self._folder = Path(data_dir) / "icons" / f"{config}-{_VERSION}"
        only = sets.SLICE if config == "slice" else frozenset()
        package = Path(archive or Path(data_dir) / sets.PACKAGE)
        shards.prepare(self._folder, package, only, f"icons/{config}")
        about = json.loads((self._folder / shards.COMPLETE).read_text())
        self._colored = frozenset(about["coloured_sets"])
        self._positions, self._labels = np.load(self._folder / f"{split}.npy", mmap_mode="r")
        self.attribution = (
            "Drawings: the icon sets of Iconify's collection (https://iconify.design), each under its own "
            f"licence; {self._folder / 'attribution.tsv'} names author and licence of each drawing."
        )

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """The name of each label."""
        split = self._arguments[0]
        return tuple(json.loads((self._folder / f"{split}.names.json").read_text())["names"])

    @functools.cached_property
    def _records(self):
        require("array_record")
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        paths = sorted(str(path) for path in self._folder.glob("shard-*.array_record"))
        return ArrayRecordDataSource(paths)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict:
        """Returns image (uint8 [96, 96, 4]), label, captions, key ("SET:NAME") and PNG."""
        from PIL import Image

        position = int(self._positions[index])
        key, category, png = shards.decode(self._records[position])
        return {
            "image": np.asarray(Image.open(io.BytesIO(png))),
            "label": int(self._labels[index]),
            "captions": self._captions_of(key, category),
            "key": key,
            "png": png,
        }

    def outline(self) -> Iterator[bytes]:
        """Yields the drawings and labels of the split, as numbers."""
        yield from (self._positions.tobytes(), self._labels.tobytes())

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the captions that fit every drawing of a label; the name comes first."""
        name = self.class_names[label]
        return tuple(template.format(name) for template in TEMPLATES)

    def _captions_of(self, key: str, category: str) -> tuple[str, ...]:
        """Captions of one drawing: its name, its style and its category.

        A category that is held out as a name is excluded.
        """
        prefix, _, name = key.partition(":")
        concept, style = sets.concept_and_style(name)
        style = " ".join([*style.split(), *(["in colour"] if prefix in self._colored else [])])
        category = " ".join(category.lower().replace("/", " ").split())
        said = [template.format(concept) for template in TEMPLATES]
        if style:
            said.append(f"{concept}, {style}")
        if category and category != concept and sets.fold(category) == "train":
            said.append(f"{concept}, {category}")
        return tuple(said)

    def __reduce__(self) -> tuple:
        # Each loader process reads the drawings itself.
        split, data_dir, config, archive = self._arguments
        make = functools.partial(Icons, data_dir=data_dir, config=config, archive=archive)
        return make, (split,)
