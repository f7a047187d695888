"""Measures whether int8 costs accuracy: paired runs on icons, with the width and depth of ViT-B, L and H.

Command:  python benchmarks/studies/icons.py --archive=data/iconify-json-2.2.535.tgz \\
            --out=benchmarks/results/icons_accuracy.json

Runs with one seed are a pair: they start from the same parameters and see the same drawings, augmentations
and dropped patches, whatever their recipe. The learning rate is tuned for "standard" on the top-1 of the
validation names, and used for all recipes. Images have 64 x 64 pixels in patches of 8. Half of the patches
are dropped, so wgrad sums 33 tokens per image; captions have 16 tokens.

For its first 100 to 400 steps, the loss of a deep CLIP stays near that of chance. Small differences determine
when it begins to fall. --shared=600 excludes this from the comparison: the runs of a pair continue from the
same 600 steps of "standard". The arm "control" is "standard" from a start that is changed by one part in a
million. Its differences from "standard" are those of any change in rounding.

Rounding errors are visible where gradients have little noise, as in large batches. --set changes keys of the
config, so that a narrower model leaves memory for them. With all 65 tokens of an image, a batch of 16,384
sums 1,064,960 tokens:

  python benchmarks/studies/icons.py --archive=data/iconify-json-2.2.535.tgz --batch=16384 \\
    --set model.patch_dropout=0 model.vision.width=128 model.vision.layers=4 model.vision.heads=2 \\
    model.text.width=128 model.text.layers=2 model.text.heads=2 --rates=2e-3 --warmup=300 --shared=700 \\
    --steps=1200 --arms standard control llm_int8 switchback switchback_hadamard \\
    --out=benchmarks/results/icons_large_batch_shared_700.json

On several GPUs the command runs once for each, with one --claims folder and a file of its own:

  CUDA_VISIBLE_DEVICES=1 python benchmarks/studies/icons.py ... --claims=runs/claims --out=runs/card1.json

Scores are those of the trainer's evaluators, on three tests: unseen names ("test"), unseen icon sets
("test_sets"), and unseen names in unseen sets ("test_both").
"""

import argparse
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import paired
import study

SIZES = {"B": "vit_b16", "L": "vit_l14", "H": "vit_h14"}
TESTS = ("test", "test_sets", "test_both")
CAPTIONS, SIDE, CONTEXT = 8, 64, 16
PART = 512  # drawings that a process reads at once


def main(argv=None) -> dict:
    args = parse(argv)
    return study.carry_out(args, runs(args), paired.table)


def parse(argv) -> argparse.Namespace:
    flags = study.parser(__doc__)
    flags.add_argument("--sizes", nargs="+", default=["B"], choices=SIZES)
    default = ["standard", "switchback"]
    flags.add_argument("--arms", nargs="+", default=default, help=f"recipes, and {paired.CONTROL}")
    flags.add_argument("--rates", nargs="+", type=float, default=[5e-4])
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    flags.add_argument("--steps", type=int, default=2400)
    flags.add_argument("--warmup", type=int, default=720, help="steps")
    flags.add_argument("--shared", type=int, default=0, help="steps that the runs of a pair share")
    paired.states_flag(flags)
    flags.add_argument("--batch", type=int, default=2048)
    flags.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of configs/icons.py"
    )
    corpus_flags(flags)
    args = flags.parse_args(argv)
    if args.smoke:
        args.source, args.batch, args.seeds = "synthetic", 8, [0, 1]
        args.steps, args.warmup, args.shared = 100, 10, 50
        args.arms = [*args.arms, paired.CONTROL]
    return args


def corpus_flags(flags: argparse.ArgumentParser) -> None:
    """Adds the flags that name the icons and where they are."""
    flags.add_argument("--source", default="full", help="of the icons: full or slice; or synthetic")
    flags.add_argument("--data", default=str(study.ROOT / "data"), help="prepared data sets")
    flags.add_argument("--archive", default="", help="path of the npm package")


def runs(args: argparse.Namespace) -> Iterable[study.Run]:
    """Lists all arms of a seed before the next seed, so that an interrupted study has whole pairs."""
    settings = {
        name: getattr(args, name) for name in ("steps", "warmup", "shared", "batch", "source")
    }
    if args.set:  # keys of runs without it stay as they were
        settings["set"] = " ".join(args.set)
    for size, rate, seed, arm in itertools.product(args.sizes, args.rates, args.seeds, args.arms):
        key = {"size": size, "rate": rate, "seed": seed, "arm": arm, **settings}
        yield key, lambda key=key: train(args, key)


# --- training -----------------------------------------------------------------------------------------


