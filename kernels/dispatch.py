"""Chooses the implementation of each operation: the table, and the only place that decides.

A new operation is a folder with a `reference.py`, its implementations and their tiles, and a row of
`OPERATIONS`.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from swjax.kernels import reference, saved_programs, targets, tiles
from swjax.kernels.availability import Unavailable

# {folder: {operation: implementations other than "xla", preferred first}}. The function `matmul` in
# kernels/products/triton.py is the "triton" implementation of "matmul"; it has the signature of `matmul` in
# kernels/products/reference.py. `WHY_NOT` of that module maps an operation to a function that says which
# arguments it does not support.
OPERATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "quantizers": {
        "quantize": ("triton", "pallas_tpu"),
        "quantize_by": ("triton",),
        "quantize_both": ("triton",),
        "quantize_and_sum": ("triton",),
    },
    "rotations": {"quantize_rotated": ("triton",)},
    "products": {
        "matmul": ("mosaic_gpu", "triton"),
        "matmul_sum": ("mosaic_gpu",),
    },
    "block_formats": {
        "block_matmul": ("mosaic_gpu",),
        "quantize_segments": ("triton",),
        "quantize_squares": ("triton",),
    },
    "fused_products": {
        "fused_product": ("pallas_tpu",),
        "fused_product_backward": ("pallas_tpu",),
    },
    "weight_gradients": {
        "weight_gradient": ("mosaic_gpu",),
        "weight_gradient_group": ("mosaic_gpu",),
    },
    "block_weight_gradients": {
        "block_weight_gradient": ("mosaic_gpu", "triton"),
        "block_weight_gradient_group": ("mosaic_gpu",),
    },
    "ragged": {
        "ragged_matmul": ("mosaic_gpu", "triton"),
        "ragged_weight_gradient": ("mosaic_gpu", "triton"),
        "ragged_block_weight_gradient": ("mosaic_gpu", "triton"),
    },
    "symmetric": {"symmetric_product": ("mosaic_gpu", "triton")},
    "norms": {
        "layer_norm": ("triton", "pallas_tpu"),
        "layer_norm_backward": ("triton",),
        "rms_norm": ("triton", "pallas_tpu"),
        "rms_norm_backward": ("triton",),
    },
    "gelu": {"gelu": ("triton", "pallas_tpu"), "gelu_backward": ("triton",)},
    "gated": {"gated": ("triton", "pallas_tpu"), "gated_backward": ("triton",)},
    "cross_entropy": {"cross_entropy": ("triton",)},
    "attention": {
        "attention": ("mosaic_gpu", "triton"),
        "attention_backward": ("mosaic_gpu", "triton"),
    },
}
FOLDERS = {operation: folder for folder, known in OPERATIONS.items() for operation in known}
IMPLEMENTATIONS = {name: known[name] for known in OPERATIONS.values() for name in known}
IMPLEMENTATION_NAMES = ("xla", "triton", "mosaic_gpu", "pallas_tpu")

# As in pyproject.toml. No older version was tested on a GPU. With 3.7, int8 and fp8 products load 4 bytes at
# a time on Hopper, and with 3.8 attention's gradients spill more registers.
OLDEST_TRITON = (3, 9)
INSTALL = "pip install 'swjax[gpu]' (Python 3.12 or newer)"


def run(operation: str, *arrays: Any, implementation: str | None = None, **options: Any) -> Any:
    """Computes `operation` with the named implementation, or with the best available implementation.

    Args:
      operation: a key of `IMPLEMENTATIONS`; the function of that name in `swjax.kernels.reference` is its
        specification.
      *arrays: arrays and QTensors of the operation.
      implementation: one of `IMPLEMENTATION_NAMES`; None chooses.
      **options: other arguments of the operation.

    Returns:
      The result, as the specification defines it.

    Raises:
      ValueError: the implementation does not exist, or cannot run; the message gives the reason.

    >>> run("quantize", jnp.ones((1, 2))).values.tolist()
    [[127, 127]]
    """
    name = choose(operation, *arrays, implementation=implementation, **options)
    if (calls := _calls.value) is not None:
        calls.append((operation, name))
    if name == "xla":
        if _multiplies_int8(operation, *arrays, **options):
            warn_of_split_sums()
        return _specification(getattr(reference, operation), *options)(*arrays, **options)
    return _jitted(name, operation, **options)(*arrays)


# JAX traces a function again if the value differs from that of an earlier trace.
_calls = jax.make_user_context()


@contextlib.contextmanager
def record() -> Iterator[list[tuple[str, str]]]:
    """Lists the operations that are computed within the context, and their implementations.

    Functions that JAX has traced before are traced again. `swjax.testing.implementations` counts the calls
    of a function without running it.

    Yields:
      A list to which each call of `run` adds (operation, implementation), in the order of the calls.

    >>> with record() as calls:
    ...     _ = run("quantize", jnp.ones((1, 2)))
    >>> calls
    [('quantize', 'xla')]
    """
    calls = _Calls()
    with _calls(calls):
        yield calls


def is_recording() -> bool:
    """Whether `record` lists operations."""
    return _calls.value is not None


class _Calls(list):
    """A list that is hashed and compared by identity, as the value of a context of JAX."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # a list has no hash
    __eq__ = object.__eq__


