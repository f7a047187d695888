"""Times training on one GPU in swjax and PyTorch: a vision tower forward and backward, and whole CLIP steps.

    python benchmarks/train_step.py --out=benchmarks/results/train_step.json    # the most important first
    python benchmarks/train_step.py --models vit_h14 --kinds encoder --recipes standard switchback
    python benchmarks/train_step.py --peers                   # timm and open_clip under torch.compile too
    python benchmarks/train_step.py --peers --modes default reduce-overhead   # in two modes of torch.compile
    python benchmarks/train_step.py --peers --torchao         # and timm's tower in torchao's int8 and float8
    python benchmarks/train_step.py --memory --kinds step --lora 0 16   # only compiles, on any machine
    python benchmarks/train_step.py --turn=FILE               # compiles, and times when FILE is there
    python benchmarks/train_step.py --smoke                   # tiny, on any machine

"encoder": gradients of all parameters of the image tower, no patch dropout, no optimizer. "step":
`swjax.training.step` as the trainer runs it: both towers, loss, StableAdamW, patch dropout 0.5. Both have the
trainer's compiler options. Data are random and on the device. Times are wall-clock times over consecutive
calls, the median of three; kernel times come from CUPTI; memory is XLA's plan. Each case is written as soon
as it is measured, and none starts after --seconds.
"""

import itertools
import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels import timing  # noqa: E402
from configs import common  # noqa: E402
from swjax.models import clip, sharding  # noqa: E402
from swjax.models.vit import VisionTransformer  # noqa: E402
from swjax.training import setup  # noqa: E402
from swjax.training.log.timing import peak_flops  # noqa: E402
from swjax.training.optimizer import make_optimizer  # noqa: E402
from swjax.training.step import make_train_step  # noqa: E402

KINDS = ("encoder", "step")
MODELS = ("vit_h14", "vit_l14", "vit_b16", "vit_b32")
RECIPES = ("standard", "switchback", "fp8_switchback")  # switchback_m is switchback in these models
REMATS = ("none", "full")
DEFAULT_OPTIMIZER = "stable_adamw"
# {name: keys of config.optimizer}
OPTIMIZERS = {name: {"name": name} for name in (DEFAULT_OPTIMIZER, "adamw", "muon")}
MODES = ("default", "reduce-overhead", "max-autotune")  # of torch.compile
BATCHES = {"encoder": dict.fromkeys(MODELS, 128), "step": dict.fromkeys(MODELS, 256)}
BATCHES["step"]["vit_b32"] = BATCHES["encoder"]["vit_b32"] = 1024
COLUMNS = {"kind": -8, "model": -8, "implementation": -22, "remat": -5, "batch": 6, "ms": 8}
COLUMNS |= {"images_per_second": 17, "ratio": 6, "mfu": 6, "memory_gib": 10, "busy": 6, "error": -1}


class Case(NamedTuple):
    kind: str
    model: str
    recipe: str
    remat: str
    batch: int
    optimizer: str = DEFAULT_OPTIMIZER  # of steps
    lora: int = 0  # rank, of steps

    @property
    def row(self) -> dict:
        is_default = self.kind == "encoder" or self.optimizer == DEFAULT_OPTIMIZER
        other = "" if is_default else f", {self.optimizer}"
        other += f", LoRA {self.lora}" * (self.lora > 0)
        return {
            "kind": self.kind,
            "implementation": f"swjax {self.recipe}{other}",
            "model": self.model,
            "remat": self.remat,
            "batch": self.batch,
        }


