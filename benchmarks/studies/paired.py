"""Paired runs: the results that the accuracy studies record, and their differences from another arm.

  python benchmarks/studies/paired.py benchmarks/results/icons_h_h100.json --base=switchback

prints the difference of every arm from the base, with 95% intervals and p-values of the paired t-test. It
pools the pairs of all settings in the file.

An arm is a variant under comparison, usually a recipe. Runs of two arms with the same seed are a pair: they
start from the same parameters and see the same batches and augmentations. Runs are compared if their keys
differ only in "arm" and "seed". Pairs that share their first steps must continue from the same stored state,
because another machine may round differently.
"""

import argparse
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import study
from scipy import stats

T = TypeVar("T", float, np.ndarray)
CONTROL = "control"  # the arm that is "standard" from a slightly changed start
SCORES = ("top1", "image_to_text_R@10", "text_to_image_R@10")


def result(trainer, params, measured: dict, corpora: dict) -> dict:
    """The recorded result of a run: device, losses, and the scores on each corpus."""
    import jax

    loss = measured["loss"]
    return {
        "device": jax.devices()[0].device_kind,
        "final_loss": float(loss[-max(1, len(loss) // 10) :].mean()),
        "loss": study.thin(loss),
        **{name: scores(trainer, params, corpus) for name, corpus in corpora.items()},
    }


def states_flag(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--states",
        type=Path,
        metavar="FOLDER",
        help="stores the states after shared steps, for other processes",
    )


def state_file(folder: Path | None, key: dict) -> Path | None:
    """The file in --states for the state after the shared steps of a run; all arms share it."""
    if not folder:
        return None
    settings = json.dumps({name: value for name, value in key.items() if name != "arm"})
    return folder / f"{hashlib.sha256(settings.encode()).hexdigest()[:12]}.npz"


def stored(path: Path, shapes: Any, compute: Callable[[], Any]) -> Any:
    """A tree of arrays on the host from a file, which the first process computes and writes.

    Args:
      path: the file, .npz.
      shapes: a tree of the same structure.
      compute: () -> the tree.
    """
    import jax

    from swjax.data.preparation import lock

    leaves, structure = jax.tree.flatten(shapes)
    with lock(path.with_suffix(".lock")):
        if not path.exists():
            part = path.with_suffix(".part.npz")
            np.savez(part, *jax.tree.leaves(compute()))
            part.rename(path)
    with np.load(path) as arrays:
        return structure.unflatten([arrays[f"arr_{i}"] for i in range(len(leaves))])


def fingerprint(params) -> str:
    """A hash of parameters, equal for runs of a pair that share their first steps."""
    import jax

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:12]


def scores(trainer, params, corpus) -> dict[str, float]:
    """Zero-shot top-1 with the first four captions as prompts, and recall in both directions."""
    from swjax.evaluators import embed, ranking

    prompted = corpus._replace(captions=corpus.captions[:, :4])
    images, prompts = trainer.embeddings(params, prompted)
    images, names = embed.unit(images), embed.unit(prompts[:, 0])
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


# --- comparison ---------------------------------------------------------------------------------------


def differences(
    some: list[dict], arm: str, split: str, score: str, base: str = "standard"
) -> list[float]:
    """An arm's score minus that of `base`, in percentage points, for each seed that both have."""
    return minus(some, arm, lambda result: 100 * result[split][score], base)


def final_loss(result: dict) -> float:
    return result["final_loss"]


def minus(
    some: list[dict], arm: str, value: Callable[[dict], T], base: str = "standard"
) -> list[T]:
    """A value of an arm's result minus that of `base`, a number or an array, for each seed that both have.

    Raises:
      ValueError: two runs with one seed start from different parameters.
    """
    of = {(run["key"]["arm"], run["key"]["seed"]): run["result"] for run in some}
    pairs = {
        seed: (own, of[base, seed])
        for (name, seed), own in of.items()
        if name == arm and (base, seed) in of
    }
    for seed, (own, other) in pairs.items():
        if own.get("start") != other.get("start"):
            raise ValueError(
                f"{arm} and {base} of seed {seed} must start from the same parameters, got "
                f"{own.get('start')} and {other.get('start')}: run both in one process"
            )
    return [value(own) - value(other) for _, (own, other) in sorted(pairs.items())]


def alike(runs: list[dict]) -> dict[str, list[dict]]:
    """Groups runs by all keys except arm and seed; a group is named by the settings that vary."""
    names = dict.fromkeys(n for run in runs for n in run["key"] if n not in ("arm", "seed"))
    groups = study.group(runs, *names)
    differ = [len(set(values)) > 1 for values in zip(*groups, strict=True)]
    return {
        ", ".join(f"{n} {v}" for n, v, d in zip(names, values, differ, strict=True) if d): some
        for values, some in groups.items()
    }


def compared(runs: list[dict]) -> Iterable[tuple[str, str, list[dict]]]:
    """Yields (settings, arm, runs with these settings) for each arm that has pairs."""
    for settings, some in alike(runs).items():
        for arm in dict.fromkeys(run["key"]["arm"] for run in some):
            if arm != "standard" and differences(some, arm, "test", "top1"):
                yield settings, arm, some


def splits(runs: list[dict]) -> list[str]:
    """The names of the corpora that have scores."""
    return [name for name, value in runs[0]["result"].items() if isinstance(value, dict)]


def tests(runs: list[dict]) -> list[str]:
    return [name for name in splits(runs) if name != "val"]


def table(runs: list[dict]) -> None:
    """Prints the scores of each arm, and their differences from "standard" with 95% intervals."""
    for settings, group in alike(runs).items():
        for (arm,), some in study.group(group, "arm").items():
            print(", ".join(filter(None, (settings, arm, f"{len(some)} seeds"))))
            for split, score in itertools.product(splits(some), SCORES):
                mean, half = study.interval(100 * run["result"][split][score] for run in some)
                print(f"  {split} {score}: {mean:.2f} +- {half:.2f}")
    for settings, arm, some in compared(runs):
        print(", ".join(filter(None, (settings, f"{arm} minus standard, points"))))
        for split, score in itertools.product(tests(some), SCORES):
            print(f"  {split} {score}: {told(differences(some, arm, split, score))}")
        losses = minus(some, arm, final_loss)
        print(f"  final loss, nats: {told(losses, digits=4)}")


def told(pairs: list[float], digits: int = 2) -> str:
    """Formats the mean, the 95% interval and the signs of paired differences."""
    mean, half = study.interval(pairs)
    above, below = (sum(sign * pair > 0 for pair in pairs) for sign in (1, -1))
    counts = f"{len(pairs)} pairs, {above} above, {below} below"
    return f"{mean:+.{digits}f} +- {half:.{digits}f} ({counts})"


def compare(runs: list[dict], base: str) -> None:
    """Prints the differences of every arm from `base`, over the pairs of all settings."""
    groups = alike(runs).values()
    for arm in dict.fromkeys(run["key"]["arm"] for run in runs):
        losses = [pair for some in groups for pair in minus(some, arm, final_loss, base)]
        if arm == base or not losses:
            continue
        print(f"{arm} minus {base}")
        print(f"  final loss, nats: {told(losses, digits=4)}, p = {p_value(losses):.2g}")
        scores = {
            f"{split} {score}": [
                pair for some in groups for pair in differences(some, arm, split, score, base)
            ]
            for split, score in itertools.product(tests(runs), SCORES)
        }
        ps = [p_value(pairs) for pairs in scores.values()]
        for (name, pairs), p, corrected in zip(scores.items(), ps, holm(ps), strict=True):
            tail = f"p = {p:.2g}, corrected for {len(ps)} tests {corrected:.2g}"
            print(f"  {name}, points: {told(pairs)}, {tail}")


def p_value(pairs: list[float]) -> float:
    """Two-sided p-value of the paired t-test; NaN for fewer than two pairs, and for equal differences.

    Scores are multiples of one example's share, so the differences of a few pairs can be equal.

    >>> p_value([0.19, 0.19 + 1e-15, 0.19])
    nan
    """
    if len(pairs) < 2 or np.ptp(pairs) < 1e-9:
        return math.nan
    return float(stats.ttest_1samp(pairs, 0).pvalue)


def holm(ps: list[float]) -> list[float]:
    """The p-values of several tests with Holm's correction for multiple tests; NaN stays NaN.

    >>> holm([0.01, 0.04, math.nan, 0.03])
    [0.03, 0.06, nan, 0.06]
    """
    order = sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=ps.__getitem__)
    corrected, largest = [math.nan] * len(ps), 0.0
    for rank, test in enumerate(order):
        largest = corrected[test] = max(largest, min(1.0, (len(order) - rank) * ps[test]))
    return corrected


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("file", type=Path, help="JSON of a study of pairs")
    flags.add_argument("--base", default="standard", help="the arm that others are compared with")
    args = flags.parse_args(argv)
    runs = study.load(args.file)["runs"]
    arms = dict.fromkeys(run["key"]["arm"] for run in runs)
    if args.base not in arms:
        flags.error(f"--base={args.base} is no arm of {args.file}: choose from {', '.join(arms)}")
    compare(runs, args.base)


if __name__ == "__main__":
    main()
