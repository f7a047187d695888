"""Reads tensors from files of `torch.save` and TorchScript, without PyTorch and without running a pickle.

Such a file is a zip archive with a pickle of the structure and one entry for the bytes of each storage. A
pickle is a program that can call any function. This reader knows the few names that a state dict needs, as
PyTorch does with `weights_only=True`, and refuses a file that names anything else. The objects of TorchScript
become plain records, whose attributes hold their tensors.
"""

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_DTYPES: dict[str, tuple[str, Any]] = {
    "FloatStorage": ("F32", np.float32),
    "HalfStorage": ("F16", np.float16),
    "BFloat16Storage": ("BF16", jnp.bfloat16),
    "DoubleStorage": ("F64", np.float64),
    "LongStorage": ("I64", np.int64),
    "IntStorage": ("I32", np.int32),
    "ShortStorage": ("I16", np.int16),
    "CharStorage": ("I8", np.int8),
    "ByteStorage": ("U8", np.uint8),
    "BoolStorage": ("BOOL", np.bool_),
}
# What `zipfile` raises for a damaged archive, or one that needs more than it reads.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
)
_LARGEST_PICKLE = 2**26  # bytes: a state dict has some hundred bytes a tensor
_MOST_OBJECTS = 2**20
_PREFIX = "module."  # of models in DistributedDataParallel
_REMEDY = "save its state dict as safetensors with the library that wrote it"


class _Storage(NamedTuple):
    kind: str  # a key of `_DTYPES`
    key: str  # name of the entry
    length: int  # elements


class Tensor(NamedTuple):
    """A tensor of a file; `TorchFile.get_tensor` reads its elements.

    Attributes:
      storage: the entry that holds the elements.
      offset: index of the first element.
      shape: sizes.
      strides: distances in elements.
    """

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return _DTYPES[self.storage.kind][0]


class _Dict(dict):
    """Stands for an OrderedDict, which can have attributes: those of a state dict are versions of modules."""


class _Record:
    """An object of TorchScript: its class is not run, its attributes are kept."""


