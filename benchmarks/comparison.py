"""One linear layer in swjax and in other libraries for quantized training in JAX, and their errors and times.

  pip install '.[peers]' && python benchmarks/comparison.py --out benchmarks/results/comparison.json

Every layer gets the same fp32 x, w and output gradient g. Errors are SNRs in dB of y = x w, dx = g wT and
dw = xT g against float64; 20 dB are a factor of ten. Nothing is trained. A row also has `lines`, which a user
adds to a Flax model; `products`, the operand types in the compiled forward and backward pass; and `seconds`,
the fastest of several steps.
"""

import argparse
import functools
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import swjax.linen
from swjax.testing import matrix_products
from swjax.training.log import environment

SHAPE = (4096, 768, 3072)  # tokens, k, n
# QtRule fields that make Qwix compute as SwitchBack. Its int8 scale is absmax / 127.5, swjax's absmax / 127.
ABSMAX = f"absmax,{127.5 / 127}"
SWITCHBACK_Q = {
    "use_original_residuals": True,  # wgrad reads x; dgrad quantizes w along its own axis
    "drhs_grad_qtype": None,  # wgrad is not quantized
    "dlhs_residual_qtype": "int8",
    "dlhs_residual_calibration_method": ABSMAX,
}
PER_TENSOR = {"rhs_disable_channelwise_axes": True, "dlhs_residual_disable_channelwise_axes": True}

Layer = Callable[[jax.Array, jax.Array], jax.Array]  # (w, x) -> y


def flax_layer(dense: nn.Dense, **others) -> Layer:
    key = jax.random.key(0)  # AQT requires one
    return lambda w, x: dense.apply({"params": {"kernel": w}, **others}, x, rngs={"params": key})


def plain(x, w, g) -> Layer:
    return flax_layer(nn.Dense(w.shape[1], use_bias=False))


def ours(recipe: str, x, w, g) -> Layer:
    dense = nn.Dense(w.shape[1], use_bias=False)

    def layer(w, x):
        with swjax.linen.quantized({".*": recipe}):
            return dense.apply({"params": {"kernel": w}}, x)

    return layer


def qwix_rule(additional: dict | None):
    import qwix

    every = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "int8")
    if additional is None:
        return qwix.QtRule(module_path=".*", **every)
    methods = ("act_calibration_method", "weight_calibration_method", "bwd_calibration_method")
    methods = dict.fromkeys(methods, ABSMAX)
    return qwix.QtRule(module_path=".*", **every, **methods, additional_qt_config=additional)


def qwix_layer(additional: dict | None, x, w, g) -> Layer:
    import qwix

    provider = qwix.QtProvider([qwix_rule(additional)])
    return flax_layer(qwix.quantize_model(nn.Dense(w.shape[1], use_bias=False), provider))


def aqt_layer(drhs_bits: int | None, x, w, g) -> Layer:
    from aqt.jax.v2 import config
    from aqt.jax.v2.flax import aqt_flax

    chosen = config.config_v4(fwd_bits=8, dlhs_bits=8, drhs_bits=drhs_bits)
    # Only AQT needs it.
    config.set_stochastic_rounding(chosen, False, False, "jax.uniform")
    product = functools.partial(aqt_flax.AqtDotGeneral, chosen)
    return flax_layer(nn.Dense(w.shape[1], use_bias=False, dot_general_cls=product))


def flax_fp8_layer(x, w, g) -> Layer:
    """Flax's fp8 layer. Its scales come from the maxima of earlier steps, so three steps run first."""
    from flax.linen import fp8_ops

    dense = nn.Dense(w.shape[1], use_bias=False, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    variables = dense.init(jax.random.key(0), x)
    scales = "_overwrite_with_gradient"

    @jax.jit
    def warm_up(others, w, x, g):
        apply = lambda others: dense.apply({"params": {"kernel": w}, scales: others}, x)
        return jax.vjp(apply, others)[1](g)[0]

    others = variables[scales]
    for _ in range(3):
        others = warm_up(others, w, x, g)
    return flax_layer(dense, **{scales: others})


# {name: (package, lines that a user adds, layer)}
PEERS = {
    "flax, not quantized": ("flax", 0, plain),
    "swjax switchback": ("swjax", 1, functools.partial(ours, "switchback")),
    "swjax switchback_q": ("swjax", 1, functools.partial(ours, "switchback_q")),
    "swjax llm_int8": ("swjax", 1, functools.partial(ours, "llm_int8")),
    "swjax fp8_switchback": ("swjax", 1, functools.partial(ours, "fp8_switchback")),
    "swjax fp8_tensorwise": ("swjax", 1, functools.partial(ours, "fp8_tensorwise")),
    "qwix int8": ("qwix", 2, functools.partial(qwix_layer, None)),
    "qwix as switchback": ("qwix", 11, functools.partial(qwix_layer, SWITCHBACK_Q | PER_TENSOR)),
    "qwix as switchback_q": ("qwix", 9, functools.partial(qwix_layer, SWITCHBACK_Q)),
    "aqt int8": ("aqtp", 4, functools.partial(aqt_layer, 8)),
    "aqt int8, dw not": ("aqtp", 4, functools.partial(aqt_layer, None)),
    "flax fp8": ("flax", 4, flax_fp8_layer),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    tokens, k, n = SHAPE
    rng = np.random.default_rng(0)
    shapes = ((tokens, k, 1.0), (k, n, k**-0.5), (tokens, n, 1.0))
    x, w, g = (jnp.asarray(scale * rng.normal(size=(a, b)), jnp.float32) for a, b, scale in shapes)
    rows = [measure(name, x, w, g, args.steps) for name in PEERS]
    result = {
        "command": environment.command(),
        "machine": environment.describe().splitlines()[1:],
        "shape": dict(zip(("tokens", "k", "n"), SHAPE)),
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, x, w, g, steps: int) -> dict:
    """Returns and prints a row; it has an error if the package is not installed."""
    package, lines, make = PEERS[name]
    row = {"layer": name, "lines": lines}
    try:
        is_ours = package == "swjax"  # swjax may run from a checkout
        row["version"] = swjax.__version__ if is_ours else importlib.metadata.version(package)
        layer = make(x, w, g)
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        row["skipped"] = f"pip install {package}"
    else:
        row |= errors_and_time(layer, x, w, g, steps)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def errors_and_time(layer: Layer, x, w, g, steps: int) -> dict:
    @jax.jit
    def step(w, x, g):
        y, vjp = jax.vjp(layer, w, x)
        return y, *vjp(g)

    y, dw, dx = step(w, x, g)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        jax.block_until_ready(step(w, x, g))
        seconds.append(time.perf_counter() - start)
    x64, w64, g64 = (np.asarray(array, np.float64) for array in (x, w, g))
    products = matrix_products(step, w, x, g)
    return {
        "y_db": snr_db(y, x64 @ w64),
        "dx_db": snr_db(dx, g64 @ w64.T),
        "dw_db": snr_db(dw, x64.T @ g64),
        "products": ", ".join(f"{count} {a} x {b}" for (a, b), count in sorted(products.items())),
        "seconds": round(min(seconds), 3),
    }


def snr_db(value, expected) -> float:
    noise = np.sum((np.asarray(value, np.float64) - expected) ** 2)
    return round(float(10 * np.log10(np.sum(expected**2) / noise)), 1)


if __name__ == "__main__":
    main()
