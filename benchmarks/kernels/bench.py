"""Times every operation in every implementation, and in XLA::

    python -m benchmarks.kernels.bench --out=bench.json                # everything, most important first
    python -m benchmarks.kernels.bench --ops products --seconds=300    # by every implementation, and by XLA
    python -m benchmarks.kernels.bench --attention                     # as layers call it, and cuDNN's
    python -m benchmarks.kernels.bench --layer plain fused --recipes switchback   # see layers.py
    python -m benchmarks.kernels.bench --smoke                         # tiny, on any machine, in seconds

Inputs are random, and arrays of tokens are larger than the L2 cache. Times are medians of kernel times from
CUPTI (on CPUs: of wall time). Each row has the distance of its result from the specification, so that a wrong
kernel cannot win. A ratio is to the fastest library, which may do less, such as leave out scales. The file is
complete after every row.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.kernels import layers, shapes, timing
from benchmarks.kernels.shapes import LinearShape
from benchmarks.kernels.tune import each_alone
from swjax import attention, recipes
from swjax.kernels import dispatch, reference

COLUMNS = {"op": -33, "shape": -17, "dtype": -13, "implementation": -27, "us": 9, "tops": 7}
COLUMNS |= {"gbs": 6, "copy_share": 10, "ratio": 6, "peer": -22, "snr_db": 6, "identical": 9}
COLUMNS |= {"error": -1}
SMOKE = {"fc1": LinearShape(256, 128, 512), "out": LinearShape(256, 128, 128)}
SMOKE_HEADS = {"": ((2, 24, 2, 16), True)}
# Arrays of fewer bytes stay in the L2 cache between runs, so their rows have no share of the copy bandwidth.
CACHED = 128 * 2**20
# int8 reaches more than 30 dB and e5m2 more than 20; a result below this is wrong.
LOWEST_DB = 15
RECIPES = ("switchback", "switchback_m", "switchback_q", "fp8_switchback", "fp8_tensorwise")


class Case(NamedTuple):
    """One operation on given arrays.

    Attributes:
      name: first column of its row in the table.
      operation: a key of `dispatch.IMPLEMENTATIONS`.
      peers: {name: (function, arrays)} of other libraries.
      arithmetic: operations of its matrix product; 0 for operations without one.
    """

    name: str
    operation: str
    shape: str
    arrays: tuple
    options: dict
    peers: dict[str, tuple[Callable, tuple]] = {}  # noqa: RUF012, never changed
    arithmetic: int = 0

    @property
    def dtype(self) -> str:
        """The quantized dtype, or the dtype of the first array."""
        names = [leaf.dtype.name for leaf in jax.tree.leaves(self.arrays)]
        return self.options.get("dtype") or self.options.get("quantize_to") or names[0]


def product_cases(layer: LinearShape) -> Iterator[Case]:
    """Yields the quantized products of a layer."""
    m, k, n = layer
    shape = f"{m}x{k}->{n}"
    x, w, bias = timing.random(m, k), timing.random(k, n, scale=k**-0.5), timing.random(n)
    bias = bias.astype(jnp.float32)
    for dtype, w_dtype in (
        ("int8", "int8"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e4m3fn"),  # the input gradient
    ):
        a = jax.jit(partial(reference.quantize, dtype=dtype))(x)
        b = jax.jit(partial(reference.quantize, axes=(0, 1), dtype=w_dtype, transpose=True))(w)
        peers = {}
        if dtype == "int8":
            peers["xla bf16"] = (lambda x, w, bias: x @ w + bias.astype(x.dtype), (x, w, bias))
        elif dtype == "float8_e4m3fn":
            peers["xla fp8, no scales"] = (_xla_fp8, (a.values, b.values))
            peers["xla fp8"] = (_xla_fp8, (a.values, b.values, a.scale, b.scale, bias))
        options = {"out_dtype": "bfloat16"}
        yield Case("matmul", "matmul", shape, (a, b, bias), options, peers, 2 * m * k * n)
        if dtype == "int8":
            arrays = a, b, bias, timing.random(m, n)
            yield Case("matmul, an addend", "matmul", shape, arrays, options, {}, 2 * m * k * n)
            b = jax.jit(partial(reference.quantize, axes=(0,), transpose=True))(w)
            name = "matmul, a scale a channel"
            yield Case(name, "matmul", shape, (a, b, bias), options, {}, 2 * m * k * n)


def weight_gradient_cases(layer: LinearShape) -> Iterator[Case]:
    """Yields the weight gradient of a layer in 16 bits, and in int8 with the 16-bit ones as its peers."""
    m, k, n = layer
    shape = f"{m}x{k}->{n}"
    arrays, options = (timing.random(m, k), timing.random(m, n)), {"out_dtype": "float32"}
    yield Case("weight_gradient", "weight_gradient", shape, arrays, options, {}, 2 * m * k * n)
    peers = {}
    for name in ("xla", *dispatch.IMPLEMENTATIONS["weight_gradient"]):
        if name != "xla" and dispatch.why_not(name, "weight_gradient", *arrays, **options):
            continue
        run = partial(dispatch.run, "weight_gradient", implementation=name, **options)
        peers[f"{name} 16-bit"] = (run, arrays)
    blocks = recipes.RECIPES["switchback_hadamard"].wgrad.lhs
    options |= {"dtypes": ("int8", "int8"), "block": blocks.block, "rotation": blocks.rotation}
    name = "block_weight_gradient"
    yield Case(name, name, shape, arrays, options, peers, 2 * m * k * n)


def group_cases(layer: LinearShape) -> Iterator[Case]:
    """Yields the backward pass of queries, keys and values: three square layers of one input.

    Peers are the automatic choices for each layer.
    """
    m, k, n = layer
    if k != n:
        return
    group = range(3)
    gs = tuple(timing.random(m, n) for _ in group)
    to_int8 = jax.jit(reference.quantize)
    w_to_int8 = jax.jit(partial(reference.quantize, axes=(0, 1)))
    quantized = (
        tuple(map(to_int8, gs)),
        tuple(w_to_int8(timing.random(n, k, scale=k**-0.5)) for _ in group),
    )
    blocks = recipes.RECIPES["switchback_hadamard"].wgrad.lhs
    in_int8 = {"dtypes": ("int8", "int8"), "block": blocks.block, "rotation": blocks.rotation}
    shared, arrays = {"out_dtype": "float32"}, (timing.random(m, k), gs)
    for name, run, operands, options in (
        ("matmul_sum", _added, quantized, {"out_dtype": "bfloat16"}),
        ("weight_gradient_group", each_alone("weight_gradient_group"), arrays, shared),
        (
            "block_weight_gradient_group",
            each_alone("block_weight_gradient_group"),
            arrays,
            shared | in_int8,
        ),
    ):
        peers = {"each layer alone": (partial(run, **options), operands)}
        work = 2 * len(group) * m * k * n
        yield Case(name, name, f"3 x {m}x{k}->{n}", operands, options, peers, work)


def _added(a, b, *, out_dtype):
    ys = [dispatch.run("matmul", *pair, out_dtype=out_dtype) for pair in zip(a, b)]
    return sum(y.astype(jnp.float32) for y in ys).astype(out_dtype)


def _xla_fp8(a, b, a_scale=None, b_scale=None, bias=None):
    """XLA's native fp8 product; the specification multiplies fp8 values as bf16."""
    y = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    return y if bias is None else (y * (a_scale * b_scale) + bias).astype(jnp.bfloat16)


