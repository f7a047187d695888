"""The fuzzer's inputs of data sets: tars, pictures, captions, tables and folders of classes.

Each function takes a folder and a random generator, and returns a function that reads the next input.
"""

import io
import itertools
import json
import random
import tarfile
from pathlib import Path

from benchmarks.reliability.malformed import NAMES, damage, mutate, photograph, remove


def tars(place: Path, rng: random.Random):
    """Tars with hostile names and links, and damaged ones; their samples are read by the loader."""
    from swjax import data

    numbers = itertools.count()

    def archive() -> bytes:
        file = io.BytesIO()
        options = {
            "format": rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)),
            "errors": "surrogateescape",
        }
        with tarfile.open(fileobj=file, mode="w", **options) as tar:
            for sample in range(6):
                for end, content in (("jpg", photograph(rng)), ("txt", b"a caption")):
                    name = f"{sample:04d}.{end}" if rng.random() < 0.7 else rng.choice(NAMES)
                    info = tarfile.TarInfo(name.replace("\0", "0") or "x")
                    info.size = len(content)
                    if rng.random() < 0.1:
                        info.type, info.size = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE)), 0
                        info.linkname = "/etc/passwd"
                    tar.addfile(info, io.BytesIO(content) if info.size else None)
        return file.getvalue()

    def read() -> int:
        path = place / f"{next(numbers)}.tar"
        path.write_bytes(damage(archive(), rng) if rng.random() < 0.8 else archive())
        source = data.source("webdataset", str(path), data_dir=str(place / "data"))
        batches = data.loader(source, batch_size=2, train=False, image_size=16, max_bad_share=1.0)
        try:
            return sum(int(batch["mask"].sum()) for batch in batches)
        finally:
            batches.close()
            path.unlink()

    return read


def images(place: Path, rng: random.Random):
    from swjax.data.decoding import decode

    def read() -> tuple:
        data = photograph(rng, rng.choice(("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")))
        try:
            return decode(damage(data, rng)).shape
        except Exception as error:  # Pillow's errors are documented; the loader logs them
            if isinstance(error, TimeoutError | MemoryError):
                raise
            raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error

    return read


def layouts(place: Path, rng: random.Random):
    """Pictures with captions in text files, tables and folders, with links between folders."""
    from swjax import data

    picture = photograph(rng)
    quotes = (
        "a fox",
        '"a fox',
        'a "fox',
        '"a\nfox"',
        "",
        "\x1b[31m",
        "null",
        "a, fox",
        "\ud800",
        "x" * 5000,
    )

    def tree(root: Path) -> str:
        folders = [
            root,
            *(root / name for name in rng.sample(("images", "captions", "1", "10", "2"), 3)),
        ]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        for number in range(6):
            folder = rng.choice(folders)
            (folder / f"{number}{rng.choice(('.jpg', '.JPG', '.png', '.heic', '.jpg.jpg'))}").write_bytes(
                picture if rng.random() < 0.8 else damage(picture, rng))  # fmt: skip
            if rng.random() < 0.7:
                text = rng.choice(quotes).encode("utf-8", "surrogatepass")
                end = rng.choice((".txt", ".png.txt", ".jpg.txt", ".TXT"))
                (rng.choice((folder, *folders)) / f"{number}{end}").write_bytes(text)
        for _ in range(rng.choice((0, 0, 4))):
            link = rng.choice(folders) / f"link{rng.randrange(9)}"
            if not link.is_symlink():
                link.symlink_to(rng.choice((*folders, place.parent, link)))
        return str(root)

    def table(root: Path) -> str:
        (root / "0.jpg").write_bytes(picture)
        end = rng.choice((".csv", ".tsv", ".jsonl"))
        rows = [
            (rng.choice(("0.jpg", "missing.jpg", "../secret", "")), rng.choice(quotes))
            for _ in range(8)
        ]
        if end == ".jsonl":
            lines = [
                json.dumps(mutate({"image": image, "caption": text}, rng)) for image, text in rows
            ]
        else:
            comma = "," if end == ".csv" else "\t"
            lines = [comma.join(("image", "caption")), *(comma.join(row) for row in rows)]
        content = "\n".join(lines).encode(rng.choice(("utf-8", "utf-16")), "surrogatepass")
        path = root / f"table{end}"
        path.write_bytes(content if rng.random() < 0.6 else damage(content, rng))
        return str(path)

    def read() -> int:
        root = place / "set"
        root.mkdir()
        try:
            kind = rng.choice(("folders", "table"))
            path = tree(root) if kind == "folders" else table(root)
            return read_all(data.source(kind, path, data_dir=str(place / "data")))
        finally:
            remove(root)

    return read


def class_folders(place: Path, rng: random.Random):
    """Labelled sets: folders named by numbers or anything, damaged names and prompts, tables."""
    from swjax.data.labelled import Labelled

    picture = photograph(rng)
    names = (
        "0",
        "1",
        "2",
        "10",
        "-1",
        "cat",
        "red_fox",
        ".hidden",
        "n00000001",
        "\x1b[31m",
        "1" * 200,
    )

    def read() -> int:
        root = place / "set"
        root.mkdir()
        try:
            chosen = rng.sample(names, rng.randint(1, 5))
            for name in chosen:
                (root / name).mkdir()
                (root / name / "0.jpg").write_bytes(picture)
            listed = "\n".join(
                rng.sample(names, rng.randint(1, 5)) if rng.random() < 0.5 else chosen
            )
            for file, text in (
                ("classnames.txt", listed),
                ("zeroshot_classification_templates.txt", "a {}\n{c}"),
            ):
                if rng.random() < 0.6:
                    content = text.encode()
                    (root / file).write_bytes(
                        content if rng.random() < 0.5 else damage(content, rng)
                    )
            address = f"folders:{root}"
            if rng.random() < 0.5:
                rows = [f"{name}/0.jpg,{rng.choice((name, *names, '1.0', ''))}" for name in chosen]
                text = "\n".join(["image,label", *rows]).encode()
                (root / "table.csv").write_bytes(text if rng.random() < 0.6 else damage(text, rng))
                address = f"table:{root}/table.csv"
            return read_all(Labelled(address, data_dir=str(place / "data")))
        finally:
            remove(root)

    return read


def read_all(source) -> int:
    """Reads every example; returns the number of readable ones."""
    from swjax import data

    batches = data.loader(source, batch_size=2, train=False, image_size=16, max_bad_share=1.0)
    try:
        return sum(int(batch["mask"].sum()) for batch in batches)
    finally:
        batches.close()
