"""Times language models on one GPU: blocks forward and backward, and whole training steps, in Flax and swjax.

    python -m benchmarks.language_models --out=benchmarks/results/language_models.json
    python -m benchmarks.language_models --kinds blocks --models llama-3-8b --arms flax switchback_hadamard
    python -m benchmarks.language_models --kinds step --models llama-3.2-1b --batch 16 --remat
    python -m benchmarks.language_models --kinds step --models llama-3.2-1b --mesh fsdp=1 fsdp=2  # two GPUs
    python -m benchmarks.language_models --kinds step --models llama-3-8b --mesh fsdp=4 --batch 2  # four GPUs
    python -m benchmarks.language_models --models tiny --out=tiny.json      # on any machine

"blocks": the gradients of all parameters and of the input. "step": embedding, blocks, head, cross-entropy in
chunks, and optax's AdamW or --optimizer, with donated buffers. The embedding, the head and routers are in
bf16 in every arm; parameters are in float32. Arms: "flax" is plain Flax NNX in bf16, with
`jax.lax.ragged_dot` for experts; a recipe alone is the same model converted by
`swjax.nnx.quantize_model(blocks, {".*": recipe})`; "+fused" are the operations of swjax called by hand;
"+8_bits" stores activations in int8; the others are Flax's fp8 products and Qwix. PyTorch has its own
program, language_models_torch.py, with the same shapes. With --mesh, devices share a whole step by FSDP: see
language_models_fsdp.py. The batch is that of each device, and `efficiency` is the time of one device in the
same run over the time of several.

Data are random and on the device. Times are wall-clock times over consecutive calls, the median of three.
Kernel times come from CUPTI, those of several devices from the profiler, a step. Memory is XLA's plan for a
device, and "saved_gib" that of the arrays that blocks save for the backward pass. Each row is written as soon
as it is measured, and none starts after --seconds. `ratio` is the speed-up over "flax" in the same run.
"""

import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks import language_models_fsdp as fsdp
from benchmarks.kernels import timing
from benchmarks.language_models_flax import (
    ARMS,
    DTYPE,
    Fp8State,
    LanguageModel,
)
from benchmarks.language_models_shapes import (
    B2,
    LEARNING_RATE,
    MEASURED,
    WEIGHT_DECAY,
    Shape,
    check_memory,
    parser,
    selected,
    with_kinds,
)
from benchmarks.scaling_case import exchanged
from benchmarks.scaling_profile import profile
from swjax.kernels import targets
from swjax.models import sharding
from swjax.optax import muon, stable_adamw
from swjax.training.log.timing import peak_flops

PROFILED = 3  # steps
OPTIMIZERS = {
    "adamw": optax.adamw,
    "stable_adamw": stable_adamw,
    "muon": partial(muon, dtype="float16"),
}
COLUMNS = {"kind": -6, "model": -12, "arm": -25, "devices": 7, "batch": 5, "ms": 8}
COLUMNS |= {"ms_of_kernels": 13, "tokens_per_second": 17, "tflops": 7, "temporaries_gib": 15}
COLUMNS |= {"ratio": 6, "efficiency": 10, "error": -1}


class Case(NamedTuple):
    """One program; `devices` share the batch of `shape`, and sum gradients in `reduce_dtype`."""

    kind: str
    model: str
    arm: str
    devices: int
    shape: Shape
    remat: bool
    reduce_dtype: str
    optimizer: str = "adamw"

    @property
    def row(self) -> dict:
        shape = self.shape
        row = {
            "kind": self.kind,
            "model": self.model,
            "arm": self.arm,
            "devices": self.devices,
            "layers": shape.layers,
            "remat": self.remat,
            "batch": shape.batch,
            "length": shape.length,
            "flops": shape.flops,
        }
        row |= {"reduce_dtype": self.reduce_dtype} if self.devices > 1 else {}
        return row | ({"optimizer": self.optimizer} if self.optimizer != "adamw" else {})


