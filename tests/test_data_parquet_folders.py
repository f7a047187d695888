"""Folders of images, and Parquet files, as sources of image-text pairs."""

import errno
import functools
import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from photographs import jpeg
from PIL import Image

from swjax import data
from swjax.data import files, parquet


def pixels(number):
    return np.asarray(Image.open(io.BytesIO(jpeg(number))))


# --- folders ------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    """Writes three images into two folders."""
    for number, name in enumerate(("red_fox/a.jpg", "red_fox/b.JPG", "owl/deep.jpeg")):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    (tmp_path / "pictures" / "readme.md").write_text("no picture")
    (tmp_path / "pictures" / "owl" / "._deep.jpeg").write_bytes(b"hidden, as macOS writes it")
    return tmp_path / "pictures"


def test_folders_are_classes(pictures):
    source = data.source("folders", str(pictures))
    assert source.class_names == ("owl", "red fox") and source.templates == ("a photo of a {}.",)
    examples = [source[i] for i in range(len(source))]
    assert [(e["label"], e["captions"]) for e in examples] == [
        (0, ("a photo of a owl.",)),
        (1, ("a photo of a red fox.",)),
        (1, ("a photo of a red fox.",)),
    ]
    np.testing.assert_array_equal(examples[0]["image"], pixels(2))
    assert source.captions(1) == ("a photo of a red fox.",)
    assert source.key(2) == str(pictures / "red_fox/b.JPG")
    again = pickle.loads(pickle.dumps(source))
    assert again[1]["captions"] == examples[1]["captions"]
    braces = data.source("folders", str(pictures), template="{} {x}")
    assert braces.captions(0) == braces[0]["captions"] == ("owl {x}",)


def test_endings_in_upper_case(tmp_path):
    """File names may end in .JPG, .TXT or .CSV, as cameras write them."""
    (tmp_path / "IMG_1.JPG").write_bytes(jpeg(1))
    (tmp_path / "IMG_1.TXT").write_text("a red fox")
    (tmp_path / "PAIRS.CSV").write_text("image,caption\nIMG_1.JPG,a fox\n")
    assert data.source("folders", str(tmp_path)).captions(0) == ("a red fox",)
    table = data.source("table", str(tmp_path / "PAIRS.CSV"), data_dir=str(tmp_path / "index"))
    assert table.captions(0) == ("a fox",)


def test_links_to_folders_are_followed(pictures, tmp_path):
    (tmp_path / "more" / "toad").mkdir(parents=True)
    (tmp_path / "more" / "toad" / "1.jpg").write_bytes(jpeg(4))
    (tmp_path / "more" / "back").symlink_to(pictures)  # a cycle
    (pictures / "more").symlink_to(tmp_path / "more")
    source = data.source("folders", str(pictures))
    assert source.class_names == ("owl", "red fox", "toad") and len(source) == 4


def test_folders_that_link_to_each_other_are_listed_once(tmp_path):
    """Each path through n folders would be another file: n! of them."""
    root = tmp_path / "set"
    for name in "abcdefghij":
        (root / name).mkdir(parents=True)
        (root / name / "1.jpg").write_bytes(jpeg(0))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "2.jpg").write_bytes(jpeg(1))
    for name in "abcdefghij":
        for other in "abcdefghij":
            (root / name / f"to_{other}").symlink_to(root / other)
        (root / name / "out").symlink_to(tmp_path / "outside")
        (root / name / "up").symlink_to(tmp_path)
    (root / "a" / "twice.jpg").symlink_to(root / "a" / "1.jpg")  # links to files stay
    wanted = sorted([*(f"{name}/1.jpg" for name in "abcdefghij"), "a/out/2.jpg", "a/twice.jpg"])
    assert files.below(str(root), files.PICTURES) == wanted


LAYOUTS = {
    "images/{}.png": ("images/{}.txt", "images/{}.png.txt", "captions/{}.txt", "texts/{}.png.txt"),
    "{}.JPG": ("{}.txt", "{}.JPG.TXT"),
    "set/images/a/{}.png": ("set/captions/a/{}.txt", "texts/images/a/{}.txt"),
}


def write(root, name, data):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


