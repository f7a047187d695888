"""The layer on eight devices; pytest's own process has two, so that those tests run in another one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
