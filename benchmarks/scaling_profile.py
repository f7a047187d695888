"""What the devices do in a step, from the profiler: collectives, other kernels, and nothing."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

COLLECTIVE = re.compile(r"nccl", re.IGNORECASE)


def profile(run: Callable, steps: int) -> dict:
    """`time_of_kernels`, from the profiler's trace (CUPTI); None where it has no kernels, as on CPUs."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = list(Path(folder).rglob("*.xplane.pb"))
        planes = [p for f in files for p in jax.profiler.ProfileData.from_file(str(f)).planes]
        found = [kernels(plane) for plane in planes if "/device:GPU" in plane.name]
    found = [of_device for of_device in found if of_device]
    if not found:
        return {"collective_ms": None, "exposed_collective_ms": None}
    return time_of_kernels(found, steps)


def time_of_kernels(devices: list[list[tuple]], steps: int) -> dict:
    """Milliseconds a step, the mean of all devices: of NCCL's kernels, of those while no other runs, of each
    sort of the others, and of nothing between the first kernel and the last, by what ran before.

    >>> device = [("ncclDevKernel", 0, 4e6), ("_gelu_kernel", 1e6, 2e6), ("nvjet", 2e6, 3e6)]
    >>> for key, ms in time_of_kernels([device, device], steps=1).items():
    ...     print(key, ms)
    collective_ms 4.0
    exposed_collective_ms 2.0
    kernels_ms {'quantizers, LayerNorm, GELU': 1.0, '16-bit products': 1.0}
    idle_ms 0.0
    idle_after_ms {}
    """
    from benchmarks.train_step import by_sort

    talking, exposed, others, idle = 0.0, 0.0, [], Counter()
    each = 1 / len(devices) / steps / 1e6
    for device in devices:
        talk = [span for name, *span in device if COLLECTIVE.search(name)]
        rest = [event for event in device if not COLLECTIVE.search(event[0])]
        work = [span for _, *span in rest]
        talking += covered(talk)
        exposed += covered(talk + work) - covered(work)
        others += [(name, (end - start) * each) for name, start, end in rest]
        idle.update(idle_after(device))
    return {
        "collective_ms": round(talking * each, 3),
        "exposed_collective_ms": round(exposed * each, 3),
        "kernels_ms": by_sort(others),
        "idle_ms": round(idle.total() * each, 3),
        "idle_after_ms": {name: round(ns * each, 3) for name, ns in idle.most_common(8)},
    }


def idle_after(events: list[tuple]) -> Counter:
    """How long a device ran nothing, by the kernel that had ended last.

    >>> idle_after([("a", 0, 2), ("b", 1, 4), ("c", 5, 6), ("b", 8, 9)])
    Counter({'c': 2, 'b': 1})
    """
    found, last, until = Counter(), None, float("inf")
    for name, start, end in sorted(events, key=lambda event: event[1]):
        if start > until:
            found[last] += start - until
        if last is None or end > until:
            last, until = name, end
    return found


def kernels(plane) -> list[tuple[str, float, float]]:
    """(name, start, end) in ns of everything that a device runs."""
    return [
        (event.name, event.start_ns, event.start_ns + event.duration_ns)
        for line in plane.lines
        if line.name.startswith("Stream")  # others tell the same again, by operation or module
        for event in line.events
    ]


def covered(spans: list) -> float:
    """The length of the union of intervals.

    >>> covered([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
