"""The CLIP train step on 1, 2, 4, ... devices: samples/s, collectives, memory; and loss curves side by side.

  python benchmarks/scaling.py --out=scaling.json                          # everything, most important first
  python benchmarks/scaling.py --models vit_h14 --devices 1 4 --out=scaling.json
  python benchmarks/scaling.py --losses --out=scaling_losses.json          # one global batch for all
  python benchmarks/scaling.py --plot=scaling.png --out=scaling.json       # of what the file holds
  python benchmarks/scaling.py --at_once 8 --timeout 600                   # eight compile, run one by one
  python benchmarks/scaling.py --smoke                                     # tiny, on eight CPU devices

Every case is a process of its own, so that memory is its own and one that hangs or does not fit ends alone.
The file is complete after every case; cases that it holds are not run again. Weak scaling: the batch of each
device stays the same. Images and captions are random and lie on the devices: no loader is timed.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from swjax.training import environment  # noqa: E402

COLLECTIVE = re.compile(r"nccl", re.IGNORECASE)
NAMES = {"standard": "bf16", "switchback": "int8"}
# Small enough for eight fake devices on two cores.
SMOKE = {"model.name": "tiny", "model.vision.layers": 1, "model.text.layers": 1, "model.dtype": "float32",
         "data.image_size": 32, "data.context_length": 8}  # fmt: skip


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.case:
        print(json.dumps(run_case(json.loads(args.case), args.turn)))
        return 0
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"rows": []}
    if args.plot:
        plot(found["rows"], args.plot)
        return 0
    known = [row["case"] for row in found["rows"]]
    for case, row in measured([case for case in cases(args) if case not in known], args):
        found |= {key: row.pop(key) for key in ("machine",) if key in row}
        found["rows"].append({"case": case} | row)
        found["command"] = environment.command()
        if args.out:
            write(args.out, json.dumps(found, indent=1) + "\n")
        print(describe(case, row), flush=True)
    print(table(found["rows"]))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_h14", "vit_b16"])
    parser.add_argument("--recipes", nargs="+", default=["switchback", "standard"])
    parser.add_argument("--layouts", nargs="+", default=["data", "fsdp"], choices=["data", "fsdp"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 4, 2])
    parser.add_argument("--batch", type=int, default=256, help="pairs a device")
    parser.add_argument("--remat", default="none", help="what blocks keep, see configs/common.py")
    parser.add_argument("--scan", action="store_true", help="scan over layers: compiles faster")
    parser.add_argument(
        "--reduce_dtypes",
        nargs="+",
        default=["float32"],
        choices=["float32", "bfloat16"],
        help="that devices add up kernels' gradients in",
    )
    text = "1: all layers' at once, after the backward pass"
    parser.add_argument(
        "--reduce_once", nargs="+", type=int, default=[1], choices=[0, 1], help=text
    )
    parser.add_argument(
        "--xla",
        nargs="*",
        action="append",
        metavar="OPTION=VALUE",
        help="compiler options for several devices, such as "
        "xla_gpu_disable_async_collectives=ALLCOLLECTIVES; again for another set, empty for none",
    )
    parser.add_argument("--steps", type=int, default=20, help="timed; of --losses 200")
    parser.add_argument("--losses", action="store_true", help="loss curves instead")
    parser.add_argument(
        "--at_once", type=int, default=1, help="cases that compile, then run one by one"
    )
    parser.add_argument("--timeout", type=float, default=280, help="seconds a case")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="only draw what --out holds")
    parser.add_argument("--smoke", action="store_true", help="tiny models on eight CPU devices")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.losses and args.steps == parser.get_default("steps"):
        args.steps = 200
    if args.smoke:
        args.models, args.recipes, args.batch, args.steps = ["tiny"], ["switchback"], 4, 3
        args.devices = [1, 8] if args.devices == parser.get_default("devices") else args.devices
    return args


def cases(args) -> list[dict]:
    """What there is to run; one device has no layout."""
    shared = {"steps": args.steps, "smoke": args.smoke}
    if args.losses:
        kinds = [{"losses": True}]
    else:
        kinds = [{"model": model} for model in args.models]
        shared |= {"batch": args.batch, "remat": args.remat, "scan": args.scan}
    variants = [dict(option.split("=", 1) for option in options) for options in args.xla or [[]]]
    found = []
    for kind, devices in itertools.product(kinds, args.devices):
        for layout, recipe in itertools.product(args.layouts, args.recipes):
            layout = layout if devices > 1 else "one"
            for dtype, once, options in itertools.product(
                args.reduce_dtypes, args.reduce_once, variants
            ):
                case = kind | {"recipe": recipe, "layout": layout, "devices": devices} | shared
                if devices > 1:  # one sums nothing
                    case |= {"reduce_dtype": dtype} if dtype != "float32" else {}
                    case |= {"reduce_once": True} if once and layout == "data" else {}
                    case |= {"xla": options} if options else {}
                found += [case] * (case not in found)
    return found


def measured(todo: list[dict], args) -> Iterator[tuple[dict, dict]]:
    """Each case and its row. As many as --at_once says compile together, then run one after the other."""
    for first in range(0, len(todo), args.at_once):
        group = todo[first : first + args.at_once]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(group)) as pool:
            turns = [Path(folder) / str(i) for i in range(len(group))]
            seconds = [args.timeout] * len(group)
            jobs = list(map(partial(pool.submit, in_a_process), group, seconds, turns))
            for job, turn in zip(jobs, turns):
                while not (job.done() or Path(f"{turn}.compiled").exists()):
                    time.sleep(0.1)
            for case, job, turn in zip(group, jobs, turns):
                turn.touch()
                yield case, job.result()


def in_a_process(case: dict, seconds: float, turn: Path) -> dict:
    """What `run_case` returns, from a process that sees so many devices; or {"error": one line}.

    It runs when there is the file `turn`: see `timing.wait_for`."""
    command = [sys.executable, __file__, f"--case={json.dumps(case)}", f"--turn={turn}"]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=variables(case),
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired as late:
        told = (late.stderr or b"").decode(errors="replace")
        steps = re.findall(r"^-- (.*)", told, re.MULTILINE) or ["nothing yet"]
        return {"error": f"not done after {seconds:.0f} s; done: {', '.join(steps)}"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        told = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return {"error": environment.without_folders(told)[:300]}
    return json.loads(done.stdout.splitlines()[-1]) | {
        "seconds": round(time.monotonic() - start, 1)
    }


def variables(case: dict) -> dict:
    count = case["devices"]
    if case["smoke"]:
        return os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(64)))
    return os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:count])}


def run_case(case: dict, turn: Path) -> dict:
    import jax

    if len(jax.devices()) != case["devices"]:
        raise RuntimeError(f"{case['devices']} devices asked for, {len(jax.devices())} are here")
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
    row = losses(case) if case.get("losses") else measure(case, turn)
    return row | {"machine": machine()}


# --- one case, in its process -------------------------------------------------------------------------


def measure(case: dict, turn: Path) -> dict:
    """Times the train step and reads what its devices exchange."""
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

    state = run(state, 2)
    done("ran")
    start = time.perf_counter()
    state = run(state, case["steps"])
    seconds = (time.perf_counter() - start) / case["steps"]
    rate = config.train.batch_size / seconds
    flops = 3 * clip.flops_per_example(cfg) * rate / case["devices"]
    row |= {"step_ms": round(1e3 * seconds, 3), "samples_per_s": round(rate, 2)}
    row |= {"model_tflops_per_device": round(flops / 1e12, 2)}
    stats = jax.devices()[0].memory_stats() or {}
    row["peak_gib"] = round(stats["peak_bytes_in_use"] / 2**30, 3) if stats else None
    return row | profile(lambda: run(state, 3), steps=3)


def stages():
    """Returns a function (what is done) -> seconds since now, which also says so: for who waits in vain."""
    start = time.perf_counter()

    def done(what: str) -> float:
        seconds = round(time.perf_counter() - start, 1)
        print(f"-- {what} at {seconds} s", file=sys.stderr, flush=True)
        return seconds

    return done


def prepare(case: dict):
    """(config, model config, step, what makes the state, its shapes, batch), on a mesh of all devices."""
    import jax
    import numpy as np

    from configs import common
    from swjax.diagnostics import Packer
    from swjax.models import sharding
    from swjax.training import loop
    from swjax.training.step import make_optimizer, make_schedule, make_train_step

    changes = SMOKE if case["smoke"] else {"model.name": case["model"]}
    changes |= mesh_of(case) | {
        "model.remat": case["remat"],
        "model.scan_layers": case["scan"],
        "train.batch_size": case["batch"] * case["devices"],
        "eval.batch_size": case["devices"],
    }
    config = common.paper("vit_b16", case["recipe"])
    config.update_from_flattened_dict(changes)
    mesh, cfg = loop.check(config)
    schedule = make_schedule(config, 10_000, 100)
    optimizer = make_optimizer(config, schedule)
    init, graphdef = loop.make_init(config, cfg, optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), mesh)
    shardings = jax.tree.map(lambda x: x.sharding, like)
    options = {"xla_backend_optimization_level": 0}  # it runs once
    init = jax.jit(init, out_shardings=shardings, compiler_options=options)
    step = make_train_step(config, graphdef, optimizer, schedule, Packer())
    step = loop.compile_step(step, like, **case.get("xla", {}))
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
    """What the config says of the mesh, all devices along one axis, and of sums over it."""
    sizes = (1, -1) if case["layout"] == "fsdp" else (-1, 1)
    sums = {"train.reduce_dtype": case.get("reduce_dtype", "float32")}
    sums |= {"train.reduce_once": case.get("reduce_once", False)}
    return dict(zip(("mesh.data", "mesh.fsdp"), sizes, strict=True)) | sums


def exchanged(compiled) -> dict:
    """MB of the results of each kind of collective on a device in a step, by HLO type, from the program.

    A gather's result is what all have together. What is in a loop counts once: layers are not, unless
    --scan.
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


