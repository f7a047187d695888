"""The command-line tool: the conversion, which can be killed and verified; and what docs/data.md shows."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import thinning
from micro_run import ROOT
from photographs import jpeg, write_tars

from swjax import data
from swjax.data import convert
from swjax.training import config as config_lib
from swjax.training import inputs


def run(tmp_path, *arguments):
    return convert.main(["--name=pairs", f"--data_dir={tmp_path / 'data'}", *arguments])


def folder(tmp_path):
    return tmp_path / "data" / "pairs" / "1.0.0"


def records(tmp_path):
    return sorted(path.name for path in folder(tmp_path).glob("*.array_record*"))


def test_the_copy_holds_what_the_tars_do(tmp_path, capsys):
    pattern = write_tars(tmp_path, [3, 0, 4])
    assert run(tmp_path, f"--tars={pattern}") == 0
    assert run(tmp_path, f"--tars={write_tars(tmp_path / 'val', [2])}", "--split=val") == 0
    tars = data.source("webdataset", pattern, data_dir=str(tmp_path / "data"))
    copy = data.source("tfds", "train", builder="pairs", data_dir=str(tmp_path / "data"))
    assert len(copy) == 7 and copy.shards.tolist() == [3, 0, 4]
    for i in range(7):
        assert copy.stored(i) == tars.stored(i)
    assert copy.key(6) == "pairs/train[6] 000020006"
    val = data.source("tfds", "val", builder="pairs", data_dir=str(tmp_path / "data"))
    assert val[1]["captions"] == ("picture 1",)
    batches = [
        next(data.loader(source, batch_size=5, context_length=8, image_size=16))
        for source in (tars, copy)
    ]
    for name in batches[0]:
        np.testing.assert_array_equal(batches[0][name], batches[1][name])
    assert capsys.readouterr().out.count("examples") == 4
    assert run(tmp_path, f"--tars={pattern}") == 0  # the same again
    assert capsys.readouterr().out.endswith("all 3 tars of the split 'train' are converted\n")


def test_other_keys_convert_again(tmp_path):
    pattern = write_tars(tmp_path, [1])
    for options, caption in (([], "picture 0"), (["--text_key=json/status"], "success")):
        assert run(tmp_path, f"--tars={pattern}", *options) == 0
        copy = data.source("tfds", "train", builder="pairs", data_dir=str(tmp_path / "data"))
        assert copy[0]["captions"] == (caption,)


def test_goes_on_where_it_was_killed(tmp_path, monkeypatch, capsys):
    pattern, real, begun = write_tars(tmp_path, [3, 4, 5]), convert._write, []

    def killed(path, examples):
        begun.append(path.name)
        if "00001-of" in path.name and begun.count(path.name) == 1:
            path.write_bytes(b"half a file")
            raise KeyboardInterrupt
        return real(path, examples)

    monkeypatch.setattr(convert, "_write", killed)
    assert run(tmp_path, f"--tars={pattern}") == 130
    # Existing files are complete, but two tars are not converted.
    assert run(tmp_path, "--verify") == 1
    told = capsys.readouterr().out
    assert "2 of 3 tars of the split 'train' are not converted: run the command of" in told
    assert "1 of 3 files match their checksums" in told
    with open(folder(tmp_path) / "converted.jsonl", "a") as log:
        log.write('{"split": "train", "sha')  # an incomplete line, as after a kill
    assert run(tmp_path, f"--tars={pattern}") == run(tmp_path, f"--tars={pattern}") == 0
    begun = [name.removesuffix(".part")[-14:-9] for name in begun]
    assert begun == ["00000", "00001", "00001", "00002"]
    assert records(tmp_path) == [f"pairs-train.array_record-0000{n}-of-00003" for n in range(3)]
    assert run(tmp_path, "--verify") == 0


def test_a_changed_byte_is_found_and_mended(tmp_path, capsys):
    pattern = write_tars(tmp_path, [3, 4])
    assert run(tmp_path, f"--tars={pattern}") == 0
    path = folder(tmp_path) / records(tmp_path)[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run(tmp_path, "--verify") == 1
    assert "00001-of-00002 is missing or has changed" in capsys.readouterr().out
    path.unlink()
    assert run(tmp_path, "--verify") == 1
    assert run(tmp_path, f"--tars={pattern}") == run(tmp_path, "--verify") == 0


def test_what_the_disk_does_not_keep_is_no_success(tmp_path, monkeypatch, capsys):
    real = convert._read_back

    def flipped(path):
        for example in real(path):
            yield example | {"image": example["image"][:-1] + b"?"}

    monkeypatch.setattr(convert, "_read_back", flipped)
    assert run(tmp_path, f"--tars={write_tars(tmp_path, [2])}") == 1
    assert "does not contain the records written" in capsys.readouterr().err
    assert all(name.endswith(".part") for name in records(tmp_path))


def test_bad_samples_are_left_out_and_counted(tmp_path, capsys):
    pattern = write_tars(tmp_path, [9, 9], lambda n, f: f | ({"txt": b""} if n % 6 == 1 else {}))
    assert run(tmp_path, f"--tars={pattern}", "--jobs=2") == 0
    copy = data.source("tfds", "train", builder="pairs", data_dir=str(tmp_path / "data"))
    assert copy.shards.tolist() == [7, 8]
    (line, _) = convert.manifest(folder(tmp_path))
    assert line["skipped"][0].endswith("00000.tar:000000001: the caption is empty")
    for flag in ("--on_bad=stop", "--max_bad_share=0.001"):
        assert run(tmp_path, f"--tars={pattern}", f"--name={flag[2:5]}", flag) == 1
        assert "the caption is empty" in capsys.readouterr().err
    assert run(tmp_path, f"--tars={tmp_path}/00000.tar") == 1
    assert (
        "converted from another number of tars than 1: use another --name"
        in capsys.readouterr().err
    )


def end_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.release
def test_a_killed_process_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convert, "_shard", end_this_process)
    assert run(tmp_path, f"--tars={write_tars(tmp_path, [2])}", "--jobs=2") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the same command with fewer --jobs continues" in error


@pytest.mark.parametrize("whole_group", thinning.first([True, False]), ids=["Ctrl-C", "killed"])
def test_an_interrupt_ends_all_processes(whole_group, tmp_path):
    """Ctrl-C reaches all processes and prints nothing; processes end also if only their parent is killed."""
    command = [sys.executable, "-m", "swjax.data.convert", "--tars", write_tars(tmp_path, [2] * 99)]
    command += ["--name", "twin", "--data_dir", str(tmp_path / "data"), "--jobs=2"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        while not (tmp_path / "data/twin/1.0.0/expected.json").exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(1)  # the processes load their libraries
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.kill()
        _, error = process.communicate(timeout=60)  # returns when no process holds stderr
    assert process.returncode == (130 if whole_group else -signal.SIGKILL)
    assert not whole_group or not error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tars=nowhere/*.tar"], "convert: no file matches 'nowhere"),
        ([], "--tars is missing"),
        (["--name=CC12M"], "--name must be a-z, 0-9 and _, a letter first, got 'CC12M'"),
        (["--split=a b"], "--split must be letters, digits, _ and -, got 'a b'"),
        (["--jobs=0"], "--jobs must be at least 1, got 0"),
    ],
)
def test_convert_refuses(tmp_path, arguments, message, capsys):
    try:
        code = run(tmp_path, *arguments)
    except SystemExit as exit:
        code = exit.code
    assert code and message in capsys.readouterr().err
    assert run(tmp_path, "--verify") == 1


def test_what_the_page_shows_runs(tmp_path, monkeypatch):
    root = Path(__file__).parents[1]
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs" / "data.md").read_text(), re.DOTALL)
    write_tars(tmp_path / "cc12m", [4, 4])
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    (tmp_path / "own.csv").write_text("image,caption\n" + "0.jpg,mine\n" * 8)
    monkeypatch.chdir(tmp_path)
    python, config_file = blocks
    exec(compile(python, "data.md", "exec"), {})
    (tmp_path / "mixed.py").write_text(config_file)
    config = config_lib.load("mixed.py", [("data.mixture.own.weight", "1.8")])
    mixture = inputs.open_source(config, "train")
    assert (mixture.names, mixture.weights) == (("own", "web"), (1.8, 0.9))
    assert len(mixture) == 16
    assert inputs.open_source(config, "val")[3]["captions"] == ("mine",)
    assert inputs.open_source(config, "test") is None
    config.eval.data = ""
    with pytest.raises(config_lib.ConfigError, match="name the data set to evaluate on, own, web"):
        inputs.open_source(config, "val")
    for part, message in (
        ({"name": "table"}, "mixture.web needs the keys name and weight; it has name"),
        ({"name": "table", "weight": 1.0}, "web.splits.train is empty: name the data to train on"),
        ({"name": "tabel", "weight": 1.0}, "there is no data set 'tabel'"),
        ({"name": "table", "weight": 1.0, "splits": {"train": "own.csv"}, "key": ""}, "options of"),
        (
            {"name": "table", "weight": 0.0, "splits": {"train": "own.csv"}},
            "weight of 'web' is 0.0",
        ),
    ):
        config.data.mixture = {"web": part}
        with pytest.raises(config_lib.ConfigError, match=message) as caught:
            inputs.open_source(config, "train")
        assert "\n" not in str(caught.value)
    config.eval.data = "web"
    for part, message in (
        ({"splits": {"tset": "own.csv"}}, "web.splits='tset' is unknown: did you mean 'test'"),
        ({"splits": "own.csv"}, "web.splits='own.csv' must be a dict: write {'train': 'own.csv'}"),
        ({"splits": {"val": 3}}, "web.splits.val=3 must be a text"),
        ({"weight": "a"}, "web.weight='a' must be a number"),
        ({"splits": {"train": "own.csv"}}, "set config.data.mixture.web.splits.val or .test"),
    ):
        config.data.mixture = {"web": {"name": "table", "weight": 1.0} | part}
        with pytest.raises(config_lib.ConfigError, match=message):
            config_lib.validate(config, batch_shards=1)
