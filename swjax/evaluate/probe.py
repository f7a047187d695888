"""Linear probe: logistic regression on the embeddings of a frozen model, as CLIP's paper scores features.

python -m swjax probe runs/openmoji --train=folders:pets/train --test=folders:pets/val --shots=1,4,16
"""

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np
from flax import nnx

from swjax import evaluators, inference
from swjax.data import Fitting
from swjax.data.labelled import Labelled
from swjax.evaluators import embed
from swjax.packages import MissingPackage, require
from swjax.safe_files import explain

STRENGTHS = np.logspace(-2, 6, 9)  # C: the inverse of the penalty on the weights
FOLDS = 5


def probe(
    encoder: inference.Encoder,
    train: str,
    test: str,
    shots: Sequence[int] = (),
    *,
    seed: int = 0,
    data_dir: str = "data",
) -> dict[str, float]:
    """Scores the image embeddings of a model by logistic regression.

    The penalty is chosen from `STRENGTHS` by cross-validation on the training pictures alone, in 5 folds, or
    fewer if a class has fewer pictures; with one picture a class it is 1. Unreadable pictures are left out.

    Args:
      encoder: the model.
      train, test: addresses of labelled sets with the same classes, see `swjax.data.labelled`.
      shots: numbers of training pictures of each class, drawn at random; () uses all pictures.
      seed: of the draws.
      data_dir: directory of prepared TFDS builders and of the positions of samples in tars.

    Returns:
      {"probe/top1": share of the test pictures whose class is predicted}; with `shots`
      {"probe/4_shot_top1": ...} for each number.

    Raises:
      BadData: too many pictures are unreadable.
      MissingPackage: scikit-learn is not installed.
      ValueError: the sets have other classes, or only one, or a class has fewer pictures than `shots`.
    """
    require("sklearn", extra="probe", user="swjax probe")
    (x, labels), (x_test, labels_test), names = _embedded(encoder, train, test, data_dir)
    fewest = np.bincount(labels, minlength=len(names))
    if fewest.min() < max(shots, default=1):
        raise ValueError(
            f"{train} has {fewest.min()} readable pictures of {names[int(fewest.argmin())]!r}, fewer than "
            f"{max(shots, default=1)}: add pictures, or ask for fewer shots"
        )
    if not shots:
        return {"probe/top1": _accuracy(x, labels, x_test, labels_test)}
    order = np.random.default_rng(seed).permutation(len(labels))
    rank = np.empty(len(labels), np.int64)  # of a picture among those of its class
    for label in range(len(names)):
        own = order[labels[order] == label]
        rank[own] = np.arange(len(own))
    return {
        f"probe/{count}_shot_top1": _accuracy(
            x[rank < count], labels[rank < count], x_test, labels_test
        )
        for count in shots
    }


def _embedded(encoder: inference.Encoder, train: str, test: str, data_dir: str):
    """Returns (embeddings, labels) of both sets, with the labels of the first, and the class names."""
    sources = [Labelled(address, data_dir=data_dir) for address in (train, test)]
    names = list(sources[0].class_names)
    if sorted(names) != sorted(sources[1].class_names):
        odd = sorted(set(names) ^ set(sources[1].class_names))
        raise ValueError(
            f"{train} and {test} must have the same classes; only one of them has {', '.join(odd[:5])}: "
            "remove these classes, rename them, or add pictures of them to the other"
        )
    if len(names) < 2:
        raise ValueError(f"{train} must have at least two classes, got only {names[0]}: add others")
    vision = encoder.cfg.vision
    graph, params = nnx.split(encoder.model)
    predict = evaluators.predictor(graph, vision.image_size)
    parts = []
    for source in sources:
        found = embed.images(
            predict,
            params,
            source,
            batch_size=encoder.batch_size,
            context_length=encoder.cfg.text.context_length,
            image_size=vision.image_size,
            fitting=Fitting.of(vision),
        )
        # ImageNet has pairs of equal names: equal names keep their order.
        ours, theirs = (np.argsort(each, kind="stable") for each in (names, source.class_names))
        number = np.empty_like(ours)
        number[theirs] = ours
        parts.append((found.embeddings, number[found.labels]))
    return *parts, names


def _accuracy(x, labels, x_test, labels_test) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    folds = min(FOLDS, np.bincount(labels)[np.unique(labels)].min())
    model = LogisticRegression(max_iter=1000)
    if folds > 1:
        model = GridSearchCV(model, {"C": STRENGTHS}, cv=int(folds))
    return float(model.fit(x, labels).score(x_test, labels_test))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the scores of one command line as JSON.

    Args:
      arguments: arguments of the command line; None reads those of this process.

    Returns:
      The exit code: 0, or 2 if the model or the sets cannot be read.
    """
    parser = argparse.ArgumentParser(prog="swjax probe", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a run's workdir, weights or their folder, or a name")
    where = "[NAME=]KIND:WHERE, as for `swjax evaluate --data`"
    parser.add_argument("--train", required=True, help=f"labelled set to fit on, {where}")
    parser.add_argument("--test", required=True, help="labelled set to score")
    parser.add_argument("--shots", default="", help="pictures a class, as in 1,4,16; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn pictures")
    options = parser.parse_args(arguments)
    shots = [part for part in options.shots.split(",") if part]
    if not all(part.isdecimal() and int(part) for part in shots):
        parser.error(f"--shots={options.shots} must be positive numbers, as in 1,4,16")
    if options.seed < 0:
        parser.error(f"--seed={options.seed} must be at least 0")
    try:
        model = inference.load(options.model)
        sets = options.train, options.test
        scores = probe(model, *sets, [int(part) for part in shots], seed=options.seed)
    except (OSError, ValueError, MissingPackage) as error:
        print(f"swjax probe: {explain(error)}", file=sys.stderr)
        return 2
    print(json.dumps(scores, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
