"""Decoded and resized images, compared with Pillow's, and with torchvision's if it is installed."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch_peers
from photographs import encoded, photograph
from PIL import Image

from swjax import inference
from swjax.data import decoding, loader
from swjax.data.examples import EvalExample
from swjax.data.images import fit, random_box, random_fit
from swjax.data.skipping import BadExample
from swjax.fitting import Fitting

# Tolerances in levels of 255: for photographs, which are smooth, and for noise, the hardest case.
TOLERANCE = {"mean": 0.3, "p99.9": 2, "max": 16}
TOLERANCE_NOISE = {"mean": 4, "max": 40}


def scene(seed: int, height: int, width: int) -> np.ndarray:
    """Returns an image with a photograph's spectrum, 1/f, and an edge."""
    rng = np.random.default_rng(seed)
    f = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    f[0, 0] = 1.0
    noise = rng.normal(size=(3, height, width)) + 1j * rng.normal(size=(3, height, width))
    layers = np.fft.ifft2(noise / f**1.2).real
    layers = 40 * layers / layers.std(axis=(1, 2), keepdims=True) + 120
    layers[:, height // 3 :, width // 2 :] += 60
    return np.clip(layers, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def difference(actual, expected):
    apart = np.abs(actual.astype(int) - expected.astype(int))
    return {"mean": apart.mean(), "p99.9": np.quantile(apart, 0.999), "max": apart.max()}


def assert_within(actual, expected, tolerance):
    found = difference(actual, expected)
    assert all(found[name] <= bound for name, bound in tolerance.items()), found


SHAPES = [(300, 400), (512, 256), (225, 224), (1000, 700), (120, 90), (3, 500)]


@pytest.mark.parametrize("shape", SHAPES)
def test_resize_is_pillows_antialiased_bicubic(shape):
    image = scene(0, *shape)
    assert_within(decoding.resize(image, 224), decoding.resize_with_pillow(image, 224), TOLERANCE)
    noise = np.random.default_rng(0).integers(0, 2, (*shape, 3), np.uint8) * np.uint8(255)
    fast, exact = decoding.resize(noise, 224), decoding.resize_with_pillow(noise, 224)
    assert fast.shape == (224, 224, 3) and fast.dtype == np.uint8
    assert_within(fast, exact, TOLERANCE_NOISE)
    linear = (
        resize(image, 224, 100, "bilinear")
        for resize in (decoding.resize, decoding.resize_with_pillow)
    )
    assert_within(*linear, TOLERANCE)


def test_resize_falls_back_to_pillow(monkeypatch):
    monkeypatch.setattr(decoding, "has_fast_resize", lambda: False)
    image = scene(1, 90, 70)
    np.testing.assert_array_equal(
        decoding.resize(image, 32), decoding.resize_with_pillow(image, 32), strict=True
    )


FILES = {
    "JPEG": {"quality": 85},
    "JPEG 4:4:4": {"subsampling": 0},
    "progressive JPEG": {"progressive": True},
}


@pytest.mark.parametrize("kind", FILES)
def test_jpegs_decode_to_pillows_pixels(kind):
    data = encoded(photograph(3, 61, 83), "JPEG", **FILES[kind])
    pixels = decoding.decode(data)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, Image.open(io.BytesIO(data)).convert("RGB"))


RED, CLEAR = (200, 40, 20, 255), (200, 40, 20, 0)
GREY_16 = np.linspace(0, 65535, 48).round().astype(np.uint16)[None].repeat(32, 0)
GREY_100_200 = Image.fromarray(np.where(GREY_16 < 32768, 25700, 51400).astype(np.uint16))


def halves(mode: str, left, right) -> Image.Image:
    """Returns an image [32, 48] whose left and right halves have different colours."""
    image = Image.new(mode, (48, 32), left)
    image.paste(right, (24, 0, 48, 32))
    return image


def with_orientation(image: Image.Image, file_format: str, orientation: int = 6) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, file_format, exif=exif)


def palette_with_transparency() -> bytes:
    image = halves("P", 0, 1)
    image.putpalette([200, 40, 20, 90, 60, 30])
    return encoded(image, "PNG", transparency=1)


def animation(file_format: str, **options) -> bytes:
    frames = [Image.new("RGB", (48, 32), color) for color in ((200, 40, 20), (0, 0, 255))]
    return encoded(
        frames[0], file_format, save_all=True, append_images=frames[1:], duration=100, **options
    )


