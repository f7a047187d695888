"""The recipe "auto": which products are the fastest on the chip that a program is for."""

import functools
import sys
import warnings
from collections.abc import Iterable

from swjax.kernels import chips, targets

NAME = "auto"

# The least k n / (k + n) of weights [k, n] whose int8 weight gradient is faster than a 16-bit one. Products
# take time in proportion to k n, the rotations of x and g in proportion to k + n. Counted from operations and
# bytes, both are equal at 660 on an H200. Measured there, ViT-L/14 (683 on average) and Qwen3-0.6B (699)
# lose, and ViT-H/14 (853) gains (docs/speed.md).
LEAST_WIDTH = 768

# Experts of fewer rows leave most of their last block of rotated rows empty.
LEAST_ROTATED_ROWS = 512

# {bytes of an element of a weight: the least rows of an average expert whose int8 products are faster than
# those of 16 bits}. Quantizing a weight takes as long for few rows as for many. Counted for the experts of
# Qwen3-30B-A3B on an H200: 540 with weights in float32, which 16 bits must cast, and 940 with weights in 16
# bits. Measured there (benchmarks/notes/speed.md), 1,024 rows gain with float32 and lose with 16 bits, and
# 1,536 rows of DeepSeek-V2-Lite gain with both.
LEAST_EXPERT_ROWS = {4: 600, 2: 1200}
_EMULATED = "products in block formats are emulated on"


def choose(*shapes: tuple[int, ...], few_rows: str = "", quietly: bool = False) -> str:
    """The name of the recipe that "auto" stands for; the first call for a chip prints it.

    int8 where its peak is at least that of fp8 and above that of bf16, else fp8, else 16 bits. On CPUs, which
    serve to develop and test, it is "switchback". Rows of `swjax.kernels.chips` have the peaks; a GPU without
    a row is taken for one of its compute capability.

    Args:
      *shapes: (k, n) of the weights that follow the recipe. "switchback_hadamard" is chosen only if they are
        known and wide enough (`rotations_pay`), on GPUs with a kernel for its weight gradient (Hopper).
      few_rows: of experts, the result of `few_rows`; if it is not "", the choice is 16 bits.
      quietly: whether to print nothing.

    >>> with targets.compiling_for("H200"):
    ...     choose(quietly=True), choose((1280, 5120), quietly=True), choose((1024, 1024), quietly=True)
    ('switchback', 'switchback_hadamard', 'switchback')
    >>> with targets.compiling_for("TPU v7"):
    ...     choose(quietly=True)
    'fp8_switchback'
    """
    target = targets.current()
    name, reason = ("standard", few_rows) if few_rows else _of(target)
    if name == "switchback" and target.compute_capability == "9.0" and rotations_pay(*shapes):
        name = "switchback_hadamard"
    if not quietly:
        _tell(name, f"{target.device_kind}: {reason}")
    return name


def _of(target: targets.Target) -> tuple[str, str]:
    """The recipe of a device for narrow weights, and the reason."""
    if target.platform == "cpu":
        return "switchback", "CPUs compute every recipe"
    chip = chip_of(target)
    if chip is None:
        return "standard", "no peaks are known, so layers stay in 16 bits"
    int8, fp8, bf16 = map(chip.peak, ("int8", "float8", "bfloat16"))
    peaks = f"peaks in T operations/s: int8 {int8:g}, fp8 {fp8:g}, bf16 {bf16:g}"
    if int8 >= fp8 and int8 > bf16:
        return "switchback", peaks
    return ("fp8_switchback" if fp8 > bf16 else "standard"), peaks


def chip_of(target: targets.Target) -> chips.Chip | None:
    """The chip of a device, or the first one of its compute capability; None if there is none, as for CPUs.

    >>> chip_of(targets.Target("gpu", "NVIDIA A800-SXM4-80GB", "8.0")).name
    'A100'
    """
    if (chip := chips.find(target.device_kind)) is not None or not target.compute_capability:
        return chip
    alike = (c for c in chips.CHIPS if c.compute_capability == target.compute_capability)
    return next(alike, None)


