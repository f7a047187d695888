"""Reports what preceded the loss spikes of a run.

python -m swjax diagnostics report WORKDIR
    writes WORKDIR/report/spikes.html: events, the tensors and batches that precede them
python -m swjax diagnostics replay WORKDIR --step=N
    trains again from the nearest checkpoint to step N, and prints every tensor's RMS and gradient
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from swjax.diagnostics.spikes import Rules
from swjax.safe_files import explain

USED = ("rms", "sigmas", "window", "deviations", "merge", "ignore")


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    args = parse(argv)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:  # ConfigError is a ValueError
        print(f"swjax diagnostics: {explain(error)}", file=sys.stderr)
    return 2


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="swjax diagnostics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="report | replay")
    report = commands.add_parser("report", help="write WORKDIR/report/spikes.html")
    report.add_argument("workdir", type=Path)
    for name in USED:
        kind, default = type(getattr(Rules(), name)), getattr(Rules(), name)
        shown = "1 in 20 steps, at most 1000" if name == "ignore" else default
        report.add_argument(f"--{name}", type=kind, help=f"see swjax.diagnostics.Rules; {shown}")
    report.set_defaults(run=run_report)
    replay = commands.add_parser("replay", help="train up to a step again")
    replay.add_argument("workdir", type=Path)
    replay.add_argument("--step", type=int, required=True)
    replay.add_argument("--tensors", type=int, default=15, help="largest RMS to show; 0: all")
    replay.set_defaults(run=run_replay)
    return parser.parse_args(argv)


def run_report(args: argparse.Namespace) -> int:
    from swjax.report import spikes

    changes = {name: getattr(args, name) for name in USED if getattr(args, name) is not None}
    page, analysis = spikes.write(args.workdir, examples=_examples(args.workdir), **changes)
    for line in spikes.summary(analysis):
        print(line)
    print(f"report: {page}")
    return 0


def _examples(workdir: Path) -> Callable[[int], list[str]] | None:
    """A function from a step to its examples, or None for a run that train.py did not write."""
    if not (workdir / "config.json").exists():
        return None
    from swjax.tools import replay

    try:
        return replay.batch_examples(workdir)
    except ValueError as error:  # the rest of the report does not need the data
        print(f"swjax diagnostics: no batches in the report: {error}", file=sys.stderr)
        return None


def run_replay(args: argparse.Namespace) -> int:
    if args.tensors < 0:
        raise ValueError(f"--tensors must be at least 0, got {args.tensors}")
    from swjax.tools import replay

    found = replay.replay(args.workdir, args.step, say=print)
    shown = {k: v for k, v in found.metrics.items() if k.startswith("train/")}
    text = lambda value: value if isinstance(value, str) else f"{value:.6g}"
    print("  ".join(f"{name.removeprefix('train/')} {text(x)}" for name, x in shown.items()))
    rows = found.tensors()[: args.tensors or None]
    width = max(len(row[0]) for row in rows)
    print(f"{'tensor':{width}}  {'RMS':>9}  {'|gradient|':>10}  {'largest':>9}")
    for name, rms, norm, largest in rows:
        print(f"{name:{width}}  {rms:9.4f}  {norm:10.3g}  {largest:9.3g}")
    print(f"batch of {len(found.examples)}: {', '.join(found.examples)}")
    for difference in found.differences[:5]:
        print(difference)
    if found.compared and not found.differences:
        print(f"the {found.compared} replayed steps equal metrics.jsonl bit for bit")
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main())
