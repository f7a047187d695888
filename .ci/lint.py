"""Rules that the source must follow and that ruff and mypy do not check; prints each place that breaks one.

- Every public function and method is annotated, parameters and result; a Triton kernel is exempt, because its
  parameters are pointers and constants of Triton's own language.
- An ignored type error has its code and a reason: ``# type: ignore[code]  # reason``.
- Shipped code evaluates and unpacks nothing, and unpickles nothing but what `PICKLES` lists. The fuzzer of
  benchmarks.reliability checks that at run time.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNSAFE_NAMES = {"eval", "exec", "pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = re.compile(r"allow_pickle|\.extract(all)?\(|unpack_archive|torch\.load")
PICKLES = {
    ("swjax/data/processes.py", "cloudpickle"),  # for processes that it starts
    ("swjax/interop/torch_files.py", "pickle"),  # `find_class` refuses all names but a few
}
IGNORE = re.compile(r"#\s*type:\s*ignore")
IGNORE_WITH_REASON = re.compile(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]  # \w+")


def sources() -> Iterator[Path]:
    """Yields the shipped files; swjax/kernels, a symlink, is checked as kernels."""
    for folder in ("swjax", "kernels", "configs"):
        files = sorted((ROOT / folder).rglob("*.py"))
        yield from (path for path in files if "swjax/kernels" not in path.as_posix())
    yield ROOT / "train.py"


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, what is wrong there)."""
    text = path.read_text()
    tree = ast.parse(text)
    yield from unannotated(tree)
    for number, line in enumerate(text.splitlines(), 1):
        if IGNORE.search(line) and not IGNORE_WITH_REASON.search(line):
            yield number, "an ignored type error needs its code and a reason"
        if UNSAFE_CALLS.search(line):
            yield number, "shipped code must not unpickle or unpack files"
    for node in ast.walk(tree):
        for name in names(node):
            if name in UNSAFE_NAMES and (path.relative_to(ROOT).as_posix(), name) not in PICKLES:
                yield node.lineno, f"shipped code must not use {name}"
            if name == "torch.load":
                yield node.lineno, "shipped code must not unpickle or unpack files"


def names(node: ast.AST) -> Iterator[str]:
    """Yields the name that a node uses, or the top packages and the members that it imports."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.split(".")[0]
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unannotated(body: ast.Module | ast.ClassDef, owner: str = "") -> Iterator[tuple[int, str]]:
    """Yields the public functions and methods without an annotation of a parameter or of the result."""
    for node in body.body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            yield from unannotated(node, f"{owner}{node.name}.")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not is_public(node.name):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any("triton" in decorator for decorator in decorators):
            continue
        a = node.args
        parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        if owner and "staticmethod" not in decorators:
            parameters = parameters[1:]  # self
        complete = all(parameter is None or parameter.annotation for parameter in parameters)
        if not complete or (node.returns is None and node.name != "__init__"):
            yield node.lineno, f"public {owner}{node.name} must be annotated"


def is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sources()
        for line, fault in faults(path)
    ]
    print(*found, sep="\n", end="\n" * bool(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
