"""Encoded photographs to pixels, and pixels to size, at the speed of the fastest wheels.

The reference is Pillow, as torchvision uses it. JPEGs are decoded by libjpeg-turbo through
simplejpeg, to the same pixels; what it refuses Pillow decides about. Images are scaled by the Rust
crate fast_image_resize where its wheel (cykooz-resizer) is installed, else by Pillow: the same
antialiased bicubic filter. They round between rows and columns, and may take these in another order:
of photographs, values differ by 0.2 of 255 levels in the mean, 99.9 % of them by at most 2, and
single ones at sharp edges by up to 10.
"""

import functools
import io
import threading

import numpy as np

from swjax.data.packages import require
from swjax.data.skipping import BadExample

MOST_PIXELS = 2**26  # of an image; a small file can unfold to any number
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow has parsers of a lot more
_local = threading.local()


def decode(data: bytes) -> np.ndarray:
    """Returns the pixels of an encoded image, as Pillow's `Image.open(...).convert("RGB")`.

    Args:
      data: a JPEG, PNG, WebP, GIF, BMP or TIFF file.

    Returns:
      uint8 [h, w, 3].

    Raises:
      BadExample: if it is none of these, or of more than 2**26 pixels.
      Exception: what Pillow raises of images that are truncated or corrupt: OSError for most.
    """
    if data[:2] == b"\xff\xd8":
        require("simplejpeg")
        import simplejpeg

        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            _check_size(height, width)
            if colours in ("YCbCr", "RGB", "Gray"):
                return simplejpeg.decode_jpeg(data)
        except ValueError:
            pass  # it is strict: Pillow reads some of these
    return _decode_with_pillow(data)


def _decode_with_pillow(data: bytes) -> np.ndarray:
    require("PIL")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(image.height, image.width)
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise BadExample(f"no image: {len(data)} bytes that begin with {data[:8]!r}") from None


def _check_size(height: int, width: int) -> None:
    if not 0 < height * width <= MOST_PIXELS:
        raise BadExample(f"the image has {height} x {width} pixels; at most {MOST_PIXELS} are read")


def resize(image: np.ndarray, height: int, width: int | None = None) -> np.ndarray:
    """Scales an image, bicubic and antialiased.

    Args:
      image: uint8 [h, w, 3].
      height, width: pixels of the result; a square without a width.

    Returns:
      uint8 [height, width, 3].
    """
    width = height if width is None else width
    if image.shape[:2] == (height, width):
        return image
    if not has_fast_resize():
        return resize_with_pillow(image, height, width)
    import cykooz_resizer as fast

    if not hasattr(_local, "resizer"):  # one serves one thread
        _local.resizer = fast.Resizer()
        filter_type = fast.ResizeAlg.convolution(fast.FilterType.catmull_rom)
        _local.options = fast.ResizeOptions(filter_type, use_alpha=False)
    kind = fast.PixelType.U8x3
    source = fast.ImageData(image.shape[1], image.shape[0], kind, image.tobytes())
    scaled = fast.ImageData(width, height, kind)
    _local.resizer.resize(source, scaled, _local.options)
    return np.frombuffer(scaled.get_buffer(), np.uint8).reshape(height, width, 3)


@functools.cache
def has_fast_resize() -> bool:
    """Whether images are scaled by fast_image_resize rather than by Pillow."""
    try:
        import cykooz_resizer  # noqa: F401
    except ImportError:
        return False
    return True


def resize_with_pillow(image: np.ndarray, height: int, width: int | None = None) -> np.ndarray:
    """The reference: as `resize`, also of images with opacity, which then weighs the colours."""
    from PIL import Image

    width = height if width is None else width
    if image.shape[:2] == (height, width):
        return image
    pixels = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(pixels.resize((width, height), Image.Resampling.BICUBIC))
