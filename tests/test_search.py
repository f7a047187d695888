"""`swjax search` shows the images nearest to a text, in the terminal and on a page."""

import base64
import io
import re

import numpy as np
import pytest
from clip_oracle import write_weights
from photographs import jpeg
from PIL import Image

from swjax import inference
from swjax.evaluate import search as search_lib
from swjax.evaluate.search import Folder, main, search


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "clip"
    write_weights(path)
    return str(path)


@pytest.fixture
def photos(tmp_path):
    for number in range(7):
        path = tmp_path / "photos" / f"{number % 2}" / f"<{number}>.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    (tmp_path / "photos" / "notes.txt").write_text("no picture")
    return tmp_path / "photos"


def test_the_nearest_come_first(weights, photos):
    model, pictures = inference.load(weights), Folder(str(photos))
    queries = ["a fox", "an owl"]
    found = search(model, queries, pictures, count=3)
    images = model.encode_image([pictures.image(i) for i in range(len(pictures))])
    cosines = model.encode_text(queries) @ images.T
    for row, of_query in zip(found, cosines, strict=True):
        assert [each.number for each in row] == np.argsort(-of_query)[:3].tolist()
        np.testing.assert_allclose([each.cosine for each in row], np.sort(of_query)[:-4:-1], 1e-5)
        assert all(each.name == pictures.name(each.number) for each in row)
    assert [len(row) for row in search(model, queries, pictures, count=50)] == [7, 7]


def test_a_picture_that_cannot_be_read_is_skipped(weights, photos, capsys):
    pictures = Folder(str(photos))
    model, bad = inference.load(weights), pictures.image(2)
    (before,) = search(model, ["a fox"], pictures)
    bad.write_bytes(b"text")
    (found,) = search(model, ["a fox"], pictures)
    assert [(each.number, each.name) for each in found] == [
        (each.number, each.name) for each in before if each.number != 2
    ]
    assert capsys.readouterr().err.startswith(f"swjax search: skipped {bad}: not an image")
    for path in photos.glob("*/*"):
        path.write_bytes(b"text")
    with pytest.raises(ValueError, match="no picture can be read"):
        search(model, ["a fox"], pictures)


def test_the_page_needs_no_other_file(weights, photos, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main([weights, "a <fox>", f"--pictures={photos}", f"--page={page}", "--count=2"]) == 0
    text = page.read_text()
    assert text.count('<img src="data:image/jpeg;base64,') == 2
    assert "<h2>a &lt;fox&gt;</h2>" in text and "/&lt;" in text
    assert "src=" not in text.replace('src="data:', "")
    out = capsys.readouterr().out
    assert out.startswith("a <fox>: ") and out.endswith(f"page: {page}\n")


def test_thumbnails_are_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees, as telephones store portraits
    (tmp_path / "a.jpg").write_bytes(jpeg(0, exif=exif))
    url = search_lib._thumbnail(tmp_path / "a.jpg")
    small = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert small.size == (40, 48)


def test_the_pictures_of_a_run(weights, photos, tmp_path, monkeypatch):
    """Images of a run's split are read as in training."""
    table = tmp_path / "pictures.csv"
    lines = [f"{path},picture {path.stem}" for path in sorted(photos.rglob("*.jpg"))]
    lines.append(lines[0])  # another caption of a picture: it is found once
    table.write_text("\n".join(["image,caption", *lines]))
    run = tmp_path / "run"
    run.mkdir()
    config = run_config(table, tmp_path)
    (run / "config.json").write_text(config)
    pictures = search_lib.Split(str(run), "test")
    assert len(pictures) == 8 and pictures.name(0) == f"{photos}/0/<0>.jpg"
    (row,) = search(inference.load(weights), ["picture"], pictures, count=8)
    assert sorted(each.number for each in row) == list(range(7))
    with pytest.raises(ValueError, match=r"has no split 'val': pass --split or --pictures"):
        search_lib.Split(str(run), "val")


def test_a_picture_of_a_run_that_cannot_be_read_is_skipped(weights, photos, tmp_path, capsys):
    """Pillow's error for an image of too many pixels is neither an OSError nor a ValueError."""
    table, bad = tmp_path / "pictures.csv", photos / "bad.bmp"
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "BMP")
    width = (2**29).to_bytes(4, "little")
    bad.write_bytes(file.getvalue()[:18] + width + file.getvalue()[22:])
    good = sorted(photos.rglob("*.jpg"))[0]
    table.write_text(f"image,caption\n{bad},bad\n{good},good")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(run_config(table, tmp_path))
    pictures = search_lib.Split(str(run), "test")
    (row,) = search(inference.load(weights), ["picture"], pictures)
    assert [each.name for each in row] == [str(good)]
    error = capsys.readouterr().err
    assert (
        error.startswith(f"swjax search: skipped {bad}: ") and "more than 67108864 pixels" in error
    )


def run_config(table, tmp_path) -> str:
    from swjax.training import config as config_lib

    config = config_lib.load(str(config_lib.COMMON))
    with config.unlocked():
        config.data.name, config.data.dir = "table", str(tmp_path / "data")
        config.data.table.splits.test = str(table)
    return config.to_json()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["WEIGHTS", "fox"], "is not a run with data: pass --pictures=FOLDER"),
        (["WEIGHTS", "fox", "--pictures=nowhere"], "'nowhere' is not a folder"),
        (["missing", "fox", "--pictures=nowhere"], "missing"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    arguments, message, weights, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main([weights if a == "WEIGHTS" else a for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("swjax search: ") and captured.err.count("\n") == 1
    assert message in captured.err and not list(tmp_path.glob("*.html"))


def test_an_empty_text_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["model", "a fox", ""])
    assert "a text is empty, got ['a fox', '']" in capsys.readouterr().err


def test_a_text_that_is_cut_is_said(weights, photos, tmp_path, capsys):
    longest = inference.load(weights).cfg.text.context_length - 2
    texts = ["fox " * longest, "fox " * longest + "owl"]
    assert main([weights, *texts, f"--pictures={photos}", f"--page={tmp_path}/search.html"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the first {longest + 2} tokens of a text, and not the end of" in line and "owl" in line


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    for page, reason in (("none/x.html", "folder '.*none' does not exist"), ("", "is a folder")):
        with pytest.raises(SystemExit, match="2"):
            main(["no model", "a fox", f"--page={tmp_path}/{page}"])
        assert re.search(reason, capsys.readouterr().err)