@pytest.mark.parametrize(
    "picture, text", [(picture, text) for picture in LAYOUTS for text in LAYOUTS[picture]]
)
def test_layouts_of_text_files(picture, text, tmp_path):
    for n in range(3):
        write(tmp_path, picture.format(n), jpeg(n))
        write(tmp_path, text.format(n), f"picture {n}")
    write(tmp_path, "readme.txt", "about the set")
    source = data.source("folders", str(tmp_path))
    assert [source.captions(n) for n in range(3)] == [(f"picture {n}",) for n in range(3)]
    assert source.class_names == () and source.notes == ()


def test_text_files_that_match_nothing(tmp_path):
    for n in range(8):
        write(tmp_path, f"images/{n}.png", jpeg(n))
        write(tmp_path, f"labels/{n}.txt", "0 0.5 0.5 0.1 0.1")  # YOLO's boxes are no captions
    with pytest.raises(ValueError, match="8 of 8 text files in .* match no picture, such as 'lab"):
        data.source("folders", str(tmp_path))
    for n in range(6):
        write(tmp_path, f"images/{n}.txt", f"picture {n}")
    for n in range(6):
        (tmp_path / "labels" / f"{n}.txt").unlink()
    source = data.source("folders", str(tmp_path))
    assert source.captions(2) == ("picture 2",)
    assert source.notes == ("2 text files match no picture, such as 'labels/6.txt'",)


@pytest.mark.parametrize(
    "names, message",
    [
        (["a/0.png", "b/0.txt", "c/0.txt"], "'a/0.png' has 'b/0.txt' and 'c/0.txt' as text files"),
        (["a/0.png", "b/0.png", "c/0.txt"], "'a/0.png' and 'b/0.png' have 'c/0.txt' as text files"),
    ],
)
def test_text_files_that_fit_twice(names, message, tmp_path):
    for name in names:
        write(tmp_path, name, jpeg(0) if name.endswith("png") else "a fox")
    with pytest.raises(ValueError, match=message):
        data.source("folders", str(tmp_path))


@pytest.mark.parametrize("name", ["folders", "labelled"])
def test_files_that_are_not_read_are_counted(name, tmp_path, caplog):
    for ending in ("jpg", "JXL", "jxl", "svg", "psd", "weird"):
        write(tmp_path, f"fox/{ending}.{ending}", jpeg(0))
    place = str(tmp_path) if name == "folders" else f"folders:{tmp_path}"
    source = data.source(name, place)
    note = (
        "5 files are not read: 2 .jxl, 1 .psd, 1 .svg, 1 .weird; convert JPEG XL, Photoshop, SVG pictures to "
        "JPEG or PNG"
    )
    assert len(source) == 1 and source.notes == (note,)
    data.loader(source, batch_size=1, image_size=8).close()
    assert note in caplog.text
    (tmp_path / "fox/jpg.jpg").unlink()
    with pytest.raises(ValueError, match="2 .jxl, 1 .psd"):
        data.source(name, place)


def test_metadata_of_the_imagefolder_of_hugging_face(tmp_path):
    for n in range(4):
        write(tmp_path, f"train/{n}.jpg", jpeg(n))
    write(tmp_path, "train/3.txt", "not read")
    rows = ['{"file_name": "0.jpg", "text": "a fox"}', '{"file_name": "./2.jpg", "text": ["x", null]}',
            "{broken", '{"file_name": "gone.jpg", "text": "gone"}']  # fmt: skip
    write(tmp_path, "train/metadata.jsonl", "\n".join(rows))
    source = data.source("folders", str(tmp_path))
    assert [source.captions(n) for n in (0, 2)] == [("a fox",), ("x",)] and source.class_names == ()
    for n in (1, 3):
        with pytest.raises(ValueError, match="the metadata have no row for the picture"):
            source.record(n)
    assert source.notes == (
        "1 file is not read: 1 .txt",
        "1 rows of the metadata have no picture, such as 'train/gone.jpg'",
    )
    assert pickle.loads(pickle.dumps(source)).captions(0) == ("a fox",)
    (tmp_path / "train/metadata.jsonl").unlink()
    write(tmp_path, "metadata.csv", "file_name,text\ntrain\\1.jpg, an owl\ntrain/1.jpg,a bird\n")
    assert data.source("folders", str(tmp_path)).captions(1) == ("an owl", "a bird")
    write(tmp_path, "metadata.csv", "file_name,text\nother/1.jpg,an owl\n")
    with pytest.raises(ValueError, match="names no picture of the folder, but 'other/1.jpg'"):
        data.source("folders", str(tmp_path))


