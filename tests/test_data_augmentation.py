"""Random changes of training photographs: as torchvision computes them, and fixed by seed and position."""

import numpy as np
import pytest
import torch_peers
from photographs import photograph
from PIL import Image
from test_data import Photographs, assert_same, load

from swjax import data
from swjax.data import augmentation as changes
from swjax.data.augmentation import Augmentation
from swjax.training import inputs
from swjax.training.config import ConfigError

ALL = Augmentation(
    scale=(0.4, 1.0),
    hflip=0.5,
    randaugment=2,
    color_jitter=(0.4, 0.4, 0.4, 0.1),
    color_jitter_prob=0.8,
    gray_scale_prob=0.2,
    re_prob=0.3,
)
PICTURE = photograph(3, 40, 56)


def draws(count=200, **options):
    """Yields the results of one augmentation with different seeds."""
    change = Augmentation(**options)
    for seed in range(count):
        yield change(np.asarray(PICTURE), np.random.default_rng(seed))


@pytest.mark.parametrize("level", [0.3, 1.0])
@pytest.mark.parametrize("name", changes.operations())
def test_operations_of_randaugment_are_torchvisions(name, level):
    torch_peers.torch_and_torchvision()
    from torchvision.transforms import InterpolationMode, autoaugment

    space = autoaugment.RandAugment()._augmentation_space(31, (PICTURE.height, PICTURE.width))
    magnitudes, signed = space[name]
    magnitude = float(magnitudes[round(30 * level)]) if magnitudes.ndim else 0.0
    options = {"interpolation": InterpolationMode.BILINEAR, "fill": list(changes._FILL)}
    for sign in (1, -1):
        signed_magnitude = sign * magnitude if signed else magnitude
        theirs = autoaugment._apply_op(PICTURE, name, signed_magnitude, **options)
        ours = changes.operations()[name](PICTURE, level, sign)
        # torchvision's magnitudes are float32
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1, rtol=0)


def test_all_operations_of_randaugment_occur():
    # 9 of 14 have a sign. AutoContrast does not change the picture, which has all levels.
    assert len({image.tobytes() for image in draws(300, randaugment=1)}) == 13 + 9
    whole = {image.tobytes() for image in draws(100, randaugment=3)}
    assert len(whole) > 80


def test_the_hue_is_torchvisions():
    torch_peers.torch_and_torchvision()
    from torchvision.transforms.functional import adjust_hue

    for share in (-0.5, -0.08, 0.3):
        ours, theirs = changes.shift_hue(PICTURE, share), adjust_hue(PICTURE, share)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_each_part_of_the_jitter_changes_its_property():
    """Brightness scales the mean, contrast the spread, saturation the distance from gray."""
    hsv = lambda image: np.asarray(Image.fromarray(image).convert("HSV")).astype(int)
    measures = (
        lambda image: image.mean(),
        lambda image: image.mean(axis=2).std(),
        lambda image: (image.max(axis=2) - image.min(axis=2)).mean(),
    )
    whole = np.asarray(PICTURE).astype(float)
    for index, measure in enumerate(measures):
        strengths = tuple(0.3 if i == index else 0.0 for i in range(4))
        ratios = [measure(i.astype(float)) / measure(whole) for i in draws(color_jitter=strengths)]
        assert 0.68 < min(ratios) < 0.8 and 1.15 < max(ratios) < 1.32, index
    hues = [hsv(image)[..., 0].tobytes() for image in draws(20, color_jitter=(0, 0, 0, 0.1))]
    assert len(set(hues)) > 15


def test_probabilities_are_kept():
    whole = np.asarray(PICTURE)
    mirrored = [(image == whole[:, ::-1]).all() for image in draws(hflip=0.25)]
    assert 0.15 < np.mean(mirrored) < 0.35
    gray = [(np.ptp(image, axis=2) == 0).all() for image in draws(gray_scale_prob=0.75)]
    assert 0.65 < np.mean(gray) < 0.85
    jittered = [
        (image != whole).any()
        for image in draws(color_jitter=(0.4, 0.4, 0.4, 0.1), color_jitter_prob=0.5)
    ]
    assert 0.4 < np.mean(jittered) < 0.6
    erased = [(image != whole).any(axis=2).mean() for image in draws(re_prob=0.5)]
    hit = [share for share in erased if share]
    assert 0.4 < np.mean(np.array(erased) > 0) < 0.6
    assert 0.01 < min(hit) < 0.06 and 0.25 < max(hit) < 0.36


@pytest.mark.parametrize("step", [0, 3])
def test_batches_depend_on_seed_and_position_alone(step):
    options = {"augmentation": ALL, "image_size": 24}
    whole = load(Photographs(), 6, **options)
    assert_same(load(Photographs(), 6 - step, start_step=step, **options), whole[step:])
    plain = load(Photographs(), 6, image_size=24)
    for ours, theirs in zip(whole, plain):
        np.testing.assert_array_equal(ours["index"], theirs["index"])
        assert (ours["image"] != theirs["image"]).any(axis=(1, 2, 3)).all()


@pytest.mark.release
def test_worker_processes_change_pictures_in_the_same_way(tmp_path):
    for number in range(6):
        photograph(number).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(f"picture {number}")
    source = data.source("folders", str(tmp_path))
    options = {"augmentation": ALL, "image_size": 24, "batch_size": 3}
    assert_same(load(source, 3, workers=1, **options), load(source, 3, **options))


def folder_config(micro, folder, **changes):
    photograph(0).save(folder / "0.png")
    (folder / "0.txt").write_text("a picture")
    return micro(
        data__name="folders",
        data__folders__splits__train=str(folder),
        train__batch_size=1,
        data__augment__scale="1,1",
        data__augment__ratio="1,1",
        **changes,
    )


def test_the_keys_of_a_run_reach_its_pictures(micro, tmp_path):
    share = inputs.sharding.Share(0, (0,))
    images = []
    for changed in ({}, {"data__augment__hflip": "1"}):
        config = folder_config(micro, tmp_path, **changed)
        batches = inputs.open_batches(config, inputs.open_source(config, "train"), None, share)
        images.append(next(batches)["image"])
        batches.close()
    np.testing.assert_array_equal(images[1], images[0][:, :, ::-1])


def test_settings_that_cannot_apply_are_one_line(micro, tmp_path):
    drawings = micro(data__augment__hflip="0.5", data__augment__randaugment="2")
    hue = folder_config(micro, tmp_path, data__augment__color_jitter="0,0,0,0.7")
    for config, message in (
        (
            drawings,
            "does not apply to drawings, got {'hflip': 0.5, 'randaugment': 2}: leave it out",
        ),
        (hue, "color_jitter shifts the hue by at most 0.5, got 0.7: lower it"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            inputs.open_splits(config)
        assert "config.data.augment: " in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^magnitude must be 0 to 30, got 31: change it$"):
        Augmentation(magnitude=31)
    with pytest.raises(ValueError, match=r"^scale must be \(smallest, largest\) above 0, got"):
        Augmentation(scale=(0.5, 0.4))
    for options, message in (
        (
            {"color_jitter": 0.3},
            r"color_jitter must have the form of \(0.0, 0.0, 0.0, 0.0\), got 0.3",
        ),
        ({"magnitude": 9.5}, "magnitude must have the form of 9, got 9.5"),
    ):
        with pytest.raises(ValueError, match=f"^{message}: change it$"):
            Augmentation(**options)
    with pytest.raises(ValueError, match=r"^interpolation must be one of .*, got 'lanczos'$"):
        data.Fitting(interpolation="lanczos")
