"""Random changes of training photographs, named as in open_clip's `--aug-cfg` and timm.

Pillow computes every operation, so results equal those of torchvision's transforms of Pillow images.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from swjax.data.images import MEAN, RATIO, SCALE, STD, random_box

if TYPE_CHECKING:
    from PIL import Image

MOST_MAGNITUDE = 30  # of RandAugment
_ERASED, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 10 / 3)  # area and shape of an erased rectangle
# RandAugment fills what moves into the picture with the mean of the training images.
_FILL = tuple(round(255 * level) for level in MEAN)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """How photographs change at random in training. The default only crops them.

    A call applies all attributes but the first two, in their order, to a photograph that is cropped and
    resized. Draws come from the generator alone, so a seed fixes the result.

    Attributes:
      scale: smallest and largest area of a crop, as a share of the picture.
      ratio: smallest and largest width / height of a crop. If pictures are not cropped to squares
        (`Fitting`), it is relative to the shape of the picture.
      hflip: probability that left and right are exchanged.
      randaugment: number of operations of RandAugment; 0 is off.
      magnitude: strength of these operations, 0 to 30.
      color_jitter: largest relative change of brightness, contrast and saturation, and largest shift of the
        hue as a share of the color circle, at most 0.5. They are applied in random order.
      color_jitter_prob: probability that a picture is jittered.
      gray_scale_prob: probability that a picture becomes gray.
      re_prob: probability that a rectangle of 2 % to 33 % of the picture becomes noise (random erasing).

    Raises:
      ValueError: an attribute is out of range.

    References:
      Cubuk et al., RandAugment, arXiv 1909.13719; Zhong et al., Random Erasing, arXiv 1708.04896.

    >>> left = np.zeros((2, 2, 3), np.uint8) + np.array([[[10], [20]]], np.uint8)
    >>> Augmentation(hflip=1.0)(left, np.random.default_rng(0))[:, :, 0].tolist()
    [[20, 10], [20, 10]]
    """

    scale: tuple[float, float] = SCALE
    ratio: tuple[float, float] = RATIO
    hflip: float = 0.0
    randaugment: int = 0
    magnitude: int = 9
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    color_jitter_prob: float = 1.0
    gray_scale_prob: float = 0.0
    re_prob: float = 0.0

    def __post_init__(self) -> None:
        limits = {"randaugment": np.inf, "magnitude": MOST_MAGNITUDE, "ratio": np.inf}
        for field in dataclasses.fields(self):
            given, most = getattr(self, field.name), limits.get(field.name, 1.0)
            value, like = np.asarray(given), np.asarray(field.default)
            if value.shape != like.shape or not np.can_cast(value.dtype, like.dtype, "same_kind"):
                raise ValueError(
                    f"{field.name} must have the form of {field.default}, got {given!r}: change it"
                )
            if not np.all((value >= 0) & (value <= most)):
                raise ValueError(f"{field.name} must be 0 to {most:g}, got {given}: change it")
        for name, (least, most) in {"scale": self.scale, "ratio": self.ratio}.items():
            if not 0 < least <= most:
                raise ValueError(f"{name} must be (smallest, largest) above 0, got {least, most}")
        if self.color_jitter[3] > 0.5:
            raise ValueError(
                f"color_jitter shifts the hue by at most 0.5, got {self.color_jitter[3]}: lower it"
            )

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Changes a cropped photograph.

        Args:
          image: uint8 [h, w, 3].
          rng: generator of all choices.

        Returns:
          uint8 [h, w, 3].
        """
        if self.hflip and rng.random() < self.hflip:
            image = image[:, ::-1]
        colored = any(self.color_jitter) and rng.random() < self.color_jitter_prob
        gray = self.gray_scale_prob and rng.random() < self.gray_scale_prob
        if self.randaugment or colored or gray:
            from PIL import Image

            picture = Image.fromarray(np.ascontiguousarray(image))
            for _ in range(self.randaugment):
                picture = _random_operation(picture, self.magnitude / MOST_MAGNITUDE, rng)
            picture = _jitter(picture, self.color_jitter, rng) if colored else picture
            picture = picture.convert("L").convert("RGB") if gray else picture
            image = np.asarray(picture)
        if self.re_prob and rng.random() < self.re_prob:
            image = _erase(image, rng)
        return np.ascontiguousarray(image)