def test_text_files_that_link_out_of_the_folder_are_not_read(tmp_path):
    root, outside = tmp_path / "set", tmp_path / "outside"
    write(outside, "secret", "a password")
    write(outside, "secret.txt", "a password")
    for n in range(3):
        write(root, f"fox/{n}.jpg", jpeg(n))
    (root / "fox/0.txt").symlink_to(outside / "secret")
    (root / "fox/1.txt").symlink_to(outside / "secret.txt")
    write(root, "2.txt", "a fox")
    (root / "fox/2.txt").symlink_to("../2.txt")  # inside
    source = data.source("folders", str(root))
    assert source.captions(2) == ("a fox",)
    for n in (0, 1):
        with pytest.raises(ValueError, match="its text file is a link out of the folder: copy"):
            source.record(n)
    (root / "metadata.csv").symlink_to(outside / "secret")
    with pytest.raises(ValueError, match="metadata.csv is a link out of the folder: copy the"):
        data.source("folders", str(root))
    (root / "metadata.csv").unlink()
    (root / "classnames.txt").symlink_to(outside / "secret")
    with pytest.raises(ValueError, match="classnames.txt is a link out of its folder: copy the"):
        data.source("labelled", f"folders:{root}")


@pytest.mark.parametrize("names", ["0.txt", "metadata.csv", "classnames.txt"])
def test_caches_of_hugging_face_are_read(names, tmp_path):
    """Files of a snapshot are links to blobs, whose names are hashes."""
    text = "file_name,text\na/0.jpg,a fox" if names == "metadata.csv" else "a fox"
    snapshot = tmp_path / "snapshots" / "rev" / "train"
    named = {"a/0.jpg": jpeg(0), f"{'a/' if names == '0.txt' else ''}{names}": text}
    for number, (name, content) in enumerate(named.items()):
        write(tmp_path, f"blobs/{number}af", content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(tmp_path / f"blobs/{number}af")
    kind = "labelled" if names == "classnames.txt" else "folders"
    source = data.source(kind, f"folders:{snapshot}" if kind == "labelled" else str(snapshot))
    assert source[0]["captions"] == ("a fox",) and len(source) == 1


def test_sets_of_links_are_read(tmp_path):
    """The picture is outside too, and its text lies with it."""
    root = tmp_path / "set"
    root.mkdir()
    write(tmp_path, "flat/1.jpg", jpeg(0))
    write(tmp_path, "flat/one.txt", "a fox")
    write(tmp_path, "images/2.jpg", jpeg(0))
    write(tmp_path, "captions/2.txt", "an owl")
    targets = {
        "a.jpg": "flat/1.jpg", "a.txt": "flat/one.txt",
        "b.jpg": "images/2.jpg", "b.txt": "captions/2.txt",
        "c.jpg": "images/2.jpg", "c.txt": "flat/one.txt",
    }  # fmt: skip
    for name, target in targets.items():
        (root / name).symlink_to(tmp_path / target)
    (root / "more").symlink_to(tmp_path / "flat")
    write(tmp_path, "flat/1.txt", "in a linked folder")
    source = data.source("folders", str(root))
    assert [source.captions(n)[0] for n in (0, 1, 3)] == ["a fox", "an owl", "in a linked folder"]
    with pytest.raises(ValueError, match="is a link out of the folder"):
        source.captions(2)


def test_unreadable_folders_are_errors(pictures, monkeypatch):
    """Without an error their pictures would be missing in silence."""
    scan = os.scandir

    def scandir(path):
        if str(path).endswith("owl"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="Permission denied.*owl"):
        data.source("folders", str(pictures))


def test_a_pipe_is_no_picture(pictures):
    os.mkfifo(pictures / "owl" / "pipe.jpg")  # reading it would wait for ever
    source = data.source("folders", str(pictures))
    with pytest.raises(OSError, match="Not a regular file: write its content to a file"):
        source.record(1)


def test_text_files_are_captions(pictures):
    (pictures / "red_fox/a.txt").write_text("a fox\n\nin the snow\n")
    (pictures / "top.jpg").write_bytes(jpeg(3))
    (pictures / "top.txt").write_text("\ufeffgrößer")
    source = data.source("folders", str(pictures), template="{}")
    assert source.class_names == () and len(source) == 4
    captions = [source[i]["captions"] for i in range(4)]
    assert captions == [("owl",), ("a fox", "in the snow"), ("red fox",), ("größer",)]
    assert [source[i]["label"] for i in range(4)] == [0, 1, 2, 3]
    assert source.captions(3) == ("größer",)


def test_a_picture_without_any_words_is_skipped(pictures):
    (pictures / "top.jpg").write_bytes(jpeg(3))
    batches = data.loader(
        data.source("folders", str(pictures)), batch_size=4, train=False, image_size=8
    )
    (batch,) = batches
    assert batch["mask"].tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "where, options, message",
    [
        ("nowhere", {}, "is not a folder: give the folder of the pictures"),
        ("empty", {}, r"'empty' contains no pictures: the endings .jpg"),
        ("pictures", {"template": "a photo"}, 'has no place for the name: write "{}"'),
    ],
)
def test_folders_refuse(where, options, message, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message) as error:
        data.source("folders", where, **options)
    assert "\n" not in str(error.value)


