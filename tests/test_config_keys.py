"""Every config key is described, and refuses wrong values, which are derived from its type and range."""

import math
import runpy
from pathlib import Path

import pytest
from test_cli import OPENMOJI

import train
from swjax.models import clip
from swjax.recipes import RECIPES
from swjax.training import config as config_lib
from swjax.training.keys import KEYS, Key

NO_NUMBERS = {
    bool: ("maybe", "2"),
    int: ("many", "1.5", "inf", "nan"),
    float: ("many", "nan", "inf"),
}


def wrong_values(key: Key) -> list[str]:
    """Returns values of a wrong type, below and above the range, and not among the choices."""
    wrong = [*NO_NUMBERS.get(key.kind, ())]
    if key.kind is tuple and key.interval:
        wrong = ["-1,2", "200,100", "first,last", "1,inf", "1,2,3", "1"]
        return [*wrong, "" if key.default else "1.5,2"]
    if key.choices:
        wrong += [f"{key.choices[-1]}x", "no such choice"]
    if key.interval:
        low, high = map(float, key.interval[1:-1].split(","))
        step = 1 if key.kind is int else 0.5
        below = low - step if key.interval[0] == "[" else low
        above = max(high + step, 2 * high) if key.interval[-1] == "]" else high
        wrong += [f"{key.kind(x)}" for x in (below, above) if math.isfinite(x)]
        wrong += ["-inf"] * (key.kind is float)
    return wrong


WRONG = [(name, value) for name, key in KEYS.items() for value in wrong_values(key)]


def refusal(setting: str, capsys, tmp_path, monkeypatch) -> str:
    """Returns the line that train.py prints for a wrong setting."""
    monkeypatch.chdir(tmp_path)
    assert train.main(["train.py", OPENMOJI, "--workdir=w", setting]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
    return captured.err


def test_there_are_two_hundred_mistakes():
    assert len(WRONG) >= 200
    assert len(set(WRONG)) == len(WRONG)


@pytest.mark.parametrize("name", KEYS)
def test_wrong_values_are_one_line(name, capsys, tmp_path, monkeypatch):
    for value in wrong_values(KEYS[name]):
        error = refusal(f"--config.{name}={value}", capsys, tmp_path, monkeypatch)
        shown = error.partition(f"config.{name}=")[2]
        assert shown.strip("'").startswith(value) or float(shown.split()[0]) == float(value), error
        assert " must be " in shown or " is unknown: " in shown, error


@pytest.mark.parametrize("name", KEYS)
def test_a_misspelt_key_is_one_line(name, capsys, tmp_path, monkeypatch):
    error = refusal(f"--config.{name[:-1]}=1", capsys, tmp_path, monkeypatch)
    assert f"config.{name[:-1]} does not exist: " in error
    assert "did you mean" in error or "choose from" in error


def test_a_value_that_code_sets_is_checked_as_well():
    config = config_lib.load(OPENMOJI.partition("=")[2])
    config.optimizer.eps = math.nan
    with pytest.raises(config_lib.ConfigError, match="config.optimizer.eps=nan must be a finite"):
        config_lib.validate(config, batch_shards=1)


def test_every_default_is_accepted_and_described():
    for name, key in KEYS.items():
        assert key.accepts(key.default), name
        assert key.meaning and len(key.meaning) < 250, name


def test_the_table_has_the_models_and_the_recipes():
    assert set(KEYS["model.name"].choices) == {"weights", *clip.CONFIGS}
    assert set(KEYS["model.recipe"].choices) == {"auto", *RECIPES}


def test_the_site_lists_every_key():
    """The page of the documentation site is made from the same keys."""
    table = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "config_keys.py"))["table"]()
    assert table.count("\n| `") == len(KEYS)
