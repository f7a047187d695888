"""The accelerators: how JAX names them, their peak rates in each format, and their memory.

Peaks are dense, in T operations/s of a whole chip. Those of GPUs are from NVIDIA's data sheets and
architecture papers, of GeForce and RTX cards with float32 sums. int8 of the B300 is from reports of
`torch._int_mm` on GB300, which is 12 to 24 times slower than bf16. TPUs are from `jax._src.tpu_info` of jax
0.12. None means that the chip has no such unit, and XLA converts the operands to a larger format.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """An accelerator.

    Attributes:
      name: its usual name.
      device_kind: regular expression of the `device_kind` of its JAX devices.
      platform: "gpu" or "tpu".
      bf16: peak in 16 bits (float16 on a V100), T operations/s.
      fp8, int8: peaks in 8 bits, or None.
      compute_capability: of an NVIDIA GPU; "" for a TPU.
      core_count: multiprocessors of an NVIDIA GPU.
      block_formats: recipes of block formats for which the chip has matrix units, or on Hopper a kernel.
        `targets.block_formats` has those that are not emulated.
      devices: JAX devices per chip.
      memory: GiB that the driver reports, for a TPU those that it has, one for each size that is sold; () if
        unknown.
    """

    name: str
    device_kind: str
    platform: str
    bf16: float
    fp8: float | None
    int8: float | None
    compute_capability: str = ""
    core_count: int = 0
    block_formats: tuple[str, ...] = ()
    devices: int = 1
    memory: tuple[float, ...] = ()

    def peak(self, dtype: str) -> float:
        """The peak of products of a dtype such as "int8" or "float8_e4m3fn", T operations/s; 0 without units.

        >>> [find("TPU v5 lite").peak(dtype) for dtype in ("bfloat16", "int8", "float8_e4m3fn")]
        [197, 394, 0]
        """
        if dtype == "int8":
            return self.int8 or 0
        return (self.fp8 or 0) if dtype.startswith("float8") else self.bf16


_HOPPER = ("fp8_block128",)
_BLACKWELL = ("mxfp8", "nvfp4")

# The first match counts: names that contain others come first.
CHIPS = (
    Chip("V100", r"V100", "gpu", 125, None, None, "7.0", 80),
    Chip("A100", r"A[18]00(?!\d)", "gpu", 312, None, 624, "8.0", 108, memory=(39.4, 79.2)),
    Chip("A10", r"A10G?\b", "gpu", 125, None, 250, "8.6", 72, memory=(22.1,)),
    Chip("RTX 3090", r"RTX ?3090", "gpu", 71, None, 284, "8.6", 82),
    Chip("L40S", r"L40S", "gpu", 362, 733, 733, "8.9", 142, memory=(44.4,)),
    Chip("L4", r"\bL4\b", "gpu", 121, 242, 242, "8.9", 58, memory=(22.0,)),
    Chip("RTX 6000 Ada", r"RTX 6000 Ada", "gpu", 364, 729, 729, "8.9", 142),
    Chip("RTX 4090", r"RTX ?4090", "gpu", 165, 330, 661, "8.9", 128, memory=(23.5,)),
    Chip("H20", r"H20\b", "gpu", 148, 296, 296, "9.0", 78, _HOPPER),
    Chip("H100 PCIe", r"H100 PCIe", "gpu", 756, 1513, 1513, "9.0", 114, _HOPPER),
    Chip("H100 NVL", r"H[12]00 NVL", "gpu", 835, 1671, 1671, "9.0", 132, _HOPPER),
    Chip("H100", r"H[18]00", "gpu", 989, 1979, 1979, "9.0", 132, _HOPPER, memory=(79.1,)),
    Chip(
        "H200", r"G?H200", "gpu", 989, 1979, 1979, "9.0", 132, _HOPPER, memory=(139.8,)
    ),  # GH200, too
    Chip("B300", r"G?B300", "gpu", 2500, 4500, 160, "10.3", 148, _BLACKWELL),
    Chip("GB200", r"GB200", "gpu", 2500, 5000, 5000, "10.0", 152, _BLACKWELL),
    Chip("B200", r"B200", "gpu", 2250, 4500, 4500, "10.0", 148, _BLACKWELL, memory=(179.1,)),
    Chip("RTX 5090", r"RTX ?5090", "gpu", 210, 419, 838, "12.0", 170, _BLACKWELL, memory=(31.8,)),
    Chip("TPU v4", r"TPU ?v4$", "tpu", 275, None, None, memory=(32.0,)),
    Chip("TPU v5e", r"TPU ?v5( lite|e)", "tpu", 197, None, 394, memory=(16.0,)),
    Chip("TPU v5p", r"TPU ?v5", "tpu", 459, None, 918, memory=(95.9,)),
    Chip("TPU v6e", r"TPU ?v6", "tpu", 920, 920, 1840, memory=(32.0,)),
    Chip("TPU v7", r"TPU7", "tpu", 2310, 4600, None, devices=2),
    Chip("TPU 8i", r"TPU8i", "tpu", 1101, 8808, None, devices=2),
    Chip("TPU 8t", r"TPU8t", "tpu", 996, 5977, 996),
)


def find(device_kind: str) -> Chip | None:
    """The chip of a JAX device, or None if it is not in `CHIPS`, as a CPU; upper and lower case are alike.

    >>> find("NVIDIA H200").name, find("cpu")
    ('H200', None)
    """
    return next((chip for chip in CHIPS if re.search(chip.device_kind, device_kind, re.I)), None)


def named(name: str) -> Chip:
    """The chip with a name in `CHIPS`.

    >>> named("TPU v7").fp8
    4600

    Raises:
      ValueError: there is none.
    """
    for chip in CHIPS:
        if chip.name == name:
            return chip
    known = ", ".join(chip.name for chip in CHIPS)
    raise ValueError(f"a chip must be one of {known}, got {name!r}: pass its jax.Device or a mesh")
