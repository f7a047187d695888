"""The examples of docs/data.md run, and mistakes in a mixture are one line."""

import re
from pathlib import Path

import pytest
from photographs import jpeg, write_tars

from swjax.training import config as config_lib
from swjax.training import inputs


def test_what_the_page_shows_runs(tmp_path, monkeypatch):
    root = Path(__file__).parents[1]
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs" / "data.md").read_text(), re.DOTALL)
    write_tars(tmp_path / "cc12m", [4, 4])
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    (tmp_path / "own.csv").write_text("image,caption\n" + "0.jpg,mine\n" * 8)
    monkeypatch.chdir(tmp_path)
    python, config_file = blocks
    exec(compile(python, "data.md", "exec"), {})
    (tmp_path / "mixed.py").write_text(config_file)
    config = config_lib.load("mixed.py", [("data.mixture.own.weight", "1.8")])
    mixture = inputs.open_source(config, "train")
    assert (mixture.names, mixture.weights) == (("own", "web"), (1.8, 0.9))
    assert len(mixture) == 16
    assert inputs.open_source(config, "val")[3]["captions"] == ("mine",)
    assert inputs.open_source(config, "test") is None
    config.eval.data = ""
    with pytest.raises(config_lib.ConfigError, match="name the data set to evaluate on, own, web"):
        inputs.open_source(config, "val")
    for part, message in (
        ({"name": "table", "weight": 1.0}, "web.splits.train is empty: name the data to train on"),
        ({"name": "tabel", "weight": 1.0}, "there is no data set 'tabel'"),
        ({"name": "table", "weight": 1.0, "splits": {"train": "own.csv"}, "key": ""}, "options of"),
        (
            {"name": "table", "weight": 0.0, "splits": {"train": "own.csv"}},
            "weight of 'web' is 0.0",
        ),
    ):
        config.data.mixture = {"web": part}
        with pytest.raises(config_lib.ConfigError, match=message) as caught:
            inputs.open_source(config, "train")
        assert "\n" not in str(caught.value)
    config.eval.data = "web"
    config.data.mixture = {"web": {"weight": 1.0}}
    with pytest.raises(config_lib.ConfigError, match="web needs the keys name and weight; it has"):
        config_lib.validate(config, batch_shards=1)
    for part, message in (
        ({"splits": {"tset": "own.csv"}}, "web.splits='tset' is unknown: did you mean 'test'"),
        ({"splits": "own.csv"}, "web.splits='own.csv' must be a dict: write {'train': 'own.csv'}"),
        ({"splits": {"val": 3}}, "web.splits.val=3 must be a text"),
        ({"weight": "a"}, "web.weight='a' must be a number"),
        ({"splits": {"train": "own.csv"}}, "set config.data.mixture.web.splits.val or .test"),
    ):
        config.data.mixture = {"web": {"name": "table", "weight": 1.0} | part}
        with pytest.raises(config_lib.ConfigError, match=message):
            config_lib.validate(config, batch_shards=1)
