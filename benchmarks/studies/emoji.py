"""Measures whether int8 costs accuracy on the default task: paired runs of configs/openmoji.py.

Command:  python benchmarks/studies/emoji.py --dtype=bfloat16 --seeds $(seq 0 39) \\
            --out=benchmarks/results/emoji_accuracy.json

Model, loss, optimizer, schedule, augmentation and first parameters are those of
`train.py --config=configs/openmoji.py`, and scores are those of the trainer's evaluators on the test split,
381 unseen names. The differences: batches are drawn with replacement; the 4 to 10 captions of a label are
repeated to 24, so their frequencies differ by up to 2 in 24; blocks run in a scan, which compiles faster. The
config's dtype is float32, for CPUs; --dtype=bfloat16 compares int8 with bf16.

One run does not use a whole GPU, so several processes share it. Each has one recipe, and compiles one
program. On two GPUs:

  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  for gpu in 0 1; do for arm in standard switchback switchback_hadamard llm_int8; do
    CUDA_VISIBLE_DEVICES=$gpu python benchmarks/studies/emoji.py --dtype=bfloat16 --arms $arm \\
      --seeds $(seq $gpu 2 79) --out=runs/emoji/$arm-$gpu.json &
  done; done; wait
  python benchmarks/studies/emoji.py --merge runs/emoji/*.json --out=benchmarks/results/emoji_accuracy.json
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import paired
import study

CAPTIONS = 24


def main(argv=None) -> dict:
    args = parse(argv)
    return study.carry_out(args, runs(args), paired.table)


def parse(argv) -> argparse.Namespace:
    flags = study.parser(__doc__)
    arms = ["standard", "switchback", "switchback_hadamard", "llm_int8"]
    flags.add_argument("--arms", nargs="+", default=arms, help="recipes")
    flags.add_argument("--seeds", nargs="+", type=int, default=list(range(20)))
    flags.add_argument("--steps", type=int, default=750, help="two fifths are warm-up")
    flags.add_argument("--dtype", default="float32", help="dtype of products without quantization")
    flags.add_argument("--source", default="emoji", help="or synthetic")
    flags.add_argument("--data", default=str(study.ROOT / "data"), help="prepared data sets")
    args = flags.parse_args(argv)
    if args.smoke:
        args.source, args.steps, args.arms, args.seeds = "synthetic", 50, args.arms[:2], [0, 1]
    return args


def runs(args: argparse.Namespace) -> Iterable[study.Run]:
    """Lists all arms of a seed before the next seed, so that an interrupted study has whole pairs."""
    settings = {name: getattr(args, name) for name in ("steps", "dtype", "source")}
    for seed, arm in itertools.product(args.seeds, args.arms):
        key = {"seed": seed, "arm": arm, **settings}
        yield key, lambda key=key: train(args, key)


def train(args: argparse.Namespace, key: dict) -> dict:
    """One run: its losses, and its scores on the test split."""
    import engine
    import jax

    trainer = make_trainer(args.source, args.data, key["arm"], args.steps, args.dtype)
    rate, b2 = trainer.config.optimizer.learning_rate, trainer.config.optimizer.b2
    began = time.perf_counter()
    params, (measured,) = trainer.train([engine.Hyper(seed=key["seed"], lr=rate, b2=b2)])
    seconds = time.perf_counter() - began
    params = jax.tree.map(lambda x: x[0], params)
    tests = {"test": read(args.source, args.data)["test"]}
    return {"training_seconds": round(seconds, 1)} | paired.result(trainer, params, measured, tests)


@functools.cache  # seeds share a compiled program
def make_trainer(source: str, directory: str, arm: str, steps: int, dtype: str):
    """The trainer of a recipe.

    Synthetic patterns, which test the study itself, are learned by a small model.
    """
    import engine

    from swjax.training import config as config_lib
    from swjax.training import setup

    changed = {"model.recipe": arm, "model.dtype": dtype, "model.scan_layers": "true"}
    if source == "synthetic":
        small = {"layers": "1", "width": "32", "heads": "2"}
        changed |= {f"model.{t}.{k}": v for t in ("vision", "text") for k, v in small.items()}
        changed |= {"train.batch_size": "8"}
    config = config_lib.load(f"{study.ROOT}/configs/openmoji.py", list(changed.items()))
    warmup = 2 * steps // 5
    return engine.Trainer(
        setup.model_config(config),
        read(source, directory)["train"],
        steps=steps,
        warmup=warmup,
        start=1 / warmup,
        end=config.schedule.floor,
        batch=config.train.batch_size,
        decay=config.optimizer.weight_decay,
        together=False,
    )


@functools.cache
def read(source: str, directory: str) -> dict:
    """The corpora by split. They are kept in 20 MB, which are all that another machine needs."""
    import engine

    from swjax import data

    if source == "synthetic":
        train, test, _ = engine.corpora("synthetic", 64, directory)
        return {"train": train, "test": test}

    def load(split):
        drawings = data.source("emoji", split, data_dir=directory)
        return engine.load(drawings, 64, context=16, captions=CAPTIONS)

    folder = Path(directory) / "emoji-study"
    return engine.kept(folder, ("train", "test"), load, np.savez_compressed)


if __name__ == "__main__":
    main(sys.argv[1:])
