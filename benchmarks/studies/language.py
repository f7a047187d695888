"""Does int8 cost a language model accuracy? Paired runs of the Llama of examples/language_model on bytes.

Command, on two GPUs:

  export XLA_FLAGS=--xla_gpu_enable_triton_gemm=false JAX_COMPILATION_CACHE_DIR=runs/language/compiled
  for gpu in 0 1; do CUDA_VISIBLE_DEVICES=$gpu python benchmarks/studies/language.py main \\
    --seeds $(seq 0 7) --claims=runs/language/claims --out=runs/language/main-$gpu.json & done; wait
  python benchmarks/studies/language.py main --merge runs/language/main-*.json \\
    --out=benchmarks/results/language.json --report=benchmarks/results/language_report.json

Runs with one seed start from the same parameters and see the same batches. The corpus is the Python sources
and documentation of the machine (python_text.py), on the device. The studies:

  main     from scratch. Arms are recipes of the blocks; "control" is bf16 with one matrix times 1 + 1e-6
  planted  fine-tuning from a model trained in bf16, with --gains on six channels of every RMSNorm or of every
           product of SwiGLU, and the next matrices divided: the same function, with outlier features
  rates    three optimizers over --rates, in bf16 and in int8

benchmarks/notes/language.md has the hypotheses and rules, written before the runs.
"""

import argparse
import contextlib
import email
import fcntl
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paired
import python_text
import study
from scipy import stats

MARGIN = 0.003  # nats a byte: differences below count as equivalent
BASES = ("bf16", paired.CONTROL)
ARMS = (
    *BASES,
    "switchback",
    "switchback_hadamard",
    "int8_hadamard",
    "llm_int8",
    "fp8_switchback",
    "fp8_tensorwise",
)
OPTIMIZERS = ("adamw", "stable_adamw", "muon", "muon_nonic")
RATES = (3e-4, 8e-4, 2e-3, 5e-3, 1.2e-2)
GAINS = (1.0, 30.0)
PLACES = (
    "norm",
    "hidden",
)  # of planted outliers: after every RMSNorm, or in the products of SwiGLU
DOWN = r"blocks/\d+/mlp/down"  # the layers that read the products of SwiGLU
SMOOTH = {"smooth": 1.0, "half_smooth": 0.5}  # powers, see `smoothed`
REMEDIES = ("down_16", *SMOOTH)  # for outliers in them
TESTS = ("different", "equivalent", "not_worse")
CHANNELS = 6  # with planted outliers
LOSS_SCALE = 2.0**18  # of recipes with static scales: e5m2 needs a larger g
CHUNK = 100  # steps per call of the compiled program
LOOK = 500  # steps between statistics of the activations


class Settings(NamedTuple):
    """What is the same in all runs of a process.

    Attributes:
      shape: width, hidden, heads, kv_heads, layers.
      batch: sequences a step, and bytes a sequence.
      dtype: of activations and of products that are not quantized.
      windows: validation sequences.
    """

    shape: tuple[int, int, int, int, int]
    batch: tuple[int, int]
    dtype: str
    windows: int


class Hyper(NamedTuple):
    """Arguments of the compiled programs: runs that differ in them share a program."""

    seed: int
    rate: float
    steps: int


