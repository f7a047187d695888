"""The emoji data set: its contents, its split, and its preparation, which is atomic."""

import collections
import hashlib
import io
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from swjax import data
from swjax.data import drawing_processes
from swjax.data.emoji import drawings, emoji_dataset_builder, rendering, source
from swjax.data.emoji.concepts import concepts, file_key

SPLITS = ("train", "val", "test")

# Prepares the sample in the folder argv[1] and prints a hash of all records.
PREPARE = """
import hashlib, sys
from swjax import data
for task in ("mixed", "strict"):
    for split in ("train", "val", "test"):
        s = data.source("emoji", split, data_dir=sys.argv[1], task=task, config="sample")
        records = [sorted((k, v) for k, v in s[i].items() if k != "image") for i in range(len(s))]
        print(hashlib.sha256(repr(records).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A directory with the prepared sample."""
    path = str(tmp_path_factory.mktemp("data"))
    sample("train", path)
    return path


@pytest.fixture(autouse=True)
def nothing_kept():
    source._read.cache_clear()


def run(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def outputs(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def sample(split, data_dir, **options):
    return data.source("emoji", split, data_dir=data_dir, config="sample", **options)


# Concepts and families


def test_concepts_are_distinct_and_have_words():
    all_concepts = concepts()
    assert len(all_concepts) == len({c.name for c in all_concepts}) == 1914
    assert len({file_key(c.code) for c in all_concepts}) == 1914
    assert all(c.name.strip() and all(c.keywords) for c in all_concepts)
    assert sum(len(c.keywords) for c in all_concepts) > 10_000


def test_the_split_is_the_same_everywhere():
    """The split is the same on every Python and machine, so that scores can be compared."""
    folds = "".join(f"{c.code} {c.split}\n" for c in concepts())
    assert hashlib.sha256(folds.encode()).hexdigest()[:16] == "91fc811f6d81c3e1"
    counts = collections.Counter(c.split for c in concepts())
    assert counts == {"train": 1347, "val": 186, "test": 381}


@pytest.mark.parametrize(
    "names",
    [
        ("judge", "man judge", "woman judge"),
        ("person walking", "man walking: facing right"),
        ("prince", "princess", "person with crown"),
        ("merman", "mermaid", "merperson"),
        ("family: man, woman, boy", "family: adult, child", "family"),
        ("kiss", "kiss: man, man"),
        ("woman: red hair", "person: red hair"),
        ("old man", "older person"),
        ("Santa Claus", "Mx Claus"),
        ("woman and man holding hands", "people holding hands"),
    ],
)
def test_siblings_are_one_family(names):
    found = [c for c in concepts() if c.name in names]
    assert len(found) == len(names)
    assert len({c.family for c in found}) == len({c.split for c in found}) == 1


def test_other_emoji_are_no_siblings():
    names = ("kiss", "kiss mark", "crown", "prince", "flag: Chad", "flag: Romania", "dog", "cat")
    assert len({c.family for c in concepts() if c.name in names}) == len(names)
    assert len({c.family for c in concepts()}) > 1600


def test_families_are_not_split():
    splits = collections.defaultdict(set)
    for concept in concepts():
        splits[concept.family].add(concept.split)
    assert all(len(of_family) == 1 for of_family in splits.values())


# Drawings

SVG = """<svg viewBox="0 0 72 72" xmlns="http://www.w3.org/2000/svg">
<g id="color-2"><rect x="10" y="20" width="20" height="40" fill="#f00"/></g>
<g id="line"><path d="M10,20 h20 v40 h-20 z" fill="none" stroke="#000" stroke-width="2"/></g>
</svg>"""


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png))).astype(int)


def test_drawings_are_trimmed_to_the_middle_of_a_square():
    image = pixels(drawings.draw(SVG, ("colour",))["colour"])
    assert image.shape == (96, 96, 4)
    rows, columns = np.nonzero(image[..., 3] > 128)
    assert rows.min() <= 3 and rows.max() >= 92
    assert abs((columns.min() + columns.max()) / 2 - 47.5) < 2
    assert 45 < columns.max() - columns.min() < 53


def test_styles_show_what_they_are_named_after():
    drawn = {
        style: pixels(png)
        for style, png in drawings.draw(SVG, ("colour", "line", "flat", "thin")).items()
    }
    red = {s: ((i[..., 0] > 200) & (i[..., 3] > 200)).sum() for s, i in drawn.items()}
    black = {s: ((i[..., 0] < 50) & (i[..., 3] > 200)).sum() for s, i in drawn.items()}
    assert red["line"] == 0 and red["flat"] > red["thin"] > red["colour"] > 1000
    assert black["flat"] == 0 and black["line"] == black["colour"] > 1.5 * black["thin"] > 0


