"""Quantization noise of an inner product against its length K: the paper's formula, and real quantizers.

Command:  python benchmarks/studies/noise.py --out=benchmarks/results/noise.json \\
            --plot=benchmarks/notes/images/noise.png

Inner products of u and v, independent with zero mean, are computed with quantized operands and exactly; with
e = quantized - exact,

  Var[quantized] - Var[exact] = K (su2 + qu2) (sv2 + qv2) - K su2 sv2

where su2, sv2 are the variances of the elements and qu2, qv2 of their rounding errors. All are measured; for
int8, rounding errors predicted as (scale of the row)2 / 12 are given as well. The lengths include what each
product of a ViT-H contracts: fwd and dgrad its widths 1280 and 5120, wgrad batch x tokens, 65,536.

Elements are normal, or "tokens": normal times a factor for each contracted position, log-normal with sigma 1,
as gradients of tokens differ in size. One scale spans the contraction: the largest token sets it.
"""

import math
import sys

import study

LENGTHS = (64, 320, 1280, 5120, 16_384, 65_536, 262_144)
FORMATS = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e5m2")}
ROWS = 64  # of each operand: ROWS**2 inner products


def main(argv=None) -> dict:
    flags = study.parser(__doc__)
    flags.add_argument("--seeds", type=int, default=8)
    args = flags.parse_args(argv)
    lengths, seeds = (LENGTHS[:3], 2) if args.smoke else (LENGTHS, args.seeds)
    runs = [
        ({"format": name, "elements": elements, "K": k, "seeds": seeds},
         lambda name=name, elements=elements, k=k: measure(name, elements, k, seeds))
        for name in FORMATS
        for elements in ("normal", "tokens")
        for k in lengths
    ]  # fmt: skip
    return study.carry_out(args, runs, draw, table)


def measure(name: str, elements: str, k: int, seeds: int) -> dict:
    """Means over seeds, and half the 95% interval of measured over predicted."""
    results = [once(name, elements, k, seed) for seed in range(seeds)]
    mean = {key: sum(r[key] for r in results) / seeds for key in results[0]}
    _, half = study.interval([r["variance"] / r["formula"] for r in results])
    return mean | {"ratio": mean["variance"] / mean["formula"], "ratio_half": half}


def once(name: str, elements: str, k: int, seed: int) -> dict:
    import jax
    import jax.numpy as jnp

    import swjax
    from swjax.kernels import reference

    keys = jax.random.split(jax.random.key(seed), 3)
    u, v = (jax.random.normal(key, (ROWS, k), jnp.float32) for key in keys[:2])
    if elements == "tokens":  # v is the gradient
        v *= jnp.exp(jax.random.normal(keys[2], (1, k), jnp.float32))
    u_dtype, v_dtype = FORMATS[name]
    a, b = swjax.quantize(u, (-1,), u_dtype), swjax.quantize(v, (-1,), v_dtype)
    noisy = reference.matmul(a, b, out_dtype="float32")
    exact = jnp.matmul(u, v.T, precision="highest")
    square = lambda x: float(jnp.mean(jnp.square(x)))
    su2, sv2 = square(u), square(v)
    qu2, qv2 = square(swjax.dequantize(a) - u), square(swjax.dequantize(b) - v)
    # Given u and v the rounding errors are all there is: their part of the variance is that of e.
    return {
        "variance": square(noisy - exact),
        "formula": k * (su2 + qu2) * (sv2 + qv2) - k * su2 * sv2,
        "uniform": k * (su2 * square(b.scale) + sv2 * square(a.scale)) / 12,
        "signal": square(exact),
        "qu2": qu2,
        "qv2": qv2,
        "relative": math.sqrt(square(noisy - exact) / square(exact)),
    }


def table(runs) -> None:
    for run in runs:
        key, r = run["key"], run["result"]
        print(
            f"{key['format']:5} {key['elements']:7} K {key['K']:7,}  variance {r['variance']:10.4g}  "
            f"formula {r['formula']:10.4g}  ratio {r['ratio']:.3f} +- {r['ratio_half']:.3f}  "
            f"relative error {r['relative']:.3%}"
        )


def draw(figure, runs) -> None:
    from swjax.report.charts import LIGHT

    left, right = figure.subplots(1, 2)
    for (name, elements), some in study.group(runs, "format", "elements").items():
        color = LIGHT.series[("int8", "fp8").index(name)]
        line = "-" if elements == "normal" else "--"
        k = [run["key"]["K"] for run in some]
        result = [run["result"] for run in some]
        label = f"{name}, {elements}"
        left.loglog(k, [r["formula"] for r in result], line, color=color, label=label)
        left.loglog(k, [r["variance"] for r in result], "o", color=color, markersize=3.5)
        right.semilogx(k, [100 * r["relative"] for r in result], line + "o", color=color,
                       markersize=3.5, label=label)  # fmt: skip
    left.set(xlabel="K", title="variance of the error: formula (lines), measured (dots)")
    right.set(xlabel="K", title="error / product, rms (%)", ylim=(0, None))
    right.legend()


if __name__ == "__main__":
    main(sys.argv[1:])
