"""Programs for chips that this machine lacks: the compilers of TPUs and NVIDIA GPUs need no device.

They need libtpu, or jax-cuda13-pjrt, jax-cuda13-plugin and nvidia-cuda-nvcc 13.5; without them the tests are
skipped.
"""

import collections
import importlib.util
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from micro_run import MICRO, ROOT, batch_of, step_of

import swjax
from swjax.kernels import chips, dispatch, saved_programs, targets
from swjax.recipes import RECIPES
from swjax.training.config import load

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("compiles_as_users_do"),
    pytest.mark.filterwarnings(
        "ignore:swjax. (products in block formats are emulated|.* not faster)"
    ),
]

# Otherwise the compiler for TPUs refuses all processes but one, because they would share a chip.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
TOKENS, K, N = 1024, 512, 1024
FEW = ("switchback", "switchback_hadamard", "fp8_switchback", "mxfp8")
# {topology: (chip, recipes)}
TPUS = {"v5e:2x2": tuple(RECIPES), "v6e:2x2": FEW, "tpu7x:2x2x1": FEW}


def topology(platform, name, **options):
    try:
        from jax.experimental import topologies

        return topologies.get_topology_desc(platform=platform, topology_name=name, **options)
    except Exception as error:
        if importlib.util.find_spec("libtpu") and platform == "tpu":
            raise
        pytest.skip(f"needs a compiler for {platform}: {error!s:.100}")


def compiled(recipe, sharding_of, layout=None, shape=(TOKENS, K, N), compiler_options=None):
    """The optimized HLO of a layer, forward and backward, for the devices of the shardings."""
    tokens, k, n = shape
    (x, w, g) = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype, sharding in zip(
            ((tokens, k), (k, n), (tokens, n)),
            (jnp.bfloat16, jnp.float32, jnp.bfloat16),
            sharding_of,
        )
    )

    def layer(x, w, g):
        options = {"recipe": recipe, "layout": layout}
        y, vjp = jax.vjp(lambda x, w: swjax.switchback(x, w, **options), x, w)
        return y, *vjp(g)

    platform = {"tpu": "tpu", "gpu": "cuda"}[targets.platform()]
    lowered = jax.jit(layer).trace(x, w, g).lower(lowering_platforms=(platform,))
    return lowered.compile(compiler_options).as_text()


KERNEL = re.compile(r'%(swjax_\w+)[^ ]* = .* custom_call_target="tpu_custom_call"')


def products(text):
    """Counts the dtypes of the operands of XLA's products in optimized HLO."""
    types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    pairs = re.findall(r" (?:convolution|dot)\((%[\w.-]+), (%[\w.-]+)\)", text)
    return collections.Counter(tuple(types[name] for name in pair) for pair in pairs)


def operand(quantizer):
    """HLO's name for the dtype of what a quantizer makes."""
    if quantizer.in_blocks:
        return "f32" if quantizer.scale == "float32" else "bf16"
    return {"int8": "s8", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}[quantizer.dtype]


@pytest.mark.parametrize(
    "name, recipe", [(name, recipe) for name, recipes in TPUS.items() for recipe in recipes]
)
def test_layers_compile_for_tpus(name, recipe):
    device = topology("tpu", name).devices[0]
    with targets.compiling_for(device):
        text = compiled(recipe, (jax.sharding.SingleDeviceSharding(device),) * 3)
    found, chip = products(text), chips.find(device.device_kind)
    fwd = RECIPES[recipe].fwd
    of_rotation = fwd is not None and fwd.lhs.rotation > 1  # it rotates the float32 weight
    wanted = set()
    for product in (RECIPES[recipe].fwd, RECIPES[recipe].dgrad):
        if product is not None:
            wanted |= {operand(product.lhs), operand(product.rhs)}
    assert ("f32", "f32") not in found or of_rotation or "f32" in wanted  # emulated scales
    if "s8" in wanted and chip.int8:
        assert found["s8", "s8"] + len(KERNEL.findall(text)) >= 2, found
    if any(each.startswith("f8") for each in wanted) and chip.fp8:
        assert any(each.startswith("f8") for pair in found for each in pair), found


@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2"])
def test_an_mlp_on_tpus_is_four_kernels_and_two_products(name):
    """The weight gradients are XLA's. Kernels that overflow VMEM do not compile."""
    device = topology("tpu", name).devices[0]
    placed = jax.sharding.SingleDeviceSharding(device)
    array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
    x, k, n = array(1024, 1280, dtype=jnp.bfloat16), 1280, 5120

    def mlp(x, scale, offset, w1, b1, w2, b2):
        prologue = swjax.LayerNorm(scale, offset)
        return swjax.mlp(x, w1, b1, w2, b2, prologue=prologue, add_input=True)

    def both_ways(*arguments):
        y, vjp = jax.vjp(mlp, *arguments)
        return y, *vjp(y)

    vectors = array(k), array(k), array(k, n), array(n), array(n, k), array(k)
    with targets.compiling_for(device):
        traced = jax.jit(both_ways).trace(x, *vectors)
        text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    assert sorted(KERNEL.findall(text)) == [
        "swjax_gelu_product",
        "swjax_gelu_product_backward",
        "swjax_layer_norm_product",
        "swjax_layer_norm_product_backward",
    ]
    assert products(text) == {("bf16", "bf16"): 2}


