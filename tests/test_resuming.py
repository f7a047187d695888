"""Interrupted and resumed runs, and runs that start from another run."""

import errno
import io
import json
import multiprocessing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import thinning
from micro_run import (
    as_interrupted,
    assert_same_bits,
    final_state,
    make_init,
    paths,
    records,
    train,
)
from ml_collections import ConfigDict

from swjax.models import sharding
from swjax.training import config as config_lib
from swjax.training import evaluation
from swjax.training.config import ConfigError
from swjax.training.log.console import Console
from swjax.training.log.results import record_setup
from swjax.training.state.checkpoint import WRITTEN, Checkpoints, lock_workdir
from swjax.training.state.restore import init_or_restore


def test_interrupted_and_resumed_is_the_same_run(reference, tmp_path, capsys):
    config, workdir = reference
    assert train(config, tmp_path, after=3) == 0
    assert "step 4 is saved" in capsys.readouterr().out
    assert not (tmp_path / "results.json").exists()
    # The second run rewrites lines of steps after the checkpoint, which a kill would leave.
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "time": 1.0, "train/loss": 0.0}) + '\n{"step": 6, "ti')
    assert train(config, tmp_path) == 0
    assert records(tmp_path) == records(workdir)
    (a, position_a), (b, position_b) = (final_state(config, d) for d in (tmp_path, workdir))
    assert_same_bits(a, b)
    assert position_a == position_b and position_a["batches"] == 6


@pytest.fixture(scope="module")
def scored(micro, tmp_path_factory):
    """The config and the workdir of a run that evaluates at steps 2, 4 and 6."""
    config, workdir = micro(eval__every_steps=2), tmp_path_factory.mktemp("scored")
    assert train(config, workdir) == 0
    return config, workdir


@pytest.mark.parametrize("at", thinning.first([6, 4]))
@pytest.mark.release
def test_an_evaluation_that_fails_loses_no_step(at, scored, tmp_path, monkeypatch):
    """Its step is saved before, with the record that the scores complete."""
    config, workdir = scored
    call = evaluation.Evaluator.__call__

    def fails(self, state, *args, **options):
        if int(state["step"]) == at:
            raise RuntimeError("out of memory")
        return call(self, state, *args, **options)

    monkeypatch.setattr(evaluation.Evaluator, "__call__", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(config, tmp_path)
    monkeypatch.setattr(evaluation.Evaluator, "__call__", call)
    assert Checkpoints(tmp_path, keep=0).latest_step() == at
    assert [record["step"] for record in records(tmp_path)] == list(range(1, at))
    assert train(config, tmp_path) == 0
    assert records(tmp_path) == records(workdir)
    assert_same_bits(*(final_state(config, d)[0] for d in (tmp_path, workdir)))


@pytest.mark.release
def test_an_interrupted_run_evaluates_when_it_resumes(scored, tmp_path, capsys):
    config, workdir = scored
    for after, step in ((3, 4), (1, 6)):
        assert train(config, tmp_path, after=after) == 0
        assert f"step {step} is saved" in capsys.readouterr().out
        assert records(tmp_path) == records(workdir)[: step - 1]
        assert not (tmp_path / "results.json").exists()
    assert train(config, tmp_path) == 0
    assert records(tmp_path) == records(workdir)
    assert (tmp_path / "results.json").exists()


def test_a_run_resumed_at_its_last_step_has_a_checkpoint(reference, micro, tmp_path):
    as_interrupted(reference[1], tmp_path / "first")
    config = micro(checkpoint__resume=str(tmp_path / "first"), train__steps=4)
    assert train(config, tmp_path / "second") == 0
    assert Checkpoints(tmp_path / "second", keep=0).latest_step() == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__vision__heads": 4}, "config.model.vision.heads is 2 there and 4 here"),
        ({"model__gelu": "quick"}, "config.model.gelu is 'tanh' there and 'quick' here"),
    ],
)
@pytest.mark.parametrize("where", thinning.first(["another", "its own"]))
def test_another_model_of_equal_shapes_is_refused(
    where, changes, message, reference, micro, tmp_path
):
    as_interrupted(reference[1], tmp_path / "first")
    workdir = tmp_path / ("first" if where == "its own" else "second")
    resume = {} if where == "its own" else {"checkpoint__resume": str(tmp_path / "first")}
    with pytest.raises(ConfigError, match=message) as error:
        train(micro(**changes, **resume), workdir)
    assert "\n" not in str(error.value)