def test_empty_drawings_are_left_out():
    only_line = SVG.replace("#f00", "none")
    assert set(drawings.draw(only_line, ("colour", "line", "flat", "thin"))) == {
        "colour",
        "line",
        "thin",
    }
    assert drawings.draw(only_line.replace("#000", "none"), ("colour", "flat")) == {}


def test_drawings_that_look_alike_are_left_out_of_reduced_styles():
    a, b = concepts()[:2]
    drawn = [
        (a, "line", b"same"),
        (b, "line", b"same"),
        (a, "flat", b"same"),
        (b, "flat", b"other"),
    ]
    drawn += [(a, "colour", b"same"), (b, "colour", b"same")]
    assert rendering._without_look_alikes(drawn) == drawn[2:]


def test_a_worker_that_dies_is_reported(monkeypatch, tmp_path):
    broken = tmp_path / "broken.svg"
    broken.write_text("<svg")
    monkeypatch.setattr(drawings, "__file__", str(tmp_path / "worker.py"))
    (tmp_path / "worker.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"process that drew .*broken.svg.* ended"):
        list(drawing_processes.answers(drawings.__file__, [(str(broken), ("colour",))] * 9))


# The prepared data set


def test_tasks_have_the_drawings_they_are_defined_by(data_dir):
    for task in ("mixed", "strict"):
        for split in SPLITS:
            records = sample(split, data_dir, task=task)
            folds = {c.name: c.split for c in concepts()}
            seen = {(r["style"] == "twemoji", folds[r["name"]]) for r in records}
            assert (
                seen
                == {
                    ("mixed", "train"): {(False, fold) for fold in SPLITS} | {(True, "train")},
                    ("strict", "train"): {(False, fold) for fold in SPLITS},
                    ("mixed", "val"): {(True, "val")},
                    ("strict", "val"): {(True, "val")},
                    ("mixed", "test"): {(True, "test")},
                    ("strict", "test"): {(True, "test"), (True, "train")},
                }[task, split]
            )


def test_no_drawing_is_in_two_splits(data_dir):
    for task in ("mixed", "strict"):
        keys = [(r["name"], r["style"]) for s in SPLITS for r in sample(s, data_dir, task=task)]
        assert len(keys) == len(set(keys))


def test_records(data_dir):
    train = sample("train", data_dir)
    assert len(train) == len([*train]) > 500
    for record in (train[0], train[len(train) - 1]):
        assert record["image"].shape == (96, 96, 4) and record["image"].dtype == np.uint8
        assert train.class_names[record["label"]] == record["name"] == record["captions"][0]
        assert record["captions"] == train.captions(record["label"])
        assert Image.open(io.BytesIO(record["png"])).size == (96, 96)
        assert len(set(record["captions"])) == len(record["captions"]) >= len(train.templates)
    with pytest.raises(IndexError):
        train[len(train)]


def test_labels_are_the_names_of_the_split(data_dir):
    for split in SPLITS:
        records = sample(split, data_dir)
        assert {r["label"] for r in records} == set(range(len(records.class_names)))
    val, test = (sample(s, data_dir).class_names for s in ("val", "test"))
    assert not set(val) & set(test)
    assert set(val + test) <= set(sample("train", data_dir).class_names)


def test_attribution_names_the_artists_and_their_licences(data_dir):
    text = sample("val", data_dir).attribution
    assert all(s in text for s in ("OpenMoji", "CC BY-SA 4.0", "Twemoji", "CC BY 4.0", "Unicode"))


@pytest.mark.parametrize("name", ["emoji", "tfds"])
def test_sources_reach_worker_processes_small(data_dir, name):
    if name == "emoji":
        records = sample("train", data_dir)
    else:
        options = {"builder": "emoji/sample", "text_key": "name"}
        records = data.source("tfds", "openmoji", data_dir=data_dir, **options)
    sent = pickle.dumps(records)
    assert len(sent) < 1000  # pickles its path, not its content
    there = pickle.loads(sent)
    assert len(there) == len(records)
    np.testing.assert_equal(there[11], records[11])


def test_any_tfds_data_set_is_a_source(data_dir):
    options = {"data_dir": data_dir, "builder": "emoji/sample"}
    pairs = data.source("tfds", "twemoji", text_key="keywords", **options)
    assert len(pairs) == 124 == 62 * 2
    assert pairs[7]["image"].shape == (96, 96, 3) and pairs[7]["label"] == 7
    keywords = {c.keywords for c in concepts()}
    assert all(
        pairs[i]["captions"] == pairs.captions(i) and pairs.captions(i) in keywords
        for i in range(9)
    )
    part = data.source("tfds", "twemoji[:10]", text_key="name", **options)
    assert len(part) == 10 and len(part.captions(3)) == 1
    batch = next(data.loader(pairs, batch_size=4, context_length=16, image_size=48))
    assert batch["image"].shape == (4, 48, 48, 3)


@pytest.mark.parametrize(
    "split, options, message",
    [
        ("train", {}, "'emoji/sample' has no split 'train'; it has openmoji, twemoji"),
        ("twemoji", {"text_key": "caption"}, "no feature 'caption'; the .* there are .*keywords"),
        ("twemoji", {"text_key": "name/text"}, "no feature 'name/text'; .* no inner features"),
        ("twemoji", {"image_key": "x", "text_key": "name"}, "no feature 'x'"),
        ("twemoji", {"builder": ""}, "builder is empty: name the TFDS data set"),
        ("twemoji", {"builder": "b:9"}, "^builder='b:9' is not a name of a TFDS data set: [^\n]*$"),
        ("twemoji", {"builder": "coco"}, "no TFDS data set 'coco' in .*download_and_prepare()"),
    ],
)
def test_tfds_source_refuses(data_dir, split, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        data.source("tfds", split, data_dir=data_dir, **({"builder": "emoji/sample"} | options))
    assert "\n" not in str(caught.value)


def test_tfds_source_needs_access_by_number(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    info = tmp_path / "emoji/sample/1.0.0/dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    options = {"data_dir": str(tmp_path), "builder": "emoji/sample", "text_key": "name"}
    with pytest.raises(ValueError, match="'emoji/sample' was prepared in the format tfrecord"):
        data.source("tfds", "twemoji", **options)


# Preparation


def test_prepared_once(data_dir, monkeypatch):
    monkeypatch.setattr(rendering, "render", None)  # a call would raise
    assert len(sample("train", data_dir)) > 500


@pytest.mark.release
def test_two_processes_prepare_at_once(data_dir, tmp_path, monkeypatch, capsys):
    processes = [run(PREPARE, tmp_path), run(PREPARE, tmp_path)]
    (first, err), (second, other_err) = map(outputs, processes)
    monkeypatch.setattr(sys, "argv", ["", data_dir])
    exec(PREPARE, {})
    assert first == second == capsys.readouterr().out  # records do not depend on the process
    lines = (err + other_err).splitlines()
    assert sum(line.startswith("preparing the data set emoji/sample (once)") for line in lines) == 1
    assert [p.name for p in (tmp_path / "emoji/sample").iterdir()] == ["1.0.0"]


@pytest.mark.release
def test_killed_preparation_leaves_nothing_half_made(tmp_path):
    hang = """
import sys
from swjax.data.emoji import rendering
def hang(drawn):
    next(drawn)
    print("half-way", file=sys.__stdout__, flush=True)
    import time; time.sleep(1000)
rendering._without_look_alikes = hang
"""
    process = run(hang + PREPARE, tmp_path)
    assert process.stdout.readline() == "half-way\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    made = tmp_path / "emoji/sample"
    assert [p.name.startswith("incomplete") for p in made.iterdir()] == [True]
    assert len(sample("val", str(tmp_path))) == len(sample("val", str(tmp_path)).class_names) > 0
    assert [p.name for p in made.iterdir()] == ["1.0.0"]


def test_failed_preparation_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(emoji_dataset_builder.Builder, "_generate_examples", fail)
    with pytest.raises(OSError, match="disk full"):
        sample("val", str(tmp_path))
    assert not [*(tmp_path / "emoji/sample").iterdir()]


@pytest.mark.release
def test_a_new_version_is_prepared_anew(data_dir, tmp_path, monkeypatch):
    sample("train", str(tmp_path))
    builder = emoji_dataset_builder.Builder
    monkeypatch.setattr(builder, "VERSION", type(builder.VERSION)("1.1.0"))
    drawn = []
    render = rendering.render
    monkeypatch.setattr(rendering, "render", lambda *a: drawn.append(a) or render(*a))
    for _ in range(2):
        source._read.cache_clear()
        assert len(sample("val", str(tmp_path))) > 0
    assert len(drawn) == 1
    assert {p.name for p in (tmp_path / "emoji/sample").iterdir()} == {"1.0.0", "1.1.0"}


def test_progress_is_one_line_when_piped_and_counts_on_a_terminal(monkeypatch, capsys):
    assert list(drawing_processes.with_progress(range(5), [1] * 5, "x")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == "preparing the data set x (once): 5 files to draw\n"
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    ticks = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    list(drawing_processes.with_progress(range(5), [1] * 5, "x"))
    shown = terminal.getvalue().split("\r")[1:]
    assert shown[0].startswith("preparing the data set x (once): 1/5")
    assert shown[2].startswith("preparing the data set x (once): 3/5, 2 s left")
    assert shown[4].endswith("5/5, 0 s left\x1b[K\n")
