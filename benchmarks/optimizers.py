"""Times an update of the matrices of a model's blocks by Muon, in several forms, and by StableAdamW.

    python benchmarks/optimizers.py --out=benchmarks/results/optimizers_update.json
    python benchmarks/optimizers.py --symmetric       # kernels of the symmetric product, and XLA's product
    python benchmarks/optimizers.py --smoke           # tiny, on any machine

An update reads gradients and parameters in float32, and writes parameters and state in place. Gradients are
random. Times are wall-clock times over consecutive calls, the median of three; kernel times are CUPTI's.
"each step on X" is the iteration of Jordan et al. with all five Gram matrices, as swjax had it before.
`torch.optim.Muon` is not timed: it has neither stacks nor a fused update.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from optax import contrib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels import timing  # noqa: E402
from benchmarks.studies.minimax_polynomials import NONIC, cost  # noqa: E402
from swjax.kernels import dispatch, reference  # noqa: E402
from swjax.optax import eight_bit_moments, muon, newton_schulz, orthogonal, stable_adamw  # noqa: E402

COLUMNS = {"model": -14, "optimizer": -34, "ms": 8, "tflops": 7, "products_ms": 11, "error": -1}


def blocks(layers: int, width: int, hidden: int) -> list[tuple[int, ...]]:
    """The stacks of a tower: query, key, value and out, and the two matrices of the MLP."""
    square = (layers, width, width)
    return [square] * 4 + [(layers, width, hidden), (layers, hidden, width)]


# {model: shapes of its stacks}; Llama's keys and values are narrower, and its MLP has a gate.
MODELS = {
    "ViT-H/14": blocks(32, 1280, 5120) + blocks(24, 1024, 4096),
    "ViT-B/16": blocks(12, 768, 3072) + blocks(12, 512, 2048),
    "Llama-3.2-1B": [(16, 2048, 2048)] * 2
    + [(16, 2048, 512)] * 2
    + [(16, 2048, 8192)] * 2
    + [(16, 8192, 2048)],
}
SMOKE = {"tiny": blocks(2, 64, 256)}


def each_step_on_x(tree, coefficients, dtype=jnp.float32, *, steps=5, implementation=None):
    """`orthogonalize` with the iteration of Jordan et al., in place of `newton_schulz`."""
    del implementation

    def run(x):
        x = x / jnp.max(jnp.abs(x), (-2, -1), keepdims=True)
        x = (x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)).astype(dtype)
        product = partial(jnp.matmul, preferred_element_type=jnp.float32)
        has_fewer_rows = x.shape[-2] <= x.shape[-1]
        a, b, c = coefficients
        for _ in range(steps):
            gram = product(x, x.mT) if has_fewer_rows else product(x.mT, x)
            operand = gram.astype(dtype)
            factor = (b * gram + c * product(operand, operand)).astype(dtype)
            added = product(factor, x) if has_fewer_rows else product(x, factor)
            x = (a * x.astype(jnp.float32) + added).astype(dtype)
        return x.astype(jnp.float32)

    return jax.tree.map(run, tree)


def every(params):
    return jax.tree.map(lambda _: True, params)


def of_optax(params):
    numbers = contrib.MuonDimensionNumbers(1, 2)
    return contrib.muon(
        1e-4,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=jax.tree.map(lambda _: numbers, params),
    )


class Case(NamedTuple):
    """An optimizer to time.

    Attributes:
      make: the optimizer of parameters.
      implementation: of symmetric products; None chooses.
      iteration: replaces `orthogonalize`.
      degrees: of the steps' polynomials; () for optimizers without.
      on_x: whether each step has a Gram matrix and computes whole products.
    """

    make: Callable
    implementation: str | None = None
    iteration: Callable | None = None
    degrees: tuple[int, ...] = (5,) * 5
    on_x: bool = False


def of_swjax(**settings):
    usual = {"dtype": "float16", "coefficients": "quintic"}
    return lambda params: muon(1e-4, every, **usual | settings)


OPTIMIZERS = {
    "StableAdamW": Case(lambda params: stable_adamw(1e-4), degrees=()),
    "StableAdamW, 8-bit moments": Case(
        lambda params: eight_bit_moments(stable_adamw(1e-4)), degrees=()
    ),
    "Muon, each step on X, bf16": Case(
        of_swjax(dtype="bfloat16"), "xla", each_step_on_x, on_x=True
    ),
    "Muon, XLA, float16": Case(of_swjax(), "xla"),
    "Muon, Triton, float16": Case(of_swjax(), "triton"),
    "Muon, Mosaic, float16": Case(of_swjax(), "mosaic_gpu"),
    "Muon, Mosaic, bf16": Case(of_swjax(dtype="bfloat16"), "mosaic_gpu"),
    "Muon, Mosaic, nonic": Case(of_swjax(coefficients="nonic"), "mosaic_gpu", degrees=NONIC),
    "Muon, chosen, Polar Express": Case(of_swjax(coefficients="polar_express")),
    "optax.contrib.muon": Case(of_optax, on_x=True),
}


def operations(shapes, case: Case) -> float:
    """Multiplications and additions: of `newton_schulz` in float16, triangles of symmetric products.

    >>> round(operations(MODELS["ViT-H/14"], Case(of_optax, on_x=True)) / 1e12, 1)
    27.9
    """
    total = 0
    for layers, *sides in shapes:
        m, n = sorted(sides)
        if case.on_x:
            total += layers * 5 * (4 * m * m * n + 2 * m**3)
            continue
        segments = (1,) * len(case.degrees)
        if case.degrees and n >= newton_schulz._LONG * m:
            segments = newton_schulz._SEGMENTS["float16", (case.degrees[0] + 1) // 2]
        total += layers * m**3 * cost(case.degrees, segments, n // m)
    return total


def main(argv: list[str] | None = None) -> int:
    parser = timing.parser(__doc__, seconds=240)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--symmetric", action="store_true", help="kernels of symmetric products")
    args = parser.parse_args(argv)
    records = timing.Records(args.out, args.seconds)
    if args.symmetric:
        bench_symmetric(records, args.smoke)
        return 0
    models = SMOKE if args.smoke else {name: MODELS[name] for name in args.models}
    for (model, shapes), name in itertools.product(models.items(), args.optimizers):
        row = {"model": model, "optimizer": name}
        if records.seconds_left < 0:
            break
        if (
            OPTIMIZERS[name].implementation in ("triton", "mosaic_gpu")
            and jax.default_backend() != "gpu"
        ):
            continue
        try:
            records.add(**row, **bench(shapes, OPTIMIZERS[name], args.smoke))
        except Exception as error:  # one that fails must not end the run
            records.add(**row, error=f"{type(error).__name__}: {str(error)[:300]}")
    print("\n" + timing.table(records.rows, COLUMNS))
    return 0


def bench(shapes, case: Case, smoke: bool) -> dict:
    """Returns the times of one update."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    normal = jax.jit(lambda keys: [jax.random.normal(k, s) for k, s in zip(keys, shapes)])
    params, grads = normal(keys), normal(keys[::-1])
    optimizer = case.make(params)
    of_matrices = partial(orthogonal.orthogonalize, implementation=case.implementation)

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with (
        mock.patch.object(
            orthogonal,
            "orthogonalize",
            case.iteration or (lambda *args, **kw: of_matrices(*args, steps=kw["steps"])),
        ),
        jax.numpy_dtype_promotion("standard"),
    ):
        states = [(params, optimizer.init(params))]
        compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*states[0], grads).compile()

    def run():
        states.append(compiled(*states.pop(), grads))
        return states[0]

    row = timing.repeated(run, at_least=0.05 if smoke else 0.3) | {
        "operations": operations(shapes, case),
        "temporary_gib": compiled.memory_analysis().temp_size_in_bytes / 2**30,
    }
    if jax.default_backend() == "gpu":
        launches = timing.launches(run)
        row |= timing.by_kernel(launches)
        products = [ms for name, ms in launches if is_product(name)]
        row["products_ms"] = sum(products)
        row["tflops"] = row["operations"] / max(sum(products), 1e-9) / 1e9
    return row