def train(args: argparse.Namespace, key: dict) -> dict:
    """Trains one run; returns its losses, and its scores on the validation names and the three tests."""
    import engine

    files = args.source, args.data, args.archive
    settings = args.steps, args.warmup, args.batch, tuple(args.set)
    is_control = key["arm"] == paired.CONTROL
    recipe = "standard" if is_control else key["arm"]
    trainer = make_trainer(files, key["size"], recipe, *settings)
    hyper = engine.Hyper(seed=key["seed"], lr=key["rate"], b2=0.98).typed()
    began = time.perf_counter()
    first = make_trainer(files, key["size"], "standard", *settings) if args.shared else trainer
    kept = paired.state_file(args.states, key) if args.shared else None
    params, state = engine.begin(first, hyper, args.shared, kept)
    start = paired.fingerprint(params)
    params = engine.nudged(params, key["seed"]) if is_control else params
    params, measured = trainer.resume(hyper, (params, state), args.shared)
    seconds = time.perf_counter() - began
    corpora = {name: read(*files)[name] for name in ("val", *TESTS)}
    return {
        "start": start,
        "training_seconds": round(seconds, 1),
        "grad_norm": study.thin(measured["grad_norm"]),
        "rms_patch_embed": study.thin(measured["rms/vision/patch_embed/kernel"]),
        **paired.result(trainer, params, measured, corpora),
    }


@functools.cache  # seeds and rates share compiled programs
def make_trainer(
    files: tuple,
    size: str,
    arm: str,
    steps: int,
    warmup: int,
    batch: int,
    changes: tuple[str, ...],
    program: str = "adamw",
):
    """The trainer for a size and a recipe.

    `changes` are KEY=VALUE pairs of the config. `program` names an optimizer of optimizers.py; "adamw" is the
    paper's, StableAdamW, if `Hyper.threshold` is finite. The source "synthetic", which tests this study, uses
    a small model.
    """
    import engine
    import optimizers

    from swjax.training import config as config_lib
    from swjax.training import setup

    changed = {"model.name": SIZES[size], "model.recipe": arm, "model.scan_layers": "true"}
    if files[0] == "synthetic":
        small = {"layers": "1", "width": "32", "heads": "2"}
        changed |= {f"model.{t}.{k}": v for t in ("vision", "text") for k, v in small.items()}
    changed |= dict(change.split("=", 1) for change in changes)
    config = config_lib.load(f"{study.ROOT}/configs/icons.py", list(changed.items()))
    return engine.Trainer(
        setup.model_config(config),
        read(*files)["train"],
        steps=steps,
        warmup=warmup,
        end=0.0,
        batch=batch,
        decay=0.2,
        together=False,
        optimizer=optimizers.optimizer(program),
    )


# --- data ---------------------------------------------------------------------------------------------


@functools.cache
def read(source: str, directory: str, archive: str) -> dict:
    """Reads the corpora by split. Decoded icons are stored in files, which all runs of a machine read."""
    import engine

    if source == "synthetic":
        train, test, _ = engine.corpora("synthetic", SIDE, directory)
        return {"train": train, **dict.fromkeys(("val", *TESTS), test)}
    folder = Path(directory) / "icons" / f"study-{source}-{SIDE}"
    splits = ("train", "val", *TESTS)
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:  # starts with the first task
        files = source, directory, archive
        return engine.kept(folder, splits, lambda split: load(pool, split, *files))


def load(pool: ProcessPoolExecutor, split: str, *files: str):
    """Decodes the drawings of a split in a pool of processes. In "train" each has its own captions."""
    import engine

    icons = _open(split, *files)
    parts = [range(start, min(start + PART, len(icons))) for start in range(0, len(icons), PART)]
    read_part = functools.partial(_read, (split, *files))
    columns = zip(*pool.map(read_part, parts), strict=True)
    image, label, captions = (np.concatenate(column) for column in columns)
    if split == "train":
        return engine.Corpus(image, label, np.arange(len(label), dtype=np.int32), captions)
    named = [icons.captions(number) for number in range(len(icons.class_names))]
    return engine.Corpus(image, label, label, _tokens(named))


@functools.cache  # a process of the pool opens a split once
def _open(split: str, source: str, directory: str, archive: str):
    from swjax import data

    return data.source("icons", split, data_dir=directory, config=source, archive=archive)


def _read(opened: tuple[str, ...], part: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads images, labels and captions of a part of a split."""
    from swjax.data.images import fit

    icons = _open(*opened)
    examples = [icons[index] for index in part]
    images = np.stack([fit(example["image"], SIDE) for example in examples])
    labels = np.array([example["label"] for example in examples], np.int32)
    return images, labels, _tokens([example["captions"] for example in examples])


def _tokens(captions: list[tuple[str, ...]]) -> np.ndarray:
    """Token ids [n, CAPTIONS, CONTEXT]; captions are repeated where there are fewer."""
    from swjax import data

    said = [own[i % len(own)] for own in captions for i in range(CAPTIONS)]
    return data.tokenize(said, CONTEXT).reshape(-1, CAPTIONS, CONTEXT)


if __name__ == "__main__":
    main(sys.argv[1:])
