"""Device time of a step from the profiler: collectives, other kernels, idle time. The clocks of GPUs."""

import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from swjax.diagnostics.device_time import device_time, read_trace


def profile(run: Callable, steps: int) -> dict:
    """Returns the device time in ms a step from a trace of `run()`; None without GPU kernels.

    Args:
      run: executes some steps and waits for them.
      steps: how many.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        devices = read_trace(folder) if jax.default_backend() == "gpu" else []
    if not devices:
        return {"collective_ms": None, "exposed_collective_ms": None}
    time = device_time(devices, steps)
    kinds = time.kinds.copy()
    return {
        "collective_ms": kinds.pop("collectives", 0.0),
        "exposed_collective_ms": time.exposed,
        "kernels_ms": kinds,
        "profiled_ms": time.elapsed,
        "idle_ms": time.idle,
        "idle_after_ms": time.idle_after,
    }


@contextmanager
def clocks() -> Iterator[dict[str, list]]:
    """Yields a dict that holds the mean clock (MHz) and power (W) of each visible GPU after the block.

    nvidia-smi reads both five times a second. Without it, or without a GPU, the dict stays empty.
    """
    found: dict[str, list] = {}
    if not shutil.which("nvidia-smi") or jax.default_backend() != "gpu":
        yield found
        return
    command = ["nvidia-smi", "--query-gpu=index,clocks.sm,power.draw", "--loop-ms=200"]
    command += ["--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += [f"--id={visible}"]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        reader.terminate()
        told, _ = reader.communicate()
    samples = re.findall(r"^(\d+), (\d+), ([\d.]+)$", told, re.MULTILINE)
    for name, column in (("mhz", 1), ("watts", 2)):
        found[name] = [
            round(statistics.fmean(float(s[column]) for s in samples if s[0] == index), 1)
            for index in sorted({sample[0] for sample in samples}, key=int)
        ]
