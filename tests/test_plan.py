"""`train.py --plan`: memory and rates compared with recorded runs, every config, bad input."""

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import thinning
from clip_oracle import write_weights
from flax import nnx

import swjax
import train
from swjax.models import clip
from swjax.recipes import RECIPES
from swjax.tools import memory_model, plan
from swjax.tools.memory_model import GIB, Mesh, predict
from swjax.training import config as config_lib
from swjax.training import inputs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = [*sorted(path.stem for path in (ROOT / "configs").glob("vit*.py")), "openmoji"]
NEWEST = "scaling_muon_8_bits_h200"
HARDWARE = ("h200:8", "h100:8", "a100-40:8", "l4:1")


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def one_device(name: str) -> list[tuple]:
    """Returns (model, recipe, remat, batch, mesh, GiB used) of our whole training steps on one H200."""
    return [
        (
            row["model"],
            row["implementation"].split()[1],
            row["remat"],
            row["batch"],
            Mesh(),
            row["memory_gib"],
        )
        for row in rows(name)
        if row["kind"] == "step" and row["implementation"].startswith("swjax")
    ]


def several_devices(*files: str) -> list[tuple]:
    """Returns the same for two and four H200s, for StableAdamW and XLA's default options.

    Rows of data parallelism before `finish_gradients` count only for blocks that recompute nothing.
    """
    found = []
    for row in itertools.chain.from_iterable(map(rows, files)):
        case = row["case"]
        is_usual = not {"xla", "optimizer"} & case.keys() and case["layout"] in ("data", "fsdp")
        is_old = files != (NEWEST,) and case["layout"] == "data" and case["recipe"] != "standard"
        if case["devices"] > 1 and is_usual and not is_old and "peak_gib" in row:
            mesh = Mesh(**{case["layout"]: case["devices"]})
            found.append(
                (case["model"], case["recipe"], "none", case["batch"], mesh, row["peak_gib"])
            )
    return found


def held_out() -> list[tuple]:
    """Returns runs that the memory model was not fitted to: other days, cards and reductions of gradients."""
    older = "scaling_sums_h200", "scaling_once_h200", "scaling_four_h200", "scaling_alone_h200"
    return one_device("train_step_h200") + several_devices(*older) + several_devices(NEWEST)


FITTED = one_device("train_step_matrix_h200") + several_devices("scaling_h200")


@functools.cache
def state_bytes(name: str) -> int:
    """Returns the bytes of the parameters and two moments in float32."""
    model = clip.config(name)
    shapes = nnx.state(nnx.eval_shape(lambda: clip.CLIP(model, rngs=nnx.Rngs(0))))
    return 12 * sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("case", FITTED + held_out(), ids=str)
def test_predicted_memory_is_within_10_percent_of_recorded(case):
    name, recipe, remat, batch, mesh, used = case
    model = clip.config(name, recipe=recipe, remat=remat, patch_dropout=0.5)
    predicted = predict(model, state_bytes(name), batch, mesh).total / GIB
    assert predicted == pytest.approx(used, rel=0.1)


CONCURRENT = [
    row for row in rows("train_step_concurrent_h200") if row["scheduling"] == "CONCURRENT"
] + [
    row
    for row in rows("train_step_concurrent_h100")
    if "CONCURRENT" in row["XLA_FLAGS"] and "hadamard" in row["implementation"]
]


@pytest.mark.parametrize("row", [r for r in CONCURRENT if r["remat"] == "none"], ids=str)
def test_predicted_memory_of_concurrent_kernels(row):
    recipe = row["implementation"].split()[1]
    model = clip.config(row["model"], recipe=recipe, patch_dropout=0.5)
    predicted = predict(model, state_bytes(row["model"]), row["batch"], concurrent=True).total / GIB
    assert predicted == pytest.approx(row["memory_gib"], rel=0.1)


def test_predicted_memory_of_lora():
    """Frozen kernels are read as stored, and layers save their input only."""
    (row,) = (r for r in rows("train_step_lora_h200") if "LoRA 16" in r["implementation"])
    settings = [("model.recipe", "standard"), ("optimizer.lora.rank", "16")]
    config = config_lib.load(f"{ROOT}/configs/vitl14_int8.py", settings)
    with config.unlocked():
        config.model.remat, config.train.batch_size = row["remat"], row["batch"]
    predicted = plan.make(config, plan.Hardware.parse("h200:1")).memory.total / GIB
    assert predicted == pytest.approx(row["memory_gib"], rel=0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_recompute_what_their_layers_do_not_save(recipe):
    """Layers save the inputs of norm and GELU, and their outputs unless the backward pass recomputes them."""
    x, w, one = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 64)), jnp.ones(64)
    layers = functools.partial(swjax.mlp, recipe=recipe, prologue=swjax.LayerNorm(one, one))
    _, vjp = jax.vjp(lambda x: layers(x, w, None, w, None), x)
    saved = [
        leaf for leaf in jax.tree.leaves(vjp) if (leaf.shape, leaf.dtype) == (x.shape, x.dtype)
    ]
    assert len(saved) == (2 if memory_model.recomputes(clip.config("tiny", recipe=recipe)) else 4)


