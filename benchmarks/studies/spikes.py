"""Loss spikes: when they occur, whether RMS events precede them, and how optimizers differ.

Command:  python benchmarks/studies/spikes.py --dtype=bfloat16 --end=1 \\
            --out=benchmarks/results/spikes_gpu.json

Parts, both on emoji drawings of 32 x 32 pixels:
  sweep    AdamW with three values of b2 and StableAdamW over learning rate x batch x size: number of loss
           spikes, and their alignment with RMS events. The noise of small batches hides spikes; --end 1 keeps
           the rate high.
  recipes  the optimizers of --arms at each of --rates, in each of --recipes. Runs with one seed are pairs:
           they start from the same parameters and see the same batches.

  python benchmarks/studies/spikes.py --part recipes --dtype=bfloat16 --end=1 --sizes m --batches 256 \\
    --rates 6e-3 8e-3 --arms "adamw 0.999" "stable 0.99" --seeds 24 \\
    --out=benchmarks/results/spikes_recipes.json

`swjax.diagnostics.spikes` detects the events and computes the exact chance level that spikes follow RMS
events of the patch embedding.
"""

import functools
import itertools
import math
import statistics
import sys

import study

# (width, layers, heads) of the vision and of the text tower
SIZES = {
    "xs": ((32, 2, 2), (32, 1, 2)),
    "s": ((64, 4, 2), (64, 2, 2)),
    "m": ((128, 6, 4), (128, 3, 4)),
    "l": ((256, 12, 8), (256, 6, 8)),
}
ARMS = {
    "adamw 0.999": {"b2": 0.999, "threshold": math.inf},
    "adamw 0.99": {"b2": 0.99, "threshold": math.inf},
    "adamw 0.95": {"b2": 0.95, "threshold": math.inf},
    "stable 0.99": {"b2": 0.99},
}
RECIPES = ("standard", "switchback")
PARTS = ("sweep", "recipes")
# The settings of a run that its compiled program depends on, apart from the corpus.
PROGRAM = ("part", "size", "batch", "steps", "end", "dtype", "recipe")
PATCH = "vision/patch_embed/kernel"


def main(argv=None) -> dict:
    args = parse(argv)
    return study.carry_out(args, runs(args), table)


def parse(argv):
    flags = study.training_parser(__doc__)
    flags.add_argument("--sizes", nargs="+", default=["m", "s"], choices=SIZES)
    flags.add_argument("--batches", nargs="+", type=int, default=[1024, 256, 64])
    flags.add_argument("--rates", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3])
    flags.add_argument("--end", type=float, default=0.1, help="share of the rate left at the end")
    flags.add_argument("--part", default="sweep", choices=PARTS)
    flags.add_argument("--recipes", nargs="+", default=RECIPES, help='of the part "recipes"')
    flags.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    args = flags.parse_args(argv)
    if args.smoke:
        args.sizes, args.batches = ["xs"], [8]
        args.seeds, args.steps, args.source, args.rates = 1, 50, "synthetic", args.rates[:1]
    return args


def runs(args):
    """A study.Run for each size and batch of a sweep: all rates, optimizers and seeds in one program.

    The part "recipes" has a run for each seed and recipe, the recipes of a seed one after the other, so that
    a study which is cut short has whole pairs. Their rates and optimizers run one after the other.
    """
    first = {"size": args.sizes[0], "batch": args.batches[0]}
    settings = {name: getattr(args, name) for name in ("steps", "end", "dtype", "source")}
    if args.part == "recipes":
        for seed, recipe in itertools.product(range(args.seeds), args.recipes):
            key = {"part": args.part, **first, **settings, "recipe": recipe, "seed": seed}
            each = list(itertools.product(args.arms, args.rates, [seed]))
            key |= {"rates": args.rates, "arms": args.arms}
            yield key, lambda key=key, each=each: train(args, key, each)
        return
    places = [first | {"size": size} for size in args.sizes]
    places += [first | {"batch": batch} for batch in args.batches[1:]]
    each = list(itertools.product(args.arms, args.rates, range(args.seeds)))
    for place in places:
        key = {"part": args.part, **place, **settings, "rates": args.rates, "seeds": args.seeds}
        yield key, lambda key=key: train(args, key, each)


def train(args, key: dict, settings: list) -> dict:
    import engine

    program = {name: key.get(name) for name in PROGRAM}
    trainer = make_trainer(source=args.source, directory=args.data, smoke=args.smoke, **program)
    hypers = [engine.Hyper(seed=seed, lr=rate, **ARMS[arm]) for arm, rate, seed in settings]
    _, measured = trainer.train(hypers)
    return {
        "runs": [
            {"arm": arm, "lr": rate, "seed": seed, **judge(m)}
            for (arm, rate, seed), m in zip(settings, measured, strict=True)
        ]
    }