# --- Parquet ------------------------------------------------------------------------------------------


def write_parquet(path, images, captions, *, rows=3, names=("image", "caption")):
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({names[0]: images, names[1]: captions, "width": [1] * len(images)})
    pyarrow_parquet.write_table(table, path, row_group_size=rows)


def test_a_parquet_file_that_inflates_is_refused(tmp_path, monkeypatch):
    """A dictionary of one value and a count: a kilobyte describes gigabytes."""
    monkeypatch.setattr(parquet, "_BYTES_KEPT", 2**23)
    write_parquet(tmp_path / "x.parquet", [bytes(2**17)] * 500, ["fox"] * 500, rows=500)
    assert (tmp_path / "x.parquet").stat().st_size < 20_000
    source = data.source("parquet", f"{tmp_path}/x.parquet")
    decoded = []
    iterate = parquet._open(f"{tmp_path}/x.parquet").__class__.iter_batches

    def counted(*args, **options):
        for batch in iterate(*args, **options):
            decoded.append(batch.nbytes)
            yield batch

    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", counted)
    with pytest.raises(ValueError, match="500 rows .* to more than 8388608 bytes: write smaller"):
        source.record(0)
    assert sum(decoded) < 2 * 2**23
    write_parquet(tmp_path / "y.parquet", [b""] * 64, ["x" * 2**16] * 64, names=("image", "label"))
    with pytest.raises(ValueError, match="64 values of the column 'label' of .*; at most 1048576"):
        data.source("parquet", f"{tmp_path}/y.parquet", text_key="label").values()


def test_rows_of_parquet_files(tmp_path):
    for file in range(2):
        images = [jpeg(10 * file + row) for row in range(7)]
        write_parquet(tmp_path / f"{file}.parquet", images, [f"c{file}{row}" for row in range(7)])
    source = data.source("parquet", f"{tmp_path}/{{0..1}}.parquet")
    assert len(source) == 14 and source.shards.tolist() == [3, 3, 1] * 2
    order = [13, 0, 7, 6, 3, 8]
    assert [source[i]["captions"] for i in order] == [
        (c,) for c in ("c16", "c00", "c10", "c06", "c03", "c11")
    ]
    np.testing.assert_array_equal(source[9]["image"], pixels(12))
    assert source.key(13) == f"{tmp_path}/1.parquet[6]"
    assert pickle.loads(pickle.dumps(source)).captions(6) == ("c06",)
    assert len(pickle.dumps(source)) < 2000


def test_every_layout_of_an_image(tmp_path):
    (tmp_path / "on_disk.jpg").write_bytes(jpeg(5))
    layouts = {
        "bytes": [jpeg(5)],
        "path": ["on_disk.jpg"],
        "struct": [{"bytes": jpeg(5), "path": None}],
        "struct of path": [{"bytes": None, "path": str(tmp_path / "on_disk.jpg")}],
    }
    for name, images in layouts.items():
        path = tmp_path / f"{name}.parquet"
        write_parquet(path, images, [["", "one", "two"]], names=("jpg", "text"))
        source = data.source("parquet", str(path))
        np.testing.assert_array_equal(source[0]["image"], pixels(5))
        assert source.captions(0) == ("one", "two")


