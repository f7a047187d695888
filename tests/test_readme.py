"""The README's Python blocks run, and the files that it names exist."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that blocks write
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(block, "page", "exec"), {})


def test_files_it_names_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    configs = re.findall(r"configs/\w+\.py", README)
    assert links and configs
    assert [name for name in links + configs if not (ROOT / name).exists()] == []


def test_every_recipe_has_its_row():
    from swjax.recipes import RECIPES

    table = (ROOT / "docs" / "recipes.md").read_text().split("##")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(RECIPES)
