"""Encoding and zero-shot classification with models from runs and from files; preparation of images."""

import functools
import io
import json
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning
from clip_oracle import random_model, small_config
from flax import nnx
from photographs import encoded
from PIL import Image

from swjax import data, inference, interop
from swjax.data import imagenet, preprocess, tokenize
from swjax.models import clip
from swjax.training import config as config_lib
from swjax.training import setup
from swjax.training.state.checkpoint import Checkpoints

ROOT = Path(__file__).resolve().parent.parent
RNG = np.random.default_rng(0)
IMAGES = [RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((40, 50), (32, 32), (90, 33))]
NAMES = ["cat", "dog", "Geoffroy's spider monkey"]
TEMPLATES = ("a photo of a {}.", "{}")
CFG = small_config(text={"vocab_size": 49408})
TOWER = {"width": 32, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def model():
    return nnx.merge(*random_model(CFG))


@pytest.fixture(scope="module")
def encoder(model):
    return inference.Encoder(model, batch_size=2)


def embed(model, images=IMAGES):
    """Returns what `encode_image` must return, computed one image at a time."""
    encode = nnx.jit(lambda model, x: model.encode_image(x)[0])
    batches = (inference.pixels(image, 32)[None] for image in images)
    return np.concatenate([encode(model, preprocess(batch, image_size=32)) for batch in batches])


def test_images_in_batches_are_images_one_by_one(model, encoder):
    expected = embed(model)
    np.testing.assert_allclose(encoder.encode_image(IMAGES), expected, atol=1e-6)
    np.testing.assert_allclose(encoder.encode_image(IMAGES[:1]), expected[:1], atol=1e-6)
    for one in (IMAGES[0], Image.fromarray(IMAGES[0])):
        np.testing.assert_allclose(encoder.encode_image(one), expected[:1], atol=1e-6)
    assert encoder.encode_image([]).shape == (0, CFG.embed_dim)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)


def test_texts_in_batches_are_texts_one_by_one(model, encoder):
    tokens = jnp.asarray(tokenize(NAMES, CFG.text.context_length))
    expected = nnx.jit(lambda model, x: model.encode_text(x)[0])(model, tokens)
    np.testing.assert_allclose(encoder.encode_text(NAMES), expected, atol=1e-6)
    np.testing.assert_allclose(encoder.encode_text(NAMES[0]), expected[:1], atol=1e-6)
    assert encoder.encode_text([]).shape == (0, CFG.embed_dim)


def test_classes_are_means_of_their_prompts(model, encoder):
    classifier = encoder.classifier(NAMES, TEMPLATES)
    for name, row in zip(NAMES, classifier, strict=True):
        mean = encoder.encode_text([template.format(name) for template in TEMPLATES]).mean(0)
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), atol=1e-6)
    logits = np.exp(model.logit_scale[...]) * encoder.encode_image(IMAGES) @ classifier.T
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.classify(IMAGES, classifier), expected, rtol=1e-5)
    one = encoder.classifier(NAMES, "{}")
    np.testing.assert_allclose(one, encoder.encode_text(NAMES), atol=1e-6)


def test_classifiers_need_names_and_templates(encoder):
    with pytest.raises(ValueError, match="needs the name of at least one class, got none"):
        encoder.classifier([])
    with pytest.raises(ValueError, match=r"names must be a list of names, got .* write \['cat'\]"):
        encoder.classifier("cat")
    with pytest.raises(ValueError, match='templates need a "{}" for the name, got '):
        encoder.classifier(NAMES, "a photo")
    with pytest.raises(ValueError, match=r"must be \[classes, 24\], got .* make it of the names"):
        encoder.classify(IMAGES, NAMES)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        inference.Encoder(encoder.model, batch_size=0)


