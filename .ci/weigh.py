"""Prints the weight of the tree: lines of Python, words of the pages, and what one linear layer runs through.

    python .ci/weigh.py

A linear layer runs once forward and backward on the CPU. The script counts the named functions that ran (no
lambdas, comprehensions or generators), their files, and the deepest stack of their frames. `algorithm_1` is
the same method in 20 lines, for comparison.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FOLDERS = ("swjax", "kernels", "configs", "benchmarks", "tests", "examples", ".ci")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def main():
    lines = Counter()
    for path in (p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        lines[path.relative_to(ROOT).parts[0]] += _count(path, str.splitlines)
    _print_table("Lines of Python", lines)

    words = {name: _count(ROOT / name, str.split) for name in PAGES}
    docs = {str(p.relative_to(ROOT)): _count(p, str.split) for p in (ROOT / "docs").rglob("*.md")}
    notes = sum(_count(p, str.split) for p in (ROOT / "benchmarks/notes").glob("*.md"))
    _print_table("Words", words | {"docs/": sum(docs.values()), "benchmarks/notes/": notes})
    _print_table("Words of each page", dict(sorted(docs.items(), key=lambda item: -item[1])))

    sizes = [path.stat().st_size for path in (ROOT / "benchmarks/results").iterdir()]
    _print_table("Raw rows", {"files": len(sizes), "KiB": sum(sizes) // 1024})
    _print_layers()


def _count(path: Path, split) -> int:
    return len(split(path.read_text(encoding="utf-8")))


def _print_table(title: str, rows) -> None:
    print(f"\n{title}")
    for name, number in rows.items():
        print(f"{number:8,}  {name}")


def _print_layers():
    import jax.numpy as jnp

    import swjax
    from swjax.linear.algorithm import algorithm_1

    x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 128))
    print("\nOne linear layer, forward and backward, outside jax.jit")
    for name, layer in (("swjax.switchback", swjax.switchback), ("algorithm_1", algorithm_1)):
        functions, depth = _trace(layer, x, w)
        files = len({file for file, _, _ in functions})
        print(
            f"{name:>18}: {len(functions)} functions in {files} files, at most {depth} frames deep"
        )


def _trace(layer, x, w) -> tuple[set, int]:
    """Returns the functions that ran, as (file, line, name), and the deepest stack of their frames."""
    import jax

    functions: set[tuple[str, int, str]] = set()
    depth = deepest = 0

    def profile(frame: FrameType, event: str, _):
        nonlocal depth, deepest
        code = frame.f_code
        if event not in ("call", "return") or not _is_ours(code):
            return
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)
        functions.add((code.co_filename, code.co_firstlineno, code.co_name))

    sys.setprofile(profile)
    try:
        y, vjp = jax.vjp(layer, x, w)
        vjp(y)
    finally:
        sys.setprofile(None)
    return functions, deepest


def _is_ours(code: CodeType) -> bool:
    named = not code.co_name.startswith("<")
    return named and code.co_filename.startswith((str(ROOT / "swjax"), str(ROOT / "kernels")))


if __name__ == "__main__":
    main()
