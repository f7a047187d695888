"""Images and captions at almost no cost, to measure everything except data loading."""

import numpy as np

_CANVAS_SEED = 0


class Synthetic:
    """Crops of one noise image; each label has its own crop and its own caption.

    Attributes:
      class_names: name of each label.
      templates: prompts for zero-shot classification.
      attribution: "".
      photographs: False, because the loader neither crops nor decodes.
    """

    templates = ("{}",)
    attribution = ""
    photographs = False

    def __init__(
        self, split: str, *, image_size: int = 224, classes: int = 1000, examples: int = 100_000
    ):
        """Generates the noise image.

        Args:
          split: "train", "val" or "test"; all have the same classes.
          image_size: height = width in pixels.
          classes: number of labels, and so of crops and captions.
          examples: number of examples in the split.
        """
        if split not in ("train", "val", "test"):
            raise ValueError(f"split is {split!r}; it must be one of train, val, test")
        if min(image_size, classes, examples) < 1:
            raise ValueError(
                f"image_size, classes and examples of the synthetic data set must be positive; "
                f"they are {image_size}, {classes} and {examples}"
            )
        self._size, self._examples = image_size, examples
        self._side = int(np.ceil(np.sqrt(classes)))  # crops start at the points of this grid
        shape = (image_size + self._side, image_size + self._side, 3)
        self._canvas = np.random.default_rng(_CANVAS_SEED).integers(0, 256, shape, np.uint8)
        self.class_names = tuple(f"pattern {label}" for label in range(classes))

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> dict:
        """Returns image (uint8 [image_size, image_size, 3]), label and captions."""
        label = index % len(self.class_names)
        top, left = divmod(label, self._side)
        window = self._canvas[top : top + self._size, left : left + self._size]
        return {"image": window, "label": label, "captions": self.captions(label)}

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the only caption of a label."""
        return (self.class_names[label],)
