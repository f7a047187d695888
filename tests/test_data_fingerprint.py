"""Fingerprints: equal for a data set that was moved, different for other data."""

import os
import shutil

import numpy as np
import pytest
from photographs import jpeg, write_tar, write_tfds

from swjax import data
from swjax.data import sources

ROWS = [(jpeg(number), f"picture {number}") for number in range(6)]
CHANGES = {
    "reversed": ROWS[::-1],
    "other captions": [(picture, f"drawing {i}") for i, (picture, _) in enumerate(ROWS)],
    "another picture": [(jpeg(9), ROWS[0][1]), *ROWS[1:]],
    "one more": [*ROWS, (jpeg(7), "picture 7")],
}


def folders(root, rows):
    for number, (picture, caption) in enumerate(rows):
        (root / f"{number}.jpg").write_bytes(picture)
        (root / f"{number}.txt").write_text(caption)
    return data.source("folders", str(root))


def write_table(root, rows, column):
    for number, (picture, _) in enumerate(rows):
        (root / f"{number}.jpg").write_bytes(picture)
    lines = [f"{number}.jpg,{caption}" for number, (_, caption) in enumerate(rows)]
    (root / "rows.csv").write_text("\n".join([f"image,{column}", *lines]))
    return str(root / "rows.csv")


def tables(root, rows):
    return data.source("table", write_table(root, rows, "caption"), data_dir=str(root))


def tars(root, rows):
    samples = {str(i): {"jpg": row[0], "txt": row[1].encode()} for i, row in enumerate(rows)}
    write_tar(root / "0.tar", samples)
    return data.source("webdataset", str(root / "0.tar"), data_dir=str(root))


def parquets(root, rows):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    pictures, captions = (list(column) for column in zip(*rows))
    table = pyarrow.table({"image": pictures, "caption": captions})
    parquet.write_table(table, root / "rows.parquet", row_group_size=2)
    return data.source("parquet", str(root / "rows.parquet"))


def hugging_faces(root, rows):
    datasets = pytest.importorskip("datasets")
    pictures, captions = (list(column) for column in zip(*rows))
    datasets.Dataset.from_dict({"image": pictures, "caption": captions}).save_to_disk(root / "rows")
    return data.source("huggingface", str(root / "rows"))


def tfds(root, rows):
    features = pytest.importorskip("tensorflow_datasets").features
    kinds = {"image": features.Image(encoding_format="jpeg"), "caption": features.Text()}
    examples = [{"image": picture, "caption": caption} for picture, caption in rows]
    write_tfds(root, "rows", "train", kinds, examples)
    return data.source("tfds", "train", data_dir=str(root), builder="rows")


def mixtures(root, rows):
    first, second = root / "first", root / "second"
    first.mkdir()
    second.mkdir()
    parts = {"first": (folders(first, ROWS), 1.0), "second": (tables(second, rows), 2.0)}
    return data.Mixture(parts)


def class_folders(root, rows):
    for number, (picture, caption) in enumerate(rows):
        (root / caption).mkdir(exist_ok=True)
        (root / caption / f"{number}.jpg").write_bytes(picture)
    return data.source("labelled", f"folders:{root}")


def labelled_rows(root, rows):
    table = write_table(root, rows, "label")
    return data.source("labelled", f"table:{table}", data_dir=str(root))


class Memory:
    """A source with nothing but the methods of the protocol."""

    class_names = templates = ()
    attribution, photographs = "", False

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        picture, caption = self._rows[index]
        pixels = np.frombuffer(picture[-300:], np.uint8).reshape(10, 10, 3)
        return {"image": pixels, "label": index, "captions": (caption,)}

    def captions(self, label):
        return (self._rows[label][1],)


def memory(root, rows):
    return Memory(rows)


KINDS = (
    folders, tables, tars, parquets, hugging_faces, tfds, mixtures, class_folders, labelled_rows,
    memory,
)  # fmt: skip


