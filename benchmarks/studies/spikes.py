"""Loss spikes: when they occur, whether RMS events precede them, and how optimizers differ.

Command:  python benchmarks/studies/spikes.py --dtype=bfloat16 --end=1 --minutes=8 \\
            --out=benchmarks/results/spikes_gpu.json --plot=benchmarks/notes/images/spikes_gpu.png

Parts, all on emoji drawings of 32 x 32 pixels:
  optimizers  at one high rate: AdamW, lower b2, b2 = 1 - t^-x, gradient clipping, StableAdamW
  surge       the same, but gradients are 8 times as large from the middle of the run on, so the second
              moment lags. The loss function is unchanged: any excess over "optimizers" comes from the steps.
  shift       the same, but the model sees half of the rows of each patch at first, and one more row after
              each fifth of the run. The weights of a new row have a second moment of 0; all others do not.
  sweep       AdamW with three values of b2 and StableAdamW over learning rate x batch x size: number of loss
              spikes, and their alignment with RMS events. The noise of small batches hides spikes; --end 1
              keeps the rate high.
  recipes     not a default: the optimizers of --arms at each of --rates, in each of --recipes. Runs with one
              seed are pairs: they start from the same parameters and see the same batches.

  python benchmarks/studies/spikes.py --parts recipes --dtype=bfloat16 --end=1 --sizes m --batches 256 \\
    --rates 6e-3 8e-3 --arms "adamw 0.999" "stable 0.99" --seeds 24 \\
    --out=benchmarks/results/spikes_recipes.json

`swjax.diagnostics.spikes` detects the events and computes the exact chance level. Alignment is counted for
the patch embedding and, for comparison, for an MLP in the middle of the vision tower.
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
    "adamw 0.9": {"b2": 0.9, "threshold": math.inf},
    "adamw 0.99, clip 1": {"b2": 0.99, "threshold": math.inf, "grad_clip": 1.0},
    "adamw 1-t^-0.45": {"power": 0.45, "threshold": math.inf},
    "adamw 1-t^-0.65": {"power": 0.65, "threshold": math.inf},
    "stable 0.99": {"b2": 0.99},
    "stable 0.999": {"b2": 0.999},
}
RECIPES = ("standard", "switchback")
SWEPT = ("adamw 0.999", "adamw 0.99", "adamw 0.95", "stable 0.99")
PARTS = ("surge", "optimizers", "shift", "sweep")  # most important first
# The settings of a run that its compiled program depends on, apart from the corpus.
PROGRAM = ("part", "size", "batch", "steps", "end", "dtype", "recipe")
PATCH = "vision/patch_embed/kernel"


def main(argv=None) -> dict:
    args = parse(argv)
    return study.carry_out(args, runs(args), draw, table)


def parse(argv):
    flags = study.training_parser(__doc__, seeds=3, steps=1000)
    flags.add_argument("--sizes", nargs="+", default=["m", "s"], choices=SIZES)
    flags.add_argument("--batches", nargs="+", type=int, default=[1024, 256, 64])
    flags.add_argument("--rates", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3])
    flags.add_argument(
        "--rate",
        type=float,
        default=4e-3,
        help="of the parts with one rate",
    )
    flags.add_argument("--end", type=float, default=0.1, help="share of the rate left at the end")
    flags.add_argument("--parts", nargs="+", default=PARTS, choices=(*PARTS, "recipes"))
    flags.add_argument("--recipes", nargs="+", default=RECIPES, help='of the part "recipes"')
    flags.add_argument(
        "--arms", nargs="+", default=SWEPT, choices=ARMS, help='of the part "recipes"'
    )
    args = flags.parse_args(argv)
    if args.smoke:
        args.sizes, args.batches = ["xs"], [8]
        args.seeds, args.steps, args.source, args.parts = 1, 50, "synthetic", ["surge"]
    return args


def runs(args):
    """A study.Run for each part, size and batch: all rates, optimizers and seeds in one program.

    The part "recipes" has a run for each seed and recipe, the recipes of a seed one after the other, so that
    a study which is cut short has whole pairs. Their rates and optimizers run one after the other.
    """
    first = {"size": args.sizes[0], "batch": args.batches[0]}
    settings = {name: getattr(args, name) for name in ("steps", "end", "dtype", "source")}
    for part in args.parts:
        if part == "recipes":
            for seed, recipe in itertools.product(range(args.seeds), args.recipes):
                key = {"part": part, **first, **settings, "recipe": recipe, "seed": seed}
                each = list(itertools.product(args.arms, args.rates, [seed]))
                key |= {"rates": args.rates, "arms": args.arms}
                yield key, lambda key=key, each=each: train(args, key, each)
            continue
        if part == "sweep":
            places = [first | {"size": size} for size in args.sizes]
            places += [first | {"batch": batch} for batch in args.batches[1:]]
            arms, rates = SWEPT, args.rates
        else:
            places, arms, rates = [first], list(ARMS), [args.rate]
        each = list(itertools.product(arms, rates, range(args.seeds)))
        for place in places:
            key = {"part": part, **place, **settings, "rates": rates, "seeds": args.seeds}
            yield key, lambda key=key, each=each: train(args, key, each)


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
    changes = {
        "surge": {"surge": steps // 2},
        "shift": {"shift": True},
        "recipes": {"together": False},
    }
    schedule = {"steps": steps, "warmup": steps // 10, "end": end}
    return engine.Trainer(cfg, corpus, batch=batch, **schedule, **changes.get(part, {}))


def judge(measured: dict) -> dict:
    """What a run is judged by, with its curves for the plots.

    "after" is the mean loss of the 8 steps after the middle of the run, where gradients surge.
    """
    import numpy as np

    from swjax.diagnostics import spikes

    loss = measured["loss"]
    steps = len(loss)
    rms = {}
    for name, values in measured.items():
        if name.startswith("rms/"):
            columns = values.reshape(steps, -1).T
            name = name.removeprefix("rms/")
            names = [name] if values.ndim == 1 else [f"{name}/{i}" for i in range(len(columns))]
            rms |= dict(zip(names, columns, strict=True))
    middle = measured["rms/vision/blocks/mlp/fc1/kernel"].shape[1] // 2
    rules = spikes.Rules.of_run(steps, window=max(2, min(100, steps // 4)))
    found = spikes.analyse(np.arange(1, steps + 1), loss, rms, rules)
    return {
        "final": float(np.mean(loss[-steps // 10 :])),
        "worst": float(np.max(loss[steps // 4 :])),
        "after": float(np.mean(loss[steps // 2 + 1 :][:8])),
        "spikes": len(found.loss),
        "loss_events": [event.start for event in found.loss],
        "patch_events": [event.start for event in found.rms.get(PATCH, ())],
        "alignment": {
            "patch": aligned(found, PATCH),
            "middle": aligned(found, f"vision/blocks/mlp/fc1/kernel/{middle}"),
        },
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
        if part == "surge":
            control = arms.get(("optimizers", *place), ())
            text += after_surge(results, [run["result"] for run in control])
        print(text)
    for recipe in dict.fromkeys(run["key"]["recipe"] for run in runs if "recipe" in run["key"]):
        if recipe != "standard":
            print(against_standard(runs, recipe))
    for (part, recipe), some in cells(runs, "part", "recipe").items():
        for tensor in ("patch", "middle"):
            print(
                f"{part}, {recipe}, {tensor}: {alignment([run['result'] for run in some], tensor)}"
            )


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


def after_surge(results: list[dict], control: list[dict]) -> str:
    """The loss after the surge, and its excess over runs of the same seeds and batches without it."""
    mean, _ = study.interval(r["after"] for r in results)
    text = f"  loss 1-8 steps after the surge {mean:.3f}"
    if len(control) == len(results):
        pairs = zip(results, control, strict=True)
        mean, half = study.interval(r["after"] - c["after"] for r, c in pairs)
        text += f", {mean:+.3f} +- {half:.3f} by it"
    return text


def alignment(results: list[dict], tensor: str) -> str:
    """How many loss events follow an RMS event, and how likely so many are if each falls where it likes.

    >>> alignment([{"spikes": 2, "alignment": {"patch": {"followed": 1, "chance": 0.1}}}], "patch")
    '1 of 2 loss events follow an RMS event; 0.2 by chance, p = 0.2'
    """
    followed = sum(r["alignment"][tensor]["followed"] for r in results)
    chances = [r["alignment"][tensor]["chance"] for r in results for _ in range(r["spikes"])]
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


def draw(figure, runs) -> None:
    """A panel for each question that the parts of the study answer."""
    parts = {run["key"]["part"] for run in runs}
    spikes = any(run["result"]["spikes"] for run in cells(runs, "part").get(("sweep",), ()))
    panels = [draw_counts] if spikes else []
    panels += [draw_recipes] if "recipes" in parts else []
    panels += [draw_sweep] if "sweep" in parts else []
    panels += [draw_spike] if foretold(runs) else []
    panels += [draw_finals] if parts - {"sweep", "recipes"} else []
    panels += [draw_surge] if "surge" in parts else []
    figure.set_size_inches(3.8 * len(panels), 3.6)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, runs)


def draw_counts(axes, runs) -> None:
    axes.set_title("loss spikes a run")
    draw_by_place(axes, runs, lambda results: sum(r["spikes"] for r in results) / len(results))


def draw_sweep(axes, runs) -> None:
    axes.set_title("final loss, mean")
    draw_by_place(axes, runs, lambda results: sum(r["final"] for r in results) / len(results))


def draw_recipes(axes, runs) -> None:
    """The spikes of each optimizer's runs, a bar for each recipe."""
    some = cells([run for run in runs if run["key"]["part"] == "recipes"], "arm", "recipe")
    arms, recipes = (list(dict.fromkeys(names)) for names in zip(*some, strict=True))
    width = 0.8 / len(recipes)
    for i, recipe in enumerate(recipes):
        totals = [sum(run["result"]["spikes"] for run in some[arm, recipe]) for arm in arms]
        places = [x + width * (i - (len(recipes) - 1) / 2) for x in range(len(arms))]
        axes.bar_label(axes.bar(places, totals, 0.9 * width, label=recipe))
    axes.set_xticks(range(len(arms)), arms)
    axes.set(title=f"loss spikes in {len(some[arms[0], recipes[0]])} runs")
    axes.legend(fontsize=7)


