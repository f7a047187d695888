"""`python -m swjax compare`: the effect of rounding on a model, by layer and over time.

  python -m swjax compare --config=configs/openmoji.py --workdir=runs/compare
  python -m swjax compare --config=... --workdir=... \\
      --arms switchback:bfloat16 llm_int8:bfloat16

Every arm, a recipe and a dtype, starts from the same seed and sees the same batches as float32 without
quantization, the reference. Written into the workdir: compare_precision.html, one page, and .json.

  layers   one pass over some examples: the relative error of every linear layer's output, of the
           gradient there, and of every parameter's gradient
  loss     some steps of training: the distance of its loss to the reference's, and of other seeds'

Everything of the config counts, and --config.section.key=VALUE, but durations and evaluation.
"""

import argparse
import json
import math
import statistics
import sys
from contextlib import closing
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from swjax.models import sharding
from swjax.recipes import RECIPES
from swjax.training import config as config_lib
from swjax.training import environment, layer_errors
from swjax.training.config import ConfigError, choice
from swjax.training.inputs import open_batches, open_source
from swjax.training.keys import KEYS
from swjax.training.packed import fetch
from swjax.training.setup import assemble, check_config, first_state, make_init
from swjax.training.step import make_train_step

REFERENCE = "standard:float32"


def main(argv: list[str]) -> int:
    """Runs a command line; returns the exit code."""
    args, rest = parser().parse_known_args(argv[1:])
    try:
        config, workdir = config_lib.parse([argv[0], *rest])
        result = compare(config, args)
    except ConfigError as error:
        print(f"compare_precision: {error}", file=sys.stderr)
        return 2
    from swjax.report import precision  # matplotlib is slow to load

    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "compare_precision.json").write_text(json.dumps(finite(result), indent=1) + "\n")
    for line in precision.summary(result):
        print(line)
    print(precision.write(result, workdir))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's own flags; the others are the config's."""
    flags = argparse.ArgumentParser(
        prog="python -m swjax compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = "the config's recipe and dtype, and standard:bfloat16"
    flags.add_argument("--arms", nargs="+", metavar="RECIPE:DTYPE", help=f"default: {own}")
    flags.add_argument("--steps", type=int, default=20, help="of training; 0: layers only")
    flags.add_argument("--seeds", type=int, default=3, help="of the reference's training")
    flags.add_argument("--batch-size", type=int, default=32, help="of training; 0: the config's")
    flags.add_argument(
        "--examples",
        type=int,
        default=8,
        help="of the layers' pass, which keeps all outputs in memory",
    )
    return flags


def compare(config: ConfigDict, args: argparse.Namespace) -> dict:
    """Carries out the comparison.

    Args:
      config: of a run.
      args: of `parser`.

    Returns:
      {"reference", "environment", "layers": {arm: {name: [relative errors]}}, "losses": {arm: [steps]},
      "seeds": [[steps] of the reference]}.

    Raises:
      ConfigError: an arm that does not exist, or numbers that do not fit.
    """
    config = prepare(config, args)
    arms = args.arms or [f"{config.model.recipe}:{config.model.dtype}", "standard:bfloat16"]
    configs = {arm: of_arm(config, arm) for arm in [REFERENCE, *arms]}
    others = [arm for arm in configs if arm != REFERENCE]
    if not others:
        raise ConfigError(f"--arms names {REFERENCE} alone, which is what arms are compared with")
    batches = first_batches(config, max(1, args.steps))
    few = {name: rows[: args.examples] for name, rows in batches[0].items() if name != "index"}
    reference = observe(configs[REFERENCE], few)
    layers = {}
    for arm in others:
        layers[arm] = layer_errors.errors(reference, observe(configs[arm], few))
        tell(f"layers of {arm}")
    del reference
    seeds, losses = [], {}
    if args.steps:
        first = config.train.seed
        seeds = losses_of(configs[REFERENCE], args.steps, list(range(first, first + args.seeds)))
        tell(f"{REFERENCE}: loss {', '.join(f'{late(curve):.4f}' for curve in seeds)}")
        for arm in others:
            (losses[arm],) = losses_of(configs[arm], args.steps, [first])
            tell(f"{arm}: loss {late(losses[arm]):.4f}")
    return {
        "reference": REFERENCE,
        "environment": environment.describe().splitlines(),
        "batch_size": config.train.batch_size,
        "examples": len(few["text"]),
        "layers": layers,
        "losses": losses,
        "seeds": seeds,
    }


def tell(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def prepare(config: ConfigDict, args: argparse.Namespace) -> ConfigDict:
    """The config with the comparison's sizes; blocks in a scan, which compiles fast and keeps no more."""
    if args.steps < 0 or args.seeds < 1 or args.examples < 1 or args.batch_size < 0:
        raise ConfigError(
            f"--steps={args.steps} and --batch-size={args.batch_size} must not be negative, "
            f"--seeds={args.seeds} and --examples={args.examples} not be below 1"
        )
    config = changed(config)
    with config.unlocked():
        config.train.batch_size = args.batch_size or config.train.batch_size
        config.train.accumulation = 1
        config.train.steps, config.train.epochs, config.train.examples = args.steps, 0.0, 0
        config.schedule.warmup_steps = args.steps // 5
        config.schedule.warmup_epochs, config.schedule.warmup_examples = 0.0, 0
        config.model.scan_layers, config.model.attention = True, "xla"
    return config


