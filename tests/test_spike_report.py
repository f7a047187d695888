"""The page about loss spikes and the replay of a step, for runs of train.py and for other logs."""

import json
import subprocess
import sys

import numpy as np
import pytest
from micro_run import records, train
from test_report import Page

from swjax import report
from swjax.diagnostics.__main__ import main
from swjax.diagnostics.names import OPERANDS
from swjax.report import spikes
from swjax.training import replay
from swjax.training.config import ConfigError


def write_log(workdir, steps=400):
    """Writes a log whose loss spikes twice, each time 3 steps after an RMS event of the patch embedding."""
    rng = np.random.default_rng(0)
    workdir.mkdir(exist_ok=True)
    with open(workdir / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "train/loss": 1 + 0.01 * rng.normal(), "other": 3}
            rms = {"patch_embed/kernel": 0.9, "blocks/mlp/fc1/kernel/0": 1.2}
            line["train/loss"] += 2.0 * (step % 150 in (0, 1, 2) and step > 100)
            rms["patch_embed/kernel"] += 3 * (step % 150 == 147)
            line |= {f"stability/rms/{name}": value for name, value in rms.items()}
            if step % 100 == 0:
                line |= {f"quantization/sqnr_db/<fc>/{operand}": 40.0 for operand in OPERANDS}
            file.write(json.dumps(line) + "\n")


def test_page_of_a_log(tmp_path, capsys):
    write_log(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 loss spikes in steps 21 to 400" in said
    assert "2 of 2 follow an RMS event of patch_embed/kernel by 1 to 8 steps (chance 4.2%" in said
    page = Page(tmp_path / "report" / "spikes.html")
    for text in (
        "Loss spikes2",
        "Spikes that follow2 of 2",
        "Step 150 to 152: loss up to 3.01, 1 before",
        "patch_embed/kernel3.90147",  # the tensor that came first, its RMS and step
        "<fc>/x",  # escaped
        "<fc>/wgrad_g",
        "The first 20 steps do not count",
    ):
        assert text in page.text, text
    assert "replay" not in page.text  # a log alone cannot be replayed
    assert len(page.urls) == 2 * (4 + 2)
    assert all(url.startswith("data:image/png;base64,iVBOR") for url in page.urls)


def test_page_says_what_is_missing(tmp_path):
    lines = [{"step": step, "train/loss": 1.0} for step in range(1, 200)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path, found = spikes.write(tmp_path)
    assert found.loss == []
    text = Page(path).text
    for missing in (
        "config.diagnostics.rms",
        "config.diagnostics.every_steps",
        "There are none by these rules",
    ):
        assert missing in text


def test_pages_of_a_log_with_gaps(tmp_path):
    """Logs with NaN losses, missing RMS values, layers measured at other steps, and damaged lines."""
    write_log(tmp_path, steps=200)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines[119] |= {"train/loss": None, "train/nonfinite": "gradient patch_embed/kernel"}
    for line in lines:
        line |= {name: None for name in line if name.endswith("fc1/kernel/0")}
        line |= {"quantization/sqnr_db/late/x": 30.0} if line["step"] % 80 == 0 else {}
    log = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_bytes(log.encode() + b'{"loss": 1}\n\xff\n')
    path, found = spikes.write(tmp_path)
    assert found.steps == (11, 200) and [event.start for event in found.loss] == [150]
    assert "At the end of the run: <fc>/x" in Page(path).text
    assert "Not finite in 1 of 200 steps, first at step 120" in Page(report.write(tmp_path)).text


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert main(["replay", str(tmp_path), "--step=3"]) == 2
    write_log(tmp_path, steps=3)
    assert main(["report", str(tmp_path), "--window=1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "has no train/loss" in errors[0] and "has no config.json" in errors[1]
    assert "window must be at least 2, got 1" in errors[2]


def test_swjax_is_a_command():
    done = subprocess.run([sys.executable, "-m", "swjax", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "diagnostics" in done.stdout


@pytest.fixture(scope="module")
def run(micro, tmp_path_factory):
    """A run with checkpoints at steps 2, 4 and 6, and quantization health at steps 3 and 6."""
    workdir = tmp_path_factory.mktemp("run")
    config = micro(diagnostics__every_steps=3, checkpoint__keep=5)
    assert train(config, workdir) == 0
    return workdir


def test_quantization_is_measured_at_its_cadence(run):
    lines = records(run)
    measured = [
        line["step"] for line in lines if "quantization/sqnr_db/text/blocks/mlp/fc1/g/0" in line
    ]
    assert measured == [3, 6]
    sqnr = [value for name, value in lines[2].items() if "/sqnr_db/vision" in name]
    assert len(sqnr) == 6 * 3 and min(sqnr) > 25
    assert all("stability/rms/vision/patch_embed/kernel" in line for line in lines)


@pytest.mark.parametrize(("step", "start"), [(6, 4), (2, 0)])
def test_replay_is_the_run_bit_for_bit(run, step, start):
    found = replay.replay(run, step)
    assert (found.start, found.compared, found.differences) == (start, step - start, [])
    there = records(run)[step - 1]
    ours = {name: value for name, value in found.metrics.items() if "quantization" not in name}
    assert set(ours) <= set(there) and len(ours) > 50
    norms = np.array([norm for norm, _ in found.gradients.values()])
    np.testing.assert_allclose(np.sqrt(np.sum(norms**2)), there["train/grad_norm"], rtol=1e-5)
    if step % 3 == 0:
        health = {name: value for name, value in there.items() if "quantization" in name}
        assert health == {
            name: pytest.approx(found.metrics[name], rel=1e-6) for name in health
        }  # the log rounds to float32
    assert found.examples == replay.batch_examples(run)(step)
    assert len(found.examples) == 8 and "pattern" in found.examples[0]


def test_replay_tells_what_differs():
    log = {1: {"step": 1, "train/loss": 7.0, "stability/rms/w": None, "time": 3.0}}
    here = {"step": 1, "train/loss": 0.5, "stability/rms/w": float("nan")}
    assert replay.differences(here, log) == ["step 1: train/loss: 7.0 there, 0.5 here"]


def test_a_step_that_is_none(run):
    with pytest.raises(ConfigError, match="^--step=7 must be one of the run's steps, 1 to 6$"):
        replay.replay(run, 7)


def test_a_run_that_goes_on_with_another(run, micro, tmp_path):
    """Steps of a run that continues another are replayed from that run's checkpoints."""
    config = micro(checkpoint__resume=str(run))
    start, position = replay._position_before(config, tmp_path, 5)
    assert start == 4 and position["taken"] == [4 * 8]
    with pytest.raises(ConfigError, match="is older than step 2: give a later step$"):
        replay._position_before(config, tmp_path, 2)


def test_report_of_a_run_names_examples_and_the_command(run):
    path, _ = spikes.write(
        run, examples=replay.batch_examples(run), ignore=0, window=2, sigmas=-9.0, deviations=1
    )
    text = Page(path).text
    assert f"python -m swjax diagnostics replay {run} --step=" in text
    assert "8 examples" in text and ": pattern " in text
