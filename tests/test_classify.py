"""`swjax classify`, `export` and `probe`: what they print and write, and one line for a mistake."""

import json

import numpy as np
import pytest
from clip_oracle import write_weights
from photographs import jpeg
from PIL import Image

from swjax import inference
from swjax.evaluate import probe
from swjax.inference import export_command
from swjax.inference.classify import main


@pytest.fixture
def weights(tmp_path):
    write_weights(tmp_path / "clip")
    return str(tmp_path / "clip")


def test_names_are_printed_by_probability(weights, tmp_path, capsys):
    (tmp_path / "a.jpg").write_bytes(jpeg(3))
    assert main([weights, f"{tmp_path}/a.jpg", "cat", "red fox", "dog"]) == 0
    lines = [line.split("%  ") for line in capsys.readouterr().out.splitlines()]
    shares = [float(share) for share, _ in lines]
    assert {name for _, name in lines} == {"cat", "red fox", "dog"}
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.1)


@pytest.mark.parametrize("bad", ["model", "picture"])
def test_what_cannot_be_read_is_one_line(bad, weights, tmp_path, capsys):
    (tmp_path / "a.jpg").write_bytes(b"no image")
    model = "missing" if bad == "model" else weights
    assert main([model, f"{tmp_path}/a.jpg", "cat", "dog"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("swjax classify: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "names, message",
    [
        (["cat"], "leaves no choice"),
        (["cat", "dog", " Cat"], "the name 'cat', given twice"),
        (
            ["cat", "dog", "cat"],
            "the name 'cat', given twice, shares its probability: give it once",
        ),
        (["cat", " "], "the name ' ' is empty"),
        (["fox", "\uff26ox"], "the name 'fox', given twice"),  # a fullwidth F
    ],
)
def test_names_that_leave_no_choice_are_refused(names, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["model", "picture.png", *names])
    assert message in capsys.readouterr().err


def test_a_second_picture_is_not_a_name(tmp_path, capsys):
    (tmp_path / "b.jpg").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["model", f"{tmp_path}/a.jpg", f"{tmp_path}/b.jpg", "cat"])
    assert "b.jpg' is a file: give one picture, then names of classes" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["open_clip", "huggingface", "big_vision"])
def test_exported_models_keep_their_embeddings(layout, weights, tmp_path, capsys):
    assert export_command.main([weights, f"{tmp_path}/out", f"--layout={layout}"]) == (
        2 if layout == "big_vision" else 0  # it has no name for the class token
    )
    captured = capsys.readouterr()
    if layout == "big_vision":
        assert captured.err.startswith("swjax export: ") and captured.err.count("\n") == 1
        return
    assert captured.out.startswith("opens in ") and f"{tmp_path}/out" in captured.out
    before, after = (inference.load(path) for path in (weights, f"{tmp_path}/out"))
    np.testing.assert_array_equal(before.classifier(["a", "b"]), after.classifier(["a", "b"]))


def test_files_that_cannot_be_used_are_named_with_a_remedy(weights, tmp_path, capsys):
    """The messages were "[Errno 2] ..."; an export into a run replaced its config.json."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert main([weights, f"{tmp_path}/missing", "cat", "dog"]) == 2
    assert export_command.main([weights, f"{tmp_path}/file"]) == 2
    assert export_command.main([weights, f"{tmp_path}/run", "--layout=huggingface"]) == 2
    missing, file, run = capsys.readouterr().err.splitlines()
    assert missing.endswith(
        "missing': No such file or directory; give a path that exists or can be created"
    )
    assert file.endswith("file': File exists; give a directory, not a file")
    assert "folder must not be a run, whose config.json would be replaced" in run
    with pytest.raises(SystemExit, match="2"):
        export_command.main([weights, ""])


def test_a_probe_separates_colors(weights, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 4)):
        for name, color in {
            "red": (220, 30, 30),
            "green": (30, 200, 40),
            "blue": (30, 40, 210),
        }.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                noisy = np.clip(color + rng.normal(scale=20, size=(40, 40, 3)), 0, 255)
                Image.fromarray(noisy.astype(np.uint8)).save(folder / f"{i}.png")
    (tmp_path / "train" / "red" / "bad.png").write_bytes(b"no image")
    sets = [
        f"--{flag}=folders:{tmp_path}/{folder}"
        for flag, folder in (("train", "train"), ("test", "val"))
    ]
    assert probe.main([weights, *sets, "--shots=1,2"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores.keys() == {"probe/1_shot_top1", "probe/2_shot_top1"}
    assert min(scores.values()) > 0.9
    encoder = inference.load(weights)
    sets = [f"folders:{tmp_path}/{name}" for name in ("train", "val")]
    assert probe.probe(encoder, *sets) == {"probe/top1": 1.0}
    with pytest.raises(ValueError, match="has 3 readable pictures of 'blue', fewer than 4"):
        probe.probe(encoder, *sets, [4])
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "pink")
    with pytest.raises(ValueError, match="only one of them has pink, red: remove"):
        probe.probe(encoder, *sets)
    for split in ("train", "val"):  # two classes of one name, as in ImageNet
        (tmp_path / split / "classnames.txt").write_text("cold\ncold\nwarm\n")
    assert probe.probe(encoder, *sets) == {"probe/top1": 1.0}
    (tmp_path / "one").mkdir()
    (tmp_path / "val" / "pink").rename(tmp_path / "one" / "pink")
    with pytest.raises(ValueError, match="must have at least two classes, got only pink: add"):
        probe.probe(encoder, *2 * [f"folders:{tmp_path}/one"])
