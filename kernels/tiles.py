"""The tile sizes of each kernel: rules with their reasons, and tables measured on a device.

A tuned table is a JSON file in `tuned/`, named after the device; `python -m benchmarks.kernels.tune`
writes it. A GPU without a table uses the one that `TABLES` names for its compute capability. A rule applies
to shapes that have no entry.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax


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


@dataclass(frozen=True)
class TritonTile:
    """The tile sizes of Triton's product.

    Attributes:
      m, n: rows and columns of the output tile of a program.
      k: length of a step along the contracted axis.
      warps: warps of 32 threads per program.
      stages: stages of the pipeline of loads.
      group: rows of tiles that run at the same time, and share columns of b in the L2 cache.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int


@dataclass(frozen=True)
class MosaicTile:
    """The tile sizes of Mosaic's product.

    Attributes:
      stages: slots of the ring buffer of operands.
      width: columns of tiles that run at the same time, and share rows of a in the L2 cache.
    """

    stages: int
    width: int


@dataclass(frozen=True)
class AttentionTile:
    """The tile sizes of attention, which computes the scores of a head in products of rows x columns.

    Attributes:
      rows: queries (in the backward pass also keys) per product.
      columns: keys (in the backward pass also queries) per product.
      warps: warps of 32 threads per program.
      stages: stages of the pipeline of loads.
      registers: largest number of registers per thread; None for no limit.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


# Columns of the longest row that fits into the registers of a program.
WIDEST_ROW = 16384

# {compute capability: the device whose table serves GPUs of this capability without a table}.
TABLES = {"9.0": "NVIDIA H200"}

# Most keys for which the scores of 64 queries fit into the registers of a program.
LONGEST_SEQUENCE = 320
# Tokens of the longest sequence whose attention is differentiated in one pass; longer ones take two.
SHORT_SEQUENCE = 144

# A weight of this size has enough tiles for a GPU, so one kernel for several weight gradients gains nothing.
LARGE_WEIGHT = 2048 * 2048

# Slots of the rings of both weight gradients, and the time of writing a slice, measured on an H200.
WEIGHT_GRADIENT_STAGES, WEIGHT_GRADIENT_WRITE_TOKENS = 4, 600
BLOCK_PRODUCT_STAGES, BLOCK_PRODUCT_WRITE_TOKENS = 5, 1500


def row_tile(producer: str, width: int) -> RowTile:
    """The tile of a row kernel.

    Args:
      producer: "none" (the quantizer alone), "layer_norm", "layer_norm_backward", "gelu" or "gelu_backward".
      width: columns per row.

    >>> row_rule(1280)
    RowTile(rows=1, chunk=256, warps=1, stages=1)
    """
    tuned = _tuned("rows", producer, width)
    return RowTile(**tuned) if tuned else row_rule(width)


def row_rule(width: int) -> RowTile:
    """One row per program: sums need no exchange between rows, and small programs hide each other's latency.
    Chunks are the longest with less than an eighth of the lanes idle and about 40 columns per thread, so that
    several loads of 16 bytes are in flight."""
    chunks = (chunk for chunk in (1024, 512, 256, 128) if -width % chunk * 8 <= width)
    return RowTile(
        rows=1, chunk=next(chunks, 64), warps=min(max(_power_above(width // 40) // 32, 1), 16)
    )


def row_programs(tile: RowTile, sums: int = 1) -> int:
    """Number of programs of a kernel that also sums columns: enough to fill every multiprocessor, but few,
    because each program writes `sums` rows of partial sums."""
    return multiprocessors() * min(16, 32 // tile.warps) // sums


def triton_tile(m: int, n: int, k: int) -> TritonTile:
    """The tile of Triton's product [m, k] [n, k]T."""
    tuned = _tuned("triton", f"{n}x{k}") if m >= 1024 else None
    return TritonTile(**tuned) if tuned else triton_rule(m)


def triton_rule(m: int) -> TritonTile:
    """128 x 128 x 128: two programs of 96 KiB fit on a Hopper multiprocessor, and one multiplies while the
    other writes. GPUs with 100 KiB of shared memory use half the step; few rows use a smaller tile. wgmma
    reads operands from shared memory. Other GPUs hold them in registers, which would spill with 4 warps."""
    capability = compute_capability()
    rows, step = 128 if m > 64 else 64, 128 if capability in ((8, 0), (9, 0), (10, 0)) else 64
    warps = 4 if rows == 64 or capability in ((9, 0), (10, 0)) else 8
    return TritonTile(rows, 128, step, warps, stages=3, group=8)


# Four stages of 48 KiB leave room for the output's buffers in 227 KiB.
MOSAIC_RULE = MosaicTile(stages=4, width=8)


