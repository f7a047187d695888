"""Runs kernels on CPUs: those for Mosaic GPU in Pallas's interpreter, those for Triton in Triton's.

Triton interprets the kernels that are imported while TRITON_INTERPRET is set. Other tests compile kernels, so
the interpreter has a process of its own, which starts with the first call and serves all of them.
"""

import functools
import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import jax
import numpy as np
import pytest

_ON_GPU = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="the GPU runs the kernels themselves"
)
SKIPS = {
    "triton": [
        _ON_GPU,
        pytest.mark.skipif(
            importlib.util.find_spec("triton") is None,
            reason="needs Triton, which is made for Linux only",
        ),
    ],
    "mosaic_gpu": [
        _ON_GPU,
        pytest.mark.skipif(
            jax.__version_info__ < (0, 11), reason="Pallas's interpreter: needs jax 0.11"
        ),
    ],
}


def run(name, operation, *arrays, **options):
    """Runs the "triton" or "mosaic_gpu" kernel of an operation in its interpreter."""
    return {"triton": _triton, "mosaic_gpu": _mosaic}[name](operation, *arrays, **options)


def _mosaic(operation, *arrays, **options):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from swjax.kernels import dispatch, tiles
    from swjax.kernels.attention.mosaic_gpu.backward_heads import SWIZZLE_TOKENS, Heads
    from swjax.kernels.mosaic_gpu.slices import Slices

    if "weight_gradient" in operation and not operation.startswith("ragged"):
        # The interpreter has no semaphores across blocks.
        options.setdefault("slices", Slices(0, 0.0, 1))
    races, count = options.pop("detect_races", False), options.pop("multiprocessors", 4)
    parameters = plgpu.InterpretGPUParams(detect_races=races)  # raises an error at a race

    def lines(self, ref, slot, group, groups):  # the interpreter's memory has no swizzles
        return ref.at[slot, pl.ds(group * SWIZZLE_TOKENS, groups * SWIZZLE_TOKENS)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_callbacks, "wgmma", partial(_multiply, gpu_callbacks.wgmma))
        patch.setattr(plgpu, "kernel", partial(plgpu.kernel, interpret=parameters))
        patch.setattr(tiles, "multiprocessors", lambda: count)
        patch.setattr(Heads, "_lines", lines)
        return jax.block_until_ready(dispatch.kernel("mosaic_gpu", operation)(*arrays, **options))


def _multiply(multiply_shared, *, a_allocation_key_as_array, **arguments):
    """Interprets wgmma. Pallas's interpreter supports a left operand in shared memory only; this one also
    supports registers.

    Args:
      multiply_shared: Pallas's `wgmma`.
      a_allocation_key_as_array: the left operand, an array of two dimensions (registers), or the key of its
        buffer in shared memory.
      **arguments: the other arguments of Pallas's `wgmma`.

    Returns:
      The token among the arguments, which orders the calls.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    a = np.asarray(a_allocation_key_as_array)
    if a.ndim < 2:  # the key of a buffer in shared memory
        return multiply_shared(a_allocation_key_as_array=a_allocation_key_as_array, **arguments)
    memory, thread = gpu_callbacks._get_shared_memory(), arguments["thread"]

    def place(name):
        # the buffer of an operand, and the transformed index into it
        key = gpu_callbacks.HostAllocationKey.from_array(
            arguments[f"{name}_allocation_key_as_array"]
        )
        transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{name}_transforms"])
        return key, memory.access(key, jax.tree.map(int, transforms))

    sums, b = (memory.get_buffer_content(*place(name), thread)[0] for name in ("acc", "b"))
    sums = sums + np.matmul(a, b, dtype=sums.dtype)
    memory.store_buffer_content(*place("acc"), sums, thread)
    return arguments["token"]


def _triton(operation, *arrays, **options):
    arrays = jax.tree.map(np.asarray, arrays)
    # The first call starts the process, which inherits this environment.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        result = _process().submit(_in_the_process, operation, arrays, options)
    return result.result()


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _in_the_process(operation, arrays, options):
    import triton_interpreter  # imports Triton

    triton_interpreter.install()
    return triton_interpreter.run(operation, *arrays, **options)
