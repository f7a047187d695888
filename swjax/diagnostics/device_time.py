"""Device time by kind of kernel, read from a trace of `jax.profiler`.

    with jax.profiler.trace(folder):
        jax.block_until_ready(train_steps())
    print(device_time(read_trace(folder), steps=5).table())

Kernels are classified by name. On GPUs every kernel of every stream is an event. On CPUs XLA records its
operations, and names a fusion after one or two of its operations.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

# Kinds of kernels by name; the first match applies.
KINDS = {
    "collectives": r"nccl|all[-_](reduce|gather|to[-_]all)|reduce[-_]scatter|collective|psum|ppermute",
    "attention": r"cudnn|flash|fmha|sdpa|attention",
    "quantized products": r"matmul_(sum_)?kernel|_matmul",
    "weight gradients": r"weight_gradient",
    "quantizers and norms": r"_quantize_\w+_kernel|_(gelu|gated|norm)_\w*kernel|layer_norm",
    "products": r"nvjet|gemm|cutlass|xmma|cublas|splitk|^dot|ynn_fusion|^convolution",
    "copies": r"memcpy|memset",
}
OTHER = "other"  # elementwise operations and reductions, in XLA's fusions
_LONGEST = 8  # number of listed kernels, and of listed kernels before idle time


class Kernel(NamedTuple):
    """One execution on a device.

    Attributes:
      name: name of the kernel or the operation.
      start: start time in ns.
      end: end time in ns.
    """

    name: str
    start: float
    end: float


class DeviceTime(NamedTuple):
    """Device time by part, in ms per step, averaged over all devices.

    Attributes:
      devices: number of devices.
      elapsed: time from the start of the first kernel to the end of the last.
      kinds: time of each kind in `KINDS`, or `OTHER`, longest first. Kernels that run at the same time count
        in full, so the sum may exceed `elapsed`.
      exposed: time of collectives while no other kernel runs.
      idle: time without a running kernel.
      idle_after: largest parts of `idle`, by the name of the kernel that ended last.
      longest: time of the kernels with the longest total time, by name.
    """

    devices: int
    elapsed: float
    kinds: dict[str, float]
    exposed: float
    idle: float
    idle_after: dict[str, float]
    longest: dict[str, float]

    def table(self) -> str:
        """Formats the time of each kind and of the longest kernels as lines of text.

        >>> kernels = [Kernel("ncclAllReduce", 0, 4e6), Kernel("nvjet", 2e6, 6e6), Kernel("sum", 7e6, 8e6)]
        >>> print(device_time([kernels], steps=1).table())
                                    ms/step   share
          collectives                 4.000   50.0%  (2.000 while no other kernel runs)
          products                    4.000   50.0%
          other                       1.000   12.5%
          idle                        1.000   12.5%
          elapsed                     8.000  100.0%  (kernels that overlap count in full)
        longest kernels:
          ncclAllReduce               4.000   50.0%
          nvjet                       4.000   50.0%
          sum                         1.000   12.5%
        """
        notes = {"collectives": f"({self.exposed:.3f} while no other kernel runs)"}
        if sum(self.kinds.values()) + self.idle > 1.001 * self.elapsed:
            notes["elapsed"] = "(kernels that overlap count in full)"
        parts = self.kinds | {"idle": self.idle, "elapsed": self.elapsed}
        lines = [f"{'ms/step':>35}   share", *(self._line(*part, notes) for part in parts.items())]
        return "\n".join(
            [*lines, "longest kernels:", *map(self._line, *zip(*self.longest.items()))]
        )

    def _line(self, name: str, ms: float, notes: dict[str, str] | None = None) -> str:
        share = ms / self.elapsed if self.elapsed else 0.0
        return f"  {name[:24]:24} {ms:8.3f}  {share:6.1%}  {(notes or {}).get(name, '')}".rstrip()


def kind_of(name: str) -> str:
    """The kind of a kernel: one of `KINDS`, or `OTHER`.

    >>> kind_of("nvjet_sm90_tst_128x160"), kind_of("loop_add_fusion_94")
    ('products', 'other')
    """
    return next((kind for kind, names in KINDS.items() if re.search(names, name, re.I)), OTHER)


def sum_by_kind(launches: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums the times of kernels by kind, longest first.

    Args:
      launches: (name of the kernel, time) pairs, in any unit.

    >>> sum_by_kind([("nvjet", 1.0), ("loop_add_fusion_94", 3.0), ("nvjet", 1.0)])
    {'other': 3.0, 'products': 2.0}
    """
    return _sums((kind_of(name), time) for name, time in launches)


