"""Decodes encoded photographs to pixels, and resizes them, with the fastest available packages.

The reference is Pillow, as torchvision uses it. libjpeg-turbo (through simplejpeg) decodes JPEGs to the same
pixels; Pillow decodes the files that libjpeg-turbo rejects. The Rust crate fast_image_resize (package
cykooz-resizer) resizes images if it is installed, else Pillow does. Both use the same antialiased bicubic
filter, but process rows and columns in different orders and round in between. In photographs, the values
differ by 0.2 of 255 levels on average, by at most 2 for 99.9 % of the values, and by up to 10 at a few sharp
edges.
"""

import functools
import io
import re
import threading
from typing import TYPE_CHECKING

import numpy as np

from swjax.data.files import HEIF_REMEDY, has_heif
from swjax.data.skipping import BadExample
from swjax.packages import require

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 2**26  # limit per image, because a small file can decode to any size
_HEIC = rb"....ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)"
# Formats that are not read here, by their first bytes, in which a dot is any byte. Some builds of Pillow lack
# AVIF or JPEG 2000.
_OTHERS = {
    _HEIC: "a HEIC picture",
    rb"....ftypavi[fs]": "an AVIF picture",
    rb"....jP  |\xff\x4f\xff\x51": "a JPEG 2000 picture",
    rb"....JXL |\xff\x0a": "a JPEG XL picture",
    rb"8BPS": "a Photoshop picture",
    rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<svg": "an SVG drawing",
    rb"%PDF": "a PDF document",
}
# Pillow could parse many more formats. pillow-heif adds HEIF.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "HEIF")
_START = 1024  # bytes that tell the format
_ORIENTATION = 0x0112  # EXIF tag
_PHOTOMETRIC = 0x0106  # TIFF tag; 0 means that level 0 is white
_local = threading.local()


def decode(data: bytes) -> np.ndarray:
    """Decodes an image to 8-bit RGB, with the conversions of `rgb`.

    Args:
      data: a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or JPEG 2000 file; with pillow-heif also HEIC.

    Returns:
      uint8 [h, w, 3].

    Raises:
      BadExample: the file has another format or more than 2**26 pixels, or `rgb` rejects it.
      Exception: any error that Pillow raises for truncated or corrupt images, mostly OSError.
    """
    if data[:2] == b"\xff\xd8" and not _is_rotated(data):
        require("simplejpeg")
        import simplejpeg

        try:
            height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
            _check_size(height, width)
            if color_space in ("YCbCr", "RGB", "Gray"):
                return simplejpeg.decode_jpeg(data)
        except ValueError:
            pass  # libjpeg-turbo is strict: Pillow can read some of these files
    return decode_with_pillow(data)


def decode_with_pillow(data: bytes) -> np.ndarray:
    """The reference implementation of `decode`, with Pillow alone."""
    require("PIL")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            _check_size(image.height, image.width)
            return rgb(image)
    except Image.DecompressionBombError:
        raise BadExample(
            f"the image has more than {MOST_PIXELS} pixels, which are not read"
        ) from None
    except UnidentifiedImageError:
        for start, name in _OTHERS.items():
            if re.match(start, data[:_START], re.DOTALL):
                heic = start == _HEIC and not has_heif()
                remedy = f"convert it to JPEG or PNG{', or ' + HEIF_REMEDY if heic else ''}"
                raise BadExample(f"{name}, which is not read: {remedy}") from None
        raise BadExample(f"not an image: {len(data)} bytes that start with {data[:8]!r}") from None