def _random_operation(
    image: "Image.Image", level: float, rng: np.random.Generator
) -> "Image.Image":
    """Applies one of RandAugment's operations, with a random sign, at a level of 0 to 1 to an RGB image."""
    names = tuple(operations())
    name, sign = names[rng.integers(len(names))], int(rng.choice((-1, 1)))
    return operations()[name](image, level, sign)


@functools.cache
def operations() -> dict[str, Callable[["Image.Image", float, int], "Image.Image"]]:
    """Returns RandAugment's operations by name: functions of an image, a level from 0 to 1, and a sign."""
    from PIL import Image, ImageEnhance, ImageOps

    def affine(image: Image.Image, *matrix: float) -> Image.Image:
        return image.transform(
            image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=_FILL
        )

    def rotate(image: Image.Image, level: float, sign: int) -> Image.Image:
        return image.rotate(30 * sign * level, Image.Resampling.BILINEAR, fillcolor=_FILL)

    def enhance(kind: Any) -> Callable[[Image.Image, float, int], Image.Image]:
        return lambda image, level, sign: kind(image).enhance(1 + 0.9 * sign * level)

    def shift(side: int, level: float, sign: int) -> int:
        return -sign * int(150 / 331 * side * level)

    return {
        "Identity": lambda image, level, sign: image,
        "AutoContrast": lambda image, level, sign: ImageOps.autocontrast(image),
        "Equalize": lambda image, level, sign: ImageOps.equalize(image),
        "Posterize": lambda image, level, sign: ImageOps.posterize(image, 8 - round(4 * level)),
        "Solarize": lambda image, level, sign: ImageOps.solarize(image, 255 * (1 - level)),
        "Brightness": enhance(ImageEnhance.Brightness),
        "Color": enhance(ImageEnhance.Color),
        "Contrast": enhance(ImageEnhance.Contrast),
        "Sharpness": enhance(ImageEnhance.Sharpness),
        "Rotate": rotate,
        "ShearX": lambda image, level, sign: affine(image, 1, 0.3 * sign * level, 0, 0, 1, 0),
        "ShearY": lambda image, level, sign: affine(image, 1, 0, 0, 0.3 * sign * level, 1, 0),
        "TranslateX": lambda image, level, sign: affine(
            image, 1, 0, shift(image.width, level, sign), 0, 1, 0
        ),
        "TranslateY": lambda image, level, sign: affine(
            image, 1, 0, 0, 0, 1, shift(image.height, level, sign)
        ),
    }


def _jitter(
    image: "Image.Image", strengths: tuple[float, ...], rng: np.random.Generator
) -> "Image.Image":
    """Changes brightness, contrast, saturation and hue in random order."""
    from PIL import ImageEnhance

    kinds: tuple[Any, ...] = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for index in rng.permutation(4):
        strength = strengths[index]
        change = rng.uniform(-strength, strength)
        if strength:
            image = (
                kinds[index](image).enhance(1 + change) if index < 3 else shift_hue(image, change)
            )
    return image


def shift_hue(image: "Image.Image", share: float) -> "Image.Image":
    """Shifts the hue by a share of the color circle, modulo 1."""
    from PIL import Image

    hue, saturation, value = image.convert("HSV").split()
    # uint8 wraps around, as does the color circle.
    shifted = Image.fromarray(np.asarray(hue) + np.int32(share * 255).astype(np.uint8))
    return Image.merge("HSV", (shifted, saturation, value)).convert("RGB")


def _erase(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Replaces a rectangle by noise with the mean and the deviation of the training images."""
    box = random_box(image.shape[0], image.shape[1], rng, _ERASED, _ERASED_RATIO)
    noise = 255 * rng.normal(MEAN, STD, image[box].shape)
    image = image.copy()
    image[box] = np.clip(noise, 0, 255).round()
    return image
