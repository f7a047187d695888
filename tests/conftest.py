"""Settings every test runs under: two CPU devices, and no silent promotion of dtypes or ranks."""

import atexit
import os
import shutil
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

# Compiling takes most of the time here, so XLA for CPUs does it in a hurry, also in the processes that
# tests start. Quantizers and the specification are compiled as users compile them: bits count.
# The second flag: without it XLA for GPUs gets some int8 products wrong, see swjax.kernels.dispatch.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=2 --xla_gpu_enable_triton_gemm=false"
    " --xla_cpu_parallel_codegen_split_count=1"
    # XLA ends at a flag that it does not know, as later ones do at this.
    + " --xla_cpu_use_fusion_emitters=false"
    * version("jaxlib").startswith("0.10."),
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(os.environ["JAX_PLATFORMS"] == "cpu"))
)

# A test may start several processes: they share compiled modules also where Python keeps none, as in
# many containers. Without, each compiles what it imports, which doubles the time to start.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    cache = Path(__file__).parent.parent / ".cache" / "pycache"
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(cache))

# A program that one test compiled serves all others, in every process of pytest.
if "SWJAX_TEST_CACHE" not in os.environ:
    os.environ["SWJAX_TEST_CACHE"] = tempfile.mkdtemp(prefix="swjax-")
    atexit.register(shutil.rmtree, os.environ["SWJAX_TEST_CACHE"], ignore_errors=True)

import device_process
import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would use TF32 for fp32


CACHE = {
    "jax_compilation_cache_dir": os.environ["SWJAX_TEST_CACHE"],
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}


def use_cache():
    for name, value in CACHE.items():
        jax.config.update(name, value)


use_cache()


@pytest.fixture(autouse=True)
def compilation_cache():
    """A run that was trained in this process leaves its compilation cache to no other test."""
    yield
    if jax.config.jax_compilation_cache_dir != CACHE["jax_compilation_cache_dir"]:
        reset_cache()
    use_cache()


@pytest.fixture(scope="module")
def shared_cache():
    """The directory of compiled programs, for the processes that tests start too."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield CACHE["jax_compilation_cache_dir"]
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def micro(shared_cache):
    """Builds the config of a very small run, see `micro_run.micro_config`."""
    from micro_run import micro_config  # here: other tests need no training packages

    return partial(micro_config, shared_cache)


@pytest.fixture(scope="module")
def reference(micro, tmp_path_factory):
    """A run that nothing disturbed: its config and workdir, to be read only."""
    from micro_run import train

    workdir = tmp_path_factory.getbasetemp() / "reference"  # of all modules
    if not (workdir / "results.json").exists():
        assert train(micro(), workdir) == 0
    return micro(), workdir


@pytest.fixture
def started(shared_cache, tmp_path):
    """Starts train.py in `tmp_path`, see `micro_run.start`; kills its remaining processes."""
    from micro_run import start

    processes = []

    def begin(**changes):
        processes.append(start(tmp_path, **{"train.compilation_cache": shared_cache} | changes))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def compiles_as_users_do():
    """For modules whose tests depend on the optimizations of XLA."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_collection_modifyitems(items):
    """Skips tests marked `gpu` visibly where there is no GPU."""
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and JAX_PLATFORMS=cuda,cpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Runs tests marked `eight_devices` in a process that has them."""
    if device_process.is_serving() or "eight_devices" not in item.keywords:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in device_process.run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish():
    device_process.stop()


@pytest.fixture(autouse=True, scope="module")
def clear_caches():
    """What a module compiled is of no use to others, and Python's collector would go through it often."""
    yield
    if not device_process.is_serving():  # there each test ends its module
        jax.clear_caches()
