"""The icons data set, built from a small package of icons that these tests write."""

import io
import json
import pickle
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from swjax import data
from swjax.data.icons import drawings, sets, shards
from swjax.data.icons.shards import SPLITS
from swjax.report import data_check

INFO = {"license": {"spdx": "MIT"}, "author": {"name": "A. Artist"}, "palette": False}
# Icon sets for training and held-out sets, and icon names of each fold.
SEEN, HELD_OUT = "tabler", "eva"
WORDS = [f"thing {a}{b}" for a in "abcdefghijklmnopqrst" for b in "abcdefghijklmnopqrst"]
NAMES = {fold: [w for w in WORDS if sets.fold(w) == fold] for fold in ("train", "val", "test")}


def circle(radius: float) -> dict:
    return {"body": f'<circle cx="8" cy="8" r="{radius}" fill="currentColor"/>'}


def write_package(path: Path, content: dict[str, dict]) -> Path:
    """Writes a package with these sets, {prefix: the set's JSON}."""
    with tarfile.open(path, "w:gz") as tar:
        for prefix, of_set in content.items():
            of_set = {"prefix": prefix, "info": INFO | {"name": prefix.title()}} | of_set
            text = json.dumps(of_set).encode()
            member = tarfile.TarInfo(f"package/json/{prefix}.json")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return path


def small() -> dict[str, dict]:
    """Returns two sets with 40 icons of each fold; every icon has a different radius."""
    content, radius = {}, 1.0
    for prefix in (SEEN, HELD_OUT):
        icons = {}
        for words in NAMES.values():
            for word in words[:20]:
                radius += 0.05
                icons[word.replace(" ", "-") + "-outline"] = circle(radius)
        content[prefix] = {"icons": icons, "categories": {"All / Things": list(icons)}}
    return content


@pytest.fixture
def package(tmp_path, monkeypatch):
    path = write_package(tmp_path / sets.PACKAGE, small())
    monkeypatch.setattr(shards, "_check_version", lambda archive: None)
    monkeypatch.setattr(shards, "_IN_A_SHARD", 24)
    monkeypatch.setattr(shards, "_IN_A_TASK", 8)
    return path


def open_icons(split: str, folder: Path):
    return data.source("icons", split, data_dir=str(folder))


def test_splits_hold_out_names_and_sets(package, tmp_path):
    splits = {split: open_icons(split, tmp_path) for split in SPLITS}
    wanted = dict.fromkeys(("train", "test", "test_sets", "test_both"), 20)
    counts = {split: len(splits[split]) for split in wanted}
    assert counts == wanted | {
        "test": len(NAMES["test"][:20]),
        "test_both": len(NAMES["test"][:20]),
    }
    seen = set(splits["train"].class_names)
    assert seen == set(NAMES["train"][:20]) == set(splits["test_sets"].class_names)
    for split in ("val", "test", "test_both"):
        assert splits[split].class_names and not seen & set(splits[split].class_names)
    sets_of = {
        s: {splits[s][i]["key"].split(":")[0] for i in range(len(splits[s]))} for s in SPLITS
    }
    assert sets_of["train"] == sets_of["test"] == sets_of["val"] == {SEEN}
    assert sets_of["test_sets"] == sets_of["test_both"] == {HELD_OUT}


def test_an_example(package, tmp_path):
    icons = open_icons("train", tmp_path)
    example = icons[3]
    name = icons.class_names[example["label"]]
    assert example["key"] == f"{SEEN}:{name.replace(' ', '-')}-outline"
    assert example["captions"] == (
        *icons.captions(example["label"]),
        f"{name}, outline",
        f"{name}, all things",
    )
    assert example["image"].shape == (drawings.SIZE, drawings.SIZE, 4)
    assert example["image"][48, 48].tolist() == [0, 0, 0, 255] and not example["image"][0, 0].any()
    again = pickle.loads(pickle.dumps(icons))
    np.testing.assert_array_equal(again[3]["image"], example["image"])
    lines = (next(tmp_path.glob("icons/*")) / "attribution.tsv").read_text().splitlines()
    assert f"{example['key']}\tTabler\tA. Artist\tMIT\t" in lines


