"""Settings every test runs under: two CPU devices, and no silent promotion of dtypes or ranks."""

import os

# The second flag: without it XLA for GPUs gets some int8 products wrong, see swjax.kernels.dispatch.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_gpu_enable_triton_gemm=false"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would use TF32 for fp32


def pytest_collection_modifyitems(items):
    """Skips tests marked `gpu` visibly where there is no GPU."""
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
