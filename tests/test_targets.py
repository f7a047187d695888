"""Programs are traced for the device that they will run on, which need not be the host's."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import swjax
from swjax.kernels import chips, dispatch, saved_programs, targets, tiles

X = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
W = jax.ShapeDtypeStruct((256, 512), jnp.float32)


def mesh_of(platform, kind, size=4):
    try:
        device = type(jax.make_mesh((1,), ("x",)).abstract_mesh.abstract_device)(
            kind, None, platform
        )
    except TypeError:
        device = type(jax.make_mesh((1,), ("x",)).abstract_mesh.abstract_device)(kind, None)
    return AbstractMesh((size,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def test_the_host_is_the_target_by_default():
    target = targets.current()
    assert target.platform == jax.default_backend()
    assert target.device_kind == jax.devices()[0].device_kind


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.name)
def test_a_chip_can_be_named(chip):
    with targets.compiling_for(chip.name) as target:
        assert targets.current() == target
        assert chips.find(target.device_kind) is chip
        assert targets.platform() == chip.platform and targets.device_count() == 1
        if chip.compute_capability:
            assert ".".join(map(str, tiles.compute_capability())) == chip.compute_capability


def test_a_longer_number_is_another_chip():
    assert chips.find("NVIDIA RTX A1000 Laptop GPU") is None
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA A800 40GB Active", "NVIDIA A100X"):
        assert chips.find(kind).name == "A100"


def test_devices_and_meshes_can_be_named():
    device, mesh = jax.devices()[0], jax.make_mesh((1,), ("x",))
    for named in (device, mesh):
        with targets.compiling_for("H100"), targets.compiling_for(named):
            assert targets.platform() == device.platform
    with pytest.raises(ValueError, match="must be one of V100, .* got 'H900'"):
        with targets.compiling_for("H900"):
            pass
    with pytest.raises(ValueError, match="needs the name of a chip"):
        with targets.compiling_for(3):
            pass


def test_a_mesh_in_context_names_its_devices():
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v5 lite")):
        assert targets.platform() == "tpu" and targets.device_count() == 4
    with jax.sharding.use_abstract_mesh(mesh_of("gpu", "NVIDIA B200")):
        assert tiles.compute_capability() == (10, 0)
        with targets.compiling_for("H100"):  # more specific than the mesh
            assert tiles.compute_capability() == (9, 0)


def test_a_default_device_is_the_target(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert targets.platform() == "gpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert targets.platform() == "cpu"


@pytest.mark.filterwarnings("ignore:swjax. .* products are not faster")  # on that TPU
def test_functions_are_traced_again_for_another_target():
    """XLA for CPUs multiplies fp8 as float32, for others as bfloat16."""
    layer = jax.jit(lambda x, w: swjax.switchback(x, w, recipe="fp8_switchback"))
    text = lambda: layer.trace(X, W).jaxpr.pretty_print()
    here = text()
    with targets.compiling_for("TPU v7"):
        there = text()
    assert here.count("bf16[256,512]") < there.count("bf16[256,512]")
    assert text() == here


def test_a_host_without_gpu_lowers_kernels_for_cuda(monkeypatch):
    pytest.importorskip("jax_triton", reason="needs jax-triton, which is for Python 3.12")
    pytest.importorskip("jax_cuda13_plugin", reason="needs the jax-cuda13-plugin")
    monkeypatch.setattr(saved_programs, "_folder", lambda: None)
    layer = jax.jit(jax.grad(lambda x, w: swjax.switchback(x, w).sum().astype("float32"), (0, 1)))
    with targets.compiling_for("H100"), dispatch.record() as calls:
        text = layer.trace(X, W).lower(lowering_platforms=("cuda",)).as_text()
    assert {name for _, name in calls} >= {"triton", "mosaic_gpu"}
    assert "triton_kernel_call" in text and "mosaic_gpu" in text