def of(root, make, rows):
    root.mkdir(parents=True)
    return data.fingerprint(make(root, rows))


@pytest.mark.parametrize("make", KINDS)
def test_other_data_differ_and_a_moved_set_does_not(make, tmp_path):
    first = of(tmp_path / "a" / "long", make, ROWS)
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = make(tmp_path / "b" / "long", ROWS) if make is memory else None
    if make not in (memory, mixtures, hugging_faces, tfds):  # these do not write over a set
        moved = make(tmp_path / "b" / "long", ROWS)
    assert moved is None or data.fingerprint(moved) == first
    assert of(tmp_path / "copy", make, ROWS) == first and len(first) == 32
    others = {of(tmp_path / name, make, rows) for name, rows in CHANGES.items()}
    assert len(others - {first}) == len(CHANGES)


@pytest.mark.parametrize("name, make", [("0.jpg", folders), ("0.txt", folders), ("2.jpg", tables)])
def test_an_edit_that_keeps_size_and_time_is_seen(name, make, tmp_path):
    first = of(tmp_path / "set", make, ROWS)
    path = tmp_path / "set" / name
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    place = str(tmp_path / "set" / ("rows.csv" if make is tables else ""))
    options = {"data_dir": str(tmp_path)} if make is tables else {}
    edited = data.source("table" if make is tables else "folders", place, **options)
    assert data.fingerprint(edited) != first


def test_every_row_of_a_table_and_every_size_counts(tmp_path, monkeypatch):
    """Not only the examples that are read."""
    monkeypatch.setattr(sources, "_SAMPLED", 2)
    rows = [*ROWS[:2], (ROWS[2][0], "edited 2"), *ROWS[3:]]
    longer = [*ROWS[:2], (ROWS[2][0] + bytes(600), ROWS[2][1]), *ROWS[3:]]
    for make, changed in ((tables, rows), (tars, longer), (folders, longer), (parquets, longer)):
        name = f"{make.__name__}"
        assert of(tmp_path / name, make, ROWS) != of(tmp_path / f"{name} 2", make, changed)


def test_names_order_and_unreadable_examples(tmp_path):
    first = of(tmp_path / "a", folders, ROWS)
    (tmp_path / "a" / "3.jpg").rename(tmp_path / "a" / "9.jpg")
    (tmp_path / "a" / "3.txt").rename(tmp_path / "a" / "9.txt")
    assert data.fingerprint(data.source("folders", str(tmp_path / "a"))) != first
    broken = tables(tmp_path / "a", ROWS)
    (tmp_path / "a" / "3.jpg").unlink()
    assert data.fingerprint(broken) == data.fingerprint(broken)


def test_broken_links_are_unreadable_examples(tmp_path):
    first = of(tmp_path / "a", folders, ROWS)
    (tmp_path / "a" / "3.jpg").unlink()
    (tmp_path / "a" / "3.jpg").symlink_to("nowhere.jpg")
    assert data.fingerprint(data.source("folders", str(tmp_path / "a"))) != first


def test_a_table_of_addresses_reads_none(tmp_path, monkeypatch):
    monkeypatch.setattr(data.files, "read_whole", lambda *a: pytest.fail("no network"))
    lines = [f"memory://{i}.jpg,a fox" for i in range(3)]
    (tmp_path / "rows.csv").write_text("\n".join(["image,caption", *lines]))
    table = data.source("table", str(tmp_path / "rows.csv"), data_dir=str(tmp_path))
    assert table.sampled(3) == [] and data.fingerprint(table) == data.fingerprint(table)


def test_reading_is_bounded(monkeypatch):
    monkeypatch.setattr(sources, "_SAMPLED_BYTES", 10_000)
    source = Memory(ROWS * 1000)
    read = []
    get = Memory.__getitem__
    monkeypatch.setattr(Memory, "__getitem__", lambda s, i: read.append(i) or get(s, i))
    data.fingerprint(source)
    assert 0 < len(read) <= 48
