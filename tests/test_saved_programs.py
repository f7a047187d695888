"""Lowered kernels are saved on disk and loaded by later processes; functions of XLA replace most kernels."""

import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from swjax.kernels import dispatch, reference, saved_programs, targets
from swjax.kernels.reference import QTensor

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="functions are lowered for CPUs: set JAX_PLATFORMS=cpu"
)
X = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the entries, in an empty compilation cache."""
    monkeypatch.setattr(saved_programs, "PLATFORM", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    monkeypatch.setattr(saved_programs, "_gave_up", False)
    return tmp_path / saved_programs.FOLDER


class Kernel:
    """A kernel that counts how often it is lowered."""

    def __init__(self):
        self.lowered = 0

    def process(self, *options):
        """The function of a process that has lowered nothing yet."""

        def quantize_or_not(x, q=None):
            self.lowered += 1
            both = reference.quantize(x), None
            return both if q is None else (*both, q.values)

        return jax.jit(saved_programs.saved(quantize_or_not, *options))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_later_process_lowers_nothing(folder):
    kernel = Kernel()
    first = kernel.process()(X)
    assert kernel.lowered == 1 and len(list(folder.iterdir())) == 1
    second = kernel.process()(X)
    assert kernel.lowered == 1
    assert_equal(first, second)
    assert_equal(first, (reference.quantize(X), None))


def test_both_processes_compile_the_same_program(folder):
    """Otherwise the second process would not find the program in JAX's compilation cache."""
    first, second = (Kernel().process().lower(X).as_text() for _ in range(2))
    assert first == second


def test_what_changes_the_program_changes_the_entry(folder, monkeypatch):
    kernel = Kernel()
    q = reference.quantize(X)
    cases = [
        ((), (X,)),
        (("option",), (X,)),
        ((), (X.T,)),
        ((), (X.astype(jnp.float32),)),
        ((), (X, q)),
    ]
    for count, (options, arrays) in enumerate(cases, 1):
        for _ in range(2):
            kernel.process(*options)(*arrays)
            assert kernel.lowered == count
    monkeypatch.setattr(saved_programs, "_environment", lambda: ("another version",))
    kernel.process()(X)
    assert kernel.lowered == len(cases) + 1 == len(list(folder.iterdir()))
    names = set()
    for chip in ("H100", "A100"):
        with targets.compiling_for(chip):
            names.add(saved_programs._name((), (X,)))
    assert len(names) == 2


def test_the_environment_names_packages_and_compilers(monkeypatch):
    monkeypatch.setenv("TRITON_DEBUG", "1")
    environment = saved_programs._environment.__wrapped__()
    assert {jax.__version__, ("TRITON_DEBUG", "1")} <= {*environment}


@pytest.mark.parametrize(
    "damage",
    [lambda entry: entry[:-1], lambda entry: b"", lambda entry: entry[:40] + b"?" + entry[41:]],
    ids=["truncated", "empty", "changed"],
)
def test_a_damaged_entry_is_replaced(folder, damage):
    kernel = Kernel()
    expected = kernel.process()(X)
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert_equal(kernel.process()(X), expected)
    assert kernel.lowered == 2
    assert entry.read_bytes() == whole


def test_nothing_is_saved_without_a_cache(folder, monkeypatch):
    kernel = Kernel()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        kernel.process()(X)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    for cache in (None, "gs://bucket/cache"):
        jax.config.update("jax_compilation_cache_dir", cache)
        assert saved_programs._folder() is None
    jax.config.update("jax_compilation_cache_dir", str(folder.parent))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    kernel.process()(X)
    assert kernel.lowered == 2 and not folder.exists()


def test_a_full_disk_costs_time_only(folder, monkeypatch):
    folder.write_text("")  # not a folder, so that no entry can be written
    kernel = Kernel()
    for _ in range(2):
        monkeypatch.setattr(saved_programs, "_gave_up", False)
        with pytest.warns(UserWarning, match="lowered in every process"):
            assert_equal(kernel.process()(X)[0], reference.quantize(X))
    assert kernel.lowered == 2


def test_a_folder_that_cannot_be_written_is_reported_once(folder, monkeypatch):
    def read_only(path, _):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.warns(UserWarning, match="cannot write to .*Read-only"):
        Kernel().process("first")(X)
    Kernel().process("second")(X)  # warnings are errors


def test_a_kernel_that_cannot_be_exported_is_lowered_directly(folder, monkeypatch):
    def fail(*_):
        raise ImportError("no flatbuffers")

    monkeypatch.setattr(saved_programs, "_lower", fail)
    with pytest.warns(UserWarning, match="no flatbuffers"):
        assert_equal(Kernel().process()(X)[0], reference.quantize(X))