def test_there_are_records_to_compare_with():
    assert len(FITTED) == 36 and len(held_out()) > 10


@pytest.mark.parametrize(
    "kind, files",
    [
        ("h200", ["train_step_matrix_h200", "train_step_h200"]),  # newest last
        ("h100", ["train_step_h100"]),
    ],
)
def test_rates_are_those_of_the_records(kind, files):
    recorded = {}
    for row in (row for file in files for row in rows(file)):
        is_other = "open_clip" in row["implementation"] or "gemm=true" in row.get("XLA_FLAGS", "")
        if row["kind"] == "step" and not is_other:
            key = row["model"], row["implementation"].split()[1]
            recorded.setdefault(key, {})[row["remat"]] = round(row["images_per_second"])
    found = {key: (rate["none"], rate.get("full")) for key, rate in recorded.items()}
    assert found == plan.RATES[kind]


def run(config: str, hardware: str, *flags: str) -> int:
    return train.main(
        ["train.py", f"--config={ROOT}/configs/{config}.py", "--plan", f"--hardware={hardware}", *flags]
    )  # fmt: skip


@pytest.fixture(autouse=True)
def drawings(monkeypatch):
    """Replaces the emoji data set, whose preparation takes a minute, by a synthetic one."""
    from swjax import data

    synthetic = data.source("synthetic", "train", image_size=8, classes=10, examples=8448)
    opened = inputs.open_source
    monkeypatch.setattr(
        inputs, "open_source", lambda c, split: synthetic if c.data.name == "emoji" else opened(c, split)
    )  # fmt: skip


# `make test` plans the first config for the first kind of GPU, the second for the second.
CASES = thinning.kept(itertools.product(CONFIGS, HARDWARE), list(zip(CONFIGS, HARDWARE)))


@pytest.mark.parametrize(("config", "hardware"), CASES)
def test_every_config_on_every_hardware(config, hardware, capsys, tmp_path, monkeypatch):
    """The config fits into memory, or does with the settings that the error names."""
    flags = ()
    if config == "finetune":
        folder = tmp_path.parent / "weights"
        write_weights(folder)
        flags = (f"--config.checkpoint.init_from={folder}",)
    monkeypatch.chdir(tmp_path)
    code = run(config, hardware, *flags)
    printed = capsys.readouterr()
    assert re.search(r"^memory +[\d.]+ [GM]iB per device", printed.out, re.MULTILINE)
    assert not list(tmp_path.iterdir()), "a plan must write no files"
    if code == 0:
        assert not printed.err
        return
    assert code == 2 and printed.err.count("\n") == 1
    remedy = re.search(r": set ([^,\n]+)", printed.err)
    if remedy is None:
        assert "use more devices with fsdp" in printed.err
        return
    assert run(config, hardware, *flags, *remedy[1].split()) == 0


def test_the_text_says_what_a_reader_asks(capsys):
    assert run("vith_int8", "h200:8", "--config.train.accumulation=8") == 0
    text = capsys.readouterr().out
    for part in (
        "8 x h200, 139.8 GiB each; JAX takes 104.9 GiB",
        "986,109,441 parameters, switchback, bfloat16, remat=none",
        "synthetic: 100,000 pairs; the first captions: 'pattern 0'",
        "20,000 steps of 16,384 pairs: 327,680,000 pairs, 3276.8 epochs",
        "0.002 at 5,000",
        "data=1 fsdp=8 tensor=1; 256 pairs per device at a time, accumulation=8",
        "checkpoints    11.0 GiB each, up to 3 at a time",
        "7,714 pairs per second (extrapolated from 4 GPUs): 11.8 hours",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    "setting",
    [
        "model.dtype=float32",
        "model.vision.layers=6",
        "data.context_length=32",
        "model.architecture=siglip",
    ],
)
def test_another_model_has_no_rate(setting, capsys):
    """Rates are those of the named models in bfloat16."""
    code = run("vitb16_int8", "h200:1", "--config.train.batch_size=256", f"--config.{setting}")
    assert code == 0 and "time           not measured for this model" in capsys.readouterr().out


def test_loader_processes_follow_from_the_rate(capsys, tmp_path, monkeypatch):
    from photographs import write_tars

    write_tars(tmp_path / "t", [4, 4])
    flags = [
        "--config.data.name=webdataset",
        f"--config.data.webdataset.splits.train={tmp_path}/t/{{00000..00001}}.tar",
        f"--config.data.dir={tmp_path}/data",
        "--config.train.batch_size=8",
    ]
    assert run("vitb32_int8", "h200:1", *flags) == 0
    assert "loader         43 processes over all hosts" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_limit_of_the_environment_counts(name, monkeypatch):
    monkeypatch.setenv(name, "0.9")
    assert plan.Hardware.parse("l4:2").limit == pytest.approx(0.9 * 22.0 * GIB)
    assert plan.Hardware.parse("TPUv5p:4")[:3] == ("tpuv5p", 4, 95.9 * GIB)  # all of it


