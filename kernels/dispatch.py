"""Which implementation of each operation runs: the table, what each needs, and the one place that chooses."""

import functools
import importlib.metadata
import importlib.util
import os
import warnings
from types import ModuleType

import jax
import jax.numpy as jnp

from swjax.kernels import reference, tiles

# {operation: its implementations besides "xla", the preferred one first}. Each is a function of that name
# in its module, with the signature and the result of the specification in `reference`.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "quantize": ("triton",),
    "quantize_by": ("triton",),
    "quantize_both": ("triton",),
    "quantize_and_sum": ("triton",),
    "matmul": ("mosaic_gpu", "triton"),
    "weight_gradient": ("mosaic_gpu",),
    "layer_norm": ("triton",),
    "layer_norm_backward": ("triton",),
    "gelu": ("triton",),
    "gelu_backward": ("triton",),
    "attention": ("triton",),
    "attention_backward": ("triton",),
}
NAMES = ("xla", "triton", "mosaic_gpu")

INSTALL = "pip install 'swjax[gpu]' (Python 3.12 or newer)"


def run(operation: str, *arrays, implementation: str | None = None, **options):
    """Computes `operation` by the implementation of that name, or by the best one that can.

    Args:
      operation: a key of `IMPLEMENTATIONS`; its specification is the function of that name in
        `swjax.kernels.reference`.
      *arrays: its arrays and QTensors.
      implementation: "xla", "triton", "mosaic_gpu"; None chooses.
      **options: its other arguments.

    Raises:
      ValueError: there is no implementation of that name, or it cannot run: the message says why.

    >>> run("quantize", jnp.ones((1, 2))).values.tolist()
    [[127, 127]]
    """
    name = choose(operation, *arrays, implementation=implementation, **options)
    if name == "xla":
        if operation == "matmul":
            _warn_of_split_sums(*arrays)
        return getattr(reference, operation)(*arrays, **options)
    return _kernel(name, operation, **options)(*arrays)


@functools.cache
def _kernel(name: str, operation: str, **options):
    """One jitted function for each kernel: the layers of a model that call it with arrays of the same shapes
    share its lowering, which takes about a second."""
    function = functools.partial(getattr(_module(name, operation), operation), **options)
    function.__name__ = f"swjax_{operation}"
    return jax.jit(jax.custom_batching.sequential_vmap(function))


def choose(operation: str, *arrays, implementation: str | None = None, **options) -> str:
    """The name of the implementation that `run` uses for these arguments.

    None takes, on an NVIDIA GPU, what the device's tuned table says is fastest for the shape, then the first
    of `IMPLEMENTATIONS` that can run. Operations that have no implementation of the asked name take XLA.
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
    preferred = tiles.preferred(operation, _shape_key(operation, *arrays))
    if preferred == "xla":
        return "xla"
    for name in sorted(known, key=lambda name: name != preferred):  # that one first
        reason = why_not(name, operation, *arrays, **options)
        if reason is None:
            return name
        if "install" in reason:
            _warn_once(f"swjax: {operation} runs through XLA, slowly: {name!r} {reason}")
    return "xla"


def check(implementation: str | None) -> None:
    """Raises a ValueError if there is no implementation of that name."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(
            f"implementation must be one of {', '.join(NAMES)} or None (automatic), "
            f"got {implementation!r}"
        )


def why_not(name: str, operation: str, *arrays, **options) -> str | None:
    """Why an implementation cannot compute this, as the end of a sentence; None: it can."""
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, and this process runs on {jax.default_backend()}: use 'xla'"
    capability = tiles.compute_capability()
    leaves = jax.tree.leaves(arrays)
    if any(leaf.size == 0 for leaf in leaves):
        return "takes no empty arrays: use 'xla'"
    narrow = [str(leaf.dtype) for leaf in leaves] + [
        options.get("dtype"),
        options.get("quantize_to"),
    ]
    if any(str(dtype).startswith("float8") for dtype in narrow) and capability < (8, 9):
        return f"needs compute capability 8.9 for fp8, and this GPU has {capability}: use 'xla'"
    if name == "triton":
        return _why_not_triton(operation, capability, leaves, options)
    return _why_not_mosaic(operation, capability, leaves, options)


def _why_not_triton(operation, capability, leaves, options):
    missing = _missing_triton()
    if missing:
        return missing
    if capability < (8, 0):
        return f"needs compute capability 8.0 (Ampere), and this GPU has {capability}: use 'xla'"
    if operation.startswith("attention"):
        return _why_not_attention(capability, leaves[0])
    if operation == "quantize_by":
        (*rows, n), absmax = leaves[0].shape, leaves[1].shape
        ones = (1,) * len(rows)
        if absmax not in ((*ones, 1), (*rows, 1), (*ones, n)):
            return f"takes scales of rows, of columns or one, got absmax {absmax}: use 'xla'"
    elif operation == "quantize":
        ndim = leaves[0].ndim
        axes = sorted(axis % ndim for axis in options.get("axes", (-1,)))
        if axes not in (list(range(ndim)), list(range(ndim - 1)), [ndim - 1]):
            return f"takes scales over the last axis, the others or all, got axes {axes}: use 'xla'"
    elif operation not in ("matmul", "quantize_both") and leaves[0].shape[-1] > tiles.WIDEST_ROW:
        return f"takes rows of up to {tiles.WIDEST_ROW}, got {leaves[0].shape[-1]}: use 'xla'"
    return None