def profile(run, steps: int) -> dict:
    """`time_of_kernels`, from the profiler's trace (CUPTI); None where it has no kernels, as on CPUs."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = list(Path(folder).rglob("*.xplane.pb"))
        planes = [p for f in files for p in jax.profiler.ProfileData.from_file(str(f)).planes]
        found = [kernels(plane) for plane in planes if "/device:GPU" in plane.name]
    found = [of_device for of_device in found if of_device]
    if not found:
        return {"collective_ms": None, "exposed_collective_ms": None}
    return time_of_kernels(found, steps)


def time_of_kernels(devices: list[list[tuple]], steps: int) -> dict:
    """Milliseconds a step, the mean of all devices: of NCCL's kernels, of those while no other runs, of each
    sort of the others, and of nothing between the first kernel and the last, by what ran before.

    >>> device = [("ncclDevKernel", 0, 4e6), ("_gelu_kernel", 1e6, 2e6), ("nvjet", 2e6, 3e6)]
    >>> for key, ms in time_of_kernels([device, device], steps=1).items():
    ...     print(key, ms)
    collective_ms 4.0
    exposed_collective_ms 2.0
    kernels_ms {'quantizers, LayerNorm, GELU': 1.0, '16-bit products': 1.0}
    idle_ms 0.0
    idle_after_ms {}
    """
    from benchmarks.train_step import by_sort

    talking, exposed, others, idle = 0.0, 0.0, [], Counter()
    each = 1 / len(devices) / steps / 1e6
    for device in devices:
        talk = [span for name, *span in device if COLLECTIVE.search(name)]
        rest = [event for event in device if not COLLECTIVE.search(event[0])]
        work = [span for _, *span in rest]
        talking += covered(talk)
        exposed += covered(talk + work) - covered(work)
        others += [(name, (end - start) * each) for name, start, end in rest]
        idle.update(idle_after(device))
    return {
        "collective_ms": round(talking * each, 3),
        "exposed_collective_ms": round(exposed * each, 3),
        "kernels_ms": by_sort(others),
        "idle_ms": round(idle.total() * each, 3),
        "idle_after_ms": {name: round(ns * each, 3) for name, ns in idle.most_common(8)},
    }


def idle_after(events: list[tuple]) -> Counter:
    """How long a device ran nothing, by the kernel that had ended last.

    >>> idle_after([("a", 0, 2), ("b", 1, 4), ("c", 5, 6), ("b", 8, 9)])
    Counter({'c': 2, 'b': 1})
    """
    found, last, until = Counter(), None, float("inf")
    for name, start, end in sorted(events, key=lambda event: event[1]):
        if start > until:
            found[last] += start - until
        if last is None or end > until:
            last, until = name, end
    return found


def kernels(plane) -> list[tuple[str, float, float]]:
    """(name, start, end) in ns of everything that a device runs."""
    return [
        (event.name, event.start_ns, event.start_ns + event.duration_ns)
        for line in plane.lines
        if line.name.startswith("Stream")  # others tell the same again, by operation or module
        for event in line.events
    ]


def covered(spans: list) -> float:
    """The length of the union of intervals.

    >>> covered([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def losses(case: dict) -> dict:
    """The loss of every step of a small run of train.py, whose batch all devices share."""
    from swjax.training import loop
    from swjax.training.config import load

    changes = {"data.name": "synthetic", "model.recipe": case["recipe"], "model.dtype": "float32"}
    changes |= {"train.steps": case["steps"], "train.batch_size": 64, "schedule.warmup_steps": 20}
    changes |= {
        "optimizer.learning_rate": 3e-4
    }  # higher ones fall to chance, where all losses are one
    changes |= {"report.enabled": False, "log.tensorboard": False, "data.synthetic.examples": 2048}
    changes |= {"data.synthetic.classes": 512, "eval.batch_size": 64} | mesh_of(case)
    if case["smoke"]:
        changes |= SMOKE | {"train.batch_size": 16, "data.synthetic.examples": 32}
        changes |= {"schedule.warmup_steps": 1}
    config = load(f"{ROOT}/configs/openmoji.py", [(k, str(v)) for k, v in changes.items()])
    with tempfile.TemporaryDirectory() as folder:
        stdout, sys.stdout = sys.stdout, sys.stderr  # the result alone goes to stdout
        loop.train_and_evaluate(config, folder)
        sys.stdout = stdout
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {"loss": [json.loads(line)["train/loss"] for line in lines]}


def machine() -> dict:
    import datetime

    import jax

    names = ("jax", "jaxlib", "flax", "jax-triton", "triton")
    return {
        "device": jax.devices()[0].device_kind,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {name: environment.version(name) for name in names},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


# --- what is told -------------------------------------------------------------------------------------


def describe(case: dict, row: dict) -> str:
    name = f"{case.get('model', 'losses')} {case['recipe']} {arranged(case)} x{case['devices']}"
    told = (
        "error",
        "compile_s",
        "samples_per_s",
        "step_ms",
        "collective_ms",
        "exposed_collective_ms",
        "peak_gib",
    )
    parts = [f"{key} {row[key]}" for key in told if row.get(key) is not None]
    return f"{name}: {', '.join(parts) or 'last loss ' + str(row.get('loss', [None])[-1])}"


def arranged(case: dict) -> str:
    """The layout, and what XLA was told."""
    options = [f"{key}={value}" for key, value in case.get("xla", {}).items()]
    sums = [f"sums in {case['reduce_dtype']}"] if "reduce_dtype" in case else []
    sums += ["at once"] if "reduce_once" in case else []
    return " ".join([case.get("layout", ""), *sums, *options])


def efficiency(rows: list[dict], row: dict) -> float | None:
    """Samples/s over those of as many single devices; None where one of the two is missing."""
    # Options of collectives mean nothing to one device.
    unlike = ("devices", "layout", "reduce_dtype", "reduce_once", "xla")
    same = {key: value for key, value in row["case"].items() if key not in unlike}
    for one in rows:
        single = {key: value for key, value in one["case"].items() if key not in unlike}
        if one["case"]["devices"] == 1 and single == same and "samples_per_s" in one:
            return row["samples_per_s"] / (row["case"]["devices"] * one["samples_per_s"])
    return None


def table(rows: list[dict]) -> str:
    """Markdown: throughput, or how far loss curves are apart."""
    if any(row["case"].get("losses") for row in rows):
        return "\n".join(differences(rows))
    head = "model|precision|layout|GPUs|samples/s|efficiency|step ms|NCCL ms|exposed ms|gathers MB|peak GiB"
    lines = [f"|{head}|", "|" + "---|" * len(head.split("|"))]
    for row in rows:
        case, ratio = row["case"], None
        if "error" in row:
            cells = [row["error"]] + [""] * 6
        else:
            ratio = efficiency(rows, row)
            moved = row["collective_mb"].get("all-gather", {})
            gathers = ", ".join(f"{mb:.0f} {dtype}" for dtype, mb in moved.items() if mb >= 0.5)
            cells = [row["samples_per_s"], f"{ratio:.3f}" if ratio else "", row["step_ms"]]
            cells += [row["collective_ms"], row["exposed_collective_ms"], gathers, row["peak_gib"]]
        names = [case["model"], NAMES.get(case["recipe"], case["recipe"]), arranged(case)]
        lines.append(f"|{'|'.join(map(str, [*names, case['devices'], *cells]))}|")
    return "\n".join(lines)


def differences(rows: list[dict]):
    """For each recipe how far curves are from the first of one device, relatively, up to some steps."""
    rows = [row for row in rows if "loss" in row]
    alone: dict[str, list] = {}
    for case, loss in ((row["case"], row["loss"]) for row in rows):
        if case["devices"] == 1:
            alone.setdefault(case["recipe"], loss)
    for case, loss in ((row["case"], row["loss"]) for row in rows):
        if alone.get(case["recipe"]) in (None, loss):
            continue
        far = [abs(a - b) / abs(b) for a, b in zip(loss, alone[case["recipe"]], strict=True)]
        until = [n for n in (1, 10, 50, 100) if n < len(far)] + [len(far)]
        parts = ", ".join(f"{max(far[:n]):.1e} in {n} steps" for n in until)
        yield f"{case['recipe']} on {place(case)} and on 1 device differ by at most {parts}"


def plot(rows: list[dict], path: Path) -> None:
    """Loss curves; or a step's time, and of it collectives alone, beside the efficiency, a bar a case."""
    import matplotlib.pyplot as plt

    losses = [row for row in rows if "loss" in row]
    timed = [row for row in rows if "step_ms" in row]
    height = 4 if losses else 1.2 + 0.28 * len(timed)
    figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
    if losses:
        for row in losses:
            name = f"{row['case']['recipe']}, {place(row['case'])}"
            axes.plot(range(1, len(row["loss"]) + 1), row["loss"], label=name)
        axes.set(xlabel="step", ylabel="loss")
    else:
        alone = [row["exposed_collective_ms"] or 0 for row in timed]
        rest = [row["step_ms"] - ms for row, ms in zip(timed, alone)]
        axes.barh(range(len(timed)), rest, label="everything else")
        drawn = axes.barh(range(len(timed)), alone, left=rest, label="collectives alone")
        axes.bar_label(drawn, [f"{efficiency(rows, row) or 0:.3f}" for row in timed], padding=2)
        axes.set_yticks(range(len(timed)), [short(row["case"]) for row in timed], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set(xlabel="ms a step; the number: weak scaling efficiency")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def place(case: dict) -> str:
    count = case["devices"]
    layout = "" if count == 1 else f", {arranged(case)}"
    return f"{count} device{'s' * (count > 1)}{layout}"


def short(case: dict) -> str:
    """The case, without the names of XLA's options."""
    values = sorted(set(case.get("xla", {}).values()))
    options = f"XLA options: {', '.join(values)}" if values else ""
    sums = "16-bit sums" if "reduce_dtype" in case else ""
    sums += " at once" if "reduce_once" in case else ""
    names = (case["model"], NAMES.get(case["recipe"], case["recipe"]), case["layout"], sums)
    return f"{' '.join(names)} x{case['devices']}\n{options}".strip()


def write(path: Path, text: str) -> None:
    """In one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
