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

  python train.py --config=configs/vith_int8.py --plan --hardware=h200:8 --config.train.accumulation=8
      a summary of the run, and whether it fits: memory, time, checkpoints; nothing is trained

configs/common.py lists every key and what it means. The same command resumes an interrupted run,
bit for bit. SIGTERM, SIGHUP or Ctrl-C saves a checkpoint and ends; a second Ctrl-C, or one before the first
step is done, ends at once.

Exit codes: 0 finished, or saved and interrupted; 1 diverged, or 50 steps in a row were skipped; 2 wrong
command line or config; 3 the disk, the output or another machine of the run failed: the same command
resumes it; 130 Ctrl-C that ended it at once.
"""

import signal
import sys


def main(argv: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    if len(argv) == 1 or {"-h", "--help", "-help", "--helpfull"} & set(argv):
        print(__doc__.strip())
        return 0 if len(argv) > 1 else 2
    # Not at the top: --help answers without loading jax.
    from swjax.training import command
    from swjax.training.faults import errors

    with errors.output_may_end():
        return command.main(["train.py", *argv[1:]])


if __name__ == "__main__":
    # Until training begins there is nothing to save. A KeyboardInterrupt may be lost in an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv))