def test_a_clip_step_compiles_for_a_tpu():
    """The trainer's step with the recipe that `auto` chooses: two int8 products for each of 12 layers."""
    changes = MICRO | {"train.compilation_cache": "", "model.dtype": "bfloat16"}
    changes["model.recipe"] = "auto"
    config = load(str(ROOT / "configs" / "openmoji.py"), [(k, str(v)) for k, v in changes.items()])
    device = topology("tpu", "v5e:2x2").devices[0]
    placed = jax.sharding.SingleDeviceSharding(device)
    put = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), tree
    )
    with targets.compiling_for(device):
        init, step = step_of(config)
        batch = jax.tree.map(jnp.asarray, batch_of(config))
        traced = jax.jit(step).trace(put(jax.eval_shape(init)), put(batch))
        with jax.numpy_dtype_promotion("standard"):  # JAX's attention needs it in the lowering
            text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    assert products(text)["s8", "s8"] == 2 * 12


def test_weights_are_gathered_in_int8_on_tpus():
    mesh = jax.sharding.Mesh(topology("tpu", "v5e:4x4").devices, ("fsdp",))
    layout = swjax.Layout(P("fsdp"), P("fsdp"))
    sharded = NamedSharding(mesh, P("fsdp"))
    with jax.set_mesh(mesh):  # the mesh names the chip
        assert targets.platform() == "tpu"
        text = compiled("switchback", (sharded,) * 3, layout, shape=(4096, K, N))
    gathers = re.findall(r"= \(?(\w+)\[(\d+),(\d+)\][^=]* all-gather(?:-start)?\(", text)
    matrices = [dtype for dtype, rows, columns in gathers if int(rows) * int(columns) > K]
    assert matrices and set(matrices) == {"s8"}, gathers
    assert len(KERNEL.findall(text)) == 2  # forward and input gradient


TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: {chip.core_count}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  memory_bandwidth: 8000000000000  l2_cache_size: 130000000  clock_rate_ghz: 1.9
  device_memory_size: 80000000000
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA {chip.name}"
"""


@pytest.mark.parametrize(
    "name, recipe, kernels",
    [
        ("H100", "switchback", {"triton": 3, "mosaic_gpu": 3}),
        ("B200", "switchback", {"triton": 5}),
        ("B300", "fp8_switchback", {"triton": 5}),
        ("RTX 5090", "switchback", {"triton": 5}),
        ("B200", "nvfp4", {}),
        ("B200", "mxfp8", {}),
    ],
)
def test_layers_compile_for_nvidia_gpus(name, recipe, kernels, monkeypatch):
    pytest.importorskip("jax_triton", reason="needs jax-triton, which is for Python 3.12")
    pytest.importorskip("jax_cuda13_plugin", reason="needs the jax-cuda13-plugin")
    package = importlib.util.find_spec("nvidia")
    places = package.submodule_search_locations if package else []
    folders = (Path(place, "cu13", "bin") for place in places or ())
    folder = next((each for each in folders if (each / "ptxas").exists()), None)
    if folder is None:
        pytest.skip("needs the ptxas of nvidia-cuda-nvcc 13.5")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(saved_programs, "_folder", lambda: None)
    chip = chips.named(name)
    major, minor = chip.compute_capability.split(".")
    config = TARGET_CONFIG.format(chip=chip, major=major, minor=minor)
    options = {"target_config": config, "topology": "1x1x1"}
    device = topology("cuda", "x", **options).devices[0]
    with targets.compiling_for(device) as target, dispatch.record() as calls:
        assert target.compute_capability == chip.compute_capability
        placed = (jax.sharding.SingleDeviceSharding(device),) * 3
        triton = {"xla_gpu_enable_triton_gemm": not kernels}  # multiplies blocks
        text = compiled(recipe, placed, shape=(4096, 1280, 5120), compiler_options=triton)
    chosen = collections.Counter(implementation for _, implementation in calls)
    chosen.pop("xla", None)
    assert chosen == kernels
    custom = collections.Counter(re.findall(r'custom_call_target="(triton|mosaic_gpu)', text))
    assert custom == kernels
    if not kernels:
        # Matrix units read blocks along the last axis in memory.
        scaled = re.findall(
            r"\[[\d,]+\]\{1,0\} scaled-dot\(.*lhs_contracting_dims=\{1\}, rhs_con", text
        )
        assert len(scaled) == 3 and text.count("f4e2m1fn[" if recipe == "nvfp4" else "f8e8m0fnu[")