def png(bits: int, colour_type: int, row: bytes, transparent: bytes = b"") -> bytes:
    """Returns a PNG [32, 48] of equal rows, in kinds that Pillow cannot write."""

    def part(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", 48, 32, bits, colour_type, 0, 0, 0)
    colour = part(b"tRNS", transparent) if transparent else b""
    pixels = part(b"IDAT", zlib.compress((b"\0" + row) * 32))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + colour + pixels + part(b"IEND", b"")


def png_of_16_bits(colour_type: int, left: list[int], right: list[int], **options) -> bytes:
    row = struct.pack(f">{len(left)}H", *left) * 24 + struct.pack(f">{len(right)}H", *right) * 24
    return png(16, colour_type, row, **options)


def tiff_of_white_0() -> bytes:
    """Returns a 16-bit TIFF [32, 48] in which level 0 is white."""
    levels = np.where(GREY_16 < 32768, 65535 - 25700, 65535 - 51400).astype(np.uint16)
    return encoded(Image.fromarray(levels), "TIFF", tiffinfo={262: 0})


# {kind: (file, the RGB colours of its halves after decoding, tolerance)}
RED_AND = ((200, 40, 20), (255, 255, 255))
BOTH_RED = ((200, 40, 20), (200, 40, 20))
KINDS = {
    "RGBA PNG": (encoded(halves("RGBA", RED, CLEAR), "PNG"), RED_AND, 0),
    "RGBA PNG, half transparent": (
        encoded(halves("RGBA", RED, (0, 0, 0, 51)), "PNG"),
        ((200, 40, 20), (204, 204, 204)),
        0,
    ),
    "RGBA WebP": (encoded(halves("RGBA", RED, CLEAR), "WEBP", lossless=True), RED_AND, 0),
    "RGBA TIFF": (encoded(halves("RGBA", RED, CLEAR), "TIFF"), RED_AND, 0),
    "palette PNG with transparency": (palette_with_transparency(), RED_AND, 0),
    "palette GIF with transparency": (encoded(halves("RGBA", RED, CLEAR), "GIF"), RED_AND, 0),
    "RGB PNG with a transparent colour": (
        encoded(halves("RGB", RED[:3], (0, 0, 1)), "PNG", transparency=(0, 0, 1)),
        RED_AND,
        0,
    ),
    "grey PNG with opacity": (
        encoded(halves("LA", (90, 255), (90, 0)), "PNG"),
        ((90,) * 3, (255,) * 3),
        0,
    ),
    "16-bit grey PNG": (encoded(GREY_100_200, "PNG"), ((100,) * 3, (200,) * 3), 0),
    "16-bit grey PNG with a transparent level": (
        encoded(GREY_100_200, "PNG", transparency=51400),
        ((100,) * 3, (255,) * 3),
        0,
    ),
    "16-bit grey TIFF": (encoded(GREY_100_200, "TIFF"), ((100,) * 3, (200,) * 3), 0),
    "16-bit RGB PNG": (
        png_of_16_bits(2, [51400, 10280, 5140], [0, 25700, 65535]),
        ((200, 40, 20), (0, 100, 255)),
        0,
    ),
    "16-bit grey TIFF whose 0 is white": (tiff_of_white_0(), ((100,) * 3, (200,) * 3), 0),
    "16-bit RGB PNG with a transparent colour": (
        png_of_16_bits(2, [51400, 10280, 5140], [1, 2, 3], transparent=struct.pack(">3H", 1, 2, 3)),
        RED_AND,
        0,
    ),
    "2-bit grey PNG with a transparent level": (
        png(2, 0, b"\xaa" * 6 + b"\x55" * 6, b"\0\1"),
        ((170,) * 3, (255,) * 3),
        0,
    ),
    "4-bit grey PNG with a transparent level": (
        png(4, 0, b"\xaa" * 12 + b"\x55" * 12, b"\0\5"),
        ((170,) * 3, (255,) * 3),
        0,
    ),
    "16-bit RGBA PNG": (
        png_of_16_bits(6, [51400, 10280, 5140, 65535], [0, 25700, 65535, 0]),
        RED_AND,
        0,
    ),
    "16-bit grey PNG with opacity": (
        png_of_16_bits(4, [23130, 65535], [23130, 0]),
        ((90,) * 3, (255,) * 3),
        0,
    ),
    "grey PNG": (encoded(halves("L", 90, 200), "PNG"), ((90,) * 3, (200,) * 3), 0),
    "1-bit PNG": (encoded(halves("1", 0, 1), "PNG"), ((0,) * 3, (255,) * 3), 0),
    "grey JPEG": (encoded(halves("L", 90, 200), "JPEG"), ((90,) * 3, (200,) * 3), 2),
    "CMYK JPEG": (
        encoded(halves("CMYK", (0, 255, 255, 0), (0, 0, 0, 0)), "JPEG", subsampling=0),
        ((255, 0, 0), (255, 255, 255)),
        4,
    ),
    "CMYK TIFF": (
        encoded(halves("CMYK", (0, 255, 255, 0), (0, 0, 0, 0)), "TIFF"),
        ((255, 0, 0), (255, 255, 255)),
        0,
    ),
    "animated GIF": (animation("GIF"), BOTH_RED, 0),
    "animated WebP": (animation("WEBP", lossless=True), BOTH_RED, 0),
    "animated PNG": (animation("PNG"), BOTH_RED, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_rgb_alike_in_training_and_inference(kind):
    data, (left, right), tolerance = KINDS[kind]
    trained = decoding.decode(data)
    assert trained.dtype == np.uint8 and trained.shape == (32, 48, 3)
    assert np.abs(trained[:, :20].astype(int) - left).max() <= tolerance
    assert np.abs(trained[:, 28:].astype(int) - right).max() <= tolerance
    served = inference.pixels(data, 32)
    np.testing.assert_array_equal(served, fit(trained, 32))
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(inference.pixels(image, 32), served)


def test_16_bits_keep_their_range():
    pixels = decoding.decode(encoded(Image.fromarray(GREY_16), "PNG"))
    np.testing.assert_array_equal(pixels[0, :, 0], np.round(GREY_16[0] / 257))
    assert pixels.min() == 0 and pixels.max() == 255 and (pixels == 255).mean() < 0.03


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(file_format):
    image = halves("RGB", (200, 40, 20), (20, 40, 200))
    for orientation, turned in (
        (1, lambda x: x),
        (3, lambda x: np.rot90(x, 2)),
        (6, lambda x: np.rot90(x, -1)),
    ):
        data = with_orientation(image, file_format, orientation)
        pixels = decoding.decode(data)
        expected = turned(np.asarray(image))
        assert pixels.shape == expected.shape
        apart = np.abs(pixels.astype(int) - expected)
        assert np.median(apart) <= 8
        served = inference.pixels(data, 32)
        np.testing.assert_array_equal(served, fit(pixels, 32))


def test_orientation_in_xmp_is_applied():
    """Pillow reads it, so the faster decoder must leave such files to Pillow."""
    xmp = b'<x xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'
    turned = encoded(halves("RGB", (200, 40, 20), (20, 40, 200)), "JPEG", xmp=xmp)
    np.testing.assert_array_equal(decoding.decode(turned), decoding.decode_with_pillow(turned))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_of_unknown_range_are_refused(mode):
    data = encoded(Image.new(mode, (48, 32), 1), "TIFF")
    for read in (decoding.decode, lambda data: inference.pixels(data, 32)):
        with pytest.raises(ValueError, match=f"8 or 16 bits a channel, got 32 .mode {mode}."):
            read(data)


@pytest.mark.parametrize(
    "start, name",
    [
        (b"\0\0\0\x0cJXL \r\n", "a JPEG XL picture"),
        (b"\xff\x0a\0", "a JPEG XL picture"),
        (b'<?xml version="1.0"?>\n<!-- by\nx -->\n<svg xmlns=', "an SVG drawing"),
        (b"8BPS\0", "a Photoshop picture"),
        (b"%PDF-1.7", "a PDF document"),
    ],
)
def test_formats_that_are_not_read_are_named(start, name):
    with pytest.raises(BadExample, match=f"^{name}, which is not read: convert it to JPEG or PNG$"):
        decoding.decode(start + bytes(2000))


@pytest.mark.parametrize("file_format", ["AVIF", "JPEG2000", "HEIF"])
def test_other_formats_are_read(file_format):
    pixels = photograph(0)
    read = decoding.decode(encoded(pixels, file_format))
    assert read.dtype == np.uint8 and read.shape == np.asarray(pixels).shape
    assert np.abs(read.astype(int) - np.asarray(pixels)).mean() < 8


def test_heic_pictures_name_the_package_that_reads_them(monkeypatch):
    data = encoded(photograph(0), "HEIF")
    monkeypatch.setattr(decoding, "has_heif", lambda: False)
    monkeypatch.setattr(decoding, "_formats", lambda: ("JPEG", "PNG"))
    message = (
        r"^a HEIC picture, which is not read: convert it .*, or pip install 'swjax\[heif\]' to read"
    )
    with pytest.raises(BadExample, match=message):
        decoding.decode(data)


def test_pictures_beyond_the_limit_of_pillow_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(BadExample, match="^the image has more than 67108864 pixels, which are not"):
        decoding.decode(encoded(Image.new("L", (90, 90), 255), "PNG"))


@pytest.mark.parametrize("file_format", ["PNG", "GIF", "TIFF", "BMP", "WEBP"])
def test_pictures_that_inflate_are_refused_before_they_are_decoded(file_format, monkeypatch):
    """A white picture of 400 million pixels is a file of some kilobytes."""
    data = encoded(Image.new("L", (90, 90), 255), file_format)
    monkeypatch.setattr(decoding, "MOST_PIXELS", 8099)
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(BadExample, match="the image has 90 x 90 pixels; at most 8099 are read"):
        decoding.decode(data)


def test_formats_that_run_programs_are_not_read():
    eps = encoded(photograph(0), "EPS")
    assert Image.open(io.BytesIO(eps)).format == "EPS"  # Pillow would start Ghostscript
    with pytest.raises(BadExample, match="not an image"):
        decoding.decode(eps)


def test_random_resized_crop_is_torchvisions():
    """Crops of the same rectangles equal torchvision's with Pillow, which open_clip uses."""
    torch_peers.torch_and_torchvision()
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resized_crop

    rng = np.random.default_rng(0)
    actual, expected = [], []
    for seed in range(12):
        image = Image.fromarray(scene(seed, *rng.integers(256, 513, 2)))
        data = encoded(image, "JPEG", quality=90)
        box = random_box(image.height, image.width, rng)
        actual.append(decoding.resize(decoding.decode(data)[box], 224))
        rows, columns = box
        sides = rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        expected.append(resized_crop(picture, *sides, [224, 224], InterpolationMode.BICUBIC))
    assert_within(np.stack(actual), np.stack([np.asarray(e) for e in expected]), TOLERANCE)


def test_training_fits_pictures_as_the_model_expects():
    """A quarter of a wide picture is white. Squashed it stays a quarter, give or take the crop."""
    wide = np.zeros((40, 160, 3), np.uint8)
    wide[:, :40] = 255
    seen: dict[str, set[int]] = {}
    for seed in range(40):
        for mode in ("shortest", "squash", "longest"):
            rng = np.random.default_rng(seed)
            fitting = Fitting(mode, "random", fill_color=9)
            image = random_fit(wide, 32, decoding.resize_with_pillow, rng, fitting)
            assert image.shape == (32, 32, 3)
            middle = image[16, :, 0]
            share = (middle > 127).mean()
            if mode != "shortest":
                assert 0.1 < share < 0.35
            border = (image == 9).all(axis=(1, 2)).mean()
            assert (0.5 < border < 0.9) if mode == "longest" else border == 0
            seen.setdefault(mode, set()).add(len(np.unique(image)))
    assert len(seen["squash"]) > 1
    whole = Fitting("squash")
    source = Source([wide])
    for example in (
        EvalExample(source, 8, 32, whole)(0)["image"],
        next(loader(source, batch_size=1, train=False, image_size=32, fitting=whole))["image"][0],
    ):
        np.testing.assert_array_equal(example, fit(wide, 32, fitting=whole))
        assert (example[:, :, 0] > 127).mean() == 0.25


class Source(list):
    """Pictures as a data set."""

    photographs, class_names, templates, attribution = True, (), (), ""

    def __getitem__(self, index):
        return {"image": super().__getitem__(index), "label": 0, "captions": ("one",)}


def test_random_boxes_are_distributed_as_torchvisions():
    torch, torchvision = torch_peers.torch_and_torchvision().values()
    transforms = torchvision.transforms
    rng, image = np.random.default_rng(0), Image.new("RGB", (400, 300))
    torch.manual_seed(0)
    ours, theirs = [], []
    for _ in range(4000):
        rows, columns = random_box(300, 400, rng)
        ours.append(
            (rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start)
        )
        theirs.append(transforms.RandomResizedCrop.get_params(image, (0.9, 1.0), (3 / 4, 4 / 3)))
    ours, theirs = np.array(ours, float), np.array(theirs, float)
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        np.testing.assert_allclose(
            np.quantile(ours, quantile, axis=0), np.quantile(theirs, quantile, axis=0), atol=2.0
        )
