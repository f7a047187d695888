"""A run of 10,000 steps: memory, open files and threads must not grow, and slow steps need a reason."""

import collections
import json
import os
import statistics
import time
from pathlib import Path

from benchmarks.reliability.runs import Run

# Memory growth from the third fifth of the run to the last, after the allocator's pools have filled.
MOST_GROWTH = 0.03
# Parts that do a step's own work: a long time there says where the step was slow, not why.
UNEXPLAINED = {"dispatch", "device"}


def measure(folder: Path, steps: int = 10_000) -> dict:
    """Trains a long run, which saves every 100 steps and evaluates every 2,500.

    Args:
      folder: for the workdir.
      steps: number of steps.
    """
    workdir = folder / "soak"
    # With the smallest batch a step takes 12 ms, a third of the cores' jitter.
    run = Run(workdir, f"train.steps={steps}", "checkpoint.every_steps=100", "log.every_steps=20",
              "train.batch_size=32",
              f"eval.every_steps={max(steps // 4, 1)}", "log.tensorboard=true",
              f"train.compilation_cache={folder / 'cache'}")  # fmt: skip
    log, samples = workdir / "metrics.jsonl", []
    while run.process.poll() is None:
        time.sleep(1)
        if step := last_step(log):
            samples += [sample(run.process.pid, step)]
    run.to_its_end()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    samples = [x for x in samples if x]
    early, late = (
        [x for x in samples if low * steps <= x["step"] < high * steps]
        for low, high in ((0.4, 0.6), (0.8, 1.0))
    )
    # There are more files and threads while a checkpoint is written, which may be half of the time.
    kinds = {"MiB": statistics.median, "files": min, "threads": min}
    change = {name: [kind(x[name] for x in part) for part in (early, late)]
              for name, kind in kinds.items()}  # fmt: skip
    seconds = sorted(record["perf/seconds"] for record in records)
    reasons = collections.Counter(r["perf/slow"] for r in records if "perf/slow" in r)
    growth = change["MiB"][1] / change["MiB"][0] - 1
    return {
        "ok": growth < MOST_GROWTH
        and change["files"][1] <= change["files"][0]
        and not any(UNEXPLAINED.issuperset(reason.split(", ")) for reason in reasons)
        and [record["step"] for record in records] == list(range(1, steps + 1)),
        "steps": steps,
        "memory_growth": round(growth, 4),
        "third_and_last_fifth": change,
        "step_seconds": {
            q: seconds[min(int(float(q) * steps), steps - 1)]
            for q in ("0.5", "0.9", "0.99", "0.999", "1")
        },
        "slow_steps": sum(reasons.values()),
        "reasons": dict(reasons),
        "load_average": os.getloadavg(),
        "samples": samples[:: max(len(samples) // 100, 1)],
    }


def last_step(log: Path) -> int | None:
    """Returns the step of the last record."""
    if not log.exists():
        return None
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        lines = [line for line in file.read().split(b"\n") if line.startswith(b'{"step"')]
    return int(lines[-1].split(b",")[0].split(b":")[1]) if lines else None


def sample(pid: int, step: int) -> dict | None:
    """Returns the memory, files and threads of the process; None if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        files = len(os.listdir(f"/proc/{pid}/fd"))
        return {"step": step, "MiB": int(status["VmRSS"].split()[0]) / 1024, "files": files,
                "threads": int(status["Threads"])}  # fmt: skip
    except (OSError, KeyError):
        return None