# --- runs ---------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    if not args.merge:
        python_text.load(args.corpus, args.bytes, args.roots)
    result = study.carry_out(args, runs(args), table)
    if args.report:
        study.write(args.report, {"margin": MARGIN, "arms": summary(result["runs"])})
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = study.parser(__doc__)
    paired.states_flag(flags)
    flags.add_argument("study", choices=STUDIES)
    flags.add_argument(
        "--turn",
        type=Path,
        metavar="FILE",
        help="processes with the same file train one at a time, and wait while FILE.pause exists",
    )
    flags.add_argument(
        "--arms",
        nargs="+",
        type=arm,
        default=ARMS,
        help=f"{', '.join(BASES)} or a recipe; after a + {' or '.join(REMEDIES)}",
    )
    flags.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    flags.add_argument("--steps", type=int, default=1500, help="before any fine-tuning")
    flags.add_argument("--tune", type=int, default=500, help="planted: steps; 0: no training")
    flags.add_argument("--rate", type=float, default=8e-4, help="learning rate: main and planted")
    flags.add_argument("--rates", nargs="+", type=float, default=RATES, help="of the study rates")
    flags.add_argument("--gains", nargs="+", type=float, default=GAINS, help="of the study planted")
    flags.add_argument("--places", nargs="+", default=PLACES, choices=PLACES, help="the same")
    flags.add_argument("--optimizers", nargs="+", default=OPTIMIZERS[:3], choices=OPTIMIZERS)
    flags.add_argument(
        "--shape",
        nargs=5,
        type=int,
        default=[768, 2048, 12, 12, 8],
        help="width, hidden, heads, kv_heads, layers; the default has 57 M parameters",
    )
    flags.add_argument("--batch", nargs=2, type=int, default=[32, 1024], help="and the length")
    flags.add_argument("--windows", type=int, default=1280, help="validation sequences")
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--corpus", type=Path, default=study.ROOT / ".cache" / "python_text")
    flags.add_argument(
        "--bytes", type=float, default=4e8, help="of the corpus, when it is prepared"
    )
    flags.add_argument("--report", type=Path, help="JSON file for the differences of the arms")
    args = flags.parse_args(argv)
    args.roots = None
    if args.smoke:
        args.roots = [Path(email.__file__).parent]
        args.corpus = args.corpus / "smoke"
        args.shape, args.batch, args.windows = [16, 32, 2, 1, 1], [2, 16], 4
        args.steps, args.tune, args.seeds, args.dtype = 4, 2, [0, 1], "float32"
        args.arms, args.rates, args.gains = ARMS[:3], RATES[:2], GAINS
        args.optimizers = OPTIMIZERS
    return args


def arm(name: str) -> str:
    """Checks the name of an arm.

    >>> arm("switchback+smooth")
    'switchback+smooth'
    """
    from swjax.recipes import RECIPES

    recipe, plus, remedy = name.partition("+")
    if recipe not in (*BASES, *RECIPES) or (plus and remedy not in REMEDIES):
        raise argparse.ArgumentTypeError(
            f"an arm is one of {', '.join((*BASES, *RECIPES))}, or a recipe with + and one of "
            f"{', '.join(REMEDIES)}, got {name!r}"
        )
    return name


def runs(args: argparse.Namespace) -> Iterable[study.Run]:
    """All arms of a seed precede the next seed, so that an interrupted study has whole pairs.

    Odd seeds list the second half of the arms first: two processes compile different programs at first.
    """
    settings = Settings(tuple(args.shape), tuple(args.batch), args.dtype, args.windows)
    shape, batch = ("x".join(map(str, sizes)) for sizes in settings[:2])
    same = {"shape": shape, "batch": batch, "dtype": args.dtype, "steps": args.steps}
    measure = tune if args.study == "planted" else train
    for seed in args.seeds:
        half = len(args.arms) // 2 * (seed % 2)
        arms = [*args.arms[half:], *args.arms[:half]]
        for own in STUDIES[args.study](args, arms):
            key = {"study": args.study, **own, "seed": seed, **same}
            yield (
                key,
                lambda key=key: measure(Lab.of(settings, args.corpus, args.states, args.turn), key),
            )


def main_runs(args: argparse.Namespace, arms: list[str]) -> Iterable[dict]:
    for arm in arms:
        yield {"arm": arm, "optimizer": "adamw", "rate": args.rate}


def planted_runs(args: argparse.Namespace, arms: list[str]) -> Iterable[dict]:
    planted = [(gain, place) for gain in args.gains if gain != 1 for place in args.places]
    for (gain, place), arm in itertools.product(
        [(1.0, "none")] * (1 in args.gains) + planted, arms
    ):
        yield {"arm": arm, "gain": gain, "place": place, "rate": args.rate, "tune": args.tune}


