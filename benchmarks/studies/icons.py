"""Does int8 cost accuracy? Paired runs on drawings of icon sets, at the width and depth of ViT-B, L and H.

Command:  python benchmarks/studies/icons.py --archive=data/iconify-json-2.2.535.tgz \\
            --out=benchmarks/results/icons_accuracy.json --plot=benchmarks/notes/images/icons_accuracy.png

Runs with one seed are a pair: they start from the same parameters and see the same pairs, augmentations and
dropped patches, whatever their recipe. The learning rate is chosen for "standard", by the top-1 of the
validation names, and then used for all. Images have 64 pixels and patches of 8. Half of the patches are
dropped, so wgrad contracts 33 tokens an image; captions have 16 tokens.

A deep CLIP stays near the loss of chance for some 100 to 400 steps, and small differences decide when it
leaves it. --shared=600 takes this out of the comparison: the runs of a pair continue from the same 600 steps
of "standard".

Scores are those of the trainer's evaluators, on three tests: unseen names ("test"), unseen icon sets
("test_sets"), and unseen names in unseen sets ("test_both").
"""

import argparse
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import study

SIZES = {"B": "vit_b16", "L": "vit_l14", "H": "vit_h14"}
TESTS = ("test", "test_sets", "test_both")
SCORES = ("top1", "image_to_text_R@10", "text_to_image_R@10")
# Equal in runs that are compared.
SETTINGS = ("size", "rate", "batch", "steps", "warmup", "shared", "source")
CAPTIONS, SIDE, CONTEXT = 8, 64, 16
PART = 512  # drawings that a process reads at once


def main(argv=None) -> dict:
    args = parse(argv)
    return study.carry_out(args, runs(args), draw, table)


def parse(argv) -> argparse.Namespace:
    flags = study.parser(__doc__)
    flags.add_argument("--sizes", nargs="+", default=["B"], choices=SIZES)
    flags.add_argument("--arms", nargs="+", default=["standard", "switchback"], help="recipes")
    flags.add_argument("--rates", nargs="+", type=float, default=[5e-4])
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    flags.add_argument("--steps", type=int, default=2400)
    flags.add_argument("--warmup", type=int, default=720, help="steps")
    flags.add_argument("--shared", type=int, default=0, help="steps that the runs of a pair share")
    flags.add_argument("--batch", type=int, default=2048)
    flags.add_argument("--source", default="full", help="of the icons: full or slice; or synthetic")
    flags.add_argument("--data", default=str(study.ROOT / "data"), help="prepared data sets")
    flags.add_argument("--archive", default="", help="path of the npm package")
    args = flags.parse_args(argv)
    if args.smoke:
        args.source, args.batch, args.seeds = "synthetic", 8, [0, 1]
        args.steps, args.warmup, args.shared = 100, 10, 50
    return args


def runs(args: argparse.Namespace) -> Iterable[study.Run]:
    """Every arm of a seed before the next seed, so that a study which is cut short has whole pairs."""
    settings = {
        name: getattr(args, name) for name in ("steps", "warmup", "shared", "batch", "source")
    }
    for size, rate, seed, arm in itertools.product(args.sizes, args.rates, args.seeds, args.arms):
        key = {"size": size, "rate": rate, "seed": seed, "arm": arm, **settings}
        yield key, lambda key=key: train(args, key)


# --- training -----------------------------------------------------------------------------------------


