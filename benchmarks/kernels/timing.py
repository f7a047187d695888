"""Times compiled functions on this device, compares their results, and records both."""

import argparse
import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swjax.diagnostics import device_time
from swjax.kernels import reference
from swjax.kernels.reference import QTensor
from swjax.training.log import environment

PACKAGES = ("jax", "jaxlib", "flax", "optax", "qwix", "triton", "jax-triton")
PACKAGES += ("torch", "torchao", "transformer-engine")
# Limit in bytes of the outputs, since those of all iterations are kept until the last has run.
MEMORY = 24 * 2**30
_keys = itertools.count()


class Timing(NamedTuple):
    """The time of one call.

    Attributes:
      us: median microseconds; on a GPU the sum of kernel times, without gaps between kernels.
      clock: "kernels", from CUPTI, or "wall".
      kernels: {name: median microseconds}; empty if only wall-clock times are available.
    """

    us: float
    clock: str
    kernels: dict[str, float]


def random(*shape: int, dtype="bfloat16", scale: float = 1.0) -> jax.Array:
    """Returns new normal values at every call. With zeros or repeated values a GPU draws less power and runs
    at a higher clock."""
    values = scale * jax.random.normal(jax.random.key(next(_keys)), shape)
    return jax.block_until_ready(values.astype(dtype))


def compiled(function: Callable, *arrays):
    """Returns `function` compiled for these arrays."""
    return jax.jit(function).lower(*arrays).compile()


def measure(function, *arrays, iterations: int = 12) -> Timing:
    """Times a compiled function after one warm-up call."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(function(*arrays))))
    iterations = max(3, min(iterations, MEMORY // max(size, 1)))
    if jax.default_backend() != "gpu":
        return Timing(wall(function, *arrays, iterations=iterations), "wall", {})
    runs = _launches(function, arrays, iterations)
    if runs is None:
        return Timing(wall(function, *arrays, iterations=iterations), "wall", {})
    kernels: dict[str, float] = {}
    for launches in zip(*runs):
        name = launches[0][0]
        median = statistics.median(ms for _, ms in launches)
        kernels[name] = kernels.get(name, 0.0) + 1e3 * median
    total = statistics.median(sum(ms for _, ms in launches) for launches in runs)
    return Timing(1e3 * total, "kernels", kernels)


def _launches(function, arrays, iterations):
    """Returns (kernel, milliseconds) of every run from CUPTI; None if CUPTI fails."""
    from jax.experimental.mosaic.gpu import profiler

    run = profiler.measure(function, iterations=iterations, aggregate=False)
    for _ in range(2):  # CUPTI sometimes misses a launch
        try:
            return run(*arrays)[1]
        except RuntimeError as error:
            message = str(error)
    print(f"timed by the clock on the wall, for CUPTI says: {message}", file=sys.stderr)
    return None


def launches(run: Callable) -> list[tuple[str, float]]:
    """Returns (kernel, milliseconds) of all launches of `run()` on this GPU, from CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        timings = cupti._cupti_get_timings(True)  # also detaches CUPTI from the process
    return timings


def wall(function, *arrays, iterations: int = 12) -> float:
    """Returns microseconds per call of queued calls, including gaps between kernels."""
    jax.block_until_ready(function(*arrays))
    start = time.perf_counter()
    for _ in range(iterations):
        out = function(*arrays)
    jax.block_until_ready(out)
    return 1e6 * (time.perf_counter() - start) / iterations


