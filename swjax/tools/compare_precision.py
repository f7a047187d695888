"""`python -m swjax compare`: the effect of rounding on a model, per layer and over training steps.

  python -m swjax compare --config=configs/openmoji.py --workdir=runs/compare
  python -m swjax compare --config=... --workdir=... \\
      --arms switchback:bfloat16 llm_int8:bfloat16

An arm is a recipe and a dtype. Every arm starts from the same seed and sees the same batches as the
reference, which is float32 without quantization. The command writes compare_precision.html, a
self-contained page, and compare_precision.json into the workdir:

  layers   one forward and backward pass over some examples: the relative error of every linear layer's
           output, of the gradient at that output, and of every parameter's gradient
  loss     some training steps: the difference between the arm's loss and the reference's, and the
           spread of the reference over seeds

All config keys and --config.section.key=VALUE overrides apply, except durations, evaluation and profile.
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
from swjax.recipes import NAMES
from swjax.safe_files import explain, write_atomically
from swjax.tools import layer_errors
from swjax.training import config as config_lib
from swjax.training.config import ConfigError, RunError, choice
from swjax.training.faults.failures import blame_data
from swjax.training.inputs import open_batches, open_source
from swjax.training.keys import KEYS
from swjax.training.log import environment
from swjax.training.log.packed import fetch
from swjax.training.setup import assemble, check_config, make_init
from swjax.training.state.model_of_weights import settle_model
from swjax.training.state.restore import first_state

REFERENCE = "standard:float32"


def main(argv: list[str]) -> int:
    """Runs a command line and returns the exit code."""
    args, rest = parser().parse_known_args(argv[1:])
    try:
        config, workdir = config_lib.parse([argv[0], *rest])
        workdir.mkdir(parents=True, exist_ok=True)  # before the work: it may be no folder
        with blame_data():
            result = compare(settle_model(config, workdir), args)
    except (ConfigError, RunError, OSError) as error:
        print(f"swjax compare: {explain(error)}", file=sys.stderr)
        return 2
    from swjax.report import precision  # matplotlib is slow to load

    for line in precision.summary(result):
        print(line)
    try:
        text = json.dumps(finite(result), indent=1) + "\n"
        write_atomically(workdir / "compare_precision.json", text)
        print(precision.write(result, workdir))
    except OSError as error:
        print(f"swjax compare: {explain(error)}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command's own flags; all other flags override the config."""
    flags = argparse.ArgumentParser(
        prog="swjax compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = "the config's recipe and dtype, and standard:bfloat16"
    flags.add_argument("--arms", nargs="+", metavar="RECIPE:DTYPE", help=f"default: {own}")
    flags.add_argument("--steps", type=int, default=20, help="training steps; 0: layers only")
    flags.add_argument("--seeds", type=int, default=3, help="seeds of the reference's training")
    flags.add_argument(
        "--batch-size", type=int, default=32, help="pairs per training step; 0: the config's"
    )
    flags.add_argument(
        "--examples",
        type=int,
        default=8,
        help="examples of the layers' pass, which keeps all outputs in memory",
    )
    return flags


def compare(config: ConfigDict, args: argparse.Namespace) -> dict:
    """Runs the comparison.

    Args:
      config: the config of a run.
      args: the parsed flags of `parser`.

    Returns:
      {"reference", "environment", "layers": {arm: {name: relative error per block}}, "losses": {arm: loss
      per step}, "seeds": the reference's loss per step, for each seed}.

    Raises:
      ConfigError: an arm does not exist, or a number is out of range.
    """
    config = prepare(config, args)
    arms = args.arms or [config.model.recipe, "standard:bfloat16"]
    configs = dict(of_arm(config, arm) for arm in [REFERENCE, *arms])
    others = [arm for arm in configs if arm != REFERENCE]
    if not others:
        raise ConfigError(f"{REFERENCE} compares the reference with itself: name another in --arms")
    batches = first_batches(config, max(1, args.steps))
    few = {name: rows[: args.examples] for name, rows in batches[0].items() if name != "index"}
    reference = layer_errors.observe(configs[REFERENCE], few)
    layers = {}
    for arm in others:
        layers[arm] = layer_errors.errors(reference, layer_errors.observe(configs[arm], few))
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
    """Prints a line and flushes the output."""
    print(text, flush=True)


def prepare(config: ConfigDict, args: argparse.Namespace) -> ConfigDict:
    """The config with the comparison's sizes. It scans over blocks, which compiles fast and saves memory."""
    if args.steps < 0 or args.seeds < 1 or args.examples < 1 or args.batch_size < 0:
        raise ConfigError(
            f"--steps={args.steps} and --batch-size={args.batch_size} must be at least 0, "
            f"--seeds={args.seeds} and --examples={args.examples} at least 1"
        )
    if config.optimizer.lora.rank:
        raise ConfigError(
            f"config.optimizer.lora.rank={config.optimizer.lora.rank} freezes kernels in 8 bits, which have "
            "no float32 reference: set it to 0"
        )
    config = changed(config)
    with config.unlocked():
        config.train.batch_size = args.batch_size or config.train.batch_size
        config.train.accumulation, config.train.profile_steps = 1, ()
        config.train.steps, config.train.epochs, config.train.examples = args.steps, 0.0, 0
        config.schedule.warmup_steps = args.steps // 5
        config.schedule.warmup_epochs, config.schedule.warmup_examples = 0.0, 0
        config.model.scan_layers, config.model.attention = True, "xla"
    if args.examples > config.train.batch_size:
        raise ConfigError(
            f"--examples={args.examples} must be at most the {config.train.batch_size} pairs of a step: "
            "raise --batch-size"
        )
    return config


def changed(config: ConfigDict, *, seed: int | None = None) -> ConfigDict:
    """Copies the config, optionally with another seed."""
    config = config.copy_and_resolve_references()
    if seed is not None:
        config.train.seed = seed
    return config.lock()


def of_arm(config: ConfigDict, arm: str) -> tuple[str, ConfigDict]:
    """The full name of an arm, RECIPE:DTYPE, and a copy of the config with its recipe and dtype."""
    recipe, _, dtype = arm.partition(":")
    choice("model.recipe", recipe, NAMES)
    choice("model.dtype", dtype or config.model.dtype, KEYS["model.dtype"].choices)
    config = changed(config)
    config.model.recipe, config.model.dtype = recipe, dtype or config.model.dtype
    if config.model.dtype == "float16" and not config.optimizer.loss_scaling:
        config.optimizer.loss_scaling = "per_tensor"
    return f"{recipe}:{config.model.dtype}", config


def first_batches(config: ConfigDict, count: int) -> list[dict[str, np.ndarray]]:
    """The first batches of a run with this config, on the host."""
    mesh, _ = check_config(config)
    source, share = open_source(config, "train"), sharding.batch_share(mesh)
    with closing(open_batches(config, source, None, share)) as batches:
        return [next(batches) for _ in range(count)]


def losses_of(config: ConfigDict, steps: int, seeds: list[int]) -> list[list[float]]:
    """Trains a short run from each seed, with the trainer's step and batches, and returns the losses.

    All seeds share one compiled program, so they differ in parameters and batches, but not in augmentation
    and dropout.

    Args:
      config: its `train.steps` is `steps`.
      steps: number of steps of each run.
      seeds: one run for each seed.

    Returns:
      The loss of every step, for each seed.
    """
    source = open_source(config, "train")
    parts = assemble(config, source)
    step = parts.train_step(config)

    def run(config: ConfigDict) -> list[float]:
        init, _ = make_init(config, parts.model, parts.optimizer)
        state, metrics = first_state(config, init, parts.like), {}
        share = sharding.batch_share(parts.mesh)
        with closing(open_batches(config, source, None, share)) as batches:
            for number in range(1, steps + 1):
                batch = sharding.shard_batch(next(batches), parts.mesh)
                state, metrics[number] = step(state, batch)  # fetched later, so no step waits
        return [record["train/loss"] for record in fetch(metrics)]

    return [run(changed(config, seed=seed)) for seed in seeds]


def finite(tree: Any) -> Any:
    """Replaces NaN and infinities in a tree by None, because JSON cannot store them."""
    return jax.tree.map(
        lambda x: None if isinstance(x, float) and not math.isfinite(x) else x, tree
    )


def late(losses: list[float]) -> float:
    """The mean loss over the last quarter of the steps, which averages out the noise of batches."""
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