@functools.cache
def _specification(function: Callable, *options: str) -> Callable:
    """Returns one jitted function per operation, so that layers of equal shapes share its trace."""
    return jax.jit(function, static_argnames=options)


@functools.cache
def _jitted(name: str, operation: str, **options):
    """Returns one jitted function per kernel and options, so that layers of equal shapes share its lowering,
    which for GPUs takes about a second. Processes share that through the compilation cache."""

    def shared(*arrays):
        return kernel(name, operation)(*arrays, **options)

    shared.__name__ = f"swjax_{operation}"
    if name != "pallas_tpu":
        shared = saved_programs.saved(shared, name, operation, options)
    return jax.jit(jax.custom_batching.sequential_vmap(shared))


def choose(operation: str, *arrays: Any, implementation: str | None = None, **options: Any) -> str:
    """The name of the implementation that `run` uses for these arguments.

    For an NVIDIA GPU or a TPU (see `targets`), None chooses the fastest implementation for the shape in the
    device's tuned table, or else the first of `IMPLEMENTATIONS` that can run. With several devices outside of
    a `jax.shard_map` over all mesh axes, None chooses XLA; see `warn_if_gathering`. If an operation lacks the
    named implementation, it runs through XLA: see `check_products`. For an operation of several layers, "xla"
    in the tuned table means that the operation of each layer is faster; see `has_kernel`.

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
    if targets.platform() not in ("gpu", "tpu") or warn_if_gathering():
        return "xla"
    preferred = tiles.preferred_implementation(operation, shape_key(operation, *arrays))
    if preferred == "xla":
        return "xla"
    for name in sorted(known, key=lambda name: name != preferred):  # tries the preferred one first
        reason = why_not(name, operation, *arrays, **options)
        if reason is None:
            return name
        if reason.missing_package:
            _warn_once(f"swjax: {operation} runs through XLA, slowly: {name!r} {reason}")
    return "xla"


def has_kernel(
    operation: str, *arrays: Any, implementation: str | None = None, **options: Any
) -> bool:
    """Whether one kernel should compute an operation of several layers, such as "matmul_sum".

    If not, callers run the operation of a single layer for each layer.

    Args:
      operation: a key of `IMPLEMENTATIONS`.
      *arrays, **options: its arguments.
      implementation: the implementation that the layers name, or None. `choose` raises an error if a named
        kernel cannot run. This function returns False for "mosaic_gpu" then, because the layers can run one
        by one.

    Returns:
      True if the implementation allows the kernel, it can run, and the tuned table or the rule in `tiles`
      does not prefer single layers.

    >>> x = jnp.ones((8, 64))
    >>> has_kernel("weight_gradient_group", x, (x, x), implementation="mosaic_gpu")
    False
    """
    if implementation != "mosaic_gpu":
        return choose(operation, *arrays, implementation=implementation, **options) != "xla"
    preferred = tiles.preferred_implementation(operation, shape_key(operation, *arrays))
    return preferred != "xla" and why_not("mosaic_gpu", operation, *arrays, **options) is None


def check(implementation: str | None) -> None:
    """Raises a ValueError if the implementation does not exist."""
    if implementation is not None and implementation not in IMPLEMENTATION_NAMES:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATION_NAMES)} or None (automatic), "
            f"got {implementation!r}"
        )


def check_products(implementation: str | None, operations: Iterable[str]) -> None:
    """Raises a ValueError if a layer names an implementation that has none of the layer's products.

    Operations that the named implementation lacks run through XLA. If it lacks all products of the layer,
    naming it has no effect, which is an error.

    Args:
      implementation: of the layer; None and "xla" have all operations.
      operations: the products of the layer, forward and backward: keys of `IMPLEMENTATIONS`, or other names
        of products that only XLA computes, such as "dot".

    >>> check_products("triton", ["matmul", "weight_gradient"])
    >>> check_products("triton", ["dot"])
    Traceback (most recent call last):
    ValueError: implementation 'triton' has none of the products of this layer (dot): use None
    """
    check(implementation)
    if implementation in (None, "xla"):
        return
    names = sorted(set(operations))
    if not any(implementation in IMPLEMENTATIONS.get(name, ()) for name in names):
        raise ValueError(
            f"implementation {implementation!r} has none of the products of this layer "
            f"({', '.join(names)}): use None"
        )


def why_not(name: str, operation: str, *arrays: Any, **options: Any) -> Unavailable | None:
    """Returns why an implementation cannot compute an operation on the device that the
    program is for, or None if it can.

    Args:
      name: one of `IMPLEMENTATION_NAMES` other than "xla".
      operation: a key of `IMPLEMENTATIONS` with this implementation.
      *arrays, **options: arguments of the operation; shapes and dtypes suffice.
    """
    platform, leaves = targets.platform(), jax.tree.leaves(arrays)
    needed, chip = ("tpu", "a TPU") if name == "pallas_tpu" else ("gpu", "an NVIDIA GPU")
    if platform != needed:
        return Unavailable(f"needs {chip}, and this program is for a {platform}: use 'xla'")
    if any(leaf.size == 0 for leaf in leaves):
        return Unavailable("takes no empty arrays: use 'xla'")
    if name != "pallas_tpu" and (unable := _why_not_gpu(name, leaves, options)):
        return unable
    refuse = module_of(name, operation).WHY_NOT.get(operation)
    return refuse(*arrays, **options) if refuse else None


def _why_not_gpu(name: str, leaves: list[jax.Array], options: dict[str, Any]) -> Unavailable | None:
    capability = tiles.compute_capability()
    dtypes = [*(leaf.dtype for leaf in leaves), options.get("dtype"), options.get("quantize_to")]
    if any(str(dtype).startswith("float8") for dtype in dtypes) and capability < (8, 9):
        return Unavailable(
            f"needs compute capability 8.9 for fp8, and this GPU has {capability}: use 'xla'"
        )
    if name == "triton" and capability < (8, 0):
        return Unavailable(
            f"needs compute capability 8.0 (Ampere), and this GPU has {capability}: use 'xla'"
        )
    if name == "triton" and (missing := _missing_triton()):
        return Unavailable(missing, missing_package=True)
    if name == "mosaic_gpu" and capability != (9, 0):
        return Unavailable(
            f"is for Hopper (compute capability 9.0), and this GPU has {capability}: use 'triton'"
        )
    return None


@functools.cache
def _missing_triton() -> str | None:
    """Names the missing packages of the "triton" modules, which are imported only if none is missing."""
    if importlib.util.find_spec("jax_triton") is None:
        return f"needs jax-triton, which is not installed: {INSTALL}"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # builds under other names, as PyTorch's
        return f"needs the package triton, which is not installed under this name: {INSTALL}"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"needs Triton {oldest} or newer, got {version}: install it by {INSTALL}"
    return None


def would_gather() -> bool:
    """Whether XLA would all-gather a kernel's operands, because it cannot partition kernels."""
    mesh = jax.sharding.get_abstract_mesh()
    is_local = not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)
    return targets.device_count() > 1 and not is_local