def draw_by_place(axes, runs, value) -> None:
    """A point for each optimizer at each size, batch and rate of the sweep."""
    sweep = [run for run in runs if run["key"]["part"] == "sweep"]
    places = dict(sorted(cells(sweep, "size", "batch", "lr", "steps").items()))
    names = [f"{size} {batch} {lr}, {steps} steps" for size, batch, lr, steps in places]
    axes.set_xticks(range(len(places)), names, rotation=90, fontsize=7)
    for i, arm in enumerate(SWEPT):
        for x, some in enumerate(places.values()):
            results = [run["result"] for run in some if run["key"]["arm"] == arm]
            if results:
                label = arm if x == 0 else None
                axes.plot(x + 0.15 * (i - 1.5), value(results), ".", color=f"C{i}", label=label)
    axes.legend(fontsize=6)


def foretold(runs) -> list[tuple[float, int, dict]]:
    """(largest RMS, step, run) of each loss spike of the sweep that follows an RMS event."""
    from swjax.diagnostics.spikes import Rules

    first, last = Rules().lead
    return [
        (run["result"]["largest_rms"], event, run)
        for run in cells(runs, "part").get(("sweep",), ())
        for event in run["result"].get("loss_events", ())
        if any(first <= event - start <= last for start in run["result"]["patch_events"])
    ]