def test_threads_read_a_group_once(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", [jpeg(n) for n in range(8)], list("abcdefgh"), rows=8)
    source = data.source("parquet", str(tmp_path / "a.parquet"))
    opened = []
    real = parquet._open
    monkeypatch.setattr(
        parquet, "_open", lambda path, **how: opened.append(path) or real(path, **how)
    )
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(functools.partial(source.captions), range(8)))
    assert found == [(letter,) for letter in "abcdefgh"] and len(opened) == 1


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_large_row_groups_stay_out_of_memory(compression, tmp_path, monkeypatch):
    """A row group of 240 kB is read in parts that fit into 64 kB, and every row can be read."""
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet, "_BYTES_KEPT", 2**16)
    noise = np.random.default_rng(0)
    images = [{"bytes": noise.bytes(8000), "path": None} for _ in range(31)]
    columns = {"image": images, "other": [noise.bytes(9000) for _ in images]}
    columns["caption"] = [str(row) for row in range(31)]
    path, options = tmp_path / "a.parquet", {"compression": compression, "data_page_size": 2**12}
    pyarrow_parquet.write_table(pyarrow.table(columns), path, row_group_size=30, **options)
    source = data.source("parquet", str(path))
    assert source.shards.max() < 4 and len(source) == 31
    most = 0
    for index in noise.permutation(31).tolist():
        record = source.record(index)
        assert (record.image, record.captions) == (images[index]["bytes"], (str(index),))
        assert source.key(index) == f"{path}[{index}]"
        most = max(most, sum(table.get_total_buffer_size() for table in source._kept.values()))
    assert 2**15 < most <= 2**16


def test_a_caption_that_is_a_number_is_refused(tmp_path):
    """Only a zero-shot set reads a column of numbers, as labels."""
    for caption in (5, [5, 6]):
        write_parquet(tmp_path / "a.parquet", [jpeg(1)], [caption])
        with pytest.raises(ValueError, match="the caption must be text, not int"):
            data.source("parquet", str(tmp_path / "a.parquet")).record(0)


def test_a_file_with_other_columns_is_refused(tmp_path):
    """The run would skip the rows of that file, or stop in the middle."""
    write_parquet(tmp_path / "0.parquet", [jpeg(1)], ["a"])
    write_parquet(tmp_path / "1.parquet", [jpeg(1)], ["b"], names=("image", "text"))
    with pytest.raises(ValueError, match="1.parquet must have one .* 'caption', .* has 0 among"):
        data.source("parquet", str(tmp_path / "*.parquet"))


def test_parquet_behind_an_address(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    write_parquet(tmp_path / "a.parquet", [jpeg(1)], ["far away"])
    with fsspec.open("memory://pairs/a.parquet", "wb") as file:
        file.write((tmp_path / "a.parquet").read_bytes())
    assert data.source("parquet", "memory://pairs/*.parquet").captions(0) == ("far away",)


def test_bad_rows_are_skipped(tmp_path):
    images = [jpeg(0), None, b"no image", b""]
    write_parquet(tmp_path / "a.parquet", images, ["good", "a", "b", "c"])
    write_parquet(tmp_path / "b.parquet", [jpeg(1)], [None])
    source = data.source("parquet", f"{tmp_path}/*.parquet")
    batches = data.loader(source, batch_size=5, train=False, image_size=8)
    (batch,) = batches
    assert batch["mask"].tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    "where, options, message",
    [
        ("missing.parquet", {}, "cannot open missing.parquet: it does not exist"),
        ("text.parquet", {}, "text.parquet is not a complete Parquet file"),
        ("half.parquet", {}, "half.parquet is not a complete Parquet file"),
        ("a.parquet", {"text_key": "title"}, "no column 'title'; it has image, caption, width"),
        ("empty.parquet", {}, "'empty.parquet' has no rows"),
    ],
)
def test_parquet_refuses(where, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parquet("a.parquet", [jpeg(0)], ["a"])
    write_parquet("empty.parquet", [], [])
    with open("a.parquet", "rb") as file, open("half.parquet", "wb") as half:
        half.write(file.read()[:-20])
    with open("text.parquet", "w") as text:
        text.write("no columns")
    with pytest.raises(ValueError, match=message) as error:
        data.source("parquet", where, **options)
    assert "\n" not in str(error.value)