def warn_if_gathering() -> bool:
    """`would_gather`, and warns once if so."""
    if not would_gather():
        return False
    _warn_once(
        f"swjax: with {targets.device_count()} devices, quantized layers run through XLA, slowly; "
        "kernels run if a swjax.Layout gives the shardings, inside jax.shard_map, or "
        "with one visible device"
    )
    return True


SAFE_XLA_FLAG = "--xla_gpu_enable_triton_gemm=false"


def _multiplies_int8(operation: str, *arrays: Any, **options: Any) -> bool:
    if "block_weight_gradient" in operation:
        return "int8" in options["dtypes"]
    return "matmul" in operation and jax.tree.leaves(arrays[0])[0].dtype == jnp.int8


def warn_of_split_sums() -> None:
    """Warns that XLA may sum small int8 products wrongly.

    XLA splits their sums, and its Triton code generator may then count columns twice. With jax 0.11.2 on an
    H200, [256, 512] x [512, 128] was twice as large. Only `SAFE_XLA_FLAG` prevents that. On GPUs before
    Ampere XLA multiplies with cuBLAS, which is correct. The option may also be in the `compiler_options` of
    `jax.jit`, which cannot be read during tracing.
    """
    if targets.platform() != "gpu" or tiles.compute_capability() < (8, 0):
        return
    name = SAFE_XLA_FLAG.partition("=")[0]
    values = re.findall(rf"{name}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    if not values or values[-1].lower() not in ("false", "0"):  # XLA reads the last one
        _warn_once(
            "swjax: an int8 product runs through XLA, which on GPUs may sum small ones wrongly: "
            f"set XLA_FLAGS={SAFE_XLA_FLAG} before JAX starts, or use {INSTALL}"
        )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def module_of(name: str, operation: str) -> ModuleType:
    """Imports the module of an implementation; CPUs need none."""
    return importlib.import_module(f"swjax.kernels.{FOLDERS[operation]}.{name}")


def kernel(name: str, operation: str) -> Callable:
    """The function of an implementation, which also accepts the kernel's tile and other settings."""
    return getattr(module_of(name, operation), operation)


def shape_key(operation: str, *arrays: Any) -> str:
    """The key of a shape in the tuned table, without the number of tokens; for a product it is "{n}x{k}",
    for a symmetric product that of a matrix."""
    if "matmul" in operation:
        return "x".join(map(str, jax.tree.leaves(arrays[1])[0].shape))
    if operation == "symmetric_product":
        return "x".join(map(str, arrays[0].shape[1:]))
    width = jax.tree.leaves(arrays[0])[0].shape[-1]
    if "weight_gradient" not in operation:
        return str(width)
    gs = jax.tree.leaves(arrays[1])
    key = f"{gs[0].shape[-1]}x{width}"
    return f"{key}x{len(gs)}" if operation.endswith("_group") else key