def pass_cases(layer: LinearShape) -> Iterator[Case]:
    """Yields operations without matrix product, for x [tokens, k], w [k, n] and the output's gradient."""
    m, k, n = layer
    yield from row_quantizers(m, k)
    yield from row_quantizers(m, n)
    if n == 4 * k:  # the first layer of an MLP, between LayerNorm and GELU
        yield from producers(m, k, n)
    w = timing.random(k, n, dtype="float32", scale=k**-0.5)
    for name, axes, transpose in (
        ("quantize weight", (0, 1), False),
        ("quantize weight, transpose", (0, 1), True),
        ("quantize channels, transpose", (0,), True),
    ):
        options = {"axes": axes, "dtype": "int8", "transpose": transpose}
        yield Case(name, "quantize", f"{k}x{n}", (w,), options)
    arrays = (w, jnp.max(jnp.abs(w).reshape(256, -1), 1))
    yield Case("quantize weight, both, maxima known", "quantize_both", f"{k}x{n}", arrays, {})


def block_cases(layer: LinearShape) -> Iterator[Case]:
    """Yields what a layer of `fp8_block128` runs."""
    m, k, n = layer
    blocks = recipes.RECIPES["fp8_block128"].fwd.lhs
    options = {"dtype": blocks.dtype, "block": blocks.block}
    x, g = timing.random(m, k), timing.random(m, n)
    w = timing.random(k, n, dtype="float32", scale=k**-0.5)
    both = options | {"axes": (-1, 0)}
    yield Case("quantize_segments, both", "quantize_segments", f"{m}x{n}", (g,), both)
    one = options | {"axes": (-1,)}
    yield Case("quantize_segments", "quantize_segments", f"{m}x{k}", (x,), one)
    yield Case("quantize_squares", "quantize_squares", f"{k}x{n}", (w,), options)
    (x, x_t), (g, g_t) = (jax.jit(partial(reference.quantize_segments, **both))(a) for a in (x, g))
    w_t, w = jax.jit(partial(reference.quantize_squares, **options))(w)
    for name, arrays, out_dtype in (
        ("block_matmul", (x, w_t), "bfloat16"),
        ("block_matmul, input gradient", (g, w), "bfloat16"),
        ("block_matmul, weight gradient", (x_t, g_t), "float32"),
    ):
        options = {"out_dtype": out_dtype}
        yield Case(name, "block_matmul", f"{m}x{k}->{n}", arrays, options, {}, 2 * m * k * n)


