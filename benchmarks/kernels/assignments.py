"""Times kernels with persistent blocks, and with blocks of a few units, as programs of several devices have::

    python -m benchmarks.kernels.assignments --out=assignments.json

The layers are those of Llama-3-8B with 16,384 tokens. Times are medians of kernel times from CUPTI. `over` is
the time over that of persistent blocks, whose `units` are 0. Blocks of weight gradients always have one part.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.kernels import shapes, timing
from swjax import recipes
from swjax.kernels import dispatch, reference
from swjax.kernels.mosaic_gpu.assignment import units_of_a_block

UNITS = (0, 1, 2, 4)
COLUMNS = {"op": -22, "shape": -20, "units": 6, "us": 9, "over": 6}


class Case(NamedTuple):
    """An operation on arrays of a layer; `shape` names the layer."""

    operation: str
    shape: str
    arrays: tuple
    options: dict[str, Any]


def cases(tokens: int, layers: list[tuple[int, int]]) -> Iterator[Case]:
    blocks = recipes.RECIPES["switchback_hadamard"].wgrad.lhs
    in_int8 = {"dtypes": ("int8", "int8"), "block": blocks.block, "rotation": blocks.rotation}
    in_int8 |= {"out_dtype": "float32"}
    for k, n in layers:
        shape, x, g = f"{tokens}x{k}->{n}", timing.random(tokens, k), timing.random(tokens, n)
        a = jax.jit(reference.quantize)(x)
        b = jax.jit(partial(reference.quantize, axes=(0, 1)))(timing.random(n, k))
        yield Case("matmul", shape, (a, b), {"out_dtype": "bfloat16"})
        yield Case("block_weight_gradient", shape, (x, g), in_int8)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=shapes.LANGUAGE_TOKENS)
    parser.add_argument("--seconds", type=float, default=100, help="no case starts after this")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every row")
    args = parser.parse_args(argv)
    records = timing.Records(args.out, args.seconds)
    for case in cases(args.tokens, shapes.LANGUAGE_MODELS["Llama-3-8B"]):
        first = None
        for units in UNITS:
            if records.seconds_left < 0:
                return 0
            with units_of_a_block(units):
                function = partial(dispatch.kernel("mosaic_gpu", case.operation), **case.options)
                compiled = timing.compiled(function, *case.arrays)
            time = timing.measure(compiled, *case.arrays)
            first = first or time.us
            row = {"op": case.operation, "shape": case.shape, "units": units}
            kernels = {name: round(us, 1) for name, us in time.kernels.items()}
            records.add(**row, us=time.us, over=time.us / first, kernels_us=kernels)
    print("\n" + timing.table(records.rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
