"""The warning that all embeddings have become equal: on recorded and synthetic losses, and in the trainer."""

import json
import math
from pathlib import Path

import pytest
from micro_run import train

from swjax.training.log import step_log
from swjax.training.log.step_log import COLLAPSE_STEPS as STEPS
from swjax.training.log.step_log import Collapse

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def records(losses, norms):
    pairs = zip(losses, norms, strict=True)
    return [
        {"step": step, "train/loss": loss, "train/grad_norm": norm}
        for step, (loss, norm) in enumerate(pairs)
    ]


def test_recorded_runs_of_the_icons():
    """Of six recorded runs at ViT-B's width, only the one that stays collapsed gets the warning."""
    told = {}
    for run in json.loads((RESULTS / "icons_accuracy_h100.json").read_text())["runs"]:
        key, result = run["key"], run["result"]
        curves = [
            [value for value in result[name] for _ in range(5)] for name in ("loss", "grad_norm")
        ]
        lines = Collapse("softmax", key["batch"]).update(records(*curves))
        told[key["rate"], key["steps"], key["arm"], key["seed"]] = lines
    assert [key for key, lines in told.items() if lines] == [(1e-3, 1200, "standard", 0)]
    assert len(told) == 6


@pytest.mark.parametrize(
    "losses, norms, loss",
    [
        ([math.log(8)] * STEPS, [0.5] * STEPS, "softmax"),  # loss of chance, but a large gradient
        ([1.0] * STEPS, [1e-3] * STEPS, "softmax"),  # a small gradient, but the loss is low
        ([math.log(8)] * (STEPS - 1), [1e-3] * (STEPS - 1), "softmax"),  # one step too few
        ([math.log(8), None] * STEPS, [1e-3] * 2 * STEPS, "softmax"),  # NaN has its own message
        ([math.log(8)] * STEPS, [1e-3] * STEPS, "sigmoid"),
    ],
)
def test_other_runs_are_left_alone(losses, norms, loss):
    assert Collapse(loss, 8).update(records(losses, norms)) == []


def test_it_is_said_once_however_records_arrive():
    watch, steps = Collapse("softmax", 8), records([math.log(8)] * 500, [1e-3] * 500)
    lines = [line for record in steps for line in watch.update([record])]
    assert len(lines) == 1 and lines[0].startswith("step 99: the embeddings have collapsed")
    assert "raise schedule.warmup_steps" in lines[0] and "\n" not in lines[0]


def test_a_rollback_counts_no_step_twice():
    watch, steps = Collapse("softmax", 8), records([math.log(8)] * STEPS, [1e-3] * STEPS)
    assert watch.update(steps[:-1]) == []
    watch.restart()
    assert watch.update(steps[50:]) == []
    assert len(watch.update(steps[:50])) == 1


@pytest.mark.release
def test_the_trainer_says_it(micro, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step_log, "COLLAPSE_STEPS", 2)
    monkeypatch.setattr(step_log, "_CHANCE_TOLERANCE", math.inf)
    monkeypatch.setattr(step_log, "_SMALL_GRADIENT", math.inf)
    train(micro(train__steps=3), tmp_path)
    assert capsys.readouterr().out.count("the embeddings have collapsed") == 1