def test_without_hardware_the_devices_here_count(capsys):
    assert train.main(["train.py", f"--config={ROOT}/configs/openmoji.py", "--plan"]) == 0
    assert "its memory is unknown: name a GPU or TPU with --hardware" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        (
            "h300:8",
            "--hardware=h300:8 is unknown: choose from a100-40, a100-80, a10, l40s, l4, rtx4090, h100, h200",
        ),
        ("0GiB", "--hardware=0GiB is unknown"),
        ("h200:0", "--hardware=h200:0: write KIND:COUNT, such as h200:8"),
        ("h200:x", "--hardware=h200:x: write KIND:COUNT, such as h200:8"),
        ("h200:3", "config.train.batch_size=16384 "),
    ],
)
def test_bad_hardware_is_one_line(hardware, message, capsys):
    assert run("vith_int8", hardware) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train.py: {message}") and error.count("\n") == 1


def test_data_that_a_run_would_refuse_are_refused(capsys, tmp_path):
    flags = ["--config.data.name=synthetic", "--config.data.synthetic.examples=100"]
    assert run("vitb32_int8", "h200:1", *flags) == 2
    assert (
        "the data set has 100 examples, fewer than a batch of 16384: set train.batch_size"
        in capsys.readouterr().err
    )
    flags = ["--config.eval.data=table", f"--config.data.table.splits.val={tmp_path}/no.csv"]
    assert run("vitb32_int8", "h200:1", *flags) == 2
    assert "no.csv: it does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag, message",
    [
        ("eval.zeroshot=folders:nope", "config.eval.zeroshot: "),
        ("checkpoint.resume=nope", "config.checkpoint.resume='nope' holds no checkpoint"),
        ("checkpoint.resume=cut", "config.checkpoint.resume='cut' holds no checkpoint"),
        (
            "checkpoint.init_from=nope",
            "config.checkpoint.init_from='nope' holds no checkpoint and no",
        ),
        ("checkpoint.mirror=foo://x", "config.checkpoint.mirror: "),
        ("train.profile_steps=5,999999", "must end by the last step"),
    ],
)
def test_what_a_run_would_not_find_is_refused(flag, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cut/checkpoints/4.orbax-checkpoint-tmp").mkdir(parents=True)  # of a run that was killed
    flags = ["--config.data.name=synthetic", "--config.data.synthetic.examples=20000"]
    flags += ["--config.train.steps=100", f"--config.{flag}"]
    assert run("vitb32_int8", "h200:1", *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_speed_of_muon_was_not_measured(capsys):
    flags = "--config.train.accumulation=8", "--config.optimizer.name=muon"
    assert run("vith_int8", "h200:8", *flags) == 0
    assert "not measured" in capsys.readouterr().out.split("time")[-1]


def test_micro_batches_are_summed_in_the_gradients_of_trained_parameters():
    """Their bytes do not depend on the moments that the optimizer keeps."""

    def gradients(**optimizer):
        config = config_lib.load(f"{ROOT}/configs/vitb16_int8.py", [("data.name", "synthetic")])
        config.data.synthetic.examples = config.train.batch_size
        config.optimizer.update(optimizer)
        made = plan.make(config, plan.Hardware.parse("h200:8"))
        return made.gradient_bytes / made.parameters

    assert gradients() == gradients(name="muon") == 4 > gradients(freeze=("^text/",)) > 2


def test_a_plan_with_concurrent_kernels(capsys):
    concurrent = "--config.train.concurrent_kernels=True"
    assert run("vitb16_int8", "h200:8", concurrent) == 2
    remedies = "set --config.train.concurrent_kernels=False, or --config.train.accumulation=2"
    assert remedies in capsys.readouterr().err
    assert run("vitb16_int8", "h200:8", concurrent, "--config.train.accumulation=2") == 0
    plan = capsys.readouterr().out
    assert "remat=none" in plan and "remat=full" not in plan
    assert "not measured" in plan.split("time")[-1]


def test_more_pairs_or_fewer_devices_never_need_less():
    model = clip.config("vit_b16", patch_dropout=0.5)
    size = state_bytes("vit_b16")
    totals = [predict(model, size, pairs).total for pairs in (1, 2, 64, 256)]
    assert totals == sorted(totals)
    limit = predict(model, size, 100).total
    assert memory_model.most_pairs(model, size, limit) == 100
    assert memory_model.most_pairs(model, size, size / 2) == 0
    less = dataclasses.replace(model, remat="full")
    assert predict(less, size, 256).total < totals[-1]
