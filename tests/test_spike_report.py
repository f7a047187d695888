"""The page about loss spikes and the replay of a step, for runs of train.py and for other logs."""

import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro_run import records, train
from test_report import Page

from swjax import report
from swjax.diagnostics.__main__ import main
from swjax.diagnostics.names import OPERANDS
from swjax.optax import dynamic_loss_scale
from swjax.report import spikes
from swjax.tools import replay
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
    assert "2 loss spikes in steps 101 to 400" in said
    assert "2 of 2 follow an RMS event of patch_embed/kernel by 1 to 8 steps (chance 5.3%" in said
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
    assert found.steps == (101, 200) and [event.start for event in found.loss] == [150]
    assert "At the end of the run: <fc>/x" in Page(path).text
    assert "Not finite in 1 of 200 steps, first at step 120" in Page(report.write(tmp_path)).text


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert main(["replay", str(tmp_path), "--step=3"]) == 2
    write_log(tmp_path, steps=3)
    assert main(["report", str(tmp_path), "--window=1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "record the loss under this name" in errors[0] and "has no config.json" in errors[1]
    assert "window must be at least 2, got 1" in errors[2]
    assert main(["report", str(tmp_path), "--rms=nan"]) == 2
    assert main(["report", str(tmp_path), "--sigmas=-1"]) == 2
    assert main(["replay", str(tmp_path), "--step=3", "--tensors=-1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "swjax diagnostics: Rules: rms must be at least 0, got nan",
        "swjax diagnostics: Rules: sigmas must be at least 0, got -1.0",
        "swjax diagnostics: --tensors must be at least 0, got -1",
    ]


def write_losses(workdir, losses):
    """Writes a log from (step, loss) pairs."""
    lines = [json.dumps({"step": step, "train/loss": loss}) for step, loss in losses]
    (workdir / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def test_a_short_log_is_not_judged(tmp_path, capsys):
    losses = dict.fromkeys(range(1, 91), 1.0) | dict.fromkeys((50, 51, 52), 1000.0)
    write_losses(tmp_path, losses.items())
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "no step could be judged: the log has 90 steps with a finite loss, and the window before "
        "a judged step takes 100: lower --window"
    ]
    text = Page(tmp_path / "report" / "spikes.html").text
    assert "no step could be judged" in text and "There are none" not in text
    assert main(["report", str(tmp_path), "--window=20"]) == 0
    assert "1 loss spike in steps 21 to 90" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--window=20", "--ignore=90"]) == 0
    assert "the steps up to 90 do not count: lower --ignore" in capsys.readouterr().out


def test_losses_that_are_not_finite_before_the_first_judged_step(tmp_path, capsys):
    losses = dict.fromkeys(range(1, 301), 1.0) | dict.fromkeys((50, 51, 52))
    write_losses(tmp_path, losses.items())
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "0 loss spikes in steps 104 to 300",
        "1 loss spike before step 104, with losses that are not finite",
    ]
    assert main(["report", str(tmp_path), "--window=300"]) == 0
    assert "1 loss spike with losses that are not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([(1, 1.0), ("x", 1.0)], "line 2: step must be an integer, got 'x'"),
        ([(1, 1.0), (None, 1.0)], "line 2: step must be an integer, got None"),
        ([(1, 1.0), (2, [1.0])], "line 2: train/loss must be a number, got [1.0]"),
        ([(1, 1.0), (2, 1.0), (2, 1.0)], "steps must increase, got 2 after 2"),
    ],
)
def test_a_wrong_line_of_a_log_is_named(tmp_path, capsys, losses, said):
    write_losses(tmp_path, losses)
    assert main(["report", str(tmp_path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/metrics.jsonl" in error and said in error


def test_a_log_of_every_tenth_step(tmp_path, capsys):
    write_losses(tmp_path, ((step, 1.0) for step in range(10, 4000, 10)))
    assert main(["report", str(tmp_path)]) == 2
    assert "the log has one step in 10" in capsys.readouterr().err


def test_files_that_cannot_be_used_are_one_line(tmp_path, capsys):
    write_log(tmp_path, steps=3)
    (tmp_path / "report").write_text("a file")
    assert main(["report", str(tmp_path)]) == 2
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert f"{tmp_path}/report" in errors[0] and f"{tmp_path}/metrics.jsonl" in errors[1]


@pytest.fixture(scope="module")
def run(micro, tmp_path_factory):
    """A run with checkpoints at steps 2, 4 and 6, and quantization health at steps 3 and 6."""
    workdir = tmp_path_factory.mktemp("run")
    config = micro(
        diagnostics__every_steps=3,
        diagnostics__rms="true",
        diagnostics__features="true",
        checkpoint__keep=5,
    )
    assert train(config, workdir) == 0
    return workdir


@pytest.mark.release
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
@pytest.mark.release
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


def test_gradients_of_a_run_with_frozen_parameters(micro, monkeypatch):
    blocks = {"w": jnp.array([[3.0, 4.0], [0.0, 1.0]])}
    params = {"text": {"blocks": blocks, "b": jnp.ones(4)}, "vision": {"w": jnp.ones(3)}}

    def loss_and_grad(trainable, frozen, batch, key, scale):
        return SimpleNamespace(grads=jax.tree.map(lambda x: x * scale, trainable))

    monkeypatch.setattr(replay, "make_loss_and_grad", lambda *_: loss_and_grad)
    opt_state = dynamic_loss_scale(optax.sgd(1.0), 8.0).init({})
    state = {"params": params, "opt_state": opt_state, "step": jnp.int32(0)}
    config = micro(optimizer__freeze="vision", optimizer__loss_scaling="dynamic")
    found = replay._gradients(config, None, state, None)
    assert found == {"text/blocks/w/0": (5, 4), "text/blocks/w/1": (1, 1), "text/b": (2, 1)}


def test_replay_tells_what_differs():
    log = {1: {"step": 1, "train/loss": 7.0, "stability/rms/w": None, "time": 3.0}}
    here = {"step": 1, "train/loss": 0.5, "stability/rms/w": float("nan")}
    assert replay.differing_metrics(here, log) == ["step 1: train/loss: 7.0 there, 0.5 here"]


@pytest.mark.release
def test_a_step_that_is_none(run):
    with pytest.raises(ConfigError, match="^--step=7 must be one of the run's steps, 1 to 6$"):
        replay.replay(run, 7)


@pytest.mark.release
def test_a_run_that_goes_on_with_another(run, micro, tmp_path):
    """Steps of a run that continues another are replayed from that run's checkpoints."""
    config = micro(checkpoint__resume=str(run))
    start, position = replay._position_before(config, tmp_path, 5, range(40))
    assert start == 4 and position["taken"] == [4 * 8]
    assert replay._position_before(config, tmp_path, 5, range(24)) == (4, None)  # other data
    with pytest.raises(ConfigError, match="is older than step 2: give a later step$"):
        replay._position_before(config, tmp_path, 2, range(40))


def test_report_of_a_run_names_examples_and_the_command(reference, tmp_path):
    run = shutil.copytree(reference[1], tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[4]["train/loss"] = 100.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    examples = replay.batch_examples(run)
    path, _ = spikes.write(run, examples=examples, ignore=0, window=2, deviations=1)
    text = Page(path).text
    assert f"python -m swjax diagnostics replay {run} --step=" in text
    assert "8 examples" in text and ": pattern " in text


def test_batches_are_those_of_the_config_of_their_step(reference, tmp_path):
    """A run that went on with another batch size after step 4."""
    run = shutil.copytree(reference[1], tmp_path / "run")
    expected = replay.batch_examples(run)(3)
    (entry,) = map(json.loads, (run / "config_history.jsonl").read_text().splitlines())
    entry["config"]["train"]["batch_size"] = 4
    (run / "config.json").write_text(json.dumps(entry["config"]))
    with open(run / "config_history.jsonl", "a") as file:
        file.write(json.dumps(entry | {"step": 4}) + "\n")
    examples = replay.batch_examples(run)
    assert examples(3) == expected
    assert len(examples(5)) == len(examples(6)) == 4
    shutil.rmtree(run / "checkpoints" / "4")
    with pytest.raises(ConfigError, match="depends on a checkpoint of step 4"):
        examples(5)
