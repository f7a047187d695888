"""Tars, tables, Hugging Face data sets and mixtures as sources, with valid and with damaged files."""

import csv
import gzip
import io
import json
import os
import pickle
import tarfile
import time

import numpy as np
import pytest
from photographs import add, encoded, jpeg, photograph, sample, write_tar, write_tars
from PIL import Image

from swjax import data
from swjax.data import files, index, tar, webdataset
from swjax.data import table as table_module


def open_tars(pattern, tmp_path, **options):
    return data.source("webdataset", str(pattern), data_dir=str(tmp_path / "data"), **options)


def names(path):
    content = path.read_bytes()
    found = tar.members(lambda a, b: content[a:b], len(content))
    return [(m.name, content[m.start : m.start + m.size]) for m in found]


# Tars


def test_samples_of_tars_by_number(tmp_path):
    source = open_tars(write_tars(tmp_path, [3, 1, 4]), tmp_path)
    assert len(source) == 8 and source.shards.tolist() == [3, 1, 4]
    for i in (0, 2, 3, 7):
        example = source[i]
        assert example["captions"] == source.captions(i) == (f"picture {i}",)
        assert example["label"] == i
        np.testing.assert_array_equal(example["image"], Image.open(io.BytesIO(jpeg(i))))
    assert source.key(7) == f"{tmp_path}/00002.tar:000020007"


def test_what_lies_where_is_kept_until_a_tar_changes(tmp_path, monkeypatch):
    pattern, scanned = write_tars(tmp_path, [2, 2]), []
    scan = webdataset.scan
    monkeypatch.setattr(webdataset, "scan", lambda *a: scanned.append(a[0]) or scan(*a))
    assert len(open_tars(pattern, tmp_path)) == len(open_tars(pattern, tmp_path)) == 4
    assert len(scanned) == 2
    write_tar(tmp_path / "00001.tar", {f"x{n}": sample(n) for n in range(3)})
    assert open_tars(pattern, tmp_path)[4]["captions"] == ("picture 2",)
    assert scanned[2:] == [f"{tmp_path}/00001.tar"]


def test_damaged_positions_are_named(tmp_path):
    pattern = write_tars(tmp_path, [2])
    for ending in ("*.npy", "*.json", "files/*.npz"):
        open_tars(pattern, tmp_path)
        (path,) = (tmp_path / "data" / "index").glob(ending)
        os.truncate(path, 9)
        if ending == "files/*.npz":
            (tmp_path / "more").mkdir()
            pattern = f"{tmp_path}/{{00000,more/00000}}.tar"
            write_tars(tmp_path / "more", [1])
        with pytest.raises(ValueError, match=f"positions {path} are damaged: remove {path}, and"):
            open_tars(pattern, tmp_path)
        for damaged in path.parent.glob(f"{path.stem}.*"):
            damaged.unlink()
        assert len(open_tars(pattern, tmp_path)) >= 2


