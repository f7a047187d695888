"""The studies in benchmarks/studies: each runs in its shortest form, and resumes where it was interrupted."""

import doctest
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

STUDIES = Path(__file__).resolve().parent.parent / "benchmarks" / "studies"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDIES))
    import study

    return study


@pytest.mark.parametrize("name", ["study", "paired", "spikes", "language", "python_text"])
def test_examples(study, name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed


def test_spikes_that_follow_an_rms_event(study, capsys):
    """The counts of the recorded sweep are those in docs/accuracy.md."""
    results = STUDIES.parent / "results" / "spikes_gpu.json"
    importlib.import_module("spikes").main([f"--merge={results}"])
    told = "patch: 8 of 15 loss events follow an RMS event; 0.9 by chance, p = 2e-07"
    assert told in capsys.readouterr().out


def test_spikes_in_int8_and_bf16(study, capsys):
    """The counts of the recorded pairs are those in docs/accuracy.md."""
    results = STUDIES.parent / "results" / "spikes_recipes.json"
    importlib.import_module("spikes").main([f"--merge={results}"])
    told = (
        "switchback, 52 pairs: 10 spikes, standard 8; spikes of a run +0.038 +- 0.161 over 13 seeds"
    )
    assert told in capsys.readouterr().out


@pytest.mark.release
@pytest.mark.parametrize(
    "study_command",
    [
        "emoji",
        "icons",
        "icons_optimizers",
        "optimizers",
        "spikes",
        "weight_gradients",
        "language main",
        "language planted",
        "language rates",
    ],
)
def test_shortest_form(study_command, tmp_path):
    out = tmp_path / "out.json"
    name, *chosen = study_command.split()
    command = [sys.executable, STUDIES / f"{name}.py", *chosen, "--smoke", f"--out={out}"]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["finished"] and result["runs"]
    assert f"benchmarks/studies/{name}.py" in result["command"]


def test_a_study_goes_on_with_what_it_has(study, tmp_path):
    done = []

    def run(i):
        done.append(i)
        if i == 2 and done.count(2) == 1:
            raise KeyboardInterrupt
        return {"i": i}

    def carry_out(*flags):
        args = study.parser("").parse_args([f"--out={tmp_path}/out.json", *flags])
        runs = [({"i": i}, lambda i=i: run(i)) for i in range(4)]
        return study.carry_out(args, runs, lambda runs: None)

    assert carry_out("--minutes=0")["finished"] is False and done == []
    with pytest.raises(KeyboardInterrupt):
        carry_out()
    result = carry_out()
    assert done == [0, 1, 2, 2, 3] and result["finished"]
    assert [run["result"]["i"] for run in result["runs"]] == [0, 1, 2, 3]


def test_parts_of_a_study_are_put_together(study, tmp_path):
    """Merged studies contain each run once; a loss that is not finite is stored as valid JSON."""
    for name, numbers in {"a": (0, 1), "b": (1, 2)}.items():
        runs = [({"i": i}, lambda i=i: {"loss": [0.5, math.nan], "i": i}) for i in numbers]
        args = study.parser("").parse_args([f"--out={tmp_path}/{name}.json"])
        study.carry_out(args, runs, lambda runs: None)
    text = (tmp_path / "a.json").read_text()
    assert "NaN" not in text and len(text.splitlines()) == 4
    files = [f"{tmp_path}/a.json", f"{tmp_path}/b.json"]
    args = study.parser("").parse_args(["--merge", *files, f"--out={tmp_path}/all.json"])
    seen = []
    merged = study.carry_out(args, (), seen.extend)
    assert [run["key"]["i"] for run in seen] == [0, 1, 2] and merged["finished"]
    assert study.load(tmp_path / "all.json")["parts"] == merged["parts"] and len(seen) == 3
    assert math.isnan(seen[2]["result"]["loss"][1])


def test_rows_keep_the_commands_that_made_them(study, tmp_path, monkeypatch):
    """A file that another command continues names both; merges of merges name each once."""
    args = study.parser("").parse_args([f"--out={tmp_path}/a.json"])
    for i, name in enumerate("abb"):
        monkeypatch.setattr(sys, "argv", ["study", name])
        study.carry_out(args, [({"i": i}, dict)], lambda runs: None)
    for _ in range(2):
        study.write(args.out, study.merge([args.out, args.out]))
    merged = study.load(args.out)
    assert [part["command"][-1] for part in merged["parts"]] == ["a", "b"]


def test_processes_divide_the_runs(study, tmp_path):
    """Arms that share steps go to one process, which keeps its claims when it is interrupted."""
    done = []

    def runs(name, stop):
        for seed, shared, arm in itertools.product((0, 1), (0, 5), "ab"):
            key = {"seed": seed, "shared": shared, "arm": arm}
            yield key, lambda key=key: done.append((name, *key.values())) or {}
            if stop and len(done) == stop:
                raise KeyboardInterrupt

    def carry_out(name, stop=0):
        flags = [f"--out={tmp_path}/{name}.json", f"--claims={tmp_path}/claims"]
        args = study.parser("").parse_args(flags)
        return study.carry_out(args, runs(name, stop), lambda runs: None)

    with pytest.raises(KeyboardInterrupt):
        carry_out("x", stop=3)
    assert done == [("x", 0, 0, "a"), ("x", 0, 0, "b"), ("x", 0, 5, "a")]
    assert carry_out("y")["finished"] and carry_out("x")["finished"]
    assert done[3:7] == [("y", 1, shared, arm) for shared in (0, 5) for arm in "ab"]
    assert done[7:] == [("x", 0, 5, "b")]
    owners = sorted(claim.read_text() for claim in (tmp_path / "claims").iterdir())
    assert owners == [f"{tmp_path}/{name}.json" for name in "xxxyyy"]
    with pytest.raises(SystemExit, match="--claims needs --out"):
        study.carry_out(study.parser("").parse_args(["--claims=x"]), (), print)


def test_interval_is_students(study):
    mean, half = study.interval([0.1, 0.2, 0.3])
    assert mean == pytest.approx(0.2) and half == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)


