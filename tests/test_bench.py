"""The benchmark and the tuner of kernels on a CPU with tiny shapes: which rows and entries they write."""

import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import language_models, language_models_flax, language_models_lora
from benchmarks.kernels import bench, timing, tune
from benchmarks.language_models_shapes import SHAPES, check_memory
from swjax.kernels import dispatch, tiles
from swjax.kernels.products.tiles import mosaic_tile
from swjax.testing import collectives

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def run(*flags) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.kernels.bench", *map(str, flags)]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )


@pytest.mark.release
def test_operations(tmp_path):
    out = tmp_path / "bench.json"
    done = run("--smoke", "--ops", f"--out={out}")
    written = json.loads(out.read_text())
    assert written["versions"]["jax"] and "--smoke" in written["command"]
    rows = written["rows"]
    measured = [row for row in rows if row.get("us")]
    operations = {"copy", "matmul", "matmul_sum", "weight_gradient", "quantize rows"}
    assert operations <= {row["op"] for row in measured}
    assert all(
        row["snr_db"] == 200
        for row in measured
        if row["implementation"] == "xla" and row["op"] != "copy"
    )
    skipped = [row for row in rows if row["implementation"] == "triton"]
    assert skipped and all("needs an NVIDIA GPU" in row["error"] for row in skipped)
    assert "quantize rows" in done.stdout.split("copy_share")[-1]  # the table at the end


def test_what_computes_something_else_is_no_peer():
    """Such as a product without scales: the speed-up is not relative to it."""
    same = {"op": "matmul", "shape": "8x8->8", "dtype": "int8", "is_peer": True}
    records = timing.Records(None, 1)
    records.rows = [
        same | {"implementation": "no scales", "us": 1.0, "snr_db": -108.6},
        same | {"implementation": "xla", "us": 4.0, "snr_db": 200.0},
        same | {"implementation": "torch", "us": 6.0},  # has no SNR
    ]
    told = bench.against_peers(records, same | {"us": 2.0})
    assert told == {"ratio": 2.0, "peer": "xla int8"}


@pytest.mark.gpu
def test_times_of_kernels():
    x = timing.random(4096, 1280)
    time = timing.measure(timing.compiled(jnp.negative, x), x)
    assert time.clock == "kernels" and time.us == pytest.approx(sum(time.kernels.values()), rel=0.2)


# --- the tuner ----------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The path of this device's table of tiles, in an empty folder."""
    path = tmp_path / "table.json"
    monkeypatch.setattr(tiles, "table_path", lambda kind: path)
    tiles._read.cache_clear()
    yield path
    tiles._read.cache_clear()


def test_what_is_tuned():
    works = tune.works()
    assert ("rows", "none", "1280") in works and ("mosaic_gpu", "5120x1280") in works
    for work in works.values():
        assert work.rule not in work.candidates
        for tile in work.candidates:
            if isinstance(tile, tiles.RowTile):
                assert tile.chunk & (tile.chunk - 1) == 0 and tile.warps <= 16


def test_every_kernel_that_is_tuned_takes_its_tiles(monkeypatch):
    """Each kernel is traced, not run, with the rule's tile and with a candidate."""
    pytest.importorskip("triton", reason="needs Triton, which is made for Linux only")
    from swjax.kernels.triton_gpu import launcher

    def empty(*arrays, out_type, **options):
        return jax.tree.map(lambda out: jnp.empty(out.shape, out.dtype), out_type)

    monkeypatch.setattr(launcher, "call", empty)
    kinds = {}
    for path, work in tune.works().items():
        kinds.setdefault(path if path[0] == "ragged" else path[:-1], work)
    assert {path[0] for path in kinds} == {
        "rows", "triton", "mosaic_gpu", "implementation", "ragged", "ragged_mosaic_gpu"
    }  # fmt: skip
    for path, work in kinds.items():
        if path[0] != "implementation":
            for tile in (work.rule, work.candidates[0]):
                jax.eval_shape(work.function(tile), *work.arrays)


def test_entries_are_read_by_the_kernels(table):
    works, written = tune.works(), {}
    row, product = works["rows", "gelu", "5120"], works["mosaic_gpu", "5120x1280"]
    gradient = works["implementation", "weight_gradient", "5120x1280"]
    for work, choice in (
        (row, row.candidates[0]),
        (product, product.candidates[0]),
        (gradient, "mosaic_gpu"),
    ):
        tune.enter(written, work, choice)
    table.write_text(json.dumps({"tiles": written}))
    assert tiles.row_tile("gelu", 5120) == row.candidates[0]
    assert tiles.row_tile("gelu", 4096) == tiles.row_rule(4096)
    assert mosaic_tile(n=5120, k=1280) == product.candidates[0]
    key = dispatch.shape_key("weight_gradient", *gradient.arrays)
    assert tiles.preferred_implementation("weight_gradient", key) == "mosaic_gpu"
    for work in (row, product, gradient):
        tune.enter(written, work, None)
    assert not any(leaf for leaf in jax.tree.leaves(written))


