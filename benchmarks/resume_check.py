"""Kills a run with SIGKILL at random points, resumes it each time, and compares it with one left alone.

  python benchmarks/resume_check.py --points=5 --out=benchmarks/results/resume_check.json \\
      -- --config=configs/openmoji.py --config.train.steps=60 --config.checkpoint.every_steps=10

Everything after `--` goes to train.py. The two runs must agree in every bit of the last checkpoint
(parameters, moments, averages) and in every metric of every step but times; exits with 1 otherwise.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Runs the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=5, help="how often the run is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the kill points")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("flags", nargs="+", help="of train.py, after --")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        alone, killed = Path(temporary, "alone"), Path(temporary, "killed")
        start(args.flags, alone).wait()
        steps = len(records(alone))
        kills = [
            kill_at(start(args.flags, killed), killed, step, delay=rng.uniform(0, 0.5))
            for step in sorted(rng.sample(range(1, steps), args.points))
        ]
        start(args.flags, killed).wait()
        result = {"steps": steps, "killed_after_step": kills} | compare(alone, killed)
        ran_on = (alone / "env.txt").read_text().splitlines()
        result["flags"] = args.flags
        result["machine"] = [line for line in ran_on if not line.startswith("command:")]
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 0 if result["identical"] else 1


def start(flags: list[str], workdir: Path) -> subprocess.Popen:
    """Starts train.py in a workdir, with its output in output.txt there."""
    workdir.mkdir(exist_ok=True)
    with open(workdir / "output.txt", "a") as output:
        command = [sys.executable, "train.py", *flags, f"--workdir={workdir}"]
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)


def kill_at(process: subprocess.Popen, workdir: Path, step: int, delay: float) -> int:
    """Kills a run some seconds after it has recorded a step; returns the last step it recorded."""
    while process.poll() is None and len(records(workdir)) < step:
        time.sleep(0.05)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(records(workdir))


def records(workdir: Path) -> list[dict]:
    """The complete lines of metrics.jsonl, without times."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    loaded = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [{k: v for k, v in r.items() if k != "time" and "perf/" not in k} for r in loaded]


def compare(alone: Path, killed: Path) -> dict:
    """Counts what differs between two finished runs."""
    a, b = (checkpoint(workdir) for workdir in (alone, killed))
    arrays = sorted(name for name in a.keys() | b.keys() if not same_bits(a.get(name), b.get(name)))
    left, right = records(alone), records(killed)
    steps = [x["step"] for x, y in zip(left, right, strict=False) if x != y]
    identical = not arrays and not steps and len(left) == len(right) and len(left) > 0
    return {
        "identical": identical,
        "arrays": len(a),
        "arrays_that_differ": arrays,
        "metrics_per_step": len(left[-1]) - 1 if left else 0,
        "steps_that_differ": steps,
        "steps_recorded": [len(left), len(right)],
    }


def checkpoint(workdir: Path) -> dict[str, np.ndarray]:
    """The arrays of the last checkpoint, by path."""
    last = max((workdir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(last / "state")
    return dict(flatten(tree, ""))


def flatten(tree, prefix: str):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            yield from flatten(value, f"{prefix}{key}/")
        elif value is not None:
            yield f"{prefix}{key}", np.asarray(value)


def same_bits(a, b) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.tobytes() == b.tobytes()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
