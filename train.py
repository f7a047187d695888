"""Trains CLIP with low-precision linear layers and StableAdamW.

  python train.py --config=configs/NAME.py[:ARG] --workdir=DIR [--config.section.key=VALUE ...]

Examples:
  python train.py --config=configs/openmoji.py --workdir=runs/openmoji
      the default: emoji drawings, minutes on a CPU, int8 SwitchBack
  python train.py --config=configs/openmoji.py:strict --workdir=runs/strict
      the harder task: no Twemoji drawing is seen in training
  python train.py --config=configs/openmoji.py --workdir=runs/fp32 --config.model.recipe=standard
      the same run without quantization
  python train.py --config=configs/vith_int8.py --workdir=runs/vith --config.train.accumulation=64
      ViT-H/14, the paper's recipe, on one GPU of 80 GB: 256 pairs at a time

  python train.py --config=configs/vith_int8.py --plan --hardware=h200:8
      what the run would be, and whether it fits: memory, time, checkpoints; nothing is trained

configs/common.py lists every key and what it means. The same command resumes an interrupted run,
bit for bit. SIGTERM or Ctrl-C saves a checkpoint and ends; a second Ctrl-C, or one before the data are
opened, ends at once.

Exit codes: 0 finished, or saved and interrupted; 1 diverged, or 50 steps in a row were skipped; 2 wrong
command line or config; 3 the disk, or another machine of the run, failed: the same command goes on;
130 Ctrl-C that ended it at once.
"""

import signal
import sys
from collections.abc import Callable


def main(argv: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    if len(argv) == 1 or {"-h", "--help", "-help", "--helpfull"} & set(argv):
        print(__doc__.strip())
        return 0 if len(argv) > 1 else 2
    try:
        return run(argv)
    except ModuleNotFoundError as error:
        print(f"train.py: {error}; training needs: pip install 'swjax[train]'", file=sys.stderr)
        return 2


def run(argv: list[str]) -> int:
    # Not at the top: --help answers without loading jax.
    from swjax.training import config as config_lib

    leave: Callable[[int], int] = int
    try:
        if "--plan" in argv:
            return plan([argument for argument in argv if argument != "--plan"])
        config, workdir = config_lib.parse(argv)
        # Not earlier: a typo is reported before the training libraries load.
        from swjax.training import distributed, loop

        leave = distributed.leave
        return loop.train_and_evaluate(config, workdir)
    except (config_lib.ConfigError, config_lib.RunError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return leave(error.exit_code)


def plan(argv: list[str]) -> int:
    """`--plan`: prints what the run would be."""
    from swjax.training import config as config_lib
    from swjax.training import plan as plan_lib

    flag = "--hardware="
    hardware = next((a.removeprefix(flag) for a in reversed(argv) if a.startswith(flag)), "")
    others = [argument for argument in argv if not argument.startswith(flag)]
    if not any(argument.startswith("--workdir=") for argument in others):
        others.append("--workdir=none")  # nothing is written
    return plan_lib.show(config_lib.parse(others)[0], hardware)


if __name__ == "__main__":
    # Until training begins there is nothing to save. A KeyboardInterrupt may be lost in an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv))
