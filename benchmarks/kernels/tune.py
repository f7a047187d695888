"""Times candidate tiles of each kernel on this GPU, and records those that beat the rules of `tiles`::

    python -m benchmarks.kernels.tune                # writes tuned/<device>.json, which `tiles` reads
    python -m benchmarks.kernels.tune --only triton rows/gelu
    python -m benchmarks.kernels.tune --dry-run      # what it would try; needs no GPU

An entry is written if a candidate takes more than 2% less time than the rule in two measurements, with the
same result. The file is complete after every shape. Shapes that the time limit cuts off keep their entries.
Candidates compile in threads while others are measured.
"""

import argparse
import collections
import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.kernels import shapes, timing
from benchmarks.kernels.routing import sizes_of
from swjax.kernels import dispatch, reference, tiles
from swjax.kernels.products.tiles import MOSAIC_RULE, MosaicTile, TritonTile, triton_rule
from swjax.kernels.ragged.tiles import MOSAIC_RULE as RAGGED_RULE
from swjax.kernels.ragged.tiles import product_rule, weight_gradient_rule
from swjax.kernels.reference import QTensor
from swjax.kernels.rotations.tiles import rotation_rule
from swjax.kernels.tiles import RowTile

GAIN = 0.02
# Candidates give the rule's result up to the order of sums.
LOWEST_DB = 50


class Work(NamedTuple):
    """One entry of the table.

    Attributes:
      path: of the entry in the table.
      rule: the default without an entry: a tile, or the name of an implementation.
      candidates: alternatives to the rule.
      function: candidate -> the function that uses it.
      arrays: shapes of its arguments, which are filled with random values.
    """

    path: tuple[str, ...]
    rule: object
    candidates: list
    function: Callable
    arrays: tuple


# --- candidates ---------------------------------------------------------------------------------------


def works() -> dict[tuple[str, ...], Work]:
    """Returns {path: work} of everything that can be tuned, the most important first."""
    return {work.path: work for work in _works(shapes.TOKENS)}


def _works(tokens: int) -> Iterator[Work]:
    """Yields the work: ViT-H, other towers, products in Triton, larger ViTs, paper's grid, LLMs, experts."""
    for width in (1280, 1024, 768):
        for producer, widths in {
            "none": (width, 4 * width, 3 * width),
            "layer_norm": (width,),
            "layer_norm_backward": (width,),
            "gelu": (4 * width,),
            "gelu_backward": (4 * width,),
        }.items():
            yield from (row_work(producer, tokens, each) for each in widths)
        for _, k, n in shapes.block(width).values():
            yield implementation_work("weight_gradient", tokens, k, n)
        yield implementation_work("weight_gradient_group", tokens, width, width)
        for k, n in product_shapes(width):
            yield mosaic_work(tokens, k, n)
    for k, n in product_shapes(1280) + product_shapes(1024) + product_shapes(768):
        yield triton_work(tokens, k, n)
    # ViT-g/14 and ViT-bigG/14
    for dim, hidden in ((1408, 6144), (1664, 8192)):
        yield implementation_work("weight_gradient_group", tokens, dim, dim)
        for k, n in ((dim, dim), (dim, hidden), (hidden, dim)):
            yield implementation_work("weight_gradient", tokens, k, n)
    for dim in (4096, 2048):
        yield implementation_work("weight_gradient_group", tokens, dim, dim)
        yield from (row_work("none", tokens, each) for each in (dim, 4 * dim))
        for k, n in ((dim, 4 * dim), (4 * dim, dim)):
            yield implementation_work("weight_gradient", tokens, k, n)
            yield mosaic_work(tokens, k, n)
    tokens = shapes.LANGUAGE_TOKENS
    for layers in shapes.LANGUAGE_MODELS.values():
        for k, n in dict.fromkeys(layers + [(n, k) for k, n in layers]):
            yield mosaic_work(tokens, k, n)
        for k, n in layers:
            yield implementation_work("weight_gradient", tokens, k, n)
            yield row_work("none", tokens, k)
            yield row_work("rotated", tokens, k)
        width, hidden = layers[-1][::-1]
        for producer in ("rms_norm", "rms_norm_backward"):
            yield row_work(producer, tokens, width)
        for producer in ("gated", "gated_backward"):
            yield row_work(producer, tokens, hidden)
    for experts in shapes.EXPERTS.values():
        yield from ragged_works(experts, tokens)


