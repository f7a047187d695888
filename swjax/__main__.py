"""The programs of swjax by name: `swjax COMMAND ...`, or `python -m swjax COMMAND ...`.

train        trains a CLIP model, or plans a run: train.py in a checkout
classify     ranks names by how well they fit a picture
search       finds the pictures that match a text best, and shows them on a page
evaluate     scores a run or other CLIP weights without training
probe        scores embeddings by logistic regression, on all pictures or a few a class
report       rewrites the report page of a run
runs         lists runs: state, scores, throughput, config differences; optionally on a page
diagnostics  reports what preceded the loss spikes of a run: report, replay
compare      measures how recipes and dtypes change layers and the loss
data check   reads a data set as training does: counts, sizes, captions and bad examples
data verify  verifies the checksums of the prepared icons
export       writes the model of a run for open_clip, Hugging Face or big_vision, or as programs
"""

import difflib
import runpy
import signal
import sys
from importlib.metadata import version

from swjax.arguments import expand_home
from swjax.packages import MissingPackage
from swjax.training.faults.errors import output_may_end

COMMANDS = {
    "train": "swjax.training.command",
    "classify": "swjax.inference.classify",
    "search": "swjax.evaluate.search",
    "evaluate": "swjax.evaluate",
    "probe": "swjax.evaluate.probe",
    "report": "swjax.report",
    "runs": "swjax.report.runs",
    "diagnostics": "swjax.diagnostics",
    "compare": "swjax.tools.compare_precision",
    "data": "swjax.report.data_check",
    "export": "swjax.inference.export_command",
}
# Commands of these commands, for suggestions.
NESTED = ("diagnostics replay", "data check", "data verify")


def main() -> int:
    """Runs the command named on the command line; returns 2 if there is no such command."""
    # Ctrl-C ends the process without a traceback; a run that trains installs its own handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with output_may_end():
        return run(sys.argv[1] if len(sys.argv) > 1 else "--help")


def run(name: str) -> int:
    """Runs a command with the remaining arguments in `sys.argv`; see `main`."""
    if name in ("-h", "--help"):
        print(__doc__.strip(), file=sys.stdout if len(sys.argv) > 1 else sys.stderr)
        return 0 if len(sys.argv) > 1 else 2
    if name == "--version":
        print(f"swjax {version('swjax')}")
        return 0
    if name not in COMMANDS:
        known = {command.split()[-1]: command for command in (*COMMANDS, *NESTED)}
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {known[near[0]]!r}?" if near else f"choose from {', '.join(COMMANDS)}"
        print(f"swjax: there is no command {name!r}: {hint}", file=sys.stderr)
        return 2
    sys.argv = [f"swjax {name}", *expand_home(sys.argv[2:])]
    try:
        runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "swjax":
            raise
        remedy = "" if isinstance(error, MissingPackage) else ": pip install 'swjax[train]'"
        print(f"swjax {name}: {error}{remedy}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
