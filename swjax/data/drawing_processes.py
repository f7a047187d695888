"""Renders SVG drawings on every core, in worker processes."""

import concurrent.futures
import contextlib
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

_WORKERS_AT_MOST = 32


def answers(script: str, tasks: Iterable[Any]) -> Iterator[Any]:
    """Yields a script's answer to each task, in order.

    The script reads tasks from stdin, one line of JSON per task, and writes one line of JSON per answer. One
    thread waits for each process. The function does not use a multiprocessing pool: JAX's threads forbid
    fork, and spawn would run the caller's main module again.

    Args:
      script: path of a Python file.
      tasks: JSON-serializable values.

    Raises:
      RuntimeError: a process ended; the message contains the start of its task.
    """
    tasks = list(tasks)
    count = min(os.cpu_count() or 1, _WORKERS_AT_MOST, len(tasks))
    command = [sys.executable, "-P", script]
    idle: queue.SimpleQueue = queue.SimpleQueue()

    def answer(task):
        line, worker = json.dumps(task), idle.get()
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            return json.loads(worker.stdout.readline())
        except (ValueError, OSError) as error:
            raise RuntimeError(f"the process that drew {line[:100]} ended") from error
        finally:
            idle.put(worker)

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            # Each worker has its own process group, so Ctrl-C reaches only this process, which then ends the
            # workers.
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
            }
            worker = subprocess.Popen(command, start_new_session=True, **pipes)
            stack.callback(_end, worker)
            idle.put(worker)
        if not count:
            return
        pool = concurrent.futures.ThreadPoolExecutor(count)
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(answer, tasks)


def _end(worker: subprocess.Popen) -> None:
    worker.kill()  # a worker has no state except its current task
    worker.communicate()


def with_progress(items: Iterable, counts: Iterable[int], title: str, start: int = 0) -> Iterator:
    """Passes items through, with a progress line on a terminal; writes a single line if output is piped.

    Args:
      items: the prepared items.
      counts: number of drawings in each item.
      title: name of the data set.
      start: number of drawings that an earlier run has prepared.
    """
    counts = list(counts)
    total, done = start + sum(counts), start
    live, began, shown = sys.stderr.isatty(), time.monotonic(), 0.0
    line = f"preparing the data set {title} (once): "
    if not live:
        already = f", {start} already drawn" if start else ""
        print(f"{line}{total} files to draw{already}", file=sys.stderr, flush=True)
    for item, count in zip(items, counts, strict=True):
        done, now = done + count, time.monotonic() - began
        if live and (now - shown > 0.2 or done == total):
            shown = now
            left = f", {now / (done - start) * (total - done):.0f} s left" if now > 2 else ""
            print(f"\r{line}{done}/{total}{left}\x1b[K", end="", file=sys.stderr, flush=True)
        yield item
    if live:
        print(file=sys.stderr)