class Program(NamedTuple):
    """A program to time: its compilation, a getter of a function that runs it once, and its FLOPs."""

    compiled: jax.stages.Compiled
    start: Callable[[], Callable]
    flops: float


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    records, todo = timing.Records(args.out, args.seconds), list(cases(args))
    if args.turn:
        todo = [case for case in todo if records.seconds_left > 0 and compile_program(case)]
        timing.wait_for(args.turn)
    if args.peers:
        bench_peers(records, args)
    for case in todo:
        if records.seconds_left < 0 and not args.turn:
            break
        try:
            program = compile_program(case)
            if args.memory:
                records.add(**case.row, **memory_of(program.compiled))
                continue
            bench(records, case, program, args.smoke)
        except Exception as error:  # a case that does not fit into memory must not end the run
            records.add(**case.row, error=f"{type(error).__name__}: {str(error)[:300]}")
    print("\n" + timing.table(records.rows, COLUMNS))
    return 0


def parse(argv):
    parser = timing.parser(__doc__, seconds=540)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--remats", nargs="+", default=REMATS)
    parser.add_argument("--batch", type=int, help="in place of each model's")
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=[DEFAULT_OPTIMIZER], help="of steps"
    )
    parser.add_argument("--lora", type=int, nargs="+", default=[0], help="ranks, of steps; 0: off")
    parser.add_argument("--memory", action="store_true", help="only XLA's plan: times nothing")
    parser.add_argument("--peers", action="store_true", help="timm and open_clip first")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:1], help="of --peers")
    parser.add_argument("--torchao", action="store_true", help="with --peers, timm by torchao too")
    parser.add_argument(
        "--turn",
        type=Path,
        metavar="FILE",
        help="to compile first, and time when there is this file: so several may compile at once",
    )
    return parser.parse_args(argv)


def cases(args):
    """Yields every combination, kind by kind; each model without and with recomputation."""
    if args.smoke:
        for kind in args.kinds:
            yield Case(kind, "tiny", "switchback", "none", 4, args.optimizers[0])
        return
    for model in args.models:
        for kind in args.kinds:
            for remat in args.remats:
                for recipe in args.recipes:
                    batch = args.batch or BATCHES[kind][model]
                    case = Case(kind, model, recipe, remat, batch)
                    if kind == "encoder":
                        yield case
                        continue
                    for optimizer, rank in itertools.product(args.optimizers, args.lora):
                        yield case._replace(optimizer=optimizer, lora=rank)


def bench(records: timing.Records, case: Case, program: Program, smoke: bool):
    """Returns a row: speed, memory, and the time of each kind of kernel."""
    compiled = program.compiled
    run = program.start()
    row = case.row | memory_of(compiled) | timing.repeated(run, 0.1 if smoke else 1.5)
    seconds = row["ms"] / 1e3
    row |= {"images_per_second": case.batch / seconds, "tflops": program.flops / seconds / 1e12}
    if peak := peak_flops(jax.devices()[0]):
        row["mfu"] = program.flops / seconds / peak
    if jax.default_backend() == "gpu":
        row |= timing.by_kernel(timing.launches(run))
        row["busy"] = sum(row["kernels_ms"].values()) / row["ms"]
    records.add(**row, **against(records.rows, row))


def memory_of(compiled: jax.stages.Compiled) -> dict[str, float]:
    memory = timing.memory_gib(compiled)
    return {"memory_gib": memory["memory_gib"], "activations_gib": memory["temporaries_gib"]}


def same(row: dict) -> tuple:
    """Returns the fields in which comparable rows must agree."""
    return tuple(row[key] for key in ("model", "kind", "remat", "batch"))


def against(rows: list[dict], row: dict) -> dict:
    """Returns the speed-ups over swjax's bf16 and over PyTorch."""
    others = [r for r in rows if r.get("ms") and same(r) == same(row)]
    _, comma, optimizer = row["implementation"].partition(",")
    own = [r for r in others if r["implementation"] == f"swjax standard{comma}{optimizer}"]
    torch = [r for r in others if not r["implementation"].startswith("swjax")]
    ratios = {"ratio": own, "ratio_to_torch": torch}
    return {k: min(r["ms"] for r in rs) / row["ms"] for k, rs in ratios.items() if rs}


# --- the programs -------------------------------------------------------------------------------------


@cache
def compile_program(case: Case) -> Program:
    """A case may be named twice, to see how the GPU's clock drifts."""
    return {"encoder": encoder, "step": step}[case.kind](case)


