"""Times LoRA over frozen int8 weights on one GPU: blocks of a language model, forward and backward, in Flax.

    python -m benchmarks.language_models_lora --out=benchmarks/results/language_models_lora.json
    python -m benchmarks.language_models_lora --models tiny --out=tiny.json      # on any machine

Each linear layer has frozen weights and LoRA matrices of rank RANK. A call computes the gradients of the
input and of the LoRA matrices. Arms: "bf16" has bf16 weights; a recipe alone quantizes these bf16 weights in
every step; "+once" keeps only the int8 weights of `swjax.serving.prequantize`. LoRA matrices are float32,
activations bf16. `weights_gib` is the memory of the frozen weights; language_models.py describes the other
columns.
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import swjax.nnx
import swjax.serving
from benchmarks.kernels import timing
from benchmarks.language_models import compile_, kernel_times, split
from benchmarks.language_models_flax import DTYPE, plain
from benchmarks.language_models_shapes import SHAPES, Shape, parser

RANK = 16
RECIPES = ("switchback", "switchback_q", "int8_hadamard")
ARMS = ("bf16", *(recipe + once for recipe in RECIPES for once in ("", "+once")))
COLUMNS = {"model": -12, "arm": -20, "ms": 8, "ms_of_kernels": 13, "weights_gib": 11}
COLUMNS |= {"temporaries_gib": 15, "ratio": 6, "error": -1}


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__, ARMS).parse_args(argv)
    records = timing.Records(args.out, args.seconds)
    for model in args.models:
        shape = SHAPES["blocks"][model]
        shape = shape._replace(batch=args.batch or shape.batch)
        for arm in args.arms:
            if records.seconds_left < 0:
                break
            try:
                row = measure(arm, shape, args.remat)
            except Exception as error:  # an arm that fails must not end the run
                row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            for base in records.rows:
                if (base["model"], base["arm"]) == (model, "bf16") and "ms" in base and "ms" in row:
                    row["ratio"] = base["ms"] / row["ms"]
            records.add(model=model, arm=arm, rank=RANK, remat=args.remat, **row)
    print("\n" + timing.table(records.rows, COLUMNS))
    return 0


def make(arm: str, shape: Shape, remat: bool) -> nnx.Module:
    """Makes blocks whose linear layers have frozen weights and LoRA matrices."""
    recipe, *once = arm.split("+")
    blocks = plain(shape, remat)
    if recipe != "bf16":
        swjax.nnx.quantize_model(blocks, {".*": recipe})
    for _, layer in nnx.iter_modules(blocks):
        if isinstance(layer, nnx.Linear):
            layer.kernel.set_value(layer.kernel.get_value().astype(DTYPE))
    if once:
        swjax.serving.prequantize(blocks)
    for block in blocks.layers:
        for name, layer in list(vars(block).items()):
            if isinstance(layer, nnx.Linear):
                sizes = layer.in_features, RANK, layer.out_features
                lora = nnx.LoRA(*sizes, base_module=layer, dtype=DTYPE, rngs=nnx.Rngs(0))
                setattr(block, name, lora)
    return blocks


def measure(arm: str, shape: Shape, remat: bool) -> dict:
    """Returns the speed and the memory of one arm."""
    graph, like = split(partial(make, arm, shape, remat))
    trained, frozen = nnx.split_state(like, nnx.LoRAParam, ...)

    def loss(trained, x, frozen, g):
        y = nnx.merge(graph, trained, frozen)(x, None)
        return jnp.sum((y * g).astype(jnp.float32))

    x, g = (timing.random(shape.batch, shape.length, shape.width, dtype=DTYPE) for _ in range(2))
    began = time.perf_counter()
    compiled = compile_(jax.grad(loss, argnums=(0, 1)), trained, x, frozen, g)
    compile_seconds = time.perf_counter() - began
    run = partial(compiled, jax.tree.map(filled, trained), x, jax.tree.map(filled, frozen), g)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    row = timing.repeated(run, 0.8 if shape.width > 64 else 0) | {
        "weights_gib": weights / 2**30,
        "temporaries_gib": timing.memory_gib(compiled)["temporaries_gib"],
        "compile_seconds": round(compile_seconds),
    }
    return row | kernel_times(run)


def filled(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Random matrices; ones for vectors, and the scale of weights of 0.02 for scales."""
    if like.dtype == jnp.int8:
        return jax.random.randint(jax.random.key(0), like.shape, -40, 40, jnp.int8)
    if like.ndim == 1:
        return jnp.ones(like.shape, like.dtype)
    if 1 in like.shape:
        return jnp.full(like.shape, 1e-3, like.dtype)
    return timing.random(*like.shape, dtype=like.dtype, scale=0.02)


if __name__ == "__main__":
    sys.exit(main())
