"""Converts WebDataset tars to array_record files of a TensorFlow Datasets data set, for the source tfds.

  python -m swjax convert --tars 'laion/{00000..41455}.tar' --name laion --data_dir data
  python train.py --config.data.name=tfds --config.data.tfds.builder=laion ...

Each tar becomes one file. Images are copied without decoding. After writing, each file is read back, and
counts as complete only if it holds the records of its tar. So the same command resumes an interrupted
conversion. --verify checks all files against the checksums from their conversion.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path

import numpy as np

from swjax.data import files
from swjax.data.photographs import texts
from swjax.data.preparation import lock
from swjax.data.processes import end_with_parent
from swjax.data.skipping import POLICIES, BadData, Skips
from swjax.data.webdataset import WebDataset
from swjax.packages import require
from swjax.safe_files import open_no_follow, write_atomically

_VERSION = "1.0.0"
_MANIFEST = "converted.jsonl"  # one line per completed file
_EXPECTED = "expected.json"  # number of files per split, written before the first conversion


def main(argv: list[str]) -> int:
    """Converts or verifies. Returns the exit code: 1 if a file is missing or differs from its checksum."""
    parser = argparse.ArgumentParser(prog="swjax convert", description=__doc__.splitlines()[0])
    parser.add_argument("--tars", help="pattern of the paths or addresses of the tars")
    parser.add_argument("--name", required=True, help="name of the new data set")
    add = parser.add_argument
    add("--split", default="train", help="split that the tars become; default: %(default)s")
    add("--data_dir", type=Path, default="data", help="folder of data sets; default: %(default)s")
    add("--image_key", default="jpg;jpeg;png;webp", help="extensions; default: %(default)s")
    add("--text_key", default="txt", help='extension or "json/FIELD"; default: %(default)s')
    add(
        "--on_bad",
        default="skip",
        choices=POLICIES,
        help="handling of bad samples; default: %(default)s",
    )
    add(
        "--max_bad_share",
        type=float,
        default=0.01,
        help="limit of their share; default: %(default)s",
    )
    add("--jobs", type=int, default=1, help="processes; default: %(default)s")
    parser.add_argument("--verify", action="store_true", help="check the converted files")
    args = parser.parse_args(argv)
    out = args.data_dir / args.name / _VERSION
    if args.verify:
        return verify(out)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", args.name):  # tfds.builder finds no other names
        parser.error(f"--name must be a-z, 0-9 and _, a letter first, got {args.name!r}")
    if not re.fullmatch(r"[\w-]+", args.split, re.ASCII):
        parser.error(f"--split must be letters, digits, _ and -, got {args.split!r}")
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if not args.tars:
        parser.error("--tars is missing: name the tars to convert, or pass --verify")
    try:
        convert(out, args)
    except BrokenPipeError:  # of the output
        raise
    except KeyboardInterrupt:  # the same command continues
        return 128 + signal.SIGINT
    except (BadData, ValueError, ModuleNotFoundError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print(
            "convert: a process was killed, probably because the machine ran out of memory: the same "
            "command with fewer --jobs continues",
            file=sys.stderr,
        )
        return 1
    return 0


def convert(out: Path, args: argparse.Namespace) -> None:
    """Converts the missing files, then writes the metadata of the data set.

    Args:
      out: directory of the data set.
      args: see `main`.

    Raises:
      BadData: too many samples lack an image or a caption.
      OSError: a file differs from the records that were written to it.
    """
    require("tensorflow_datasets", "array_record", "importlib_resources")
    keys = dict(image_key=args.image_key, text_key=args.text_key)
    tars = WebDataset(args.tars, data_dir=str(args.data_dir), **keys)
    shards = len(_counts(tars))
    with lock(out / ".lock"):
        _drop_half_line(out / _MANIFEST)
        done = {line["shard"]: line for line in manifest(out) if line["split"] == args.split}
        _check_same(out, done.values(), shards)
        _expect(out, args.split, shards)
        skips = Skips(args.on_bad, args.max_bad_share)
        skips.damage(tars.damage, tars.damaged_share)
        work = functools.partial(_shard, tars, out, args.name, args.split, args.on_bad, done)
        with open_no_follow(out / _MANIFEST, "a") as log:
            for line in _in_processes(args.jobs, work, range(shards)):
                skips.good(line["examples"])
                for reason in line["skipped"]:
                    skips.bad(reason)
                if done.get(line["shard"]) != line:
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    os.fsync(log.fileno())
                    print(f"{line['file']}: {line['examples']} examples", flush=True)
        _describe(out, args.name)
        print(f"{out}: all {shards} tars of the split {args.split!r} are converted")


def manifest(out: Path) -> list[dict]:
    """Returns the manifest line of each file, ordered by split and file."""
    path = out / _MANIFEST
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    known = [json.loads(line) for line in lines if line.endswith("\n")]
    latest = {(line["split"], line["shard"]): line for line in known}
    return [latest[key] for key in sorted(latest)]


def expected(out: Path) -> dict[str, int]:
    """Returns the number of files of each split in a complete conversion."""
    path = out / _EXPECTED
    return json.loads(path.read_text()) if path.exists() else {}


def _expect(out: Path, split: str, shards: int) -> None:
    write_atomically(out / _EXPECTED, json.dumps(expected(out) | {split: shards}))


def _drop_half_line(path: Path) -> None:
    """Removes an incomplete last line, which an interrupted run may have left."""
    if path.exists():
        whole = path.read_bytes()
        os.truncate(path, whole.rfind(b"\n") + 1)


def verify(out: Path) -> int:
    """Compares every file with its checksum and prints differences. Returns 1 if there are any, else 0."""
    lines, wanted = manifest(out), expected(out)
    done = Counter(line["split"] for line in lines)
    bad = [line["file"] for line in lines if _sha256(out / line["file"]) != line["sha256"]]
    for file in bad:
        print(f"convert: {out / file} is missing or has changed: remove it and convert again")
    missing = {split: count - done[split] for split, count in wanted.items() if count > done[split]}
    for split, count in missing.items():
        print(
            f"convert: {out}: {count} of {wanted[split]} tars of the split {split!r} are not converted: "
            f"run the command of the conversion again"
        )
    total = len(lines) + sum(missing.values())
    print(f"{len(lines) - len(bad)} of {total} files match their checksums")
    return 1 if bad or missing or not lines else 0


def _counts(tars: WebDataset) -> np.ndarray:
    """Returns the number of examples of each tar."""
    assert tars.shards is not None, "tars always have shards"
    return tars.shards


def _of(shards: int) -> str:
    return f"-of-{shards:05d}"


def _check_same(out: Path, lines: Iterable[dict], shards: int) -> None:
    other = [line["file"] for line in lines if not line["file"].endswith(_of(shards))]
    if other:
        raise ValueError(
            f"{out} has {other[0]}, converted from another number of tars than {shards}: use another --name"
        )


def _in_processes(jobs: int, work, shards: range) -> Iterator[dict]:
    if jobs == 1:
        yield from map(work, shards)
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # new processes inherit it
    try:
        context = get_context("spawn")
        with ProcessPoolExecutor(jobs, context, initializer=end_with_parent) as pool:
            lines = [pool.submit(work, shard) for shard in shards]  # starts the processes
            signal.signal(signal.SIGINT, _end_processes)
            try:
                yield from (line.result() for line in lines)
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        signal.signal(signal.SIGINT, before)


def _end_processes(*_: object) -> None:
    for process in active_children():
        process.kill()  # a process has no state to save
    raise KeyboardInterrupt


def _shard(tars: WebDataset, out: Path, name: str, split: str, on_bad: str, done: dict, shard: int):
    """Returns the manifest line of a tar; converts the tar unless its file is complete."""
    path = tars.paths[shard]
    known = done.get(shard)
    counts = _counts(tars)
    file = f"{name}-{split}.array_record-{shard:05d}{_of(len(counts))}"
    source = {"tar": path, "tar_version": files.size_and_version(path)[1], **tars.keys}
    if known and known["file"] == file and source.items() <= known.items():
        if (out / file).exists() and (out / file).stat().st_size == known["bytes"]:
            return known
    part, skipped = out / f"{file}.part", list[str]()
    part.unlink(missing_ok=True)  # the writer would follow a link
    start = int(counts[:shard].sum())
    examples = _read(tars, range(start, start + int(counts[shard])), skipped, on_bad)
    count, digest = _write(part, examples)
    if (count, digest) != _digest(_read_back(part)):
        raise OSError(f"{part} does not contain the records written to it: check the disk")
    line = {"split": split, "shard": shard, "file": file, **source, "examples": count,
            "skipped": skipped, "content_sha256": digest, "bytes": part.stat().st_size,
            "sha256": _sha256(part)}  # fmt: skip
    os.replace(part, out / file)
    return line


def _read(tars: WebDataset, indices: range, skipped: list[str], on_bad: str) -> Iterator[dict]:
    """Yields the readable examples; appends a reason to `skipped` for each of the others."""
    for index in indices:
        try:
            key, found = tars.sample(index)
            image, captions = tars.pick(found)
        except (ValueError, OSError) as error:
            skipped.append(f"{tars.key(index)}: {error}")
            if on_bad == "stop":
                raise BadData(f"cannot read {skipped[-1]}") from None
            continue
        yield {"key": key, "image": image, "caption": list(captions)}


def _features():
    import tensorflow_datasets as tfds

    text = tfds.features.Text()
    image = tfds.features.Image(shape=(None, None, 3))
    return tfds.features.FeaturesDict(
        {"key": text, "image": image, "caption": tfds.features.Sequence(text)}
    )


def _write(path: Path, examples: Iterator[dict]) -> tuple[int, str]:
    """Writes a file of individually readable records; returns their `_digest`."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter

    features = _features()
    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())
    # Compression does not shrink JPEGs.
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")

    def written():
        for example in examples:
            writer.write(serializer.serialize_example(features.encode_example(example)))
            yield example

    counted = _digest(written())
    writer.close()
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return counted


