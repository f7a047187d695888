"""The notebooks' cells run in order, with few steps, and are stored without outputs.

The cells are plain Python without magics, so the tests need no Jupyter kernel, which starts slowly and needs
many packages.
"""

import contextlib
import importlib.util
import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import jax
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def code_cells(path):
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.release
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch, tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pictures = []
    monkeypatch.setattr(plt, "show", lambda: pictures.append(plt.gcf()) or plt.close("all"))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": path.stem}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with warnings.catch_warnings(action="ignore"):
            for number, cell in enumerate(code_cells(path)):
                source = re.sub(r"range\(\d{2,}\)", "range(8)", "".join(cell["source"]))
                exec(compile(source, f"{path.name}, code cell {number}", "exec"), names)
    assert len(pictures) >= 2
    if path.stem == "precision":  # the notebook's text says "about 10 times"
        assert 9.5 < names["growth"] < 10.5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_is_small(path):
    cells = code_cells(path)
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    assert {cell["execution_count"] for cell in cells} == {None}
    assert path.stat().st_size < 10_000


def test_notebooks_share_their_first_cell():
    assert len({install_cell(path) for path in NOTEBOOKS}) == 1


def install_cell(path):
    return "".join(code_cells(path)[0]["source"])


@pytest.mark.parametrize("driver, extras", [(None, "train"), ("/bin/nvidia-smi", "train,cuda12")])
@pytest.mark.parametrize("where", ["wheel", "checkout", "nowhere"])
def test_the_first_cell_installs_what_is_here_and_never_from_an_index(
    where, driver, extras, monkeypatch, tmp_path
):
    """A package index may have another package of that name."""
    folder = tmp_path / "examples" / "notebooks"
    folder.mkdir(parents=True)
    expected = []
    if where == "wheel":
        for version in ("0.1.0", "0.2.0"):
            (folder / f"swjax-{version}-py3-none-any.whl").touch()
        expected = [f"{folder}/swjax-0.2.0-py3-none-any.whl[{extras}]"]
    elif where == "checkout":
        (tmp_path / "swjax").mkdir()
        (tmp_path / "swjax" / "recipes.py").touch()
        expected = [f"{tmp_path}[{extras}]"]
    installed = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: installed.append(command[-1]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: driver)
    monkeypatch.chdir(folder)
    missing = pytest.raises(FileNotFoundError, match=r"no swjax-\*.whl in")
    with missing if where == "nowhere" else contextlib.nullcontext():
        exec(install_cell(NOTEBOOKS[0]), {})
    assert installed == expected


def test_the_first_cell_asks_for_a_restart_if_another_jax_is_loaded(monkeypatch, tmp_path):
    """Its modules would be mixed with those of the installed jax, as in an ImportError of Flax."""
    (tmp_path / "swjax-0.1.0-py3-none-any.whl").touch()
    monkeypatch.setattr(subprocess, "run", lambda command, check: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(jax, "__version__", "0.7.2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="restart the runtime"):
        exec(install_cell(NOTEBOOKS[0]), {})
