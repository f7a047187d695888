"""Which optimizer trains a CLIP with the width and depth of ViT-B best, by learning rate, and which spike.

Command:  python benchmarks/studies/icons_optimizers.py --archive=data/iconify-json-2.2.535.tgz \\
            --out=benchmarks/results/icons_optimizers_h100.json

The models, the drawings and the augmentations are those of icons.py, the optimizers and the measurements
those of optimizers.py. All runs of a seed start from the same parameters, those after 600 steps of
StableAdamW in bf16, because a deep CLIP collapses at the start if its learning rate rises fast (see
icons.py). The state of the optimizer is new in every run. The rate rises for a sixth of the run and falls to
0 as a cosine. Runs with one seed see the same batches.

On several GPUs the command runs once for each, with a common --states and --claims folder and an --out of its
own; --merge joins the files.

The table has the paired differences of each arm from --base, each at the rate with its lowest mean final
loss; Holm's correction is over the arms. --merge and --base print them from a file.

The settings and rules were committed before the runs that count.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Iterable

import icons
import optimizers
import paired
import study

ARMS = {
    arm: (program, settings)
    for program, arms in optimizers.PROGRAMS.items()
    for arm, settings in arms.items()
    if program != "qk_norm"  # needs another model
}
DEFAULT = [arm for arm in ARMS if arm != "adamw 0.95" and ARMS[arm][0] in ("adamw", "muon")]
START = {"rate": 5e-4, "warmup": 720, "steps": 1400, "batch": 2048}  # of the runs before the start
B2 = 0.98


def main(argv=None) -> dict:
    args = parse(argv)
    table = functools.partial(optimizers.table, base=args.base)
    return study.carry_out(args, runs(args), table)


def parse(argv) -> argparse.Namespace:
    flags = study.parser(__doc__)
    flags.add_argument("--size", default="B", choices=icons.SIZES)
    flags.add_argument("--recipe", default="switchback", help="of the linear layers")
    flags.add_argument("--arms", nargs="+", default=DEFAULT, choices=ARMS)
    flags.add_argument("--rates", nargs="+", type=float, default=[2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3])
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--steps", type=int, default=600)
    flags.add_argument("--batch", type=int, default=1024)
    flags.add_argument("--first", type=int, default=600, help="steps before the start")
    flags.add_argument("--base", default=optimizers.BASE, help="arm to compare the others with")
    paired.states_flag(flags)
    icons.corpus_flags(flags)
    args = flags.parse_args(argv)
    if args.claims and not args.states:
        flags.error("--claims needs --states: the runs of a seed start from the same parameters")
    if args.smoke:
        args.source, args.batch, args.steps, args.first = "synthetic", 8, 100, 50
        args.arms, args.rates, args.seeds = ["adamw 0.999", "muon", "muon, bf16"], [1e-3], [0]
    return args


def runs(args: argparse.Namespace) -> Iterable[study.Run]:
    """Lists all runs of a seed before the next seed, so that an interrupted study has whole seeds."""
    names = ("size", "recipe", "steps", "batch", "first", "source")
    settings = {name: getattr(args, name) for name in names}
    for seed, rate, arm in itertools.product(args.seeds, args.rates, args.arms):
        key = {"seed": seed, "rate": rate, "arm": arm, **settings}
        yield key, lambda key=key: train(args, key)


def train(args: argparse.Namespace, key: dict) -> dict:
    """Trains one run; returns its measurements and its scores on the unseen names."""
    import engine
    import jax

    files = args.source, args.data, args.archive
    program, settings = ARMS[key["arm"]]
    steps = args.steps, args.steps // 6, args.batch
    trainer = icons.make_trainer(files, args.size, args.recipe, *steps, (), program)
    start_hyper = engine.Hyper(seed=key["seed"], lr=START["rate"], b2=B2).typed()
    batch = args.batch if args.smoke else START["batch"]
    shared = {name: key[name] for name in ("size", "seed", "first", "source")}
    shared |= START | {"batch": batch}
    start_trainer = icons.make_trainer(
        files, args.size, "standard", START["steps"], START["warmup"], batch, ()
    )
    path = paired.state_file(args.states, shared)
    params, _ = engine.begin(start_trainer, start_hyper, args.first, path)
    start = paired.fingerprint(params)
    # Another seed than that of the start, so that its batches do not come again.
    hyper = engine.Hyper(seed=1000 + key["seed"], lr=key["rate"], **settings).typed()
    _, new = trainer.init(hyper)
    params, measured = trainer.resume(hyper, (params, jax.device_get(new)), 0)
    found = paired.scores(trainer, params, icons.read(*files)["test"])
    run = {"arm": key["arm"], "lr": key["rate"], "seed": key["seed"]}
    return {
        "device": jax.devices()[0].device_kind,
        "start": start,
        "runs": [run | found | optimizers.judge(measured)],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
