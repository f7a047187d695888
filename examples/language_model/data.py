"""The corpus: bytes of text files, split by file into training and validation."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIXES = (".py", ".md", ".rst", ".txt")
SKIPPED = ("test", "tests", "site-packages", "dist-packages", "__pycache__")  # folders
HELD_OUT = 20  # one of so many files is for validation


class Corpus(NamedTuple):
    """Bytes of the files of each split, uint8 [n], and the checksum of both."""

    train: np.ndarray
    val: np.ndarray
    fingerprint: str

    def batch(self, step: int, seed: int, sequences: int, length: int) -> np.ndarray:
        """Training sequences, int32 [sequences, length + 1]; they depend on `seed` and `step` alone."""
        random = np.random.default_rng((seed, step))
        return cut(self.train, random.integers(0, len(self.train) - length, sequences), length)

    def windows(self, sequences: int, length: int) -> np.ndarray:
        """Evenly spaced validation sequences, int32 [sequences, length + 1]."""
        return cut(self.val, np.linspace(0, len(self.val) - length - 1, sequences), length)


def cut(text: np.ndarray, first: np.ndarray, length: int) -> np.ndarray:
    return text[first.astype(int)[:, None] + np.arange(length + 1)].astype(np.int32)


def read(folder: Path, length: int) -> Corpus:
    """Reads the text files of a folder; each ends in a zero byte.

    Raises:
      ValueError: there is no such folder, or a split has fewer than length + 1 bytes.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name one that holds text files")
    texts = []
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        texts += [Path(path, n).read_bytes() + b"\0" for n in sorted(names) if n.endswith(SUFFIXES)]
    val = b"".join(texts[::HELD_OUT])
    train = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT)
    if min(len(train), len(val)) <= length:
        raise ValueError(
            f"{folder} has {len(train)} bytes of text for training and {len(val)} for validation, fewer than "
            f"a sequence of {length + 1}: name a folder with more files that end in {', '.join(SUFFIXES)}"
        )
    fingerprint = hashlib.sha256(train + val).hexdigest()[:16]
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8), fingerprint)
