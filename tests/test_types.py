"""mypy passes, and the source follows the rules of .ci/lint.py."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_mypy_passes():
    command = [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".cache" / "mypy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def lint():
    spec = importlib.util.spec_from_file_location("lint", ROOT / ".ci" / "lint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lint_passes(lint, capsys):
    assert lint.main() == 0, capsys.readouterr().out


def test_lint_finds_what_breaks_a_rule(lint, tmp_path, monkeypatch):
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(
        "def f(x): ...\n"
        "class A:\n    def g(self, x: int): ...\n"
        "x = eval('1')  # type: ignore\n"
        "archive.extractall()\n"
        "@triton.jit\ndef kernel(x): ...\n"
        "def _private(x): ...\n"
        "def annotated(x: int, *y: int) -> int: ...  # type: ignore[misc]  # a reason\n"
        "import pickle, ast\n"
        "import cloudpickle as cp\n"
        "from pickle import loads\n"
        "from torch import load\n"
        "from torch import nn\n"
        "async def g(x): ...\n"
    )
    faulty = [1, 3, 4, 4, 5, *range(10, 14), 15]
    assert sorted(line for line, _ in lint.faults(path)) == faulty
