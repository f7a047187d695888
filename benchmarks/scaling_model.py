"""A model of a training step on many GPUs: bytes, FLOPs and seconds, computed, not measured.

benchmarks/notes/scaling.md explains the assumptions.

  python benchmarks/scaling_model.py                      # ViT-H/14 on 256 and 4,096 GPUs
  python benchmarks/scaling_model.py --model=vit_b16 --gpus 8 256

Bandwidths are the vendors' numbers. Rates of products are measured for a whole layer, in
benchmarks/results/kernels_h200_layers.json; nothing else is timed. All numbers are per GPU and step. In a
ring, each GPU sends (n - 1) / n of an array's bytes, and twice that for an all-reduce. Traffic between nodes
is spread evenly over the NICs of a node's GPUs, as in NCCL's rings: an array that all GPUs of a node need
enters the node once.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NODE = 8  # GPUs
NVLINK = 450e9  # bytes/s, each direction of a GPU: H100, H200
INFINIBAND = 50e9  # bytes/s of a GPU's NIC: NDR
LAYER = "65536x1280->5120"  # with its gradients
FP32 = 50e12  # FLOP/s of the loss's products: an assumption, 3/4 of 67e12 by the data sheet
GATHERED = {"bf16": 2, "int8": 1}  # bytes of a gathered weight


def rates() -> dict[str, float]:
    """Returns {precision: FLOP/s of a layer}."""
    rows = json.loads((ROOT / "benchmarks/results/kernels_h200_layers.json").read_text())["rows"]
    plain = [row for row in rows if row["op"] == "layer plain" and row["shape"] == LAYER]
    tops = {row["implementation"]: row["tops"] * 1e12 for row in plain}
    return {"bf16": tops["xla bf16"], "int8": tops["switchback"]}


RATES = rates()


class Model(NamedTuple):
    """The properties of a model that a step's time depends on.

    Attributes:
      kernels: parameters of the linear layers in blocks; gathered twice, quantized.
      others: all other parameters; float32.
      linear: FLOP of these layers for one pair, forward and backward.
      rest: the same of attention and all else.
      embed_dim: features of an embedding.
    """

    kernels: int
    others: int
    linear: float
    rest: float
    embed_dim: int


class Step(NamedTuple):
    """A step of one GPU: bytes over NVLink and InfiniBand, seconds of communication and of a pair."""

    nvlink: float
    infiniband: float
    communication: float
    pair: float


def model(name: str) -> Model:
    """Returns the model for a named CLIP with the paper's patch dropout of 0.5."""
    import jax
    from flax import nnx

    from swjax.models import clip

    cfg = clip.config(name, patch_dropout=0.5)
    params = nnx.state(nnx.eval_shape(lambda: clip.CLIP(cfg, rngs=nnx.Rngs(0))), nnx.Param)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves}
    kernels = sum(size for path, size in names.items() if "blocks" in path and "kernel" in path)
    towers = ((cfg.vision, cfg.vision.kept_patches(0.5) + 1), (cfg.text, cfg.text.context_length))
    linear = sum(
        6 * tokens * t.layers * (4 * t.width**2 + 2 * t.width * t.mlp_width) for t, tokens in towers
    )
    rest = 3 * clip.flops_per_example(cfg) - linear
    return Model(kernels, sum(names.values()) - kernels, linear, rest, cfg.embed_dim)


def step(m: Model, precision: str, layout: str, gpus: int, pairs: int) -> Step:
    """Returns a step.

    Args:
      m: see `model`.
      precision: one of `RATES`.
      layout: "data", "fsdp" over all GPUs, or "hybrid": fsdp in a node, data across.
      gpus: a multiple of 8, or up to 8.
      pairs: image-text pairs per GPU.
    """
    from swjax.losses.contrastive import NUMBERS

    node, nodes = min(gpus, NODE), max(gpus // NODE, 1)
    gathers = 2 * (GATHERED[precision] * m.kernels) + 4 * m.others  # the others once
    gradients = 4 * (m.kernels + m.others)
    within, across = (node - 1) / node, (nodes - 1) / nodes
    if layout == "data":  # an all-reduce sends twice the bytes
        nvlink, infiniband = 2 * gradients * within, 2 * gradients / node * across
    elif layout == "fsdp":
        nvlink = (gathers + gradients) * within
        infiniband = (gathers + gradients) / node * across
    else:
        nvlink = (gathers + gradients) * within
        infiniband = 2 * gradients / node * across
    # Texts that do not fit at once pass around a ring, again in the backward pass with gradients:
    # swjax.losses.ring.
    again = m.embed_dim * pairs * gpus > NUMBERS
    loss = (3 if again else 2) * 4 * m.embed_dim * pairs * gpus
    products = 4 if again else 3
    nvlink, infiniband = nvlink + loss * within, infiniband + loss / node * across
    compare = products * 2 * pairs * gpus * m.embed_dim / FP32
    seconds = m.linear / RATES[precision] + m.rest / RATES["bf16"] + compare
    return Step(nvlink, infiniband, nvlink / NVLINK + infiniband / INFINIBAND, seconds)


def break_even(m: Model, precision: str, layout: str, gpus: int) -> int:
    """Returns the pairs per GPU below which communication takes longer than computation."""
    pairs = 1
    while pairs < 2**16:
        s = step(m, precision, layout, gpus, pairs)
        if s.communication <= pairs * s.pair:
            break
        pairs += 1
    return pairs


def table(name: str, gpus: list[int], batch: int) -> str:
    m = model(name)
    lines = [
        f"{name}: {m.kernels / 1e6:.0f} M parameters in layers, {m.others / 1e6:.0f} M others; "
        f"{(m.linear + m.rest) / 1e12:.3f} TFLOP a pair, {m.linear / (m.linear + m.rest):.0%} in layers",
        "",
        "|GPUs|pairs a GPU|mesh|precision|NVLink GB|InfiniBand GB|communication ms|computing ms|ratio|"
        "break-even|",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for n in gpus:
        pairs = max(batch // n, 1)
        meshes = {"data": f"data={n}", "fsdp": f"fsdp={n}"}
        if n > NODE:
            meshes["hybrid"] = f"data={n // NODE}, fsdp={NODE}"
        for layout, mesh in meshes.items():
            for precision in RATES:
                s = step(m, precision, layout, n, pairs)
                computing = pairs * s.pair
                cells = [n, pairs, mesh, precision]
                cells += [f"{s.nvlink / 1e9:.2f}", f"{s.infiniband / 1e9:.2f}"]
                cells += [f"{1e3 * s.communication:.1f}", f"{1e3 * computing:.1f}"]
                cells += [f"{s.communication / computing:.2f}", break_even(m, precision, layout, n)]
                lines.append(f"|{'|'.join(map(str, cells))}|")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_h14")
    parser.add_argument("--gpus", nargs="+", type=int, default=[256, 4096])
    parser.add_argument("--batch", type=int, default=65536, help="pairs over all GPUs")
    args = parser.parse_args(argv)
    print(table(args.model, args.gpus, args.batch))


if __name__ == "__main__":
    main(sys.argv[1:])