def is_product(kernel: str) -> bool:
    return any(part in kernel.lower() for part in ("gemm", "nvjet", "cutlass", "symmetric"))


# [batch, m, k], by columns or not: Gram matrices of a model's blocks, and, where m = k, polynomials of them.
SYMMETRIC_CASES = [
    ((32, 1280, 1280), -1),
    ((32, 1280, 5120), -1),
    ((32, 1280, 5120), -2),
    ((24, 1024, 1024), -1),
    ((12, 768, 768), -1),
    ((16, 2048, 8192), -1),
    ((16, 512, 2048), -1),
]
KERNELS = ["xla", "mosaic_gpu", "triton"]


def bench_symmetric(records: timing.Records, smoke: bool):
    """Adds the times of symmetric products: XLA's whole product, and kernels."""
    for ((batch, m, k), contract), name in itertools.product(SYMMETRIC_CASES, KERNELS):
        if smoke:
            batch, m, k = 2, 64, 128
        if records.seconds_left < 0:
            break
        if name != "xla" and jax.default_backend() != "gpu":
            continue
        x = timing.random(batch, *((m, k) if contract == -1 else (k, m)), dtype="float16")
        terms = (x if m == k else None), jnp.ones((batch, 3))
        row = {"shape": f"{batch}x{m}x{k}", "contract": contract, "kernel": name}
        try:
            options = {"contract": contract}
            if name == "xla":
                rows = "kij,klj->kil" if contract == -1 else "kji,kjl->kil"
                run = jax.jit(partial(jnp.einsum, rows, preferred_element_type=x.dtype))
                time = timing.measure(run, x, x)
            else:
                kernel = partial(dispatch.kernel(name, "symmetric_product"), **options)
                run = jax.jit(lambda x, *terms, kernel=kernel: kernel(x, x, *terms))
                time = timing.measure(run, x, *terms)
                specified = partial(reference.symmetric_product, contract=contract)
                got = run(x, *terms)
                row["snr_db"] = timing.closeness(got, jax.jit(specified)(x, x, *terms))["snr_db"]
                row["is_symmetric"] = bool(jnp.array_equal(got, got.mT))
            row |= {"us": time.us, "tflops_of_whole": 2 * batch * m * m * k / time.us / 1e6}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        records.add(**row)


if __name__ == "__main__":
    sys.exit(main())
