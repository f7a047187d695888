"""Renders the icons once, into files of records; an interrupted preparation resumes.

The directory of a prepared data set contains::

  shard-00003-of-00085.array_record   4,096 drawings: one line of JSON and one PNG each
  shard-00003-of-00085.json           names and digests of the drawings, and the checksum of the shard
  train.npy, val.npy, ...             int32 [2, drawings]: positions and labels of a split's drawings
  train.names.json, ...               name of each label
  attribution.tsv                     author and license of each drawing
  complete.json                       written last: counts, including removed duplicates
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swjax.data import drawing_processes
from swjax.data.icons import drawings, sets
from swjax.data.icons.sets import Icon, IconSet, concept_and_style, fold
from swjax.data.preparation import lock
from swjax.packages import require
from swjax.safe_files import write_atomically

SPLITS = ("train", "val", "test", "test_sets", "test_both")
COMPLETE = "complete.json"
_IN_A_SHARD = 4096
_IN_A_TASK = 64
# Of equal drawings, that of the first of these splits is kept.
_WORTH_KEEPING = ("test_both", "test_sets", "test", "val", "train")


class Drawn(NamedTuple):
    """The contents of one shard.

    Attributes:
      keys: "SET:NAME" of each drawing, in order.
      digests: digest of the pixels of each drawing.
      sha256: checksum of the file.
    """

    keys: list[str]
    digests: list[str]
    sha256: str


def prepare(folder: Path, archive: Path, only: frozenset[str], title: str) -> None:
    """Renders missing shards and assigns splits; returns at once if the data set is complete.

    Args:
      folder: directory of the prepared data set.
      archive: path of the npm package.
      only: prefixes of the sets; empty means all sets.
      title: title of the progress line.

    Raises:
      ValueError: the package does not exist, or has another version.
    """
    if (folder / COMPLETE).exists():
        return
    require("array_record", "PIL", "resvg_py")
    with lock(folder.parent / f".{folder.name}.lock"):
        if (folder / COMPLETE).exists():
            return
        _check_version(archive)
        found = list(sets.read(archive, only))
        folder.mkdir(parents=True, exist_ok=True)
        shards = _draw(folder, [icon for _, icons in found for icon in icons], title)
        _assign(folder, shards, {icon_set.prefix: icon_set for icon_set, _ in found})


def _check_version(archive: Path) -> None:
    """Raises ValueError if the file is another package. `sets.read` reports a missing file."""
    if not archive.is_file():
        return
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sets.SHA256:
        raise ValueError(
            f"{str(archive)!r} is not {sets.PACKAGE}: its SHA-256 is {digest[:12]}..., not "
            f"{sets.SHA256[:12]}...; run `{sets.COMMAND}` again"
        )


# --- drawing ------------------------------------------------------------------------------------------


def _draw(folder: Path, icons: list[Icon], title: str) -> list[Drawn]:
    """Renders the missing shards; returns the contents of all shards."""
    parts = [icons[start : start + _IN_A_SHARD] for start in range(0, len(icons), _IN_A_SHARD)]
    paths = [folder / f"shard-{i:05d}-of-{len(parts):05d}" for i in range(len(parts))]
    missing = [i for i, path in enumerate(paths) if not path.with_suffix(".json").exists()]
    tasks = [
        [icon.svg() for icon in parts[i][start : start + _IN_A_TASK]]
        for i in missing
        for start in range(0, len(parts[i]), _IN_A_TASK)
    ]
    answers = drawing_processes.with_progress(
        drawing_processes.answers(drawings.__file__, tasks),
        map(len, tasks),
        title,
        start=sum(len(part) for i, part in enumerate(parts) if i not in set(missing)),
    )
    for i in missing:
        _write(paths[i], parts[i], answers)
    for _ in answers:  # runs the generator to its end, which ends the progress line
        raise AssertionError("every answer belongs to a shard")
    return [Drawn(**json.loads(path.with_suffix(".json").read_text())) for path in paths]


def _write(path: Path, icons: list[Icon], answers: Iterator[list]) -> None:
    """Writes a shard of the given icons from the next answers."""
    from array_record.python.array_record_module import ArrayRecordWriter

    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)  # the writer would follow a link
    writer = ArrayRecordWriter(str(part), "group_size:1")
    keys, digests = [], []
    for start in range(0, len(icons), _IN_A_TASK):
        for icon, drawn in zip(icons[start : start + _IN_A_TASK], next(answers), strict=True):
            if drawn is None:
                continue
            png, digest = drawn
            writer.write(encode(icon, base64.b64decode(png)))
            keys.append(icon.key)
            digests.append(digest)
    writer.close()
    with part.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    os.replace(part, path.with_suffix(".array_record"))
    shard = Drawn(keys, digests, checksum)
    write_atomically(path.with_suffix(".json"), json.dumps(shard._asdict()))


def encode(icon: Icon, png: bytes) -> bytes:
    """Encodes a record, which `decode` reads.

    >>> decode(encode(Icon("tabler:home", "<path/>", (0, 0, 24, 24), "Buildings"), b"PNG"))
    ('tabler:home', 'Buildings', b'PNG')
    """
    return json.dumps([icon.key, icon.category]).encode() + b"\n" + png


def decode(record: bytes) -> tuple[str, str, bytes]:
    """Decodes a record into the key, the category and the PNG."""
    header, _, png = record.partition(b"\n")
    key, category = json.loads(header)
    return key, category, png


# --- splits -------------------------------------------------------------------------------------------


def split_of(held_out: bool, concept: str) -> str | None:
    """The split of a drawing, by its set and concept; None for a drawing in no split.

    >>> split_of(False, "home"), split_of(True, "home")
    ('train', 'test_sets')
    """
    part = fold(concept)
    if not held_out:
        return part
    return {"train": "test_sets", "test": "test_both"}.get(part)


def _assign(folder: Path, shards: list[Drawn], found: dict[str, IconSet]) -> None:
    """Writes the splits, the attribution and `COMPLETE`.

    If drawings in several splits have equal pixels, only the drawings of one split are kept. Equal drawings
    within one split are kept.
    """
    keys = [key for shard in shards for key in shard.keys]
    digests = [digest for shard in shards for digest in shard.digests]
    splits, concepts = [], []
    for key in keys:
        prefix, _, name = key.partition(":")
        concept, _ = concept_and_style(name)
        splits.append(split_of(found[prefix].held_out, concept))
        concepts.append(concept)
    rank = {split: i for i, split in enumerate(_WORTH_KEEPING)}
    kept: dict[str, str] = {}
    for digest, split in zip(digests, splits, strict=True):
        if split and (digest not in kept or rank[split] < rank[kept[digest]]):
            kept[digest] = split
    counts = {}
    for split in SPLITS:
        chosen = [
            i
            for i, (own, digest) in enumerate(zip(splits, digests))
            if own == split == kept[digest]
        ]
        names = sorted({concepts[i] for i in chosen})
        label = {name: number for number, name in enumerate(names)}
        rows = np.array([chosen, [label[concepts[i]] for i in chosen]], np.int32).reshape(2, -1)
        np.save(folder / f"{split}.npy", rows)
        write_atomically(folder / f"{split}.names.json", json.dumps({"names": names}))
        counts[split] = {"drawings": len(chosen), "names": len(names)}
    _write_attribution(folder / "attribution.tsv", keys, found)
    duplicates = sum(
        split is not None and split != kept[digest] for split, digest in zip(splits, digests)
    )
    shard_lengths = [len(shard.keys) for shard in shards]
    colored = sorted(prefix for prefix, icon_set in found.items() if icon_set.colored)
    content = {"splits": counts, "duplicates_left_out": duplicates, "coloured_sets": colored}
    write_atomically(folder / COMPLETE, json.dumps(content | {"shards": shard_lengths}))


def _write_attribution(path: Path, keys: list[str], found: dict[str, IconSet]) -> None:
    lines = ["drawing\tset\tauthor\tlicence\taddress\n"]
    for key in keys:
        icon_set = found[key.partition(":")[0]]
        columns = key, icon_set.name, icon_set.author, icon_set.license, icon_set.url
        lines.append("\t".join(columns) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def verify(folder: Path) -> list[str]:
    """Lists the shards whose bytes differ from their checksums, or whose checksums cannot be read.

    Args:
      folder: directory of a prepared data set.

    Returns:
      Paths of the shards; [] if all checksums match.
    """
    bad = []
    for description in sorted(folder.glob("shard-*.json")):
        path = description.with_suffix(".array_record")
        try:
            wanted = json.loads(description.read_text())["sha256"]
        except (ValueError, TypeError, KeyError):
            wanted = None
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            bad.append(str(path))
    return bad
