"""Times the gated MLP of experts.py in PyTorch, in bf16 with `torch._grouped_mm`, eager and compiled::

    python benchmarks/kernels/experts_torch.py --out=experts_torch.json
    python benchmarks/kernels/experts_torch.py --models smoke --calls 2       # on any machine

It has a process and an environment of its own, because PyTorch needs another Triton than swjax's kernels.
The weights and their gradients are in bf16, so it has less to read and to write than the arms with fp32
weights. Times are wall-clock times over consecutive calls, the median of REPEATS.
"""

import argparse
import json
import statistics
import sys
import time
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


def mlp(x, gate, up, down, ends):
    """x [m, k] sorted by expert; weights [e, k, n]; ends [e], the row after the last of each expert."""
    grouped = torch._grouped_mm
    h = functional.silu(grouped(x, gate, offs=ends)) * grouped(x, up, offs=ends)
    return grouped(h, down, offs=ends)


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
            arrays = arrays_of(SHAPES[model], tokens)
            for arm in args.arms:
                for routing in ROUTINGS:
                    row = {"model": model, "tokens": tokens, "routing": routing}
                    row |= {"weights": "bfloat16", "arm": f"torch grouped_mm {arm}"}
                    sizes = torch.tensor(sizes_of(SHAPES[model], tokens, routing))
                    ends = sizes.cumsum(0).int().to(DEVICE)
                    try:
                        yield row | measured(SHAPES[model], arm, arrays, ends, args.calls)
                    except Exception as error:
                        yield row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def arrays_of(shape: ExpertShape, tokens: int):
    """Returns x, the weights of gate, up and down, and the output's gradient."""
    new = {"dtype": torch.bfloat16, "device": DEVICE}
    sides = (shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width)
    ws = [(torch.randn(shape.experts, k, n, **new) * k**-0.5).requires_grad_() for k, n in sides]
    x, g = (torch.randn(tokens * shape.chosen, shape.width, **new) for _ in range(2))
    return x.requires_grad_(), ws, g


def measured(shape: ExpertShape, arm: str, arrays, ends, calls: int) -> dict:
    x, ws, g = arrays
    function = torch.compile(mlp) if arm == "compiled" else mlp

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
    parser.add_argument("--arms", nargs="+", choices=("eager", "compiled"), default=["eager"])
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
