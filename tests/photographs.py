"""Small data sets for tests, made here: photographs in tars, tables, and ways to break them."""

import io
import json
import tarfile

import numpy as np
from PIL import Image


def photograph(number: int, height: int = 40, width: int = 48) -> Image.Image:
    """A smooth image that has its number in its colour."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def jpeg(number: int, **options) -> bytes:
    return encoded(photograph(number), "JPEG", **options)


def encoded(image: Image.Image, file_format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def sample(number: int) -> dict[str, bytes]:
    """The files of a sample, by extension, as img2dataset writes them."""
    caption = f"picture {number}"
    fields = {"caption": caption, "url": f"https://example.com/{number}", "status": "success"}
    return {"jpg": jpeg(number), "txt": caption.encode(), "json": json.dumps(fields).encode()}


def write_tar(path, samples: dict[str, dict[str, bytes]], **options) -> None:
    """Writes {key: {extension: bytes}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for key, files in samples.items():
            for extension, data in files.items():
                add(tar, f"{key}.{extension}", data)


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **fields) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def write_tars(folder, counts: list[int], change=lambda number, files: files) -> str:
    """Writes tars with so many samples each, counted through; returns the pattern of their paths."""
    number = 0
    for shard, count in enumerate(counts):
        numbers = range(number, number + count)
        samples = {f"{shard:05d}{n:04d}": change(n, sample(n)) for n in numbers}
        write_tar(folder / f"{shard:05d}.tar", samples)
        number += count
    return f"{folder}/{{00000..{len(counts) - 1:05d}}}.tar"