def changed(config: ConfigDict, *, seed: int | None = None) -> ConfigDict:
    """A copy, with another seed."""
    config = config.copy_and_resolve_references()
    if seed is not None:
        config.train.seed = seed
    return config.lock()


def of_arm(config: ConfigDict, arm: str) -> ConfigDict:
    """The config in the recipe and dtype that an arm names."""
    recipe, _, dtype = arm.partition(":")
    choice("model.recipe", recipe, RECIPES)
    choice("model.dtype", dtype or config.model.dtype, KEYS["model.dtype"].choices)
    config = changed(config)
    config.model.recipe, config.model.dtype = recipe, dtype or config.model.dtype
    if dtype == "float16" and not config.optimizer.loss_scaling:
        config.optimizer.loss_scaling = "per_tensor"
    return config


def first_batches(config: ConfigDict, count: int) -> list[dict[str, np.ndarray]]:
    """The batches that a run of the config begins with, on the host."""
    mesh, _ = check_config(config)
    source, share = open_source(config, "train"), sharding.batch_share(mesh)
    with closing(open_batches(config, source, None, share)) as batches:
        return [next(batches) for _ in range(count)]


def observe(config: ConfigDict, batch: dict) -> dict[str, jax.Array]:
    """Outputs and gradients of the config's model on a batch, see `layer_errors.observe`."""
    _, cfg = check_config(config)
    scale = config.optimizer.loss_scale if config.optimizer.loss_scaling else 1.0
    return layer_errors.observe(config, cfg, batch, scale=scale)


def losses_of(config: ConfigDict, steps: int, seeds: list[int]) -> list[list[float]]:
    """The losses of a short run from each seed: the trainer's step, on the trainer's batches.

    One program serves all seeds: they differ in parameters and batches, not in augmentation and dropout.

    Args:
      config: its `train.steps` is `steps`.
      steps: of each run.
      seeds: of the runs.

    Returns:
      The loss of every step, for each seed.
    """
    source = open_source(config, "train")
    parts = assemble(config, source)
    step = make_train_step(config, parts.graphdef, parts.optimizer, parts.schedule)
    step = jax.jit(step, donate_argnums=0)

    def run(config: ConfigDict) -> list[float]:
        init, _ = make_init(config, parts.model, parts.optimizer)
        state, metrics = first_state(config, init, parts.like), {}
        share = sharding.batch_share(parts.mesh)
        with closing(open_batches(config, source, None, share)) as batches:
            for number in range(1, steps + 1):
                batch = sharding.shard_batch(next(batches), parts.mesh)
                state, metrics[number] = step(state, batch)  # fetched at the end: nothing waits
        return [record["train/loss"] for record in fetch(metrics)]

    return [run(changed(config, seed=seed)) for seed in seeds]


def finite(tree: Any) -> Any:
    """The tree with None for NaN and infinities, which JSON cannot store."""
    return jax.tree.map(
        lambda x: None if isinstance(x, float) and not math.isfinite(x) else x, tree
    )


def late(losses: list[float]) -> float:
    """The mean loss of the last quarter, which averages over batches."""
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
