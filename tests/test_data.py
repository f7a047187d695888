"""The loader's order, resumption, sharding and padding; pixel transformations; errors."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swjax import data
from swjax.data import images as pixels
from swjax.data.emoji.concepts import concepts
from swjax.data.memory import Memory
from swjax.packages import require


class Photographs:
    """24 small images of different shapes, each with three captions."""

    class_names, templates, attribution, photographs = (), (), "", True

    def __len__(self):
        return 24

    def __getitem__(self, index):
        shape = (20 + index, 30, 3)
        image = np.random.default_rng(index).integers(0, 256, shape, np.uint8)
        return {"image": image, "label": index, "captions": self.captions(index)}

    def captions(self, label):
        return tuple(f"{concepts()[label].name} {n}" for n in range(3))


def load(source, batches=None, **options):
    options = {"batch_size": 5, "seed": 1, "context_length": 12, "image_size": 16} | options
    loader = data.loader(source, **options)
    taken = [
        # copied: arrays from a worker process are in shared memory, which is reused
        {name: np.array(array) for name, array in batch.items()}
        for batch, _ in zip(loader, range(batches or 10**6))
    ]
    loader.close()
    return taken


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected):
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def indices(batches):
    return np.concatenate([batch["index"] for batch in batches])


def test_batches_have_the_agreed_names_shapes_and_dtypes():
    (batch,) = load(Photographs(), 1)
    kinds = {name: (array.shape, array.dtype.name) for name, array in batch.items()}
    assert kinds == {
        "image": ((5, 16, 16, 3), "uint8"),
        "text": ((5, 12), "int32"),
        "label": ((5,), "int32"),
        "index": ((5,), "int64"),
    }
    (batch, *_) = load(Photographs(), 1, train=False)
    assert batch["mask"].shape == (5,) and batch["mask"].dtype == np.bool_


def test_an_epoch_has_every_example_once_and_the_next_another_order():
    order = indices(load(Photographs(), 30, batch_size=8)).reshape(-1, 24)
    assert (np.sort(order, axis=1) == np.arange(24)).all()
    assert len({tuple(epoch) for epoch in order}) == len(order)


@pytest.mark.parametrize("step", [1, 4, 5, 23])
def test_resumes_bit_for_bit(step):
    whole = load(Photographs(), 26)
    assert_same(load(Photographs(), 26 - step, start_step=step), whole[step:])


def test_seed_fixes_order_captions_and_crops():
    assert_same(load(Photographs(), 6), load(Photographs(), 6))
    one, other = load(Photographs(), 6), load(Photographs(), 6, seed=2)
    assert (indices(one) != indices(other)).any()


def test_captions_and_crops_differ_between_epochs():
    batches = load(Photographs(), 8 * 24, batch_size=1)
    of_one = [batch for batch in batches if batch["index"][0] == 11]
    assert len(of_one) == 8
    said = {batch["text"].tobytes() for batch in of_one}
    allowed = {data.tokenize(c, 12).tobytes() for c in Photographs().captions(11)}
    assert 1 < len(said) and said <= allowed
    assert len({batch["image"].tobytes() for batch in of_one}) > 4


@pytest.mark.parametrize("batch_size, processes", [(5, 1), (24, 1), (100, 1), (5, 2), (7, 4)])
def test_evaluation_sees_every_example_once_in_order(batch_size, processes):
    parts = [
        load(
            Photographs(),
            train=False,
            batch_size=batch_size,
            process_index=rank,
            process_count=processes,
        )
        for rank in range(processes)
    ]
    assert len({len(part) for part in parts}) == 1  # otherwise collectives would hang
    assert all(len(batch["index"]) == batch_size for part in parts for batch in part)
    seen = [indices(part)[np.concatenate([b["mask"] for b in part])] for part in parts]
    assert sorted(np.concatenate(seen)) == list(range(24))
    assert all((np.diff(part) == processes).all() for part in seen)
    first = parts[0][0]
    np.testing.assert_array_equal(first["text"][0], data.tokenize(concepts()[0].name + " 0", 12)[0])
    np.testing.assert_array_equal(
        first["image"][0], pixels.fit(Photographs()[0]["image"], 16), strict=True
    )


def test_evaluation_of_nothing_left():
    assert load(Photographs(), train=False, start_step=5) == []


def test_closed_loaders_stop():
    loader = data.loader(Photographs(), batch_size=2, image_size=16)
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(StopIteration):
        next(loader)


def test_memory_is_used_again_only_when_nobody_looks_at_it():
    memory = Memory()

    def joined(value):
        return memory.joined([np.full((1, 2**20), value, np.uint8)] * 2)

    first, second = joined(1), joined(2)
    view, on_device = first[1:, :10], jnp.asarray(second)
    address = second.ctypes.data
    del first, second
    third = joined(3)
    assert np.all(view == 1) and jnp.all(on_device == 2) and third.ctypes.data != address
    address = third.ctypes.data
    del third
    assert joined(4).ctypes.data == address


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 25}, "the data set has 24 examples, fewer than a batch of 25: set"),
        ({"batch_size": 9, "process_count": 3}, "fewer than a batch of 27: set train.batch_size"),
        ({"batch_size": 0}, "batch_size must be a whole number, at least 1, got 0"),
        ({"batch_size": 4.0}, "batch_size must be a whole number, at least 1, got 4.0"),
        ({"image_size": 0}, "image_size must be a whole number, at least 1, got 0"),
        ({"context_length": 1}, "context_length must be a whole number, at least 2, got 1"),
        ({"process_index": 2, "process_count": 2}, "process_index must .* process_count, got 2"),
        ({"workers": -1}, "workers must be a whole number, at least 0, got -1"),
        ({"start_step": -1}, "start_step must be a whole number, at least 0, got -1"),
        ({"seed": -1}, "seed must be a whole number, at least 0, got -1"),
    ],
)
def test_loader_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        load(Photographs(), 1, **options)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("imagenet", "train"), {}, "no data set 'imagenet': choose one .* icons, synthetic, tfds"),
        (("synthetic", "dev"), {}, "split is 'dev'; it must be one of train, val, test"),
        (("synthetic", "val"), {"classes": 0}, "must be positive; they are 224, 0 and 100000"),
        (("synthetic", "val"), {"sise": 3}, "'synthetic': .*'sise'; it has image_size, classes, "),
        (("emoji", "dev"), {}, "split of the emoji data set is 'dev'; it must be one of"),
        (("emoji", "val"), {"task": "easy"}, "task of the emoji data set is 'easy'"),
        (("tfds", "train"), {}, "options of the data set 'tfds': .*'builder'"),
    ],
)
def test_source_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        data.source(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_missing_packages_are_named(monkeypatch):
    find = importlib.util.find_spec
    load_ = lambda: data.loader(Photographs(), batch_size=2)
    for name, extra, use in (
        ("grain", "train", load_),
        ("ftfy", "train", load_),  # of captions that are not ASCII
        ("datasets", "huggingface", lambda: data.source("huggingface", "anywhere")),
    ):
        hidden = lambda asked, name=name: None if asked == name else find(asked)
        monkeypatch.setattr(importlib.util, "find_spec", hidden)
        message = rf'needs {name}: pip install "swjax\[{extra}\]"'
        with pytest.raises(ModuleNotFoundError, match=message):
            use()
    require("json")


def test_synthetic_examples_depend_on_the_label_alone():
    source = data.source("synthetic", "train", image_size=16, classes=9, examples=30)
    images = [source[i]["image"] for i in range(18)]
    assert [source[i]["label"] for i in range(18)] == [*range(9), *range(9)]
    assert all((images[i] == images[i + 9]).all() for i in range(9))
    assert len({image.tobytes() for image in images}) == 9
    assert len({source.captions(label) for label in range(9)}) == 9
    assert {image.shape for image in images} == {(16, 16, 3)}


# Pixels


@pytest.mark.parametrize("channels", [3, 4])
def test_preprocess_normalises(channels):
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, channels), np.uint8)
    x = images[..., :3] / 255
    if channels == 4:  # composed over white
        opacity = images[..., 3:] / 255
        x = x * opacity + 1 - opacity
    expected = (x - np.array(pixels.MEAN)) / np.array(pixels.STD)
    actual = jax.jit(data.preprocess, static_argnames="image_size")(images, image_size=8)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def drawing():
    """A black square in the middle third of a transparent image."""
    image = np.zeros((24, 24, 4), np.uint8)
    image[8:16, 8:16, 3] = 255
    return image


def test_augmentation_moves_each_drawing_in_its_own_way():
    images = np.stack([drawing()] * 64)
    augment = jax.jit(lambda images, key: data.preprocess(images, key, 24))
    x = np.asarray(augment(images, jax.random.key(0)))
    np.testing.assert_array_equal(x, augment(images, jax.random.key(0)))
    assert len({image.tobytes() for image in x}) == 64
    assert (x != augment(images, jax.random.key(1))).any()
    ink = 1 - (x * np.array(pixels.STD) + np.array(pixels.MEAN))
    assert ink.min() > -1e-5 and ink.max() < 1 + 1e-5  # colours stay between black and white
    assert ink[:, 0].max() < 1e-5  # pixels from outside the image are white
    area = ink.mean(axis=3).sum(axis=(1, 2)) / 64  # 1 without a change of size or contrast
    assert area.min() > 0.4 and area.max() < 1.3 and area.std() > 0.05
    rows = np.einsum("bhwc,h->b", ink, np.arange(24)) / ink.sum(axis=(1, 2, 3))
    assert rows.std() > 0.3 and abs(rows.mean() - 11.5) < 0.5


def test_photographs_are_not_augmented_on_the_device():
    images = jnp.asarray(np.stack([drawing()[..., :3]] * 2))
    np.testing.assert_array_equal(
        data.preprocess(images, jax.random.key(0), 24), data.preprocess(images, None, 24)
    )


@pytest.mark.parametrize(
    "images, message",
    [
        (np.zeros((1, 8, 8, 3), np.float32), "must be uint8 .*float32"),
        (np.zeros((8, 8, 3), np.uint8), r"got uint8 \(8, 8, 3\)"),
        (np.zeros((1, 8, 8, 1), np.uint8), r"\(1, 8, 8, 1\)"),
        (np.zeros((1, 8, 9, 3), np.uint8), r"8 x 8 pixels; got \(8, 9\)"),
    ],
)
def test_preprocess_refuses(images, message):
    with pytest.raises(ValueError, match=message):
        data.preprocess(images, image_size=8)


def test_fit_cuts_the_middle_of_the_longer_side():
    image = np.zeros((10, 30, 3), np.uint8)
    image[:, 6:24] = 200  # columns 6-9 and 20-23 are inside the filter, outside the crop
    fitted = pixels.fit(image, 5)
    assert fitted.shape == (5, 5, 3) and (fitted == 200).all()
    np.testing.assert_array_equal(fitted, pixels.fit(image.transpose(1, 0, 2), 5))
    image[:, 8:22] = 100
    assert (pixels.fit(image, 10)[:, [0, -1]] == 100).all()
    np.testing.assert_array_equal(pixels.fit(fitted, 5), fitted)


def test_fit_refuses_what_would_fill_the_memory():
    line = np.zeros((1, 65_535, 3), np.uint8)  # a JPEG or PNG of some hundred bytes
    with pytest.raises(ValueError, match="has 1 x 65535 pixels; with a shorter side of 224 it"):
        pixels.fit(line, 224)


def test_fit_is_antialiased_and_weighs_colours_by_opacity():
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    np.testing.assert_allclose(pixels.fit(stripes, 8), 128, atol=8)
    image = np.zeros((64, 64, 4), np.uint8)
    image[:, ::2] = (200, 100, 50, 255)  # the stripes between are transparent black
    np.testing.assert_allclose(pixels.fit(image, 8)[..., :3], [[[200, 100, 50]] * 8] * 8, atol=3)


def test_random_boxes_have_the_shares_and_shapes_that_were_asked_for():
    rng = np.random.default_rng(0)
    boxes = [pixels.random_box(90, 120, rng, scale=(0.5, 0.8)) for _ in range(200)]
    sides = [(s.start, s.stop) for box in boxes for s in box]
    (top, bottom), (left, right) = np.array(sides).reshape(-1, 2, 2).transpose(1, 2, 0)
    h, w = bottom - top, right - left
    assert min(top.min(), left.min()) >= 0 and bottom.max() <= 90 and right.max() <= 120
    share = h * w / (90 * 120)
    assert 0.47 < share.min() < 0.55 and 0.75 < share.max() < 0.83
    assert 0.7 < (w / h).min() < 0.85 and 1.15 < (w / h).max() < 1.4
    assert (top + bottom).std() > 6 and (left + right).std() > 6
    narrow = pixels.random_box(4, 400, rng)
    assert narrow == (slice(0, 4), slice(197, 202))  # no such rectangle fits: the middle