@pytest.mark.parametrize(
    ("operation", "arrays", "key"),
    [
        ("matmul", tune.product_arrays(64, 128, 256), "256x128"),
        ("weight_gradient", (jnp.ones((64, 128)), jnp.ones((64, 256))), "256x128"),
        ("gelu_backward", (jnp.ones((64, 128)), jnp.ones((64, 128))), "128"),
        ("gelu_backward", (jnp.ones((2, 32, 128)), jnp.ones((2, 32, 128))), "128"),
        ("layer_norm", (jnp.ones((64, 128)), jnp.ones(128), jnp.ones(128)), "128"),
    ],
)
def test_keys_leave_out_the_tokens(operation, arrays, key):
    assert dispatch.shape_key(operation, *arrays) == key


@pytest.mark.release
def test_the_fastest_correct_candidate_wins():
    def function(name):
        def product(x):
            once = lambda _, y: y @ jnp.eye(len(x))  # multiplies by the identity
            y = x if name == "wrong" else x @ x
            return jax.lax.fori_loop(0, {"rule": 30, "fast": 1, "wrong": 0}[name], once, y)

        return product

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    work = tune.Work(("rows", "none", "256"), "rule", ["wrong", "fast"], function, (x,))
    with tune.ThreadPoolExecutor(2) as pool:
        assert tune.best_candidate(work, tune.programs(pool, work)) == "fast"


@pytest.mark.release
def test_train_step(tmp_path):
    """Times the tiny model's image tower. PyTorch's rows hold an error on a CPU."""
    out = tmp_path / "step.json"
    script = [sys.executable, ROOT / "benchmarks" / "train_step.py"]
    flags = ["--smoke", "--kinds", "encoder", "--peers", "--torchao"]
    flags += ["--modes", "default", "max-autotune"]
    command = [*script, *flags, f"--out={out}"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, env=ENVIRONMENT)
    written = json.loads(out.read_text())
    *peers, ours = written["rows"]
    names = [peer["implementation"] for peer in peers]
    towers = ["timm", "timm torchao int8", "timm torchao float8"]
    modes = ["torch.compile", "torch.compile max-autotune"]
    assert names == [f"{tower} {mode}" for tower in towers for mode in modes]
    assert all(peer["error"] for peer in peers)
    assert ours["images_per_second"] > 0 and ours["memory_gib"] > ours["activations_gib"] > 0
    assert written["command"].startswith("python benchmarks/train_step.py --smoke")


@pytest.mark.parametrize("kind", ["blocks", pytest.param("step", marks=pytest.mark.release)])
def test_language_models(tmp_path, monkeypatch, kind):
    """An arm that fails leaves a row with its error, and the run goes on."""
    monkeypatch.setitem(language_models.ARMS, "standard", None)
    out = tmp_path / "language.json"
    flags = ["--models", "tiny", "--kinds", kind, "--arms", "standard", "flax", f"--out={out}"]
    flags += ["--at_once", "2"]
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # JAX's own attention promotes
    try:
        assert language_models.main(flags) == 0
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "strict")
    written = json.loads(out.read_text())
    failed, row = written["rows"]
    assert written["commit"] and failed["error"].startswith("TypeError")
    assert row["tokens_per_second"] > 0 and row["memory_gib"] > row["temporaries_gib"] > 0


@pytest.mark.release
def test_language_models_on_two_devices(monkeypatch):
    """Two devices compute the losses of one; int8 recipes gather the weights of blocks in int8 only."""
    shape = SHAPES["step"]["tiny"]
    case = language_models.Case("step", "tiny", "flax", 1, shape, False, "bfloat16")
    losses, found = {}, {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for arm, devices in (("flax", 1), ("flax", 2), ("switchback_hadamard+fused", 2)):
            monkeypatch.setattr(timing, "_keys", itertools.count())  # the same parameters
            compiled, start = language_models.step(case._replace(arm=arm, devices=devices))
            run = start()
            losses[arm, devices] = [float(run()) for _ in range(3)]
            found[arm, devices] = collectives(compiled)
    one, two, quantized = losses.values()
    assert np.allclose(two, one, rtol=1e-4) and np.allclose(quantized, one, rtol=1e-3)
    assert one[2] < one[1] < one[0]
    width, hidden, keys = shape.width, shape.hidden, shape.kv_heads * shape.head_width
    sizes = [(width, width)] * 2 + [(width, keys)] * 2 + [(width, hidden)] * 2 + [(hidden, width)]
    ends = [(shape.vocabulary, width), (width, shape.vocabulary)]
    gathered = lambda key, *dtypes: {
        each.shape
        for each in found[key]
        if each.op == "all-gather" and each.dtype in dtypes and len(each.shape) == 2
    }
    floats = ("f32", "bf16")  # XLA for CPUs sends bfloat16 as float32
    assert gathered(("flax", 2), *floats) == {*sizes, *ends}
    assert gathered(("switchback_hadamard+fused", 2), *floats) == {*ends}
    assert gathered(("switchback_hadamard+fused", 2), "s8") == {*sizes}


@pytest.mark.release
def test_language_models_of_pytorch_on_two_devices(tmp_path):
    """One process a device; the error of a case that cannot run is in its row."""
    pytest.importorskip("torch")
    out = tmp_path / "torch.json"
    script = [sys.executable, ROOT / "benchmarks" / "language_models_torch.py", f"--out={out}"]
    flags = ["--kinds", "step", "--models", "tiny", "--arms", "bf16", "float8_rowwise"]
    variables = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*script, *flags, "--mesh", "fsdp=2", "fsdp=1"]
    subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT | variables)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["arm"], row["devices"], row["batch"]) for row in rows] == [
        (f"torch {arm}", devices, 2 * devices)
        for devices in (2, 1)
        for arm in ("bf16", "float8_rowwise")
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows if row["arm"] == "torch bf16")