class Program(NamedTuple):
    """A compiled program; `start` makes its arrays and returns a function that runs it once."""

    compiled: jax.stages.Compiled
    start: Callable[[], Callable]
    seconds: float


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__, ARMS)
    flags.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="of whole steps")
    text = "programs that compile together, before the first is timed"
    flags.add_argument("--at_once", type=int, default=1, help=text)
    text = "file to wait for before the first program is timed; FILE.compiled tells that it waits"
    flags.add_argument("--turn", type=Path, metavar="FILE", help=text)
    args = with_kinds(flags, argv)
    shared = args.remat, args.reduce_dtype, args.optimizer
    cases = [Case(*chosen, *shared) for chosen in selected(args)]
    with ThreadPoolExecutor(args.at_once) as pool:
        at_once = args.at_once > 1 or args.turn
        programs = [pool.submit(prepare, case) for case in cases] if at_once else []
        wait(programs)
        if args.turn:
            timing.wait_for(args.turn)
        records = timing.Records(args.out, args.seconds)
        for number, case in enumerate(cases):
            if records.seconds_left < 0:
                break
            try:
                program = programs[number].result() if programs else prepare(case)
                records.add(**measure(records.rows, case, program))
            except Exception as error:  # a case that fails must not end the run
                records.add(**case.row, error=f"{type(error).__name__}: {str(error)[:300]}")
    print("\n" + timing.table(records.rows, COLUMNS))
    return 0


def prepare(case: Case) -> Program:
    """Compiles the program of a case."""
    if available := (jax.devices()[0].memory_stats() or {}).get("bytes_limit"):
        check_memory(case.shape, case.devices, available)
    began = time.perf_counter()
    compiled, start = {"blocks": blocks, "step": step}[case.kind](case)
    return Program(compiled, start, time.perf_counter() - began)


def measure(rows: list[dict], case: Case, program: Program) -> dict:
    """Returns a row: speed, memory, and the time of each kind of kernel."""
    compiled, run = program.compiled, program.start()
    at_least = 0.8 if case.model in MEASURED else 0
    times, shape = timing.repeated(run, at_least), case.shape
    seconds = times["ms"] / 1e3
    row = (
        case.row
        | times
        | {
            "tokens_per_second": shape.tokens / seconds,
            "tflops": shape.flops / case.devices / seconds / 1e12,
            **timing.memory_gib(compiled),
            "compile_seconds": round(program.seconds),
        }
    )
    if peak := peak_flops(jax.devices()[0]):
        row["mfu"] = shape.flops / case.devices / seconds / peak
    if case.kind == "blocks":
        row["saved_gib"] = saved_gib(case)
    same = ("kind", "model", "layers", "remat")
    for base in rows:
        if not base.get("ms") or any(base[k] != row[k] for k in same):
            continue
        alike = (base["devices"], base["batch"]) == (case.devices, shape.batch)
        if base["arm"] == "flax" and alike:
            row["ratio"] = base["ms"] / row["ms"]
            memory = [name for name in ("temporaries_gib", "saved_gib") if name in row]
            row |= {f"ratio_of_{name}": row[name] / base[name] for name in memory}
        if base["arm"] == case.arm and case.devices > 1 == base["devices"]:
            if base["batch"] * case.devices == shape.batch:
                row["efficiency"] = base["ms"] / row["ms"]
    if case.devices == 1:
        return row | kernel_times(run)
    row |= exchanged(compiled)
    return row | profile(lambda: jax.block_until_ready([run() for _ in range(PROFILED)]), PROFILED)


def saved_gib(case: Case) -> float:
    """Memory of the arrays that the blocks save for the backward pass, before XLA's optimizations.

    They are those of `jax.ad_checkpoint.print_saved_residuals` without the arguments, and without fp32
    arrays of the shapes of parameters: these are the parameters, which XLA does not copy.
    """
    graph, like = split(lambda: ARMS[case.arm](case.shape, case.remat))
    size = (case.shape.batch, case.shape.length, case.shape.width)
    forward = lambda params, x: nnx.merge(graph, params)(x, None)
    residuals = lambda *arrays: jax.tree.leaves(jax.vjp(forward, *arrays)[1])
    program = jax.make_jaxpr(residuals)(like, jax.ShapeDtypeStruct(size, DTYPE)).jaxpr
    results = (v for v in program.outvars if not isinstance(v, jax.extend.core.Literal))
    saved = {id(v): v.aval for v in results if v not in program.invars}
    parameters = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(like)}
    arrays = (a for a in saved.values() if (a.shape, a.dtype) not in parameters)
    return sum(aval.size * aval.dtype.itemsize for aval in arrays) / 2**30


