"""A loss spike made on purpose, found and explained, with AdamW and StableAdamW in a plain Flax model.

  python examples/loss_spikes.py --out=runs/loss_spikes
  python -m swjax diagnostics report runs/loss_spikes/adamw

Half of the inputs are zero at first, so their weights have no gradient. Every 150 steps eight of them become
a non-zero constant, as when new data have a border or a watermark. The loss does not change at first. But the
second moment of these weights lags behind their new gradients, and AdamW takes steps that are too large: the
loss spikes. StableAdamW measures the RMS of the tensor's update, and takes smaller steps.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import swjax.nnx
from swjax import diagnostics
from swjax.optax import stable_adamw

B2, STEPS, HEALTH_EVERY = 0.999, 800, 100
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, b2=B2, eps=1e-6),
    "stable_adamw": stable_adamw(1e-2, b2=B2),
}


def batches(seed: int = 0, inputs: int = 64, classes: int = 10, size: int = 256):
    """Yields (x float32 [size, inputs], y int32 [size]); y depends only on the first half of x."""
    rng = np.random.default_rng(seed)
    teacher = rng.normal(size=(inputs // 2, classes))
    step = 0
    while True:
        step += 1
        x = rng.normal(size=(size, inputs)).astype(np.float32)
        y = np.argmax(x[:, : inputs // 2] @ teacher, axis=1).astype(np.int32)
        nonzero = inputs // 2 + 8 * min((step - 1) // 150, 4)
        x[:, inputs // 2 :] = 3
        x[:, nonzero:] = 0
        yield x, y


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def train(name: str, path: Path) -> list[float]:
    """Trains with one of `OPTIMIZERS` and records to a file; returns the losses."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(64, 256, rngs=rngs), nnx.gelu, nnx.Linear(256, 256, rngs=rngs), nnx.gelu,
        nnx.Linear(256, 10, rngs=rngs),
    )  # fmt: skip
    model.layers[0].kernel[...] = model.layers[0].kernel[...].at[32:].set(0)
    swjax.nnx.quantize_model(model, {"layers/[02]": "switchback"})
    optimizer = nnx.Optimizer(model, OPTIMIZERS[name], wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        seen = {"train/loss": loss} | diagnostics.norms(grad=grads)
        if name == "adamw":
            return seen | diagnostics.adamw_rms(optimizer.opt_state, grads, b2=B2, eps=1e-6)
        return seen | diagnostics.rms(optimizer.opt_state)

    @nnx.jit
    def health(model, x, y):
        return diagnostics.measure(loss_fn, model, x, y)

    losses = []
    path.unlink(missing_ok=True)  # of an earlier run
    with diagnostics.Recorder(path) as recorder:
        for i, (x, y) in zip(range(1, STEPS + 1), batches()):
            if i % HEALTH_EVERY == 0:
                recorder.add(i, health(model, x, y))
            metrics = step(model, optimizer, x, y)
            recorder.add(i, metrics)
            losses.append(metrics["train/loss"])
    return [float(loss) for loss in jax.device_get(losses)]


def draw(losses: dict[str, np.ndarray], path: Path) -> None:
    """Draws the losses, one panel an optimizer."""
    from matplotlib.figure import Figure  # pip install matplotlib

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    figure.suptitle(
        "StableAdamW spikes less than AdamW when unused inputs become active", fontsize=11
    )
    for axes, (name, values) in zip(figure.subplots(2, sharex=True, sharey=True), losses.items()):
        axes.plot(np.arange(1, len(values) + 1), values, linewidth=0.9)
        axes.set_title({"adamw": "AdamW"}.get(name, "StableAdamW"), loc="left", fontsize=9)
        axes.set_ylabel("loss")
        axes.set_ylim(0, 1.5)
        for step in range(151, 602, 150):
            axes.axvline(step, color="tab:orange", linewidth=0.8, alpha=0.6, zorder=0)
    axes.set_xlabel("step; orange lines: eight more inputs become non-zero")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/loss_spikes"))
    parser.add_argument("--plot", type=Path, help="PNG of both losses")
    args = parser.parse_args()
    curves = {}
    for name in OPTIMIZERS:
        path = args.out / name / "metrics.jsonl"
        losses = curves[name] = np.array(train(name, path))
        found = diagnostics.analyse(np.arange(1, len(losses) + 1), losses)
        spikes = ", ".join(f"step {event.start} to {event.peak:.2f}" for event in found.loss)
        last = losses[-50:].mean()
        print(f"{name:13} loss {last:.3f} at the end, {len(found.loss)} spikes: {spikes or 'none'}")
    if args.plot:
        draw(curves, args.plot)


if __name__ == "__main__":
    main()
