"""Scores a run or other CLIP weights without training; prints JSON.

  python -m swjax evaluate --workdir=runs/openmoji
  python -m swjax evaluate --weights=clip.safetensors --data=pets=folders:pets/val
  python -m swjax evaluate --weights=clip.safetensors --split=val --config.data.name=tfds \\
      --config.data.tfds.builder=coco_captions

--workdir   a run: scores its newest checkpoint on the data of its config
--weights   a file by swjax.inference.save, or weights of open_clip, OpenAI or Hugging Face: a file, its
            folder, or the name of a model, as in docs/fine_tuning.md
--data      a labelled set, [NAME=]KIND:WHERE, KIND: folders, webdataset, table, parquet, tfds; may
            be repeated
--split     val or test: retrieval on this split of the config's data; may be repeated. Default: both for a
            run; none for weights, unless --config.data.name is given
--config.K  overrides a key of configs/common.py, in its sections data and eval

Exit codes: 0 scored, 2 wrong command line, data or weights.
"""

import json
import sys

from swjax.arguments import expand_home
from swjax.training.faults.errors import ConfigError, RunError


def main(argv: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    if len(argv) == 1 or {"-h", "--help"} & set(argv):
        print(__doc__.strip(), file=sys.stdout if len(argv) > 1 else sys.stderr)
        return 0 if len(argv) > 1 else 2
    try:
        print(json.dumps(_score(expand_home(argv[1:])), indent=2, sort_keys=True))
    except (ConfigError, RunError) as error:
        print(f"swjax evaluate: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _score(arguments: list[str]) -> dict[str, float]:
    flags: dict[str, list[str]] = {"workdir": [], "weights": [], "data": [], "split": []}
    overrides = []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--config.") and equals:
            overrides.append((name.removeprefix("config."), value))
        elif not argument.startswith("--") or not equals or not value or name not in flags:
            raise ConfigError(
                f"unexpected argument {argument!r}: write every one as --flag=value; --help shows the flags"
            )
        else:
            flags[name].append(value)
    for name in ("workdir", "weights"):
        if len(flags[name]) > 1:
            raise ConfigError(f"--{name} is given {len(flags[name])} times: score one at a time")
    # Imported after parsing, so that a wrong command line is reported before the models load.
    from swjax.evaluate.scoring import SPLITS, score
    from swjax.training.faults.failures import blame_data

    unknown = [split for split in flags["split"] if split not in SPLITS]
    if unknown:
        raise ConfigError(f"--split={unknown[0]} is unknown: choose from {', '.join(SPLITS)}")
    has_data = bool(flags["workdir"]) or any(key == "data.name" for key, _ in overrides)
    with blame_data():
        return score(
            workdir="".join(flags["workdir"]),
            weights="".join(flags["weights"]),
            sets=flags["data"],
            splits=flags["split"] or (None if has_data else ()),
            overrides=overrides,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
