"""Kills runs at random moments, resumes each, and compares it with an uninterrupted run.

A run is killed and restarted until it has finished. Then every bit of its last checkpoint (parameters,
moments), its position in the data, and every metric of every step except times are compared, and another run
starts. Half of the moments are drawn from the whole life of a process, including its start. The others are
drawn from its training, which spends much of its time on checkpoints. With --workers the killed runs have
loader processes, and none may remain at the end. The uninterrupted run has no loader processes.

This command runs on a GPU. It trains a model whose layers are large enough for the GPU kernels:

  JAX_PLATFORMS=cuda,cpu python -m benchmarks.reliability kills --model=small --kills=20 --terms=4
"""

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Literal

from benchmarks.reliability.runs import (
    Run,
    compare,
    finished_checkpoints,
    is_saving,
    records,
    resumed_at,
)

# {name of a model: keys of the config that differ from `runs.TINY`}.
MODELS = {"tiny": (), "small": """
  data.image_size=64 data.context_length=16 data.synthetic.classes=200 data.synthetic.examples=2048
  model.vision.width=256 model.vision.layers=4 model.vision.heads=4 model.text.width=256
  model.text.layers=2 model.text.heads=4 model.embed_dim=128 model.patch_dropout=0.5
  model.dtype=bfloat16 train.batch_size=256
""".split()}  # fmt: skip
_MARK = "SWJAX_KILLED"  # environment variable that marks the processes of a run


def measure(
    folder: Path,
    kills: int = 100,
    terms: int = 20,
    steps: int = 300,
    seed: int = 0,
    workers: int = 0,
    model: Literal["tiny", "small"] = "tiny",
) -> dict:
    """Sends SIGKILLs and SIGTERMs.

    Args:
      folder: for the workdirs.
      kills, terms: number of each.
      steps: steps of each run, with a checkpoint every 5 and an evaluation every 15.
      seed: of the moments.
      workers: loader processes of each run that is killed.
      model: "tiny" has a width of 32 and float32 activations; "small" has a width of 256, bfloat16
        activations and patch dropout.
    """
    rng = random.Random(seed)
    keys = (f"train.steps={steps}", "checkpoint.every_steps=5", "log.every_steps=5",
            "eval.every_steps=15", f"train.compilation_cache={folder / 'cache'}", *MODELS[model])  # fmt: skip
    alone = folder / "alone"
    for workdir in (folder / "compiling", alone):
        start = time.perf_counter()
        Run(workdir, *keys).to_its_end()
        life = time.perf_counter() - start
    signals = [signal.SIGKILL] * kills + [signal.SIGTERM] * terms
    rng.shuffle(signals)
    keys += (f"data.workers={workers}",)
    marked = os.environ | {_MARK: str(folder)}
    ends, compared = [], []
    while signals:
        workdir = folder / f"killed{len(compared)}"
        while signals:
            run, trains = Run(workdir, *keys, environment=marked), rng.random() < 0.5
            if trains:
                wait_for_records(run, workdir, len(records(workdir)) + 1)
            time.sleep(rng.uniform(0, 0.6 if trains else life))
            end = stop(run, workdir, signals[-1])
            if not end:
                break  # the run had finished
            ends.append(end)
            signals.pop()
        Run(workdir, *keys, environment=marked).to_its_end()
        compared.append(compare(alone, workdir))
    identical = sum(result["identical"] for result in compared)
    losses, left = count_losses(ends), count_marked(folder)
    return {
        "ok": identical == len(compared) and not losses and not left,
        "kills": kills,
        "terms": terms,
        "steps_of_a_run": steps,
        "loader_processes": workers,
        "model": model,
        "processes_left": left,
        "runs_compared": len(compared),
        "runs_identical": identical,
        "while_a_checkpoint_was_written": sum(
            end["while_saving"] and end["resumed_at"] is not None for end in ends
        ),
        "before_the_first_step_of_a_process": sum(end["resumed_at"] is None for end in ends),
        "resumes_from_an_older_checkpoint": losses,
        "tracebacks_or_damage": sum(end["trouble"] for end in ends),
        "compared": compared,
        "ends": ends,
    }


def count_marked(folder: Path, seconds: float = 10) -> int:
    """Returns how many processes of the runs remain, waiting a limited time for them to end."""
    mark, deadline = f"{_MARK}={folder}\0".encode(), time.monotonic() + seconds
    while True:
        left = 0
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # the process has ended, or is another user's
                left += mark in environment.read_bytes()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def wait_for_records(run: Run, workdir: Path, count: int) -> None:
    while run.process.poll() is None and len(records(workdir)) < count:
        time.sleep(0.02)


def stop(run: Run, workdir: Path, signum: int) -> dict | None:
    """Sends a signal; returns what the run was doing, or None if it had finished."""
    run.process.send_signal(signal.SIGSTOP)  # keeps its state until the kill
    seen = {
        "signal": signal.Signals(signum).name,
        "workdir": workdir.name,
        "steps_recorded": len(records(workdir)),
        "last_finished_checkpoint": max(finished_checkpoints(workdir), default=0),
        "while_saving": is_saving(workdir),
    }
    if run.process.poll() is not None:
        return None
    run.process.send_signal(signum)
    run.process.send_signal(signal.SIGCONT)
    seen["exit_code"] = run.process.wait()
    said = run.said()
    saved = re.search(r"interrupted: step (\d+) is saved", said)
    seen["resumed_at"] = resumed_at(said) or (0 if "step 1 took" in said else None)
    if saved:
        seen["last_finished_checkpoint"] = int(saved[1])
    seen["trouble"] = "Traceback" in said or "damaged" in said
    return seen


def count_losses(ends: list[dict]) -> int:
    """Counts resumptions from a checkpoint older than the last finished one."""
    losses, last = 0, {}
    for end in ends:
        before = last.get(end["workdir"], 0)
        losses += end["resumed_at"] is not None and end["resumed_at"] < before
        last[end["workdir"]] = max(before, end["last_finished_checkpoint"])
    return losses