def rates_runs(args: argparse.Namespace, arms: list[str]) -> Iterable[dict]:
    some = [arm for arm in arms if arm in ("bf16", "switchback")]
    for optimizer, rate, arm in itertools.product(args.optimizers, args.rates, some):
        yield {"arm": arm, "optimizer": optimizer, "rate": rate}


STUDIES = {"main": main_runs, "planted": planted_runs, "rates": rates_runs}


def train(lab: "Lab", key: dict) -> dict:
    """A run from scratch."""
    program = lab.program(key["arm"], key["optimizer"])
    hyper = Hyper(key["seed"], key["rate"], key["steps"])
    params, measured = program.train(lab.start(key["seed"], key["arm"]), hyper)
    return program.validate(params) | measured


def tune(lab: "Lab", key: dict) -> dict:
    """Fine-tuning at a quarter of the rate, on batches of another seed, from a model with outliers."""
    import jax

    program = lab.program(key["arm"], "adamw")
    trained = lab.trained(Hyper(key["seed"], key["rate"], key["steps"]))
    params = planted(jax.tree.map(jax.numpy.asarray, trained), key["gain"], key["place"])
    params = lab.nudged(params, key["arm"])
    at_once = program.validate(params)["val"]
    hyper = Hyper(1000 + key["seed"], key["rate"] / 4, key["tune"])
    params, measured = program.train(params, hyper)
    return {"at_once": at_once} | program.validate(params) | measured


def planted(params: dict, gain: float, place: str) -> dict:
    """Multiplies six channels by `gain`, and divides the rows of the matrices that read them.

    The channels are those of each RMSNorm, or the products of each SwiGLU by way of `up`, which is linear.
    """
    mlp = params["blocks"][0]["mlp"]
    channels = np.random.default_rng(0).choice(
        mlp["up" if place == "norm" else "down"]["kernel"].shape[0], CHANNELS, replace=False
    )
    for block in params["blocks"].values():
        if place == "hidden":
            up, down = block["mlp"]["up"], block["mlp"]["down"]
            up["kernel"] = up["kernel"].at[:, channels].multiply(gain)
            down["kernel"] = down["kernel"].at[channels].divide(gain)
            continue
        for name, readers in (("attention", "qkv"), ("mlp", ("gate", "up"))):
            scale = block[f"{name}_norm"]["scale"]
            block[f"{name}_norm"]["scale"] = scale.at[channels].multiply(gain)
            for reader in readers:
                kernel = block[name][reader]["kernel"]
                block[name][reader]["kernel"] = kernel.at[channels].divide(gain)
    return params


# --- training -----------------------------------------------------------------------------------------


class Lab:
    """The corpus on the device, and the compiled programs, each compiled once."""

    @staticmethod
    @functools.cache
    def of(settings: Settings, corpus: Path, states: Path | None, turn: Path | None) -> "Lab":
        return Lab(settings, python_text.load(corpus), states, turn)

    def __init__(
        self,
        settings: Settings,
        corpus: python_text.Corpus,
        states: Path | None = None,
        turn: Path | None = None,
    ) -> None:
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from examples.language_model.model import Config, Llama

        self.settings, self.states, self.turn = settings, states, turn
        self.data, self.val = jnp.asarray(corpus.train), jnp.asarray(corpus.val)
        self.checksums = {name: corpus.manifest[name]["sha256"][:12] for name in ("train", "val")}
        config = Config(*settings.shape, dtype=settings.dtype)
        self.new_model = lambda key: Llama(config, rngs=nnx.Rngs(key))
        self.init = jax.jit(
            lambda seed: nnx.to_pure_dict(nnx.state(self.new_model(jax.random.key(seed))))
        )
        self.compiled = functools.cache(functools.partial(Program, self))
        self.trained = functools.lru_cache(1)(self._trained)

    def program(self, arm: str, optimizer: str) -> "Program":
        return self.compiled("standard" if arm in BASES else arm, optimizer)

    def start(self, seed: int, arm: str) -> dict:
        """The first parameters of an arm."""
        return self.nudged(self.init(seed), arm)

    @staticmethod
    def nudged(params: dict, arm: str) -> dict:
        """The parameters; in the control, one matrix differs by rounding."""
        if arm == paired.CONTROL:
            layer = params["blocks"][0]["attention"]["q"]
            layer["kernel"] = layer["kernel"] * np.float32(1 + 1e-6)
        return params

    def _trained(self, hyper: Hyper) -> dict:
        """The parameters of a run in bf16, on the host; see --states."""
        import jax

        def compute():
            params, _ = self.program("bf16", "adamw").train(self.start(hyper.seed, "bf16"), hyper)
            return jax.device_get(params)

        path = paired.state_file(
            self.states, {**hyper._asdict(), **self.settings._asdict(), **self.checksums}
        )
        if path is None:
            return compute()
        return paired.stored(path, jax.eval_shape(self.init, hyper.seed), compute)