# Five stages of 36 KiB. Four were as fast: benchmarks/notes/speed.md.
PRODUCT_SUM_TILE = MosaicTile(stages=5, width=8)


def mosaic_tile(n: int, k: int) -> MosaicTile:
    """The tile of Mosaic's product [m, k] [n, k]T."""
    tuned = _tuned("mosaic_gpu", f"{n}x{k}")
    return MosaicTile(**tuned) if tuned else MOSAIC_RULE


def attention_tile(operation: str, tokens: int, width: int) -> AttentionTile:
    """The tile of "attention" or "attention_backward" for heads of `width` features.

    64 rows are 4 warps, few enough that another program computes while one waits. The forward pass always
    holds all scores of its rows, so it uses the largest products among those with the fewest idle columns.
    With at most 168 registers per thread, three programs fit on a multiprocessor instead of two. More than
    208 keys, or gradients of heads wider than 64, need more registers. Gradients of short sequences are as
    fast without this limit.
    """
    widths = (256, 128, 64) if operation == "attention" else (64,)

    def covered(columns: int) -> int:
        pieces, tail = attention_pieces(tokens, columns)
        return pieces * columns + tail

    columns = min(widths, key=covered)
    if operation == "attention":
        fits = covered(columns) <= 208
    else:
        fits = tokens > SHORT_SEQUENCE and width <= 64
    return AttentionTile(64, columns, warps=4, stages=2, registers=168 if fits else None)


def attention_pieces(tokens: int, piece: int) -> tuple[int, int]:
    """The number of pieces that cover a sequence, and the length of the tail: 16, 32 or 0. A longer remainder
    counts as a piece.

    >>> attention_pieces(257, 64), attention_pieces(100, 64)
    ((4, 16), (2, 0))
    """
    full, rest = divmod(tokens, piece)
    if rest > 32:
        return full + 1, 0
    return full, max(16, _power_above(rest)) if rest else 0


class Device(NamedTuple):
    """What kernels depend on: the attributes of a jax.Device with the same names.

    Attributes:
      device_kind: the name of the GPU.
      compute_capability: such as "9.0"; on AMD GPUs the name of an architecture, such as "gfx942"; "" without
        a GPU.
      core_count: multiprocessors.
    """

    device_kind: str
    compute_capability: str
    core_count: int


def device() -> Device:
    """The GPU for which kernels are lowered: JAX's first device."""
    first = jax.devices()[0]
    # Without a GPU kernels are compiled for an H200, which has 132 multiprocessors.
    cores = getattr(first, "core_count", None) or 132
    return Device(first.device_kind, getattr(first, "compute_capability", ""), cores)


def multiprocessors() -> int:
    """Multiprocessors of the GPU; without a GPU those of an H200."""
    return device().core_count


def compute_capability() -> tuple[int, int]:
    """The compute capability of the GPU; without a GPU that of Hopper, and on AMD GPUs (0, 0)."""
    capability = device().compute_capability or "9.0"
    if "." not in capability:
        return 0, 0
    major, minor = capability.split(".")
    return int(major), int(minor)


def preferred_implementation(operation: str, key: str) -> str | None:
    """The fastest implementation for a shape on this device, or None if none is known.

    `key`: see `dispatch.shape_key`.
    """
    return _tuned("implementation", operation, key) or rule_of_implementation(operation, key)


def rule_of_implementation(operation: str, key: str) -> str | None:
    """The implementation of a shape without a measurement; None for the first that can run.

    cuBLAS, which XLA calls, computes the weight gradient of most layers faster than our kernel. For several
    small weights of one input our kernel is faster.
    """
    if operation == "weight_gradient":
        return "xla"
    if operation.endswith("_group"):
        n, k, _ = map(int, key.split("x"))
        return "xla" if n * k >= LARGE_WEIGHT else None
    return None


def _tuned(*path):
    entry = table(device())
    for key in path:
        entry = entry.get(str(key), {})
    return entry or None


def table_path(device_kind: str) -> Path:
    """The path of a device's tuned table."""
    return Path(__file__).parent / "tuned" / f"{device_kind.replace(' ', '_')}.json"


def table(gpu: Device | jax.Device) -> dict:
    """The tuned table of a device, or that of `TABLES` for its compute capability; empty if there is none.

    The result is cached, so it must not be changed.
    """
    capability = getattr(gpu, "compute_capability", "")
    return _read(gpu.device_kind) or _read(TABLES.get(capability, "")) or {}


@cache
def _read(device_kind: str) -> dict | None:
    path = table_path(device_kind)
    return json.loads(path.read_text())["tiles"] if path.exists() else None


def _power_above(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()
