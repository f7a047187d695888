"""How a run finds its data: unusable paths and missing splits are refused."""

import json

import numpy as np
import pytest
from micro_run import MICRO, as_interrupted, records, train
from photographs import encoded, photograph, write_tars

from swjax.data import survey
from swjax.report import data_check
from swjax.tools import plan
from swjax.training import config as config_lib
from swjax.training import inputs, loop
from swjax.training.state.checkpoint import Checkpoints


def config_of(tmp_path, **changes):
    """Returns the config of a run on tars in `tmp_path`, with some keys changed: "__" stands for "."."""
    settings = MICRO | {"data.name": "webdataset", "data.dir": str(tmp_path / "data")}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    pairs = [(key, str(value)) for key, value in settings.items()]
    return config_lib.load("configs/openmoji.py", pairs)


@pytest.mark.parametrize(
    "folder, reason",
    [
        ("/proc/data", "No such file or directory"),
        ("{tmp}/file", "Not a directory"),
        ("{tmp}/file/below", "Not a directory"),
    ],
)
def test_a_folder_that_cannot_hold_prepared_data(tmp_path, folder, reason):
    (tmp_path / "file").write_text("")
    tars = write_tars(tmp_path, [3])
    folder = folder.format(tmp=tmp_path)
    config = config_of(tmp_path, data__webdataset__splits__train=tars, data__dir=folder)
    with pytest.raises(
        config_lib.ConfigError, match=rf"^config\.data: .*{reason}.*config\.data\.dir"
    ) as found:
        inputs.open_source(config, "train")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("split", ["folder", "fold*"])
def test_a_split_that_is_a_folder(tmp_path, split):
    (tmp_path / "folder").mkdir()
    config = config_of(tmp_path, data__webdataset__splits__train=str(tmp_path / split))
    with pytest.raises(config_lib.ConfigError, match=r"^config\.data: .*[Ii]s a .* name the files"):
        inputs.open_source(config, "train")


@pytest.mark.release
def test_a_run_without_a_test_split_ends_with_the_scores_of_val(tmp_path, shared_cache, capsys):
    tars = write_tars(tmp_path, [20, 20])
    config = config_of(
        tmp_path,
        data__webdataset__splits__train=tars,
        data__webdataset__splits__val=tars,
        train__steps=2,
        train__compilation_cache=shared_cache,
    )
    assert loop.train_and_evaluate(config, tmp_path / "run") == 0
    assert "val/image_to_text_R@1" in capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert "val/image_to_text_R@1" in results["scores"]


