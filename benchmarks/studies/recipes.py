"""Accuracy of recipes in towers shaped like ViT-B, L and H; fp8 with and without layer-scale.

Command:  python benchmarks/studies/recipes.py --dtype=bfloat16 --minutes=30 \\
            --out=benchmarks/results/recipes_gpu.json --plot=benchmarks/notes/images/recipes_gpu.png

Towers have the paper's depths (12, 24, 32 blocks of vision; 12, 12, 24 of text) and an eighth of its widths;
emoji drawings of 32 pixels in patches of 8, so 17 tokens. wgrad contracts batch x 17.

  accuracy     every recipe, three seeds: top-1 of naming unseen drawings, minus that of "standard"
  wgrad        standard, switchback and llm_int8 of the first shape at other batches: wgrad's K grows
  layer_scale  fp8_tensorwise plain, with zero-initialised layer-scale, with QK-norm, with gradients clipped,
               and standard without and with it: mean |x| of each block's output at the start and the end

fp8 products run on the tensor cores of GPUs that have them, elsewhere as exact values in 16 or 32 bits.
"""

import itertools
import math
import sys

import study

SHAPES = {
    "smoke": ((16, 2, 2), (16, 1, 2)),
    "B": ((96, 12, 3), (64, 12, 2)),
    "L": ((128, 24, 4), (96, 12, 3)),
    "H": ((160, 32, 4), (128, 24, 4)),
}
# Without switchback_m: in our models it is switchback.
RECIPES = ("standard", "switchback", "llm_int8", "fp8_tensorwise", "fp8_switchback", "switchback_q")
REMEDIES = {
    "standard": ("standard", {}, {}),
    "standard, layer-scale 0": ("standard", {"layer_scale": 0.0}, {}),
    "plain": ("fp8_tensorwise", {}, {}),
    "layer-scale 0": ("fp8_tensorwise", {"layer_scale": 0.0}, {}),
    "qk-norm": ("fp8_tensorwise", {"qk_norm": True}, {}),
    "clipped at 1": ("fp8_tensorwise", {}, {"grad_clip": 1.0}),
}
WGRAD = RECIPES[:3]
COMPARED = ("part", "shape", "batch", "rate", "steps", "seeds", "dtype", "source")  # to be equal
PARTS = ("accuracy", "layer_scale", "wgrad")


def main(argv=None) -> dict:
    args = parse(argv)
    return study.carry_out(args, runs(args), draw, table)


def parse(argv):
    flags = study.training_parser(__doc__, seeds=3, steps=500)
    flags.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    flags.add_argument("--shapes", nargs="+", default=["B", "L", "H"], choices=SHAPES)
    flags.add_argument("--recipes", nargs="+", default=RECIPES, help="of accuracy and wgrad")
    flags.add_argument("--remedies", nargs="+", default=list(REMEDIES), choices=REMEDIES)
    flags.add_argument("--batch", type=int, default=256)
    flags.add_argument("--batches", nargs="+", type=int, default=[64, 1024, 4096], help="of wgrad")
    flags.add_argument("--rate", type=float, default=1e-3)
    flags.add_argument(
        "--rates", nargs="+", type=float, default=[2e-3, 8e-3], help="of layer_scale"
    )
    args = flags.parse_args(argv)
    if args.smoke:
        args.parts, args.shapes, args.recipes = ["layer_scale"], ["smoke"], RECIPES[:2]
        args.steps, args.batch, args.rates, args.seeds, args.source = 50, 8, [1e-3], 2, "synthetic"
    return args


def runs(args):
    """One program each, which all seeds run through one after the other."""
    shared = {"steps": args.steps, "dtype": args.dtype, "source": args.source, "seeds": args.seeds}
    first = {"shape": args.shapes[0], "batch": args.batch, "rate": args.rate}
    remedies = args.remedies[: 2 if args.smoke else None]
    parts = {  # what matters most comes first
        "accuracy": [
            first | {"shape": shape, "arm": recipe}
            for recipe, shape in itertools.product(args.recipes, args.shapes)
        ],
        "wgrad": [
            first | {"batch": batch, "arm": recipe}
            for batch in args.batches
            for recipe in args.recipes
            if recipe in WGRAD
        ],
        "layer_scale": [
            first | {"shape": args.shapes[-1], "rate": rate, "arm": arm}
            for rate, arm in itertools.product(args.rates, remedies)
        ],
    }
    for part in args.parts:
        for settings in parts[part]:
            key = {"part": part, **settings, **shared}
            yield key, lambda key=key: train(args, key)


def train(args, key: dict) -> dict:
    import engine

    side = 16 if args.smoke else 32
    corpus, unseen, vocabulary = engine.corpora(args.source, side, args.data)
    recipe, options, hyper = key["arm"], {}, {}
    if key["part"] == "layer_scale":
        recipe, options, hyper = REMEDIES[key["arm"]]
    vision, text = SHAPES[key["shape"]]
    cfg = engine.model(vision, text, side=side, patch=8, vocabulary=vocabulary, recipe=recipe,
                       dtype=args.dtype, **options)  # fmt: skip
    trainer = engine.Trainer(cfg, corpus, steps=args.steps, warmup=args.steps // 10,
                             batch=key["batch"], together=False)  # fmt: skip
    hypers = [engine.Hyper(seed=s, lr=key["rate"], **hyper) for s in range(args.seeds)]
    params, measured = trainer.train(hypers)
    accuracy = trainer.accuracy(params, unseen)
    return {
        "runs": [
            {"seed": seed, "top1": top1, **judge(m)}
            for seed, (top1, m) in enumerate(zip(accuracy, measured, strict=True))
        ]
    }


