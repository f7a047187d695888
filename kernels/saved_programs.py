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
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from swjax.kernels import targets
from swjax.kernels.block_formats.reference import Blocks
from swjax.kernels.formats import QTensor

PLATFORM = "cuda"
FOLDER = "swjax_kernels"
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton")
# JAX's settings that change the program of a kernel.
SETTINGS = ("enable_x64", "default_matmul_precision")
COMPILER_VARIABLES = ("TRITON_", "JAX_TRITON_", "MOSAIC_GPU_")
# `jax.export` rejects targets that other versions may lack; here the name of an entry contains the versions.
TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi", "mosaic_gpu_v2")
DIGEST = hashlib.sha256().digest_size

jax.export.register_namedtuple_serialization(QTensor, serialized_name="swjax.QTensor")
jax.export.register_namedtuple_serialization(Blocks, serialized_name="swjax.Blocks")


def saved(function: Callable, *options: Any) -> Callable:
    """Returns a function like `function` that loads its lowered program from disk, or lowers and saves it.

    It calls `function` itself if JAX has no compilation cache on a local disk, or if the program can be
    neither loaded nor exported. It also does so in a run of several processes: XLA needs equal programs in
    all of them, but names in a lowered Mosaic kernel depend on the kernels that its process lowered before.

    Args:
      function: (*arrays) -> arrays, a kernel without derivatives. It is called while JAX traces.
      *options: everything else that determines the kernel, besides the shapes and dtypes of the arrays. Their
        `repr` must be the same in every process, so functions and arrays are excluded.
    """

    @functools.wraps(function)
    def call(*arrays):
        folder = _folder()
        if folder is None or _gave_up:
            return function(*arrays)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        path = folder / _name(options, like)
        try:
            program = _read(path)
            if program is None:
                program = _lower(function, like)
                _write(path, program)
            exported = jax.export.deserialize(bytearray(program))
        # If the kernel cannot be lowered at all, lowering the caller's program raises the error.
        except Exception as error:
            _give_up(str(error))
            return function(*arrays)
        return exported.call(*arrays)

    return call


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
    settings = tuple(map(_setting, SETTINGS))
    described = repr((_environment(), targets.current(), settings, options, like))
    return hashlib.sha256(described.encode()).hexdigest()


def _setting(name: str) -> Any:
    """A setting of JAX, which its type annotations lack."""
    return getattr(jax.config, f"jax_{name}")


@functools.cache
def _environment() -> tuple[Any, ...]:
    """The packages and variables that a program is lowered with, and a hash of the kernels."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".json"):  # the tuned tables are JSON
            source.update(path.read_bytes())
    variables = sorted(
        item for item in os.environ.items() if item[0].startswith(COMPILER_VARIABLES)
    )
    return source.hexdigest(), *map(_version, PACKAGES), *variables


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


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
