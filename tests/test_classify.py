"""`swjax classify` and `swjax export`: what they print and write, and one line for a mistake."""

import numpy as np
import pytest
from clip_oracle import random_model, small_config
from flax import nnx
from photographs import jpeg

from swjax import inference, interop
from swjax.inference import to_others
from swjax.inference.classify import main
from swjax.models import clip


@pytest.fixture
def weights(tmp_path):
    options = {"recipe": "standard", "dtype": "float32", "text": {"vocab_size": 49408}}
    interop.save(
        tmp_path / "clip", nnx.merge(*random_model(clip.config(small_config(), **options)))
    )
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
    assert to_others.main([weights, f"{tmp_path}/out", f"--layout={layout}"]) == (
        2 if layout == "big_vision" else 0  # it has no name for the class token
    )
    captured = capsys.readouterr()
    if layout == "big_vision":
        assert captured.err.startswith("swjax export: ") and captured.err.count("\n") == 1
        return
    assert captured.out.startswith("opens in ") and f"{tmp_path}/out" in captured.out
    before, after = (inference.load(path) for path in (weights, f"{tmp_path}/out"))
    np.testing.assert_array_equal(before.classifier(["a", "b"]), after.classifier(["a", "b"]))