class Program:
    """Training and validation of one recipe and optimizer."""

    def __init__(self, lab: Lab, recipe: str, optimizer: str) -> None:
        import jax
        from flax import nnx

        self.lab, self.optimizer = lab, OPTIMIZER[optimizer]
        self.loss_scale = LOSS_SCALE if recipe.startswith("fp8_static") else 1.0
        model = nnx.eval_shape(lambda: lab.new_model(jax.random.key(0)))
        convert(model, recipe)
        self.graphdef = nnx.graphdef(model)
        self.begin = jax.jit(lambda params, hyper: self.optimizer(hyper).init(params))
        self.chunk = jax.jit(self._chunk, donate_argnums=0)
        self.losses = jax.jit(self._losses)
        self.outliers = jax.jit(self._outliers)

    def train(self, params: dict, hyper: Hyper) -> tuple[dict, dict]:
        """Trains all steps; returns the parameters and what is recorded of the run."""
        import jax

        measure = self.lab.program("bf16", "adamw").outliers
        outliers, losses, seconds = {"0": measure(params, self.lab.val)}, [], []
        state = params, self.begin(params, hyper)
        state, _ = self.chunk(state, hyper._replace(steps=0), 0, self.lab.data)  # compiles
        with turn(self.lab.turn):
            for start in range(0, hyper.steps, CHUNK):
                if start and start % LOOK == 0:
                    outliers[str(start)] = measure(state[0], self.lab.val)
                began = time.perf_counter()
                state, piece = self.chunk(state, hyper, start, self.lab.data)
                losses += jax.device_get(piece)[: hyper.steps - start].tolist()
                seconds.append((time.perf_counter() - began) / min(CHUNK, hyper.steps - start))
        ms = 1e3 * float(np.median(seconds or [math.nan]))
        outliers[str(hyper.steps)] = measure(state[0], self.lab.val)
        return state[0], {
            "outliers": jax.tree.map(
                lambda x: [round(float(value), 2) for value in x], jax.device_get(outliers)
            ),
            "loss": study.thin(losses, digits=5, every=25),
            "final_loss": float(np.mean(losses[-max(1, hyper.steps // 10) :] or [math.nan])),
            "ms": round(ms, 3),
            "device": jax.devices()[0].device_kind,
            "start": self.lab.checksums,
        }

    def validate(self, params: dict) -> dict:
        """Over fixed sequences of held-out packages, the mean loss in nats a byte and the mean sharpness."""
        loss, sharpness = (float(np.mean(found)) for found in self.losses(params, self.lab.val))
        return {"val": loss, "sharpness": sharpness}

    def loss(self, params: dict, tokens: Any) -> Any:
        return self.loss_scale * self.loss_and_sharpness(params, tokens)[0]

    def loss_and_sharpness(self, params: dict, tokens: Any) -> tuple[Any, Any]:
        import optax
        from flax import nnx

        from swjax.diagnostics import logit_sharpness

        logits, labels = nnx.merge(self.graphdef, params)(tokens[:, :-1]), tokens[:, 1:]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, logit_sharpness(logits, labels).mean()

    def _chunk(self, state: tuple, hyper: Hyper, start: Any, data: Any) -> tuple:
        """Trains CHUNK steps, or fewer at the end; returns the state and the losses, [CHUNK]."""
        import jax
        import jax.numpy as jnp
        import optax

        sequences, length = self.lab.settings.batch
        optimizer, key = self.optimizer(hyper), jax.random.key(100 + hyper.seed)

        def step(t, carry):
            (params, opt_state), losses = carry
            key_t = jax.random.fold_in(key, t)
            first = jax.random.randint(key_t, (sequences,), 0, data.shape[0] - length)
            loss, grads = jax.value_and_grad(self.loss)(params, cut(data, first, length))
            loss, grads = jax.tree.map(lambda a: a / self.loss_scale, (loss, grads))
            updates, opt_state = optimizer.update(grads, opt_state, params)
            state = optax.apply_updates(params, updates), opt_state
            return state, losses.at[t - start].set(loss)

        end = jnp.minimum(start + CHUNK, hyper.steps)
        return jax.lax.fori_loop(start, end, step, (state, jnp.zeros(CHUNK)))

    def _losses(self, params: dict, data: Any) -> Any:
        import jax

        (sequences, length), windows = self.lab.settings.batch, self.lab.settings.windows
        first = np.linspace(0, data.shape[0] - length - 1, windows).astype(np.int32)
        batches = first[: windows // sequences * sequences].reshape(-1, sequences)
        return jax.lax.map(
            lambda some: self.loss_and_sharpness(params, cut(data, some, length)), batches
        )

    def _outliers(self, params: dict, data: Any) -> dict:
        """Statistics of the activations, [layers] each; runs measure those of bf16 for their parameters.

        For what each layer reads, the largest over the median RMS of its channels. Of the products of SwiGLU
        also the largest magnitude, and the cosine between gate and up of the channel with the largest RMS.
        """
        import jax
        import jax.numpy as jnp
        from flax import nnx

        def rms(x, axis):
            return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=axis))

        def ratio(x):
            return jnp.max(rms(x, (0, 1))) / jnp.median(rms(x, (0, 1)))

        def cosine(mlp, hidden):
            gate, up = (
                layer.kernel[...][:, jnp.argmax(rms(hidden, (0, 1)))]
                for layer in (mlp.gate, mlp.up)
            )
            return jnp.mean(gate * up) / (rms(gate, 0) * rms(up, 0))

        model, found = nnx.merge(self.graphdef, params), []
        tokens = cut(data, np.zeros(1, np.int32), self.lab.settings.batch[1])[:, :-1]
        x = model.embedding[...].astype(model.dtype)[tokens]
        for block in model.blocks:
            first = block.attention_norm(x)
            middle = x + block.attention(first)
            second = block.mlp_norm(middle)
            hidden = jax.nn.silu(block.mlp.gate(second)) * block.mlp.up(second)
            read = {"residual": x, "attention": first, "mlp": second, "hidden": hidden}
            largest = jnp.max(jnp.abs(hidden)).astype(jnp.float32)
            found.append(
                {name: ratio(value) for name, value in read.items()}
                | {"largest": largest, "cosine": cosine(block.mlp, hidden)}
            )
            x = middle + block.mlp.down(hidden)
        return jax.tree.map(lambda *each: jnp.stack(each), *found)


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """Holds the lock of a GPU, so that another process compiles while this one trains; see --turn."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while True:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not path.with_name(f"{path.name}.pause").exists():
                break
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.5)
        yield


def convert(model: Any, arm: str) -> None:
    """Converts the blocks to an arm's recipe; `down` stays in 16 bits or is `smoothed` for a remedy."""
    from examples.language_model.model import LINEAR_LAYERS
    from swjax import dot_general
    from swjax.nnx import quantize_model

    recipe, _, remedy = arm.partition("+")
    if recipe != "standard":
        quantize_model(model, ({DOWN: "standard"} if remedy else {}) | {LINEAR_LAYERS: recipe})
    if remedy in SMOOTH:
        for block in model.blocks:
            block.mlp.down.dot_general = smoothed(dot_general(recipe), SMOOTH[remedy])


def smoothed(product: Callable, power: float) -> Callable:
    """A product that divides large channels of x, and multiplies the rows of w by the same.

    The divisor is a power of two near the largest magnitude of a channel over the median one, to a power: 1
    is Smooth-SwiGLU, 1/2 divides the outliers between x and w, as SmoothQuant does.

    References:
      Fishman et al., "Scaling FP8 training to trillion-token LLMs", 2024, https://arxiv.org/abs/2409.12517
    """
    import jax
    import jax.numpy as jnp

    def run(x, w, *args, **kwargs):
        tokens = tuple(range(x.ndim - 1))
        largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=tokens, keepdims=True)
        largest = jnp.maximum(largest.astype(jnp.float32), 2.0**-60)
        ratio = power * jnp.log2(largest / jnp.median(largest))
        scale = jnp.exp2(jnp.round(ratio)).astype(x.dtype)
        return product(x / scale, w * scale.reshape(-1, 1).astype(w.dtype), *args, **kwargs)

    return run


def cut(data: Any, first: Any, length: int) -> Any:
    """Sequences of length + 1 bytes, int32 [n, length + 1], that begin at `first` [n]."""
    return data[first[:, None] + np.arange(length + 1)[None]].astype("int32")


def schedule(hyper: Hyper) -> Callable:
    """The rate rises linearly over a twelfth of the steps, then falls to a twentieth as a cosine."""
    import jax.numpy as jnp

    def rate(count):
        warm = hyper.steps / 12
        progress = jnp.clip((count - warm) / (hyper.steps - warm), 0, 1)
        cosine = 0.05 + 0.95 * (1 + jnp.cos(jnp.pi * progress)) / 2
        return hyper.rate * jnp.where(count < warm, (count + 1) / (warm + 1), cosine)

    return rate


def is_matrix(params: dict) -> dict:
    import jax

    return jax.tree.map(lambda p: p.ndim > 1, params)


def is_matrix_of_block(params: dict) -> dict:
    return dict.fromkeys(params, False) | {"blocks": is_matrix(params["blocks"])}


def adamw(hyper: Hyper) -> Any:
    import optax

    rate = schedule(hyper)
    tail = optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), tail)


