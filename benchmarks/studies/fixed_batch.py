"""What does rounding cost where gradients have no noise? Every step has the same pairs.

Command:  python benchmarks/studies/fixed_batch.py --out=benchmarks/results/fixed_batch_cpu.json
          python benchmarks/studies/fixed_batch.py --batch=16384 --patch=4 --dtype=bfloat16 \\
            --out=benchmarks/results/fixed_batch_gpu.json    # sums of 1,064,960 tokens, on a GPU

In stochastic training the noise of gradients hides small errors. Here a small CLIP learns one batch of emoji
drawings, with the same augmentations in every step, so that a gradient differs from that of "standard" by
its rounding alone. The learning rate decays to 0. A weight gradient of the image tower sums 17 tokens a
drawing, or 65 with patches of 4 pixels. The runs of a pair continue from the same --shared steps of
"standard", because before them small differences decide when a run leaves the loss of chance. The arm
"control" is "standard" whose start is changed by one part in a million: its differences from "standard" are
those of any change of the rounding.

The loss at the end is that of the batch. Nothing here tests whether a model generalizes.
"""

import functools
import itertools
import sys

import paired
import study

ARMS = ("standard", paired.CONTROL, "switchback", "switchback_hadamard", "llm_int8")
SIZES = {"xs": ((32, 2, 2), (32, 1, 2)), "s": ((64, 2, 2), (64, 1, 2))}  # (width, layers, heads)
SIDE = 32


def main(argv=None) -> dict:
    args = parse(argv)
    return study.carry_out(args, runs(args), draw, table)


def parse(argv):
    flags = study.parser(__doc__)
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument(
        "--shared", type=int, default=150, help="steps that the runs of a pair share"
    )
    paired.states_flag(flags)
    flags.add_argument("--dtype", default="float32", help="of what is not quantized")
    flags.add_argument("--source", default="emoji", help="or synthetic")
    flags.add_argument("--data", default=str(study.ROOT / "data"), help="prepared data sets")
    flags.add_argument("--arms", nargs="+", default=ARMS, help=f"recipes, and {paired.CONTROL}")
    flags.add_argument("--size", default="s", choices=SIZES)
    flags.add_argument("--batch", type=int, default=2048)
    flags.add_argument("--patch", type=int, default=8, help="pixels; images have 32")
    flags.add_argument("--rate", type=float, default=2e-3)
    args = flags.parse_args(argv)
    if args.smoke:
        args.source, args.batch, args.steps, args.size = "synthetic", 16, 100, "xs"
        args.shared = 50
        args.seeds, args.arms = [0, 1], ARMS[:2]
    return args


def runs(args):
    """Every arm of a seed before the next seed, so that a study which is cut short has whole pairs."""
    names = ("steps", "shared", "dtype", "source", "size", "batch", "patch", "rate")
    settings = {name: getattr(args, name) for name in names}
    for seed, arm in itertools.product(args.seeds, args.arms):
        key = {"seed": seed, "arm": arm, **settings}
        yield key, lambda key=key: train(args, key)


def train(args, key: dict) -> dict:
    import engine

    settings = [key[name] for name in ("source", "size", "batch", "patch", "steps", "dtype")]
    is_control = key["arm"] == paired.CONTROL
    hyper = engine.Hyper(seed=key["seed"], lr=key["rate"]).typed()
    first = make_trainer(args.data, "standard", *settings)
    params, state = engine.begin(first, hyper, key["shared"], paired.state_file(args, key))
    start = paired.fingerprint(params)
    params = engine.nudged(params, key["seed"]) if is_control else params
    trainer = make_trainer(args.data, "standard" if is_control else key["arm"], *settings)
    _, measured = trainer.resume(hyper, (params, state), key["shared"])
    loss = measured["loss"]
    return {
        "start": start,
        "final_loss": float(loss[-1]),
        "loss": study.thin(loss),
        "grad_norm": study.thin(measured["grad_norm"]),
    }


@functools.cache  # seeds share a compiled program
def make_trainer(
    directory, arm: str, source, size: str, batch: int, patch: int, steps: int, dtype: str
):
    import engine

    corpus, _, vocabulary = engine.corpora(source, SIDE, directory)
    sizes = dict(zip(("vision", "text"), SIZES[size], strict=True))
    options = {"vocabulary": vocabulary, "dtype": dtype, "recipe": arm}
    cfg = engine.model(**sizes, side=SIDE, patch=patch, **options)
    schedule = {"steps": steps, "warmup": steps // 10, "end": 0.0}
    return engine.Trainer(cfg, corpus, batch=batch, **schedule, together=False, fixed=True)


def table(runs: list[dict]) -> None:
    """Prints final losses, and differences from "standard" with 95% intervals."""
    for (arm,), some in study.group(runs, "arm").items():
        mean, half = study.interval(run["result"]["final_loss"] for run in some)
        text = f"{arm:20} {len(some)} seeds: final loss {mean:.4f} +- {half:.4f}"
        pairs = paired.minus(runs, arm, paired.final_loss)
        if arm != "standard" and pairs:
            text += f"; minus that of standard {paired.told(pairs, digits=4)}"
        print(text)


def draw(figure, runs: list[dict]) -> None:
    """Draws the losses minus those of "standard", one line per pair."""
    axes = figure.subplots()
    for number, (arm,) in enumerate(study.group(runs, "arm")):
        if arm != "standard":
            paired.draw_gaps(axes, runs, arm, color=f"C{number}")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main(sys.argv[1:])
