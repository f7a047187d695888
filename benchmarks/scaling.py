"""Measures the CLIP train step on 1, 2, 4, ... devices: samples/s, collectives, memory and loss curves.

  python benchmarks/scaling.py --out=scaling.json                          # everything, most important first
  python benchmarks/scaling.py --models vit_h14 --devices 1 4 --out=scaling.json
  python benchmarks/scaling.py --losses --out=scaling_losses.json          # one global batch for all
  python benchmarks/scaling.py --at_once 8 --timeout 600                   # eight compile, run one by one
  python benchmarks/scaling.py --layouts alone data                        # each GPU by itself, all together
  python benchmarks/scaling.py --smoke                                     # tiny, on eight CPU devices

Every case runs in a separate process, so that a case that hangs or does not fit into memory ends alone. The
file is complete after every case; recorded cases are not run again. Weak scaling: the batch per device is
constant. Images and captions are random and on the devices: no loader is timed.

With the layout "alone" each device trains its own model at the same time, in its own process. Its row is that
of the slowest device: as fast as data parallelism would be if communication took no time.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

LAYOUTS = ["data", "fsdp", "alone"]
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels.timing import wait_for  # noqa: E402
from benchmarks.scaling_case import run_case  # noqa: E402
from benchmarks.scaling_tables import describe, table  # noqa: E402
from benchmarks.train_step import DEFAULT_OPTIMIZER, OPTIMIZERS  # noqa: E402
from swjax.safe_files import write_atomically  # noqa: E402
from swjax.training.log import environment  # noqa: E402


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.case:
        print(json.dumps(run_case(json.loads(args.case), args.turn)))
        return 0
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"rows": []}
    if args.at_once > 1:  # cases that compile together share the memory of the GPUs
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    known = [row["case"] for row in found["rows"]]
    for case, row in measured([case for case in cases(args) if case not in known], args):
        if "machine" in row:
            found["machine"] = row.pop("machine")
        found["rows"].append({"case": case} | row)
        found["command"] = environment.command()
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(args.out, json.dumps(found, indent=1) + "\n")
        print(describe(case, row), flush=True)
    print(table(found["rows"]))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_h14", "vit_b16"])
    parser.add_argument("--recipes", nargs="+", default=["switchback", "standard"])
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS[:2], choices=LAYOUTS)
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 4, 2])
    parser.add_argument("--batch", type=int, default=256, help="pairs per device")
    parser.add_argument("--remat", default="none", help="see model.remat in configs/common.py")
    parser.add_argument("--scan", action="store_true", help="scan over layers: compiles faster")
    parser.add_argument(
        "--reduce_dtypes",
        nargs="+",
        default=["float32"],
        choices=["float32", "bfloat16", "int8", "float8_e4m3fn"],
        help="dtypes in which devices all-reduce the gradients of kernels",
    )
    text = "1: all-reduces the gradients of all layers at once, after the backward pass"
    parser.add_argument(
        "--reduce_once", nargs="+", type=int, default=[1], choices=[0, 1], help=text
    )
    parser.add_argument(
        "--xla",
        nargs="*",
        action="append",
        metavar="OPTION=VALUE",
        help="compiler options for several devices, such as "
        "xla_gpu_disable_async_collectives=ALLCOLLECTIVES; again for another set, empty for none",
    )
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[DEFAULT_OPTIMIZER])
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="steps of the first timed run, a third of the second's; 200 in all with --losses",
    )
    parser.add_argument("--losses", action="store_true", help="records loss curves instead")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of --losses")
    parser.add_argument(
        "--at_once",
        type=int,
        default=1,
        help="number of cases that compile together; they run one by one",
    )
    parser.add_argument("--timeout", type=float, default=280, help="seconds per case")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--smoke", action="store_true", help="tiny models on eight CPU devices")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    text = "file to wait for before the first case is timed; FILE.compiled tells that it waits"
    parser.add_argument("--turn", type=Path, metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.losses and args.steps == parser.get_default("steps"):
        args.steps = 200
    if args.smoke:
        args.models, args.recipes, args.batch, args.steps = ["tiny"], ["switchback"], 4, 3
        args.devices = [1, 8] if args.devices == parser.get_default("devices") else args.devices
    return args


def cases(args) -> list[dict]:
    """Returns the cases to run; one device has no layout."""
    shared = {"steps": args.steps, "smoke": args.smoke}
    if args.losses:
        kinds = [{"losses": True} | ({"seed": seed} if seed else {}) for seed in args.seeds]
    else:
        optimizers = [{} if x == DEFAULT_OPTIMIZER else {"optimizer": x} for x in args.optimizers]
        kinds = [{"model": model} | each for model in args.models for each in optimizers]
        shared |= {"batch": args.batch, "remat": args.remat, "scan": args.scan}
    variants = [dict(option.split("=", 1) for option in options) for options in args.xla or [[]]]
    found = []
    for kind, devices in itertools.product(kinds, args.devices):
        for layout, recipe in itertools.product(args.layouts, args.recipes):
            layout = layout if devices > 1 else "one"
            for dtype, once, options in itertools.product(
                args.reduce_dtypes, args.reduce_once, variants
            ):
                case = kind | {"recipe": recipe, "layout": layout, "devices": devices} | shared
                if layout not in ("one", "alone"):  # these all-reduce nothing
                    case |= {"reduce_dtype": dtype} if dtype != "float32" else {}
                    case |= {"reduce_once": True} if once and layout == "data" else {}
                    case |= {"xla": options} if options else {}
                found += [case] * (case not in found)
    return found


def measured(todo: list[dict], args) -> Iterator[tuple[dict, dict]]:
    """Yields each case and its row. --at_once cases compile together, then run one after the other."""
    for first in range(0, len(todo), args.at_once):
        group = todo[first : first + args.at_once]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(group)) as pool:
            turns = [Path(folder) / str(i) for i in range(len(group))]
            seconds = [args.timeout] * len(group)
            jobs = list(map(partial(pool.submit, run), group, seconds, turns))
            wait_until_compiled(jobs, turns)
            if args.turn:
                wait_for(args.turn)
            for case, job, turn in zip(group, jobs, turns):
                turn.touch()
                yield case, job.result()


def wait_until_compiled(jobs: list[Future], turns: list[Path]) -> None:
    for job, turn in zip(jobs, turns):
        while not (job.done() or Path(f"{turn}.compiled").exists()):
            time.sleep(0.1)


def run(case: dict, seconds: float, turn: Path) -> dict:
    """Runs a case in one process, or in one for each device if they train alone; returns its row."""
    if case["layout"] != "alone":
        return in_a_process(case, seconds, turn)
    count = case["devices"]
    alone = [case | {"layout": "one", "devices": 1, "number": number} for number in range(count)]
    turns = [turn.with_name(f"{turn.name}.{number}") for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        jobs = list(map(partial(pool.submit, in_a_process), alone, [seconds] * count, turns))
        wait_until_compiled(jobs, turns)
        wait_for(turn)
        for of_one in turns:
            of_one.touch()
        rows = [job.result() for job in jobs]
    for row in rows:
        if "error" in row:
            return row
    slowest = max(rows, key=lambda row: row["step_ms"])
    each = {key: [row[key] for row in rows] for key in ("step_ms", "clocks") if key in slowest}
    return slowest | {"samples_per_s": count * slowest["samples_per_s"], "each": each}


def in_a_process(case: dict, seconds: float, turn: Path) -> dict:
    """Runs `run_case` in a process that sees the case's devices; returns its row, or {"error": one line}.

    It measures when the file `turn` exists: see `timing.wait_for`."""
    command = [sys.executable, __file__, f"--case={json.dumps(case)}", f"--turn={turn}"]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=variables(case), capture_output=True, text=True, timeout=seconds, cwd=ROOT
        )
    except subprocess.TimeoutExpired as late:
        told = (late.stderr or b"").decode(errors="replace")
        steps = re.findall(r"^-- (.*)", told, re.MULTILINE) or ["nothing yet"]
        return {"error": f"not done after {seconds:.0f} s; done: {', '.join(steps)}"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        told = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return {"error": environment.without_folders(told)[:300]}
    return json.loads(done.stdout.splitlines()[-1]) | {
        "seconds": round(time.monotonic() - start, 1)
    }


def variables(case: dict) -> dict:
    count = case["devices"]
    if case["smoke"]:
        return os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(64)))
    first = case.get("number", 0)
    devices = visible.split(",")[first : first + count]
    return os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
