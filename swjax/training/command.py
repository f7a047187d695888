"""Trains CLIP: `swjax train --config=CONFIG[:ARG] --workdir=DIR [--config.section.key=VALUE ...]`.

  swjax train --config=openmoji --workdir=runs/openmoji
      trains; the same command resumes an interrupted run. CONFIG is a Python file or a name below
  swjax train --config=vith_int8 --plan --hardware=h200:8 --config.train.accumulation=8
      summarizes the run, and says whether it fits in memory; trains nothing

`python train.py` in a checkout is the same program; its --help has more examples. docs/config.md lists every
key. Exit codes: 0 finished, or saved and interrupted; 1 diverged; 2 wrong command line or config; 3 the disk,
the output or another machine failed; 130 Ctrl-C that ended it at once.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from swjax.arguments import expand_home
from swjax.packages import MissingPackage


def main(argv: list[str]) -> int:
    """Runs one command line and returns its exit code.

    Args:
      argv: the arguments; argv[0] is the program name, which starts each error message.
    """
    if len(argv) == 1 or {"-h", "--help", "-help", "--helpfull"} & set(argv):
        print(__doc__.strip())
        print("Names:", ", ".join(sorted(path.stem for path in _configs())))
        return 0 if len(argv) > 1 else 2
    try:
        return run([argv[0], *expand_home(argv[1:])])
    except ModuleNotFoundError as error:
        remedy = "" if isinstance(error, MissingPackage) else ": pip install 'swjax[train]'"
        print(f"{argv[0]}: {error}{remedy}", file=sys.stderr)
        return 2


def _configs() -> Iterator[Path]:
    """The configs of swjax: configs/ in a checkout, else swjax/configs."""
    root = Path(__file__).resolve().parents[1]
    folder = next(f for f in (root / "configs", root.parent / "configs") if f.is_dir())
    return (path for path in folder.glob("*.py") if path.stem != "common")


def run(argv: list[str]) -> int:
    """Trains or plans; see `main`."""
    # Imported here, so that a missing package is reported in one line.
    from swjax.training import config as config_lib

    leave: Callable[[int], int] = int
    try:
        if "--plan" in argv:
            return plan([argument for argument in argv if argument != "--plan"])
        config, workdir = config_lib.parse(argv)
        # Imported after parsing, so that a typo is reported before the training libraries load.
        from swjax.training import distributed, loop

        leave = distributed.leave
        return loop.train_and_evaluate(config, workdir)
    except (config_lib.ConfigError, config_lib.RunError) as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return leave(error.exit_code)


def plan(argv: list[str]) -> int:
    """`--plan`: prints a summary of the run."""
    from swjax.training import config as config_lib

    flag = "--hardware="
    hardware = next((a.removeprefix(flag) for a in reversed(argv) if a.startswith(flag)), "")
    others = [argument for argument in argv if not argument.startswith(flag)]
    if not any(argument.startswith("--workdir=") for argument in others):
        others.append("--workdir=none")  # `--plan` writes nothing
    config = config_lib.parse(others)[0]
    # Imported after parsing, so that a typo is reported first, and warnings have no prefix of absl's.
    from swjax.tools import plan as plan_lib

    return plan_lib.show(config, hardware)


if __name__ == "__main__":
    sys.exit(main(["swjax train", *sys.argv[1:]]))