def train(args: argparse.Namespace, key: dict) -> dict:
    """One run: its losses, and its scores on the validation names and the three tests."""
    import engine
    import jax

    files = args.source, args.data, args.archive
    lengths = args.steps, args.warmup, args.batch
    trainer = make_trainer(files, key["size"], key["arm"], *lengths)
    hyper = engine.Hyper(*map(np.float32, engine.Hyper(lr=key["rate"], b2=0.98)))
    hyper = hyper._replace(seed=np.int32(key["seed"]))
    began = time.perf_counter()
    first = make_trainer(files, key["size"], "standard", *lengths) if args.shared else trainer
    params, measured = trainer.resume(hyper, begin(first, hyper, args.shared), args.shared)
    seconds = time.perf_counter() - began
    loss, corpora = measured["loss"], read(*files)
    return {
        "device": jax.devices()[0].device_kind,
        "training_seconds": round(seconds, 1),
        "final_loss": float(loss[-max(1, len(loss) // 10) :].mean()),
        "loss": study.thin(loss),
        "grad_norm": study.thin(measured["grad_norm"]),
        "rms_patch_embed": study.thin(measured["rms/vision/patch_embed/kernel"]),
        **{name: scores(trainer, params, corpora[name]) for name in ("val", *TESTS)},
    }


@functools.lru_cache(maxsize=1)  # the arms of a seed follow each other
def begin(trainer, hyper, steps: int):
    """What the runs of a pair start from, on the host."""
    return trainer.begin(hyper, steps)


@functools.cache  # seeds and rates share compiled programs
def make_trainer(files: tuple, size: str, arm: str, steps: int, warmup: int, batch: int):
    """The trainer of a size and a recipe, with the paper's optimizer.

    Synthetic patterns, which test the study itself, are learned by a small model.
    """
    import engine

    from swjax.training import config as config_lib
    from swjax.training import setup

    changed = {"model.name": SIZES[size], "model.recipe": arm, "model.scan_layers": "true"}
    if files[0] == "synthetic":
        small = {"layers": "1", "width": "32", "heads": "2"}
        changed |= {f"model.{t}.{k}": v for t in ("vision", "text") for k, v in small.items()}
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
    )


def scores(trainer, params, corpus) -> dict[str, float]:
    """Top-1 among the names by the four templates; recall of the names, and of the images of a name."""
    from swjax.evaluators import embed, ranking

    images, captions = trainer.embeddings(params, corpus)
    images, prompts, names = embed.unit(images), captions[:, :4], embed.unit(captions[:, 0])
    classes = embed.unit(
        embed.unit(prompts.reshape(-1, prompts.shape[-1])).reshape(prompts.shape).mean(1)
    )
    own = [[label] for label in corpus.label]
    of_name = np.split(
        np.argsort(corpus.label, kind="stable"), np.bincount(corpus.label).cumsum()[:-1]
    )
    found = {"top1": ranking.recall(ranking.ranks(images, classes, own), 1)}
    for direction, rank in (
        ("image_to_text", ranking.ranks(images, names, own)),
        ("text_to_image", ranking.ranks(names, images, of_name)),
    ):
        found |= {f"{direction}_R@{k}": ranking.recall(rank, k) for k in (1, 10)}
    return found


# --- data ---------------------------------------------------------------------------------------------


@functools.cache
def read(source: str, directory: str, archive: str) -> dict:
    """The corpora by split. Those of icons are kept in a file: all runs of a machine read it."""
    import engine
    import jax
    import jax.numpy as jnp

    if source == "synthetic":
        train, test, _ = engine.corpora("synthetic", SIDE, directory)
        return {"train": train, **dict.fromkeys(("val", *TESTS), test)}
    from swjax.data.preparation import lock

    found, folder = {}, Path(directory) / "icons" / f"study-{source}-{SIDE}"
    with lock(folder.with_suffix(".lock")):
        for split in ("train", "val", *TESTS):
            path = folder / f"{split}.npz"
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part.npz")
                np.savez(part, **load(split, directory, source, archive)._asdict())
                part.rename(path)
            with np.load(path) as arrays:
                found[split] = engine.Corpus(**arrays)
    found["train"] = jax.tree.map(jnp.asarray, found["train"])  # one copy for all trainers
    return found


def load(split: str, directory: str, source: str, archive: str):
    """The drawings of a split, decoded by all cores. In training each has its own captions."""
    import engine

    from swjax import data

    icons = data.source("icons", split, data_dir=directory, config=source, archive=archive)
    parts = [range(start, min(start + PART, len(icons))) for start in range(0, len(icons), PART)]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn"), _open, (icons,)) as pool:
        columns = zip(*pool.map(_read, parts), strict=True)
        image, label, captions = (np.concatenate(column) for column in columns)
    if split == "train":
        return engine.Corpus(image, label, np.arange(len(label), dtype=np.int32), captions)
    named = [icons.captions(number) for number in range(len(icons.class_names))]
    return engine.Corpus(image, label, label, _tokens(named))


def _open(icons) -> None:
    global _icons
    _icons = icons


def _read(part: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels and captions of some drawings."""
    from swjax.data.images import fit

    examples = [_icons[index] for index in part]
    images = np.stack([fit(example["image"], SIDE) for example in examples])
    labels = np.array([example["label"] for example in examples], np.int32)
    return images, labels, _tokens([example["captions"] for example in examples])


def _tokens(captions: list[tuple[str, ...]]) -> np.ndarray:
    """Token ids [n, CAPTIONS, CONTEXT]; captions are repeated where there are fewer."""
    from swjax import data

    said = [own[i % len(own)] for own in captions for i in range(CAPTIONS)]
    return data.tokenize(said, CONTEXT).reshape(-1, CAPTIONS, CONTEXT)


# --- results ------------------------------------------------------------------------------------------


def differences(some: list[dict], arm: str, split: str, score: str) -> list[float]:
    """An arm's score less that of "standard", in points, for each seed that both have."""
    of = {(run["key"]["arm"], run["key"]["seed"]): run["result"][split][score] for run in some}
    seeds = sorted(seed for name, seed in of if name == arm and ("standard", seed) in of)
    return [100 * (of[arm, seed] - of["standard", seed]) for seed in seeds]


def compared(runs: list[dict]) -> Iterable[tuple[tuple, str, list[dict]]]:
    """(settings, arm, runs with these settings) for each arm that has pairs."""
    for settings, some in study.group(runs, *SETTINGS).items():
        for arm in dict.fromkeys(run["key"]["arm"] for run in some):
            if arm != "standard" and differences(some, arm, "test", "top1"):
                yield settings, arm, some


def table(runs: list[dict]) -> None:
    """Scores of each arm, and differences from "standard" with their 95% intervals."""
    for (*settings, arm), some in study.group(runs, *SETTINGS, "arm").items():
        named = ", ".join(f"{name} {value}" for name, value in zip(SETTINGS, settings))
        print(f"{named}: {arm}, {len(some)} seeds")
        for split in ("val", *TESTS):
            means = (
                f"{score} {100 * study.interval(r['result'][split][score] for r in some)[0]:.2f}"
                for score in SCORES
            )
            print(f"  {split}: {', '.join(means)}")
    for settings, arm, some in compared(runs):
        print(f"{settings[0]}, rate {settings[1]:g}: {arm} less standard, points")
        for split, score in itertools.product(TESTS, SCORES):
            pairs = differences(some, arm, split, score)
            mean, half = study.interval(pairs)
            print(f"  {split} {score}: {mean:+.2f} +- {half:.2f} ({len(pairs)} pairs)")


def draw(figure, runs: list[dict]) -> None:
    """Paired differences of top-1 with their intervals; losses over each other."""
    figure.set_size_inches(11, 3.8)
    left, right = figure.subplots(1, 2)
    arms = list(compared(runs))
    rows = list(itertools.product(arms, TESTS))
    for i, ((_, arm, some), split) in enumerate(rows):
        mean, half = study.interval(differences(some, arm, split, "top1"))
        error = None if math.isnan(half) else half
        left.errorbar(mean, -i, xerr=error, fmt="o", markersize=4, color=f"C{TESTS.index(split)}")
    left.set_yticks(
        [-i for i in range(len(rows))],
        [f"{settings[0]}, {arm}: {split}" for (settings, arm, _), split in rows],
    )
    left.axvline(0, color="0.5", linewidth=0.8)
    left.set(title="top-1 less that of standard: points, 95% intervals")
    shown = [(settings, some) for settings, _, some in arms[:1]]
    for _, some in shown:
        first = min(run["key"]["seed"] for run in some)
        for run in some:
            if run["key"]["seed"] == first:
                curve = run["result"]["loss"]
                steps = [run["key"]["shared"] + step for step in study.thinned_steps(curve)]
                right.plot(steps, curve, linewidth=0.9, label=run["key"]["arm"])
    right.set(xlabel="step", title="loss of one pair")
    if shown:
        right.legend()


if __name__ == "__main__":
    main(sys.argv[1:])
