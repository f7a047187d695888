"""How a run finds its data: unusable paths and missing splits are refused."""

import json

import pytest
from micro_run import MICRO, records, train
from photographs import encoded, photograph, write_tars

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
        ("/proc/data", "does not exist"),
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
    with pytest.raises(
        config_lib.ConfigError, match=r"^config\.data: .*[Ii]s a directory: name the files"
    ):
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
    folder.mkdir(exist_ok=True)
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


def test_a_run_that_resumes_with_other_data_is_refused(saved, tmp_path):
    """Reversed rows and replaced captions of equal number resumed in silence."""
    for other in (CAPTIONS[::-1], ["a fox"] * 10):
        table(tmp_path / "train", other)
        with pytest.raises(config_lib.ConfigError, match="the training data differ from those"):
            train(saved, tmp_path / "run")


@pytest.mark.release
def test_a_run_resumes_with_moved_data_and_other_data_to_score(saved, tmp_path, caplog):
    config, workdir = saved, tmp_path / "run"
    table(tmp_path / "val", CAPTIONS[::-1])
    assert train(config, workdir, after=0) == 0
    assert "the val data differ from those that this run was saved with" in caplog.text
    table(tmp_path / "moved", CAPTIONS)
    config.data.table.splits.train = str(tmp_path / "moved" / "pairs.csv")
    inputs.check_fingerprints({}, {"train": "of a run of an earlier version"})
    assert train(config, workdir, after=1) == 0


@pytest.mark.release
def test_a_run_that_its_data_end_saves(tmp_path, shared_cache, capsys):
    """The steps and the metrics since the last checkpoint were lost."""
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