def test_a_killed_preparation_goes_on(tmp_path, monkeypatch):
    pattern, replace = write_tars(tmp_path, [2, 2, 2]), os.replace

    def full(source, target):
        if str(target).endswith(".npy"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(index.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        open_tars(pattern, tmp_path)
    monkeypatch.setattr(index.os, "replace", replace)
    monkeypatch.setattr(webdataset, "scan", None)  # the index of all tars was kept
    assert len(open_tars(pattern, tmp_path)) == 6


def test_sources_reach_worker_processes_small(tmp_path):
    source = open_tars(write_tars(tmp_path, [4]), tmp_path)
    packed = pickle.dumps(source)
    assert len(packed) < 1000 and pickle.loads(packed)[3]["captions"] == ("picture 3",)


@pytest.mark.parametrize(
    "tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_tars_of_every_format(tmp_path, tar_format):
    long = "a" * 90 + "/" + "b" * 90
    longer = "ä" * 150 if tar_format != tarfile.USTAR_FORMAT else "c"
    samples = {"short": sample(0), long: sample(1), longer: sample(2)}
    write_tar(tmp_path / "x.tar", samples, format=tar_format)
    with tarfile.open(tmp_path / "x.tar") as expected:
        assert [n for n, _ in names(tmp_path / "x.tar")] == expected.getnames()
    source = open_tars(tmp_path / "x.tar", tmp_path)
    assert [source[i]["captions"] for i in range(3)] == [(f"picture {i}",) for i in range(3)]
    assert [source.key(i).partition("x.tar:")[2] for i in range(3)] == list(samples)


def test_what_is_no_sample_is_passed_over(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as out:
        add(out, "folder", type=tarfile.DIRTYPE)
        add(out, "folder/1.jpg", jpeg(1))
        add(out, "folder/._1.jpg", b"what macOS adds")
        add(out, "folder/1.txt", b"one")
        add(out, "link.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(out, "hard.jpg", type=tarfile.LNKTYPE, linkname="../../etc/passwd")
        add(out, "device.jpg", type=tarfile.CHRTYPE, devmajor=1, devminor=5)
        add(out, "README", b"no extension")
        add(out, "folder/2.JPG", jpeg(2))
        add(out, "folder/2.txt", b"two")
    source = open_tars(tmp_path / "x.tar", tmp_path)
    assert [source[i]["captions"] for i in range(len(source))] == [("one",), ("two",)]


def test_samples_of_one_name_stay_apart(tmp_path):
    """In joined tars: as one sample, the last would hide the first or pair with its caption."""
    with tarfile.open(tmp_path / "x.tar", "w") as out:
        for number in range(2):
            add(out, "0.jpg", jpeg(number))
            add(out, "0.txt", b"number %d" % number)
        add(out, "0.jpg", jpeg(2))
    source = open_tars(tmp_path / "x.tar", tmp_path)
    assert [source[i]["captions"] for i in range(2)] == [("number 0",), ("number 1",)]
    with pytest.raises(ValueError, match="no txt file, only jpg"):
        source.record(2)
    with tarfile.open(tmp_path / "x.tar", "w") as out:  # while the source is open
        add(out, "0.txt", b"another")
        add(out, "1.jpg", jpeg(0))
    with pytest.raises(ValueError, match="files of 0 and 1: the tar has changed"):
        source.record(0)


def test_an_archive_after_the_end_is_damage(tmp_path):
    """Tars that `cat` joined: Python's tarfile and tar read only the first."""
    write_tars(tmp_path, [2, 1])
    first, second = (tmp_path / f"0000{n}.tar" for n in range(2))
    (tmp_path / "x.tar").write_bytes(first.read_bytes() + second.read_bytes())
    source = open_tars(tmp_path / "x.tar", tmp_path)
    assert len(source) == 2 and source.damaged_share > 0.3
    assert f"broken tar at byte {first.stat().st_size}: another archive" in source.damage[0][1]
    with pytest.raises(data.BadData, match="join tars with tar -A, not cat"):
        data.loader(source, batch_size=1)
    (tmp_path / "y.tar").write_bytes(first.read_bytes() + b"written to the rest of a tape" * 99)
    assert open_tars(tmp_path / "y.tar", tmp_path).damage == ()


def test_names_lead_nowhere(tmp_path):
    """A member's name is only a label: no file with that path is read or written."""
    home = tmp_path / "home"
    home.mkdir()
    with tarfile.open(tmp_path / "x.tar", "w") as out:
        for name in ("../../evil", "/etc/evil", "home/\x1b[31mevil\n", "~/evil", "a/../../evil"):
            add(out, f"{name}.jpg", jpeg(1))
            add(out, f"{name}.txt", b"evil")
    before = set(tmp_path.rglob("*"))
    source = open_tars(tmp_path / "x.tar", tmp_path)
    assert [source[i]["captions"] for i in range(5)] == [("evil",)] * 5
    written = set(tmp_path.rglob("*")) - before
    assert written and all(tmp_path / "data" in (path, *path.parents) for path in written)


@pytest.mark.parametrize("cut", [1, 511, 700, 5000])
def test_a_truncated_tar_gives_what_is_whole(tmp_path, cut):
    pattern = write_tars(tmp_path, [4, 4])
    path = tmp_path / "00001.tar"
    size = path.stat().st_size
    os.truncate(path, cut)
    source = open_tars(pattern, tmp_path)
    ((damaged, reason),) = source.damage
    assert damaged == str(path) and "broken tar at byte" in reason
    assert 0 < source.damaged_share <= cut / size
    assert 4 <= len(source) <= 8
    for i in range(len(source) - 1):  # the last sample may lack a file
        assert source[i]["captions"] == (f"picture {i}",)


def test_a_tar_without_its_end_mark_is_whole(tmp_path):
    path = tmp_path / "00000.tar"
    pattern = write_tars(tmp_path, [4])
    os.truncate(path, len(path.read_bytes().rstrip(b"\0")))
    source = open_tars(pattern, tmp_path)
    assert source.damage == () and source[3]["captions"] == ("picture 3",)


def test_any_bytes_for_a_tar_end(tmp_path):
    """Reading a damaged tar yields members or raises BrokenTar; it never reads outside the file."""
    write_tar(tmp_path / "x.tar", {f"{n}": sample(n) for n in range(2)}, format=tarfile.PAX_FORMAT)
    good, rng, errors = (tmp_path / "x.tar").read_bytes(), np.random.default_rng(0), []
    for _ in range(300):
        content = bytearray(good)
        for at in rng.integers(0, len(content), rng.integers(1, 40)):
            content[at] = rng.integers(256)
        header = int(rng.integers(0, 3)) * 512
        if rng.integers(2):  # a random size with a valid checksum
            content[header + 124 : header + 136] = rng.bytes(12)
            content[header + 148 : header + 156] = b" " * 8
            content[header + 148 : header + 155] = b"%06o\0" % sum(content[header : header + 512])
        content = bytes(content[: rng.integers(1, len(content))])

        def read(start, stop, content=content):
            assert 0 <= start <= stop <= len(content)
            return content[start:stop]

        errors.append(error_of(content, read))
    found = [error for error in errors if error]
    assert 100 < len(found) < 300 and not any("\n" in str(error) for error in found)


def error_of(content, read):
    """Reads all members; returns the BrokenTar that is raised, or None."""
    try:
        for member in tar.members(read, len(content)):
            assert member.start + member.size <= len(content)
    except tar.BrokenTar as error:
        return error if 0 <= error.offset < len(content) else pytest.fail(f"{error.offset}")


@pytest.mark.parametrize(
    "files_of_sample, keys, wanted",
    [
        ({"png": encoded(photograph(0), "PNG"), "txt": b" two words \n"}, {}, "two words"),
        ({"webp": encoded(photograph(0), "WEBP"), "json": b'{"re": "x"}'}, {"text_key": "json/re"}, "x"),
        ({"jpg": b"no", "seg.png": jpeg(0), "cap": b"y"},
         {"image_key": "seg.png", "text_key": "txt;cap"}, "y"),
    ],
)  # fmt: skip
def test_keys_choose_image_and_caption(tmp_path, files_of_sample, keys, wanted):
    write_tar(tmp_path / "x.tar", {"a/0.5": {}, "a/0": files_of_sample})
    source = open_tars(tmp_path / "x.tar", tmp_path, **keys)
    assert source[0]["captions"] == (wanted,) and source[0]["image"].shape == (40, 48, 3)


def test_tars_behind_an_address(tmp_path):
    import fsspec

    write_tars(tmp_path, [3, 2])
    fs = fsspec.filesystem("memory")
    for name in ("00000.tar", "00001.tar"):
        fs.pipe_file(f"/bucket/{name}", (tmp_path / name).read_bytes())
    by_glob = open_tars("memory://bucket/*.tar", tmp_path)
    assert len(by_glob) == len(open_tars("memory://bucket/{00000..00001}.tar", tmp_path)) == 5
    assert by_glob[4]["captions"] == ("picture 4",)
    fs.pipe_file("/bucket/00001.tar", (tmp_path / "00000.tar").read_bytes())
    assert len(open_tars("memory://bucket/*.tar", tmp_path)) == 6  # a new file makes a new index
    fs.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("{tmp}/none*.tar", "no file matches .*none"),
        ("{tmp}/00000.tar{,}", "names .*00000.tar' twice"),
        ("{tmp}/{00000..00003}.tar", "cannot open .*00001.tar: it does not exist"),
        ("{tmp}", "cannot open .*: Is a directory: name the files in it"),
        ("{tmp}/fol*", "cannot open .*/folder.tar: Is a directory: name the files in it"),
        ("{tmp}/00000.tar.gz", "00000.tar.gz is compressed.*: unpack it with gunzip"),
        ("{tmp}/00000.tar.bz2", "00000.tar.bz2 is compressed.*: unpack it with bunzip2"),
        ("{tmp}/empty.tar", "the tars .*empty.tar' have no samples"),
        ("{tmp}/noise.tar", "noise.tar' have no samples: .*broken tar at byte 0: not a tar header"),
    ],
)
def test_webdataset_refuses(tmp_path, pattern, message):
    write_tars(tmp_path, [1])
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    (tmp_path / "folder.tar").mkdir()
    (tmp_path / "00000.tar.gz").write_bytes(gzip.compress((tmp_path / "00000.tar").read_bytes()))
    (tmp_path / "00000.tar.bz2").write_bytes(b"BZh91AY")
    (tmp_path / "noise.tar").write_bytes(b"noise" * 1000)
    with pytest.raises(ValueError, match=message) as caught:
        open_tars(pattern.replace("{tmp}", str(tmp_path)), tmp_path)
    assert "\n" not in str(caught.value)


# Tables


def write_images(tmp_path, count):
    (tmp_path / "images").mkdir()
    for n in range(count):
        (tmp_path / "images" / f"{n}.jpg").write_bytes(jpeg(n))


def open_table(path, tmp_path, **options):
    return data.source("table", str(path), data_dir=str(tmp_path / "data"), **options)


CSV = '''image,caption\r\nimages/0.jpg,"a ""quoted"" one"\r\n{tmp}/images/1.jpg,"two
lines, a comma\x85"\n\nimages/2.jpg,"größer"'''


def test_rows_of_a_csv(tmp_path):
    write_images(tmp_path, 3)
    (tmp_path / "t.csv").write_text("\ufeff" + CSV.replace("{tmp}", str(tmp_path)), newline="")
    table = open_table(tmp_path / "t.csv", tmp_path)
    captions = ('a "quoted" one', "two\nlines, a comma", "größer")
    assert [table[i]["captions"] for i in range(len(table))] == [(c,) for c in captions]
    assert pickle.loads(pickle.dumps(table)).captions(2) == ("größer",)
    np.testing.assert_array_equal(table[1]["image"], Image.open(io.BytesIO(jpeg(1))))
    assert table.key(0) == "images/0.jpg"


def test_a_table_that_is_replaced_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, caption in enumerate(("a fox", "an owl")):
        (tmp_path / "new.csv").write_text(f"image,caption\n{number}.jpg,{caption}\n")
        (tmp_path / "new.csv").replace("pairs.csv")
        assert data.source("table", "pairs.csv", data_dir="data").captions(0) == (caption,)


def test_a_table_that_is_edited_while_it_is_read_gives_no_part_of_a_row(tmp_path):
    path = tmp_path / "pairs.csv"
    rows = [f"{i}.jpg,a drawing of a fox" for i in range(9)]
    path.write_text("\n".join(["image,caption", *rows]))
    table = open_table(path, tmp_path)
    path.write_text("\n".join(["image,caption", *rows[:2], f"{rows[2]} in snow", *rows[3:], "x,y"]))
    assert table.captions(1) == ("a drawing of a fox",)
    for i in range(2, 9):
        with pytest.raises(ValueError, match="the table has changed since its rows were found"):
            table.captions(i)


def test_rows_of_tsv_and_jsonl(tmp_path):
    write_images(tmp_path, 2)
    (tmp_path / "t.tsv").write_text("title\tpath\nzero, 0\timages/0.jpg\none\timages/1.jpg\n")
    tsv = open_table(tmp_path / "t.tsv", tmp_path, image_key="path", text_key="title")
    assert tsv.captions(0) == ("zero, 0",) and len(tsv) == 2
    rows = [{"image": f"images/{n}.jpg", "caption": [f"{n}", "", "again"]} for n in range(2)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    jsonl = open_table(tmp_path / "t.jsonl", tmp_path)
    assert len(jsonl) == 2 and jsonl[1]["captions"] == ("1", "again")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("t.xls", "", "a table must end in .csv, .tsv, .jsonl, got .*t.xls"),
        ("t.csv", "image;caption\n", "no column 'image'; it has image;caption"),
        ("t.csv", "image,caf\xe9".encode("latin-1"), "t.csv' has unreadable .* UTF-8, .*: save"),
        ("t.csv", "image,caption".encode("utf-16-le"), "t.csv' has unreadable .* without its mark"),
        ("t.csv", "\x1b[2J,b\n", r"no column 'image'; it has \?\[2J, b: rename one"),
        ("t.csv", "image,caption\n", "the table .* has no rows"),
        ("t.csv", "image,caption,caption\na,b,c\n", "the table .* has several columns 'caption'"),
        ("t.csv", "", "the table .* is empty: its first row names"),
        (
            "t.csv",
            "image,caption\ra,b\r",
            "t.csv' has unreadable .*: its lines end in CR alone: save it with LF or CRLF",
        ),
        ("t.jsonl", "", "the table .* has no rows"),
        (".csv", None, "cannot open .*csv: Is a directory: name the files in it"),
        ("none/t.csv", None, "cannot open .*none/t.csv: it does not exist"),
    ],
)
def test_table_refuses(tmp_path, name, content, message):
    (tmp_path / ".csv").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        open_table(tmp_path / name, tmp_path)


def test_addresses_in_a_table_need_their_package(tmp_path, monkeypatch):
    """requests and aiohttp are in no extra of swjax."""
    from fsspec.registry import known_implementations

    for address, told, message in (
        ("absent://bucket/0.jpg", "Install nothing to read it", "Install nothing to read it"),
        (
            "https://example.com/0.jpg",
            "it requires aiohttp",
            "it requires aiohttp: pip install requests aiohttp$",
        ),
    ):
        absent = {"class": "no_such_package.Files", "err": told}
        monkeypatch.setitem(known_implementations, address.partition(":")[0], absent)
        (tmp_path / "t.csv").write_text(f"image,caption\n{address},a\n")
        with pytest.raises(ModuleNotFoundError, match=f"{address}: {message}") as caught:
            open_table(tmp_path / "t.csv", tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "t.csv").write_text("image,caption\nother://bucket/0.jpg,a\n")
    with pytest.raises(ValueError, match="cannot read other://bucket/0.jpg: Protocol not known"):
        open_table(tmp_path / "t.csv", tmp_path)


@pytest.mark.parametrize("second", ["images/1.jpg,b", 'images/1.jpg,"b"'])
def test_a_quote_that_is_not_closed_is_no_caption(tmp_path, second):
    """The next row would become a part of the caption."""
    (tmp_path / "t.csv").write_text(f'image,caption\nimages/0.jpg,"a\n{second}\n')
    table = open_table(tmp_path / "t.csv", tmp_path)
    with pytest.raises(ValueError, match="^wrong quotes, .*: close them, and double those in"):
        table.captions(0)


def test_quotes_that_end_within_a_cell_are_read(tmp_path):
    (tmp_path / "t.csv").write_text('image,caption\nimages/0.jpg,"hello" he said\nimages/1.jpg,b\n')
    table = open_table(tmp_path / "t.csv", tmp_path)
    assert [table.captions(row) for row in range(2)] == [("hello he said",), ("b",)]


@pytest.mark.parametrize(
    "odd", ['7.jpg,"a fox', '"7.jpg","a fox', '7.jpg,"a "fox', '7.jpg,a fox,"', '"7.jpg,a fox']
)
@pytest.mark.parametrize("others", ["{}.jpg,picture {}", '{}.jpg,"picture {}"', '"{}.jpg","a, {}"'])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_stray_quote_spoils_its_row_alone(tmp_path, odd, others, ending):
    rows = [others.format(n, n) for n in range(200)]
    text = "\n".join(["image,caption", *rows[:7], odd, *rows[8:], '200.jpg,"two\nlines"'])
    if ending == "tsv":
        text = text.replace(",", "\t")
    (tmp_path / f"t.{ending}").write_text(text)
    table = open_table(tmp_path / f"t.{ending}", tmp_path)
    assert len(table) == 201 and table.captions(200) == ("two\nlines",)
    assert table.key(6) == "6.jpg" and table.key(8) == "8.jpg"
    if odd != '7.jpg,"a "fox':
        with pytest.raises(ValueError, match="close them|cells for 2 columns"):
            table.captions(7)


def test_cells_of_many_lines_end_and_long_lines_are_cut(tmp_path, monkeypatch):
    """A row has at most 64 lines, and 16 MiB."""
    for lines, rows in ((63, 2), (65, 66)):
        cell = "\n".join(["x"] * lines)
        (tmp_path / "t.csv").write_text(f'image,caption\na.jpg,"{cell}"\nb.jpg,b\n')
        table = open_table(tmp_path / "t.csv", tmp_path)
        assert len(table) == rows and table.captions(rows - 1) == ("b",)
    monkeypatch.setattr(table_module, "_LONGEST_ROW", 100)
    monkeypatch.setattr(table_module, "_STEP", 50)
    (tmp_path / "t.jsonl").write_text("x" * 1000 + '\n{"image": "b.jpg", "caption": "b"}\n')
    found = open_table(tmp_path / "t.jsonl", tmp_path)
    assert 1 < len(found) < 20 and found.captions(len(found) - 1) == ("b",)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_tables_in_utf_16(tmp_path, encoding, ending):
    """As Excel and PowerShell write them; U+0A0A has the byte of a line end twice."""
    captions = ["größer\u0a0aĀ", 'a "red"\nfox', "owl"]
    if ending == "jsonl":
        rows = [json.dumps({"image": f"{n}.jpg", "caption": c}) for n, c in enumerate(captions)]
    else:
        cells = ['"' + caption.replace('"', '""') + '"' for caption in captions]
        rows = ["image,caption", *(f"{n}.jpg,{cell}" for n, cell in enumerate(cells))]
    text = "\r\n".join(rows)
    text = text.replace(",", "\t") if ending == "tsv" else text
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / f"t.{ending}").write_bytes((mark + text).encode(encoding))
    table = open_table(tmp_path / f"t.{ending}", tmp_path)
    assert [table.captions(n) for n in range(len(table))] == [(c,) for c in captions]
    assert [table.key(n) for n in range(3)] == ["0.jpg", "1.jpg", "2.jpg"]


@pytest.mark.parametrize(
    "name, text",
    [
        ("t.csv", "filepath\ttitle\n{}\ta fox, red\n"),  # the default of open_clip
        ("t.csv", "filepath,title\n{},a fox\n"),
        ("t.csv", 'Image, Caption\n{}, "a fox, red"\n'),
        ("t.tsv", "width\tIMAGE\tText\n1\t{}\ta fox\n"),
        ("t.csv", "file_name,text\n{},a fox\n"),
        ("metadata.jsonl", '{{"file_name": "{}", "text": "a fox"}}\n'),
        ("t.jsonl", '{{"Image": "{}", "Caption": "a fox"}}\n'),
    ],
)
@pytest.mark.parametrize("path", ["images/0.jpg", "images\\0.jpg"])
def test_columns_of_other_programs(tmp_path, name, text, path):
    write_images(tmp_path, 1)
    path = path.replace("\\", "\\\\") if name.endswith("jsonl") else path
    (tmp_path / name).write_text(text.format(path))
    table = open_table(tmp_path / name, tmp_path)
    assert table[0]["captions"][0].startswith("a fox") and table[0]["image"].shape == (40, 48, 3)


def test_null_among_captions_is_an_empty_one(tmp_path):
    rows = [{"image": "0.jpg", "caption": c} for c in (["a", None, "b"], None, [None], [None, 1])]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = open_table(tmp_path / "t.jsonl", tmp_path)
    assert table.captions(0) == ("a", "b")
    for row, message in ((1, "caption is empty"), (2, "caption is empty"), (3, "text, not int")):
        with pytest.raises(ValueError, match=message):
            table.captions(row)


@pytest.mark.parametrize("image_key", ["JPG", ".jpg", "png;.JPG", "Jpg"])
def test_members_are_found_in_any_case(tmp_path, image_key):
    write_tar(tmp_path / "x.tar", {"a": {"JPG": jpeg(1), "TXT": b"a", "Json": b'{"Caption": "b"}'}})
    assert open_tars(tmp_path / "x.tar", tmp_path, image_key=image_key)[0]["captions"] == ("a",)
    fields = open_tars(tmp_path / "x.tar", tmp_path, text_key=".JSON/caption")
    assert fields[0]["captions"] == ("b",)


# Hugging Face


def test_hugging_face_data_set_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets", reason='needs pip install "swjax[huggingface]"')
    rows = {"image": [{"bytes": jpeg(n), "path": None} for n in range(3)],
            "raw": [jpeg(n) for n in range(3)],
            "caption": [[f"{n}", "more"] for n in range(3)]}  # fmt: skip
    features = datasets.Features(
        image=datasets.Image(), raw=datasets.Value("binary"),
        caption=datasets.Sequence(datasets.Value("string")),
    )  # fmt: skip
    split = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": split}).save_to_disk(tmp_path / "set")
    for image_key in ("image", "raw"):
        source = data.source("huggingface", str(tmp_path / "set" / "train"), image_key=image_key)
        source = pickle.loads(pickle.dumps(source))
        assert len(source) == 3 and source[2]["captions"] == ("2", "more")
        np.testing.assert_array_equal(source[1]["image"], Image.open(io.BytesIO(jpeg(1))))
    with pytest.raises(ValueError, match="has no column 'text'; it has image, raw, caption"):
        data.source("huggingface", str(tmp_path / "set" / "train"), text_key="text")
    with pytest.raises(ValueError, match="contains no Hugging Face data set"):
        data.source("huggingface", str(tmp_path / "set"))


def test_the_format_of_a_hugging_face_data_set_does_not_matter(tmp_path):
    datasets = pytest.importorskip("datasets", reason='needs pip install "swjax[huggingface]"')
    rows = {"image": [jpeg(0)], "caption": [["a", "b"]]}
    split = datasets.Dataset.from_dict(rows)
    formats = {
        "numpy": {"type": "numpy"},
        "arrow": {"type": "arrow"},
        "one": {"columns": ["image"]},
    }
    for name, options in formats.items():
        split.with_format(**options).save_to_disk(tmp_path / name)
        assert data.source("huggingface", str(tmp_path / name))[0]["captions"] == ("a", "b")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Hugging Face's cache with own/pictures, as `hf download` leaves it: Parquet files, and no network."""
    datasets = pytest.importorskip("datasets", reason='needs pip install "swjax[huggingface]"')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:1")
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "hub" / "datasets--own--pictures"
    snapshot = home / "snapshots" / "0123abc"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abc")
    for split, count in (("train", 4), ("test", 2)):
        rows = {"image": [{"bytes": jpeg(n), "path": None} for n in range(count)],
                "text": [f"{split} {n}" for n in range(count)]}  # fmt: skip
        features = datasets.Features(image=datasets.Image(), text=datasets.Value("string"))
        made = datasets.Dataset.from_dict(rows, features=features)
        for shard in range(2):
            path = snapshot / "data" / f"{split}-{shard:05d}-of-00002.parquet"
            made.shard(2, shard).to_parquet(path)
    return snapshot


def test_hugging_face_data_set_by_name(hub_cache):
    source = data.source("huggingface", "own/pictures/train")
    source = pickle.loads(pickle.dumps(source))
    assert [source[n]["captions"] for n in range(len(source))] == [
        (f"train {n}",) for n in range(4)
    ]
    np.testing.assert_array_equal(source[1]["image"], Image.open(io.BytesIO(jpeg(1))))
    part = data.source("huggingface", "own/pictures@0123abc/default/train[50%:]")
    assert len(part) == 2 and part[0]["captions"] == ("train 2",)
    assert data.fingerprint(source) != data.fingerprint(part)
    with pytest.raises(ValueError, match=r'Unknown split "val". Should be one of'):
        data.source("huggingface", "own/pictures/val")
    (hub_cache / "data" / "train-00001-of-00002.parquet").unlink()  # half-downloaded
    with pytest.raises(ValueError, match="cache holds 1 .* 2 files data/train-.* of own/pictures"):
        data.source("huggingface", "own/pictures/train")


def test_a_hugging_face_data_set_that_is_absent_is_one_line(hub_cache, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits and tries again"))
    for revision, flag in (("", ""), ("@v2", " --revision v2")):
        with pytest.raises(ValueError, match="own/others is not in the cache") as error:
            data.source("huggingface", f"own/others{revision}/train")
        assert "\n" not in str(error.value)
        command = f"run `hf download own/others --repo-type dataset{flag}`, and copy"
        assert command in str(error.value)
    with pytest.raises(ValueError, match="'hub/pictures/train' contains no Hugging Face data set"):
        data.source("huggingface", "hub/pictures/train")  # a mistyped path: there is a folder hub


# Mixtures


def test_a_mixture_counts_its_parts_through(tmp_path):
    tars = open_tars(write_tars(tmp_path, [3]), tmp_path)
    more = open_tars(write_tars(tmp_path / "more", [2]), tmp_path)
    mixture = data.Mixture({"few": (more, 1.0), "many": (tars, 2.0)})
    assert len(mixture) == 5
    assert [mixture[i]["captions"][0] for i in range(5)] == [
        f"picture {n}" for n in (0, 1, 0, 1, 2)
    ]
    assert [mixture[i]["label"] for i in range(5)] == list(range(5))
    assert mixture.captions(4) == ("picture 2",)
    assert mixture.key(4) == f"many: {tmp_path}/00000.tar:000000002"
    np.testing.assert_array_equal(mixture[3]["image"], tars[1]["image"])


def test_labels_of_a_mixture_do_not_overlap(tmp_path):
    """Equal labels would match an image of one part with captions of another in the loss."""
    for name in ("fox", "owl", "toad"):
        (tmp_path / "pets" / name).mkdir(parents=True)
    (tmp_path / "pets" / "toad" / "0.jpg").write_bytes(jpeg(0))
    pets = data.source("labelled", f"folders:{tmp_path}/pets")  # one image, of label 2
    tars = open_tars(write_tars(tmp_path / "tars", [3]), tmp_path)
    mixture = data.Mixture({"pets": (pets, 1.0), "tars": (tars, 1.0)})
    labels = [mixture[i]["label"] for i in range(len(mixture))]
    assert labels == [2, 3, 4, 5]
    assert [mixture.captions(label) for label in labels] == [
        mixture[i]["captions"] for i in range(4)
    ]


def test_sources_and_loaders_refuse_what_is_none(tmp_path):
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    (tmp_path / "own.csv").write_text("image,caption\n0.jpg,mine\n")
    table = data.source("table", tmp_path / "own.csv", data_dir=str(tmp_path))
    with pytest.raises(TypeError, match=r"the split must be one text or path, got \['own.csv'\]"):
        data.source("table", ["own.csv"], data_dir=str(tmp_path))
    with pytest.raises(TypeError, match="loader needs a source, got 'own.csv': open it with swjax"):
        data.loader("own.csv", batch_size=1)
    with pytest.raises(ValueError, match=r"position must come from position\(\) .* got 3"):
        data.loader(table, batch_size=1, position=3)


def test_mixture_refuses(tmp_path):
    tars = open_tars(write_tars(tmp_path, [3]), tmp_path)
    patterns = data.source("synthetic", "train", image_size=8)
    for parts, message in (
        ({}, "needs at least one source"),
        (
            {"a": patterns},
            r"part 'a' of a mixture must be \(source, weight\), got <.*: add a weight",
        ),
        ({"a": (patterns,)}, r"part 'a' of a mixture must be \(source, weight\)"),
        ({"a": (tars, 1.0), "b": (tars, 0.0)}, "weight of 'b' is 0.0; weights must be positive"),
        ({"a": (tars, float("inf"))}, "weight of 'a' is inf; weights must be positive and finite"),
        ({"a": (tars, None)}, "weight of 'a' is None; weights must be positive and finite"),
        (
            {"a": (tars, 1.0), "b": (patterns, 1.0)},
            "same kind of images, got a: photographs, b: images of 3",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            data.Mixture(parts)


# Files


def test_short_files_and_large_ones_are_errors(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert files.read(f"{tmp_path}/x", 1, 5) == b"2345"
    with pytest.raises(OSError, match="The file ends before byte 6.*x"):
        files.read(f"{tmp_path}/x", 0, 6)
    with pytest.raises(OSError, match="larger than 4 bytes"):
        files.read_whole(f"{tmp_path}/x", 4)


def test_few_files_are_open_at_once(tmp_path):
    for n in range(300):
        (tmp_path / str(n)).write_bytes(b"x")
        files.read(f"{tmp_path}/{n}", 0, 1)
    assert len(os.listdir("/proc/self/fd")) < 290 if os.path.exists("/proc/self/fd") else True


def test_a_compressed_index_is_refused_and_links_are_not_written_through(tmp_path):
    """4 kB of a compressed .npz would inflate to 4 MB, 4 MB to 4 GB."""
    pattern = write_tars(tmp_path, [2])
    folder = tmp_path / "data" / "index"
    folder.mkdir(parents=True)
    (tmp_path / "victim").write_text("kept")
    (folder / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Is a link, which is not followed when writing"):
        open_tars(pattern, tmp_path)
    assert (tmp_path / "victim").read_text() == "kept"
    (folder / ".lock").unlink()
    open_tars(pattern, tmp_path)
    (part,) = folder.glob("files/*.npz")
    np.savez_compressed(part, bounds=np.zeros(2**19, np.int64), trouble="")
    next(folder.glob("*.json")).unlink()
    with pytest.raises(ValueError, match=r"positions .*npz are .* remove .* \(it is compress"):
        open_tars(pattern, tmp_path)


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_what_pythons_csv_writes_is_read_back(tmp_path, ending):
    rng = np.random.default_rng(0)
    parts = np.array(["fox", ",", "\t", '"', "\n", "\r\n", " ", "é", '""', "'"])
    rows = [("".join(rng.choice(parts, rng.integers(1, 6))) + "x", f"{n}.jpg") for n in range(500)]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        with open(tmp_path / f"t.{ending}", "w", newline="") as file:
            writer = csv.writer(file, "excel" if ending == "csv" else "excel-tab", quoting=quoting)
            writer.writerows([("caption", "image"), *rows])
        table = open_table(tmp_path / f"t.{ending}", tmp_path)
        assert [(table.captions(n)[0], table.key(n)) for n in range(len(table))] == [
            (caption.strip(), image) for caption, image in rows
        ]
