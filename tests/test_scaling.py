"""The scaling benchmark on two CPU devices, its arithmetic and its tables."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import scaling, scaling_profile, scaling_tables
from benchmarks.kernels.timing import wait_for
from swjax.testing import _collectives

ROOT = Path(__file__).parent.parent


def test_cases_of_several_settings():
    """Several devices run every combination; one device, which all-reduces nothing, runs once."""
    flags = "--models vit_b16 --recipes standard --layouts data --devices 1 4 --reduce_once 0 1"
    found = scaling.cases(scaling.parse([*flags.split(), "--xla", "--xla", "a=1", "b=2"]))
    told = [(case["devices"], case.get("reduce_once"), case.get("xla")) for case in found]
    options = {"a": "1", "b": "2"}
    assert told == [
        (1, None, None),
        *((4, once, xla) for once in (None, True) for xla in (None, options)),
    ]


def test_devices_that_train_alone_give_the_row_of_the_slowest(monkeypatch):
    """Each is a process that sees one device; all have compiled before one starts."""
    seen = []

    def one(case, seconds, turn):
        wait_for(turn)
        seen.append(scaling.variables(case)["CUDA_VISIBLE_DEVICES"])
        ms = 10.0 + case["number"]
        return {"step_ms": ms, "samples_per_s": 1e3 / ms, "clocks": {"mhz": [ms]}}

    monkeypatch.setattr(scaling, "in_a_process", one)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    args = scaling.parse(
        ["--layouts=alone", "--devices=4", "--models=vit_h14", "--recipes=standard"]
    )
    ((case, row),) = scaling.measured(scaling.cases(args), args)
    assert sorted(seen) == ["4", "5", "6", "7"] and case["layout"] == "alone"
    assert row["step_ms"] == 13.0 and row["samples_per_s"] == 4 * 1e3 / 13.0
    assert row["each"]["step_ms"] == [10.0, 11.0, 12.0, 13.0]
    monkeypatch.setattr(scaling, "in_a_process", lambda *_: {"error": "out of memory"})
    assert list(scaling.measured([case], args)) == [(case, {"error": "out of memory"})]


@pytest.mark.parametrize("cut", ["", "3, 1"])
def test_clocks_are_means_of_each_gpu(cut, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    lines = f"0, 1800, 690.5\n1, 1700, 600.0\n0, 1900, 700.5\n1, [N/A], 1\n{cut}"
    done = tmp_path / "done"
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\ntouch {done}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(scaling_profile.jax, "default_backend", lambda: "gpu")
    with scaling_profile.clocks() as found:
        while not done.exists():
            time.sleep(0.01)
    assert found == {"mhz": [1850.0, 1700.0], "watts": [695.5, 600.0]}


@pytest.mark.release
def test_one_case_runs_and_is_recorded(tmp_path):
    out = tmp_path / "scaling.json"
    command = [sys.executable, "benchmarks/scaling.py", "--smoke", "--layouts=fsdp", "--devices=2"]
    command = [*command, f"--out={out}", "--timeout=100"]
    kept = {"PYTHONPATH": str(ROOT)} if "PYTHONPATH" in os.environ else {}
    for _ in range(2):  # the second run skips the recorded case
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | kept, capture_output=True, text=True, check=True
        )
    assert "tiny" in done.stdout and "samples_per_s" not in done.stdout
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert "error" not in row, row
    assert row["samples_per_s"] > 0 and row["compiled_gib"] > 0
    assert row["collective_mb"]["all-gather"]["s8"] > 0
    assert str(tmp_path) not in out.read_text() and "--out=scaling.json" in result["command"]


@pytest.mark.release
def test_a_case_that_fails_or_hangs_ends_alone():
    case = {"devices": 1, "smoke": True, "recipe": "nothing", "model": "tiny", "layout": "one", "batch": 4,
            "remat": "none", "scan": False, "steps": 1}  # fmt: skip
    args = scaling.parse(["--timeout=100", "--at_once=2"])
    assert ["unknown" in row["error"] for _, row in scaling.measured([case] * 2, args)] == [
        True
    ] * 2
    args.timeout = 0.01
    ((_, row),) = scaling.measured([case], args)
    assert row == {"error": "not done after 0 s; done: nothing yet"}


def row(devices, rate, layout="data"):
    case = {"model": "vit_h14", "recipe": "switchback", "layout": layout, "devices": devices}
    return {
        "case": case,
        "samples_per_s": rate,
        "step_ms": 1.0,
        "collective_ms": 0.5,
        "exposed_collective_ms": 0.1,
        "collective_mb": {"all-gather": {"s8": 931.0}},
        "peak_gib": 40.0,
    }


def test_tables():
    rows = [row(1, 100.0, "one"), row(4, 380.0), row(4, 360.0, "fsdp")]
    text = scaling_tables.table([*rows, {"case": rows[0]["case"], "error": "not done after 280 s"}])
    assert "|vit_h14|int8|data|4|380.0|0.950|" in text and "|931 s8|" in text and "280 s" in text
    places = {"one": 1, "fsdp": 2}
    curves = [
        {
            "case": {"losses": True, "recipe": "switchback", "layout": layout, "devices": n},
            "loss": [4.0, 2.0 + n / 100],
        }
        for layout, n in places.items()
    ]
    assert "on 2 devices, fsdp and on 1 device" in scaling_tables.table(curves)
    assert scaling_tables.table(curves).endswith(
        "by at most 0.0e+00 in 1 steps, 5.0e-03 in 2 steps"
    )


def test_results_of_asynchronous_collectives_are_counted_once():
    """XLA for GPUs lists operands and results in `-start` operations, results alone in `-done` ones."""
    hlo = """
  %a = (bf16[32,8]{1,0}, s8[4,8]{1,0}, bf16[64,8]{1,0}, s8[8,8]{1,0}) all-gather-start(%x, %y)
  %b = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%z)
  %c = ((f32[3]{0}, f32[5]{0}), (f32[3]{0}, f32[5]{0})) all-reduce-start(%v, %w)
  %d = ((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%u)
  %e = (bf16[64,8]{1,0}, s8[8,8]{1,0}) all-gather-done(%a)
  %f = f32[4]{0} collective-permute-done(%b)
  %g = (f32[3]{0}, f32[5]{0}) all-reduce-done(%c)
  %h = f32[4]{0} reduce-scatter-done(%d)
  %i = f32[] all-reduce(%y), to_apply=%add
"""
    assert [tuple(c) for c in _collectives(hlo)] == [
        ("all-gather", "bf16", (64, 8)),
        ("all-gather", "s8", (8, 8)),
        ("collective-permute", "f32", (4,)),
        ("all-reduce", "f32", (3,)),
        ("all-reduce", "f32", (5,)),
        ("reduce-scatter", "f32", (4,)),
        ("all-reduce", "f32", ()),
    ]
