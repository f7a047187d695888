"""examples/language_model: a run of a small model, its continuation, and what it refuses."""

import json
import shutil

import jax
import numpy as np
import pytest
from thinning import first

from examples.language_model import train
from examples.language_model.model import SIZES, Config


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Returns a function that trains a very small model on a corpus of eight files."""
    monkeypatch.setitem(SIZES, "tiny", Config(16, 16, heads=2, kv_heads=1, layers=1))
    monkeypatch.setattr(train, "WRITTEN", 12)
    for name in ("corpus", "other"):
        (tmp_path / name).mkdir()
        for i in range(8):
            (tmp_path / name / f"{i}.py").write_text(f"{name} = {i}\n" * 9)
    (tmp_path / "empty").mkdir()

    def main(workdir, corpus="corpus", *flags):
        small = ["--steps=4", "--batch=2", "--length=8"]
        folders = [f"--workdir={tmp_path / workdir}", f"--corpus={tmp_path / corpus}"]
        with jax.numpy_dtype_promotion("standard"):  # as in a program
            return train.main([*small, *folders, *flags])

    return main


@pytest.mark.parametrize("recipe", first(("standard", "switchback")))
def test_a_run_continues_to_the_same_bits(start, recipe, tmp_path, monkeypatch, capsys):
    """The second run finds what the first had stored after two of four steps."""
    record = train.Run.record

    def record_and_copy(run, step, *args):
        record(run, step, *args)
        if step == 2:
            shutil.copytree(tmp_path / "whole", tmp_path / "run")
            with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "lo')  # as after a kill or on a full disk

    monkeypatch.setattr(train, "LINES", 2)
    monkeypatch.setattr(train, "SECONDS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "record", record_and_copy)
        patch.setattr(train, "sample", lambda *_: "")
        whole = start("whole", "corpus", f"--recipe={recipe}")
    capsys.readouterr()
    jax.tree.map(np.testing.assert_array_equal, start("run", "corpus", f"--recipe={recipe}"), whole)
    told = capsys.readouterr().out
    assert told.startswith("step 4 of 4  loss ") and "--- b'def ', and what the model" in told
    rows = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("run", "whole")
    ]
    assert [row["step"] for row in rows[0]] == [2, 4]
    assert [row["val_loss"] for row in rows[0]] == [row["val_loss"] for row in rows[1]]


@pytest.mark.parametrize(
    "flags, told",
    [
        (("new", "empty"), "empty has 0 bytes of text for training and 0 for validation"),
        (("new", "corpus", "--recipe=int3"), "argument --recipe: invalid choice: 'int3'"),
        (("new", "corpus", "--batch=3"), "--batch=3 must be a multiple of the 2 devices"),
        (("new", "corpus", "--length=0"), "--length must be above 0, got 0"),
        (("new", "nowhere"), "nowhere is not a folder: name one that holds text files"),
        (
            ("new", "corpus", "--prompt="),
            "--prompt must have at least one byte and fewer than --length=8",
        ),
        (("new", "corpus", "--seed=-1"), "--seed must be at least 0, got -1"),
        (("run", "other"), "run holds a run with corpus stored, got "),
        (("run", "corpus", "--size=124m"), "run holds a run with size tiny, got 124m"),
        (("cut", "corpus"), "cut/config.json is not JSON: delete it"),
    ],
    ids=lambda value: value[-1].strip("-") if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_told_in_one_line(start, tmp_path, capsys, flags, told):
    run = tmp_path / "run"
    run.mkdir()
    settings = {"size": "tiny", "recipe": "standard", "steps": 4, "batch": 2, "length": 8}
    (run / "config.json").write_text(
        json.dumps(settings | {"rate": 4e-3, "seed": 0, "corpus": "stored"})
    )
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").touch()  # as on a full disk
    rate = ["--rate=4e-3"]
    with pytest.raises(SystemExit) as stopped:
        start(*flags, *rate)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and told in error
    assert error.startswith("train.py: ") and len(error.splitlines()) == 1
