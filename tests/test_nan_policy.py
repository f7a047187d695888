"""The policies for values that are not finite: stop, skip the step, or roll back."""

import io
import json
import math

import jax
import jax.numpy as jnp
import pytest
from micro_run import UNDIAGNOSED, final_state, records, train

from swjax.training import setup as setup_lib
from swjax.training import step as step_lib
from swjax.training.accumulation import LossAndGrad
from swjax.training.faults.nan_policy import Action, NanPolicy, first_bad
from swjax.training.log import packed, step_log
from swjax.training.log.console import Console
from swjax.training.log.results import tell_results
from swjax.training.state.checkpoint import Checkpoints


@pytest.fixture
def bad_step_4(monkeypatch):
    """Makes the trainer read NaN as the loss of step 4, once."""
    real, left = packed.fetch, [1]

    def spoiled(metrics):
        found = real(metrics)
        for record in found:
            if record["step"] == 4 and left and left.pop():
                record["train/loss"] = float("nan")
        return found

    monkeypatch.setattr(step_log, "fetch", spoiled)


@pytest.mark.release
def test_nan_stops_the_run(micro, bad_step_4, tmp_path, capsys):
    assert train(micro(), tmp_path) == 1
    assert "train/loss is nan at step 4: stopped;" in capsys.readouterr().out
    assert Checkpoints(tmp_path, keep=0).latest_step() == 2  # step 4 is not saved
    assert [r["train/loss"] is None for r in records(tmp_path)] == [False, False, False, True]


def test_nan_rolls_back_past_the_data(micro, bad_step_4, reference, tmp_path, capsys):
    config = micro(train__nan_policy="rollback")
    assert train(config, tmp_path) == 0
    assert "train/loss is nan at step 4: back to step 2" in capsys.readouterr().out
    rolled, straight = records(tmp_path), records(reference[1])
    assert [r["step"] for r in rolled] == [1, 2, 3, 4, 5, 6]
    assert rolled[:2] == straight[:2] and rolled[2] != straight[2]
    state, position = final_state(config, tmp_path)
    assert int(state["step"]) == 6 and position["batches"] == 8  # batches 3 and 4 were skipped


@pytest.mark.release
def test_a_rollback_restarts_the_watch_for_a_collapse(
    micro, bad_step_4, monkeypatch, tmp_path, capsys
):
    """Steps 1 to 3 are logged, then 3 to 6: five records in a row without a restart, four with it."""
    monkeypatch.setattr(step_log, "COLLAPSE_STEPS", 5)
    monkeypatch.setattr(step_log, "_CHANCE_TOLERANCE", math.inf)
    monkeypatch.setattr(step_log, "_SMALL_GRADIENT", math.inf)
    assert train(micro(train__nan_policy="rollback", log__every_steps=1), tmp_path) == 0
    out = capsys.readouterr().out
    assert "back to step 2" in out and "collapsed" not in out


def test_a_checkpoint_allows_more_rollbacks(micro):
    policy = policy_of(micro(train__nan_policy="rollback"))
    bad = [{"step": 3, "train/loss": math.nan, "train/grad_norm": 1.0}]
    assert [policy.decide(bad) for _ in range(3)] == [Action.ROLL_BACK] * 3
    policy.position()
    assert policy.decide(bad) is Action.STOP
    policy.reset_rollbacks()
    assert policy.decide(bad) is Action.ROLL_BACK


def test_first_bad_step_is_named():
    record = {"step": 3, "train/loss": 1.0, "train/grad_norm": float("inf")}
    assert first_bad([record | {"train/grad_norm": 1.0}]) == ""
    assert first_bad([record]) == "train/grad_norm is inf at step 3"
    assert first_bad([record], kind="parameter") == ""


@pytest.fixture
def planted(monkeypatch):
    """NaN in the batch of step 2, a gradient of step 3, an update of step 4; infinity in a parameter of 5."""
    at = {}

    def spoil(x, step, value=jnp.nan):
        return jnp.where(at["step"] == step - 1, jnp.full_like(x, value), x)

    def spoil_leaf(tree, *keys, **how):
        *outer, last = keys
        part = tree = jax.tree.map(lambda x: x, tree)
        for key in outer:
            part = part[key]
        part[last] = spoil(part[last], **how)
        return tree

    names = ("make_train_step", "make_loss_and_grad", "make_optimizer")
    homes = (step_lib, step_lib, setup_lib)
    real = {name: getattr(home, name) for home, name in zip(homes, names)}
    preprocess = step_lib.data.preprocess

    def make_train_step(*args):
        step = real["make_train_step"](*args)

        def with_parameter(state, batch):
            at["step"] = state["step"]
            keys = ("params", "text", "ln_final", "bias")
            return step(spoil_leaf(state, *keys, step=5, value=jnp.inf), batch)

        return with_parameter

    def make_loss_and_grad(*args):
        loss_and_grad = real["make_loss_and_grad"](*args)

        def with_gradient(*args):
            loss, aux, grads = loss_and_grad(*args)
            return LossAndGrad(
                loss, aux, spoil_leaf(grads, "vision", "patch_embed", "kernel", step=3)
            )

        return with_gradient

    def make_optimizer(*args):
        optimizer = real["make_optimizer"](*args)

        def update(*args):
            updates, state = optimizer.update(*args)
            return spoil_leaf(updates, "text", "ln_final", "scale", step=4), state

        return optimizer._replace(update=update)

    monkeypatch.setattr(setup_lib, "make_optimizer", make_optimizer)
    monkeypatch.setattr(setup_lib, "make_train_step", make_train_step)
    monkeypatch.setattr(step_lib, "make_loss_and_grad", make_loss_and_grad)
    monkeypatch.setattr(step_lib.data, "preprocess", lambda *a: spoil(preprocess(*a), 2))