def product_shapes(width: int) -> list[tuple[int, int]]:
    """Yields (k, n) of the quantized products of a block, forward and backward."""
    forward = [(k, n) for _, k, n in shapes.block(width).values()]
    return list(dict.fromkeys(forward + [(n, k) for k, n in forward]))


def row_work(producer: str, tokens: int, width: int) -> Work:
    rotated = producer == "rotated"
    rule = rotation_rule(width) if rotated else tiles.row_rule(width)
    cuts = [
        RowTile(rows, chunk, warps, stages)
        for chunk in {rule.chunk, max(rule.chunk // 2, 128)}
        for rows in (1, 2, 4)
        for warps in (1, 2, 4, 8, 16)
        if 8 <= rows * width / (32 * warps) <= 100  # values a thread holds
        and rows * chunk >= (2048 if rotated else 64 * warps)  # each value is in one thread
        for stages in ((1,) if producer in ("layer_norm", "rms_norm") else (1, 2, 3))
    ]
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    parameter = jax.ShapeDtypeStruct((width,), jnp.float32)
    arrays = {
        "none": (x,),
        "rotated": (x,),
        "layer_norm": (x, parameter, parameter),
        "layer_norm_backward": (x, parameter, x, x, x, x),
        "rms_norm": (x, parameter),
        "rms_norm_backward": (x, parameter, x, x, x, x),
        "gelu": (x,),
        "gelu_backward": (x, x),
        "gated": (x, x),
        "gated_backward": (x, x, x),
    }[producer]
    candidates = [tile for tile in cuts if tile != rule]
    path = ("rows", producer, str(width))
    return Work(path, rule, candidates, partial(row_function, producer), arrays)


def row_function(producer: str, tile: RowTile) -> Callable:
    """Returns a row kernel as SwitchBack calls it; backward passes recompute the weight gradient's inputs."""
    if producer == "none":
        module = dispatch.module_of("triton", "quantize")
        rows = partial(module.quantize_rows, dtype="int8", tile=tile)
        return lambda x: (rows(x), rows(x, total=True))  # of activations; of gradients
    if producer == "rotated":
        kernel = dispatch.kernel("triton", "quantize_rotated")
        return partial(kernel, rotation=128, tile=tile)
    if producer == "layer_norm_backward":
        kernel = dispatch.kernel("triton", producer)
        backward = partial(kernel, epsilon=1e-6, tile=tile)
        return lambda x, gamma, residual, *gradients: (  # before an MLP; before attention
            backward(x, gamma, gradients[0], residual, gamma),
            backward(x, gamma, gradients, residual, gamma),
        )
    if producer == "rms_norm_backward":
        kernel = dispatch.kernel("triton", producer)
        backward = partial(kernel, epsilon=1e-6, recompute=True, tile=tile)
        return (
            lambda x, gamma, residual, *gradients: (  # before layers whose kernel adds; before others
                backward(x, gamma, gradients[0], residual),
                backward(x, gamma, gradients, residual),
            )
        )
    options = {
        "layer_norm": {"epsilon": 1e-6, "high_precision": False},
        "rms_norm": {"epsilon": 1e-6, "high_precision": False},
        "gelu": {"high_precision": False},
        "gelu_backward": {"recompute": True},
        "gated": {"high_precision": False},
        "gated_backward": {"recompute": True},
    }[producer]
    return partial(dispatch.kernel("triton", producer), quantize_to="int8", tile=tile, **options)


def mosaic_work(tokens: int, k: int, n: int) -> Work:
    candidates = [MosaicTile(4, width) for width in (1, 2, 4, 16, 32)] + [MosaicTile(3, 8)]
    arrays, path = product_arrays(tokens, k, n), ("mosaic_gpu", f"{n}x{k}")
    return Work(path, MOSAIC_RULE, candidates, partial(quantized_product, "mosaic_gpu"), arrays)


def triton_work(tokens: int, k: int, n: int) -> Work:
    rule = triton_rule(tokens)
    cuts = [
        TritonTile(m, n, k, warps, stages, group)
        for m, n, k, warps, stages in (
            *((128, 128, 128, 4, stages) for stages in (2, 3, 4)),
            (128, 128, 128, 8, 3),
            *((128, 128, 64, 4, stages) for stages in (3, 4)),
            *((128, 256, step, 8, stages) for step, stages in ((64, 4), (128, 3), (128, 4))),
            (256, 128, 128, 8, 3),
        )
        for group in ((8, 16) if (m, n, k, warps) == (128, 128, 128, 4) else (8,))
    ]
    candidates = [tile for tile in cuts if tile != rule]
    arrays, path = product_arrays(tokens, k, n), ("triton", f"{n}x{k}")
    return Work(path, rule, candidates, partial(quantized_product, "triton"), arrays)


def ragged_works(experts: shapes.ExpertShape, tokens: int) -> Iterator[Work]:
    """Yields the products of a mixture of experts, in int8 and in bf16, and the weight gradients in bf16."""
    e, m = experts.experts, tokens * experts.chosen
    sizes = jnp.asarray(sizes_of(experts, tokens, "uniform"), jnp.int32)
    shape = jax.ShapeDtypeStruct
    for k, n in ((experts.width, experts.hidden), (experts.hidden, experts.width)):
        a = QTensor(shape((m, k), jnp.int8), shape((m, 1), jnp.float32))
        b = QTensor(shape((e, n, k), jnp.int8), shape((e, 1, 1), jnp.float32))
        yield ragged_mosaic_work(sizes, (a, b), k, n)
        yield ragged_product_work(sizes, (a, b), k, n, 1)
        x, w, wt, g = (shape(of, jnp.bfloat16) for of in ((m, k), (e, k, n), (e, n, k), (m, n)))
        yield ragged_product_work(sizes, (x, w, wt), k, n, 2)
        candidates = [
            TritonTile(*cut, group=8)
            for cut in (
                (128, 128, 64, 4, 3),
                (128, 128, 64, 8, 4),
                (128, 256, 64, 8, 3),
                (128, 256, 32, 8, 4),
                (256, 128, 64, 8, 3),
            )
        ]
        gradient = partial(ragged_gradient, sizes)

        path = ("ragged", f"weight_gradient {k}x{n}")
        yield Work(path, weight_gradient_rule(), candidates, gradient, (x, g))


def ragged_mosaic_work(sizes: jax.Array, arrays: tuple, k: int, n: int) -> Work:
    def function(tile):
        kernel = dispatch.kernel("mosaic_gpu", "ragged_matmul")
        return lambda a, b: kernel(a, b, sizes, axis=2, out_dtype="bfloat16", tile=tile)

    candidates = [MosaicTile(RAGGED_RULE.stages, width) for width in (1, 2, 4, 16, 32)]
    return Work(("ragged_mosaic_gpu", f"{n}x{k}x1"), RAGGED_RULE, candidates, function, arrays)


def ragged_gradient(sizes: jax.Array, tile: TritonTile) -> Callable:
    kernel = dispatch.kernel("triton", "ragged_weight_gradient")
    return lambda x, g: kernel(x, g, sizes, out_dtype="float32", tile=tile)


def ragged_product_work(sizes: jax.Array, arrays: tuple, k: int, n: int, itemsize: int) -> Work:
    """The product with weights of `itemsize` bytes; 16-bit weights have two orders, forward and backward."""
    rule = product_rule(len(jax.tree.leaves(arrays)[0]), len(sizes), itemsize)
    candidates = [
        TritonTile(m, n, step // itemsize, warps, stages, group)
        for m, n, step, warps, stages, group in (
            (128, 128, 128, 8, 3, 8),
            (128, 256, 128, 8, 3, 8),
            (128, 256, 128, 8, 3, 16),
            (128, 256, 64, 8, 4, 8),
            (256, 128, 128, 8, 3, 8),
        )
    ]

    def function(tile):
        kernel = dispatch.kernel("triton", "ragged_matmul")

        def products(a, *bs):
            axes = (2,) if itemsize == 1 else (1, 2)
            options = {"out_dtype": "bfloat16", "tile": tile}
            return tuple(kernel(a, b, sizes, axis=axis, **options) for b, axis in zip(bs, axes))

        return products

    return Work(("ragged", f"{n}x{k}x{itemsize}"), rule, candidates, function, arrays)


def product_arrays(tokens: int, k: int, n: int) -> tuple:
    shape = jax.ShapeDtypeStruct
    a = QTensor(shape((tokens, k), jnp.int8), shape((tokens, 1), jnp.float32))
    b = QTensor(shape((n, k), jnp.int8), shape((1, 1), jnp.float32))
    return a, b, shape((n,), jnp.float32)


def quantized_product(name: str, tile) -> Callable:
    return partial(dispatch.kernel(name, "matmul"), out_dtype="bfloat16", tile=tile)


def implementation_work(operation: str, tokens: int, k: int, n: int) -> Work:
    shape = jax.ShapeDtypeStruct
    x, g = shape((tokens, k), jnp.bfloat16), shape((tokens, n), jnp.bfloat16)
    arrays: tuple = (x, (g, g, g)) if operation.endswith("_group") else (x, g)
    names = dispatch.IMPLEMENTATIONS[operation]
    can = ["xla", *(name for name in names if not dispatch.why_not(name, operation, *arrays))]
    key = dispatch.shape_key(operation, *arrays)
    rule = tiles.rule_of_implementation(operation, key) or names[0]
    can.sort(key=lambda name: name != rule)

    def function(name):
        if name == "xla" and operation.endswith("_group"):
            return partial(each_alone(operation), out_dtype="float32")
        return partial(dispatch.run, operation, implementation=name, out_dtype="float32")

    path = ("implementation", operation, key)
    return Work(path, can[0], can[1:], function, arrays)


def each_alone(group: str) -> Callable:
    """The operation of a group as the operations of its layers, with the automatic choice for each.

    In the tuned table "xla" stands for this alternative, see `dispatch.choose`.
    """

    def function(x, gs, **options):
        operation = group.removesuffix("_group")
        return tuple(dispatch.run(operation, x, g, **options) for g in gs)

    return function


# --- measuring ----------------------------------------------------------------------------------------


def best_candidate(work: Work, compiled: dict) -> object | None:
    """Returns the candidate that beats the rule, or None; `compiled` maps each to a getter of its program."""
    arrays = jax.tree.map(fill, work.arrays)
    rule = compiled[work.rule]()
    expected, at_rule = rule(*arrays), timing.measure(rule, *arrays)
    times = {work.rule: at_rule.us}
    for candidate in work.candidates:
        try:
            program = compiled[candidate]()
            close = timing.closeness(program(*arrays), expected)["snr_db"]
            if not close >= LOWEST_DB:
                raise ArithmeticError(f"{close} dB from the rule's result")
            time = timing.measure(program, *arrays)
            if time.clock != at_rule.clock:
                raise ArithmeticError(f"timed by {time.clock}, the rule by {at_rule.clock}")
            times[candidate] = time.us
        except Exception as error:  # for example too much shared memory
            print(f"    {candidate}: {type(error).__name__}: {str(error)[:120]!r}")
    best = min(times, key=times.get)
    print(*work.path, f"{times[work.rule]:.1f} us; {best} {times[best]:.1f} us", flush=True)
    if times[best] >= (1 - GAIN) * times[work.rule]:
        return None
    best_again, rule_again = (
        timing.measure(compiled[each](), *arrays, iterations=24).us for each in (best, work.rule)
    )
    return best if best_again < (1 - GAIN) * rule_again else None


def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
    values = timing.random(*shape.shape, dtype="float32")
    if shape.dtype == jnp.int8:
        return jax.jit(reference.quantize)(values).values
    return jnp.abs(values) + 0.1 if shape.shape[-1] == 1 else values.astype(shape.dtype)


def runnable(work: Work) -> bool:
    """Whether the kernels of this work can run on this machine."""
    if work.path[0] == "implementation":
        return bool(work.candidates)
    kind = work.path[0]
    if kind == "ragged_mosaic_gpu":
        return dispatch.why_not("mosaic_gpu", "ragged_matmul", *work.arrays, axis=2) is None
    operation = {"rows": "gelu", "ragged": "ragged_matmul"}.get(kind, "matmul")
    name = kind if operation == "matmul" else "triton"
    return dispatch.why_not(name, operation, *work.arrays) is None


def enter(table: dict, work: Work, choice: object | None):
    """Sets the table's entry of this work, or removes it if `choice` is None."""
    *path, last = work.path
    for key in path:
        table = table.setdefault(key, {})
    table.pop(last, None)
    if choice is not None:
        table[last] = choice if isinstance(choice, str) else asdict(choice)


def programs(pool: ThreadPoolExecutor, work: Work) -> dict[object, Callable]:
    """Returns a getter of each candidate's program, which compiles in the background.

    XLA's products do not, because XLA times them while it compiles.
    """
    each = [work.rule, *work.candidates]
    compile_ = lambda tile: timing.compiled(work.function(tile), *work.arrays)
    if work.path[0] == "implementation":
        return {tile: partial(compile_, tile) for tile in each}
    return {tile: pool.submit(compile_, tile).result for tile in each}


def ahead(jobs: Iterator, count: int = 2) -> Iterator:
    """Yields jobs, keeping `count` more started: if all started at once, the first would take minutes."""
    begun = collections.deque()
    for job in jobs:
        begun.append(job)
        if len(begun) > count:
            yield begun.popleft()
    yield from begun


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="START", help="shapes whose path starts so"
    )
    parser.add_argument("--seconds", type=float, default=240, help="no shape starts after this")
    parser.add_argument("--out", type=Path, help="JSON file; default: where `tiles` reads it")
    parser.add_argument("--dry-run", action="store_true", help="list what would be tried")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    chosen = [w for w in works().values() if "/".join(w.path).startswith(tuple(args.only))]
    if args.dry_run:
        for work in chosen:
            print(*work.path, f"rule {work.rule}, {len(work.candidates)} candidates")
        return 0
    todo = [work for work in chosen if runnable(work)]
    if not todo:
        print(
            f"tuning needs an NVIDIA GPU and jax-triton, got {jax.default_backend()}: "
            "see --dry-run, or install swjax[gpu]",
            file=sys.stderr,
        )
        return 2
    device = jax.devices()[0]
    out = args.out or tiles.table_path(device.device_kind)
    write_table(todo, copy.deepcopy(tiles.table(device)), out, args.seconds)
    return 0


def write_table(todo: list[Work], table: dict, out: Path, seconds: float) -> None:
    """Tunes until the time limit, and writes the table after each work."""
    clock = timing.Records(None, seconds)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for work, compiled in ahead((work, programs(pool, work)) for work in todo):
            if clock.seconds_left < 0:
                pool.shutdown(cancel_futures=True)
                break
            try:
                enter(table, work, best_candidate(work, compiled))
            except Exception as error:  # a failing rule must not end the run
                print(*work.path, f"{type(error).__name__}: {str(error)[:300]}")
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(clock.machine | {"tiles": table}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
