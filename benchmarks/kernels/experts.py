"""Times the gated MLP of mixtures of experts, forward and backward::

    python -m benchmarks.kernels.experts --out=experts.json
    python -m benchmarks.kernels.experts --models Mixtral-8x7B --arms standard switchback --tokens 65536
    python -m benchmarks.kernels.experts --smoke         # tiny, on any machine

Rows of tokens are already sorted by expert: routing and sorting are not timed. Activations are in bf16,
weights in `--weights`; every arm returns the output and the gradients of everything. Routings: "equal", the
same number of rows for each expert; "uniform", experts drawn with one probability; "zipf", expert i with a
probability of 1 / i. The arms in bf16 are "standard" (our kernels), `jax.lax.ragged_dot` by XLA, tokamax's,
and dense batched products by XLA, which exist for equal groups only. `ratio` is to the fastest of them.
Times are medians of kernel times from CUPTI. experts_torch.py has PyTorch's arm.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp

import swjax
from benchmarks.kernels import shapes, timing
from benchmarks.kernels.routing import ROUTINGS, sizes_of
from benchmarks.kernels.shapes import ExpertShape
from swjax.kernels import dispatch

COLUMNS = {"model": -17, "tokens": 7, "routing": -8, "weights": -9, "arm": -20, "us": 9}
COLUMNS |= {"wall_us": 9, "tops": 7, "ratio": 6, "peer": -20, "snr_db": 6, "gib": 6, "error": -1}
SMOKE = {"smoke": ExpertShape(4, 2, 64, 128)}


def of_swjax(recipe: str, x, ws, sizes):
    return swjax.gated_ragged_mlp(x, *ws, sizes, recipe=recipe)


def by(ragged_dot: Callable, x, ws, sizes):
    """The MLP as models write it."""
    gate, up, down = (w.astype(x.dtype) for w in ws)
    h = jax.nn.silu(ragged_dot(x, gate, sizes)) * ragged_dot(x, up, sizes)
    return ragged_dot(h, down, sizes)


def batched(x, w, sizes):
    """Groups of equal size, as a dense product."""
    groups = x.reshape(len(sizes), -1, x.shape[1])
    return jnp.einsum("emk,ekn->emn", groups, w).reshape(-1, w.shape[2])


def by_tokamax(x, w, sizes):
    import tokamax

    return tokamax.ragged_dot(x, w, sizes)


RECIPES = ("switchback", "switchback_hadamard", "fp8_switchback")
# Those in bf16 first: see `measured`. XLA's, which may run out of memory, is the last.
ARMS = {
    "standard": partial(of_swjax, "standard"),
    "xla batched": partial(by, batched),
    "tokamax": partial(by, by_tokamax),
    **{name: partial(of_swjax, name) for name in RECIPES},
    "xla ragged_dot": partial(by, jax.lax.ragged_dot),
}
IN_BF16 = ("standard", "xla batched", "tokamax", "xla ragged_dot")


def step(function, x, ws, sizes, g):
    """Returns the output, and the gradients of x and of every weight."""
    y, backward = jax.vjp(lambda x, ws: function(x, ws, sizes), x, ws)
    # As in training: without it XLA may compute y last, and keeps what y is computed from.
    y, g = jax.lax.optimization_barrier((y, g))
    return y, *backward(g)


def arrays_of(shape: ExpertShape, tokens: int, weights: str) -> tuple:
    """Returns the shapes of x, of the weights, of the group sizes and of the output's gradient."""
    new, (e, chosen, width, hidden) = jax.ShapeDtypeStruct, shape
    rows = new((tokens * chosen, width), jnp.bfloat16)
    gate, down = (new((e, *of), weights) for of in ((width, hidden), (hidden, width)))
    return rows, (gate, gate, down), new((e,), jnp.int32), rows


def fill(array: jax.ShapeDtypeStruct) -> jax.Array:
    scale = array.shape[1] ** -0.5 if len(array.shape) == 3 else 1
    return timing.random(*array.shape, dtype=array.dtype, scale=scale)


