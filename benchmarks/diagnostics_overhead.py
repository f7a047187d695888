"""The cost of diagnostics: times the train step with each of them and with none, on the same batch.

  python benchmarks/diagnostics_overhead.py --out=benchmarks/results/diagnostics_overhead_cpu.json
  python benchmarks/diagnostics_overhead.py --config=configs/vitb16_int8.py --set train.batch_size=256 \\
      --out=benchmarks/results/diagnostics_overhead_gpu.json

Variants run in random order in each round, so that disturbances affect all of them. The cost is the median
over the rounds, relative to the step without diagnostics. On a CPU, times are CPU times of all cores, which
other programs disturb less than wall-clock times. "none again" is a second measurement without diagnostics;
its distance from 0 is the noise. Quantization health is a separate program, whose time is divided by
`config.diagnostics.every_steps`. "bytes" and "flops" are counts of XLA, without noise; "bytes" are before
caches. Exits with 1 if all diagnostics together cost 2% or more beyond the noise.
"""

import argparse
import json
import random
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from benchmarks.kernels import timing  # noqa: E402
from swjax.models import sharding  # noqa: E402
from swjax.training import config as config_lib  # noqa: E402
from swjax.training import inputs, setup  # noqa: E402
from swjax.training.log import environment  # noqa: E402
from swjax.training.log.health import Health  # noqa: E402
from swjax.training.state.restore import first_state  # noqa: E402
from swjax.training.step import make_train_step  # noqa: E402

VARIANTS = {
    "none": set(),
    "rms": {"rms"},
    "features": {"features"},
    "norms": {"norms"},
    "all": {"rms", "features", "norms"},
    "none again": set(),
}
LIMIT = 0.02
CLOCK = time.process_time if jax.default_backend() == "cpu" else time.perf_counter


def main() -> int:
    args = parse()
    overrides = [tuple(text.split("=", 1)) for text in args.set]
    config = config_lib.load(args.config, [("data.name", "synthetic"), *overrides])
    every = config.diagnostics.every_steps
    programs, state, batch = compile_all(config)
    if args.turn:
        timing.wait_for(args.turn)
    seconds = measure(programs, state, batch, args.rounds)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    overhead = {name: middle[name] / middle["none"] - 1 for name in VARIANTS if name != "none"}
    overhead["quantization"] = middle["quantization"] / middle["none"] / every
    total, noise = overhead["all"] + overhead["quantization"], abs(overhead["none again"])
    result = {
        "command": environment.command(),
        "environment": environment.describe().splitlines()[1:],
        "date": time.strftime("%Y-%m-%d"),
        "model": config.model.name,
        "optimizer": config.optimizer.name,
        "recipe": config.model.recipe,
        "batch_size": config.train.batch_size,
        "every_steps": every,
        "rounds": args.rounds,
        "clock": CLOCK.__name__,
        "median_seconds": middle,
        "overhead": overhead,
        "total_overhead": total,
        "limit": LIMIT,
        "bytes": counted(programs, "bytes accessed"),
        "flops": counted(programs, "flops"),
    }
    for name, value in overhead.items():
        print(f"{name:13} {value:+.2%}")
    print(
        f"together      {total:+.2%} of a step of {middle['none'] * 1e3:.1f} ms (limit {LIMIT:.0%})"
    )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if noise >= LIMIT:
        print(f"two runs of the same program differ by {noise:.2%}: time says nothing here")
    return int(total - noise >= LIMIT)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "openmoji.py"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each variant")
    parser.add_argument("--turn", type=Path, metavar="FILE", help="times when there is this file")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args()


def compile_all(config):
    """Returns ({variant, or "quantization": compiled program}, a state, a batch)."""
    setup.use_compilation_cache(config)
    parts = setup.assemble(config, inputs.open_source(config, "train"))
    state = first_state(config, parts.init, parts.like)
    share = sharding.batch_share(parts.mesh)
    with closing(inputs.open_batches(config, parts.source, None, share)) as batches:
        batch = sharding.shard_batch(next(batches), parts.mesh)
    programs = {}
    for name, on in VARIANTS.items():
        with config.unlocked():
            for key in ("rms", "features", "norms"):
                config.diagnostics[key] = key in on
        step = make_train_step(config, parts.graphdef, parts.optimizer, parts.schedule)
        # The state is not donated: all variants start from this one.
        programs[name] = jax.jit(step).lower(state, batch).compile()
    health = Health(
        config, parts.graphdef, parts.like["params"], steps=config.diagnostics.every_steps
    )
    return programs | {"quantization": health.compile(state, batch)}, state, batch


def measure(programs, state, batch, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each program in each round."""
    seconds, names = {name: [] for name in programs}, list(programs)
    for program in programs.values():
        jax.block_until_ready(program(state, batch))
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            start = CLOCK()
            jax.block_until_ready(programs[name](state, batch))
            seconds[name].append(CLOCK() - start)
    return seconds


def counted(programs, what: str) -> dict[str, float]:
    return {name: program.cost_analysis()[what] for name, program in programs.items()}


if __name__ == "__main__":
    sys.exit(main())
