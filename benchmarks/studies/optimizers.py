"""Which optimizer trains a small CLIP best, over two decades of learning rates, and which have loss spikes.

Command:  python benchmarks/studies/optimizers.py --dtype=bfloat16 \\
            --out=benchmarks/results/optimizers_gpu.json

Arms: AdamW with three b2, AdamW with gradient clipping, StableAdamW with two b2, QK-norm, and Muon for the
matrices of the blocks, scaled so that learning rates compare with AdamW's: optax's, and that of the trainer,
whose products are in bf16. The drawings are emoji of 32 pixels.
The rate rises over a tenth of the run and falls to 0 as a cosine. Runs with one seed see the same batches.

Measured: top-1 of unseen drawings, the final loss, and loss spikes by the paper's rules. The table also has
the paired differences of each arm from --base, each at its best learning rate; Holm's correction is over the
arms. This command prints them from a file:

  python benchmarks/studies/optimizers.py --merge benchmarks/results/optimizers_gpu.json --base="stable 0.98"

The settings and rules were committed before the runs that count.
"""

import collections
import functools
import itertools
import math
import sys

import paired
import spikes
import study

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
NEVER = math.inf  # threshold of AdamW in the trainer's StableAdamW
BASE = "adamw 0.999"  # arm that the others are compared with

# {program: {arm: settings of its runs}}: the arms of a program share its optimizer and model.
PROGRAMS = {
    "adamw": {
        "adamw 0.999": {"b2": 0.999, "threshold": NEVER},
        "adamw 0.98": {"b2": 0.98, "threshold": NEVER},
        "adamw 0.95": {"b2": 0.95, "threshold": NEVER},
        "adamw 0.999, clip 1": {"b2": 0.999, "threshold": NEVER, "grad_clip": 1.0},
        "stable 0.999": {"b2": 0.999},
        "stable 0.98": {"b2": 0.98},
    },
    "qk_norm": {"adamw 0.999, QK-norm": {"b2": 0.999, "threshold": NEVER}},
    "muon": {"muon": {"b2": 0.98}},
    "muon_of_swjax": {"muon, bf16": {"b2": 0.98}},
}


def main(argv=None) -> dict:
    args = parse(argv)
    tell = functools.partial(table, base=args.base)
    return study.carry_out(args, runs(args), tell)


def parse(argv):
    flags = study.training_parser(__doc__)
    flags.add_argument("--size", default="m", choices=spikes.SIZES)
    flags.add_argument("--batch", type=int, default=256)
    flags.add_argument("--rates", nargs="+", type=float, default=RATES)
    flags.add_argument("--recipe", default="standard", help="of the linear layers")
    flags.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    flags.add_argument("--base", default=BASE, help="arm that the others are compared with")
    args = flags.parse_args(argv)
    if args.smoke:
        args.size, args.batch, args.rates, args.seeds = "xs", 8, [1e-3], 1
        args.steps, args.source, args.programs = 50, "synthetic", ["muon_of_swjax"]
    return args


def runs(args):
    """One program each, with all rates, arms and seeds at once."""
    names = ("size", "batch", "steps", "dtype", "source", "recipe", "rates", "seeds")
    shared = {name: getattr(args, name) for name in names}
    for program in args.programs:
        key = {"program": program, **shared}
        yield key, lambda key=key: train(args, key)


def train(args, key: dict) -> dict:
    import engine

    side = 16 if args.smoke else 32
    corpus, test, vocabulary = engine.corpora(args.source, side, args.data)
    sizes = dict(zip(("vision", "text"), spikes.SIZES[key["size"]], strict=True))
    options = {"dtype": args.dtype, "recipe": key["recipe"]}
    if key["program"] == "qk_norm":
        options["qk_norm"] = True
    cfg = engine.model(**sizes, side=side, patch=8, vocabulary=vocabulary, **options)
    trainer = engine.Trainer(
        cfg,
        corpus,
        steps=args.steps,
        warmup=args.steps // 10,
        end=0.0,
        batch=key["batch"],
        optimizer=optimizer(key["program"]),
    )
    arms = PROGRAMS[key["program"]]
    settings = list(itertools.product(arms, args.rates, range(args.seeds)))
    hypers = [engine.Hyper(seed=seed, lr=rate, **arms[arm]) for arm, rate, seed in settings]
    params, measured = trainer.train(hypers)
    found = zip(settings, measured, trainer.accuracy(params, test), strict=True)
    return {
        "runs": [
            {"arm": arm, "lr": rate, "seed": seed, "top1": top1, **judge(m)}
            for (arm, rate, seed), m, top1 in found
        ]
    }


def optimizer(program: str):
    """The optimizer of a program, a function of a run's settings, its schedule and the weight decay."""
    import engine

    if program == "muon":
        return muon
    if program == "muon_of_swjax":
        return muon_of_swjax
    return engine.adamw


def muon(hyper, schedule, decay: float):
    """optax's Muon for the matrices of the blocks, AdamW for the rest."""
    import jax
    from optax import contrib

    from swjax.models import clip

    def matrices(params):
        axes = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return jax.tree.map(
            lambda p, block: axes if block is not None and p.ndim == 3 else None,
            params,
            clip.block_axes(params),
            is_leaf=lambda x: x is None,
        )

    return contrib.muon(
        schedule,
        weight_decay=decay,
        weight_decay_mask=clip.weight_decay_mask,
        adam_b2=hyper.b2,
        adam_weight_decay=decay,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=0.2,
    )


