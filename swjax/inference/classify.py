"""Ranks names by how well they describe a picture.

python -m swjax classify runs/openmoji picture.png cat dog "red fox"
"""

import argparse
import os
import sys
from collections.abc import Sequence

from swjax.data.tokenizer import encode
from swjax.evaluators import zeroshot
from swjax.inference.encoder import Encoder, load
from swjax.safe_files import explain


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each name with its probability, the most likely name first.

    Args:
      arguments: arguments of the command line; None reads those of this process.

    Returns:
      The exit code: 0, or 2 if the model or the picture cannot be read.
    """
    parser = argparse.ArgumentParser(prog="swjax classify", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a run's workdir, weights or their folder, or a name")
    parser.add_argument("picture", help="an image file")
    parser.add_argument("names", nargs="+", help="of the classes to choose from, two or more")
    options = parser.parse_args(arguments)
    if len(options.names) < 2:
        parser.error(f"one name, {options.names[0]!r}, leaves no choice: give two or more")
    for name in options.names:
        if not name.strip():
            parser.error(f"the name {name!r} is empty: give names of classes")
        if os.path.splitext(name)[1] and os.path.isfile(name):  # as from a shell's *.jpg
            parser.error(f"the name {name!r} is a file: give one picture, then names of classes")
        if [encode(other) for other in options.names].count(encode(name)) > 1:
            parser.error(f"the name {name!r}, given twice, shares its probability: give it once")
    try:
        model = load(options.model)
        _check_distinct(options.names, model)
        (probabilities,) = model.classify(options.picture, model.classifier(options.names))
    except (OSError, ValueError) as error:
        print(f"swjax classify: {explain(error)}", file=sys.stderr)
        return 2
    for share, name in sorted(
        zip(probabilities.tolist(), options.names, strict=True), reverse=True
    ):
        print(f"{share:7.2%}  {name}")
    return 0


def _check_distinct(names: Sequence[str], model: Encoder) -> None:
    tokens = model.cfg.text.context_length
    firsts = zeroshot.distinct(names, model.templates, tokens, model.tokenizer)
    for name, first in zip(names, firsts, strict=True):
        if name != names[first]:
            raise ValueError(
                f"the model reads at most {tokens} tokens, and so {name!r} as {names[first]!r}: give shorter "
                "names"
            )


if __name__ == "__main__":
    sys.exit(main())