@pytest.mark.release
def test_what_differs_from_the_resumed_run_is_told(reference, micro, tmp_path, capsys):
    as_interrupted(reference[1], tmp_path / "first")
    config = micro(checkpoint__resume=str(tmp_path / "first"), optimizer__weight_decay=0.5)
    assert train(config, tmp_path / "second") == 0
    told = f"the config differs from that of {tmp_path}/first: optimizer.weight_decay: "
    assert told in capsys.readouterr().out


@pytest.mark.release
def test_an_optimizer_state_without_elements_is_saved(micro, tmp_path):
    """Muon leaves no parameter to AdamW, whose state then has arrays without elements."""
    freeze = "embed,logit,ln,proj,bias,scale"
    config = micro(optimizer__name="muon", optimizer__freeze=freeze)
    assert train(config, tmp_path, after=3) == 0
    assert train(config, tmp_path) == 0
    assert Checkpoints(tmp_path, keep=0).latest_step() == 6


def test_a_run_goes_on_with_other_data_from_their_start(reference, micro, tmp_path):
    """Messages and docs say how; with another number of examples it was refused."""
    as_interrupted(reference[1], tmp_path / "first")
    resume = {"checkpoint__resume": str(tmp_path / "first")}
    config = micro(**resume, data__synthetic__examples=24)
    assert train(config, tmp_path / "second") == 0
    _, position = final_state(config, tmp_path / "second")
    assert (position["examples"], position["taken"]) == (24, [2 * 8])


@pytest.mark.release
def test_resume_goes_on_with_another_workdirs_run(reference, micro, tmp_path, monkeypatch):
    _, workdir = reference
    as_interrupted(workdir, tmp_path / "first")
    close, closed = Checkpoints.close, []
    monkeypatch.setattr(Checkpoints, "close", lambda self: (closed.append(self), close(self)))
    assert train(micro(checkpoint__resume=str(tmp_path / "first")), tmp_path / "second") == 0
    assert [each.directory.parent.name for each in closed] == ["first", "second"]
    assert records(tmp_path / "second") == records(workdir)[4:]


def test_a_run_that_fails_before_its_first_step_closes_what_it_opened(reference, micro, tmp_path):
    """In a notebook, the processes that load data stayed."""
    as_interrupted(reference[1], tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("no record\n")
    before = multiprocessing.active_children()
    with pytest.raises(ConfigError, match="metrics.jsonl, line 1, is damaged") as error:
        train(micro(data__workers=1), tmp_path / "run")
    assert error.traceback and multiprocessing.active_children() == before


def test_init_from_takes_the_parameters_only(reference, micro, tmp_path):
    _, workdir = reference
    config = micro(checkpoint__init_from=str(workdir))
    init, _ = make_init(config)
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())
    own = Checkpoints(tmp_path / "own", keep=1)
    state, position = init_or_restore(config, own, init, like)
    first, _ = final_state(micro(), workdir)
    assert_same_bits(state["params"], first["params"])
    assert int(state["step"]) == 0 and position is None
    moments = [x for p, x in zip(paths(state), jax.tree.leaves(state)) if "/mu/" in p]
    assert moments and not any(jnp.any(x) for x in moments)


def test_a_checkpoint_of_another_model_is_one_line(reference, micro, tmp_path):
    _, workdir = reference
    config = micro(checkpoint__resume=str(workdir), model__vision__width=64)
    with pytest.raises(
        ConfigError,
        match=r"another config: config.model.vision.width: 32 -> 64: change the keys back",
    ) as error:
        train(config, tmp_path / "other")
    assert "\n" not in str(error.value)


