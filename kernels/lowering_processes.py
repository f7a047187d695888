"""Lowers kernels in other processes.

Triton and Mosaic hold Python's global lock while they lower a kernel, so threads would not be faster. The
processes start when many kernels wait, and end when none does. They need no GPU.
"""

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import jax

from swjax.kernels import tiles

# No process starts for so few tasks: it would start in the time in which one process does them.
FEW_TASKS = 8
MOST_PROCESSES = 15  # of about 250 MB each
FEWEST_CORES = 4  # with fewer, the processes would slow this one down
SECONDS = 120  # after which a process is taken for hung; a task takes about one
COMMAND = (sys.executable, "-P", "-c", f"from {__name__} import main; main()")


class Settings(NamedTuple):
    """JAX's settings that change the program of a kernel."""

    enable_x64: bool
    default_matmul_precision: str | None

    @classmethod
    def current(cls) -> "Settings":
        return cls(*(getattr(jax.config, f"jax_{name}") for name in cls._fields))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with (
            jax.enable_x64(self.enable_x64),
            jax.default_matmul_precision(self.default_matmul_precision),
        ):
            yield


class Task(NamedTuple):
    """A kernel to lower.

    Attributes:
      path: the file for its program.
      kernel: implementation, operation and options; must be picklable.
      like: the arrays of the kernel, as ShapeDtypeStructs.
      device: the GPU that it is lowered for.
      settings: the settings that it is lowered under.
    """

    path: Path
    kernel: tuple[Any, ...]
    like: tuple[Any, ...]
    device: tiles.Device
    settings: Settings


class Job:
    """A task in a `Queue`.

    Attributes:
      done: set when the task is done, by a process or by the caller who took it back, or when its process has
        failed.
    """

    def __init__(self, task: Task):
        self.task = bytes(ForkingPickler.dumps(task))
        self.done = threading.Event()

    def finish(self) -> None:
        self.task = b""
        self.done.set()


class Queue:
    """Gives tasks to processes. They start when more than `FEW_TASKS` wait; each ends when none waits.

    Args:
      processes: largest number of processes.
      command: of a process; see `main`. The file descriptor of a pipe is appended.
    """

    def __init__(self, processes: int, command: tuple[str, ...] = COMMAND):
        self.processes = processes
        self._command = command
        self._jobs: dict[Path, Job] = {}
        self._waiting: deque[Job] = deque()
        self._running = 0
        self._lock = threading.Lock()

    def submit(self, task: Task) -> Job | None:
        """Returns a task's job, or None if it cannot be pickled. Tasks with the same path share a job."""
        try:
            job = Job(task)
        except Exception:
            return None
        with self._lock:
            if known := self._jobs.get(task.path):
                return known
            self._jobs[task.path] = job
            self._waiting.append(job)
            waiting = len(self._waiting)
            wanted = min(waiting, self.processes) if waiting > FEW_TASKS else 0
            starting = max(0, wanted - self._running)
            self._running += starting
        for _ in range(starting):
            # A daemon thread, so that a program can end while kernels wait.
            threading.Thread(target=self._serve, daemon=True).start()
        return job

    def take_back(self, job: Job) -> bool:
        """Removes a job that waits; the caller must do its task and finish it. Returns False if a process has
        or had the job, or another caller has it: then wait for `job.done`."""
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(job)
            return True
        return False

    def _take(self, alive: bool) -> Job | None:
        """The next job for a process, or None if the process has failed or has to end."""
        with self._lock:
            if alive and self._waiting:
                return self._waiting.popleft()
            self._running -= 1
            return None

    def _serve(self) -> None:
        """Starts a process, and gives it one job after another. If it fails, the other jobs keep waiting."""
        process = None
        here, there = Pipe()
        try:
            with there, contextlib.suppress(OSError):
                process = self._start(there.fileno())
            alive = process is not None and _answered(here)
            while job := self._take(alive):
                assert process
                try:
                    here.send_bytes(job.task)
                    alive = _answered(here)
                except OSError:
                    alive = False
                if not alive:
                    process.kill()  # so that it cannot write a program after the caller's
                    process.wait()
                job.finish()
        finally:
            here.close()
            if process:
                process.kill()
                process.wait()

    def _start(self, pipe: int) -> subprocess.Popen:
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        return subprocess.Popen(
            (*self._command, str(pipe)),
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print
            pass_fds=(pipe,),
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )


def _answered(pipe: Connection) -> bool:
    """Waits for an answer. False if the process has ended, or hangs."""
    try:
        return pipe.poll(SECONDS) and pipe.recv()
    except (EOFError, OSError):
        return False


def main() -> None:
    """Lowers the tasks from a pipe, until it is closed or the process is killed.

    The last argument is the file descriptor of the pipe. The process sends True when it has started and after
    each task.
    """
    from swjax.kernels import dispatch

    warnings.simplefilter("ignore")  # the caller repeats them
    pipe = Connection(int(sys.argv[-1]))
    with contextlib.suppress(EOFError, OSError):  # the caller has ended
        pipe.send(True)
        while True:
            task = pipe.recv()
            # The caller finds no file, lowers the kernel itself, and so raises the error.
            with contextlib.suppress(Exception):
                dispatch.lower(task)
            pipe.send(True)


def most_processes() -> int:
    """The number of processes that this host has cores for; 0 if it has few."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a quota ("max")
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, quota // period)
    return min(cores - 1, MOST_PROCESSES) if cores >= FEWEST_CORES else 0