def muon_of_swjax(hyper, schedule, decay: float):
    """`swjax.optax.muon` with products in bf16, otherwise as the trainer calls it."""
    import swjax.optax
    from swjax.models import clip
    from swjax.training.optimizer import is_matrix_of_blocks

    return swjax.optax.muon(
        schedule,
        is_matrix_of_blocks,
        b2=hyper.b2,
        weight_decay=decay,
        mask=clip.weight_decay_mask,
        dtype="bfloat16",
        block_axes=clip.block_axes,
    )


def judge(measured: dict) -> dict:
    """The measurements of a run that the table and the chart use.

    Args:
      measured: {name: value at each step, [steps]}.
    """
    import numpy as np

    from swjax.diagnostics.spikes import Rules, analyse

    loss = measured["loss"]
    steps, patch = len(loss), f"rms/{spikes.PATCH}"
    rms = {spikes.PATCH: measured[patch]} if patch in measured else {}
    found = analyse(np.arange(1, steps + 1), loss, rms, Rules.of_run(steps))
    return {
        "final": float(np.mean(loss[-steps // 10 :])),
        "spikes": len(found.loss),
        "patch": spikes.aligned(found, spikes.PATCH) if rms else math.nan,
        "loss": study.thin(loss),
    }


# --- results ------------------------------------------------------------------------------------------


def by_arm(runs) -> dict[str, dict[float, list[dict]]]:
    """Results by arm and learning rate, in the order of the file."""
    found: dict[str, dict[float, list[dict]]] = {}
    for run in runs:
        for result in run["result"]["runs"]:
            found.setdefault(result["arm"], {}).setdefault(result["lr"], []).append(result)
    return found


def mean(results: list[dict], name: str) -> float:
    return sum(result[name] for result in results) / len(results)


def finals(rates: dict[float, list[dict]]) -> dict[float, float]:
    """The mean final loss by rate, in order; a loss that is not finite is infinite."""
    losses = {rate: mean(some, "final") for rate, some in sorted(rates.items())}
    return {rate: loss if math.isfinite(loss) else math.inf for rate, loss in losses.items()}


def best_rate(rates: dict[float, list[dict]]) -> float:
    """The learning rate with the lowest mean final loss."""
    losses = finals(rates)
    return min(losses, key=lambda rate: losses[rate])


def differences(arms: dict, arm: str, base: str, name: str) -> list[float]:
    """A measurement of an arm minus that of `base`, each at its best rate, for each seed that both have."""
    means = whole_seeds(arms)
    own, other = (
        {result["seed"]: result[name] for result in arms[a][best_rate(means[a])]}
        for a in (arm, base)
    )
    return [own[seed] - other[seed] for seed in sorted(own) if seed in other]


def with_base(arms: dict, base: str) -> list[str]:
    """The arms that share a seed with `base`, each at its best rate; an unfinished study has others."""
    return [arm for arm in arms if arm != base and differences(arms, arm, base, "final")]


def whole_seeds(arms: dict) -> dict[str, dict[float, list[dict]]]:
    """The results of the seeds that have most arms and rates, whose means compare.

    An arm without results of these seeds keeps its own.
    """
    count = collections.Counter(
        seed
        for rates in arms.values()
        for some in rates.values()
        for seed in {result["seed"] for result in some}
    )
    whole = {seed for seed, cells in count.items() if cells == max(count.values())}

    def results(rates):
        found = {rate: [r for r in some if r["seed"] in whole] for rate, some in rates.items()}
        return {rate: some for rate, some in found.items() if some} or rates

    return {arm: results(rates) for arm, rates in arms.items()}


def table(runs, base: str = BASE) -> None:
    arms = by_arm(runs)
    for arm, rates in whole_seeds(arms).items():
        losses, best = finals(rates), best_rate(rates)
        top1, half = study.interval(100 * r["top1"] for r in rates[best])
        every = [r for some in rates.values() for r in some]
        print(
            f"{arm:22} best rate {best:g}: loss {losses[best]:.3f}, top-1 {top1:.1f} +- {half:.1f} %; "
            f"spikes a run {mean(every, 'spikes'):.2f}, at the best rate {mean(rates[best], 'spikes'):.2f}"
        )
    if base in arms:
        print_differences(arms, base)


def print_differences(arms: dict, base: str) -> None:
    """Prints the paired differences of all arms from `base`, each at its best rate."""
    others = with_base(arms, base)
    for name, unit, scale, digits in (("final", "loss", 1, 3), ("top1", "top-1, points", 100, 1)):
        found = [[scale * d for d in differences(arms, arm, base, name)] for arm in others]
        ps = [paired.p_value(pairs) for pairs in found]
        print(f"{unit}, minus that of {base}")
        for arm, pairs, p, corrected in zip(others, found, ps, paired.holm(ps), strict=True):
            tail = f"p = {p:.2g}, corrected for {len(ps)} tests {corrected:.2g}"
            print(f"  {arm:22} {paired.told(pairs, digits)}, {tail}")


if __name__ == "__main__":
    main(sys.argv[1:])