def bench_model(records: timing.Records, args, model: str, tokens: int, weights: str, programs):
    """Times every arm with every routing on the same arrays."""
    shape = (SMOKE | shapes.EXPERTS)[model]
    like = arrays_of(shape, tokens, weights)
    x, ws, g = fill(like[0]), tuple(map(fill, like[1])), fill(like[3])
    expected = {}
    for arm in args.arms:
        case = {"model": model, "tokens": tokens, "weights": weights, "arm": arm}
        case["products"] = args.products or "auto"
        try:
            program = programs[model, tokens, weights, arm]()
        except Exception as error:  # a failing case must not end the run
            records.add(**case, error=f"{type(error).__name__}: {str(error)[:300]}")
            continue
        for routing in args.routings:
            if records.seconds_left < 0 or (arm == "xla batched" and routing != "equal"):
                continue
            sizes = jnp.asarray(sizes_of(shape, tokens, routing), jnp.int32)
            row = case | {"routing": routing, "largest": int(sizes.max())}
            try:
                result = program(x, ws, sizes, g)
                if routing == "equal" and arm == args.arms[0]:
                    expected[routing] = result
                close = {}
                if routing in expected:
                    close = {"snr_db": timing.closeness(result, expected[routing])["snr_db"]}
                del result
                records.add(
                    **row, **measured(records, row, shape, program, (x, ws, sizes, g)), **close
                )
            except Exception as error:
                records.add(**row, error=f"{type(error).__name__}: {str(error)[:300]}")


def measured(records: timing.Records, row: dict, shape: ExpertShape, program, arrays) -> dict:
    """Returns the columns of a measurement."""
    time = timing.measure(program, *arrays, iterations=8)
    wall = timing.wall(program, *arrays, iterations=8)
    arithmetic = 18 * len(arrays[0]) * shape.width * shape.hidden
    memory = program.memory_analysis()
    same = ("model", "tokens", "weights", "routing")
    peers = [
        each
        for each in records.rows
        if each["arm"] in IN_BF16 and each.get("us") and all(each[key] == row[key] for key in same)
    ]
    ratio = {}
    if peers and row["arm"] not in IN_BF16:
        best = min(peers, key=lambda each: each["us"])
        ratio = {"ratio": best["us"] / time.us, "peer": best["arm"]}
    return {
        "us": time.us,
        "clock": time.clock,
        "wall_us": wall,
        "tops": arithmetic / time.us / 1e6,
        **ratio,
        "gib": memory.temp_size_in_bytes / 2**30 if memory else None,
        "kernels": {name[:60]: round(us, 1) for name, us in time.kernels.items()},
    }


def compiled_programs(pool: ThreadPoolExecutor, args) -> dict[tuple, Callable]:
    """Returns a getter of each program. They compile in threads; XLA's own arms when they are needed, because
    XLA times its products while it compiles."""
    programs = {}
    for model in args.models:
        shape = (SMOKE | shapes.EXPERTS)[model]
        for tokens in args.tokens:
            for weights in args.weights:
                like = arrays_of(shape, tokens, weights)
                for arm in args.arms:
                    compile_ = partial(timing.compiled, partial(step, ARMS[arm]), *like)
                    later = arm.startswith("xla")
                    get = compile_ if later else pool.submit(compile_).result
                    programs[model, tokens, weights, arm] = get
    return programs


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = timing.parser(__doc__, seconds=240)
    parser.add_argument("--models", nargs="+", default=list(shapes.EXPERTS), help="their shapes")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--weights", nargs="+", default=["float32"], help="dtypes of the weights")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16_384], help="before routing")
    text = "the implementation of ragged products to prefer; default: the automatic choice"
    parser.add_argument("--products", choices=("triton", "mosaic_gpu"), help=text)
    args = parser.parse_args(argv)
    if args.smoke:
        args.models, args.tokens = list(SMOKE), [256]
        args.arms = [arm for arm in args.arms if arm != "tokamax"]
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    records = timing.Records(args.out, args.seconds)
    if args.products:
        for operation, known in dispatch.IMPLEMENTATIONS.items():
            if operation.startswith("ragged"):
                preferred = sorted(known, key=lambda name: name != args.products)
                dispatch.IMPLEMENTATIONS[operation] = tuple(preferred)
    with ThreadPoolExecutor(16) as pool:
        programs = compiled_programs(pool, args)
        for model in args.models:
            for tokens in args.tokens:
                for weights in args.weights:
                    bench_model(records, args, model, tokens, weights, programs)
        pool.shutdown(cancel_futures=True)
    print("\n" + timing.table(records.rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