def test_interval_of_a_run_that_diverged(study):
    """The tables of studies that were finished ended in an AttributeError of `statistics`."""
    for lost in (float("nan"), float("inf")):
        mean, half = study.interval([0.1, lost, 0.3])
        assert not np.isfinite(mean) and np.isnan(half)


def paired_runs(rate=1e-3, **scores_of_arms):
    """Returns runs in which all scores of a seed and arm are equal."""
    names = ("top1", "image_to_text_R@10", "text_to_image_R@10")
    return [
        {
            "key": {"rate": rate, "seed": seed, "arm": arm},
            "result": {"loss": [2.0, 1.0], "final_loss": value}
            | {split: dict.fromkeys(names, value) for split in ("val", "test")},
        }
        for arm, values in scores_of_arms.items()
        for seed, value in enumerate(values)
    ]


def test_runs_of_the_same_seed_are_compared(study, capsys):
    """Arms are compared seed by seed; a seed that one arm lacks is ignored."""
    paired = importlib.import_module("paired")
    some = paired_runs(standard=[0.1, 0.5, 0.3, 0.9], switchback=[0.11, 0.52, 0.33])
    assert paired.differences(some, "switchback", "test", "top1") == pytest.approx([1, 2, 3])
    paired.table(some)
    told = capsys.readouterr().out
    assert "switchback minus standard, points" in told
    assert "test top1: +2.00 +- 2.48 (3 pairs, 3 above, 0 below)" in told
    assert "final loss, nats: +0.0200 +- 0.0248" in told
    assert "val top1: 32.00" in told and "val top1: +" not in told


def test_p_values_of_a_file(study, tmp_path, capsys):
    """Pairs of all settings are taken together, with the arm of --base."""
    paired = importlib.import_module("paired")
    some = paired_runs(switchback=[0.1, 0.5], llm_int8=[0.11, 0.52])
    some += paired_runs(rate=2e-3, switchback=[0.3], llm_int8=[0.33])
    study.write(tmp_path / "runs.json", study.new() | {"runs": some})
    paired.main([str(tmp_path / "runs.json"), "--base=switchback"])
    told = capsys.readouterr().out
    assert "final loss, nats: +0.0200 +- 0.0248 (3 pairs, 3 above, 0 below), p = 0.074" in told
    assert (
        "test top1, points: +2.00 +- 2.48 (3 pairs, 3 above, 0 below), p = 0.074, corrected" in told
    )
    assert "standard" not in told
    with pytest.raises(SystemExit):
        paired.main([str(tmp_path / "runs.json")])
    assert "--base=standard is no arm of" in capsys.readouterr().err


def test_runs_with_other_settings_are_not_compared(study):
    paired = importlib.import_module("paired")
    some = paired_runs(standard=[0.1]) + paired_runs(switchback=[0.2], rate=2e-3)
    assert list(paired.compared(some)) == []
    assert list(paired.alike(some)) == ["rate 0.001", "rate 0.002"]


def test_runs_that_start_apart_are_no_pair(study):
    """The shared steps of another machine may end elsewhere."""
    paired = importlib.import_module("paired")
    some = paired_runs(standard=[0.1, 0.5], switchback=[0.11, 0.52])
    starts = [paired.fingerprint({"w": np.full(3, value)}) for value in (1, 2, 1, 3)]
    for run, start in zip(some, starts, strict=True):
        run["result"]["start"] = start
    with pytest.raises(ValueError, match="switchback and standard of .* must start from the same"):
        paired.differences(some, "switchback", "test", "top1")


