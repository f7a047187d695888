"""For mkdocs: executes the notebooks and adds them as pages, with their outputs.

A cell is plain Python, as tests/test_notebooks.py requires, so that no Jupyter kernel is needed.
"""

import ast
import contextlib
import io
import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds `notebooks/<name>.md` and the figures of each notebook."""
    import matplotlib

    matplotlib.use("Agg")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page, figures = execute(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        for name, png in figures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=png))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to notebooks in the repository become links to their pages."""
    return re.sub(r"\(\.\./examples/notebooks/(\w+)\.ipynb\)", r"(notebooks/\1.md)", markdown)


def execute(path: Path) -> tuple[str, dict[str, bytes]]:
    """Runs a notebook's cells in order.

    Returns:
      The page in Markdown, and {file name: PNG} of its figures.
    """
    parts: list[str] = []
    figures: dict[str, bytes] = {}
    names: dict[str, object] = {"__name__": path.stem}
    for number, cell in enumerate(json.loads(path.read_text())["cells"], 1):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace(".ipynb)", ".md)").replace("](../../docs/", "](../"))
            continue
        text, drawn = run(source, names, f"{path.name}, cell {number}")
        parts.append(f"```python\n{source}\n```")
        if text:
            parts.append(f"```text\n{text}\n```")
        for png in drawn:
            name = f"{path.stem}_{len(figures)}.png"
            figures[name] = png
            parts.append(f"![Output of the cell above]({name})")
    return "\n\n".join(parts) + "\n", figures


def run(source: str, names: dict[str, object], label: str) -> tuple[str, list[bytes]]:
    """Executes a cell.

    Returns:
      What it prints, followed by the value of its last line if that is an expression, and its figures.
    """
    import matplotlib.pyplot as plt

    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, label, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), label, "eval"), names)
    text = printed.getvalue() + ("" if value is None else repr(value))
    drawn = []
    for number in plt.get_fignums():
        png = io.BytesIO()
        plt.figure(number).savefig(png, format="png", dpi=100, bbox_inches="tight")
        drawn.append(png.getvalue())
    plt.close("all")
    return text.rstrip(), drawn