@pytest.mark.release
def test_a_run_shortened_below_its_checkpoint_is_one_line(reference, micro, tmp_path):
    """It ended as a finished run of more steps than its config has."""
    as_interrupted(reference[1], tmp_path / "run")
    with pytest.raises(ConfigError, match="is at step 4, beyond the run's last step 3: .*steps=4"):
        train(micro(train__steps=3), tmp_path / "run")
    assert train(micro(train__steps=4), tmp_path / "run") == 0
    assert json.loads((tmp_path / "run" / "results.json").read_text())["step"] == 4


def test_a_refused_command_keeps_the_config(reference, micro, tmp_path):
    """config.json described other data than the run has seen."""
    as_interrupted(reference[1], tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(ConfigError, match="when this run was saved, it had 40"):
        train(micro(data__synthetic__examples=80), tmp_path / "run")
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_every_config_of_a_run_is_kept_with_its_step(micro, tmp_path, capsys):
    """A resume replaced config.json, so the first config was lost."""
    address = "ftp://bob:PASSWORD@host/pairs.tar"
    runs = [(0, 0.2, 1), (4, 0.5, 1), (4, 0.5, 1), (8, 0.5, 3), (8, 0.1, 1), (9, 0.1, 1)]
    for step, decay, every in runs:
        changes = {"optimizer__weight_decay": decay, "log__every_steps": every}
        config = micro(data__webdataset__splits__train=address, **changes)
        record_setup(config, tmp_path, Console(9), step)
    entries = [json.loads(x) for x in (tmp_path / "config_history.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["changes"]) for entry in entries] == [
        (0, []),
        (4, ["optimizer.weight_decay: 0.2 -> 0.5"]),
        (8, ["optimizer.weight_decay: 0.5 -> 0.1"]),
    ]
    assert entries[-1]["config"] == json.loads((tmp_path / "config.json").read_text())
    assert "after step 8: optimizer.weight_decay: 0.5 -> 0.1" in capsys.readouterr().out
    assert not any("PASSWORD" in path.read_text() for path in tmp_path.iterdir())


def test_a_run_writes_through_no_link(tmp_path):
    (tmp_path / "victim").write_text("kept")
    for name in WRITTEN:
        workdir = tmp_path / f"run of {name}"
        workdir.mkdir()
        (workdir / name).symlink_to(tmp_path / "victim")
        with pytest.raises(
            ConfigError, match=f"has the link '{name}', and a run writes through no"
        ):
            lock_workdir(workdir)
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_full_disk_keeps_the_config(micro, tmp_path, monkeypatch):
    """A damaged config.json ended the command that resumes the run."""
    console, before = Console(6, io.StringIO()), micro(train__steps=6)
    record_setup(before, tmp_path, console, 0)

    def full(part, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        record_setup(micro(train__steps=7), tmp_path, console, 0)
    monkeypatch.undo()
    assert config_lib.changes((tmp_path / "config.json").read_text(), before) == []


def test_what_counts_as_another_config():
    """Keys that only one version of swjax has do not count; parts of a mixture, which users name, do."""
    parts = {"photos": {"name": "webdataset", "weight": 1.0}}
    saved = json.dumps({"train": {"steps": 6, "gone": 1}, "data": {"mixture": parts}})

    def changes(train, mixture):
        return config_lib.changes(saved, ConfigDict({"train": train, "data": {"mixture": mixture}}))

    assert changes({"steps": 6, "new": True}, parts) == []
    assert changes({"steps": 7}, parts) == ["train.steps: 6 -> 7"]
    (added,) = changes({"steps": 6}, parts | {"drawings": {"name": "emoji", "weight": 1.0}})
    assert added.startswith("data.mixture.drawings: None -> {")
    (removed,) = changes({"steps": 6}, {})
    assert removed.startswith("data.mixture.photos: {")
    (told,) = changes({"steps": 6}, {"photos": parts["photos"] | {"text_key": "caption"}})
    assert told == "data.mixture.photos.text_key: None -> 'caption'"


def test_other_initial_weights_are_another_config():
    """The run has begun without them, so it says so, and if it is finished it refuses them."""
    saved = json.dumps({"checkpoint": {"init_from": "", "keep": 2, "resume": ""}})
    now = ConfigDict({"checkpoint": {"init_from": "weights", "keep": 3, "resume": "runs/a"}})
    assert config_lib.changes(saved, now) == ["checkpoint.init_from: '' -> 'weights'"]
