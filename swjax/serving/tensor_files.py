"""safetensors files: opened with one-line errors, written atomically."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def open_file(path: str | Path) -> Any:
    """A safetensors file, as its library opens it for NumPy; a context manager.

    Raises:
      FileNotFoundError: there is no such file.
      ModuleNotFoundError: safetensors is not installed.
      ValueError: it is another kind of file, or a part of one.
    """
    _require()
    import safetensors

    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Replaces a safetensors file.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
    """
    _require()
    from safetensors.numpy import save_file

    part = path.with_name(path.name + ".part")
    save_file(dict(arrays), part, metadata=dict(metadata))
    part.rename(path)


def _require() -> None:
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'files of weights need safetensors: pip install "swjax[train]"', name="safetensors"
        ) from error
