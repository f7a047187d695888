"""Which implementation of each operation runs: the table, and the one place that chooses.

The module of an implementation says in `why_not` what it cannot compute.
"""

import functools
import importlib.metadata
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from swjax.kernels import reference, tiles
from swjax.kernels.availability import Unavailable

# {operation: its implementations other than "xla", the preferred one first}. Each is a function with the name
# of the operation in the module of the implementation, with the signature and result of that in `reference`.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "quantize": ("triton",),
    "quantize_by": ("triton",),
    "quantize_both": ("triton",),
    "quantize_and_sum": ("triton",),
    "matmul": ("mosaic_gpu", "triton"),
    "weight_gradient": ("mosaic_gpu",),
    "block_weight_gradient": ("mosaic_gpu", "triton"),
    "layer_norm": ("triton",),
    "layer_norm_backward": ("triton",),
    "gelu": ("triton",),
    "gelu_backward": ("triton",),
    "attention": ("triton",),
    "attention_backward": ("triton",),
}
NAMES = ("xla", "triton", "mosaic_gpu")
# Imported when they are first used: neither Triton nor Pallas is needed on CPUs.
MODULES = {"triton": "triton_gpu", "mosaic_gpu": "mosaic_gpu"}

INSTALL = "pip install 'swjax[gpu]' (Python 3.12 or newer)"


def run(operation: str, *arrays: Any, implementation: str | None = None, **options: Any) -> Any:
    """Computes `operation` by a named implementation, or by the best one available.

    Args:
      operation: a key of `IMPLEMENTATIONS`; its specification is the function of that name in
        `swjax.kernels.reference`.
      *arrays: its arrays and QTensors.
      implementation: "xla", "triton", "mosaic_gpu"; None chooses.
      **options: its other arguments.

    Returns:
      What the specification returns.

    Raises:
      ValueError: there is no implementation of that name, or it cannot run: the message says why.

    >>> run("quantize", jnp.ones((1, 2))).values.tolist()
    [[127, 127]]
    """
    name = choose(operation, *arrays, implementation=implementation, **options)
    if name == "xla":
        if _multiplies_int8(operation, *arrays, **options):
            _warn_of_split_sums()
        return getattr(reference, operation)(*arrays, **options)
    return _kernel(name, operation, **options)(*arrays)


@functools.cache
def _kernel(name: str, operation: str, **options):
    """One jitted function per kernel and options, so that layers of the same shapes share its lowering, which
    takes about a second."""

    def function(*arrays):
        return getattr(module_of(name), operation)(*arrays, **options)

    function.__name__ = f"swjax_{operation}"
    return jax.jit(jax.custom_batching.sequential_vmap(function))


def choose(operation: str, *arrays: Any, implementation: str | None = None, **options: Any) -> str:
    """The name of the implementation that `run` uses for these arguments.

    On an NVIDIA GPU, None chooses the one that the device's tuned table names as the fastest for the shape,
    then the first of `IMPLEMENTATIONS` that can run. An operation without the named implementation runs
    through XLA.

    >>> choose("quantize", jnp.ones((1, 2)), implementation="mosaic_gpu")
    'xla'
    """
    check(implementation)
    known = IMPLEMENTATIONS[operation]
    if implementation is not None:
        if implementation == "xla" or implementation not in known:
            return "xla"
        reason = why_not(implementation, operation, *arrays, **options)
        if reason:
            raise ValueError(f"implementation {implementation!r} of {operation!r} {reason}")
        return implementation
    if jax.default_backend() != "gpu" or would_gather():
        return "xla"
    preferred = tiles.preferred_implementation(operation, shape_key(operation, *arrays))
    if preferred == "xla":
        return "xla"
    for name in sorted(known, key=lambda name: name != preferred):  # that one first
        reason = why_not(name, operation, *arrays, **options)
        if reason is None:
            return name
        if reason.missing_package:
            _warn_once(f"swjax: {operation} runs through XLA, slowly: {name!r} {reason}")
    return "xla"


