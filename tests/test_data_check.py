"""`swjax data check` reports what training would read and skip."""

import os
from pathlib import Path

import pytest
from photographs import encoded, jpeg, photograph, write_tar, write_tars
from PIL import Image

from swjax import data
from swjax.report.data_check import check, lines, main


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes five rows: two equal images, a long caption, a file that is no image, a missing caption."""
    monkeypatch.chdir(tmp_path)
    for number in (0, 1, 2, 4):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number if number < 2 else 0))
    (tmp_path / "3.jpg").write_bytes(b"<html>")
    captions = ["fox!", "an owl " + "on a branch " * 9, "fox!", "toad", ""]
    rows = [f"{number}.jpg,{caption}" for number, caption in enumerate(captions)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption", *rows]))
    return "pairs.csv"


def test_what_is_good_and_what_is_bad(table, capsys):
    assert main(["check", table, "--context_length=8", "--page=page.html"]) == 1
    out = capsys.readouterr().out
    for wanted in (
        "examples     5; 5 read, 2 bad",
        "pixels       48 wide, 40 high",
        "JPEG RGB 3",
        "1 (33%) are truncated at context_length=8",
        "most common  'fox!', 2 times",
        "1 of 3 images have the same pixels as another image",
        "1 x not an image: 6 bytes that start with b'<html>'",
        "1 x the caption is empty\n             4.jpg",
        "all bad      page_bad.tsv",
        "page         page.html",
    ):
        assert wanted in out
    reason = "not an image: 6 bytes that start with b'<html>'"
    assert Path("page_bad.tsv").read_text() == f"3.jpg\t{reason}\n4.jpg\tthe caption is empty\n"
    page = Path("page.html").read_text()
    assert page.count('src="data:image/jpeg;base64,') == 3 and "<td>3.jpg</td>" in page
    assert "&lt;html&gt;" in page and "<html>'" not in page


def test_names_in_latin_1_are_on_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = os.fsencode(tmp_path) + b"/own/caf\xe9"
    os.makedirs(folder)
    Path(os.fsdecode(folder), "0.jpg").write_bytes(jpeg(0))
    assert main(["check", "own", "--page=page.html"]) == 0
    assert "caf\\udce9" in Path("page.html").read_text("utf-8")


def test_all_formats_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own/fox").mkdir(parents=True)
    for ending in ("bmp", "gif", "jpg", "png", "tiff", "webp"):
        Image.new("RGB", (8, 8)).save(f"own/fox/0.{ending}")
    assert main(["check", "own", "--page=page.html"]) == 0
    assert capsys.readouterr().out.split("formats")[1].split("\n")[0].count(" 1") == 6


def test_a_good_set_ends_with_0(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tars(tmp_path, [4, 3])
    assert main(["check", "{00000..00001}.tar", "--sample=3"]) == 0
    assert "examples     7; 3 read, 0 bad" in capsys.readouterr().out


def test_examples_are_spread_over_the_set(tmp_path):
    """Evenly spaced ones would all be of one class."""
    pairs = data.source("synthetic", "train", image_size=8, classes=5, examples=101)
    found = check(pairs, most=21, shown=0)
    assert len({each.captions for each in found.seen}) == 5
    assert [each.key for each in found.seen] == [each.key for each in check(pairs, most=21).seen]
    assert [len(check(pairs, most=n, shown=2).seen) for n in (0, 500)] == [101, 101]
    assert any(line.startswith("captions     1.0 per image") for line in lines(found, 77))


def test_equal_faults_of_different_files_are_one_line(tmp_path, monkeypatch, capsys):
    """The reason has neither the path nor the size; all bad examples are in the file, three on the screen."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s" / "a").mkdir(parents=True)
    for n in range(12):
        (tmp_path / "s" / "a" / f"{n:02}.jpg").write_bytes(b"<html>xx" + b"x" * n)
    for n in range(12, 20):
        (tmp_path / "s" / "a" / f"{n}.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "s" / "a" / "20.jpg").write_bytes(jpeg(0))
    assert main(["check", "s"]) == 2  # 20 are more than 1 % of 1,000
    out = capsys.readouterr().out
    for wanted in (
        "bad          12 x not an image: 8 bytes that start with b'<html>xx'\n             s/a/00.jpg\n"
        "             s/a/01.jpg\n             s/a/02.jpg\n"
        "bad          8 x FileNotFoundError: No such file or directory\n             s/a/12.jpg\n",
        "refused      20 of 21 examples are bad, more than the share of 0.01",
    ):
        assert wanted in out
    assert len(Path("data_check_bad.tsv").read_text().splitlines()) == 20
    assert main(["check", "s", "--max_bad_share=0.05"]) == 1
    for n in range(20):
        (tmp_path / "s" / "a" / f"{n:02}.jpg").unlink()
    assert main(["check", "s"]) == 0 and Path("data_check_bad.tsv").read_text() == ""


def test_what_a_sample_shows_stands_for_all(tmp_path):
    pairs = data.source("synthetic", "train", image_size=8, examples=100_000)
    found = check(pairs, most=100, shown=0)
    seen = [each._replace(reason="bad" * (n < 16)) for n, each in enumerate(found.seen)]
    assert found.refusal(0.01) == ""
    why = found._replace(seen=seen).refusal(0.03)
    assert why.startswith("about 16,000 of 100,000 examples are bad, more than the share of 0.03")
    assert (
        found._replace(seen=seen).refusal(0.05) == ""
    )  # chance may have found three times as many
    torn = found._replace(damage=(("a.tar", "torn"),), damaged_share=0.02)
    assert torn.refusal(0.01).startswith("2.00% of the bytes are in damaged files")


def test_names_do_not_reach_the_terminal_raw(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    evil = "x\x1b[2J\x1b]0;y\x07"
    for n in range(3):
        write_tar(
            tmp_path / f"{evil}.tar", {f"{evil}{n}": {"jpg": b"no", f"t{evil}": evil.encode()}}
        )
    (tmp_path / evil).mkdir()
    (tmp_path / evil / f"{evil}.jpg").write_bytes(jpeg(0))
    (tmp_path / evil / f"{evil}.{evil}").touch()
    (tmp_path / "columns.csv").write_text(f"{evil},b\n1,2\n")
    for where in (f"{evil}.tar", evil, "columns.csv", f"{evil}.csv", "."):
        main(["check", where])
        captured = capsys.readouterr()
        said = captured.out + captured.err
        assert said and all(c.isprintable() or c == "\n" for c in said), said


def test_extremes_are_true(tmp_path, monkeypatch, capsys):
    """The 5th and 95th percentile of 100 widths hide the one that breaks a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s" / "a").mkdir(parents=True)
    for n in range(100):
        image = photograph(0, width={3: 7, 70: 999}.get(n, 48))
        (tmp_path / "s" / "a" / f"{n}.png").write_bytes(encoded(image, "PNG", compress_level=0))
    assert main(["check", "s"]) == 0
    assert "pixels       7 to 999 (median 48) wide, 40 high" in capsys.readouterr().out


def test_what_is_left_out_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s" / "a").mkdir(parents=True)
    (tmp_path / "s" / "a" / "1.jpg").write_bytes(jpeg(0))
    (tmp_path / "s" / "a" / "1.jxl").touch()
    assert main(["check", "s"]) == 0
    assert "left out     1 file is not read: 1 .jxl; convert JPEG XL" in capsys.readouterr().out


def test_a_damaged_file_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tars(tmp_path, [4])
    tar = tmp_path / "00000.tar"
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    assert main(["check", "00000.tar"]) == 2  # training would refuse it, too
    out = capsys.readouterr().out
    assert "damaged      00000.tar: " in out and "% of the bytes are in damaged files" in out
    assert main(["check", "00000.tar", "--max_bad_share=0.5"]) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "is neither a folder nor tars"),
        (["missing.tar"], "cannot open missing.tar"),
        (["pairs.csv", "--option=text_key=title"], "has no column 'title'"),
        (["semicolons.csv"], "it has image;caption: separate columns by commas"),
        (
            ["names.csv"],
            "has no column 'image'; it has file, caption: rename one, or set image_key",
        ),
        (["x", "--source=nothing"], "there is no data set 'nothing'"),
    ],
)
def test_what_cannot_be_opened_is_one_line(arguments, message, table, capsys):
    Path("semicolons.csv").write_text("image;caption\na.jpg;a\n")
    Path("names.csv").write_text("file,caption\na.jpg,a\n")
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("swjax data check: ") and captured.err.count("\n") == 1
    assert message in captured.err and not captured.out


def test_nothing_good_ends_with_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"no picture")
    assert main(["check", "a"]) == 2


def test_an_option_without_a_value_is_told_so(table, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", table, "--option=text_key"])
    assert ended.value.code == 2
    assert "--option=text_key must be KEY=VALUE" in capsys.readouterr().err
