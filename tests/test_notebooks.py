"""The notebooks' cells run, in order, in loops of a few steps, and are kept without outputs.

Executed here rather than by a Jupyter kernel: starting one costs as much as a notebook, and its packages are
many. So cells are plain Python, without magics.
"""

import json
import re
import warnings
from pathlib import Path

import jax
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def code_cells(path):
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_first_and_has_no_outputs(path):
    cells = code_cells(path)
    assert '"pip", "install"' in "".join(cells[0]["source"])
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    assert {cell["execution_count"] for cell in cells} == {None}