@functools.cache
def _formats() -> tuple[str, ...]:
    """The formats among `_FORMATS` that this Pillow knows."""
    from PIL import Image

    if has_heif():
        import pillow_heif

        pillow_heif.register_heif_opener()
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def rgb(image: "Image.Image") -> np.ndarray:
    """Converts any image to 8-bit RGB. Training and inference share this conversion.

    The function applies the EXIF orientation, scales 16-bit gray to 8 bits, and blends transparent pixels
    with white. For an animation it uses the current frame, which is the first frame after opening.

    Args:
      image: any `PIL.Image.Image` except 32-bit integers or floats, whose range is unknown.

    Returns:
      uint8 [h, w, 3].

    Raises:
      BadExample: the image has 32-bit integers or floats.

    >>> from PIL import Image
    >>> rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 51))).tolist()  # 20% red over white
    [[[255, 204, 204]]]
    """
    from PIL import Image, ImageOps

    image = _scale_transparency(image)
    inverted = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0  # Pillow inverts 8 bits alone
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = _from_16_bits(image, inverted)
    if image.mode in ("I", "F"):
        raise BadExample(
            f"an image must have 8 or 16 bits a channel, got 32 (mode {image.mode}), whose range is "
            "unknown: scale it and save it with 8 or 16 bits"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def _scale_transparency(image: "Image.Image") -> "Image.Image":
    """Scales the transparent color of a PNG of 2, 4 or 16 bits, whose pixels Pillow scales to 8 bits."""
    tiles = getattr(image, "tile", ())  # of a file that is not loaded
    stored = tiles[0][3] if tiles else ""
    color = image.info.get("transparency")
    if color is None or stored not in ("L;2", "L;4", "RGB;16B"):
        return image
    image = image.copy()
    if stored == "RGB;16B":
        color = tuple(level >> 8 for level in color)
    else:
        color *= {"L;2": 85, "L;4": 17}[stored]
    image.info["transparency"] = color
    return image


def _from_16_bits(image: "Image.Image", inverted: bool) -> "Image.Image":
    """Converts 16-bit gray to 8 bits, with an opacity channel if a gray level is declared transparent."""
    from PIL import Image

    levels = np.asarray(image).astype(np.uint32)
    levels = 65535 - levels if inverted else levels
    gray = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is None:
        return gray
    opacity = np.where(levels == transparent, 0, 255).astype(np.uint8)
    return Image.merge("LA", (gray, Image.fromarray(opacity)))


def _is_rotated(jpeg: bytes) -> bool:
    """Whether the EXIF or XMP data of a JPEG declare a rotated or mirrored orientation."""
    # False for most files; the searches take microseconds.
    if b"Exif\0\0" not in jpeg and b"tiff:Orientation" not in jpeg:
        return False
    from PIL import Image

    try:
        with Image.open(io.BytesIO(jpeg), formats=("JPEG",)) as image:
            return image.getexif().get(_ORIENTATION, 1) != 1
    except Exception:  # the decoder reports what is wrong with the file
        return False


def _check_size(height: int, width: int) -> None:
    if not 0 < height * width <= MOST_PIXELS:
        raise BadExample(f"the image has {height} x {width} pixels; at most {MOST_PIXELS} are read")


def resize(
    image: np.ndarray, height: int, width: int | None = None, interpolation: str = "bicubic"
) -> np.ndarray:
    """Resizes an image with an antialiased filter.

    Args:
      image: uint8 [h, w, 3].
      height, width: size of the result in pixels; the default width is the height.
      interpolation: "bicubic" or "bilinear".

    Returns:
      uint8 [height, width, 3].
    """
    width = height if width is None else width
    if image.shape[:2] == (height, width):
        return image
    if not has_fast_resize():
        return resize_with_pillow(image, height, width, interpolation)
    import cykooz_resizer as fast

    if not hasattr(_local, "resizer"):  # a resizer is not thread-safe
        _local.resizer = fast.Resizer()
        filters = {"bicubic": fast.FilterType.catmull_rom, "bilinear": fast.FilterType.bilinear}
        _local.options = {
            name: fast.ResizeOptions(fast.ResizeAlg.convolution(one), use_alpha=False)
            for name, one in filters.items()
        }
    kind = fast.PixelType.U8x3
    source = fast.ImageData(image.shape[1], image.shape[0], kind, image.tobytes())
    scaled = fast.ImageData(width, height, kind)
    _local.resizer.resize(source, scaled, _local.options[interpolation])
    return np.frombuffer(scaled.get_buffer(), np.uint8).reshape(height, width, 3)


@functools.cache
def has_fast_resize() -> bool:
    """Whether fast_image_resize resizes images, rather than Pillow."""
    try:
        import cykooz_resizer  # noqa: F401
    except ImportError:
        return False
    return True


def resize_with_pillow(
    image: np.ndarray, height: int, width: int | None = None, interpolation: str = "bicubic"
) -> np.ndarray:
    """The reference implementation of `resize`. It also accepts opacity, which then weights the colors."""
    from PIL import Image

    width = height if width is None else width
    if image.shape[:2] == (height, width):
        return image
    pixels = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(pixels.resize((width, height), Image.Resampling[interpolation.upper()]))