def _sums(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums the times of each name, largest first."""
    sums: dict[str, float] = {}
    for name, time in times:
        sums[name] = sums.get(name, 0.0) + time
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def read_trace(folder: str | Path) -> list[list[Kernel]]:
    """Reads the kernels of each device from the newest trace in a folder.

    Args:
      folder: the folder given to `jax.profiler.trace` or `start_trace`.

    Returns:
      A list per device, ordered by start time; [] if the folder has no trace, or one without device events.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: the trace is damaged.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"folder {str(folder)!r} does not exist and has no trace: pass the folder of jax.profiler.trace"
        )
    traces = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        return []
    try:
        planes = list(jax.profiler.ProfileData.from_file(str(traces[-1])).planes)
    except RuntimeError as error:
        raise ValueError(
            f"trace {str(traces[-1])!r} must be complete, got {error}: remove it, or trace again"
        ) from error
    devices = [_of_gpu(plane) for plane in planes if "/device:GPU" in plane.name]
    devices = [kernels for kernels in devices if kernels]
    return devices or _of_cpus(plane for plane in planes if plane.name == "/host:CPU")


def _of_gpu(plane: Any) -> list[Kernel]:
    # The other lines repeat the events of the streams by operation and by module.
    streams = (line for line in plane.lines if line.name.startswith("Stream"))
    return _in_order(event for line in streams for event in line.events)


def _of_cpus(planes: Iterable[Any]) -> list[list[Kernel]]:
    """The operations of XLA on each CPU device, from all of its threads."""
    devices: dict[int, list[Kernel]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by the first use of `stats`
        for line in (line for plane in planes for line in plane.lines):
            operations: dict[int, list[Any]] = {}
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    operations.setdefault(stats.get("device_ordinal", 0), []).append(event)
            for device, events in operations.items():
                devices.setdefault(device, []).extend(_leaves(_in_order(events)))
    return [sorted(devices[device], key=lambda kernel: kernel.start) for device in sorted(devices)]


def _in_order(events: Iterable[Any]) -> list[Kernel]:
    """Sorts by start time; kernels with equal start by decreasing length."""
    kernels = [Kernel(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in events]
    return sorted(kernels, key=lambda kernel: (kernel.start, -kernel.end))


def _leaves(kernels: list[Kernel]) -> list[Kernel]:
    """Removes operations, such as loops, that contain the next operation.

    >>> [kernel.name for kernel in _leaves([Kernel("while", 0, 9), Kernel("dot", 1, 5)])]
    ['dot']
    """
    later = [*kernels[1:], Kernel("", float("inf"), float("inf"))]
    return [
        kernel for kernel, after in zip(kernels, later, strict=True) if after.start >= kernel.end
    ]


def device_time(devices: Sequence[Sequence[Kernel]], steps: int) -> DeviceTime:
    """Sums the time of kernels by kind.

    Args:
      devices: kernels of each device, from `read_trace`.
      steps: number of training steps in the trace, at least 1.

    Raises:
      ValueError: no device has a kernel, or steps is below 1.

    >>> kernels = [Kernel("ncclSend", 0, 4e6), Kernel("_gelu_kernel", 1e6, 2e6), Kernel("nvjet", 2e6, 3e6)]
    >>> time = device_time([kernels, kernels], steps=1)
    >>> time.kinds, time.exposed
    ({'collectives': 4.0, 'quantizers and norms': 1.0, 'products': 1.0}, 2.0)
    """
    if steps < 1:
        raise ValueError(
            f"steps must be at least 1, got {steps}: pass the number of steps in the trace"
        )
    if not any(devices):
        raise ValueError(f"a trace of {len(devices)} devices has no kernels: trace steps that run")
    elapsed = exposed = 0.0
    for kernels in filter(None, devices):
        work = [(k.start, k.end) for k in kernels if kind_of(k.name) != "collectives"]
        every = [(k.start, k.end) for k in kernels]
        exposed += covered(every) - covered(work)
        elapsed += max(end for _, end in every) - min(start for start, _ in every)
    names = _sums((k.name, k.end - k.start) for kernels in devices for k in kernels)
    idle = _sums(gap for kernels in devices for gap in idle_after(kernels).items())

    def ms(ns: float) -> float:
        return round(ns / 1e6 / steps / len(devices), 3)

    def longest(times: dict[str, float]) -> dict[str, float]:
        return {name: ms(ns) for name, ns in list(times.items())[:_LONGEST]}

    return DeviceTime(
        devices=len(devices),
        elapsed=ms(elapsed),
        kinds={kind: ms(ns) for kind, ns in sum_by_kind(names.items()).items()},
        exposed=ms(exposed),
        idle=ms(sum(idle.values())),
        idle_after=longest(idle),
        longest=longest(names),
    )


def idle_after(kernels: Iterable[Kernel]) -> dict[str, float]:
    """The idle time of a device in ns, by the name of the kernel that ended last.

    >>> idle_after([Kernel("a", 0, 2), Kernel("b", 1, 4), Kernel("c", 5, 6), Kernel("b", 8, 9)])
    {'c': 2.0, 'b': 1.0}
    """
    gaps: list[tuple[str, float]] = []
    last, until = "", float("inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel.start):
        if start > until:
            gaps.append((last, start - until))
        if not last or end > until:
            last, until = name, end
    return _sums(gaps)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end).

    >>> covered([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
