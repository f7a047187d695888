"""How a picture of any shape becomes the square that an image tower reads."""

import dataclasses
from typing import Any

_CHOICES = {
    "resize_mode": ("shortest", "longest", "squash"),
    "interpolation": ("bicubic", "bilinear", "random"),
}


@dataclasses.dataclass(frozen=True)
class Fitting:
    """How a picture of any shape becomes a square, in the terms of open_clip's `preprocess_cfg`.

    Attributes:
      resize_mode: "shortest" scales the shorter side to the size and crops the center, "longest" scales the
        longer side and adds a border, "squash" changes the shape of the picture.
      interpolation: "bicubic", "bilinear", or "random": either of them in training, and bicubic otherwise.
      fill_color: level of the border's red, green and blue, 0 to 255.

    Raises:
      ValueError: an attribute has another value.
    """

    resize_mode: str = "shortest"
    interpolation: str = "bicubic"
    fill_color: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {given!r:.80}")
        if type(self.fill_color) is not int or not 0 <= self.fill_color <= 255:
            given = self.fill_color
            raise ValueError(f"fill_color must be a whole number from 0 to 255, got {given!r:.80}")

    @classmethod
    def of(cls, vision: Any) -> "Fitting":
        """Reads the attributes of the same names, such as those of a `VisionConfig`."""
        return cls(*(getattr(vision, field.name) for field in dataclasses.fields(cls)))
