"""Finds and opens the files that hold weights: safetensors, files of PyTorch, and either in shards.

Each opened file has `keys()`, `get_slice(name)` with `get_shape()` and `get_dtype()`, and `get_tensor(name)`,
as `safetensors.safe_open` has.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from swjax.data import files
from swjax.interop.layouts import LAYOUTS
from swjax.interop.torch_files import TorchFile
from swjax.safe_files import one_line, parse_json
from swjax.serving import tensor_files

INDEX = ".index.json"
_LARGEST_INDEX = 2**26  # bytes
# Names that open_clip and transformers give to the weights in a folder, the preferred first.
NAMES = (
    *dict.fromkeys(layout.weights for layout in LAYOUTS.values()),
    "model.safetensors.index.json",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def is_name(address: str) -> bool:
    """Whether an address is that of a file of weights rather than of a folder, by its ending."""
    return address.endswith((".safetensors", ".npz", ".bin", ".pt", ".pth", ".ckpt", INDEX))


def find(path: Path) -> Path:
    """Returns the file at a path, or the file with one of `NAMES` in a folder.

    Raises:
      FileNotFoundError: there is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist: give a file of weights or its folder")
    for name in NAMES:
        if (path / name).is_file():
            return path / name
    there = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
    raise FileNotFoundError(
        f"{path} holds neither {', '.join(NAMES[:-1])} nor {NAMES[-1]}, only {there}: give the file itself"
    )


def open_weights(path: Path) -> Any:
    """Opens a file of weights as a context manager; see above.

    Raises:
      FileNotFoundError: the file, or a shard, does not exist.
      ModuleNotFoundError: safetensors is not installed.
      ValueError: the file has another format, or is incomplete, or its pickle needs more than tensors.
    """
    if path.name.endswith(INDEX):
        return _Shards(path)
    return tensor_files.open_file(path) if is_safetensors(path) else TorchFile(path)


def is_safetensors(path: Path) -> bool:
    """Whether a file is to be read as safetensors, by its name and first bytes."""
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".npz") or path.name.endswith(INDEX):
        return False
    with open(path, "rb") as file:
        return file.read(4) != b"PK\3\4"


def shards(path: Path) -> list[str]:
    """Returns the names of the files that an index of weights names; [] for another file.

    Raises:
      ValueError: the index is damaged, or names files of another folder.
    """
    return sorted(set(_weight_map(path).values())) if path.name.endswith(INDEX) else []


def _weight_map(index: Path) -> dict[str, str]:
    """Reads {tensor: file} from an index."""
    try:
        found = dict(parse_json(files.read_whole(str(index), _LARGEST_INDEX))["weight_map"])
        if not found or any(Path(name).name != name for name in found.values()):
            raise ValueError("it must name files of its own folder")
        return found
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = one_line(error)
        raise ValueError(
            f"{index} is not an index of weights ({reason:.100}): download it again"
        ) from None


class _Shards(AbstractContextManager):
    """Weights in several files, which an index of Hugging Face's names: {"weight_map": {tensor: file}}."""

    def __init__(self, index: Path):
        self._files = _weight_map(index)
        names = shards(index)
        missing = [name for name in names if not (index.parent / name).is_file()]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise FileNotFoundError(
                f"{index} names {missing[0]}, which is not in its folder{more}: download all its files"
            )
        with ExitStack() as stack:
            self._open = {
                name: stack.enter_context(open_weights(index.parent / name)) for name in names
            }
            for tensor, name in self._files.items():
                if tensor not in self._open[name].keys():  # no dict
                    raise ValueError(
                        f"{index} says that {name} holds {tensor!r}, which it does not: download both again"
                    )
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def keys(self) -> Iterable[str]:
        return self._files.keys()

    def get_slice(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)

    def get_tensor(self, name: str) -> np.ndarray:
        return self._open[self._files[name]].get_tensor(name)
