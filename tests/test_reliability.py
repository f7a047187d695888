"""Short forms of benchmarks.reliability; docs/reliability.md has the results of the long ones."""

import ast
import sys

import jax
import pytest
from micro_run import ENVIRONMENT


@pytest.mark.release
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path, monkeypatch, shared_cache):
    """Its processes compile the same programs as the micro run, so that all share one cache."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "cache").symlink_to(shared_cache)
    from benchmarks.reliability import kills

    result = kills.measure(tmp_path, kills=1, terms=0, steps=20, seed=1, workers=1)
    assert result["ok"] and result["runs_identical"] == 1, result
    assert result["compared"][0]["arrays"] > 50
    assert result["compared"][0]["steps_recorded"] == [20, 20]


@pytest.mark.release
def test_where_a_run_resumes_is_read_from_its_output(reference, tmp_path, capsys):
    from micro_run import as_interrupted, train

    from benchmarks.reliability.runs import resumed_at

    config, finished = reference
    as_interrupted(finished, tmp_path / "run")
    assert train(config, tmp_path / "run") == 0
    assert resumed_at(capsys.readouterr().out) == 4
    assert resumed_at("step 1 took 3 s") is None


@pytest.mark.filterwarnings("ignore")  # Pillow warns about broken images, Orbax about coroutines
def test_malformed_files_are_refused(tmp_path, collect, monkeypatch):
    from benchmarks.reliability import fuzz

    # JAX and Python write no compiled code here, which the fuzzer would take for a file outside its folder.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    result = fuzz.measure(tmp_path, inputs=40, seed=7)
    assert result["ok"], result["first_faults"]
    assert sum(kind.get("refused", 0) for kind in result["results"].values()) > 8


def test_the_fuzzer_sees_what_must_not_happen(tmp_path):
    from benchmarks.reliability.fuzz import attempt, watch

    with watch(tmp_path / "inside") as broken:
        (tmp_path / "outside.txt").write_text("x")
        exec("import pickle; pickle.loads(pickle.dumps(ast.parse))", {"ast": ast})
    assert [event.split()[0] for event in broken] == ["open", "pickle.find_class"]

    def two_lines():
        raise ValueError("one\ntwo")

    assert attempt(two_lines, (ValueError,)).startswith("fault: not one line")
    assert attempt(lambda: {}["key"], (ValueError,)).startswith("fault: KeyError")
