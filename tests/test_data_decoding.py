"""Pixels beside the references: Pillow's, and torchvision's where it is installed."""

import io

import numpy as np
import pytest
from photographs import encoded, photograph
from PIL import Image

from swjax.data import decoding
from swjax.data.images import random_box
from swjax.data.skipping import BadExample

# Levels of 255: of photographs, whose neighbouring pixels are alike; and of the worst there is, noise.
TOLERANCE = {"mean": 0.3, "p99.9": 2, "max": 16}
TOLERANCE_NOISE = {"mean": 4, "max": 40}


def scene(seed: int, height: int, width: int) -> np.ndarray:
    """An image with a photograph's spectrum, 1/f, and an edge."""
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


def test_resize_falls_back_to_pillow(monkeypatch):
    monkeypatch.setattr(decoding, "has_fast_resize", lambda: False)
    image = scene(1, 90, 70)
    np.testing.assert_array_equal(
        decoding.resize(image, 32), decoding.resize_with_pillow(image, 32), strict=True
    )


FILES = {
    "JPEG": lambda image: encoded(image, "JPEG", quality=85),
    "JPEG 4:4:4": lambda image: encoded(image, "JPEG", subsampling=0),
    "progressive JPEG": lambda image: encoded(image, "JPEG", progressive=True),
    "grey JPEG": lambda image: encoded(image.convert("L"), "JPEG"),
    "CMYK JPEG": lambda image: encoded(image.convert("CMYK"), "JPEG"),
    "PNG": lambda image: encoded(image, "PNG"),
    "palette PNG": lambda image: encoded(image.convert("P"), "PNG"),
    "grey PNG with opacity": lambda image: encoded(image.convert("LA"), "PNG"),
    "WebP": lambda image: encoded(image, "WEBP"),
    "GIF": lambda image: encoded(image, "GIF"),
    "black and white": lambda image: encoded(image.convert("1"), "TIFF"),
}


@pytest.mark.parametrize("kind", FILES)
def test_decodes_to_pillows_pixels(kind):
    data = FILES[kind](photograph(3, 61, 83))
    pixels = decoding.decode(data)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, Image.open(io.BytesIO(data)).convert("RGB"))


def test_formats_that_run_programs_are_not_read():
    eps = encoded(photograph(0), "EPS")
    assert Image.open(io.BytesIO(eps)).format == "EPS"  # Pillow would start Ghostscript
    with pytest.raises(BadExample, match="no image"):
        decoding.decode(eps)


def test_random_resized_crop_is_torchvisions():
    """The same rectangles of the same files: Pillow, as open_clip uses it, and ours."""
    pytest.importorskip("torchvision", reason="needs torchvision to compare with")
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


def test_random_boxes_are_distributed_as_torchvisions():
    torch = pytest.importorskip("torch", reason="needs torchvision to compare with")
    transforms = pytest.importorskip("torchvision.transforms", reason="needs torchvision")
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