def _why_not_attention(capability, q):
    _, tokens, _, width = q.shape
    if capability != (9, 0):
        return f"is for Hopper (compute capability 9.0), and this GPU has {capability}: use 'xla'"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"is for 16 bits, got {q.dtype}: use 'xla'"
    if tokens > tiles.LONGEST_SEQUENCE:
        return f"holds sequences of up to {tiles.LONGEST_SEQUENCE} tokens, got {tokens}: use 'xla'"
    if not 16 <= width <= 128 or width % 8:
        return f"takes heads of 16 to 128 features, a multiple of 8, got {width}: use 'xla'"
    return None


def _why_not_mosaic(operation, capability, leaves, options):
    remedy = "'xla'" if operation == "weight_gradient" else "'triton'"
    if capability != (9, 0):
        return (
            f"is for Hopper (compute capability 9.0), and this GPU has {capability}: use 'triton'"
        )
    if operation == "weight_gradient":
        (tokens, k), n = leaves[0].shape, leaves[1].shape[1]
        if leaves[0].dtype not in (jnp.bfloat16, jnp.float16):
            return f"is for 16-bit operands, got {leaves[0].dtype}: use 'xla'"
        shape, multiples = {"tokens": tokens, "k": k, "n": n}, {"tokens": 8, "k": 64, "n": 64}
    else:
        if leaves[0].dtype != leaves[2].dtype and jax.__version_info__ < (0, 11):
            return (
                f"needs jax 0.11 for operands of two types, got {leaves[0].dtype} and "
                f"{leaves[2].dtype} with jax {jax.__version__}: update jax, or use 'triton'"
            )
        along_a, along_b = options.get("contract", (-1, -1))
        k, n = leaves[0].shape[along_a], leaves[2].size // leaves[2].shape[along_b]
        columns = 32 if options.get("out_dtype") == "float32" else 64
        shape = {"rows": leaves[0].size // k, "k": k, "n": n}
        multiples = {"rows": 8, "k": 128, "n": columns}
    for name, length in shape.items():
        if length % multiples[name]:
            return f"needs {name} to be a multiple of {multiples[name]}, got {length}: use {remedy}"
    return None


@functools.cache
def _missing_triton() -> str | None:
    if importlib.util.find_spec("jax_triton") is None:
        return f"needs jax-triton, which is not installed: {INSTALL}"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 7):
        return f"needs Triton 3.7 or newer, got {version}: install it by {INSTALL}"
    return None


def would_gather() -> bool:
    """XLA cannot partition these kernels: it would gather their operands on every device."""
    if jax.device_count() == 1:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names):
        return False
    _warn_once(
        f"swjax: {jax.device_count()} devices, so that quantized layers run through XLA, slowly; "
        "kernels run where a swjax.Layout says how arrays lie, inside jax.shard_map, or with one "
        "visible device"
    )
    return True


SAFE_XLA_FLAG = "--xla_gpu_enable_triton_gemm=false"


def _warn_of_split_sums(a, *_):
    """XLA cuts the sums of small int8 products in pieces, of which its Triton generator may count columns
    twice: seen with jax 0.11.2 on an H200, [256, 512] x [512, 128] twice as large. No API turns that off."""
    if a.values.dtype != jnp.int8 or jax.default_backend() != "gpu":
        return
    if SAFE_XLA_FLAG not in os.environ.get("XLA_FLAGS", ""):
        _warn_once(
            "swjax: an int8 product runs through XLA, which on GPUs may sum small ones wrongly: "
            f"set XLA_FLAGS={SAFE_XLA_FLAG} before JAX starts, or use {INSTALL}"
        )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _module(name: str, operation: str) -> ModuleType:
    if name == "triton":
        name = "triton_attention" if operation.startswith("attention") else "triton_gpu"
    return importlib.import_module(f"swjax.kernels.{name}")


def _shape_key(operation: str, *arrays) -> str:
    """What the tuned table calls a shape: all but the number of tokens. A product's is "{n}x{k}"."""
    if operation == "matmul":
        return "x".join(map(str, arrays[1].values.shape))
    width = arrays[0].shape[-1]
    return f"{arrays[1].shape[-1]}x{width}" if operation == "weight_gradient" else str(width)
