"""The benchmark and the tuner of kernels, on a CPU: tiny shapes, and what is written down."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swjax.kernels import bench_layers

ROOT = Path(__file__).parent.parent


def run(module: str, *flags) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"swjax.kernels.{module}", *map(str, flags)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True
    )


def test_operations(tmp_path):
    out = tmp_path / "bench.json"
    done = run("bench", "--smoke", "--ops", "--peers", f"--out={out}")
    written = json.loads(out.read_text())
    assert written["versions"]["jax"] and "--smoke" in written["command"]
    rows = written["rows"]
    measured = [row for row in rows if row.get("us")]
    assert {"copy", "matmul", "weight_gradient", "quantize rows"} <= {row["op"] for row in measured}
    assert all(
        row["snr_db"] == 200
        for row in measured
        if row["implementation"] == "xla" and row["op"] != "copy"
    )
    skipped = [row for row in rows if row["implementation"] == "triton"]
    assert skipped and all("needs an NVIDIA GPU" in row["error"] for row in skipped)
    assert any(row["implementation"] == "products" for row in rows)  # torch: not here, or no GPU
    assert "quantize rows" in done.stdout.split("copy_share")[-1]  # the table


def test_layers(tmp_path):
    out, plot = tmp_path / "bench.json", tmp_path / "grid.png"
    flags = (
        "--layer",
        "fused",
        "grid",
        "--recipes",
        "switchback",
        f"--out={out}",
        f"--plot={plot}",
    )
    run("bench", "--smoke", *flags)
    rows = json.loads(out.read_text())["rows"]
    ours = [row for row in rows if row["implementation"] == "switchback"]
    assert len(ours) == 6 and all(row["snr_db"] > 30 and row["ratio"] > 0 for row in ours)
    assert plot.stat().st_size > 1000
    assert bench_layers.grid(rows).keys() == {32}


@pytest.mark.parametrize(
    "name",
    ["nvjet_hsh_128x256", "gemm_fusion_dot_3", "_matmul_kernel", "kernel_body_mosaic_gpu_kernel"],
)
def test_names_of_products(name):
    assert bench_layers.PRODUCT.search(name)


@pytest.mark.parametrize("name", ["_row_kernel", "_scale_kernel", "loop_convert_fusion"])
def test_names_of_others(name):
    assert not bench_layers.PRODUCT.search(name)
