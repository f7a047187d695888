"""Runs kernels on CPUs: those for Mosaic GPU in Pallas's interpreter, those for Triton in Triton's.

Triton interprets the kernels that are imported while TRITON_INTERPRET is set. Other tests compile kernels, so
the interpreter has a process of its own, which starts with the first call and serves all of them.
"""

import functools
import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

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
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from swjax.kernels import mosaic_gpu

    if operation.endswith("weight_gradient"):
        options["slices"] = 1  # the interpreter has no semaphores across blocks
    options |= {"interpret": plgpu.InterpretGPUParams(), "multiprocessors": 4}
    return getattr(mosaic_gpu, operation)(*arrays, **options)


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
