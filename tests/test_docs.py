"""The pages' Python blocks run, and the errors that they explain occur in the code."""

import importlib
import json
import re
import runpy
from pathlib import Path

import jax
import pytest

from swjax.recipes import RECIPES

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"data.md"}  # its blocks need tars: tests/test_data_page.py runs them
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if "```python" in page.read_text() and page.name not in ELSEWHERE
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that blocks write
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(block, page.name, "exec"), {})


def test_files_that_the_readme_names_exist():
    """mkdocs checks the links of the other pages."""
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", readme)
    configs = re.findall(r"configs/\w+\.py", readme)
    assert links and configs
    assert [name for name in links + configs if not (ROOT / name).exists()] == []


def test_every_recipe_has_its_row():
    table = (ROOT / "docs" / "recipes.md").read_text().split("##")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(RECIPES)


def test_errors_are_worded_as_in_the_code():
    """A constant part of each message in docs/errors.md is in the code."""
    files = [*(ROOT / "swjax").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    code = " ".join(squeeze(path.read_text()) for path in files)
    page = (ROOT / "docs" / "errors.md").read_text()
    messages = re.findall(r"^\*\*`(.*)`\*\*$", page, re.MULTILINE)
    assert len(messages) > 8
    for message in messages:
        parts = re.split(r"^w|\.\.\.|'[^']*'|\b\d+\b|[:;()]|\bint8\b|an NVIDIA GPU|cpu", message)
        fixed = [squeeze(part) for part in parts if len(part) > 20]
        assert any(part in code for part in fixed), message


def squeeze(text: str) -> str:
    """Removes quotes, line breaks and blanks, which differ between the code and the page."""
    return re.sub(r'[\s"\'`\\]+|\bf(?=["\'])', "", text)


def test_every_metric_is_explained():
    """Covers the names that the trainer spells out, not names made from scores or tensors."""
    code = "".join(path.read_text() for path in (ROOT / "swjax" / "training").rglob("*.py"))
    names = set(re.findall(r'"((?:train|perf|data)/\w+)"', code))
    assert len(names) > 10
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_a_notebook_becomes_a_page(tmp_path):
    pytest.importorskip("mkdocs")  # only the site needs it
    notebooks = runpy.run_path(str(ROOT / ".ci" / "notebooks.py"))
    code = "import matplotlib.pyplot as plt\nprint('drawn')\nplt.plot([1, 2])\nlen('four')"
    text = "# Title\n\n[next](other.ipynb) [page](../../docs/data.md#tars)"
    cells = [("markdown", text), ("code", code)]
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": k, "source": [s]} for k, s in cells]}))
    page, figures = notebooks["execute"](path)
    assert "[next](other.md) [page](../data.md#tars)" in page
    assert "```text\ndrawn\n4\n```" in page
    assert "(small_0.png)" in page and figures["small_0.png"].startswith(b"\x89PNG")


PACKAGES = ["swjax"] + [
    f"swjax.{name}"
    for name in ("optax", "losses", "data", "inference", "serving", "interop", "evaluators")
]


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_in_the_api_reference(package):
    """Either their module is listed whole, or they are among its listed members."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    found = re.findall(
        r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?$", pages, re.MULTILINE
    )
    listed = {module: members.split(", ") if members else None for module, members in found}
    exported = importlib.import_module(package)
    for name in exported.__all__:
        value = getattr(exported, name)
        module = getattr(value, "__module__", None) or getattr(value, "__name__", "swjax.recipes")
        pages_of = [
            members for home, members in listed.items() if f"{module}.".startswith(f"{home}.")
        ]
        assert any(members is None or name in members for members in pages_of), (name, module)
    for module, members in listed.items():
        for name in members or ():
            assert hasattr(importlib.import_module(module), name), f"{name} of {module}"
