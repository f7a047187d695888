"""Times layers forward and backward against plain XLA in bfloat16; run by `benchmarks.kernels.bench --layer`.

Both sides get bf16 activations, fp32 parameters and the gradient of the output, and return the output and
the gradients of everything. The baseline is what a user writes: ``x @ w.astype(x.dtype) +
b.astype(x.dtype)``, LayerNorm and exact GELU in fp32. Kinds: "plain", one layer; "no_bias", the same without
its bias on both sides; "fused", with the LayerNorm or GELU before it; "mlp", LayerNorm, layer, GELU,
layer; "grid", plain layers of the paper's sizes; "language", the layers of Llama-3-8B, which have no bias.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import swjax
from benchmarks.kernels import shapes, timing

COLUMNS = {"op": -13, "shape": -22, "implementation": -29, "us": 9, "wall_us": 9, "tops": 7}
COLUMNS |= {"ratio": 6, "outside_products": 16, "snr_db": 6, "error": -1}

KINDS = ("plain", "no_bias", "fused", "mlp", "grid", "language")

# Names of kernels that multiply matrices: cuBLAS's, CUTLASS's, XLA's Triton fusions, ours.
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|mosaic_gpu|kernel_body", re.I)


class Layer(NamedTuple):
    """One layer [tokens, k] -> n, or for "mlp" k -> n -> k.

    Attributes:
      prologue: the operation before it: "", "layer_norm" or "gelu".
    """

    kind: str
    tokens: int
    k: int
    n: int
    prologue: str = ""

    @property
    def shape(self) -> str:
        back = f"->{self.k}" if self.kind == "mlp" else ""
        return f"{self.tokens}x{self.k}->{self.n}{back}"

    @property
    def arithmetic(self) -> int:
        """Operations of its matrix products, forward and backward."""
        return 6 * self.tokens * self.k * self.n * (2 if self.kind == "mlp" else 1)


def layers_of(kind: str, smoke: bool) -> Iterator[Layer]:
    """Returns the layers of a kind, the most important first."""
    width, tokens = (64, 256) if smoke else (1280, shapes.TOKENS)
    names = ("fc1", "fc2") if smoke else ("fc1", "fc2", "qkv", "out")
    vit = [shapes.block(width, tokens)[name] for name in names]
    if kind in ("plain", "no_bias"):
        yield from (Layer(kind, *shape) for shape in vit)
    elif kind == "fused":
        for shape in vit:
            yield Layer(kind, *shape, "gelu" if shape.k > shape.n else "layer_norm")
    elif kind == "mlp":
        yield Layer(kind, tokens, width, 4 * width, "layer_norm")
    elif kind == "language":
        tokens = 256 if smoke else shapes.LANGUAGE_TOKENS
        sizes = [(64, 128)] if smoke else shapes.LANGUAGE_MODELS["Llama-3-8B"]
        for k, n in sorted(sizes, key=lambda size: -size[0] * size[1]):
            yield Layer(kind, tokens, k, n)
    else:
        for tokens in (128,) if smoke else (65_536, 131_072, 32_768, 16_384):
            for dim in (32,) if smoke else (1280, 4096, 2048, 1024):
                yield Layer(kind, tokens, dim, 4 * dim)
                yield Layer(kind, tokens, 4 * dim, dim)


def parameters(layer: Layer) -> dict[str, jax.Array]:
    """Returns the fp32 parameters: weights, biases, and LayerNorm's scale and bias."""
    new = partial(timing.random, dtype="float32")
    k, n = layer.k, layer.n
    p = {"w": new(k, n, scale=k**-0.5)}
    if layer.kind not in ("no_bias", "language"):
        p["b"] = new(n)
    if layer.kind == "mlp":
        p |= {"w2": new(n, k, scale=n**-0.5), "b2": new(k)}
    if layer.prologue == "layer_norm":
        p |= {"scale": 1 + new(k, scale=0.1), "bias": new(k)}
    return p


# --- the baseline and the recipes ---------------------------------------------------------------------