def attention_cases(layer: LinearShape) -> Iterator[Case]:
    """Yields both passes of attention in towers and at other numbers of tokens; once for a block."""
    if layer.k != layer.n:
        return
    others = [((256, tokens, 12, 64), causal) for tokens, causal in shapes.TOKENS_OF_HEADS]
    heads = [*shapes.HEADS.values(), *others]
    for shape, causal in SMOKE_HEADS.values() if layer == SMOKE["out"] else heads:
        suffix, options = ", causal" * causal, {"causal": causal}
        case = partial(Case, shape="x".join(map(str, shape)), options=options)
        q, k, v, gradient = (timing.random(*shape) for _ in range(4))
        yield case(f"attention{suffix}", "attention", arrays=(q, k, v))
        out, lse = jax.jit(partial(reference.attention, **options))(q, k, v)
        arrays = q, k, v, out, lse, gradient
        yield case(f"attention_backward{suffix}", "attention_backward", arrays=arrays)


def row_quantizers(m: int, width: int) -> Iterator[Case]:
    x = timing.random(m, width)
    case = partial(Case, shape=f"{m}x{width}", arrays=(x,))
    for dtype in ("int8", "float8_e4m3fn"):
        yield case("quantize rows", "quantize", options={"axes": (-1,), "dtype": dtype})
    yield case("quantize_and_sum", "quantize_and_sum", options={"dtype": "int8"})


def producers(m: int, k: int, n: int) -> Iterator[Case]:
    x, gradient = timing.random(m, k), timing.random(m, k)
    gamma, beta = (timing.random(k, dtype="float32") for _ in range(2))
    case = partial(Case, shape=f"{m}x{k}")
    outputs = {", both out": True, "": False}
    for suffix, high_precision in outputs.items():
        options = {"epsilon": 1e-6, "quantize_to": "int8", "high_precision": high_precision}
        yield case(
            f"layer_norm + quantize{suffix}", "layer_norm", arrays=(x, gamma, beta), options=options
        )
    name, options = "layer_norm_backward", {"epsilon": 1e-6}
    yield case(name, name, arrays=(x, gamma, gradient), options=options)
    arrays = (x, gamma, gradient, None, beta)
    yield case(f"{name}, output again", name, arrays=arrays, options=options)

    x, gradient = timing.random(m, n), timing.random(m, n)
    case = partial(Case, shape=f"{m}x{n}")
    for suffix, high_precision in outputs.items():
        options = {"quantize_to": "int8", "high_precision": high_precision}
        yield case(f"gelu + quantize{suffix}", "gelu", arrays=(x,), options=options)
    for suffix, recompute in {"": False, ", output again": True}.items():
        options = {"quantize_to": "int8", "recompute": recompute}
        name = f"gelu_backward + quantize{suffix}"
        yield case(name, "gelu_backward", arrays=(x, gradient), options=options)


