"""Measures what docs/reliability.md states, and writes it as JSON.

  python -m benchmarks.reliability kills --out=benchmarks/results/reliability_kills.json
  python -m benchmarks.reliability disk | fuzz | soak | peers ...

Trains a tiny model on a CPU, unless JAX_PLATFORMS names another platform. Exits with 1 if a check fails.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also for the processes of the runs

import argparse
import importlib
import inspect
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

NAMES = ("kills", "disk", "fuzz", "soak", "peers")


def main(argv: list[str]) -> int:
    """Runs one measurement; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.reliability", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name in NAMES:
        measure = importlib.import_module(f"benchmarks.reliability.{name}").measure
        command = commands.add_parser(name, help=measure.__doc__.splitlines()[0])
        command.add_argument("--out", type=Path, help="JSON file for the result")
        for option, parameter in list(inspect.signature(measure).parameters.items())[1:]:
            choices = get_args(parameter.annotation)  # of a Literal
            kind = type(parameter.default)
            command.add_argument(
                f"--{option}", type=kind, choices=choices or None, default=parameter.default
            )
    args = vars(parser.parse_args(argv))
    name, out = args.pop("name"), args.pop("out")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        measure = importlib.import_module(f"benchmarks.reliability.{name}").measure
        result = measure(Path(folder), **args)
    result = {"ok": result.pop("ok")} | result
    result["seconds"] = round(time.perf_counter() - start)
    result["machine"] = machine()
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}, indent=2))
    return 0 if result["ok"] else 1


def machine() -> dict:
    """Returns the machine, versions and date of this measurement."""
    import jax

    from swjax.training.log import environment

    packages = {name: environment.version(name) for name in environment.PACKAGES}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    cores = len(os.sched_getaffinity(0))
    device = jax.devices()[0].device_kind
    return {
        "date": date,
        "device": device,
        "cores": cores,
        "python": platform.python_version(),
        **packages,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
