"""Kills one of two processes of a run: the other must end within a minute with the reason; both resume."""

import os
import signal
import socket
import time
from pathlib import Path

from benchmarks.reliability.runs import Run, finished_checkpoints, records, resumed_at

MINUTE = 60.0


def measure(folder: Path, rounds: int = 2) -> dict:
    """Kills process 1, then process 0, and so on, of a run that resumes each time.

    Args:
      folder: for the workdir.
      rounds: number of kills.
    """
    workdir, ends = folder / "run", []
    for number in range(rounds):
        before = max(finished_checkpoints(workdir), default=0)
        both = pair(workdir, folder, "train.steps=1000000")
        while max(finished_checkpoints(workdir), default=0) < before + 20:
            time.sleep(0.1)
            if any(run.process.poll() is not None for run in both):
                raise RuntimeError("".join(run.said() for run in both)[-3000:])
        victim = 1 - number % 2
        both[victim].process.send_signal(signal.SIGKILL)
        start = time.perf_counter()
        code = both[1 - victim].process.wait(5 * MINUTE)
        seconds = time.perf_counter() - start
        said = [line for run in both for line in run.said().splitlines()]
        lines = [line for line in said if line.startswith("train.py: ")]
        ends.append({
            "killed": victim,
            "seconds_until_the_other_ended": round(seconds, 1),
            "exit_code": code,
            "said": lines,
            "lines_in_all": len(both[1 - victim].said().splitlines()),
            "went_on_at": resumed_at("\n".join(said)) or 0,
            "last_checkpoint_before": before,
        })  # fmt: skip
    last = max(finished_checkpoints(workdir))
    for run in pair(workdir, folder, f"train.steps={last + 20}"):
        run.to_its_end()
    steps = [record["step"] for record in records(workdir)]
    good = [end["exit_code"] == 3 and len(end["said"]) == 1 and
            end["seconds_until_the_other_ended"] < MINUTE and
            end["went_on_at"] >= end["last_checkpoint_before"] for end in ends]  # fmt: skip
    return {
        "ok": all(good) and steps == list(range(1, last + 21)),
        "ends": ends,
        "steps": len(steps),
    }


def pair(workdir: Path, folder: Path, *more: str) -> list[Run]:
    """Starts two processes of one run, with one device each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    keys = ("checkpoint.every_steps=20", "log.every_steps=5",
            f"train.compilation_cache={folder / 'cache'}", *more)  # fmt: skip
    environment = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    return [
        Run(workdir, *keys, name=f"run{rank}",
            environment=os.environ | environment | {"JAX_PROCESS_ID": str(rank)})
        for rank in range(2)
    ]  # fmt: skip
