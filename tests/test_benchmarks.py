"""Every benchmark's command starts as its docstring says, from a checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"python (?:-m )?(benchmarks[/.][\w/.]+)")


def commands() -> list[list[str]]:
    """Returns ["-m", module] or [file] for each benchmark whose docstring shows its own command.

    Programs that need PyTorch are not among them: another program starts those.
    """
    found = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        if path.stem.endswith("_torch"):
            continue
        file = path.relative_to(ROOT).as_posix()
        module = file.removesuffix(".py").replace("/", ".")
        shown = COMMAND.findall(path.read_text())
        found += [[file]] * (file in shown) + [["-m", module]] * (module in shown)
    return found


def test_the_errors_of_recipes_are_those_of_the_page():
    from benchmarks import recipe_errors

    page = (ROOT / "docs" / "recipes.md").read_text()
    wanted = re.findall(r"^\|`(\w+)`((?:\|[\d.]+){9})\|$", page, re.MULTILINE)
    assert [name for name, _ in wanted] == list(recipe_errors.swjax.RECIPES)
    few = ("switchback",)
    got = [recipe_errors.errors(data, few)["switchback"] for data in recipe_errors.DATA]
    shown = [float(cell) for cell in dict(wanted)["switchback"].split("|")[1:]]
    assert 100 * np.ravel(got) == pytest.approx(shown, rel=0.1, abs=0.01)


@pytest.mark.release
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_starts(command):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