def encoder(case: Case) -> Program:
    """Computes the gradients of all parameters of the image tower."""
    dtype = "float32" if case.model == "tiny" else "bfloat16"
    cfg = clip.config(case.model, recipe=case.recipe, remat=case.remat, dtype=dtype)

    @jax.jit
    def init():
        tower = VisionTransformer(cfg, rngs=nnx.Rngs(0))
        return nnx.to_pure_dict(nnx.state(tower, nnx.Param))

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: VisionTransformer(cfg, rngs=nnx.Rngs(0))))

    def loss(params, images, g):
        return jnp.sum(nnx.merge(graphdef, params)(images)[0] * g)

    side = cfg.vision.image_size
    images = timing.random(case.batch, side, side, 3, dtype=dtype)
    g = timing.random(case.batch, cfg.embed_dim, dtype="float32")
    options = sharding.compiler_options(sharding.make_mesh())
    gradient = jax.jit(jax.grad(loss), compiler_options=options)
    compiled = gradient.lower(jax.eval_shape(init), images, g).compile()
    text = clip._blocks_flops(cfg.text, cfg.text.context_length)
    flops = clip.flops_per_example(cfg, training=False) - text
    return Program(compiled, lambda: partial(compiled, init(), images, g), 3 * flops * case.batch)


def step(case: Case) -> Program:
    """Runs a whole training step; each call continues from the state of the one before."""
    config = common.get_config() if case.model == "tiny" else common.paper(case.model, case.recipe)
    config.model.recipe, config.model.remat = case.recipe, case.remat
    config.optimizer.update(OPTIMIZERS[case.optimizer])
    config.optimizer.lora.rank = case.lora
    config.train.batch_size = case.batch
    config.data.augment.drawings = False
    # XLA for CPUs merges recomputation with the forward pass, which keeps its arrays, except across a scan.
    config.model.scan_layers = jax.default_backend() == "cpu"
    cfg = setup.model_config(config)
    schedule = lambda count: jnp.float32(1e-4)
    optimizer = make_optimizer(config, schedule)
    init, graphdef = setup.make_init(config, cfg, optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), sharding.make_mesh())
    init = setup.compile_init(init, like)
    train_step = make_train_step(config, graphdef, optimizer, schedule)
    side, length = cfg.vision.image_size, cfg.text.context_length
    keys = jax.random.split(jax.random.key(0), 2)
    batch = {
        "image": jax.random.randint(keys[0], (case.batch, side, side, 3), 0, 256, jnp.uint8),
        "text": jax.random.randint(keys[1], (case.batch, length), 0, 1000, jnp.int32),
        "label": jnp.arange(case.batch, dtype=jnp.int32),
    }
    compiled = setup.compile_step(train_step, like).lower(like, batch).compile()

    def start():
        states = [init()]

        def run():
            new, metrics = compiled(states.pop(), batch)
            states.append(new)
            return metrics

        return run

    passes = 2 if case.lora else 3  # frozen kernels have no gradients
    return Program(compiled, start, passes * clip.flops_per_example(cfg) * case.batch)


def bench_peers(records: timing.Records, args):
    """Returns PyTorch's rows from another process, which frees its GPU memory when it ends."""
    # -E: ignores PYTHONPATH, which may have a Triton that PyTorch cannot use.
    command = [sys.executable, "-E", str(Path(__file__).with_name("train_step_torch.py"))]
    ours = ("recipe", "optimizer", "lora")
    theirs = [{k: v for k, v in case._asdict().items() if k not in ours} for case in cases(args)]
    asked = {"torchao": args.torchao, "modes": args.modes}
    theirs = [case | asked for case in theirs if case["remat"] in REMATS]
    command += dict.fromkeys(map(json.dumps, theirs))
    timing.add_rows(records, command, seconds=max(records.seconds_left / 2, 60))


if __name__ == "__main__":
    sys.exit(main())