def stable(hyper: Hyper) -> Any:
    import optax

    from swjax.optax import stable_adamw

    tail = stable_adamw(schedule(hyper), b2=0.95, weight_decay=0.1, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), tail)


def muon(hyper: Hyper, coefficients: str = "quintic") -> Any:
    import optax

    import swjax.optax

    tail = swjax.optax.muon(
        schedule(hyper),
        is_matrix_of_block,
        b2=0.95,
        weight_decay=0.1,
        mask=is_matrix,
        dtype="float16",
        coefficients=coefficients,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), tail)


muon_nonic = functools.partial(muon, coefficients="nonic")
OPTIMIZER = dict(zip(OPTIMIZERS, (adamw, stable, muon, muon_nonic), strict=True))


# --- results ------------------------------------------------------------------------------------------


def summary(runs: list[dict]) -> list[dict]:
    """The differences of every arm from its base in nats a byte, for every group of like settings.

    The base is the mean of bf16 and of the control; the base of the control is bf16. Pairs with a loss that
    is not finite count as diverged and have no difference. P-values are corrected by Holm's method over the
    arms of a group, without the control.
    """
    rows = []
    for settings, some in paired.alike(runs).items():
        for name in (n for n in ("at_once", "val") if n in some[0]["result"]):
            arms = dict.fromkeys(run["key"]["arm"] for run in some)
            group = [
                {"settings": settings, "loss": name} | row(some, arm, name)
                for arm in arms
                if differences(some, arm, name)
            ]
            tested = [found for found in group if found["arm"] != paired.CONTROL]
            for test in TESTS:
                for found, p in zip(tested, paired.holm([f[f"p_{test}"] for f in tested])):
                    found[f"p_{test}"] = p
            rows += group
    return rows