def test_shared_steps_are_kept_in_a_file(study, tmp_path):
    """Another process continues from the same state; its arm does not matter, its seed does."""
    engine, paired = importlib.import_module("engine"), importlib.import_module("paired")
    done = []

    class Trainer:
        def init(self, hyper):
            return {"w": jnp.zeros(3)}, (jnp.int32(0),)

        def begin(self, hyper, steps):
            done.append(hyper)
            return {"w": np.arange(3.0, dtype=np.float32)}, (np.int32(steps),)

    path = paired.state_file(tmp_path, {"seed": 0, "arm": "standard"})
    assert path == paired.state_file(tmp_path, {"seed": 0, "arm": "switchback"})
    assert path != paired.state_file(tmp_path, {"seed": 1, "arm": "standard"})
    for trainer in (Trainer(), Trainer()):
        params, (count,) = engine.begin(trainer, 0, 50, path)
        np.testing.assert_array_equal(params["w"], np.arange(3.0))
        assert count == 50 and len(done) == 1
    assert paired.state_file(None, {"seed": 0}) is None


def language_runs(**values_of_arms):
    return [
        {"key": {"arm": arm, "seed": seed}, "result": {"val": value, "start": "corpus"}}
        for arm, values in values_of_arms.items()
        for seed, value in enumerate(values)
    ]


def test_language_models_are_compared_with_the_mean_of_bf16_and_its_control(study):
    """Seeds without all of them are ignored, and a run that diverged is counted."""
    language = importlib.import_module("language")
    some = language_runs(
        bf16=[0.70, 0.60, 0.64, 0.66, 0.5],
        control=[0.702, 0.602, 0.642, 0.662],
        switchback=[0.7012, 0.6012, 0.6408, 0.6608, 0.5],
        llm_int8=[0.711, 0.611, 0.651, math.nan],
    )
    control, switchback, llm_int8 = language.summary(some)
    assert control["mean"] == pytest.approx(0.002) and control["pairs"] == 4
    assert switchback["mean"] == pytest.approx(0, abs=1e-9) and switchback["pairs"] == 4
    assert language.verdict(switchback) == "equivalent, not worse"
    assert llm_int8["mean"] == pytest.approx(0.01) and llm_int8["pairs"] == 3
    assert language.verdict(llm_int8) == "diverged"  # three equal differences have no t-test


def test_planted_outliers_leave_the_function_as_it_is(study):
    """Six channels after each norm, or within each SwiGLU, grow; the model's logits do not change."""
    import jax
    from flax import nnx

    language = importlib.import_module("language")
    from examples.language_model.model import Config, Llama

    config = Config(16, 32, 2, 1, 1, dtype="float32")
    model = nnx.jit(lambda: Llama(config, rngs=nnx.Rngs(0)))()
    logits = nnx.jit(lambda model: model(jnp.arange(8)[None]))
    before = logits(model)
    plant = jax.jit(language.planted, static_argnames=("gain", "place"))
    up = np.asarray(model.blocks[0].mlp.up.kernel[...])
    for place in ("norm", "hidden"):
        nnx.update(model, plant(nnx.to_pure_dict(nnx.state(model)), gain=30.0, place=place))
        np.testing.assert_allclose(logits(model), before, atol=1e-5)
    scale = model.blocks[0].mlp_norm.scale[...]
    assert sorted(set(scale.tolist())) == [1, 30] and scale.tolist().count(30) == 6
    columns = np.max(model.blocks[0].mlp.up.kernel[...] / up, 0).round().tolist()
    assert columns.count(30) == 6 and columns.count(1) == len(columns) - 6


def test_a_corpus_has_no_copies_and_holds_out_packages(study, tmp_path):
    text = importlib.import_module("python_text")
    for package in ("one", "two", "three"):
        folder = tmp_path / "packages" / package
        folder.mkdir(parents=True)
        lines = [f"{package} = {i}" for i in range(30)]
        (folder / "a.py").write_text("\n".join(lines))
        (folder / "copy.py").write_text("\n".join(["# a copy", *lines[:-1]]))
        (folder / "other.md").write_text(f"# {package}\n")
        (folder / "binary.txt").write_bytes(b"\0\1")
    corpus = text.load(tmp_path / "cache", roots=[tmp_path / "packages"])
    assert corpus.manifest["files"] == {"found": 12, "read": 9, "kept": 6}
    (held_out,) = corpus.manifest["held_out"]
    for name in corpus.manifest["packages"]:
        own, other = corpus.val, corpus.train
        if name != held_out:
            own, other = other, own
        assert bytes(own).count(f"{name} = 7\n".encode()) == 1
        assert name.encode() not in bytes(other)
    (tmp_path / "cache" / "val.bin").write_bytes(b"changed")
    with pytest.raises(SystemExit, match="is not what manifest.json says: delete"):
        text.load(tmp_path / "cache")
