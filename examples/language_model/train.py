"""Trains a Llama on the sources of Python's standard library, byte by byte, and prints what it writes.

  python examples/language_model/train.py                                   # 5 minutes on two CPU cores
  python examples/language_model/train.py --recipe=switchback --size=124m   # int8; on GPUs

The corpus is the standard library of this interpreter (license: PSF-2.0), or the text in --corpus. Every
device takes an equal share of each batch. --workdir receives config.json, metrics.jsonl and checkpoints; the
same command continues a run that was interrupted.
"""

import argparse
import dataclasses
import functools
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.language_model import data
from examples.language_model.model import LINEAR_LAYERS, SIZES, Llama
from swjax.nnx import quantize_model
from swjax.optax import stable_adamw
from swjax.recipes import RECIPES
from swjax.safe_files import explain

DEFAULTS = {
    "tiny": {"steps": 600, "batch": 16, "length": 128, "rate": 4e-3},
    "124m": {"steps": 3000, "batch": 32, "length": 1024, "rate": 8e-4},
    "350m": {"steps": 6000, "batch": 32, "length": 1024, "rate": 5e-4},
}
WRITTEN = 500  # bytes of the sample
LINES = 20  # of progress in a run
SECONDS = 120  # between checkpoints, at least: a state of 350m is 4 GB