def seconds_per_call(run: Callable, at_least: float) -> float:
    """Times consecutive calls after two warm-up calls: three at least, since some take a second."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    in_a_row = max(3, min(8, math.ceil(at_least / (time.perf_counter() - start))))
    start, calls = time.perf_counter(), 0
    while True:
        for _ in range(in_a_row):
            out = run()
        jax.block_until_ready(out)
        calls += in_a_row
        if (elapsed := time.perf_counter() - start) > at_least:
            return elapsed / calls


def repeated(run: Callable, at_least: float) -> dict:
    """Returns the median of three measurements of `seconds_per_call` in ms, and each of them."""
    found = [1e3 * seconds_per_call(run, at_least) for _ in range(3)]
    return {"ms": statistics.median(found), "ms_of_repeats": [round(ms, 2) for ms in found]}


def by_kernel(launches: list[tuple[str, float]]) -> dict[str, dict]:
    """Returns {"kernels_ms": {kind: ms}, "top_kernels_ms": {kernel: [ms, launches] of the 25 slowest}}."""
    sums: dict[str, list] = {}
    for name, ms in launches:
        entry = sums.setdefault(name[:80], [0.0, 0])
        entry[0], entry[1] = round(entry[0] + ms, 3), entry[1] + 1
    kinds = device_time.sum_by_kind(launches)
    return {
        "kernels_ms": {kind: round(ms, 3) for kind, ms in kinds.items()},
        "top_kernels_ms": dict(sorted(sums.items(), key=lambda item: -item[1][0])[:25]),
    }


def closeness(value, specification) -> dict:
    """Compares a result with the specification's: {"snr_db": of its worst array, "identical": bit for bit}.

    QTensors are dequantized. The ratio is at most 200 dB, and NaN if a value is NaN.
    """
    ratios, identical = _closeness(value, specification)
    return {"snr_db": round(min(map(float, ratios)), 1), "identical": bool(identical)}


@jax.jit
def _closeness(value, specification):
    identical = jax.tree.map(
        lambda a, b: jnp.array_equal(a, b.astype(a.dtype)), value, specification
    )

    def ratio(a, b):
        a, b = (
            reference.dequantize(t) if isinstance(t, QTensor) else t.astype(jnp.float32)
            for t in (a, b)
        )
        noise, signal = jnp.sum((a - b) ** 2), jnp.sum(b**2)
        return 10 * jnp.log10(signal / jnp.maximum(noise, 1e-20 * signal))

    ratios = jax.tree.map(ratio, value, specification, is_leaf=lambda t: isinstance(t, QTensor))
    return jax.tree.leaves(ratios), jnp.all(jnp.stack(jax.tree.leaves(identical)))


def memory_gib(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Returns XLA's plan for the memory of a device: of temporary arrays, and with the arguments."""
    memory = compiled.memory_analysis()
    sizes = (memory.temp_size_in_bytes, memory.argument_size_in_bytes)
    return {"memory_gib": sum(sizes) / 2**30, "temporaries_gib": sizes[0] / 2**30}


def parser(doc: str, seconds: float) -> argparse.ArgumentParser:
    """Returns a parser of the flags that all programs have; --help begins with the program's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "no case starts after this"
    parser.add_argument("--seconds", type=float, default=seconds, help=text)
    parser.add_argument("--smoke", action="store_true", help="a tiny case, on any machine")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every row")
    return parser


def machine() -> dict:
    """Returns the device, command, date and versions of a measurement."""
    return {
        "device": jax.devices()[0].device_kind,
        "commit": environment.commit(),
        "command": environment.command(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {package: environment.version(package) for package in PACKAGES},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


class Records:
    """Rows of results, written to a file after each row, within a time limit."""

    def __init__(self, out: Path | None, seconds: float):
        self.out, self.deadline = out, time.monotonic() + seconds
        self.machine, self.rows = machine(), []

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def add(self, **row) -> dict:
        """Appends a rounded row and rewrites the file."""
        row = {
            key: _round(value) if isinstance(value, float) else value for key, value in row.items()
        }
        self.rows.append(row)
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            partial = self.out.with_suffix(".partial")
            partial.write_text(json.dumps(self.machine | {"rows": self.rows}, indent=1) + "\n")
            partial.replace(self.out)
        print(f"{self.seconds_left:6.0f} s left ", describe(row), flush=True)
        return row


def add_rows(records: Records, command: list[str], seconds: float):
    """Adds the rows that another process prints as JSON lines; its crash or hang does not end this one."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(command, stdout=output, timeout=seconds)
            error = done.returncode and f"ended with code {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            error = f"took longer than {expired.timeout:.0f} s"
        output.seek(0)
        for line in output.read().splitlines():
            if line.startswith("{"):
                records.add(**json.loads(line))
        if error:
            records.add(op="torch", kind="torch", implementation="torch", error=error)


def describe(row: dict) -> str:
    """Formats a row on one line."""
    return "  ".join(
        f"{key} {value}"
        for key, value in row.items()
        if value is not None and not isinstance(value, dict)
    )


def table(rows: list[dict], columns: dict[str, int]) -> str:
    """Formats rows as a table; `columns` has names and widths, negative for left-aligned ones."""

    def line(cells):
        return "  ".join(
            f"{'' if cell is None else cell!s:{'<' if width < 0 else '>'}{abs(width)}}"
            for cell, width in zip(cells, columns.values())
        ).rstrip()

    return "\n".join([line(columns), *(line(map(row.get, columns)) for row in rows)])


def _round(value: float) -> float | None:
    """Rounds to four digits; NaN and infinity become None, since JSON has neither."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def wait_for(turn: Path) -> None:
    """Creates the file TURN.compiled, then waits until the file TURN exists.

    Thus several benchmarks compile at once, and their parent process lets them measure one by one.
    """
    turn.with_name(f"{turn.name}.compiled").touch()
    while not turn.exists():
        time.sleep(0.1)