def language_cases(layer: LinearShape) -> Iterator[Case]:
    """Yields the producers of the blocks of every language model, as layers call them; once for a block."""
    if layer.k != layer.n:
        return
    models = {(layers[-1][1], layers[-1][0]) for layers in shapes.LANGUAGE_MODELS.values()}
    m, models = (
        (layer.tokens, {(64, 192)}) if layer == SMOKE["out"] else (shapes.LANGUAGE_TOKENS, models)
    )
    for width, hidden in sorted(models):
        x, residual, gradient = (timing.random(m, width) for _ in range(3))
        gamma = timing.random(width, dtype="float32")
        case = partial(Case, shape=f"{m}x{width}")
        options = {"epsilon": 1e-6, "quantize_to": "int8", "high_precision": False}
        yield case("rms_norm + quantize", "rms_norm", arrays=(x, gamma), options=options)
        options, arrays = {"epsilon": 1e-6, "recompute": True}, (x, gamma, gradient, residual)
        yield case("rms_norm_backward", "rms_norm_backward", arrays=arrays, options=options)

        gate, up, gradient = (timing.random(m, hidden) for _ in range(3))
        case = partial(Case, shape=f"{m}x{hidden}")
        options = {"quantize_to": "int8", "high_precision": False}
        yield case("gated + quantize", "gated", arrays=(gate, up), options=options)
        options, arrays = {"quantize_to": "int8", "recompute": True}, (gate, up, gradient)
        name = "gated_backward + quantize"
        yield case(name, "gated_backward", arrays=arrays, options=options)


def head_cases(layer: LinearShape) -> Iterator[Case]:
    """Yields the cross-entropy of a chunk of logits; once for a block."""
    if layer.k != layer.n:
        return
    shape = (64, 1000) if layer == SMOKE["out"] else (4096, shapes.VOCABULARY)
    logits, labels = timing.random(*shape), jnp.arange(shape[0]) % shape[1]
    arrays = logits, labels, jnp.ones(shape[:1], bool)
    yield Case("cross_entropy", "cross_entropy", "x".join(map(str, shape)), arrays, {})


CASES = {
    "products": product_cases,
    "weight_gradients": weight_gradient_cases,
    "groups": group_cases,
    "passes": pass_cases,
    "blocks": block_cases,
    "attention": attention_cases,
    "language_models": language_cases,
    "heads": head_cases,
}


def bench_operations(records: timing.Records, linears: list[LinearShape], kinds):
    """Times every case of the given kinds once."""
    copy_bandwidth(records, linears)
    seen = set()
    for kind in kinds:
        for linear in linears:
            for case in CASES[kind](linear):
                key = (case.name, case.shape, case.dtype)
                if records.seconds_left < 0:
                    return
                if key not in seen:
                    seen.add(key)
                    bench_case(records, case)


def bench_attention(records: timing.Records, heads: dict[str, tuple]):
    """Times attention, forward alone and with backward: cuDNN's on padded tokens, and ours."""
    for (shape, causal), (suffix, run) in itertools.product(heads.values(), ATTENTION.items()):
        row = {"op": f"attention{suffix}", "shape": "x".join(map(str, shape)), "dtype": "bfloat16"}
        peer = None
        names = ("cudnn", "fused") if jax.default_backend() == "gpu" else ("xla",)
        for name in names:
            if records.seconds_left < 0:
                return
            tokens = shape[1] + (-shape[1] % attention.CUDNN_MULTIPLE if name == "cudnn" else 0)
            arrays = [timing.random(shape[0], tokens, *shape[2:]) for _ in range(4)]
            options = {"is_causal": causal, "length": shape[1], "implementation": name}
            try:
                compiled = timing.compiled(partial(run, options), *arrays)
                us = timing.measure(compiled, *arrays).us
            except Exception as error:  # a failing case must not end the run
                message = f"{type(error).__name__}: {str(error)[:300]}"
                records.add(**row, implementation=name, error=message)
                continue
            verdict = {"ratio": peer / us, "peer": "cudnn"} if peer else {}
            records.add(**row, implementation=name, us=us, **verdict)
            peer = peer or us


def _attend(options, q, k, v, _):
    return attention.dot_product_attention(q, k, v, **options)


def _attend_and_back(options, q, k, v, gradient):
    out, vjp = jax.vjp(partial(attention.dot_product_attention, **options), q, k, v)
    return out, vjp(gradient)


ATTENTION = {"": _attend, ", forward + backward": _attend_and_back}


def copy_bandwidth(records: timing.Records, linears: list[LinearShape]):
    """Measures the memory bandwidth, the limit of operations without product: XLA negates an array."""
    for width in sorted({width for _, *widths in linears for width in widths}):
        x = timing.random(linears[0].tokens, width)
        time = timing.measure(timing.compiled(jnp.negative, x), x)
        row = {"op": "copy", "shape": f"{x.shape[0]}x{width}", "dtype": "bfloat16"}
        records.add(**row, implementation="xla", us=time.us, gbs=2 * x.nbytes / time.us / 1e3)