def test_from_safetensors(model, tmp_path):
    interop.save(tmp_path, model, "huggingface")
    loaded = inference.load(tmp_path)
    assert loaded.templates == ("a photo of a {}.",)
    np.testing.assert_allclose(loaded.encode_image(IMAGES), embed(model), atol=1e-6)
    int8 = inference.load(tmp_path / "model.safetensors", model.cfg, recipe="switchback")
    cosine = np.sum(int8.encode_image(IMAGES) * embed(model), axis=1)
    assert np.all((cosine > 0.98) & (cosine < 0.99999))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Writes a small run of the default config as the trainer does; returns workdir, graph and state.

    Tests must not change the workdir.
    """

    @functools.cache
    def make(ema_decay=0.0):
        workdir = tmp_path_factory.mktemp("run")
        overrides = {"train.ema_decay": ema_decay, "train.steps": 1, "data.image_size": 32}
        for tower in ("vision", "text"):
            overrides |= {f"model.{tower}.{key}": n for key, n in TOWER.items()}
        pairs = [(key, str(value)) for key, value in overrides.items()]
        config = config_lib.load(f"{ROOT}/configs/openmoji.py", pairs)
        (workdir / "config.json").write_text(config_lib.to_json(config))
        cfg = setup.model_config(config)
        graph, params = random_model(cfg)
        state = {"params": nnx.to_pure_dict(params), "step": jnp.int32(1)}
        if ema_decay:
            state["ema"] = jax.tree.map(lambda x: x * 0.9, state["params"])
        checkpoints = Checkpoints(workdir, keep=1)
        checkpoints.save(1, state, 1)
        checkpoints.close()
        return workdir, graph, state

    return make


@pytest.mark.parametrize("ema_decay", thinning.first([0.9, 0.0]))
def test_parameters_of_a_run(run, ema_decay):
    workdir, _, state = run(ema_decay)
    loaded = nnx.to_pure_dict(nnx.state(inference.load(str(workdir)).model))
    want = state["ema" if ema_decay else "params"]
    jax.tree.map(np.testing.assert_array_equal, loaded, want)


def test_from_a_run(run, tmp_path):
    workdir, graph, state = run(0.9)
    encoder = inference.load(str(workdir))
    assert encoder.cfg == setup.model_config(
        config_lib.ConfigDict(json.loads((workdir / "config.json").read_text()))
    )
    assert encoder.cfg.recipe == "switchback"
    expected = embed(nnx.merge(graph, state["ema"]), IMAGES[:1])
    np.testing.assert_allclose(encoder.encode_image(IMAGES[:1]), expected, atol=1e-6)
    assert inference.load(workdir, recipe="standard").cfg.recipe == "standard"
    assert encoder.templates == data.source("emoji", "val", config="sample").templates
    expected = encoder.classifier(NAMES, encoder.templates)
    np.testing.assert_array_equal(encoder.classifier(NAMES), expected)
    inference.save(tmp_path / "saved.safetensors", encoder)
    assert inference.load(tmp_path / "saved.safetensors").templates == encoder.templates
    workdir = shutil.copytree(workdir, tmp_path / "run")
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    config["data"] |= {"name": "folders"}
    config["data"]["folders"]["template"] = "a drawing of a {}"
    path.write_text(json.dumps(config))
    assert inference.load(workdir).templates == ("a drawing of a {}",)


def test_runs_that_cannot_be_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match="runs does not exist"):
        inference.load(tmp_path / "runs")
    (tmp_path / "checkpoints" / "1.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no checkpoint yet"):
        inference.load(tmp_path)
    with pytest.raises(ValueError, match="is a run and has its own configuration: leave cfg out"):
        inference.load(tmp_path, CFG)
    (tmp_path / "checkpoints" / "1").mkdir()
    for content in (b"{", b"\xff\xfe"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match="config.json is damaged: .*: restore it from a copy"):
            inference.load(tmp_path)


def test_images_are_fitted_as_the_model_says(tmp_path):
    cfg = clip.config(CFG, vision={"resize_mode": "squash"})
    encoder = inference.Encoder(nnx.merge(*random_model(cfg)))
    wide = np.concatenate([IMAGES[0], IMAGES[0][:, ::-1] // 2], axis=1)
    squashed = np.asarray(Image.fromarray(wide).resize((32, 32), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(encoder.encode_image([wide]), encoder.encode_image([squashed]))
    inference.save(tmp_path / "clip.safetensors", encoder)
    assert inference.load(tmp_path / "clip.safetensors").cfg.vision.resize_mode == "squash"


def test_images_of_every_kind(tmp_path):
    image = Image.fromarray(IMAGES[0])
    expected = inference.pixels(IMAGES[0], 32)
    assert expected.shape == (32, 32, 3) and expected.dtype == np.uint8
    image.save(tmp_path / "image.png")
    for same in (image, str(tmp_path / "image.png"), tmp_path / "image.png", image.convert("RGBA")):
        np.testing.assert_array_equal(inference.pixels(same, 32), expected)
    grey = inference.pixels(image.convert("L"), 32)
    assert (grey == grey[..., :1]).all()
    for other in (image.convert("P"), image.convert("CMYK"), image.convert("1")):
        assert inference.pixels(other, 32).shape == (32, 32, 3)
    data = encoded(image, "PNG")
    for same in (data, bytearray(data), io.BytesIO(data), jnp.asarray(IMAGES[0])):
        np.testing.assert_array_equal(inference.pixels(same, 32), expected)
    for bad in (IMAGES[0] / 255, IMAGES[0][..., 0], IMAGES[0][None], IMAGES[0][:0]):
        with pytest.raises(ValueError, match=r"an image must be uint8 \[h, w, 3 or 4\], got "):
            inference.pixels(bad, 32)
    with pytest.raises(ValueError, match="move the channels last"):
        inference.pixels(IMAGES[0].transpose(2, 0, 1), 32)


def test_a_damaged_file_is_named(tmp_path):
    """Also where Pillow's error has an unusual type, as for a header that claims too many pixels."""
    (tmp_path / "cut.jpg").write_bytes(encoded(Image.fromarray(IMAGES[0]), "JPEG")[:-60])
    with pytest.raises(OSError, match=r"cut\.jpg: image file is truncated"):
        inference.pixels(tmp_path / "cut.jpg", 32)
    bomb = bytearray(encoded(Image.fromarray(IMAGES[0]), "BMP"))
    bomb[18:26] = b"\xff\xff\x0f\x00" * 2
    (tmp_path / "bomb.bmp").write_bytes(bomb)
    with pytest.raises(ValueError, match=r"bomb\.bmp: the image has more than \d+ pixels"):
        inference.pixels(str(tmp_path / "bomb.bmp"), 32)


