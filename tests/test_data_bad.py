"""Unreadable examples: counted, logged by name, skipped or fatal, and the same after a resumption."""

import io
import logging
import os
import re

import numpy as np
import pytest
from micro_run import MICRO
from photographs import encoded, jpeg, photograph, sample, write_tar, write_tars
from PIL import Image

from swjax import data
from swjax.data import decoding, files
from swjax.data.skipping import Skips
from swjax.training import config as config_lib
from swjax.training import inputs, loop

SIZES = {"context_length": 8, "image_size": 16}
BOMB = encoded(Image.new("L", (9000, 9000)), "PNG")
WRONG = {
    "truncated": ({"jpg": jpeg(3)[:-200]}, "OSError: image file is truncated"),
    "half a PNG": ({"jpg": encoded(photograph(3), "PNG")[:900]}, "OSError|SyntaxError"),
    "no image": ({"jpg": b"<html>404</html>"}, "not an image: 16 bytes that start with b'<html>40'"),
    "nothing": ({"jpg": b""}, "not an image: 0 bytes"),
    "PostScript": ({"jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, "not an image"),
    "bomb": ({"jpg": BOMB}, "the image has 9000 x 9000 pixels; at most"),
    "no caption": ({"txt": b" \n"}, "the caption is empty"),
    "Latin-1": ({"txt": "caf\xe9".encode("latin-1")}, "the caption is not UTF-8: unexpected end"),
    "book": ({"txt": b"word " * 20_000}, "a caption is longer than the limit of 65536 bytes"),
}  # fmt: skip


def open_tars(pattern, tmp_path, **options):
    return data.source("webdataset", str(pattern), data_dir=str(tmp_path / "data"), **options)


def take(source, batches, **options):
    loader = data.loader(source, **SIZES | {"batch_size": 4, "seed": 0} | options)
    taken = [next(loader) for _ in range(batches)]
    return taken, loader


def until_the_end(loader):
    """Reads batches until BadData; returns the indices of the examples, and the error's message."""
    taken = []
    try:
        while len(taken) < 1000:
            taken.append(next(loader))
    except data.BadData as error:
        return indices(taken) if taken else [], str(error)
    pytest.fail("the loader did not stop")


def indices(batches):
    return np.concatenate([batch["index"] for batch in batches]).tolist()


@pytest.mark.parametrize("kind", WRONG)
def test_each_is_named_with_its_reason(kind, tmp_path, caplog):
    wrong, reason = WRONG[kind]
    pattern = write_tars(tmp_path, [6], lambda n, good: good | (wrong if n == 3 else {}))
    taken, loader = take(open_tars(pattern, tmp_path), 5)
    seen = indices(taken)
    assert 3 not in seen and np.bincount(seen).max() - 1 <= np.delete(np.bincount(seen), 3).min()
    assert loader.progress.skipped >= 3 and "error" not in taken[0]
    messages = {record.message.partition(" (")[0] for record in caplog.records}
    assert len(messages) == 1
    assert re.match(rf"skipped {tmp_path}/00000.tar:000000003: ({reason})", messages.pop())


def test_samples_without_image_or_caption(tmp_path, caplog):
    write_tar(tmp_path / "x.tar", {
        "a": sample(0), "b": {"txt": b"alone"}, "c": {"jpg": jpeg(1), "json": b"{}"}, "d": sample(1),
    })  # fmt: skip
    taken, _ = take(open_tars(tmp_path / "x.tar", tmp_path), 2, batch_size=2)
    assert sorted(indices(taken)) == [0, 0, 3, 3]
    text = caplog.text
    assert (
        "x.tar:b: no jpg/jpeg/png/webp file, only txt" in text
        and "x.tar:c: no txt file, only jpg, json" in text
    )


def test_the_last_sample_of_a_truncated_tar(tmp_path, caplog):
    """If a tar ends within a caption, that sample is logged as bad and all others are used."""
    path = tmp_path / "00000.tar"
    pattern = write_tars(tmp_path, [60])
    content = path.read_bytes()
    os.truncate(path, content.index(b"picture 59") + 3)
    taken, loader = take(open_tars(pattern, tmp_path), 15, max_bad_share=0.05)
    assert set(indices(taken)) <= set(range(59))
    assert "broken tar at byte" in caplog.text and "the part before it is used" in caplog.text
    loader.close()
    with pytest.raises(data.BadData, match=r"1 damaged files, 0.\d\d% of the bytes, more than may"):
        take(open_tars(pattern, tmp_path), 1, max_bad_share=0.001)


def test_what_odd_rows_hold(tmp_path, caplog):
    (tmp_path / "good.jpg").write_bytes(jpeg(0))
    rows = [
        b"good.jpg,fine",
        b"good.jpg,caf\xe9",
        b"good.jpg",
        b"gone.jpg,gone",
        b",no path",
        b"good.jpg,",
    ]
    (tmp_path / "t.csv").write_bytes(b"image,caption\n" + b"\n".join(rows))
    source = data.source("table", f"{tmp_path}/t.csv", data_dir=str(tmp_path / "data"))
    taken, _ = take(source, 1, batch_size=2, max_bad_share=1.0)
    assert indices(taken) == [0, 0]
    for reason in (
        "t.csv: byte 28: the row is not UTF-8",
        "t.csv: byte 42: the row has 1 cells for 2 columns",
        "gone.jpg: FileNotFoundError: No such file or directory",
        "the row names no image",
        "good.jpg: the caption is empty",
    ):
        assert reason in caplog.text, reason
    lines = [b'{"image": "good.jpg", "caption": "fine"}', b"{", b"[]", b'{"image": "good.jpg"}',
             b'{"image": "good.jpg", "caption": 3}', b'{"image": "good.jpg", "caption": "\\ud800"}',
             b"[" * 100_000]  # fmt: skip
    (tmp_path / "t.jsonl").write_bytes(b"\n".join(lines))
    source = data.source("table", f"{tmp_path}/t.jsonl", data_dir=str(tmp_path / "data"))
    taken, loader = take(source, 1, batch_size=2, max_bad_share=1.0)
    assert indices(taken) == [0, 0] and loader.progress.skipped >= 6
    assert (
        "caption must be text, not int" in caplog.text and "surrogates not allowed" in caplog.text
    )


def test_files_that_go_missing_in_the_run(tmp_path, caplog):
    pattern = write_tars(tmp_path, [6, 6])
    source = open_tars(pattern, tmp_path)
    (tmp_path / "00001.tar").unlink()
    files._open.cache_clear()  # closes the file, which would stay readable
    taken, loader = take(source, 1, max_bad_share=0.005)
    assert set(indices(taken)) < set(range(6))
    assert re.search(rf"skipped {tmp_path}/00001.tar: byte 0.*FileNotFoundError", caplog.text)
    assert re.match(r"6 of \d+ examples cannot be read, .* 0.005 ", until_the_end(loader)[1])


def test_keys_cannot_forge_lines(tmp_path, caplog):
    write_tar(
        tmp_path / "x.tar", {"0": sample(0), "a\nskipped b\x1b[2J": {"txt": b"x", "jpg": b""}}
    )
    take(open_tars(tmp_path / "x.tar", tmp_path), 2, batch_size=2)
    assert "x.tar:a skipped b?[2J: not an image" in caplog.text
    assert not any("\n" in record.message or "\x1b" in record.message for record in caplog.records)


# Policy


def spoiled(tmp_path, count, every):
    return open_tars(
        write_tars(tmp_path, [count], lambda n, f: f | ({"jpg": b""} if n % every == 0 else {})),
        tmp_path,
    )


def test_the_first_is_the_end_if_so_asked(tmp_path):
    source = spoiled(tmp_path, 8, every=7)
    with pytest.raises(
        data.BadData, match=rf"cannot read {tmp_path}/00000.tar:00000000[07]: not an image"
    ):
        take(source, 10, on_bad="stop")


def test_too_many_are_the_end_with_their_number(tmp_path):
    source = spoiled(tmp_path, 40, every=2)
    with pytest.raises(data.BadData, match="11 of .* cannot be read, more than the share of 0.01"):
        take(source, 50)
    taken, _ = take(source, 50, max_bad_share=0.5)
    assert set(indices(taken)) == set(range(1, 40, 2))
    with pytest.raises(data.BadData, match=r"1 of \d examples"):
        take(source, 50, max_bad_share=0.0)


def test_nothing_but_bad_examples_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("swjax.data.batches.FIRST", 8)
    with pytest.raises(data.BadData, match=r"none of the last \d+ examples can be read"):
        take(spoiled(tmp_path, 4, every=1), 1, max_bad_share=1.0)


def test_a_bad_example_counts_once_however_often_it_is_read():
    """One unreadable picture of 42 ended a run in its eleventh epoch."""

    def read(epochs: int, examples: int, bad: int) -> Skips:
        skips = Skips("skip", 0.01, examples)
        for _ in range(epochs):
            skips.good(examples - bad)
            for _ in range(bad):
                skips.bad("fox.png: not an image")
        return skips

    assert read(epochs=50, examples=42, bad=10).skipped == 500
    assert read(epochs=5, examples=2000, bad=20).skipped == 100
    for examples, bad in ((42, 11), (2000, 21)):
        with pytest.raises(data.BadData, match=r"(11 of 42|20 of 1999) examples cannot be read"):
            read(1, examples, bad)


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_the_end_comes_at_the_same_place_after_a_resumption(tmp_path, cut):
    source, limit = spoiled(tmp_path, 60, every=6), {"max_bad_share": 0.008}
    _, loader = take(source, 0, **limit)
    seen, message = until_the_end(loader)
    taken, first = take(source, cut, **limit)
    _, resumed = take(source, 0, position=first.position(), **limit)
    rest, same = until_the_end(resumed)
    assert indices(taken) + rest == seen and same == message


def test_a_batch_that_fails_is_not_taken(tmp_path):
    source, limit = spoiled(tmp_path, 60, every=6), {"max_bad_share": 0.008}
    _, loader = take(source, 0, **limit)
    seen, _ = until_the_end(loader)
    assert loader.position() == take(source, len(seen) // 4, **limit)[1].position()


def test_evaluation_masks_them(tmp_path, caplog):
    source = spoiled(tmp_path, 10, every=5)
    batches = list(data.loader(source, batch_size=4, train=False, **SIZES))
    masks = np.concatenate([batch["mask"] for batch in batches])
    assert np.flatnonzero(masks).tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert "(2 of 6)" in caplog.text
    with pytest.raises(data.BadData):
        list(data.loader(source, batch_size=4, train=False, on_bad="stop", **SIZES))


def test_all_go_to_the_log_and_some_to_the_screen(tmp_path, capsys):
    source = spoiled(tmp_path, 40, every=2)
    with data.log_to(tmp_path / "skipped.log"):
        _, loader = take(source, 10, max_bad_share=1.0)
    lines = (tmp_path / "skipped.log").read_text().splitlines()
    assert len(lines) >= loader.progress.skipped >= 30
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped")]
    assert shown == [*lines[:10], lines[15], *lines[31:32]]
    assert logging.getLogger("swjax.data").handlers == []


def test_decoder_agrees_with_pillow_on_what_is_an_image():
    """For randomly damaged JPEGs, both decoders give the same pixels or both fail."""
    good, rng = jpeg(1, quality=90), np.random.default_rng(0)
    read = 0
    for _ in range(200):
        content = bytearray(good)
        for at in rng.integers(0, len(content), 2):
            content[at] = rng.integers(256)
        expected, actual = outcome(decode_with_pillow, content), outcome(decoding.decode, content)
        assert (expected is None) == (actual is None)
        if expected is not None:
            read += 1
            np.testing.assert_array_equal(actual, expected)
    assert 20 < read < 200


def decode_with_pillow(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def outcome(decode, content):
    try:
        return decode(bytes(content))
    except Exception:
        return None


# The trainer


@pytest.mark.release
def test_a_run_skips_and_says_so(tmp_path, capsys, shared_cache):
    pattern = write_tars(
        tmp_path, [20, 20], lambda n, f: f | ({"txt": b""} if n in (3, 30) else {})
    )
    settings = MICRO | {
        "data.name": "webdataset", "data.webdataset.splits.train": pattern,
        "data.dir": str(tmp_path / "data"), "train.steps": 4, "train.compilation_cache": shared_cache,
    }  # fmt: skip
    overrides = [(key, str(value)) for key, value in settings.items()]
    config = config_lib.load("configs/openmoji.py", overrides)
    source = inputs.open_source(config, "train")
    assert len(source) == 40 and inputs.open_source(config, "val") is None
    assert loop.train_and_evaluate(config, tmp_path / "run") == 0
    log = (tmp_path / "run" / "skipped.log").read_text()
    assert "000000003: the caption is empty" in log
    assert '"data/skipped": ' in (tmp_path / "run" / "metrics.jsonl").read_text()
    config.data.on_bad = "stop"
    with pytest.raises(config_lib.ConfigError, match="config.data: train: cannot read .* is empty"):
        loop.train_and_evaluate(config, tmp_path / "strict")
    capsys.readouterr()