@pytest.mark.release
def test_what_is_not_finite_is_named_at_its_step(micro, planted, tmp_path, capsys):
    options = {"train__nan_policy": "skip", "diagnostics__norms": "false"}
    options |= {"log__every_steps": 1, "checkpoint__every_steps": 4, "train__steps": 7}
    options |= {"model__recipe": "standard"}  # compiles faster
    assert train(micro(**options), tmp_path) == 1
    said = capsys.readouterr().out
    for text in (
        "train/loss is nan at step 2, where batch image is not finite: skipped",
        "grad_norm is nan at step 3, where gradient vision/patch_embed/kernel is not finite: skipped",
        "at step 5, where parameter text/ln_final/bias is not finite: stopped",
    ):
        assert text in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    named = {line["step"]: line["train/nonfinite"] for line in lines if "train/nonfinite" in line}
    assert list(named) == [2, 3, 4, 5] and named[2] == "batch image"
    assert named[4] == "update text/ln_final/scale"  # step 3's message was printed
    assert {line["step"]: line["train/skipped_total"] for line in lines}[5] == 4
    assert Checkpoints(tmp_path, keep=0).latest_step() == 4  # step 5 is not saved


# ------------------------------------------------------------------------------------- skipped steps


def policy_of(config, position=None) -> NanPolicy:
    console = Console(200, io.StringIO())
    return NanPolicy(config, steps=200, position=position, console=console)


def skipped_or_not(*flags: int) -> list[dict]:
    fine = {"train/loss": 1.0, "train/grad_norm": 1.0}
    return [{"step": i, "train/skipped": float(flag)} | fine for i, flag in enumerate(flags, 1)]


def test_a_stretch_without_an_update_stops_the_run(micro):
    policy = policy_of(micro(train__nan_policy="skip"))
    assert policy.decide(skipped_or_not(1, 1, 0)) is Action.GO_ON
    assert policy.decide(skipped_or_not(*[1] * 49)) is Action.GO_ON
    assert policy.decide(skipped_or_not(1)) is Action.STOP
    assert "the last 50 steps were all skipped, 52 in total: stopped; lower" in policy.reason


def test_a_stretch_that_is_over_does_not_stop_the_run(micro):
    """For example with a dynamic loss scale that starts far too large."""
    policy = policy_of(micro(optimizer__loss_scaling="dynamic"))
    records = skipped_or_not(*[1] * 80, 0)
    assert policy.decide(records) is Action.GO_ON
    assert policy.skipped == 80 and records[-1]["train/skipped_total"] == 80


def test_a_checkpoint_keeps_the_count(micro):
    config = micro(train__nan_policy="skip")
    first = policy_of(config)
    first.decide(skipped_or_not(1, 0, *[1] * 40))
    resumed = policy_of(config, position=json.loads(json.dumps(first.position())))
    assert resumed.decide(skipped_or_not(*[1] * 9)) is Action.GO_ON
    assert resumed.decide(skipped_or_not(1)) is Action.STOP
    assert resumed.skipped == 51


@pytest.mark.parametrize("scaling", ["per_tensor", "dynamic"])
@pytest.mark.release
def test_a_run_whose_gradients_overflow_at_every_step_has_not_finished(
    scaling, micro, tmp_path, capsys
):
    options = {"optimizer__loss_scaling": scaling, "optimizer__loss_scale": 1e30}
    faster = {"model__recipe": "standard", "optimizer__freeze": "^vision/", **UNDIAGNOSED}
    assert train(micro(model__dtype="float16", **options, **faster), tmp_path) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "the last 6 steps were all skipped, 6 in total: stopped;" in last
    assert [r["train/skipped_total"] for r in records(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "results.json").exists()


def test_skipped_steps_are_told_at_the_end(tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"step": 100, "skipped": 7, "scores": {}}')
    tell_results(tmp_path)
    assert capsys.readouterr().out == "finished after 100 steps, of which 7 were skipped\n"