@pytest.mark.parametrize("bad", [None, 3, 0.5, {"cat": 1}.keys(), object()])
def test_what_is_no_image(bad, encoder):
    with pytest.raises(TypeError, match="an image .* a path, bytes, a binary file, a PIL image or"):
        encoder.encode_image(bad if bad is None else [bad])


def test_images_in_every_container(encoder, tmp_path):
    expected = encoder.encode_image([IMAGES[1]])
    data = encoded(Image.fromarray(IMAGES[1]), "PNG")
    path = tmp_path / "image.png"
    path.write_bytes(data)
    temporary = tempfile.NamedTemporaryFile()  # is no io.IOBase
    temporary.write(data)
    temporary.seek(0)
    ones = (data, io.BytesIO(data), temporary, path, IMAGES[1][None], jnp.asarray(IMAGES[1]),
            jnp.asarray(IMAGES[1])[None], [data], np.array([str(path)]))  # fmt: skip
    for images in ones:
        np.testing.assert_allclose(encoder.encode_image(images), expected, atol=1e-6)
    assert encoder.encode_image(np.zeros((0, 32, 32, 3), np.uint8)).shape == (0, CFG.embed_dim)
    for bad in (IMAGES[1][..., 0], IMAGES[1][0, 0], np.zeros((0,)), np.array(3, np.uint8)):
        with pytest.raises(ValueError, match=r"an image must be uint8 \[h, w, 3 or 4\], got "):
            encoder.encode_image(bad)
    with pytest.raises(ValueError, match="not an image: 3 bytes that start with b'cat'"):
        encoder.encode_image(b"cat")


def test_what_is_transparent_is_white_as_in_training():
    """Transparent pixels are composed over white on the host as on the device."""
    drawing = RNG.integers(0, 256, (48, 48, 4), np.uint8)
    drawing[:8, :, 3] = 0
    on_host = preprocess(inference.pixels(drawing, 48)[None], image_size=48)
    on_device = preprocess(drawing[None], image_size=48)
    assert np.abs(on_host - on_device).max() < 1 / 255 / 0.26
    assert (inference.pixels(drawing, 48)[:8] == 255).all()


def test_imagenet_lists():
    names, templates = imagenet.class_names(), imagenet.templates()
    assert len(names) == 1000 and len(set(names)) == 998 and all(n == n.strip() for n in names)
    assert len(set(templates)) == 80 and all(t.count("{}") == 1 for t in templates)


@pytest.mark.release
def test_example_of_the_docstring(run, tmp_path, monkeypatch, capsys):
    """The example in the docstring of `swjax.inference` runs unchanged."""
    workdir, _, _ = run()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "openmoji").symlink_to(workdir)
    Image.fromarray(IMAGES[0]).save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    exec("\n".join(line[2:] for line in inference.__doc__.splitlines() if line[:2] == "  "), {})
    assert capsys.readouterr().out.strip() in ("cat", "dog", "violin")
