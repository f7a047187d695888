"""The layer on eight devices; pytest's own process has two, so that those tests run in another one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from swjax import Layout
from swjax.models import sharding

HERE = Path(__file__).parent


PARTS = ["values", "collectives", "transformations", "losses", "stable_adamw"]


@pytest.mark.parametrize("part", PARTS)
def test_on_eight_devices(part):
    """Runs those tests of tests/eight_devices.py whose names begin with test_<part>."""
    run_on_eight_devices("-k", f"test_{part}")


@pytest.mark.slow
def test_more_on_eight_devices():
    run_on_eight_devices("-m", "slow")


def run_on_eight_devices(*arguments: str):
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            HERE / "eight_devices.py",
            *arguments,
        ],
        env=os.environ
        | {
            # of two counts the last one holds
            "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is what takes time here
        },
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-5000:] + run.stderr[-2000:]


def test_gpus_gather_in_larger_pieces_unless_told_otherwise(monkeypatch):
    def options(platform, fsdp):
        devices = np.array([SimpleNamespace(platform=platform)])
        return sharding.compiler_options(SimpleNamespace(devices=devices, shape={"fsdp": fsdp}))

    gather, scatter = (
        f"xla_gpu_{op}_combine_threshold_bytes" for op in ("all_gather", "reduce_scatter")
    )
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert options("gpu", 1) == options("cpu", 4) == {}
    assert options("gpu", 4) == {gather: "134217728", scatter: "134217728"}
    monkeypatch.setenv("XLA_FLAGS", f"--{gather}=31457280")
    assert options("gpu", 4) == {scatter: "134217728"}


def test_layouts_refuse_other_dtypes_of_sums():
    with pytest.raises(ValueError, match="must be 'float32', 'bfloat16', .* got 'int8'"):
        Layout(reduce_dtype="int8")