def differences(some: list[dict], arm: str, name: str) -> list[float]:
    """A loss of an arm minus that of its base, for each seed that has all of them; see `summary`."""
    bases = [base for base in BASES if any(run["key"]["arm"] == base for run in some)]
    bases = bases[: 1 if arm == paired.CONTROL else None]
    if arm in bases:
        return []
    seeds = [{run["key"]["seed"] for run in some if run["key"]["arm"] == a} for a in (arm, *bases)]
    whole = [run for run in some if run["key"]["seed"] in set.intersection(*seeds)]
    each = [paired.minus(whole, arm, lambda result: result[name], base) for base in bases]
    return np.mean(each, axis=0).tolist() if each else []


def row(some: list[dict], arm: str, name: str) -> dict:
    """Mean difference, standard deviation, half the 95% interval, and p-values that are not corrected."""
    every = differences(some, arm, name)
    pairs = [pair for pair in every if math.isfinite(pair)]
    mean, half = study.interval(pairs) if pairs else (math.nan, math.nan)
    return {
        "arm": arm,
        "pairs": len(pairs),
        "diverged": len(every) - len(pairs),
        "mean": mean,
        "sd": float(np.std(pairs, ddof=1)) if len(pairs) > 1 else math.nan,
        "half": half,
        "p_different": paired.p_value(pairs),
        "p_equivalent": max(p_outside(pairs)),
        "p_not_worse": p_outside(pairs)[1],
    }


