"""Bias and variance of a recipe's gradient, against the noise of the exact gradient, by batch size.

Command:  python benchmarks/studies/gradient_bias.py --run=runs/openmoji \\
            --out=benchmarks/results/gradient_bias.json --plot=benchmarks/notes/images/gradient_bias.png

Takes a run of the default config (`make train`), at its start and as trained, and several independent
batches. For each batch it computes the exact gradient g, in fp32, and a recipe's gradient g' from the same
pairs and augmentations. The quantization error is e = g' - g. Batches are drawn with replacement from the
training split. Each weight gradient is one product over the whole batch: K is the number of its tokens in
the image tower.

  signal          |E g|^2, the mean gradient, which training follows
  gradient noise  E |g - E g|^2, which SGD sees without quantization
  error variance  E |e - E e|^2
  bias            |E e|^2

An error with zero mean acts as a slightly smaller batch: it adds to the gradient noise, and averages out
over steps as that noise does. A bias does not average out while the parameters stay the same. Its part
along E g changes the length of the gradient only, and Adam divides by that length. Its part across E g
changes the direction. A bias that comes from rounded weights changes when the weights do, so training may
average it too.

The squared norm of a mean over batches contains their noise. Therefore the signal is estimated by the mean
of <g_i, g_j> over all pairs of different batches, and the bias by that of <e_i, e_j>. These estimates are
unbiased, and can be negative. Intervals are those of the jackknife over batches.

--moments between compares two moments of a run, by the cosine of E e at one with E e at the other. --earlier
is a copy of the run's folder whose newest checkpoint is an earlier one.

Arms are recipes, and "int8 wgrad" and "rotated wgrad", in which the product of the weight gradient alone is
quantized, as in llm_int8 and in switchback_hadamard.
"""

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import study
import weight_gradients

ALONE = {"int8 wgrad": "llm_int8", "rotated wgrad": "switchback_hadamard"}
ARMS = (*ALONE, "switchback", "llm_int8", "switchback_hadamard", "fp8_tensorwise")
BATCHES = (64, 256, 1024, 6144)
LEAST, MOST = 4, 32  # batches of each size
CAPTIONS = 24
BETWEEN = "between"
LAYERS, PARAMETERS = "all layers", "all parameters"


def main(argv=None) -> dict:
    flags = study.parser(__doc__)
    flags.add_argument("--run", type=Path, default=Path("runs/openmoji"), help="its folder")
    moments = weight_gradients.MOMENTS
    flags.add_argument("--earlier", type=Path, help=f"the folder of --moments {BETWEEN}")
    flags.add_argument("--moments", nargs="+", default=moments[::-1], choices=(*moments, BETWEEN))
    flags.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="their sizes")
    flags.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    flags.add_argument(
        "--pairs", type=int, default=16_384, help=f"{LEAST} to {MOST} batches have so many in all"
    )
    args = flags.parse_args(argv)
    if args.smoke:
        args.run, args.moments, args.batches, args.arms = None, moments[:1], (4, 8), ARMS[::3]
    at = functools.partial(gradients, args.run)
    exact = functools.lru_cache(2)(functools.partial(at, recipe="standard"))

    def measure(moment, batch, arm):
        sizes, found = (batch, count(args, batch)), []
        for run, when in places(args, moment):
            g = exact(run, when, *sizes)
            other = at(run, when, *sizes, recipe=recipe_of(arm))
            found.append((g, {name: other[name] - g[name] for name in g}))
        tokens = weight_gradients.tokens(config_of(args.run))
        return {"K": batch * tokens, "groups": compare(*found)}

    runs = [
        (key | {"batches": count(args, key["batch"])}, run)
        for key, run in study.grid(measure, moment=args.moments, batch=args.batches, arm=args.arms)
    ]
    return study.carry_out(args, runs, draw, table)


def places(args, moment: str) -> list[tuple[Path, str]]:
    """(folder of a run, moment of it) of the parameters that a row compares."""
    if moment == BETWEEN:
        return [(args.earlier, "trained"), (args.run, "trained")]
    return [(args.run, moment)]


