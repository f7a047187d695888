"""Zero-shot classification from image files and class names, compared with open_clip."""

import dataclasses
import json

import numpy as np
import pytest
import torch_peers
from clip_oracle import random_model, small_config
from flax import nnx
from PIL import Image

from swjax import data, inference, interop
from swjax.data import imagenet

RNG = np.random.default_rng(0)
# (width, height): larger, smaller, the model's size, odd margins, extreme.
SIZES = [
    (640, 480),
    (333, 500),
    (100, 37),
    (32, 32),
    (20, 15),
    (33, 32),
    (32, 37),
    (7, 400),
    (224, 225),
]


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Imports the libraries, which takes half a minute, only where a test needs them."""
    global torch, open_clip, transforms
    peers = torch_peers.load()
    torch, open_clip, transforms = peers.torch, peers.open_clip, peers.torchvision.transforms


def photograph(width, height):
    """Returns an image that is smooth like a photograph, with edges and noise."""
    coarse = RNG.integers(0, 256, (4, 5, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noisy = smooth.astype(int) + RNG.integers(-20, 21, smooth.shape)
    noisy[height // 3 :, width // 2 :] //= 3
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [32, 224])
def test_pixels_are_open_clips(side, size, mode):
    """All 8-bit pixels are equal, in every resize mode; normalised values agree within float32 rounding."""
    image = photograph(*size).convert(mode)
    for fitting in (
        data.Fitting(),
        data.Fitting("squash", "bilinear"),
        data.Fitting("longest", "random", fill_color=0 if mode == "L" else 200),
    ):
        theirs = open_clip.image_transform(side, is_train=False, **dataclasses.asdict(fitting))
        cut = transforms.Compose(theirs.transforms[:-2])  # without conversion and normalization
        ours = inference.pixels(image, side, fitting)
        np.testing.assert_array_equal(ours, np.asarray(cut(image).convert("RGB")), strict=True)
        expected = theirs(image).permute(1, 2, 0).numpy()
        normalised = np.asarray(data.preprocess(ours[None], image_size=side)[0])
        np.testing.assert_allclose(normalised, expected, rtol=0, atol=1e-6)


def test_zero_shot_is_open_clips(tmp_path):
    """From the same weights, images and class names, both compute the same probabilities.

    The pictures are squashed by another filter, and normalized by another mean and deviation, than CLIP's.
    """
    cfg = small_config(gelu="quick", text={"vocab_size": 49408, "context_length": 20})
    interop.save(tmp_path, nnx.merge(*random_model(cfg)))
    file = tmp_path / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["preprocess_cfg"] |= {"resize_mode": "squash", "interpolation": "bilinear"}
    config["preprocess_cfg"] |= {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.25, 0.4]}
    file.write_text(json.dumps(config))
    names, templates = imagenet.class_names()[200:240:8], imagenet.templates()[:6]
    images = [photograph(*size) for size in SIZES[:4]]

    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    theirs.eval()
    tokenizer = open_clip.SimpleTokenizer(context_length=20)
    with torch.no_grad():
        weights = open_clip.build_zero_shot_classifier(
            theirs, tokenizer, names, [t.format for t in templates]
        )
        embedded = theirs.encode_image(torch.stack(list(map(transform, images))), normalize=True)
        expected = (theirs.logit_scale.exp() * embedded @ weights).softmax(dim=-1)

    encoder = inference.load(tmp_path)
    classifier = encoder.classifier(names, templates)
    np.testing.assert_allclose(classifier, weights.T, atol=3e-6)
    np.testing.assert_allclose(encoder.encode_image(images), embedded, atol=3e-6)
    np.testing.assert_allclose(encoder.classify(images, classifier), expected, atol=1e-5)


def test_imagenet_lists_are_open_clips():
    assert imagenet.class_names() == tuple(open_clip.IMAGENET_CLASSNAMES)
    theirs = open_clip.OPENAI_IMAGENET_TEMPLATES
    assert imagenet.templates() == tuple(template("{}") for template in theirs)
