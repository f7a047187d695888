"""safetensors files: opens them with one-line errors, and writes them atomically."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swjax.packages import require
from swjax.safe_files import replacing


def open_file(path: str | Path) -> Any:
    """Opens a safetensors file for NumPy, as a context manager.

    Raises:
      FileNotFoundError: the file does not exist.
      ModuleNotFoundError: safetensors is not installed.
      ValueError: the file has another format, or is incomplete.
    """
    require("safetensors", user="swjax.serving")
    import safetensors

    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


def write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file and replaces an existing one.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
      OSError: the file cannot be written.
    """
    require("safetensors", user="swjax.serving")
    import safetensors
    from safetensors.numpy import save_file

    try:
        with replacing(path) as file:
            save_file(dict(arrays), file.name, metadata=dict(metadata))
    except (safetensors.SafetensorError, OSError) as error:
        raise OSError(f"cannot write {path}: {error}") from error