def check(implementation: str | None) -> None:
    """Raises a ValueError if there is no implementation of that name."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(
            f"implementation must be one of {', '.join(NAMES)} or None (automatic), "
            f"got {implementation!r}"
        )


def why_not(name: str, operation: str, *arrays: Any, **options: Any) -> Unavailable | None:
    """Why an implementation cannot compute an operation here; None: it can.

    Args:
      name: "triton" or "mosaic_gpu".
      operation: a key of `IMPLEMENTATIONS` that has this implementation.
      *arrays, **options: the operation's arguments; shapes and dtypes are enough.
    """
    if jax.default_backend() != "gpu":
        platform = jax.default_backend()
        return Unavailable(f"needs an NVIDIA GPU, and this process runs on {platform}: use 'xla'")
    leaves = jax.tree.leaves(arrays)
    if any(leaf.size == 0 for leaf in leaves):
        return Unavailable("takes no empty arrays: use 'xla'")
    capability = tiles.compute_capability()
    dtypes = [*(leaf.dtype for leaf in leaves), options.get("dtype"), options.get("quantize_to")]
    if any(str(dtype).startswith("float8") for dtype in dtypes) and capability < (8, 9):
        return Unavailable(
            f"needs compute capability 8.9 for fp8, and this GPU has {capability}: use 'xla'"
        )
    if name == "triton" and (missing := _missing_triton()):
        return Unavailable(missing, missing_package=True)
    return module_of(name).why_not(operation, *arrays, **options)


@functools.cache
def _missing_triton() -> str | None:
    """The missing packages of the "triton" modules, which are imported only if none is missing."""
    if importlib.util.find_spec("jax_triton") is None:
        return f"needs jax-triton, which is not installed: {INSTALL}"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 7):
        return f"needs Triton 3.7 or newer, got {version}: install it by {INSTALL}"
    return None


def would_gather() -> bool:
    """Whether XLA would all-gather the operands of a kernel: it cannot partition kernels.

    Warns once where it would.
    """
    if jax.device_count() == 1:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names):
        return False
    _warn_once(
        f"swjax: {jax.device_count()} devices, so that quantized layers run through XLA, slowly; "
        "kernels run where a swjax.Layout says how arrays are sharded, inside jax.shard_map, or "
        "with one visible device"
    )
    return True


SAFE_XLA_FLAG = "--xla_gpu_enable_triton_gemm=false"


def _multiplies_int8(operation: str, *arrays: Any, **options: Any) -> bool:
    if operation == "block_weight_gradient":
        return "int8" in options["dtypes"]
    return operation == "matmul" and arrays[0].values.dtype == jnp.int8


def _warn_of_split_sums():
    """Warns that XLA may sum small int8 products wrongly.

    It splits their sums, and its Triton code generator may then count columns twice: seen with jax 0.11.2 on
    an H200, where [256, 512] x [512, 128] was twice as large. Only an XLA flag turns that off.
    """
    if jax.default_backend() == "gpu" and SAFE_XLA_FLAG not in os.environ.get("XLA_FLAGS", ""):
        _warn_once(
            "swjax: an int8 product runs through XLA, which on GPUs may sum small ones wrongly: "
            f"set XLA_FLAGS={SAFE_XLA_FLAG} before JAX starts, or use {INSTALL}"
        )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def module_of(name: str) -> ModuleType:
    """The module of an implementation: "triton" or "mosaic_gpu"."""
    return importlib.import_module(f"swjax.kernels.{MODULES[name]}")


def shape_key(operation: str, *arrays: Any) -> str:
    """The key of a shape in the tuned table: all but the number of tokens. That of a product is "{n}x{k}"."""
    if operation == "matmul":
        return "x".join(map(str, arrays[1].values.shape))
    width = arrays[0].shape[-1]
    return f"{arrays[1].shape[-1]}x{width}" if operation.endswith("weight_gradient") else str(width)
