"""A corpus of the Python sources and documentation that a machine has, for studies of language models.

  python benchmarks/studies/python_text.py --cache=FOLDER

prepares it once: the standard library and the installed packages, without equal and nearly equal files.
Whole packages are held out for validation. The folder holds train.bin and val.bin, whose files end in a zero
byte, and manifest.json with the checksums and the bytes of every package. The packages keep their licenses,
and the corpus stays on the machine.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
LARGEST = 400_000  # bytes of a file; longer ones are tables
SAMPLE = 8  # shingles of a file that stand for it
HELD_OUT = 0.02  # share of the bytes in held-out packages, at least
LARGEST_HELD_OUT = 0.005  # share of the bytes of one held-out package, at most


class Text(NamedTuple):
    """A file: its package, its path in it, its bytes, and a sample of the hashes of its shingles."""

    package: str
    path: str
    content: bytes
    sample: frozenset[int]


class Corpus(NamedTuple):
    """Bytes of the training and the validation files, uint8, and the manifest."""

    train: np.ndarray
    val: np.ndarray
    manifest: dict


def load(cache: Path, limit: float = 4e8, roots: Iterable[Path] | None = None) -> Corpus:
    """Reads the corpus from a folder, which the first call of a machine fills.

    Args:
      cache: folder for the prepared files.
      limit: bytes to keep; packages are then taken in an order that their names determine.
      roots: folders of packages; None: the standard library and site-packages.

    Raises:
      SystemExit: the folder holds other bytes than its manifest says, or there is no text to prepare.
    """
    from swjax.data.preparation import lock

    with lock(cache / "lock"):
        if not (cache / "manifest.json").exists():
            prepare(cache, limit, installed() if roots is None else roots)
    manifest = json.loads((cache / "manifest.json").read_text())
    train, val = (np.fromfile(cache / f"{split}.bin", np.uint8) for split in ("train", "val"))
    for split, array in (("train", train), ("val", val)):
        if checksum(array) != manifest[split]["sha256"]:
            raise SystemExit(f"{cache}/{split}.bin is not what manifest.json says: delete {cache}")
    return Corpus(train, val, manifest)


def prepare(cache: Path, limit: float, roots: Iterable[Path]) -> None:
    began = time.perf_counter()
    found = list(files(roots))
    with ThreadPoolExecutor() as pool:  # waits for disks
        texts = [text for text in pool.map(read, *zip(*found)) if text]
    kept = list(deduplicated(sorted(texts, key=lambda text: (rank(text.package), text.path))))
    kept = limited(kept, limit)
    held_out = choose_held_out(kept)
    splits: dict[str, list[bytes]] = {"train": [], "val": []}
    for text in kept:
        splits["val" if text.package in held_out else "train"] += [text.content, b"\0"]
    manifest: dict = {
        "files": {"found": len(found), "read": len(texts), "kept": len(kept)},
        "held_out": sorted(held_out),
        "packages": dict(sorted(sizes(kept).items())),
    }
    for split, parts in splits.items():
        array = np.frombuffer(b"".join(parts), np.uint8)
        array.tofile(cache / f"{split}.bin")
        manifest[split] = {"bytes": len(array), "sha256": checksum(array)}
    (cache / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    told = {split: f"{manifest[split]['bytes'] / 1e6:.1f} MB" for split in splits}
    print(f"corpus: {told}, {manifest['files']}, {time.perf_counter() - began:.0f} s", flush=True)


def installed() -> set[Path]:
    """The folders of the standard library and of the installed packages."""
    named = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return {Path(path).resolve() for path in named + [p for p in sys.path if "-packages" in p]}


def files(roots: Iterable[Path]) -> Iterator[tuple[Path, str, str]]:
    """Yields (folder, package, path in the folder) of each text."""
    for root in sorted(roots):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(f for f in folders if "-packages" not in f)
            for name in sorted(names):
                if name.endswith(SUFFIXES):
                    path = Path(folder, name).relative_to(root)
                    yield root, package(path), path.as_posix()


def package(path: Path) -> str:
    """The top-level folder or module; the texts of its metadata belong to it.

    >>> package(Path("flax-0.12.dist-info/licenses/AUTHORS.md")), package(Path("six.py"))
    ('flax', 'six')
    """
    return path.parts[0].removesuffix(".py").partition("-")[0].lower()


def read(root: Path, package: str, path: str) -> Text | None:
    """Reads a file; None if it is empty, too large or no text."""
    try:
        content = (root / path).read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    if not content.strip() or len(content) > LARGEST or b"\0" in content:
        return None
    return Text(package, path, content, sample(content))


def sample(content: bytes) -> frozenset[int]:
    """The smallest hashes of three consecutive lines, without indentation and empty lines.

    Nearly equal files have nearly equal samples.

    >>> len(sample(b"a\\n  b\\nc\\nd\\n") & sample(b"a\\nb\\n\\nc\\nd\\ne"))
    2
    """
    lines = [zlib.crc32(line) for line in map(bytes.strip, content.split(b"\n")) if line]
    a, b, c = (np.asarray([*lines, 0, 0][i:], np.uint64)[: len(lines)] for i in range(3))
    mixed = a * np.uint64(0x9E3779B97F4A7C15) + b * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed = (mixed + c) * np.uint64(0x165667B19E3779F9)
    return frozenset(np.unique(mixed ^ (mixed >> np.uint64(29)))[:SAMPLE].tolist())


def deduplicated(texts: Iterable[Text]) -> Iterator[Text]:
    """Drops a text if three quarters of its sample are in the samples of earlier texts."""
    seen: set[int] = set()
    for text in texts:
        if 4 * len(text.sample & seen) < 3 * len(text.sample):
            seen |= text.sample
            yield text


def limited(texts: list[Text], limit: float) -> list[Text]:
    """The first texts, up to `limit` bytes."""
    ends = np.cumsum([len(text.content) for text in texts])
    return texts[: int(np.searchsorted(ends, limit, side="right"))]


def choose_held_out(texts: list[Text]) -> set[str]:
    """Small packages, in the reverse of the order of `rank`, until they have `HELD_OUT` of the bytes.

    Raises:
      SystemExit: there are fewer than two packages.
    """
    by_package = sizes(texts)
    if len(by_package) < 2:
        raise SystemExit(f"a corpus needs texts of two packages at least, got {list(by_package)}")
    total, held, chosen = sum(by_package.values()), 0, set()
    small = max(LARGEST_HELD_OUT * total, min(by_package.values()))
    for name in sorted(by_package, key=rank, reverse=True):
        if held < HELD_OUT * total and by_package[name] <= small:
            chosen.add(name)
            held += by_package[name]
    return chosen


def sizes(texts: Iterable[Text]) -> dict[str, int]:
    """Bytes by package."""
    found: dict[str, int] = defaultdict(int)
    for text in texts:
        found[text.package] += len(text.content)
    return dict(found)


def rank(package: str) -> str:
    """A fixed pseudo-random order of packages."""
    return hashlib.sha256(package.encode()).hexdigest()


def checksum(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--cache", type=Path, required=True, help="folder for the prepared files")
    flags.add_argument("--limit", type=float, default=4e8, help="bytes")
    args = flags.parse_args()
    load(args.cache, args.limit)


if __name__ == "__main__":
    main()
