"""Saves lowered kernels on disk, because lowering one takes up to a second and every process would repeat it.

An entry is the program of a kernel for given shapes, exported by `jax.export`. Entries are in a folder of
JAX's compilation cache. The name of an entry is a hash of everything that determines its program, so an entry
is never out of date. A damaged entry is replaced.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from swjax.kernels import tiles
from swjax.kernels.lowering_processes import Job, Queue, Settings, Task, most_processes
from swjax.kernels.reference import QTensor

PLATFORM = "cuda"
FOLDER = "swjax_kernels"
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton")
COMPILER_VARIABLES = ("TRITON_", "JAX_TRITON_", "MOSAIC_GPU_")
# `jax.export` rejects targets that other versions may lack; here the name of an entry contains the versions.
TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi", "mosaic_gpu_v2")
DIGEST = hashlib.sha256().digest_size

jax.export.register_namedtuple_serialization(QTensor, serialized_name="swjax.QTensor")


def saved(function: Callable, *options: Any) -> Callable:
    """Returns a function like `function` that loads its lowered program from disk, or lowers and saves it.

    On a GPU host with at least four cores, other processes lower missing programs while this one traces. A
    program that waits is lowered by this process when the caller's program is lowered.

    It calls `function` itself if JAX has no compilation cache on a local disk, or if the program can be
    neither loaded nor exported. It also does so in a run of several processes: XLA needs equal programs in
    all of them, but names in a lowered Mosaic kernel depend on the kernels that its process lowered before.

    Args:
      function: (*arrays) -> arrays, a kernel without derivatives. It is called while JAX traces.
      *options: everything else that determines the kernel, besides the shapes and dtypes of the arrays. Their
        `repr` must be the same in every process, so functions and arrays are excluded. They are the field
        `kernel` of a `lowering_processes.Task`, which other processes need picklable.
    """

    def load_or_lower(path, *arrays):
        try:
            program = _read(path)
            if program is None:
                program = lower(function, _like(arrays), path)
            exported = jax.export.deserialize(bytearray(program))
        # If the kernel cannot be lowered at all, lowering the caller's program raises the error.
        except Exception as error:
            _give_up(str(error))
            return function(*arrays)
        return exported.call(*arrays)

    @functools.wraps(function)
    def call(*arrays):
        folder = _folder()
        if folder is None or _gave_up:
            return function(*arrays)
        like = _like(arrays)
        path = folder / _name(options, like)
        job = None if os.path.exists(path) else _submit(path, options, like)
        if job is None:
            return load_or_lower(path, *arrays)
        settings = Settings.current()

        def when_done(*arrays):
            taken_back = _QUEUE.take_back(job)
            if not taken_back:
                job.done.wait()
            try:
                # The path is that of a program under these settings.
                with settings.applied():
                    return function(*arrays) if _gave_up else load_or_lower(path, *arrays)
            finally:
                if taken_back:
                    job.finish()

        return _deferred(when_done, jax.eval_shape(function, *like), *arrays)

    return call


def _like(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


_QUEUE = Queue(most_processes() if sys.platform == "linux" else 0)


def _submit(path: Path, kernel: tuple[Any, ...], like: tuple[Any, ...]) -> Job | None:
    """Submits the task of lowering a kernel; None if this process must do it at once."""
    if not _QUEUE.processes or jax.default_backend() != "gpu" or _deferred_primitive() is None:
        return None
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.access(path.parent, os.W_OK):
            return _QUEUE.submit(Task(path, kernel, like, tiles.device(), Settings.current()))
    return None


@functools.cache
def _deferred_primitive() -> Any:
    """The primitive of `_deferred`, or None if this version of JAX lacks a part that it needs.

    These parts of JAX may change. Only GPU hosts need them, so importing this module does not.
    """
    try:
        import jax.extend
        from jax.interpreters import mlir

        primitive = jax.extend.core.Primitive("swjax_deferred")
        primitive.multiple_results = True
        primitive.def_abstract_eval(lambda *_, out, **unused: out)

        def lower(*leaves, function, out):
            return function(*leaves)

        primitive.def_impl(lower)  # under jax.disable_jit
        mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=True))
    except (ImportError, AttributeError) as error:
        warnings.warn(f"swjax: one process lowers all kernels: {error}", stacklevel=2)
        return None
    return primitive


def _deferred(function: Callable, out: Any, *arrays: Any) -> Any:
    """Calls a function when the program of the caller is lowered, not when it is traced.

    Args:
      function: (*arrays) -> arrays.
      out: ShapeDtypeStructs of its outputs.
      *arrays: its arguments.
    """
    leaves, structure = jax.tree.flatten(arrays)
    like, out_structure = jax.tree.flatten(out)

    def flat(*leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    shapes = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in like)
    results = _deferred_primitive().bind(*leaves, function=flat, out=shapes)
    return jax.tree.unflatten(out_structure, results)


_gave_up = False


def _give_up(reason: str) -> None:
    """Stops saving and loading in this process: another attempt could lower another kernel twice."""
    global _gave_up
    _gave_up = True
    warnings.warn(f"swjax: kernels are lowered in every process: {reason}", stacklevel=2)


def _folder() -> Path | None:
    """The folder of the entries, or None if kernels are not saved."""
    cache = _setting("compilation_cache_dir")
    if not cache or "://" in cache or not _setting("enable_compilation_cache"):
        return None
    return Path(cache) / FOLDER if jax.process_count() == 1 else None


def _name(options: tuple[Any, ...], like: tuple[Any, ...]) -> str:
    settings = (*Settings.current(),)
    return hashlib.sha256(repr((_environment(), settings, options, like)).encode()).hexdigest()


def _setting(name: str) -> Any:
    """A setting of JAX, which its type annotations lack."""
    return getattr(jax.config, f"jax_{name}")


@functools.cache
def _environment() -> tuple[Any, ...]:
    """The packages, the variables and the device that a program is lowered for, and a hash of the kernels."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".json"):  # the tuned tables are JSON
            source.update(path.read_bytes())
    variables = sorted(
        item for item in os.environ.items() if item[0].startswith(COMPILER_VARIABLES)
    )
    return source.hexdigest(), *map(_version, PACKAGES), *variables, *tiles.device()


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def lower(function: Callable, like: tuple[Any, ...], path: Path) -> bytes:
    """Lowers a kernel and saves its program."""
    program = _lower(function, like)
    _write(path, program)
    return program


def _lower(function: Callable, like: tuple[Any, ...]) -> bytes:
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
    # Looking for unused arguments fails in jax 0.12 with jax-triton 0.4.1.
    kernel = jax.jit(function, keep_unused=True)
    exported = jax.export.export(kernel, platforms=[PLATFORM], disabled_checks=checks)(*like)
    if exported.nr_devices != 1:  # JAX rejects such a program in a context with other devices
        raise ValueError(f"jax.set_mesh lowers them for {exported.nr_devices} devices")
    return bytes(exported.serialize())


def _read(path: Path) -> bytes | None:
    """The program of an entry, or None if the entry is missing or damaged."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    program = entry[DIGEST:]
    return program if hashlib.sha256(program).digest() == entry[:DIGEST] else None


def _write(path: Path, program: bytes) -> None:
    """Writes an entry in one step, so that other processes see all of it or nothing."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(program).digest() + program)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        _give_up(f"cannot write to {path.parent}: {error.strerror}")
