"""How a run finds its data: unusable paths and missing splits are refused."""

import json

import pytest
from micro_run import MICRO
from photographs import write_tars

from swjax.training import config as config_lib
from swjax.training import inputs, loop


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
