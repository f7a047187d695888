"""Prepares stored pixels for the image tower: resizes them on the host, normalizes them on the device."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from swjax.data.decoding import MOST_PIXELS, resize_with_pillow
from swjax.data.skipping import BadExample
from swjax.fitting import Fitting

# Mean and standard deviation of red, green and blue in the training images of OpenAI's CLIP.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

SCALE = (0.9, 1.0)  # default range of a crop's share of the picture's area
RATIO = (3 / 4, 4 / 3)  # default range of its width / height

_SIZES = (0.85, 1.05)  # range of a drawing's size in training; 1 fills the image
_ASPECT = 0.05  # largest change of the natural logarithm of height / width
_SHIFT = 0.5  # largest shift, as a share of the margin around the drawing, and at least
_SHIFT_AT_LEAST = 0.04  # share of the image
# Side of the square in which a rectangle is chosen; the picture's shape then stretches it.
_UNIT = 2**16
_CONTRAST = 0.1  # largest relative change of a channel's distance from white


def preprocess(images: jax.Array, key: jax.Array | None = None, image_size: int = 224) -> jax.Array:
    """Normalizes images: (x / 255 - mean) / std, with drawings composited on white.

    If a key is given, drawings (images with opacity) are slightly scaled, shifted and changed in contrast,
    each by its own random amounts. They are not mirrored, because arrows and letters have a direction.
    Photographs (without opacity) are already cropped by the loader.

    Args:
      images: uint8 [b, image_size, image_size, 3 or 4].
      key: random key of the augmentation, in training.
      image_size: pixels, height = width.

    Returns:
      float32 [b, image_size, image_size, 3].

    Raises:
      ValueError: the images have another size or dtype.

    >>> white = jnp.full((1, 8, 8, 3), 255, jnp.uint8)
    >>> [round(float(x), 3) for x in preprocess(white, image_size=8)[0, 0, 0]]
    [1.93, 2.075, 2.146]
    """
    if images.dtype != jnp.uint8 or images.ndim != 4 or images.shape[-1] not in (3, 4):
        raise ValueError(
            f"images must be uint8 [b, h, w, 3 or 4]; got {images.dtype} {images.shape}"
        )
    if images.shape[1:3] != (image_size, image_size):
        raise ValueError(
            f"images must be {image_size} x {image_size} pixels; got {images.shape[1:3]}: "
            "give the loader the same image_size"
        )
    x = images.astype(jnp.float32) / 255.0
    if images.shape[-1] == 4:
        ink = (1.0 - x[..., :3]) * x[..., 3:]  # distance from white; transparent pixels have 0
        x = 1.0 - (ink if key is None else _augment(ink, key))
    mean, std = (jnp.asarray(v, jnp.float32)[None, None, None] for v in (MEAN, STD))
    return (x - mean) / std


def _augment(ink: jax.Array, key: jax.Array) -> jax.Array:
    """Scales, shifts and changes the contrast of drawings, each by its own random amounts."""
    b, size = ink.shape[:2]
    keys = jax.random.split(key, 4)
    scale = jax.random.uniform(keys[0], (b, 1), jnp.float32, *_SIZES)
    aspect = jax.random.uniform(keys[1], (b, 1), jnp.float32, -_ASPECT, _ASPECT) / 2
    scale = scale * jnp.exp(jnp.concatenate([aspect, -aspect], axis=1))
    room = jnp.maximum(jnp.abs(1.0 - scale) * _SHIFT, _SHIFT_AT_LEAST)
    center = 0.5 + room * jax.random.uniform(keys[2], (b, 2), jnp.float32, -1.0, 1.0)
    shift = (center - 0.5 * scale) * size

    def move(image, scale, shift):
        return jax.image.scale_and_translate(
            image, image.shape, (0, 1), scale, shift, method="linear", antialias=True
        )

    contrast = jax.random.uniform(
        keys[3], (b, 1, 1, 3), jnp.float32, 1.0 - _CONTRAST, 1.0 + _CONTRAST
    )
    return jnp.clip(jax.vmap(move)(ink, scale, shift) * contrast, 0.0, 1.0)


SHORTEST = Fitting()


def fit(
    image: np.ndarray,
    size: int,
    resize: Callable[..., np.ndarray] = resize_with_pillow,
    fitting: Fitting = SHORTEST,
) -> np.ndarray:
    """Fits a picture into a square with an antialiased filter.

    With Pillow the result equals that of open_clip and torchvision in every pixel.

    Args:
      image: uint8 [h, w, 3 or 4].
      size: size of the result in pixels.
      resize: resizing function: `decoding.resize_with_pillow`, or the faster `decoding.resize`.
      fitting: shape and filter; a border of drawings is transparent.

    Returns:
      uint8 [size, size, 3 or 4].

    Raises:
      BadExample: one side is so much longer than the other that the resized image would not fit in memory.

    >>> wide = np.full((10, 20, 3), 255, np.uint8)
    >>> fit(wide, 4, fitting=Fitting("longest"))[:, 0, 0].tolist()
    [0, 255, 255, 0]
    """
    sides = image.shape[:2]
    scale = functools.partial(
        resize, interpolation="bilinear" if fitting.interpolation == "bilinear" else "bicubic"
    )
    if fitting.resize_mode == "squash":
        return scale(image, size, size)
    if fitting.resize_mode == "longest":
        height, width = (max(1, round(side / (max(sides) / size))) for side in sides)
        border = [((size - side) // 2, (size - side + 1) // 2) for side in (height, width)]
        level = fitting.fill_color if image.shape[2] == 3 else 0
        return np.pad(scale(image, height, width), (*border, (0, 0)), constant_values=level)
    height, width = (int(size * side / min(sides)) for side in sides)
    if height * width > MOST_PIXELS:
        raise BadExample(
            f"the image has {sides[0]} x {sides[1]} pixels; with a shorter side of {size} it would have more "
            f"than {MOST_PIXELS}: crop it"
        )
    scaled = scale(image, height, width)
    top, left = round((height - size) / 2), round((width - size) / 2)
    return scaled[top : top + size, left : left + size]


def random_fit(
    image: np.ndarray,
    size: int,
    resize: Callable[..., np.ndarray],
    rng: np.random.Generator,
    fitting: Fitting = SHORTEST,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
) -> np.ndarray:
    """Crops a random rectangle and fits it into a square, for training.

    Args:
      image, size, resize, fitting: see `fit`.
      rng: generator of the rectangle, and of the filter.
      scale: see `random_box`.
      ratio: the same; unless the mode is "shortest", relative to the shape of the picture.

    Returns:
      uint8 [size, size, 3 or 4].
    """
    height, width = image.shape[:2]
    if fitting.resize_mode == "shortest":
        box = random_box(height, width, rng, scale, ratio)
    else:
        rows, columns = random_box(_UNIT, _UNIT, rng, scale, ratio)
        box = _scaled(rows, height), _scaled(columns, width)
    if fitting.interpolation == "random":
        either = "bilinear" if rng.random() < 0.5 else "bicubic"
        fitting = dataclasses.replace(fitting, interpolation=either)
    if fitting.resize_mode == "shortest":  # the rectangle is nearly a square
        fitting = dataclasses.replace(fitting, resize_mode="squash")
    return fit(image[box], size, resize, fitting)


def _scaled(part: slice, side: int) -> slice:
    """The same part of a side of another length, at least one pixel."""
    start = part.start * side // _UNIT
    return slice(start, max(start + 1, round(part.stop * side / _UNIT)))


def random_box(
    height: int,
    width: int,
    rng: np.random.Generator,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
) -> tuple[slice, slice]:
    """Returns the rows and columns of a random rectangle of an image.

    Args:
      height, width: of the image, in pixels.
      rng: generator of the rectangle.
      scale: range of the rectangle's share of the image area; uniformly distributed.
      ratio: range of the rectangle's width / height; its logarithm is uniformly distributed.
    """
    smallest, largest = scale
    narrowest, widest = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        a, b = rng.random(2).tolist()  # one call takes half the time of two rng.uniform calls
        area = height * width * (smallest + (largest - smallest) * a)
        aspect = math.exp(narrowest + (widest - narrowest) * b)
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            top, left = (int(rng.integers(side + 1)) for side in (height - h, width - w))
            break
    else:  # no such rectangle fits: the largest centered one whose ratio is in the range
        h, w = min(height, round(width / ratio[0])), min(width, round(height * ratio[1]))
        top, left = (height - h) // 2, (width - w) // 2
    return slice(top, top + h), slice(left, left + w)
