"""Whole runs: the files that they write, and that a finished run is not changed."""

import json
import os
import re
import subprocess

import numpy as np
import pytest
from micro_run import command_of, records

from swjax.training import config as config_lib
from swjax.training import loop
from swjax.training.config import ConfigError
from swjax.training.state.checkpoint import lock_workdir


def test_a_run_leaves_everything_behind(reference):
    config, workdir = reference
    assert [r["step"] for r in records(workdir)] == [1, 2, 3, 4, 5, 6]
    first = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("train/loss", "train/learning_rate", "perf/data_wait_frac", "time"):
        assert np.isfinite(first[name])
    assert first["perf/mfu"] is None  # a CPU has no peak in the table
    assert "test/image_to_text_R@1" in json.loads((workdir / "results.json").read_text())["scores"]
    assert "val/image_to_text_R@1" in records(workdir)[-1]
    assert config_lib.changes((workdir / "config.json").read_text(), config) == []
    assert "command: python" in (workdir / "env.txt").read_text()
    steps = sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    assert steps == [4, 6]


def test_a_finished_run_is_left_alone(reference, monkeypatch, capsys):
    config, workdir = reference
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.name != ".lock"}
    monkeypatch.setattr(loop, "train", None)
    assert loop.train_and_evaluate(config, workdir) == 0
    assert "finished after 6 steps" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.name != ".lock"}
    assert {p: t for p, t in after.items() if p.is_file()} == {
        p: t for p, t in before.items() if p.is_file()
    }


def test_a_finished_run_of_another_config_is_not_mistaken(reference, micro):
    _, workdir = reference
    with pytest.raises(ConfigError, match="model.recipe: 'switchback' -> 'standard'"):
        loop.train_and_evaluate(micro(model__recipe="standard"), workdir)
    loop.train_and_evaluate(micro(log__every_steps=3), workdir)  # changes no result


def test_a_workdir_serves_one_process(micro, tmp_path):
    with lock_workdir(tmp_path):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
            loop.train_and_evaluate(micro(), tmp_path)
    lock_workdir(tmp_path).close()  # the lock was released


@pytest.mark.release
def test_train_py_as_a_user_runs_it(tmp_path):
    """Runs train.py with XLA's default optimizations: no program of another test serves it."""
    set_for_tests = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DEFAULT_MATMUL_PRECISION")
    environment = {key: value for key, value in os.environ.items() if key not in set_for_tests}
    workdir, cache = tmp_path / "run", tmp_path / "cache"
    command = command_of(
        workdir,
        report__enabled="true",
        diagnostics__rms="true",
        diagnostics__features="true",
        train__compilation_cache=cache,
    )

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step 6/6  loss " in done.stdout
    for name in (
        "rms/vision/patch_embed/kernel",
        "rms/vision/blocks/attn/q/kernel/0",
        "feature_max_abs/text/0",
    ):
        assert np.isfinite(records(workdir)[-1][f"stability/{name}"])
    results = json.loads((workdir / "results.json").read_text())
    assert results["step"] == 6 and results["skipped"] == 0
    score, chance = (
        results["scores"][f"zeroshot/synthetic_test_{x}"] for x in ("top1", "chance_top1")
    )
    assert re.search(rf"zeroshot/synthetic_test_top1 +{score:.2%} +{chance:.2%}", done.stdout)
    told = done.stdout[done.stdout.index("finished after 6 steps") :]
    assert f"report: {workdir / 'report' / 'index.html'}" in told
    assert (workdir / "report" / "index.html").exists()
