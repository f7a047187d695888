"""The device that the program being traced is for: kernels, formats and recipes are chosen for it.

It is the first of: the innermost `compiling_for`, the mesh in JAX's context (`jax.set_mesh`,
`jax.shard_map`), `jax.default_device`, and the first device of JAX's default backend.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from swjax.kernels import chips


class Target(NamedTuple):
    """What kernels and recipes depend on.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      device_kind: JAX's name of the device.
      compute_capability: such as "9.0"; on AMD GPUs the name of an architecture, such as "gfx942"; "" without
        a GPU.
      core_count: multiprocessors. Without a GPU kernels are compiled for an H200, which has 132.
    """

    platform: str
    device_kind: str
    compute_capability: str = ""
    core_count: int = 132


BlockFormat = tuple[str, int, str]  # dtype, block, format of the scales

_OF_BLACKWELL: tuple[BlockFormat, ...] = (
    ("float8_e4m3fn", 32, "float8_e8m0fnu"),
    ("float8_e5m2", 32, "float8_e8m0fnu"),
    ("float4_e2m1fn", 16, "float8_e4m3fn"),
)
_BLOCK_FORMATS: dict[str, tuple[BlockFormat, ...]] = {  # by compute capability
    "9.0": (("float8_e4m3fn", 128, "float32"),),
    "10.0": _OF_BLACKWELL,
    "10.3": _OF_BLACKWELL,
}

# JAX traces a function again if the value differs from that of an earlier trace.
_chosen = jax.make_user_context()


@contextlib.contextmanager
def compiling_for(device: str | jax.Device | Mesh) -> Iterator[Target]:
    """A context in which programs are traced for another device than the host's, to compile ahead of time.

    It is not needed if the mesh of those devices is in JAX's context. It also sets the number of devices: 1,
    or that of the mesh.

    Args:
      device: the name of a chip in `swjax.kernels.chips.CHIPS`, such as "H100" or "TPU v5e"; a device,
        such as those of `jax.experimental.topologies`; or a mesh.

    Yields:
      The target.

    Raises:
      ValueError: there is no such chip, or `device` is none of these.

    >>> with compiling_for("TPU v5e") as target:
    ...     current().platform
    'tpu'
    """
    if isinstance(device, str):
        target, count = _of_chip(chips.named(device)), 1
    elif isinstance(device, Mesh):
        target, count = _of_device(device.devices.flat[0]), device.size
    elif hasattr(device, "device_kind"):
        target, count = _of_device(device), 1
    else:
        raise ValueError(
            f"compiling_for needs the name of a chip, a jax.Device or a mesh, got {device!r}"
        )
    with _chosen((target, count)):
        yield target


def current(mesh: AbstractMesh | None = None) -> Target:
    """The device that the program is for.

    Args:
      mesh: the mesh of a layer; None for the mesh in JAX's context.

    >>> current().platform
    'cpu'
    """
    if _chosen.value is not None:
        return _chosen.value[0]
    if (named := _named_by(mesh)) is not None:
        return _of_kind(*named)
    default = jax.config.values["jax_default_device"]
    if isinstance(default, jax.Device):
        return _of_device(default)
    first = jax.devices(default)[0] if default else jax.devices()[0]
    return _of_device(first)._replace(platform=default or jax.default_backend())


def platform(mesh: AbstractMesh | None = None) -> str:
    """The platform that the program is for: "cpu", "gpu" or "tpu". `mesh`: see `current`."""
    return current(mesh).platform


def block_formats(mesh: AbstractMesh | None = None) -> tuple[BlockFormat, ...]:
    """The block formats that are multiplied without emulation. `mesh`: see `current`.

    Matrix units of B200 and B300 multiply MXFP8 and NVFP4, and XLA compiles products for them; XLA of jax
    0.12 aborts for the RTX 5090. On Hopper a kernel scales the sums of blocks.

    >>> with compiling_for("H100"):
    ...     block_formats()
    (('float8_e4m3fn', 128, 'float32'),)
    """
    return _BLOCK_FORMATS.get(current(mesh).compute_capability, ())


def device_count() -> int:
    """The number of devices that the program may run on.

    >>> with compiling_for("H100"):
    ...     device_count()
    1
    """
    if _chosen.value is not None:
        return _chosen.value[1]
    named = _named_by(None)
    if named is not None and named[1] != jax.devices()[0].device_kind:
        return jax.sharding.get_abstract_mesh().size
    return jax.device_count()


def _named_by(mesh: AbstractMesh | None) -> tuple[str, str] | None:
    """The platform and the device_kind of a mesh, or None if it has no devices."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    device: Any = None if mesh.empty else getattr(mesh, "abstract_device", None)
    if device is None or not getattr(device, "platform", None):
        return None
    return ("gpu" if device.platform in ("cuda", "rocm") else device.platform), device.device_kind


def _of_kind(platform: str, device_kind: str) -> Target:
    """The target of a mesh. An abstract mesh does not name the compute capability: a device here may, or the
    table."""
    first = jax.devices()[0]
    if first.device_kind == device_kind:
        return _of_device(first)._replace(platform=platform)
    chip = chips.find(device_kind)
    if chip is None:
        return Target(platform, device_kind)
    return _of_chip(chip)._replace(device_kind=device_kind)


def _of_chip(chip: chips.Chip) -> Target:
    names = {"gpu": f"NVIDIA {chip.name}", "tpu": chip.name}
    kind = _KINDS.get(chip.name, names[chip.platform])
    return Target(chip.platform, kind, chip.compute_capability, chip.core_count or 132)


# Where JAX's name of a device is not that of the chip.
_KINDS = {
    "TPU v5e": "TPU v5 lite",
    "TPU v6e": "TPU v6 lite",
    "TPU v7": "TPU7x",
    "TPU 8i": "TPU8i",
    "TPU 8t": "TPU8t",
}


def _of_device(device: Any) -> Target:
    named = getattr(device, "platform", "cpu")
    platform = "gpu" if named in ("cuda", "rocm") else named
    cores = getattr(device, "core_count", None) or 132
    capability = str(getattr(device, "compute_capability", ""))
    return Target(platform, device.device_kind, capability, cores)
