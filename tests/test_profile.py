"""The profile of a run: its steps and messages, no effect on results; device time by kind of kernel."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from micro_run import as_interrupted, assert_same_bits, final_state, records, train

from swjax.diagnostics import device_time
from swjax.diagnostics.device_time import Kernel
from swjax.training.config import ConfigError

# {name: kind} of kernels in benchmarks/results, of XLA's operations on CPUs, and of NCCL's kernels.
NAMES = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x": "attention",
    "_attention_backward_kernel": "attention",
    "attention_forward_kernel_mosaic_gpu_kernel": "attention",
    "attention_backward_kernel_mosaic_gpu_kernel": "attention",
    "matmul_kernel_mosaic_gpu_kernel": "quantized products",
    "matmul_sum_kernel_mosaic_gpu_kernel": "quantized products",
    "_matmul_kernel": "quantized products",
    "weight_gradient_kernel_mosaic_gpu_kernel": "weight gradients",
    "_norm_backward_kernel": "quantizers and norms",
    "_gated_backward_kernel": "quantizers and norms",
    "_quantize_rows_kernel": "quantizers and norms",
    "_gelu_kernel": "quantizers and norms",
    "nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT": "products",
    "gemm_fusion_dot_17": "products",
    "ynn_fusion.2": "products",
    "dot_general.104": "products",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "collectives",
    "all-reduce.3": "collectives",
    "all_gather.10": "collectives",
    "all-to-all": "collectives",
    "MemcpyD2D": "copies",
    "loop_add_fusion_94": "other",
    "input_reduce_fusion_65": "other",
}


def profiled(micro, workdir, steps: str, **changes):
    """Trains a very small run; returns (the folder of its profile, the exit code)."""
    config = micro(train__profile_steps=steps, **changes)
    return workdir / "profile", train(config, workdir)


@pytest.mark.parametrize("name, kind", NAMES.items())
def test_kernels_are_classified_by_name(name, kind):
    assert device_time.kind_of(name) == kind


def test_device_time_is_a_mean_over_devices_and_steps():
    one = [Kernel("ncclAllGather", 0, 4e6), Kernel("nvjet", 2e6, 6e6), Kernel("sum", 8e6, 9e6)]
    two = [Kernel("ncclAllGather", 5e6, 9e6)]
    time = device_time.device_time([one, two], steps=2)
    assert time.kinds == {"collectives": 2.0, "products": 1.0, "other": 0.25}
    assert time.exposed == (2 + 4) / 4  # on device 1 when "nvjet" does not run, on device 2 always
    assert time.idle == 2 / 4 and time.idle_after == {"nvjet": 0.5}
    assert time.elapsed == (9 + 4) / 4


def test_a_trace_without_kernels_has_no_device_time(tmp_path):
    assert device_time.read_trace(tmp_path) == []
    with pytest.raises(ValueError, match="has no kernels"):
        device_time.device_time([], steps=1)


@pytest.mark.parametrize("steps", [0, -1])
def test_device_time_needs_a_step(steps):
    with pytest.raises(ValueError, match=f"^steps must be at least 1, got {steps}: "):
        device_time.device_time([[Kernel("nvjet", 0, 1)]], steps=steps)


def test_a_missing_or_damaged_trace_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="^folder '.*missing' does not exist .* no trace: "):
        device_time.read_trace(tmp_path / "missing")
    (tmp_path / "host.xplane.pb").write_bytes(b"\x0a\xff\x01truncated")
    with pytest.raises(ValueError, match="^trace '.*host.xplane.pb' .* complete, got Failed .*: "):
        device_time.read_trace(tmp_path)


def test_operations_in_a_loop_are_counted_and_the_loop_is_not(tmp_path):
    @jax.jit
    def loop(x):
        return jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x @ x), x)

    x = jnp.ones((64, 64))
    loop(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        loop(x).block_until_ready()
    (kernels,) = device_time.read_trace(tmp_path)
    time = device_time.device_time([kernels], steps=1)
    assert len(kernels) >= 50 and not any(kernel.name.startswith("while") for kernel in kernels)
    assert time.kinds["products"] > 0
    assert all(a.start <= b.start for a, b in itertools.pairwise(kernels))


@pytest.mark.release
def test_a_profiled_run_computes_the_same_bits(micro, reference, tmp_path, capsys):
    profile, code = profiled(micro, tmp_path, "3,5")
    assert code == 0
    assert records(tmp_path) == records(reference[1])
    for mine, theirs in zip(final_state(micro(), tmp_path), final_state(*reference), strict=True):
        assert_same_bits(mine, theirs)
    summary = (profile / "summary.txt").read_text()
    assert summary in capsys.readouterr().out
    assert summary.startswith("profile of steps 3 to 5, mean of ")
    for kind in ("products", "other", "idle", "elapsed"):
        assert f"\n  {kind} " in summary
    assert summary.count("\n") < 24 and max(map(len, summary.splitlines()[1:])) < 100
    assert list(profile.glob("plugins/profile/*/*.xplane.pb"))
    assert list(profile.glob("plugins/profile/*/*.trace.json.gz"))
    assert (profile / "memory.prof").stat().st_size


def test_a_trace_ends_with_the_run(micro, tmp_path):
    profile, code = profiled(micro, tmp_path, "6,6")
    assert code == 0
    assert (profile / "summary.txt").read_text().startswith("profile of step 6,")


@pytest.mark.release
def test_an_interrupted_trace_tells_what_it_has(micro, tmp_path):
    config = micro(train__profile_steps="2,6")
    assert train(config, tmp_path, after=3) == 0
    summary = (tmp_path / "profile" / "summary.txt").read_text()
    assert summary.startswith("profile of steps 2 to 4,")


@pytest.mark.release
def test_a_run_past_the_range_traces_nothing_and_says_so(micro, reference, tmp_path, capsys):
    as_interrupted(reference[1], tmp_path / "run")
    profile, code = profiled(micro, tmp_path / "run", "2,5")
    assert code == 0 and not profile.exists()
    assert "profile_steps=2,5: no trace, because this process starts with step 5" in (
        capsys.readouterr().out
    )


def test_a_range_past_the_run_is_refused(micro, tmp_path):
    with pytest.raises(ConfigError, match=r"profile_steps=\(3, 9\) must end by the last step, 6"):
        profiled(micro, tmp_path, "3,9")
