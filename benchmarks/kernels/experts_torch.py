"""Times the gated MLP of experts.py in PyTorch: in bf16 with `torch._grouped_mm`, and in torchao's float8::

    python benchmarks/kernels/experts_torch.py --out=experts_torch.json
    python benchmarks/kernels/experts_torch.py --models smoke --calls 2       # on any machine

It has a process and an environment of its own, because PyTorch needs another Triton than swjax's kernels.
The weights and their gradients are in bf16, so it has less to read and to write than the arms with fp32
weights. Times are wall-clock times over consecutive calls, the median of REPEATS. "float8" computes all
three products in fp8, with scales of rows and columns, and needs groups of a multiple of 16 rows: "equal".
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels.routing import ROUTINGS, sizes_of  # noqa: E402
from benchmarks.kernels.shapes import EXPERTS, ExpertShape  # noqa: E402

REPEATS = 3
SHAPES = {**EXPERTS, "smoke": ExpertShape(4, 2, 64, 128)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def float8_grouped(x, w, offs):
    from torchao.prototype import moe_training

    product = moe_training._to_fp8_rowwise_then_scaled_grouped_mm
    return product(x, w, offs, pad_token_groups_for_grouped_mm=False)


def mlp(grouped, x, gate, up, down, ends):
    """x [m, k] sorted by expert; weights [e, k, n]; ends [e], the row after the last of each expert."""
    h = functional.silu(grouped(x, gate, offs=ends)) * grouped(x, up, offs=ends)
    return grouped(h, down, offs=ends)


bf16 = partial(mlp, torch._grouped_mm)
float8 = partial(mlp, float8_grouped)
ARMS = {
    "grouped_mm eager": lambda: bf16,
    "grouped_mm compiled": lambda: torch.compile(bf16),
    "float8 eager": lambda: float8,
    "float8 compiled": lambda: torch.compile(float8),
}


def seconds_per_call(run, calls: int) -> float:
    def synchronize():
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    run()
    times = []
    for _ in range(REPEATS):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def rows(args):
    """Yields a row for each case; a failing case has its error."""
    for model in args.models:
        for tokens in args.tokens:
            for arm in args.arms:
                in_bf16 = arm.startswith("grouped")
                arrays = arrays_of(SHAPES[model], tokens, in_bf16)
                for routing in args.routings if in_bf16 else ["equal"]:
                    row = {"model": model, "tokens": tokens, "routing": routing}
                    row |= {"weights": "bfloat16", "arm": f"torch {arm}"}
                    sizes = torch.tensor(sizes_of(SHAPES[model], tokens, routing))
                    ends = sizes.cumsum(0).int().to(DEVICE)
                    try:
                        yield row | measured(SHAPES[model], ARMS[arm](), arrays, ends, args.calls)
                    except Exception as error:
                        yield row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def arrays_of(shape: ExpertShape, tokens: int, rows_first: bool):
    """Returns x, the weights of gate, up and down, and the output's gradient.

    In memory, a weight is [e, k, n] if `rows_first`, otherwise [e, n, k].
    """
    new = {"dtype": torch.bfloat16, "device": DEVICE}
    sides = (shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width)
    ws = [torch.randn(shape.experts, k, n, **new) * k**-0.5 for k, n in sides]
    ws = [(w if rows_first else w.mT.contiguous().mT).requires_grad_() for w in ws]
    x, g = (torch.randn(tokens * shape.chosen, shape.width, **new) for _ in range(2))
    return x.requires_grad_(), ws, g


def measured(shape: ExpertShape, function, arrays, ends, calls: int) -> dict:
    x, ws, g = arrays

    def run():
        for leaf in (x, *ws):
            leaf.grad = None
        function(x, *ws, ends).backward(g)

    seconds = seconds_per_call(run, calls)
    arithmetic = 18 * len(x) * shape.width * shape.hidden
    return {"wall_us": round(1e6 * seconds, 1), "tops": round(arithmetic / seconds / 1e12, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].rstrip(":"))
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(EXPERTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["grouped_mm eager"])
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16_384], help="before routing")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    done = {"device": name, "torch": torch.__version__, "rows": []}
    for row in rows(args):
        print(json.dumps(row), flush=True)
        done["rows"].append(row)
        if args.out:
            args.out.write_text(json.dumps(done, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