# --- gradients ----------------------------------------------------------------------------------------


@functools.cache
def config_of(run: Path | None):
    return weight_gradients.config_of(run) if run else weight_gradients.smoke_config()


def recipe_of(arm: str):
    return weight_gradients.recipe_of(ALONE[arm]) if arm in ALONE else arm


def count(args, batch: int) -> int:
    """The number of batches."""
    return 3 if args.smoke else min(MOST, max(LEAST, args.pairs // batch))


def gradients(of: Path | None, run: Path | None, moment: str, batch: int, batches: int, *, recipe):
    """{parameter: [batches, size]} of a run; the same batches, of one run's data, for every recipe."""
    import engine
    import jax

    config, pairs = config_of(of), corpus(of)
    gradient = weight_gradients.gradient_of(config, run, moment, recipe)
    found: dict[str, list[np.ndarray]] = {}
    for key in jax.random.split(jax.random.key(batch), batches):
        for name, g in gradient(engine.draw(pairs, batch, key), key).items():
            found.setdefault(name, []).append(np.asarray(g).ravel())
    return {name: np.stack(rows) for name, rows in found.items()}


@functools.cache
def corpus(run: Path | None):
    import engine
    import jax
    import jax.numpy as jnp

    from swjax.training.inputs import open_source

    config = config_of(run)
    side, context = config.data.image_size, config.data.context_length
    loaded = engine.load(open_source(config, "train"), side, context, CAPTIONS)
    return jax.tree.map(jnp.asarray, loaded)


def groups_of(name: str) -> list[str]:
    """The groups of a parameter.

    >>> groups_of("vision/blocks/0/attn/q/kernel")
    ['all parameters', 'all layers', 'vision qkv']
    >>> groups_of("logit_scale")
    ['all parameters']
    """
    tower, *path = name.split("/")
    if "blocks" not in path or path[-1] != "kernel":
        return [PARAMETERS]
    layer = path[-2]
    return [PARAMETERS, LAYERS, f"{tower} {'qkv' if layer in ('q', 'k', 'v') else layer}"]


# --- estimates ----------------------------------------------------------------------------------------


class Products(NamedTuple):
    """Inner products between batches, each [batches, batches], of gradients g and errors e."""

    gg: np.ndarray
    ge: np.ndarray
    ee: np.ndarray


def compare(*moments: tuple[dict, dict]) -> dict[str, dict]:
    """{group: {measure: [value, half of its 95% interval]}} of gradients and errors at one moment or two."""
    groups: dict[str, Products] = {}
    for name in moments[0][0]:
        g, e = (np.concatenate([moment[which][name] for moment in moments]) for which in (0, 1))
        found = products(g, e)
        for group in groups_of(name):
            before = groups.get(group, Products(0, 0, 0))
            groups[group] = Products(*(a + b for a, b in zip(before, found, strict=True)))
    function = measures if len(moments) == 1 else between
    return {group: intervals(p, function, len(moments)) for group, p in groups.items()}


def products(g: np.ndarray, e: np.ndarray) -> Products:
    """Of gradients and errors, each [batches, size]."""
    return Products(*(np.asarray(a @ b.T, np.float64) for a, b in ((g, g), (g, e), (e, e))))


def measures(p: Products) -> dict[str, float]:
    """Estimates of what the study measures.

    Returns:
      noise, error, bias: gradient noise, |e|^2 and bias over the signal.
      variance_ratio: error variance over gradient noise.
      bias_to_noise: bias over gradient noise. Over T steps a bias adds up to T^2 |E e|^2, and noise to T
        times its variance. They are equal after 1 / bias_to_noise steps, if the parameters stay the same.
      added_noise: noise of g' over that of g, minus 1. It differs from `variance_ratio` if g and e correlate.
      along: <E e, E g> over the signal, -0.01 if g' is one percent too short.
      across: the part of `bias` that is orthogonal to E g.
      cosine: of E e and E g.
    """
    own_g, signal = own_and_others(p.gg)
    own_e, bias = own_and_others(p.ee)
    own_q, signal_q = own_and_others(p.gg + p.ge + p.ge.T + p.ee)
    _, cross = own_and_others(p.ge)
    noise = own_g - signal
    return {
        "noise": noise / signal,
        "error": own_e / signal,
        "bias": bias / signal,
        "variance_ratio": (own_e - bias) / noise,
        "bias_to_noise": bias / noise,
        "added_noise": (own_q - signal_q) / noise - 1,
        "along": cross / signal,
        "across": (bias - cross**2 / signal) / signal,
        "cosine": cross / math.sqrt(bias * signal) if bias > 0 < signal else math.nan,
    }


def own_and_others(m: np.ndarray) -> tuple[float, float]:
    """Mean products of a batch with itself, and of different batches."""
    n, own = len(m), np.trace(m)
    return own / n, (m.sum() - own) / (n * (n - 1))


def between(p: Products) -> dict[str, float]:
    """Cosines of E g at two moments, and of E e; the products' first half is of one moment."""
    return {"gradients": cosine_between(p.gg), "biases": cosine_between(p.ee)}


def cosine_between(m: np.ndarray) -> float:
    n = len(m) // 2
    one, two, cross = (own_and_others(x)[1] for x in (m[:n, :n], m[n:, n:], m[:n, n:]))
    return cross / math.sqrt(one * two) if one > 0 < two else math.nan


def intervals(p: Products, function: Callable = measures, moments: int = 1) -> dict[str, list]:
    """{measure: [value, half of its 95% interval]}, by the jackknife: Student's t over batches."""
    n, rows = len(p.gg) // moments, np.arange(len(p.gg))
    kept = [rows[rows % n != i] for i in range(n)]
    parts = [function(Products(*(m[np.ix_(some, some)] for m in p))) for some in kept]
    return {
        name: [value, study.student(n - 1) * deviation([part[name] for part in parts])]
        for name, value in function(p).items()
    }


def deviation(parts: list[float]) -> float:
    """The jackknife's standard error from estimates that each leave one batch out."""
    return math.sqrt((len(parts) - 1) * np.var(parts))


# --- what is shown ------------------------------------------------------------------------------------


def table(runs) -> None:
    for run in runs:
        key, result = run["key"], run["result"]
        print(f"{key['moment']} {key['arm']}, K {result['K']:,}, {key['batches']} batches")
        for name, (value, half) in result["groups"][LAYERS].items():
            print(f"  {name:14} {value:.3g} +- {half:.2g}")


def draw(figure, runs) -> None:
    """Error variance over gradient noise, and the bias over the norm of the mean gradient, of all layers."""
    figure.set_size_inches(10, 3.6)
    axes = figure.subplots(1, 2)
    titles = {
        "variance_ratio": "variance of the error / gradient noise",
        "bias": "|bias| / |mean gradient|",
    }
    measured = [run for run in runs if run["key"]["moment"] != BETWEEN]
    measured.sort(key=lambda run: run["result"]["K"])
    for (moment, arm), some in study.group(measured, "moment", "arm").items():
        k = [run["result"]["K"] for run in some]
        line = "-o" if moment == "trained" else "x"
        for axis, name in zip(axes, titles, strict=True):
            values = np.array([run["result"]["groups"][LAYERS][name][0] for run in some])
            shown = np.sqrt(np.maximum(values, 0)) if name == "bias" else values
            axis.plot(k, np.where(shown > 0, shown, math.nan), line, color=f"C{ARMS.index(arm)}",
                      markersize=3.5, label=f"{arm}, {moment}")  # fmt: skip
    for axis, title in zip(axes, titles.values(), strict=True):
        axis.set(xlabel="K: tokens of the batch", title=title, xscale="log", yscale="log")
    axes[1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1.02, 0.5))


if __name__ == "__main__":
    main(sys.argv[1:])