def p_outside(pairs: list[float]) -> tuple[float, float]:
    """The p-values of two one-sided t-tests: the mean is above -MARGIN, and below MARGIN.

    >>> max(p_outside([0.001, -0.001, 0.0])) < 0.05 < max(p_outside([0.003, 0.001, 0.002]))
    True
    """
    if len(pairs) < 2 or np.ptp(pairs) < 1e-9:
        return math.nan, math.nan
    return tuple(
        float(stats.ttest_1samp(pairs, limit, alternative=side).pvalue)
        for limit, side in ((-MARGIN, "greater"), (MARGIN, "less"))
    )


def verdict(found: dict) -> str:
    """What the corrected tests say at 5%; several can hold.

    >>> verdict({"diverged": 0, "p_equivalent": 0.01, "p_different": 0.2, "p_not_worse": 0.01})
    'equivalent, not worse'
    """
    said = [name.replace("_", " ") for name in TESTS if found[f"p_{name}"] < 0.05]
    said += ["diverged"] * (found["diverged"] > 0)
    return ", ".join(said) or "undecided"


def table(runs: list[dict]) -> None:
    """Prints the losses and speeds of each arm, and the differences with 95% intervals and verdicts."""
    for settings, some in paired.alike(runs).items():
        for (arm,), own in study.group(some, "arm").items():
            results = [run["result"] for run in own]
            names = ("at_once", "val", "sharpness", "final_loss")
            names = [name for name in names if name in results[0]]
            told = {name: study.interval(result[name] for result in results) for name in names}
            losses = ", ".join(f"{n} {mean:.4f} +- {half:.4f}" for n, (mean, half) in told.items())
            ms = np.median([result["ms"] for result in results])
            title = ", ".join(filter(None, (settings, arm, f"{len(own)} seeds")))
            print(f"{title}: {losses}, {ms:.1f} ms a step")
    print(f"minus the mean of bf16 and control, nats a byte; equivalent: within {MARGIN}")
    for found in summary(runs):
        title = ", ".join(filter(None, (found["settings"], found["arm"], found["loss"])))
        print(
            f"{title}: {found['mean']:+.5f} +- {found['half']:.5f}, sd {found['sd']:.5f}, "
            f"{found['pairs']} pairs, p of a difference {found['p_different']:.2g}, "
            f"of equivalence {found['p_equivalent']:.2g}, of a loss not higher by the margin "
            f"{found['p_not_worse']:.2g}: {verdict(found)}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
