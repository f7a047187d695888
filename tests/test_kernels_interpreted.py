"""Kernels on CPUs, in interpreters: of Mosaic's every copy, barrier and product, of Triton's every value."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_cases import DTYPES, PRODUCTS, normal, operands
from numeric import FLOOR_DB, snr_db

from swjax.kernels import mosaic_gpu

pytestmark = [
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="interpreter: needs jax 0.11"),
    pytest.mark.skipif(
        jax.default_backend() != "cpu", reason="the GPU runs the kernels themselves"
    ),
]

# What a tile of 128 x 256 and steps of 128 do not divide; whole halves of tiles that are past the edge; more
# tiles than blocks; one row.
SHAPES = [(300, 144, 264), (320, 128, 64), (520, 256, 512), (1, 128, 256), (130, 400, 8)]


def interpreted():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return {"interpret": plgpu.InterpretGPUParams(), "multiprocessors": 4}


@pytest.mark.parametrize("b_scope", ["tensor", "channel"])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_are_exact(shape, b_scope):
    a, b = operands(shape, b_scope=b_scope)
    y = mosaic_gpu.matmul(a, b, out_dtype="float32", **interpreted())
    total = a.values.astype(np.int64) @ b.values.astype(np.int64).T
    want = total.astype(np.float32) * (a.scale * b.scale.reshape(1, -1))
    np.testing.assert_allclose(y, want, rtol=2.0**-23)


@pytest.mark.parametrize("dtypes, out_dtype", list(zip(PRODUCTS, DTYPES)))
def test_product_in_every_format(dtypes, out_dtype):
    a, b = operands((200, 144, 264), dtypes)
    bias = normal(264, out_dtype)
    y = mosaic_gpu.matmul(a, b, bias, out_dtype=out_dtype, **interpreted())
    assert y.dtype == out_dtype
    assert snr_db(y, oracle.matmul(a, b, bias)) > FLOOR_DB[out_dtype]


@pytest.mark.parametrize(
    "shape, dtype", [((320, 136, 520), "bfloat16"), ((200, 136, 264), "float16")]
)
def test_weight_gradient(shape, dtype):
    """In one slice: the interpreter has no semaphores across blocks."""
    tokens, k, n = shape
    x, g = normal((tokens, k), dtype), normal((tokens, n), dtype, seed=1)
    dw = mosaic_gpu.weight_gradient(x, g, slices=1, **interpreted())
    assert snr_db(dw, oracle.weight_gradient(x, g)) > FLOOR_DB["float32"]


def test_triton_kernels():
    """Those of tests/triton_interpreted.py."""
    pytest.importorskip("triton", reason="needs Triton, which is made for Linux only")
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", here / "triton_interpreted.py"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=here.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-5000:] + run.stderr[-2000:]