def test_experts_of_language_models():
    """Against every expert for every token; a block in int8 is near the one in bf16."""
    shape = SHAPES["blocks"]["tiny-moe"]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64, 64)), "float32")
    mlp = language_models_flax.Experts(shape, nnx.Rngs(0))
    mlp.router.dtype = jnp.float32

    @jax.jit
    def every_expert(x):
        chance = jax.nn.softmax(mlp.router(x))
        largest = jax.lax.top_k(chance, 2)[0]
        chance = jnp.where(chance >= largest[..., 1:], chance, 0)
        chance = chance / jnp.sum(largest, -1, keepdims=True)
        gate, up = (jnp.einsum("btd,edh->bteh", x, w[...]) for w in (mlp.gate, mlp.up))
        return jnp.einsum("bteh,ehd,bte->btd", jax.nn.silu(gate) * up, mlp.down[...], chance)

    np.testing.assert_allclose(jax.jit(mlp)(x), every_expert(x), atol=1e-5)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        blocks = [
            language_models_flax.ARMS[arm](shape, False)
            for arm in ("flax", "switchback_hadamard+fused")
        ]
        loss = lambda b, x: jnp.sum(b(x.astype("bfloat16"), None).astype("float32") ** 2)
        bf16, int8 = (jax.jit(jax.grad(partial(loss, b)))(x) for b in blocks)
    error = jnp.linalg.norm(int8 - bf16) / jnp.linalg.norm(bf16)
    assert 0 < error < 0.15  # a few tokens are sent to another expert


@pytest.mark.parametrize(
    "flags, told",
    [
        (("--mesh", "fsdp=2"), "several devices run whole steps only: add --kinds step"),
        (("--mesh", "data=2"), "a mesh is fsdp=N with N from 1, got 'data=2'"),
        (("--mesh", "fsdp=0"), "a mesh is fsdp=N with N from 1, got 'fsdp=0'"),
    ],
)
def test_meshes_that_language_models_refuse(flags, told, capsys):
    with pytest.raises(SystemExit):
        language_models.main([*flags])
    assert told in capsys.readouterr().err


def test_models_that_do_not_fit_are_refused():
    """Llama-3-8B: 16 bytes a parameter are 120 GiB on one device, 15 on eight."""
    shape = SHAPES["step"]["llama-3-8b"]
    assert shape.state_bytes / 16 == 8_030_261_248 - 65 * 4096  # published, without norms
    with pytest.raises(ValueError, match="need 120 GiB a device, it has 75: use more devices"):
        check_memory(shape, 1, 75 * 2**30)
    check_memory(shape, 8, 75 * 2**30)


@pytest.mark.release
def test_lora_over_frozen_weights(tmp_path):
    out = tmp_path / "lora.json"
    flags = ["--models", "tiny", "--arms", "bf16", "switchback+once", f"--out={out}"]
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes
        assert language_models_lora.main(flags) == 0
    plain, frozen = json.loads(out.read_text())["rows"]
    assert frozen["weights_gib"] < 0.51 * plain["weights_gib"] and frozen["ratio"] > 0


def test_shapes_of_language_models():
    """Their published numbers of parameters, and six FLOPs for each weight and token."""
    shape, norms = SHAPES["step"]["llama-3.2-1b"], 33 * 2048
    weights = 16 * shape.weights + shape.width * shape.vocabulary
    assert weights == 1_235_814_400 - norms
    attention = 6 * shape.tokens * 16 * 4096 * 2048
    assert shape.flops == 6 * shape.tokens * weights + attention
