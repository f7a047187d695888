"""Accuracy of recipes on the default task, over seeds: trains every combination and tabulates the scores.

Command:  python benchmarks/accuracy.py --recipes standard switchback --tasks mixed --seeds 0 1 2
With --out it writes a JSON file. A run that is finished is not trained again; with --minutes those that are
not are left out.

To tune, vary anything and look at the validation split only:
  python benchmarks/accuracy.py --val --tag lr3e-3 --set optimizer.learning_rate=3e-3
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
SCORES = ("zeroshot/emoji_{split}_top1", "{split}/image_to_text_R@10", "{split}/text_to_image_R@10")


def main():
    args = parse()
    split = "val" if args.val else "test"
    deadline = time.monotonic() + 60 * args.minutes
    runs = list(itertools.product(args.tasks, args.seeds, args.recipes))
    pins = SimpleQueue()
    for job in range(args.jobs):
        pins.put(sorted(os.sched_getaffinity(0))[job * args.cores : (job + 1) * args.cores])
    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(lambda run: train(args, pins, deadline, *run), runs))
    finished = {run: result for run, result in zip(runs, found, strict=True) if result}
    scores = defaultdict(dict)
    for (task, seed, recipe), result in finished.items():
        scores[task, recipe][seed] = result
    groups = [summary(split, *key, of_seeds) for key, of_seeds in scores.items()]
    for group in groups:
        cells = (
            f"{name} {mean:.4f} +- {spread:.4f}" for name, (mean, spread) in group["mean"].items()
        )
        print(f"{split} {args.tag} {group['task']} {group['recipe']}: {', '.join(cells)}")
    if args.out and finished:
        workdir = args.workdir / name(args, *next(iter(finished)))
        environment = (workdir / "env.txt").read_text().splitlines()
        result = {
            "command": ["python", *sys.argv],
            "environment": environment,
            "split": split,
            "groups": groups,
        }
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["mixed"])
    parser.add_argument("--recipes", nargs="+", default=["switchback"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--cores", type=int, default=0, help="pin each run to so many; 0: to none")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run lasts beyond these")
    parser.add_argument(
        "--val", action="store_true", help="report the validation split, not the test"
    )
    parser.add_argument("--tag", default="default", help="names the workdirs of these settings")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings")
    parser.add_argument("--workdir", type=Path, default=ROOT / "runs" / "accuracy")
    parser.add_argument("--out", help="JSON file")
    return parser.parse_args()


def name(args, task, seed, recipe) -> str:
    return f"{args.tag}-{task}-{recipe}-{seed}"


def train(args, pins, deadline, task, seed, recipe) -> dict | None:
    """Trains one run and returns its scores on the split that is asked for; None past the deadline."""
    workdir = args.workdir.absolute() / name(args, task, seed, recipe)
    command = [
        sys.executable,
        "train.py",
        f"--config=configs/openmoji.py:{task}",
        f"--workdir={workdir}",
        f"--config.model.recipe={recipe}",
        f"--config.train.seed={seed}",
        *(f"--config.{setting}" for setting in args.set),
    ]
    workdir.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    cores = pins.get()
    pinned = ["taskset", "-c", ",".join(map(str, cores)), *command] if cores else command
    left = deadline - time.monotonic()
    try:
        if left <= 0:
            return None
        with open(workdir / "stdout.txt", "w") as out:
            told = {"stdout": out, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": environment}
            timeout = None if math.isinf(left) else left
            subprocess.run(pinned, check=True, timeout=timeout, **told)
    except subprocess.TimeoutExpired:
        return None
    finally:
        pins.put(cores)
    if args.val:
        records = map(json.loads, open(workdir / "metrics.jsonl"))
        return [record for record in records if "val/image_to_text_R@10" in record][-1]
    return json.loads((workdir / "results.json").read_text())["scores"]


def summary(split, task, recipe, scores) -> dict:
    """Mean and sample standard deviation of each score over the seeds, and each seed's."""
    names = [score.format(split=split) for score in SCORES]
    values = {name: {seed: run[name] for seed, run in scores.items()} for name in names}
    mean = {
        name: (statistics.mean(v.values()), statistics.stdev(v.values()) if len(v) > 1 else 0.0)
        for name, v in values.items()
    }
    return {"task": task, "recipe": recipe, "mean": mean, "scores": values}


if __name__ == "__main__":
    main()
