"""Combines several data sets into one, sampled in given proportions."""

import math
from numbers import Real

import numpy as np

from swjax.data.decoding import decode


class Mixture:
    """Concatenates the examples of several sources; the loader samples them by weight.

    Attributes:
      parts: the sources.
      weights: relative sampling weight of each source; Grain rounds down to hundredths of the smallest.
      starts: index of the first example of each source.
    """

    class_names = ()
    templates = ()
    shards = None

    def __init__(self, parts: dict):
        """Combines sources.

        Args:
          parts: {name: (source, weight)}.

        Raises:
          ValueError: there are no sources, a source has no weight, a weight is not positive, or a source
            contains drawings, which cannot share a batch with photographs.

        >>> from swjax.data import source
        >>> few, many = (source("synthetic", "train", examples=n) for n in (10, 1000))
        >>> mixture = Mixture({"few": (few, 3.0), "many": (many, 1.0)})
        >>> len(mixture), mixture.key(12)
        (1010, 'many: 2')
        """
        if not parts:
            raise ValueError(
                "a mixture needs at least one source, got 0: name them in a config file, see docs/data.md"
            )
        for name, part in parts.items():
            if not isinstance(part, tuple | list) or len(part) != 2:
                raise ValueError(
                    f"the part {name!r} of a mixture must be (source, weight), got {part!r}: add a weight"
                )
            if not isinstance(part[1], Real) or not 0 < float(part[1]) < math.inf:
                raise ValueError(
                    f"the weight of {name!r} is {part[1]!r}; weights must be positive and finite"
                )
        self.names = tuple(parts)
        self.parts = tuple(part for part, _ in parts.values())
        self.weights = tuple(float(weight) for _, weight in parts.values())
        kinds = {name: _kind(part) for name, (part, _) in parts.items()}
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
            raise ValueError(
                f"sources of a mixture must have the same kind of images, got {listed}"
            )
        self.photographs = self.parts[0].photographs
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)])
        # A part may have more classes than examples.
        labels = (max(len(part), len(part.class_names)) for part in self.parts)
        self._labels = np.cumsum([0, *labels])
        damaged = [part for part in self.parts if getattr(part, "damage", ())]
        self.damage = tuple(file for part in damaged for file in part.damage)
        self.damaged_share = max((part.damaged_share for part in damaged), default=0.0)
        self.notes = tuple(note for part in self.parts for note in getattr(part, "notes", ()))
        self.attribution = "\n".join(filter(None, (part.attribution for part in self.parts)))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def stored(self, index: int) -> dict:
        """Returns an example; the labels of the sources are concatenated in order."""
        number, i = _find(self.starts, index)
        part = self.parts[number]
        example = part.stored(i) if hasattr(part, "stored") else part[i]
        return example | {"label": int(self._labels[number]) + example["label"]}

    def __getitem__(self, index: int) -> dict:
        """Returns an example, with its image decoded."""
        example = self.stored(index)
        image = example["image"]
        return example | {"image": decode(image) if isinstance(image, bytes) else image}

    def key(self, index: int) -> str:
        """Returns the name of the source, and the source's key of the example."""
        part, i = _find(self.starts, index)
        key = self.parts[part].key(i) if hasattr(self.parts[part], "key") else i
        return f"{self.names[part]}: {key}"

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the captions of a label."""
        part, i = _find(self._labels, label)
        return self.parts[part].captions(i)


def _find(starts: np.ndarray, number: int) -> tuple[int, int]:
    """Returns the part that contains an index or a label, and its number within the part."""
    part = int(np.searchsorted(starts, number, side="right")) - 1
    return part, number - int(starts[part])


def _kind(source) -> str:
    if source.photographs:
        return "photographs"
    return f"images of {source[0]['image'].shape[-1]} channels"