def kernel_times(run: Callable) -> dict:
    if jax.default_backend() != "gpu":
        return {}
    found = timing.by_kernel(timing.launches(run))
    return {"ms_of_kernels": sum(found["kernels_ms"].values())} | found


# --- the programs: each is compiled, with the function `start` of a `Program` ----------------------------


def blocks(case: Case) -> tuple[jax.stages.Compiled, Callable[[], Callable]]:
    """Computes the gradients of all parameters of a stack of blocks, and of its input."""
    shape = case.shape
    graph, like = split(lambda: ARMS[case.arm](shape, case.remat))

    def loss(params, x, g):
        y = nnx.merge(graph, params)(x, None)
        return jnp.sum((y * g).astype(jnp.float32))

    size = (shape.batch, shape.length, shape.width)
    compiled = compile_(
        jax.grad(loss, argnums=(0, 1)), like, *(jax.ShapeDtypeStruct(size, DTYPE),) * 2
    )

    def start():
        arrays = (timing.random(*size, dtype=DTYPE) for _ in range(2))
        return partial(compiled, filled(like), *arrays)

    return compiled, start


def step(case: Case) -> tuple[jax.stages.Compiled, Callable[[], Callable]]:
    """Runs a whole training step; each call continues from the state of the one before."""
    shape, mesh = case.shape, fsdp.make_mesh(case.devices) if case.devices > 1 else None
    optimizer = OPTIMIZERS[case.optimizer](LEARNING_RATE, b2=B2, weight_decay=WEIGHT_DECAY)

    def model():
        blocks = ARMS[case.arm](shape, case.remat)
        if mesh is None:
            return LanguageModel(blocks, shape)
        return fsdp.ShardedLanguageModel(blocks, shape, case.reduce_dtype)

    def train(params, state, tokens):
        loss, gradients = jax.value_and_grad(lambda p: nnx.merge(graph, p)(tokens))(params)
        updates, state = optimizer.update(gradients, state, params)
        return overwritten(optax.apply_updates(params, updates), gradients), state, loss

    graph, params = split(model)
    size = (shape.batch, shape.length + 1)
    like = params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct(size, jnp.int32)
    # Without a mesh, layers run through XLA where several devices are visible, unless one is named.
    with jax.set_mesh(mesh) if mesh else targets.compiling_for(jax.devices()[0]):
        like = fsdp.placed(like, mesh) if mesh else like
        compiled = compile_(train, *like, mesh=mesh, donate_argnums=(0, 1))

    def start():
        tokens = jax.random.randint(jax.random.key(0), size, 0, shape.vocabulary)
        tokens = jax.device_put(tokens, like[2].sharding)
        zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        queue = [(filled(like[0]), jax.tree.map(zeros, like[1]))]

        def run():
            *state, loss = compiled(*queue.pop(), tokens)
            queue.append(state)
            return loss

        return run

    return compiled, start


def split(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns a model's graph, and the shapes of its parameters."""
    return nnx.split(nnx.eval_shape(make))


def filled(like: nnx.State) -> nnx.State:
    """Random matrices, and ones for vectors: it compiles faster than a model's own initial values.

    Each device makes its part of every array.
    """
    seeds = itertools.count()

    @cache
    def program(shape, dtype, sharding):
        draw = lambda seed: 0.02 * jax.random.normal(jax.random.key(seed), shape, dtype)
        return jax.jit(draw, out_shardings=sharding)

    def fill(leaf):
        if leaf.ndim == 1:
            return jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding)
        return program(leaf.shape, leaf.dtype, leaf.sharding)(next(seeds))

    return jax.tree.map(fill, like)


def overwritten(params: nnx.State, gradients: nnx.State) -> nnx.State:
    """The parameters, where the gradient of a state of Flax's fp8 products is its next value."""
    is_state = lambda leaf: isinstance(leaf, Fp8State)
    return jax.tree.map(lambda p, g: g if is_state(p) else p, params, gradients, is_leaf=is_state)


def compile_(function: Callable, *arrays, mesh=None, **options) -> jax.stages.Compiled:
    options |= {"compiler_options": sharding.compiler_options(mesh)}
    return jax.jit(function, **options).lower(*arrays).compile()


if __name__ == "__main__":
    sys.exit(main())