class TorchFile(AbstractContextManager):
    """The tensors of a file by name, with the methods of `safetensors.safe_open` that readers use.

    A training checkpoint of open_clip contributes its entry `state_dict`; the prefix "module." is removed.

    Args:
      path: the file.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is of another kind or incomplete, or its pickle needs more than tensors.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        try:
            self._zip = zipfile.ZipFile(self._path)
            found = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
            if len(found) != 1:
                raise zipfile.BadZipFile("no data.pkl")
            self._root = found[0].removesuffix("data.pkl")
            tree = self._load(found[0])
        except _DAMAGE as error:
            with open(self._path, "rb") as file:
                start = file.read(2)
            old = "was written by PyTorch before 1.6" if start[:1] == b"\x80" else "is incomplete"
            raise ValueError(
                f"{path} is not a file of torch.save, or {old} ({error}): download it again, or {_REMEDY}"
            ) from None
        if isinstance(tree, dict) and isinstance(tree.get("state_dict"), dict):
            tree = tree["state_dict"]
        self._tensors = _named(tree)
        if not self._tensors:
            raise ValueError(f"{path} holds no tensors: give a state dict")
        if all(name.startswith(_PREFIX) for name in self._tensors):
            self._tensors = {n.removeprefix(_PREFIX): t for n, t in self._tensors.items()}

    def __exit__(self, *exception: Any) -> None:
        self._zip.close()

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_tensor(self, name: str) -> np.ndarray:
        """Reads the elements of a tensor.

        Raises:
          ValueError: the entry is missing, compressed or of another size, or the tensor lies outside of it.
        """
        tensor = self._tensors[name]
        storage, shape = tensor.storage, tensor.shape
        dtype = np.dtype(_DTYPES[storage.kind][1])
        sizes = (storage.length, tensor.offset, *shape, *tensor.strides)
        last = tensor.offset + sum((n - 1) * s for n, s in zip(shape, tensor.strides, strict=True))
        outside = math.prod(shape) > storage.length or (
            math.prod(shape) > 0 and last >= storage.length
        )
        if min(sizes) < 0 or outside:
            raise ValueError(
                f"the tensor {name!r} of {self._path} lies outside of its storage: download it again"
            )
        entry = f"{self._root}data/{storage.key}"
        try:
            info = self._zip.getinfo(entry)
            if (
                info.compress_type != zipfile.ZIP_STORED
                or info.file_size != storage.length * dtype.itemsize
            ):
                raise zipfile.BadZipFile(f"{info.file_size} bytes for {storage.length} of {dtype}")
            data = self._zip.read(info)
        except (KeyError, *_DAMAGE) as error:
            raise ValueError(
                f"the entry {entry!r} of {self._path} is damaged ({error}): download it again"
            ) from None
        elements = np.frombuffer(data, dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype)
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        view = np.lib.stride_tricks.as_strided(elements[tensor.offset :], shape, strides)
        return view.astype(dtype)  # contiguous, in the byte order of this machine

    def _load(self, entry: str) -> Any:
        if self._zip.getinfo(entry).file_size > _LARGEST_PICKLE:
            raise ValueError(f"{self._path} describes too many objects: {_REMEDY}")
        order = f"{self._root}byteorder"
        if order in self._zip.namelist() and self._zip.open(order).read(9) != b"little":
            raise ValueError(f"{self._path} stores numbers in big-endian order: {_REMEDY}")
        try:
            return _Unpickler(io.BytesIO(self._zip.read(entry))).load()
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from None
        except _DAMAGE:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{self._path} is damaged: {reason:.200}") from None


# The unpickler in C allocates memory for any index that a file names; the one in Python does not.
class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]  # typeshed omits it
    """Builds dicts, lists, texts, numbers and tensors; refuses all other names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _Kind(name)
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        if (module, name) in (
            ("torch._utils", "_rebuild_tensor_v2"),
            ("torch._utils", "_rebuild_parameter"),
        ):
            return _rebuild_tensor if name.endswith("_v2") else lambda data, *_: data
        if module.startswith("__torch__"):
            return type("Record", (_Record,), {})
        if module == "torch.jit._pickle" and name in ("build_intlist", "build_boollist"):
            return list
        raise ValueError(f"its pickle needs {module}.{name}, which is not read: {_REMEDY}")

    def persistent_load(self, saved_id: Any) -> _Storage:
        """("storage", type, key, device, number of elements), as torch.save writes it."""
        tag, kind, key, _, count = saved_id
        if tag != "storage" or not isinstance(kind, _Kind) or not isinstance(count, int):
            raise ValueError(f"its pickle has an unknown storage: {_REMEDY}")
        return _Storage(kind.name, str(key), count)


class _Kind:
    """Stands for a class of storages."""

    def __init__(self, name: str):
        self.name = name


def _rebuild_tensor(
    storage: _Storage, offset: int, shape, strides, grad=False, hooks=None, bits: Any = None
) -> Tensor:
    sizes = (offset, *shape, *strides)
    known = isinstance(storage, _Storage) and not bits  # such as {"neg": True}, which flips signs
    if not known or not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"its pickle has a tensor of an unknown form: {_REMEDY}")
    return Tensor(storage, offset, tuple(shape), tuple(strides))


def _named(tree: Any) -> dict[str, Tensor]:
    """{name: tensor} of nested dicts and records, with names as in a state dict; lists are left out."""
    found: dict[str, Tensor] = {}
    waiting, seen = [("", tree)], set[int]()
    while waiting:
        prefix, node = waiting.pop()
        if id(node) in seen or len(seen) > _MOST_OBJECTS:
            continue
        seen.add(id(node))
        parts = node if isinstance(node, dict) else vars(node) if isinstance(node, _Record) else {}
        for name, value in parts.items():
            if isinstance(value, Tensor):
                found[f"{prefix}{name}"] = value
            elif isinstance(value, dict | _Record):
                waiting.append((f"{prefix}{name}.", value))
    return found
