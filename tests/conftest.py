"""Settings of every test: two CPU devices, strict dtype promotion, no rank promotion."""

import fcntl
import gc
import glob
import hashlib
import os
import re
import shutil
import sys
import threading
from functools import partial
from importlib.metadata import version
from pathlib import Path

# Compilation dominates the time of the tests, so most of XLA's optimizations are disabled on CPUs, also in
# processes that tests start. Tests that compare bits enable them for quantizers and the specification.
# Without --xla_gpu_enable_triton_gemm=false, XLA for GPUs computes some int8 products wrongly: see
# swjax.kernels.dispatch.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=2 --xla_gpu_enable_triton_gemm=false"
    " --xla_cpu_parallel_codegen_split_count=1"
    # Only for jaxlib 0.10: later versions do not know this flag, and XLA aborts at an unknown flag.
    + " --xla_cpu_use_fusion_emitters=false"
    * version("jaxlib").startswith("0.10."),
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(os.environ["JAX_PLATFORMS"] == "cpu"))
)

# Processes of tests share compiled modules, and later runs reuse them, also where Python keeps none, as in
# many containers. Otherwise each process compiles what it imports, which doubles the time to start.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    modules = str(Path(__file__).parent.parent / ".cache" / "pycache")
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", modules)
    sys.dont_write_bytecode = False

# A program that one test compiled serves all others, in every process of pytest and in later runs. JAX's keys
# contain the program, the options and XLA's version; the folder's name contains the instructions of the CPU.
if "SWJAX_TEST_CACHE" not in os.environ:
    cpu = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    flags = str(re.findall(r"(?m)^(?:flags|Features)\b.*", cpu)[:1])
    programs = f".cache/programs-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"
    os.environ["SWJAX_TEST_CACHE"] = str(Path(__file__).parent.parent / programs)
    if len(glob.glob(os.environ["SWJAX_TEST_CACHE"] + "/*")) > 40_000:  # four versions of all tests
        shutil.rmtree(os.environ["SWJAX_TEST_CACHE"])

import device_process
import jax
import pytest
from jax._src.interpreters import mlir
from jax.experimental.compilation_cache.compilation_cache import reset_cache

gc.disable()  # until `pytest_collection_finish`: collecting tests makes little garbage
collect_ignore = ["others"]  # programs in environments of their own: `make others`

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would use TF32 for fp32


class Contexts(threading.local):
    """Serves one MLIR context to ten compilations of a thread, as jax 0.12 does.

    Earlier versions make a context for every compilation, which takes a tenth of the time of the tests.
    """

    make = staticmethod(mlir.make_ir_context)
    left = 0

    def __call__(self):
        if not self.left:
            self.context, self.left = self.make(), 10
        self.left -= 1
        return self.context


if not hasattr(mlir, "_create_ir_context"):
    mlir.make_ir_context = Contexts()

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
    """Restores the shared compilation cache after a test that trains in this process."""
    yield
    if jax.config.jax_compilation_cache_dir != CACHE["jax_compilation_cache_dir"]:
        reset_cache()
    use_cache()


@pytest.fixture(scope="module")
def shared_cache():
    """Returns the directory of compiled programs, for processes that tests start; disables optimizations."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield CACHE["jax_compilation_cache_dir"]
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def micro(shared_cache):
    """A function that builds the config of a very small run: see `micro_run.micro_config`."""
    from micro_run import micro_config  # imported here: other tests need no training packages

    return partial(micro_config, shared_cache)


@pytest.fixture(scope="module")
def reference(micro, tmp_path_factory):
    """The config and the workdir of an uninterrupted run. Tests must not change them."""
    from micro_run import train

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes
    workdir = folder / "reference"
    with open(folder / "reference.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workdir / "results.json").exists():
            assert train(micro(), workdir) == 0
    return micro(), workdir


@pytest.fixture
def started(shared_cache, tmp_path):
    """A function that starts train.py in `tmp_path`: see `micro_run.start`. Kills processes that remain."""
    from micro_run import start

    processes = []

    def begin(**changes):
        processes.append(start(tmp_path, **{"train.compilation_cache": shared_cache} | changes))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()  # otherwise a later test reports open pipes


@pytest.fixture
def collect():
    """Collects garbage, so that a warning about objects that Orbax leaked is raised in this test."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def compiles_as_users_do():
    """Enables XLA's optimizations for a module whose tests depend on them."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_collection_modifyitems(items):
    """Starts with mypy, at whose end a core would be idle; skips tests marked `gpu` without a GPU."""
    items.sort(key=lambda item: item.path.name != "test_types.py")
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and JAX_PLATFORMS=cuda,cpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    """Exempts what is imported by now from garbage collection, and collects less often.

    Tracing creates many objects, and each of Python's collections would visit all modules and tests again.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # from 700, 10, 10


def pytest_unconfigure():
    """At exit, nanobind would report Triton's frozen types as leaked."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Runs tests marked `eight_devices` in the process with eight CPU devices."""
    if device_process.is_serving() or "eight_devices" not in item.keywords:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in device_process.run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(
        nextitem
    )  # of modules and folders, as pytest's own protocol does
    return True


def pytest_sessionfinish():
    device_process.stop()


@pytest.fixture(autouse=True, scope="module")
def clear_caches():
    """Clears JAX's caches after each module: they slow down Python's garbage collector."""
    yield
    if not device_process.is_serving():  # there every test would clear the caches
        jax.clear_caches()
