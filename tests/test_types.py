"""mypy passes, every public function is annotated, and each ignored error has a reason."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def sources() -> Iterator[tuple[str, Path]]:
    """Returns (module, file) of the modules that mypy checks."""
    for folder, package in (
        ("swjax", "swjax"),
        ("kernels", "swjax.kernels"),
        ("configs", "configs"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            names = path.relative_to(ROOT / folder).with_suffix("").parts
            if not (folder == "swjax" and names[0] == "kernels"):  # the symlink
                yield ".".join((package, *(n for n in names if n != "__init__"))), path
    yield "train", ROOT / "train.py"


SOURCES = dict(sources())


def test_mypy_passes():
    command = [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".cache" / "mypy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", SOURCES)
def test_public_functions_are_annotated(module):
    assert not list(unannotated(ast.parse(SOURCES[module].read_text())))


def unannotated(body: ast.Module | ast.ClassDef, owner: str = "") -> Iterator[str]:
    """Returns public functions and methods without annotation of a parameter or of the result.

    A Triton kernel is exempt: its parameters are pointers and constants of Triton's own language.
    """
    for node in body.body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            yield from unannotated(node, f"{owner}{node.name}.")
        if not isinstance(node, ast.FunctionDef) or not is_public(node.name) or is_kernel(node):
            continue
        a = node.args
        parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        static = any(
            isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
        )
        if owner and not static:
            parameters = parameters[1:]  # self
        complete = all(p is None or p.annotation for p in parameters)
        if not complete or (node.returns is None and node.name != "__init__"):
            yield f"{owner}{node.name}, line {node.lineno}"


def is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(x: int) -> int: ...", []),
        ("def f(x): ...", ["f, line 1"]),
        ("def f(x: int): ...", ["f, line 1"]),
        ("def f(*args, **kwargs) -> int: ...", ["f, line 1"]),
        ("def _f(x): ...", []),
        ("@triton.jit\ndef f(x): ...", []),
        ("class A:\n  def __init__(self, x: int): ...", []),
        ("class A:\n  def __init__(self, x): ...", ["A.__init__, line 2"]),
        ("class A:\n  @staticmethod\n  def f(x) -> int: ...", ["A.f, line 3"]),
        ("class _A:\n  def f(self, x): ...", []),
    ],
)
def test_what_counts_as_annotated(code, found):
    assert list(unannotated(ast.parse(code))) == found


IGNORE = re.compile(r"#\s*type:\s*ignore")
WITH_REASON = re.compile(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]  # \w+")


def test_an_ignored_error_has_a_code_and_a_reason():
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES.values()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if IGNORE.search(line) and not WITH_REASON.search(line)
    ]
    assert not bare