def test_a_killed_preparation_goes_on(package, tmp_path):
    """A preparation that was killed resumes: complete shards are not rendered again."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from swjax.data.icons import shards
from swjax import data
shards._check_version = lambda archive: None
shards._IN_A_SHARD, shards._IN_A_TASK = 24, 8
write = shards._write
def slow(*args):
    write(*args)
    print("written", flush=True)
    import time; time.sleep(1000 if args[0].name.startswith("shard-00001") else 0)
shards._write = slow
data.source("icons", "train", data_dir={str(tmp_path)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert [process.stdout.readline() for _ in range(2)] == ["written\n"] * 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (folder,) = tmp_path.glob("icons/*-1")
    first = {path: path.stat().st_mtime_ns for path in folder.glob("*.array_record")}
    assert len(first) == 2
    assert len(open_icons("train", tmp_path)) == 20
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert len(list(folder.glob("*.array_record"))) > 2 and not list(folder.glob("*.part"))


def test_the_command_that_verifies_says_how_to_mend(package, tmp_path, capsys):
    """After the named files are removed, the next use renders the damaged shard again, bit for bit."""
    examples = len(open_icons("train", tmp_path))
    (folder,) = tmp_path.glob("icons/*-1")
    assert data_check.main(["verify", str(folder)]) == 0
    damaged = sorted(folder.glob("*.array_record"))[1]
    description = damaged.with_suffix(".json")
    whole = description.read_bytes()
    for content in (b"{", b"{}", whole):
        description.write_bytes(content)
        assert data_check.main(["verify", str(folder)]) == (content != whole)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert data_check.main(["verify", str(folder)]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    named = re.fullmatch(r"damaged: (\S+); remove (\S+) and (\S+) to render it again", line)
    assert named and named[1] == str(damaged)
    for path in named.groups()[1:]:
        Path(path).unlink()
    assert len(open_icons("train", tmp_path)) == examples
    assert data_check.main(["verify", str(folder)]) == 0
    assert data_check.main(["verify", str(tmp_path)]) == 2
    assert "has no complete.json: give the folder of prepared icons" in capsys.readouterr().err


def test_equal_drawings_are_in_one_split(package, tmp_path):
    content = small()
    twin, test = (NAMES[fold][0].replace(" ", "-") + "-outline" for fold in ("train", "test"))
    content[SEEN]["icons"][twin] = content[SEEN]["icons"][test]
    write_package(package, content)
    assert len(open_icons("train", tmp_path)) == 19
    assert len(open_icons("test", tmp_path)) == len(NAMES["test"][:20])


def test_what_is_not_drawn(tmp_path):
    """Left out: non-commercial and GPL licences, emoji, reserved sets, hidden icons."""
    icons = {"icons": {"home": circle(3), "old": circle(4) | {"hidden": True}}}
    licences = {"nc": "CC-BY-NC-4.0", "gnu": "GPL-3.0-or-later", "open": "CC-BY-SA-4.0", "none": ""}
    content = {
        prefix: icons | {"info": INFO | {"name": prefix, "license": {"spdx": licence}}}
        for prefix, licence in licences.items()
    }
    content["faces"] = icons | {"info": INFO | {"name": "Faces", "category": "Emoji"}}
    content["carbon"] = icons
    package = write_package(tmp_path / "p.tgz", content)
    found = {of.prefix: [icon.key for icon in icons] for of, icons in sets.read(package)}
    assert found == {"open": ["open:home"]}


def test_frames_are_square_and_malformed_drawings_are_left_out():
    icon = sets.Icon("a:b", '<rect width="32" height="8" fill="currentColor"/>', (0, 0, 32, 8), "")
    png, digest = drawings.draw(icon.svg())
    rows = np.asarray(Image.open(io.BytesIO(png)))[:, 48, 3]
    visible = np.flatnonzero(rows > 128)
    assert abs(visible[0] - 36) <= 1 and abs(visible[-1] - 59) <= 1  # the icon is a band
    assert len(digest) == 32 and drawings.draw("<svg") is None
    assert drawings.draw('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>') is None


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("home", ("home", "")),
        ("arrow-up-circle-bold-duotone", ("arrow up circle", "bold duotone")),
        ("battery-50-20-filled", ("battery", "filled")),
        ("4k", ("4k", "")),
        ("24", ("24", "")),
        ("Two--Tone", ("two", "tone")),
    ],
)
def test_names_without_style(name, wanted):
    assert sets.concept_and_style(name) == wanted


def test_siblings_fall_together():
    for name in ("camera", "bell-ring", "coffee-cup"):
        folds = {
            sets.fold(sets.concept_and_style(f"{name}{ending}")[0])
            for ending in ("", "-outline", "-fill", "-24", "-20-filled")
        }
        assert len(folds) == 1
    family = [sets.IconSet(p, "", "", "", "", False) for p in ("entypo", "entypo-social")]
    assert len({each.held_out for each in family}) == 1


@pytest.mark.parametrize(
    "split, options, message",
    [
        ("train", {}, r"needs '.*iconify-json-.*tgz', which does not exist: run `npm pack"),
        ("train", {"archive": "broken.tgz"}, "is not iconify-json-.*its SHA-256 is"),
        ("dev", {}, "split of the icons data set is 'dev'"),
        ("train", {"config": "half"}, "config of the icons data set is 'half'"),
    ],
)
def test_refuses(tmp_path, monkeypatch, split, options, message):
    monkeypatch.chdir(tmp_path)
    Path("broken.tgz").write_bytes(b"no package")
    with pytest.raises(ValueError, match=message) as error:
        data.source("icons", split, data_dir=str(tmp_path), **options)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("icons/*-1"))


def test_half_a_package_is_one_line(tmp_path):
    package = write_package(tmp_path / "p.tgz", small())
    package.write_bytes(package.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"p.tgz' is not iconify-json-.*npm pack"):
        list(sets.read(package))


def test_folds_have_the_documented_sizes():
    words = [f"word {i}" for i in range(20_000)]
    shares = {f: sum(sets.fold(w) == f for w in words) / len(words) for f in NAMES}
    assert shares == pytest.approx({"train": 0.92, "val": 0.02, "test": 0.06}, abs=0.005)