def judge(measured: dict) -> dict:
    """The loss of the last tenth, its curve, and mean |x| of each block's output at both ends."""
    loss, features = measured["loss"], measured["feature_mean_abs/vision"]
    tenth = max(1, len(loss) // 10)
    return {
        "final": float(loss[-tenth:].mean()),
        "loss": study.thin(loss),
        "features_first": study.thin(features[0], every=1),
        "features_last": study.thin(features[-1], every=1),
    }


def values(run: dict, name: str) -> list[float]:
    return [r[name] for r in run["result"]["runs"]]


def table(runs) -> None:
    """Each arm's score and loss with 95% intervals, and the difference from standard, seed by seed."""
    for (part, shape, batch, rate, *_), some in study.group(runs, *COMPARED).items():
        base = next((run for run in some if run["key"]["arm"] == "standard"), None)
        for run in some:
            (top1, half), (loss, loss_half) = (
                study.interval(values(run, n)) for n in ("top1", "final")
            )
            last = [r["features_last"][-1] for r in run["result"]["runs"]]
            text = (
                f"{part} {shape} batch {batch} rate {rate:g} {run['key']['arm']:15} top-1 {top1:.2%} +- "
                f"{half:.2%}  loss {loss:.3f} +- {loss_half:.3f}  last block {max(last):.2g}"
            )
            if base and run is not base:
                pairs = zip(values(run, "top1"), values(base, "top1"), strict=True)
                mean, half = study.interval(a - b for a, b in pairs)
                text += f"  - standard: {mean:+.2%} +- {half:.2%}"
            print(text)
    for arm, differences in pooled(runs).items():
        mean, half = study.interval(differences)
        text = f"{mean:+.2%} +- {half:.2%}, {len(differences)} runs"
        print(f"accuracy, all shapes, {arm:15} - standard: {text}")


def pooled(runs) -> dict[str, list[float]]:
    """Top-1 of each recipe minus that of "standard", of every shape and seed."""
    accuracy = [run for run in runs if run["key"]["part"] == "accuracy"]
    by = {(run["key"]["arm"], run["key"]["shape"]): values(run, "top1") for run in accuracy}
    found: dict[str, list[float]] = {}
    for (arm, shape), scores in by.items():
        base = by.get(("standard", shape))
        if arm != "standard" and base:
            found.setdefault(arm, []).extend(a - b for a, b in zip(scores, base))
    return found


def by_length(runs) -> dict[str, list[dict]]:
    """Runs of each recipe by wgrad's K; "accuracy" has that of the usual batch."""
    wgrad = [run for run in runs if run["key"]["part"] == "wgrad"]
    places = [(run["key"]["shape"], run["key"]["rate"]) for run in wgrad]
    wgrad += [
        run
        for run in runs
        if run["key"]["part"] == "accuracy"
        and run["key"]["arm"] in WGRAD
        and (run["key"]["shape"], run["key"]["rate"]) in places
    ]
    wgrad.sort(key=lambda run: run["key"]["batch"])
    return {arm: some for (arm,), some in study.group(wgrad, "arm").items()}


def draw(figure, runs) -> None:
    figure.set_size_inches(14, 3.8)
    left, middle, right, last = figure.subplots(1, 4)
    accuracy = [run for run in runs if run["key"]["part"] == "accuracy"]
    used = [run["key"]["shape"] for run in accuracy]
    shapes = [shape for shape in SHAPES if shape in used]
    for i, (arm, some) in enumerate(study.group(accuracy, "arm").items()):
        for run in some:
            mean, half = study.interval(values(run, "top1"))
            x = shapes.index(run["key"]["shape"]) + 0.1 * i
            error = None if math.isnan(half) else 100 * half
            left.errorbar(x, 100 * mean, error, fmt="o", markersize=4, color=f"C{i}",
                          label=arm[0] if run is some[0] else None)  # fmt: skip
    left.set_xticks(range(len(shapes)), shapes)
    left.set(title="top-1 (%), 95% intervals")
    for arm, some in by_length(runs).items():
        k = [17 * run["key"]["batch"] for run in some]
        final = [study.interval(values(run, "final"))[0] for run in some]
        middle.semilogx(k, final, "o-", label=arm)
        middle.set_xticks(k, [f"{length:,}" for length in k], fontsize=7)
        middle.minorticks_off()
    middle.set(xlabel="K of wgrad", title="final loss")
    scales = [run for run in runs if run["key"]["part"] == "layer_scale"]
    arms = list(REMEDIES)
    rates = sorted({run["key"]["rate"] for run in scales})
    for (arm, rate), some in study.group(scales, "arm", "rate").items():
        result = some[0]["result"]["runs"][0]
        look = {"color": f"C{arms.index(arm)}", "linewidth": 0.9, "label": f"{arm}, rate {rate:g}"}
        look["linestyle"] = ("-", "--", ":")[rates.index(rate) % 3]
        right.plot(study.thinned_steps(result["loss"]), result["loss"], **look)
        last.plot(result["features_last"], **look)
    right.set(xlabel="step", title="loss")
    last.set(xlabel="block of vision", yscale="log", title="mean |x| at the end")
    for axes in (left, middle, right):
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=6)


if __name__ == "__main__":
    main(sys.argv[1:])
