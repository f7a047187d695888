"""Device time of a step from the profiler: collectives, other kernels, idle time."""

import tempfile
from collections.abc import Callable

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
        "idle_ms": time.idle,
        "idle_after_ms": time.idle_after,
    }
