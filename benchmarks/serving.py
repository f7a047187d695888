"""Latency, throughput and memory of `encode_image` in bf16, int8, and int8 with prequantized weights.

  python benchmarks/serving.py --out benchmarks/results/serving.json     # ViT-B/32 and ViT-H/14: a GPU
  python benchmarks/serving.py --smoke                                   # a tiny model, in seconds

Weights are random. "bf16" keeps the blocks' weights in bf16; "int8" keeps fp32 weights, as training does;
"int8 prequantized" keeps only int8 weights. Latency is the median of calls that block one by one;
throughput is that of queued calls.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from swjax import evaluators, serving
from swjax.models import clip
from swjax.training.log import environment

VARIANTS = ("bf16", "int8", "int8 prequantized")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_b32", "vit_h14"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="the tiny model, two calls")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    if args.smoke:
        args.models, args.batches, args.calls = ["tiny"], [1, 4], 2
    rows = []
    for name in args.models:
        expected = {}  # of bf16, the first variant
        for variant in VARIANTS:
            tower = make(name, variant)
            for batch in args.batches:
                row, vectors = measure(tower, batch, args.calls)
                bf16 = expected.setdefault(batch, vectors)
                row["cosine_to_bf16"] = float(np.sum(vectors * bf16, 1).mean())
                rows.append({"model": name, "variant": variant, "batch": batch, **row})
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
                write(args.out, rows)


def make(name: str, variant: str) -> clip.CLIP:
    """Returns a CLIP without its text tower."""
    recipe = "standard" if variant == "bf16" else "switchback"

    @nnx.jit
    def build():
        model = clip.CLIP(clip.config(name, recipe=recipe, dtype="bfloat16"), rngs=nnx.Rngs(0))
        del model.text
        if variant == "bf16":
            kernels = nnx.state(model.vision.blocks, lambda path, _: path[-1] == "kernel")
            nnx.update(model.vision.blocks, jax.tree.map(lambda w: w.astype("bfloat16"), kernels))
        return serving.prequantize(model) if variant == "int8 prequantized" else model

    return build()


def measure(model: clip.CLIP, batch: int, calls: int) -> tuple[dict, np.ndarray]:
    graph, params = nnx.split(model)
    size = model.cfg.vision.image_size
    images = np.random.default_rng(0).integers(0, 256, (batch, size, size, 3), np.uint8)
    images = {"image": jax.device_put(images)}
    predict = evaluators.predictor(graph, size)
    memory = predict.lower(params, images).compile().memory_analysis()
    vectors = jax.block_until_ready(predict(params, images)["image"])
    latencies = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(predict(params, images))
        latencies.append(time.perf_counter() - start)
    start = time.perf_counter()
    jax.block_until_ready([predict(params, images) for _ in range(calls)])
    seconds = time.perf_counter() - start
    row = {
        "latency_ms": round(1e3 * statistics.median(latencies), 3),
        "images_per_second": round(calls * batch / seconds, 1),
        "weights_MB": round(sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6, 1),
        "temporary_MB": round(memory.temp_size_in_bytes / 1e6, 1),
    }
    return row, np.asarray(vectors)


def write(out: Path | None, rows: list[dict]) -> None:
    if out:
        machine = environment.describe().splitlines()[1:]
        out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"command": environment.command(), "machine": machine, "rows": rows}, indent=1
        )
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
