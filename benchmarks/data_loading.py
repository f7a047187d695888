"""Images per second that one core reads, decodes, crops and batches, compared with open_clip's loader.

  python -m benchmarks.data_loading [--tars 'DIR/{00000..00009}.tar'] [--out FILE.json]

Without --tars it makes JPEGs of --sides pixels with a photograph's spectrum. All loaders run in this
process, on one core, on the same tars, in turn. The fastest round of each counts, since other work on the
machine can only slow a loader down.

  python -m benchmarks.data_loading --rate 5000 --workers 4 8 12 16 [--tars ...]

reports instead which share of its time a device that trains --rate images per second would wait for
--workers loader processes on all cores, and how fast these are when the device does not limit them.
"""

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from swjax.data import decoding, loader, source
from swjax.data.images import random_box
from swjax.training.log import environment

_SIZE = 224  # pixels
_BATCH = 64
_AHEAD = 8 * _BATCH  # a loader reads ahead fewer images than this
_PEERS = ("open_clip_torch", "torch", "torchvision", "webdataset")


def main(argv: list[str]) -> int:
    """Prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.data_loading", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tars", help="pattern of WebDataset tars; default: makes some")
    parser.add_argument(
        "--sides",
        type=int,
        nargs=2,
        default=(256, 512),
        help="shortest and longest side of the images it makes, in pixels",
    )
    parser.add_argument("--images", type=int, default=1024, help="in a round")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="how often each runs; with --rate: batches of each process",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--rate", type=float, help="images a second that the device trains")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[4], help="loader processes to try"
    )
    parser.add_argument("--batch_size", type=int, default=1024, help="with --rate")
    args = parser.parse_args(argv)
    if args.images < _BATCH or args.rounds < 1:
        parser.error(f"--images must be at least {_BATCH}, a batch, and --rounds at least 1")
    if not 1 <= args.sides[0] <= args.sides[1]:
        parser.error(f"--sides must be two numbers of pixels, the smaller first, not {args.sides}")
    if args.rate:
        return main_wait(args)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        tars = args.tars or write_tars(Path(folder), args.images, args.sides)
        result = measure(tars, folder, args.images, args.rounds)
        result |= {} if args.tars else {"sides": list(args.sides)}
    for name, rate in result["images_per_second"].items():
        print(f"{name:28} {rate:8.0f} images/s on one core")
    print(result["note"] or f"swjax / open_clip: {result['swjax_over_open_clip']}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def main_wait(args: argparse.Namespace) -> int:
    """Prints a row and rewrites the file for each number of processes; returns the exit code."""
    result = {"rate": args.rate, "batch_size": args.batch_size, "rows": [],
              "machine": environment.describe().splitlines()}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        images = max(args.images, 2 * args.batch_size)
        tars = args.tars or write_tars(Path(folder), images, args.sides)
        pairs = source("webdataset", tars, data_dir=folder)
        for count in args.workers:
            row = wait(pairs, args.rate, count, args.batch_size, args.rounds)
            rate, share = row["images_per_second"], row["data_wait"]
            told = f"{count} processes: {rate} images/s, data wait {share:.1%}"
            if rate < args.rate:  # batches made in advance hide it at first
                told += f", in a long run {1 - rate / args.rate:.1%} at least: they are too slow"
            print(told, flush=True)
            result["rows"].append(row)
            if args.out:
                args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def wait(pairs, rate: float, workers: int, batch_size: int, rounds: int) -> dict:
    """Measures how long a device waits for a loader.

    Processes start together, so their first batches arrive together. Timing starts after two batches of each
    process, which are taken at the device's rate so that the loader's queue is not emptied.

    Args:
      pairs: source of photographs.
      rate: images per second that the device trains.
      workers: loader processes.
      batch_size: images in a batch.
      rounds: batches of each process taken at that rate; as many are taken without pause.
    """
    found, steps = {}, rounds * max(workers, 1)
    for pace in (0.0, batch_size / rate):
        batches = loader(pairs, batch_size=batch_size, image_size=_SIZE, workers=workers)
        _take(batches, 2 * max(workers, 1), pace)
        found[pace] = _take(batches, steps, pace)
        batches.close()
    (_, fastest), (waited, seconds) = found.values()
    return {"workers": workers, "images_per_second": round(steps * batch_size / fastest),
            "data_wait": round(waited / seconds, 4)}  # fmt: skip


def _take(batches: Iterator, count: int, pace: float) -> tuple[float, float]:
    """Takes `count` batches, pausing `pace` seconds after each; returns (seconds waited, seconds in all)."""
    start, waited = time.perf_counter(), 0.0
    for _ in range(count):
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
        time.sleep(pace)
    return waited, time.perf_counter() - start


def measure(tars: str, folder: str, images: int, rounds: int) -> dict:
    """Runs all loaders in turn.

    Args:
      tars: pattern of their paths.
      folder: for the index of the tars.
      images: number of images in a round.
      rounds: number of rounds of each loader.

    Returns:
      The content of the JSON file: rates, versions, machine.
    """
    pairs = source("webdataset", tars, data_dir=folder)
    files = [pairs.stored(i)["image"] for i in range(min(images, len(pairs)))]
    swjax = loader(pairs, batch_size=_BATCH, image_size=_SIZE)
    runs: dict[str, Iterator] = {
        "decode and crop": _crops(files, decoding.decode, decoding.resize),
        "the same, Pillow": _crops(files, _decode_with_pillow, decoding.resize_with_pillow),
        "swjax loader": (len(batch["image"]) for batch in swjax),
    }
    note = ""
    try:
        runs["open_clip loader"] = (len(image) for image, _ in open_clip_loader(tars))
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision for another PyTorch
        note = f'without open_clip: {error}; pip install "swjax[bench]"'
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, counts in runs.items():
            rates[name].append(_rate(counts, images))
    swjax.close()
    best = {name: max(found) for name, found in rates.items()}
    ours, theirs = best["swjax loader"], best.get("open_clip loader")
    return {
        "images_per_second": best,
        "swjax_over_open_clip": round(ours / theirs, 2) if theirs else None,
        "note": note,
        "images_per_second_of_each_round": rates,
        "images_a_round": images,
        "mean_bytes_of_an_image": round(float(np.mean([len(data) for data in files]))),
        "tars": tars if not tars.startswith(folder) else "made here",
        "scaled_by": "fast_image_resize" if decoding.has_fast_resize() else "Pillow",
        "machine": [
            line for line in environment.describe().splitlines() if not line.startswith("command")
        ],
        "peers": {} if note else {name: environment.version(name) for name in _PEERS},
    }


def _rate(counts: Iterator[int], images: int) -> float:
    """Returns images per second, after taking the batches that were prepared while another loader ran."""
    ready = 0
    while ready < _AHEAD:
        ready += next(counts)
    start, done = time.perf_counter(), 0
    while done < images:
        done += next(counts)
    return round(done / (time.perf_counter() - start), 1)


def _crops(files: list[bytes], decode, resize) -> Iterator[int]:
    rng = np.random.default_rng(0)
    while True:
        for data in files:
            image = decode(data)
            resize(image[random_box(*image.shape[:2], rng)], _SIZE)
            yield 1


def _decode_with_pillow(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def open_clip_loader(tars: str) -> Iterator:
    """Returns an endless iterator of open_clip's training batches (image, text), in this process.

    Args:
      tars: pattern of their paths.

    Raises:
      ImportError: if a package that it needs is not installed.
      RuntimeError: if a package does not match the installed PyTorch.
    """
    import open_clip
    import torch
    from open_clip_train.data import get_wds_dataset

    torch.set_num_threads(1)
    args = argparse.Namespace(
        train_data=tars,
        train_num_samples=10**9,  # one epoch: each begins by filling a buffer
        train_data_upsampling_factors=None,
        dataset_resampled=True,
        workers=0,
        batch_size=_BATCH,
        world_size=1,
        seed=0,
    )
    transform = open_clip.image_transform(_SIZE, is_train=True, aug_cfg={"scale": (0.9, 1.0)})
    tokenizer = open_clip.SimpleTokenizer()
    batches = get_wds_dataset(args, transform, is_train=True, tokenizer=tokenizer).dataloader
    return iter(batches)


def write_tars(folder: Path, images: int, sides: tuple[int, int], tars: int = 2) -> str:
    """Writes tars of JPEGs with captions; returns the pattern of their paths.

    Args:
      folder: where they are written.
      images: number of images.
      sides: shortest and longest side, in pixels.
      tars: number of tars.
    """
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(tars):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(images // tars):
                caption = f"photograph {number} with a caption of a usual length, say ten words"
                for end, data in (("jpg", _photograph(rng, sides)), ("txt", caption.encode())):
                    info = tarfile.TarInfo(f"{shard:05d}{number:04d}.{end}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return f"{folder}/{{00000..{tars - 1:05d}}}.tar"


def _photograph(rng: np.random.Generator, sides: tuple[int, int]) -> bytes:
    """Returns a JPEG with a photograph's spectrum, about 1/f."""
    from PIL import Image

    height, width = rng.integers(sides[0], sides[1] + 1, 2)
    f = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    f[0, 0] = 1.0
    waves = rng.normal(size=(3, height, width)) + 1j * rng.normal(size=(3, height, width))
    light, red, blue = np.fft.ifft2(waves / f**1.4).real
    layers = np.stack([light + 0.3 * red, light, light + 0.3 * blue], axis=-1)
    pixels = np.clip(55 * layers / layers.std() + 120, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