def bench_case(records: timing.Records, case: Case):
    """Times other libraries, then every implementation; a failure gives a row with its reason."""
    options = dict(case.options)
    specification = jax.jit(partial(getattr(reference, case.operation), **options))(*case.arrays)
    add = partial(bench_one, records, case, specification)
    for name, (function, arrays) in case.peers.items():
        add(name, function, arrays, peer=True)
    for name in ("xla", *reversed(dispatch.IMPLEMENTATIONS[case.operation])):
        reason = name != "xla" and dispatch.why_not(name, case.operation, *case.arrays, **options)
        if reason:
            row = {"op": case.name, "shape": case.shape, "dtype": case.dtype}
            records.add(**row, implementation=name, error=str(reason))
            continue
        run = partial(dispatch.run, case.operation, implementation=name, **options)
        add(name, run, case.arrays, peer=name == "xla")


def bench_one(records, case, specification, name, function, arrays, *, peer):
    row = {"op": case.name, "shape": case.shape, "dtype": case.dtype, "implementation": name}
    if peer and arrays is not case.arrays:
        row["dtype"] = arrays[0].dtype.name
    try:
        compiled = timing.compiled(function, *arrays)
        close = timing.closeness(out := compiled(*arrays), specification)
        moved = sum(leaf.nbytes for leaf in jax.tree.leaves((arrays, out)))
        del out
        time = timing.measure(compiled, *arrays)
    except Exception as error:  # a failing case must not end the run
        records.add(**row, error=f"{type(error).__name__}: {str(error)[:300]}")
        return
    row |= {"us": time.us, "clock": time.clock, "is_peer": peer, "gbs": moved / time.us / 1e3}
    if len(time.kernels) > 1:
        row["kernels_us"] = {name: round(us, 1) for name, us in time.kernels.items()}
    if case.arithmetic:
        row["tops"] = case.arithmetic / time.us / 1e6
    elif moved > CACHED:
        row["copy_share"] = row["gbs"] / max(r["gbs"] for r in records.rows if r["op"] == "copy")
    wrong = not peer and not close["snr_db"] >= LOWEST_DB  # NaN is wrong
    verdict = {"error": "wrong result"} if wrong else {} if peer else against_peers(records, row)
    records.add(**row, **close, **verdict)


def against_peers(records: timing.Records, row: dict) -> dict:
    """Compares with the fastest library; for a product, in any quantized dtype, if it applies the scales."""
    same = ("op", "shape") if row["op"] == "matmul" else ("op", "shape", "dtype")
    peers = [
        r
        for r in records.rows
        if r.get("is_peer")
        and r.get("us")
        and r.get("snr_db", 1) > 0
        and all(r[key] == row[key] for key in same)
    ]
    if not peers:
        return {}
    best = min(peers, key=lambda r: r["us"])
    return {"ratio": best["us"] / row["us"], "peer": f"{best['implementation']} {best['dtype']}"}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; without any of the three parts, all of them run."""
    parser = timing.parser(__doc__, seconds=540)
    text = "operations, in every implementation; all kinds, or some"
    parser.add_argument("--ops", nargs="*", choices=CASES, metavar="KIND", help=text)
    parser.add_argument("--attention", action="store_true", help="of every tower, and cuDNN's")
    text = "layers, forward and backward; all kinds, or some"
    parser.add_argument("--layer", nargs="*", choices=layers.KINDS, metavar="KIND", help=text)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="of the layers")
    parser.add_argument("--tokens", type=int, default=shapes.TOKENS, help="rows of operations")
    text = "of the transformer block whose operations are timed"
    parser.add_argument("--width", type=int, default=1280, help=text)
    args = parser.parse_args(argv)
    if args.ops is None and args.layer is None and not args.attention:
        args.ops, args.layer, args.attention = [], [], True
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    records = timing.Records(args.out, args.seconds)
    block = SMOKE if args.smoke else shapes.block(args.width, args.tokens)
    linears = sorted(block.values(), key=lambda linear: -linear.k * linear.n)
    if args.ops is not None:
        bench_operations(records, linears, args.ops or CASES)
    if args.attention:
        bench_attention(records, SMOKE_HEADS if args.smoke else shapes.HEADS)
    if records.rows:
        print("\n" + timing.table(records.rows, COLUMNS))
    if args.layer is not None:
        layers.run(records, args.layer or layers.KINDS, args.recipes, smoke=args.smoke)
    return 0


if __name__ == "__main__":
    sys.exit(main())