@functools.cache  # the seeds of a recipe share a program
def make_trainer(*, source, directory, smoke, part, size, batch, steps, end, dtype, recipe):
    """The trainer of a part. `recipe` is None in the parts that compare optimizers."""
    import engine

    side = 16 if smoke else 32
    corpus, _, vocabulary = engine.corpora(source, side, directory)
    sizes = dict(zip(("vision", "text"), SIZES[size], strict=True))
    options = {"dtype": dtype, "recipe": recipe or "standard"}
    cfg = engine.model(**sizes, side=side, patch=8, vocabulary=vocabulary, **options)
    schedule = {"steps": steps, "warmup": steps // 10, "end": end}
    return engine.Trainer(cfg, corpus, batch=batch, **schedule, together=part != "recipes")


def judge(measured: dict) -> dict:
    """What a run is judged by, with its curves."""
    import numpy as np

    from swjax.diagnostics import spikes

    loss = measured["loss"]
    steps = len(loss)
    rms = {PATCH: measured[f"rms/{PATCH}"]}
    rules = spikes.Rules.of_run(steps, window=max(2, min(100, steps // 4)))
    found = spikes.analyse(np.arange(1, steps + 1), loss, rms, rules)
    return {
        "final": float(np.mean(loss[-steps // 10 :])),
        "worst": float(np.max(loss[steps // 4 :])),
        "spikes": len(found.loss),
        "loss_events": [event.start for event in found.loss],
        "patch_events": [event.start for event in found.rms.get(PATCH, ())],
        "alignment": {"patch": aligned(found, PATCH)},
        "largest_rms": float(np.max(rms[PATCH][rules.ignore :])),
        "loss": study.thin(loss),
        "rms": study.thin(rms[PATCH], digits=3),
    }


def aligned(found, name: str) -> dict:
    for a in found.alignments:
        if a.name == name:
            return {"rms_events": a.rms_events, "followed": a.followed, "chance": a.chance}
    return {"rms_events": 0, "followed": 0, "chance": 0.0}


def cells(runs, *names):
    """Single runs by some of their settings and of their program's; without a recipe they are "standard"."""
    flat = [
        {
            "key": {"recipe": "standard"} | run["key"] | {k: r[k] for k in ("arm", "lr", "seed")},
            "result": r,
        }
        for run in runs
        for r in run["result"]["runs"]
    ]
    return study.group(flat, *names)


def table(runs) -> None:
    arms = cells(runs, "part", "recipe", "size", "batch", "steps", "lr", "arm")
    for (part, *place), some in arms.items():
        results = [run["result"] for run in some]
        mean, half = study.interval(r["final"] for r in results)
        text = (
            f"{' '.join(map(str, (part, *place))):45} final loss {mean:.3f} +- {half:.3f}  spikes "
            f"{sum(r['spikes'] for r in results) / len(results):.1f} a run  RMS up to "
            f"{max(r['largest_rms'] for r in results):.1f}"
        )
        print(text)
    for recipe in dict.fromkeys(run["key"]["recipe"] for run in runs if "recipe" in run["key"]):
        if recipe != "standard":
            print(against_standard(runs, recipe))
    for (part, recipe), some in cells(runs, "part", "recipe").items():
        print(f"{part}, {recipe}, patch: {alignment([run['result'] for run in some])}")


def against_standard(runs, recipe: str) -> str:
    """The spikes and final losses of a recipe minus those of "standard": means over the pairs of a seed.

    The intervals are over seeds, because the pairs of a seed share initial parameters and batches.
    """
    some = cells([run for run in runs if "recipe" in run["key"]], "recipe", "lr", "arm", "seed")
    pairs = [
        (some[recipe, *place][0]["result"], of_standard[0]["result"])
        for (name, *place), of_standard in some.items()
        if name == "standard" and (recipe, *place) in some
    ]
    totals = [sum(result["spikes"] for result in results) for results in zip(*pairs, strict=True)]
    text = f"{recipe}, {len(pairs)} pairs: {totals[0]} spikes, standard {totals[1]}"
    seeds = dict.fromkeys(a["seed"] for a, _ in pairs)
    for name in ("spikes", "final"):
        of_seed = [
            statistics.fmean(a[name] - b[name] for a, b in pairs if a["seed"] == seed)
            for seed in seeds
        ]
        mean, half = study.interval(of_seed)
        text += f"; {name} of a run {mean:+.3f} +- {half:.3f} over {len(of_seed)} seeds"
    return text


def alignment(results: list[dict]) -> str:
    """How many loss events follow an RMS event, and how likely so many are if each falls where it likes.

    >>> alignment([{"spikes": 2, "alignment": {"patch": {"followed": 1, "chance": 0.1}}}])
    '1 of 2 loss events follow an RMS event; 0.2 by chance, p = 0.2'
    """
    followed = sum(r["alignment"]["patch"]["followed"] for r in results)
    chances = [r["alignment"]["patch"]["chance"] for r in results for _ in range(r["spikes"])]
    likely = [1.0]  # of 0, 1, 2, ... that follow
    for chance in chances:
        likely = [
            (1 - chance) * a + chance * b
            for a, b in zip([*likely, 0.0], [0.0, *likely], strict=True)
        ]
    return (
        f"{followed} of {len(chances)} loss events follow an RMS event; "
        f"{sum(chances):.1f} by chance, p = {sum(likely[followed:]):.1g}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
