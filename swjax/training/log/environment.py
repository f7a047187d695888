"""Describes the environment of a run, for env.txt."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def describe() -> str:
    """The command, code, packages and devices of this process, one `name: value` per line."""
    devices = jax.devices()
    lines = {
        "command": shlex.join(["python", *_program(), *sys.argv[1:]]),
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "processes": jax.process_count(),
        "cpu": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores"
        if sys.platform == "linux"
        else _cpu(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    return "".join(f"{name}: {value}\n" for name, value in lines.items())


def command() -> str:
    """The command of this process without the user's folders, for records that others read."""
    return shlex.join(["python", *_program(), *map(without_folders, sys.argv[1:])])


def _program() -> list[str]:
    """The program that python runs: a script, or `-m` and a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec:
        return ["-m", spec.name.removesuffix(".__main__")]
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[3]
    return [str(script.relative_to(root)) if script.is_relative_to(root) else script.name]


def without_folders(text: str) -> str:
    """Replaces each absolute path in a text by its last component.

    >>> without_folders("--out=/home/someone/scaling.json")
    '--out=scaling.json'
    """
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)*([\w.+-]+)", r"\1", text)


def version(package: str) -> str:
    """Returns the version of a package, or says that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit of the checkout, with a mark if files have uncommitted changes."""
    git = ["git", "-C", str(Path(__file__).parent)]
    git += ["describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    named = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return named[1].strip() if named else platform.machine()