def main(argv: list[str] | None = None) -> Any:
    """Trains a model, prints a sample and returns the parameters."""
    args = parse(argv)
    try:
        corpus = data.read(args.corpus, args.length)
        run = Run(args, corpus.fingerprint)
    except (OSError, ValueError) as error:
        fail(explain(error))

    # --- model and optimizer -------------------------------------------------------------------------
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = Llama(dataclasses.replace(SIZES[args.size], dtype=dtype), rngs=nnx.Rngs(args.seed))
    if args.recipe != "standard":
        quantize_model(model, {LINEAR_LAYERS: args.recipe})  # the line that makes it int8
    graphdef, parameters = nnx.split(model)
    params = nnx.to_pure_dict(parameters)
    schedule = optax.warmup_cosine_decay_schedule(0, args.rate, args.steps // 12, args.steps)
    optimizer = stable_adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)

    def loss_of(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    # --- one step: every device computes loss and gradients of its sequences --------------------------
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def mean_over_devices(fn):
        mean = lambda params, tokens: jax.lax.pmean(fn(params, tokens), "data")
        return jax.shard_map(
            mean, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )

    validate = jax.jit(mean_over_devices(loss_of))
    loss_and_grads = mean_over_devices(jax.value_and_grad(loss_of))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens):
        params, opt_state = state
        loss, grads = loss_and_grads(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    # --- training -------------------------------------------------------------------------------------
    unseen = jax.device_put(corpus.windows(2 * args.batch, args.length), divided)
    first, state = run.restore(jax.device_put((params, optimizer.init(params)), everywhere))
    for t in range(first, args.steps):
        tokens = corpus.batch(t, args.seed, args.batch, args.length)
        state, loss = step(state, jax.device_put(tokens, divided))
        if run.is_due(t + 1, loss):
            run.record(t + 1, validate(state[0], unseen), state)

    # --- a sample -------------------------------------------------------------------------------------
    forward = lambda params, tokens: nnx.merge(graphdef, params)(tokens)
    params = jax.device_get(state[0])  # one device writes
    text = sample(forward, params, args.prompt, args.length, jax.random.key(args.seed))
    print(f"--- {args.prompt!r}, and what the model writes after it\n{text}")
    return params


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def sample(forward: Callable, params: Any, prompt: bytes, length: int, key: jax.Array) -> str:
    """Continues a prompt to WRITTEN bytes at temperature 0.7; each byte costs a pass over `length` bytes."""
    size = max(WRITTEN, length)
    first = jnp.zeros(size, "int32").at[: len(prompt)].set(jnp.asarray(list(prompt)))

    @jax.jit
    def write(params, text):
        def add(i, text):
            start = jnp.maximum(i - length, 0)
            window = jax.lax.dynamic_slice(text, (start,), (length,))
            logits = forward(params, window[None])[0, i - 1 - start]
            byte = jax.random.categorical(jax.random.fold_in(key, i), logits / 0.7)
            return text.at[i].set(byte.astype("int32"))

        return jax.lax.fori_loop(len(prompt), size, add, text)

    written = bytes(write(params, first).tolist())
    return written.partition(b"\0")[0].decode(errors="replace")


class Run:
    """The files of a run: its settings, a line of metrics for each progress line, and the last state.

    Raises:
      ValueError: the folder holds a run with other settings or another corpus.
    """

    def __init__(self, args: argparse.Namespace, fingerprint: str) -> None:
        names = ("size", "recipe", "steps", "batch", "length", "rate", "seed")
        self.settings = {name: getattr(args, name) for name in names} | {"corpus": fingerprint}
        self.folder, self.every = args.workdir, max(1, args.steps // LINES)
        self.tokens = args.batch * args.length
        self.folder.mkdir(parents=True, exist_ok=True)
        config, self.metrics = self.folder / "config.json", self.folder / "metrics.jsonl"
        if not config.exists():
            config.write_text(json.dumps(self.settings) + "\n")
        try:
            stored = json.loads(config.read_text())
        except ValueError as error:  # a kill or a full disk cut it
            raise ValueError(
                f"{config} is not JSON: delete it to use these settings, or name another --workdir"
            ) from error
        for name, value in self.settings.items():
            if stored.get(name) != value:
                raise ValueError(
                    f"{self.folder} holds a run with {name} {stored.get(name)}, got {value}: "
                    "repeat its settings, or name another --workdir"
                )
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self.checkpoints = ocp.CheckpointManager(
            (self.folder / "checkpoints").absolute(), options=options
        )

    def restore(self, state: Any) -> tuple[int, Any]:
        """The step and the state of the last checkpoint; (0, state) if there is none."""
        step = self.checkpoints.latest_step() or 0
        if step:
            state = self.checkpoints.restore(step, args=ocp.args.StandardRestore(state))
        # A kill or a full disk may cut the last line, which is later than the checkpoint.
        lines = self.metrics.read_text().splitlines() if step else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self.metrics.write_text("".join(f"{line}\n" for line in kept))
        self.saved = time.perf_counter()
        self.began = self.saved, step
        self.losses: list[jax.Array] = []
        return step, state

    def is_due(self, step: int, loss: jax.Array) -> bool:
        """Keeps the loss of a step; whether progress is to be recorded."""
        self.losses.append(loss)
        return step % self.every == 0 or step == self.settings["steps"]

    def record(self, step: int, val_loss: jax.Array, state: Any) -> None:
        """Prints and stores the progress since the last line, in nats a byte; stores the state if due."""
        loss = float(jnp.stack(self.losses).mean())
        seconds, steps = time.perf_counter() - self.began[0], step - self.began[1]
        speed = steps * self.tokens / seconds
        left = (self.settings["steps"] - step) * seconds / steps
        row = {"step": step, "loss": loss, "val_loss": float(val_loss), "bytes_per_second": speed}
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"step {step} of {self.settings['steps']}  loss {loss:.3f}  unseen {float(val_loss):.3f}  "
            f"{speed:,.0f} bytes/s  {left:.0f} s left",
            flush=True,
        )
        if step == self.settings["steps"] or time.perf_counter() - self.saved >= SECONDS:
            self.checkpoints.save(step, args=ocp.args.StandardSave(state))
            self.saved = time.perf_counter()
        self.losses, self.began = [], (time.perf_counter(), step)


class Parser(argparse.ArgumentParser):
    """Prints one line for a bad flag."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def fail(reason: object) -> NoReturn:
    print(f"train.py: {reason}", file=sys.stderr)
    raise SystemExit(2)


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stdlib = Path(sysconfig.get_path("stdlib"))
    flags.add_argument("--size", default="tiny", choices=SIZES)
    flags.add_argument("--recipe", default="standard", choices=RECIPES, help="of the blocks")
    flags.add_argument("--workdir", type=Path, default=Path("runs/language_model"))
    flags.add_argument("--corpus", type=Path, default=stdlib, help="a folder with text files")
    flags.add_argument("--steps", type=int, help="updates")
    flags.add_argument("--batch", type=int, help="sequences a step")
    flags.add_argument("--length", type=int, help="bytes a sequence")
    flags.add_argument("--rate", type=float, help="peak learning rate")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--prompt", type=str.encode, default=b"def ", help="start of the sample")
    args = flags.parse_args(argv)
    for name, value in DEFAULTS[args.size].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        if not getattr(args, name) > 0:
            fail(f"--{name} must be above 0, got {getattr(args, name)}")
    if args.batch % jax.device_count():
        fail(f"--batch={args.batch} must be a multiple of the {jax.device_count()} devices")
    if not 0 < len(args.prompt) < args.length:
        fail(
            f"--prompt must have at least one byte and fewer than --length={args.length}, got "
            f"{len(args.prompt)}"
        )
    if args.seed < 0:
        fail(f"--seed must be at least 0, got {args.seed}")
    return args


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command continues from the last checkpoint")