def rotations_pay(*shapes: tuple[int, ...]) -> bool:
    """Whether int8 weight gradients of these weights [k, n] are worth their rotations, with Hopper's kernels.

    >>> rotations_pay((4096, 14_336)), rotations_pay((4096, 768)), rotations_pay()
    (True, False, False)
    """
    products, rotations = sum(k * n for k, n in shapes), sum(k + n for k, n in shapes)
    return bool(shapes) and products >= LEAST_WIDTH * rotations


def rotated_rows_pay(rows: int, experts: int, shape: tuple[int, int]) -> bool:
    """Whether int8 weight gradients [k, n] of experts are worth their rotations.

    >>> rotated_rows_pay(65_536, 128, (2048, 1536)), rotated_rows_pay(4_096, 128, (2048, 1536))
    (True, False)
    """
    return rows >= experts * LEAST_ROTATED_ROWS and rotations_pay(shape)


def few_rows(rows: int, experts: int, itemsize: int) -> str:
    """Why quantized products of experts with so few rows are not faster than 16 bits; "" if they are.

    Always "" on CPUs, which serve to develop and test.

    Args:
      rows: number of rows of all experts.
      experts: number of experts.
      itemsize: bytes of an element of a weight; 1 for one that is quantized already.

    >>> with targets.compiling_for("H200"):
    ...     few_rows(131_072, 128, 4), few_rows(8_192, 128, 4)
    ('', '64 rows an expert: quantizing the weights takes longer than it gains below 600')
    """
    mean, least = rows // max(experts, 1), LEAST_EXPERT_ROWS.get(itemsize, 0)
    if targets.platform() == "cpu" or mean >= least:
        return ""
    return f"{mean} rows an expert: quantizing the weights takes longer than it gains below {least}"


@functools.cache
def _tell(name: str, where: str) -> None:
    print(f"swjax: the recipe 'auto' is {name!r} on {where}", file=sys.stderr)


def warn_if_slow(dtypes: Iterable[str], emulated: bool = False, few_rows: str = "") -> None:
    """Warns once for a chip if products of these quantized dtypes are not faster on it than those of bf16.

    `emulated`: whether a recipe has emulated products in block formats. `few_rows`: of experts, see
    `few_rows`. On CPUs nothing warns.

    >>> with targets.compiling_for("TPU v5e"):
    ...     warn_if_slow(["int8"])
    """
    target = targets.current()
    if target.platform == "cpu":
        return
    if emulated:
        _warn(
            f"{_EMULATED} {target.device_kind}, slower than bf16: they show a recipe's accuracy; "
            "use the recipe 'auto' for speed"
        )
    if (chip := chip_of(target)) is None:
        return
    slow = sorted({name for name in dtypes if few_rows or chip.peak(name) <= chip.bf16})
    if slow:
        where = f"{target.device_kind}, {few_rows}" if few_rows else target.device_kind
        best = "standard" if few_rows else _of(target)[0]
        _warn(
            f"{' and '.join(slow)} products are not faster than bf16 on {where}: "
            f"use the recipe 'auto', here {best!r}"
        )


def warn_of_length(length: int, parts: int) -> None:
    """Warns once that products of blocks are emulated, because `parts` elements do not divide a length.

    On CPUs nothing warns.

    >>> with targets.compiling_for("TPU v5e"):
    ...     warn_of_length(256, 128)
    """
    target = targets.current()
    if target.platform != "cpu" and length % parts:
        _warn(
            f"{_EMULATED} {target.device_kind}, slower than bf16, if blocks do not divide the part of each "
            f"device, got a length of {length}: use a multiple of {parts}"
        )


@functools.cache
def _warn(what: str) -> None:
    warnings.warn(f"swjax: {what}", stacklevel=3)