def baseline(layer: Layer, x, p):
    if layer.prologue == "layer_norm":
        exact = x.astype(jnp.float32)
        mean = jnp.mean(exact, -1, keepdims=True)
        variance = jnp.mean(exact**2, -1, keepdims=True) - mean**2  # as Flax computes it
        exact = (exact - mean) * (jax.lax.rsqrt(variance + 1e-6) * p["scale"]) + p["bias"]
        x = exact.astype(x.dtype)
    elif layer.prologue == "gelu":
        x = _gelu(x)
    x = x @ p["w"].astype(x.dtype)
    if "b" in p:
        x = x + p["b"].astype(x.dtype)
    if layer.kind == "mlp":
        x = _gelu(x) @ p["w2"].astype(x.dtype) + p["b2"].astype(x.dtype)
    return x


def _gelu(x):
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def quantized(layer: Layer, recipe: str, x, p):
    prologue = None
    if layer.prologue == "layer_norm":
        prologue = swjax.LayerNorm(p["scale"], p["bias"])
    elif layer.prologue == "gelu":
        prologue = swjax.Gelu()
    options = {"recipe": recipe, "prologue": prologue}
    if layer.kind == "mlp":
        return swjax.mlp(x, p["w"], p["b"], p["w2"], p["b2"], **options)
    return swjax.switchback(x, p["w"], p.get("b"), **options)


def step(function, x, p, g):
    """Returns the output, and the gradients of x and of every parameter."""
    y, backward = jax.vjp(function, x, p)
    return y, *backward(g)


# --- measuring ----------------------------------------------------------------------------------------


def run(records: timing.Records, kinds, recipes, *, smoke: bool):
    """Times every kind with the first recipe, then with the others, and prints a table."""
    passes = [[recipes[0]], recipes[1:]]
    baselines: dict[Layer, tuple] = {}
    for names in passes:
        for layer in (layer for kind in kinds for layer in layers_of(kind, smoke)):
            if names and records.seconds_left > 0:
                bench_layer(records, layer, names, baselines)
    rows = [row for row in records.rows if row["op"].startswith("layer ")]
    print("\n" + timing.table(rows, COLUMNS))


def bench_layer(records: timing.Records, layer: Layer, recipes, baselines: dict):
    """Times the baseline once, and each recipe on the same arrays."""
    x, p = timing.random(layer.tokens, layer.k), parameters(layer)
    g = timing.random(layer.tokens, layer.k if layer.kind == "mlp" else layer.n)
    row = {"op": f"layer {layer.kind}", "shape": layer.shape, "dtype": "bfloat16"}
    if layer not in baselines:
        function = timing.compiled(partial(step, partial(baseline, layer)), x, p, g)
        time, figures = measure(layer, function, x, p, g)
        records.add(**row, implementation="xla bf16", is_peer=True, **figures)
        baselines[layer] = function, time.us
    function, us = baselines[layer]
    expected = function(x, p, g)
    for recipe in recipes:
        if records.seconds_left < 0:
            return
        try:
            ours = timing.compiled(partial(step, partial(quantized, layer, recipe)), x, p, g)
            close = timing.closeness(ours(x, p, g), expected)["snr_db"]
            time, figures = measure(layer, ours, x, p, g)
        except Exception as error:  # a failing recipe must not end the run
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            records.add(**row, implementation=recipe, error=reason)
            continue
        ratio = {"ratio": us / time.us, "peer": "xla bf16", "snr_db": close}
        records.add(**row, implementation=recipe, **ratio, **figures)


def measure(layer: Layer, function, *arrays) -> tuple[timing.Timing, dict]:
    """Returns the columns of a layer's row: its time, and the share of it outside matrix products.

    Outside its products a plain layer quantizes and sums the bias gradient.
    """
    time = timing.measure(function, *arrays, iterations=10)
    others = sum(us for name, us in time.kernels.items() if not PRODUCT.search(name))
    return time, {
        "us": time.us,
        "clock": time.clock,
        "wall_us": timing.wall(function, *arrays, iterations=10),
        "tops": layer.arithmetic / time.us / 1e6,
        "outside_products": others / time.us if time.kernels else None,
        "kernels": {name: round(us, 1) for name, us in time.kernels.items()},
    }