def test_processes_that_write_the_same_entry(folder):
    path = folder / "entry"
    programs = [bytes([i]) * 100_000 for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            seen = threads.map(lambda program: saved_programs._write(path, program), programs)
            assert saved_programs._read(path) in (None, *programs)
            list(seen)
    assert saved_programs._read(path) in programs
    assert list(folder.iterdir()) == [path]


def test_an_entry_that_cannot_be_deserialized_is_lowered_directly(folder, monkeypatch):
    """As when an earlier process had flatbuffers, and this one has not."""

    def fail(_):
        raise ImportError("no flatbuffers")

    kernel = Kernel()
    kernel.process()(X)
    monkeypatch.setattr(jax.export, "deserialize", fail)
    with pytest.warns(UserWarning, match="no flatbuffers"):
        assert_equal(kernel.process()(X)[0], reference.quantize(X))
    assert kernel.lowered == 2


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_several_devices_saves_nothing_and_loads(folder, axis_type, monkeypatch):
    """Under `jax.set_mesh` a kernel is lowered for all devices, and one device could not load it."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    rows = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    both = jax.device_put(jnp.concatenate([X, X]), NamedSharding(mesh, P("data")))
    kernel = Kernel()

    def run_sharded():
        with jax.set_mesh(mesh):
            return jax.jit(jax.shard_map(lambda x: kernel.process()(x)[0], mesh=mesh, **rows))(both)

    expected = reference.quantize(jnp.concatenate([X, X]))
    with pytest.warns(UserWarning, match="for 2 devices"):
        assert_equal(run_sharded(), expected)
    assert not folder.exists()
    lowered = kernel.lowered
    assert_equal(run_sharded(), expected)
    assert kernel.lowered == lowered + 1  # no second attempt
    monkeypatch.setattr(saved_programs, "_gave_up", False)  # another process
    assert_equal(kernel.process()(X)[0], reference.quantize(X))
    lowered = kernel.lowered
    assert_equal(run_sharded(), expected)
    assert kernel.lowered == lowered


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_transformations_around_a_saved_kernel(folder, monkeypatch, axis_type):
    """As in the models: below vmap, scan, checkpoint and shard_map, in the forward pass of a custom_vjp."""
    monkeypatch.setattr(dispatch, "module_of", lambda *_: reference)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    sharded = jax.device_put(X, NamedSharding(mesh, P("data")))
    expected = reference.quantize(X)

    def quantize(x):
        return dispatch._jitted("triton", "quantize")(x)

    @jax.custom_vjp
    def rounded(x):
        return reference.dequantize(quantize(x)).astype(x.dtype)

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))

    def loss(xs):
        ys = jax.lax.map(jax.checkpoint(rounded), xs)
        return jnp.sum(jnp.square(ys.astype(jnp.float32)))

    for _ in range(2):
        dispatch._jitted.cache_clear()
        batched = jax.vmap(quantize)(X[None])
        assert_equal(batched, jax.tree.map(lambda a: a[None], expected))
        gradient = jax.jit(jax.grad(loss))(X[None])
        np.testing.assert_array_equal(
            gradient[0], 2 * reference.dequantize(expected).astype(X.dtype)
        )
        rows = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
        assert_equal(jax.jit(jax.shard_map(quantize, mesh=mesh, **rows))(sharded), expected)
        monkeypatch.setattr(dispatch, "module_of", None)  # the second time, all are loaded
    dispatch._jitted.cache_clear()


def mosaic_products(rows: Iterable[int]) -> str:
    """The program of products on Hopper, lowered without a GPU."""
    dispatch._jitted.cache_clear()  # as in another process
    product = dispatch._jitted("mosaic_gpu", "matmul", out_dtype="bfloat16")
    operands = [
        QTensor(jax.ShapeDtypeStruct((m, 512), "int8"), jax.ShapeDtypeStruct((m, 1), "float32"))
        for m in rows
    ]
    traced = jax.jit(lambda operands: [product(a, a) for a in operands]).trace(operands)
    try:
        return traced.lower(lowering_platforms=("cuda",)).as_text()
    finally:
        dispatch._jitted.cache_clear()


def test_mosaic_kernels_are_loaded(folder, monkeypatch):
    monkeypatch.setattr(saved_programs, "PLATFORM", "cuda")
    first = mosaic_products([256])
    assert first.count("custom_call @mosaic_gpu") == 1
    monkeypatch.setattr(dispatch, "module_of", None)
    assert mosaic_products([256]) == first


def test_settings_of_jax_that_change_a_program_change_its_entry(folder):
    kernel = Kernel()
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            kernel.process()(X)
    assert kernel.lowered == len(list(folder.iterdir())) == 2
