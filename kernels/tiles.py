"""The tables of tile sizes that were measured on GPUs, and the tiles of kernels on rows.

A tuned table is a JSON file in `tuned/`, named after the device; `python -m benchmarks.kernels.tune` writes
it. A GPU without a table uses the one that `TABLES` names for its compute capability. A rule applies to
shapes that have no entry: see also the `tiles` in the folders of other operations.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax

from swjax.kernels import targets


@dataclass(frozen=True)
class RowTile:
    """The tile sizes of a row kernel.

    Attributes:
      rows: rows that a program processes at a time.
      chunk: columns per piece of a row, a power of two.
      warps: warps of 32 threads per program.
      stages: pipeline stages of a kernel whose programs loop over blocks: with 2, the next block is copied to
        shared memory while the current block is computed.
    """

    rows: int
    chunk: int
    warps: int
    stages: int = 1


# Columns of the longest row that fits into the registers of a program.
WIDEST_ROW = 16384

# {compute capability: the device whose table serves GPUs of this capability without a table}.
TABLES = {"9.0": "NVIDIA H200"}

# A weight of this size has enough tiles for a GPU, so one kernel for several weight gradients gains nothing.
LARGE_WEIGHT = 2048 * 2048

# Shortest side of the operands of a symmetric product for which the triangle saves a third of the tiles.
SMALLEST_SYMMETRIC = 384


def row_tile(producer: str, width: int) -> RowTile:
    """The tile of a row kernel.

    Args:
      producer: "none" (the quantizer alone), or the operation that is fused with the quantizer.
      width: columns per row.

    >>> row_rule(1280)
    RowTile(rows=1, chunk=256, warps=1, stages=1)
    """
    entry = tuned("rows", producer, width)
    return RowTile(**entry) if entry else row_rule(width)


def row_rule(width: int) -> RowTile:
    """One row per program: sums need no exchange between rows, and small programs hide each other's latency.
    Chunks are the longest with less than an eighth of the lanes idle and about 40 columns per thread, so that
    several loads are in flight. Long rows have longer chunks or fewer threads, so that a load has 16 bytes,
    which are 8 columns of 16 bits."""
    threads = max(power_above(width // 40), 32)
    chunks = (4096, 2048, 1024, 512, 256, 128)
    fit = (c for c in chunks if c <= max(1024, 8 * threads) and -width % c * 8 <= width)
    chunk = next(fit, 64)
    return RowTile(rows=1, chunk=chunk, warps=min(threads, max(chunk // 8, 128)) // 32)


def row_programs(tile: RowTile, sums: int = 1) -> int:
    """Number of programs of a kernel that also sums columns: enough to fill every multiprocessor, but few,
    because each program writes `sums` rows of partial sums."""
    return multiprocessors() * min(16, 32 // tile.warps) // sums


def multiprocessors() -> int:
    """Multiprocessors of the GPU that the program is for; without a GPU those of an H200."""
    return targets.current().core_count


def compute_capability() -> tuple[int, int]:
    """The compute capability of the program's GPU; without a GPU that of Hopper, on AMD GPUs (0, 0)."""
    capability = targets.current().compute_capability or "9.0"
    if "." not in capability:
        return 0, 0
    major, minor = capability.split(".")
    return int(major), int(minor)


def preferred_implementation(operation: str, key: str) -> str | None:
    """The fastest implementation for a shape on this device, or None if none is known.

    `key`: see `dispatch.shape_key`.
    """
    return tuned("implementation", operation, key) or rule_of_implementation(operation, key)


def rule_of_implementation(operation: str, key: str) -> str | None:
    """The implementation of a shape without a measurement; None for the first that can run.

    cuBLAS, which XLA calls, computes the weight gradient of most layers faster than our kernel. For several
    small weights of one input our kernel is faster. The triangle of a small matrix has most of its tiles.
    """
    if operation == "weight_gradient":
        return "xla"
    if operation.endswith("_group"):
        n, k, _ = map(int, key.split("x"))
        return "xla" if n * k >= LARGE_WEIGHT else None
    if operation == "symmetric_product":
        return "xla" if min(map(int, key.split("x"))) < SMALLEST_SYMMETRIC else None
    return None


def tuned(*path: object) -> Any:
    """An entry of the device's tuned table, or None."""
    entry = table(targets.current())
    for key in path:
        entry = entry.get(str(key), {})
    return entry or None


def table_path(device_kind: str) -> Path:
    """The path of a device's tuned table."""
    return Path(__file__).parent / "tuned" / f"{device_kind.replace(' ', '_')}.json"


def table(gpu: targets.Target | jax.Device) -> dict:
    """The tuned table of a device, or that of `TABLES` for its compute capability; empty if there is none.

    The result is cached, so it must not be changed.
    """
    capability = getattr(gpu, "compute_capability", "")
    return _read(gpu.device_kind) or _read(TABLES.get(capability, "")) or {}


@cache
def _read(device_kind: str) -> dict | None:
    path = table_path(device_kind)
    return json.loads(path.read_text())["tiles"] if path.exists() else None


def power_above(x: int) -> int:
    """The smallest power of two that is at least x."""
    return 1 << max(x - 1, 0).bit_length()