def _read_back(path: Path) -> Iterator[dict]:
    import tensorflow_datasets as tfds
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    features, undecoded = _features(), {"image": tfds.decode.SkipDecoding()}
    with ArrayRecordDataSource([str(path)]) as records:
        for index in range(len(records)):
            record = features.deserialize_example_np(records[index], decoders=undecoded)
            captions = list(texts(list(record["caption"])))
            yield {"key": record["key"].decode(), "image": record["image"], "caption": captions}


def _digest(examples: Iterator[dict]) -> tuple[int, str]:
    """Returns the number of examples, and a checksum of their contents."""
    count, total = 0, hashlib.sha256()
    for example in examples:
        count += 1
        for field in (
            example["key"].encode(),
            example["image"],
            *map(str.encode, example["caption"]),
        ):
            total.update(len(field).to_bytes(8, "little") + field)
    return count, total.hexdigest()


def _sha256(path: Path) -> str:
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _describe(out: Path, name: str) -> None:
    """Writes the metadata from which TensorFlow Datasets reads the features, splits and files."""
    import tensorflow_datasets as tfds

    splits: dict[str, list[dict]] = {}
    for line in manifest(out):
        splits.setdefault(line["split"], []).append(line)
    template = tfds.core.ShardedFileTemplate(
        data_dir=out, dataset_name=name, filetype_suffix="array_record"
    )
    tfds.folder_dataset.write_metadata(
        data_dir=out,
        features=_features(),
        split_infos=[
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[line["examples"] for line in lines],
                num_bytes=sum(line["bytes"] for line in lines),
                filename_template=template,
            )
            for split, lines in splits.items()
        ],
        version=_VERSION,
        filename_template=template,
        check_data=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
