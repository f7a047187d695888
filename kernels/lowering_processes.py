"""Lowers kernels in other processes.

Triton and Mosaic hold Python's global lock while they lower a kernel, so threads would not be faster. The
processes start when many kernels wait, and end when none does. They need no GPU.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import jax

from swjax.kernels import tiles

# A process starts in the time in which a running one lowers about this many kernels.
FEWEST = 8
MOST_PROCESSES = 15
COMMAND = (sys.executable, "-P", "-c", f"from {__name__} import main; main()")
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")


class Task(NamedTuple):
    """A kernel to lower.

    Attributes:
      path: the file for its program.
      kernel: implementation, operation and options; must be picklable.
      like: the arrays of the kernel, as ShapeDtypeStructs.
      device: the GPU that it is lowered for.
      settings: JAX's settings that change the program.
    """

    path: Path
    kernel: tuple[Any, ...]
    like: tuple[Any, ...]
    device: tiles.Device
    settings: dict[str, Any]


def task(path: Path, kernel: tuple[Any, ...], like: tuple[Any, ...]) -> Task:
    """The task of lowering a kernel as this process would."""
    settings = {name: getattr(jax.config, name) for name in SETTINGS}
    return Task(path, kernel, like, tiles.device(), settings)


class Job:
    """A task in a `Queue`.

    Attributes:
      done: set when a process has finished the task, or has failed.
    """

    def __init__(self, task: Task):
        self.task = pickle.dumps(task)
        self.done = threading.Event()


class Queue:
    """Tasks that wait for a process, which starts if more than `FEWEST` wait.

    Args:
      processes: largest number of processes.
      command: of a process, which reads pickled tasks from stdin, and writes one byte to stdout when it has
        started and after each task.
    """

    def __init__(self, processes: int, command: tuple[str, ...] = COMMAND):
        self._most = processes
        self._command = command
        self._jobs: dict[Path, Job] = {}
        self._waiting: deque[Job] = deque()
        self._running = 0
        self._lock = threading.Lock()

    def submit(self, task: Task) -> Job:
        """Returns the job of a task; tasks with the same path share it."""
        with self._lock:
            if known := self._jobs.get(task.path):
                return known
            job = self._jobs[task.path] = Job(task)
            self._waiting.append(job)
            waiting = len(self._waiting)
            wanted = min(waiting, self._most) if waiting > FEWEST else 0
            starting = max(0, wanted - self._running)
            self._running += starting
        for _ in range(starting):
            # A daemon thread, so that a program can end while kernels wait.
            threading.Thread(target=self._serve, daemon=True).start()
        return job

    def take_back(self, job: Job) -> bool:
        """Removes a job that waits; the caller then does its task. Returns False if a process has the job."""
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(job)
            job.done.set()
            return True
        return False

    def _take(self) -> Job | None:
        """The next job for a process, or None if the process has to end."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._running -= 1
            return None

    def _serve(self) -> None:
        """Starts a process, and gives it one task after another."""
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        # A session of its own, so that Ctrl-C reaches only this process. If it ends, the pipes are closed.
        with subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            assert process.stdin and process.stdout
            process.stdout.read(1)
            while job := self._take():
                with contextlib.suppress(OSError):  # the process has ended
                    process.stdin.write(job.task)
                    process.stdin.flush()
                    process.stdout.read(1)
                job.done.set()


def main() -> None:
    """Lowers the tasks from stdin until it is closed."""
    from swjax.kernels import dispatch

    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what libraries print
    os.write(answers, b"+")
    with contextlib.suppress(EOFError):
        while True:
            task = pickle.load(sys.stdin.buffer)
            # The caller finds no file, lowers the kernel itself, and so raises the error.
            with contextlib.suppress(Exception):
                dispatch.lower(task)
            os.write(answers, b"+")