def draw_spike(axes, runs) -> None:
    """The loss spike of the sweep that follows an RMS event of the patch embedding, where RMS is largest."""
    _, event, run = max(foretold(runs), key=lambda one: one[0])
    result, key = run["result"], run["key"]
    near = slice(max(event // study.THIN - 30, 0), event // study.THIN + 20)
    steps = study.thinned_steps(result["loss"])[near]
    axes.plot(steps, result["loss"][near], label="loss")
    axes.plot(
        steps, result["rms"][near], ":", label=f"RMS, patch embedding, mean of {study.THIN} steps"
    )
    axes.axvline(event, color="0.6", linewidth=0.8)
    axes.set(
        xlabel="step", title=f"{key['arm']}, {key['size']} {key['batch']} {key['lr']}: a spike"
    )
    axes.legend(fontsize=7)


def draw_finals(axes, runs) -> None:
    from swjax.report.charts import LIGHT

    for i, part in enumerate(("optimizers", "shift", "surge")):
        some = cells([run for run in runs if run["key"]["part"] == part], "arm")
        for y, arm in enumerate(ARMS):
            if (arm,) in some:
                finals = [r["result"]["final"] for r in some[arm,]]
                axes.plot(finals, [y + 0.2 * (i - 1)] * len(finals), ".", color=LIGHT.series[i])
    axes.set_yticks(range(len(ARMS)), ARMS)
    axes.set(xlabel="final loss, each run", title="steady (blue), shift (red), surge (green)")


def draw_surge(axes, runs) -> None:
    from swjax.report.charts import LIGHT

    some = cells([run for run in runs if run["key"]["part"] == "surge"], "arm")
    for arm, color in (("adamw 0.99", LIGHT.series[1]), ("stable 0.99", LIGHT.series[0])):
        if (arm,) in some:
            result = some[arm,][-1]["result"]
            steps = study.thinned_steps(result["loss"])
            axes.plot(steps, result["loss"], color=color, linewidth=1, label=f"loss, {arm}")
            axes.plot(steps, result["rms"], ":", color=color, linewidth=1, label=f"RMS, {arm}")
    axes.set(xlabel="step", title="gradients surge at half of the run")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    main(sys.argv[1:])