def table(folder, captions) -> str:
    """Writes a table of pictures with these captions; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(captions)):
        (folder / f"{number}.png").write_bytes(encoded(photograph(number), "PNG"))
    rows = [f"{number}.png,{caption}" for number, caption in enumerate(captions)]
    (folder / "pairs.csv").write_text("\n".join(["image,caption", *rows]) + "\n")
    return str(folder / "pairs.csv")


CAPTIONS = [f"picture {number}" for number in range(10)]


@pytest.fixture
def saved(tmp_path, shared_cache):
    """The config of a run of a step on tables of `CAPTIONS` in train/ and val/; its workdir is run/."""
    splits = {split: table(tmp_path / split, CAPTIONS) for split in ("train", "val")}
    config = config_of(
        tmp_path,
        data__name="table",
        **{f"data__table__splits__{split}": path for split, path in splits.items()},
        train__compilation_cache=shared_cache,
    )
    assert train(config, tmp_path / "run", after=1) == 0
    return config


def test_a_run_that_resumes_with_other_data_is_refused(reference, micro, tmp_path):
    as_interrupted(reference[1], tmp_path / "run")
    with pytest.raises(config_lib.ConfigError, match="the training data differ from those"):
        train(micro(data__synthetic__classes=19), tmp_path / "run")


@pytest.mark.release
def test_a_run_resumes_with_moved_data_and_other_data_to_score(saved, tmp_path, caplog):
    config, workdir = saved, tmp_path / "run"
    table(tmp_path / "val", CAPTIONS[::-1])
    assert train(config, workdir, after=0) == 0
    assert "the val data differ from those that this run was saved with" in caplog.text
    table(tmp_path / "moved", CAPTIONS)
    config.data.table.splits.train = str(tmp_path / "moved" / "pairs.csv")
    assert train(config, workdir, after=1) == 0


def test_a_set_that_a_run_would_give_up_is_refused_at_the_start(tmp_path, shared_cache, capsys):
    """It trained until it had met the bad examples; the plan found nothing. All three say the same."""
    path = table(tmp_path / "train", [f"picture {number}" for number in range(42)])
    cache = {"train__compilation_cache": shared_cache}
    config = config_of(tmp_path, data__name="table", data__table__splits__train=path, **cache)
    for bad in range(11):
        (tmp_path / "train" / f"{bad}.png").write_bytes(b"no picture")
    why = "11 of 42 examples are bad, more than the share of 0.01 that training skips"
    refused = rf"config.data: train: {why} .*, such as \d+.png: not an image"
    with pytest.raises(config_lib.ConfigError, match=refused):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists() or not any(
        (tmp_path / "run" / "checkpoints").iterdir()
    )
    with pytest.raises(config_lib.ConfigError, match=refused):
        plan.show(config, "h200:1")
    assert data_check.main(["check", path, f"--page={tmp_path}/page.html"]) == 2
    assert why in capsys.readouterr().out
    (tmp_path / "train" / "10.png").write_bytes(encoded(photograph(0), "PNG"))
    assert plan.show(config, "h200:1") == 0
    said = "train: 42 of 42 examples were read before the first step; 10 cannot be used"
    assert said in capsys.readouterr().out
    (line,) = inputs.check_pictures(config, inputs.open_splits(config))
    assert line.startswith(said)
    config.data.on_bad = "stop"
    with pytest.raises(config_lib.ConfigError, match=r"train: cannot read \d.png: not an image"):
        plan.show(config, "h200:1")
    (tmp_path / "train").rename(tmp_path / "sets")  # a labelled set named as a split hid the split
    table(tmp_path / "train", ["a picture"] * 8)
    table(tmp_path / "pets" / "cat", ["a cat"])
    config.data.table.splits.val = str(tmp_path / "sets" / "pairs.csv")
    config.eval.zeroshot = (f"val=folders:{tmp_path}/pets",)
    with pytest.raises(config_lib.ConfigError, match=r"val: cannot read \d.png: not an image"):
        train(config, tmp_path / "run")


class Pictures:
    """A large set, of which every 20th picture is bad."""

    photographs = True

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if not index % 20:
            raise ValueError("torn")
        return {"image": np.zeros((2, 2, 3), np.uint8), "captions": ("one",), "label": 0}


def test_a_survey_of_a_large_set_is_a_sample_in_bounded_time(micro):
    found = survey.survey(Pictures())
    assert found.read == survey.SAMPLE and 25 < len(found.bad) < 75
    parts = [survey.survey(Pictures(), part=part, parts=3) for part in range(3)]
    assert sorted(found.bad) == sorted(bad for part in parts for bad in part.bad)
    assert found.bad[0][1] == "ValueError: torn"
    assert survey.survey(Pictures(), seconds=0).read == 16
    assert survey.refusal(len(found.bad), found.read, found.examples, 0.01).startswith("about ")
    assert not survey.refusal(len(found.bad), found.read, found.examples, 0.04)
    few = Pictures()
    few.sampled = lambda most: [1, 2, 3]  # Parquet files of small row groups: "0 cannot be used"
    assert inputs.check_pictures(micro(), {"train": few}) == []


@pytest.mark.release
def test_a_run_that_its_data_end_saves(tmp_path, shared_cache, capsys, monkeypatch):
    """The steps and the metrics since the last checkpoint were lost."""
    monkeypatch.setattr(loop, "check_pictures", lambda *_: [])  # the file is torn after the start
    path = table(tmp_path / "train", [f"picture {number}" for number in range(40)])
    config = config_of(
        tmp_path,
        data__name="table",
        data__table__splits__train=path,
        data__on_bad="stop",
        checkpoint__every_steps=0,
        train__compilation_cache=shared_cache,
    )
    (tmp_path / "train" / "0.png").write_bytes(b"no picture")
    with pytest.raises(config_lib.ConfigError, match="config.data: cannot read .*0.png"):
        loop.train_and_evaluate(config, tmp_path / "run")
    step = max(Checkpoints(tmp_path / "run", keep=0).steps())
    assert f"interrupted: step {step} is saved" in capsys.readouterr().out
    assert step == 0 or records(tmp_path / "run")[-1]["step"] == step
    (tmp_path / "train" / "0.png").write_bytes(encoded(photograph(0), "PNG"))
    with pytest.raises(
        config_lib.ConfigError, match="set checkpoint.resume=WORKDIR and another --workdir"
    ):
        loop.train_and_evaluate(config, tmp_path / "run")
    config.checkpoint.resume = str(tmp_path / "run")
    assert loop.train_and_evaluate(config, tmp_path / "repaired") == 0
