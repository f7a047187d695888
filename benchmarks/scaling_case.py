"""One case of the scaling benchmark, in a process that sees only its devices: a step, or losses."""

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.scaling_profile import clocks, profile

ROOT = Path(__file__).resolve().parents[1]
# Small enough for eight CPU devices on two cores.
SMOKE = {"model.name": "tiny", "model.vision.layers": 1, "model.text.layers": 1, "model.dtype": "float32",
         "data.image_size": 32, "data.context_length": 8}  # fmt: skip


def run_case(case: dict, turn: Path) -> dict:
    import jax

    from benchmarks.kernels import timing

    if len(jax.devices()) != case["devices"]:
        raise RuntimeError(f"{case['devices']} devices asked for, {len(jax.devices())} are here")
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
    row = losses(case) if case.get("losses") else measure(case, turn)
    return row | {"machine": {k: v for k, v in timing.machine().items() if k != "command"}}


def measure(case: dict, turn: Path) -> dict:
    """Times the train step, and reads its collectives from the compiled program."""
    import jax

    from benchmarks.kernels import timing
    from swjax.models import clip

    done = stages()
    config, cfg, step, init, like, batch = prepare(case)
    done("prepared")
    init = init.lower().compile()
    done("compiled the start")
    lowered = step.lower(like, batch)
    done("lowered")
    compiled = lowered.compile()
    row = {"compile_s": done("compiled")} | exchanged(compiled)
    timing.wait_for(turn)
    state = init()
    analysis = compiled.memory_analysis()
    if analysis:
        sizes = (analysis.temp_size_in_bytes, analysis.argument_size_in_bytes)
        row["compiled_gib"] = round(sum(sizes) / 2**30, 3)

    def run(state, steps):
        for _ in range(steps):
            state, vector = compiled(state, batch)
        jax.block_until_ready(vector)
        return state

    def timed(state, steps):
        start = time.perf_counter()
        state = run(state, steps)
        return state, time.perf_counter() - start

    state = run(state, 2)
    done("ran")
    state, first = timed(state, case["steps"])
    with clocks() as row["clocks"]:
        state, second = timed(state, 3 * case["steps"])
    # The host's time to start the first step and to wait for the last is in both runs.
    seconds = (second - first) / (2 * case["steps"])
    row["first_run_ms"] = round(1e3 * first / case["steps"], 3)
    rate = config.train.batch_size / seconds
    flops = 3 * clip.flops_per_example(cfg) * rate / case["devices"]
    row |= {"step_ms": round(1e3 * seconds, 3), "samples_per_s": round(rate, 2)}
    row |= {"model_tflops_per_device": round(flops / 1e12, 2)}
    stats = jax.devices()[0].memory_stats() or {}
    row["peak_gib"] = round(stats["peak_bytes_in_use"] / 2**30, 3) if stats else None
    return row | profile(lambda: run(state, 3), steps=3)


def stages():
    """Returns a function that prints and returns the seconds at the end of a stage, which shows hangs."""
    start = time.perf_counter()

    def done(what: str) -> float:
        seconds = round(time.perf_counter() - start, 1)
        print(f"-- {what} at {seconds} s", file=sys.stderr, flush=True)
        return seconds

    return done


def prepare(case: dict):
    """Returns (config, model config, step, init, state shapes, batch) on a mesh of all devices."""
    import jax
    import numpy as np

    from benchmarks.train_step import OPTIMIZERS
    from configs import common
    from swjax.models import sharding
    from swjax.training import setup
    from swjax.training.optimizer import make_optimizer, make_schedule
    from swjax.training.step import make_train_step

    changes = dict(SMOKE) if case["smoke"] else {"model.name": case["model"]}
    for key, value in OPTIMIZERS.get(case.get("optimizer"), {}).items():
        changes[f"optimizer.{key}"] = value
    changes |= mesh_of(case) | {
        "model.remat": case["remat"],
        "model.scan_layers": case["scan"],
        "train.batch_size": case["batch"] * case["devices"],
        "eval.batch_size": case["devices"],
    }
    config = common.paper("vit_b16", case["recipe"])
    config.update_from_flattened_dict(changes)
    mesh, cfg = setup.check_config(config)
    schedule = make_schedule(config, 10_000, 100)
    optimizer = make_optimizer(config, schedule)
    init, graphdef = setup.make_init(config, cfg, optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), mesh)
    init = setup.compile_init(init, like)
    step = make_train_step(config, graphdef, optimizer, schedule)
    step = setup.compile_step(step, like, **case.get("xla", {}))
    rng, size, side = np.random.default_rng(0), config.train.batch_size, config.data.image_size
    tokens = rng.integers(1, 49406, (size, config.data.context_length), np.int32)
    tokens[:, 0], tokens[:, -1] = 49406, 49407
    batch = {
        "image": rng.integers(0, 256, (size, side, side, 3), np.uint8),
        "text": tokens,
        "label": np.arange(size, dtype=np.int32),
    }
    return config, cfg, step, init, like, sharding.shard_batch(batch, mesh)


def mesh_of(case: dict) -> dict:
    """Returns config keys: all devices along one mesh axis, and how gradients are all-reduced."""
    sizes = (1, -1) if case["layout"] == "fsdp" else (-1, 1)
    sums = {"train.reduce_dtype": case.get("reduce_dtype", "float32")}
    sums |= {"train.reduce_once": case.get("reduce_once", False)}
    return dict(zip(("mesh.data", "mesh.fsdp"), sizes, strict=True)) | sums


def exchanged(compiled) -> dict:
    """Returns the MB of results of each kind of collective per device and step, by HLO type.

    They are read from the compiled program. The result of an all-gather is the whole array. Collectives in a
    loop count once; layers are in a loop only with --scan.
    """
    import math

    from swjax.testing import collectives

    sizes = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2}
    found = Counter()
    for op, dtype, shape in collectives(compiled):
        found[op, dtype] += math.prod(shape) * sizes.get(dtype, 4)
    ops = sorted({op for op, _ in found})
    return {
        "collective_mb": {
            op: {d: round(n / 1e6, 3) for (o, d), n in sorted(found.items()) if o == op}
            for op in ops
        }
    }


def losses(case: dict) -> dict:
    """Returns the loss of every step of a small run of train.py, with a fixed global batch."""
    from swjax.training import loop
    from swjax.training.config import load

    changes = {"data.name": "synthetic", "model.recipe": case["recipe"], "model.dtype": "float32"}
    changes |= {"train.steps": case["steps"], "train.batch_size": 64, "schedule.warmup_steps": 20}
    changes |= {"train.seed": case.get("seed", 0)}
    changes |= {
        "optimizer.learning_rate": 3e-4
    }  # at higher rates losses are those of chance, and equal
    changes |= {"report.enabled": False, "log.tensorboard": False, "data.synthetic.examples": 2048}
    changes |= {"data.synthetic.classes": 512, "eval.batch_size": 64} | mesh_of(case)
    if case["smoke"]:
        changes |= SMOKE | {"train.batch_size": 16, "data.synthetic.examples": 32}
        changes |= {"schedule.warmup_steps": 1}
    config = load(f"{ROOT}/configs/openmoji.py", [(k, str(v)) for k, v in changes.items()])
    with tempfile.TemporaryDirectory() as folder:
        stdout, sys.stdout = sys.stdout, sys.stderr  # keeps stdout for the result
        loop.train_and_evaluate(config, folder)
        sys.stdout = stdout
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {"loss": [json.loads(line)["train/loss"] for line in lines]}
