"""The programs of swjax by name: `swjax COMMAND ...`, or `python -m swjax COMMAND ...`.

report       makes the report page of a run again
diagnostics  what led to a run's loss spikes: report, replay
compare      what recipes and dtypes do to layers and to the loss
convert      WebDataset tars to array_record
"""

import runpy
import sys

COMMANDS = {
    "report": "swjax.report",
    "diagnostics": "swjax.diagnostics",
    "compare": "swjax.training.compare_precision",
    "convert": "swjax.data.convert",
}


def main() -> int:
    """Runs the command that the command line names; returns 2 if there is none."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        print(__doc__.strip(), file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    sys.argv = [f"swjax {name}", *sys.argv[2:]]
    runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
