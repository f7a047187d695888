"""What quantization does to the weight gradients of a real model, against the length K of their products.

Command:  python benchmarks/studies/weight_gradients.py --run=runs/openmoji \\
            --out=benchmarks/results/weight_gradients.json

Takes a run of the default config (`make train`), at its start and as trained, and the batches that it
began with, in several sizes. dW = x^T g of a linear layer contracts the tokens of the whole batch: K is their
number in the image tower. Everything is in fp32 but for

  llm_int8, fp8_tensorwise,  the weight gradient's own product, which alone is quantized as that recipe does
  switchback_hadamard
  switchback                 the forward and the input gradient's products, which is all that it quantizes

and compared with the gradients of nothing quantized: ||dW' - dW|| / ||dW|| of each layer of each block.
"""

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import study

ARMS = ("llm_int8", "fp8_tensorwise", "switchback", "switchback_hadamard")
BATCHES = (32, 64, 128, 256, 512, 1024, 2048)
MOMENTS = ("start", "trained")
BATCHES_EACH = 3


def main(argv=None) -> dict:
    flags = study.parser(__doc__)
    flags.add_argument("--run", type=Path, default=Path("runs/openmoji"), help="its folder")
    flags.add_argument("--moments", nargs="+", default=MOMENTS, choices=MOMENTS)
    flags.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    flags.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    args = flags.parse_args(argv)
    if args.smoke:
        args.moments, args.batches, args.arms = MOMENTS[:1], (4, 8), ARMS[::3]
    config = functools.cache(lambda: smoke_config() if args.smoke else config_of(args.run))
    exact = functools.lru_cache(1)(
        lambda moment, batch: gradients(config(), args.run, moment, batch, "standard")
    )

    def measure(moment, batch, arm):
        other = gradients(config(), args.run, moment, batch, arm)
        return compare(exact(moment, batch), other) | {"K": batch * tokens(config())}

    runs = study.grid(measure, moment=args.moments, batch=args.batches, arm=args.arms)
    return study.carry_out(args, runs, table)


def config_of(run: Path):
    from swjax.evaluate import scoring

    if not (run / "config.json").exists():
        raise SystemExit(
            f"{run} holds no run: `make train` makes runs/openmoji; --run names another"
        )
    return scoring.config_of(str(run))


def smoke_config():
    from configs import common

    config = common.get_config()
    config.model.name, config.model.dtype, config.data.name = "tiny", "float32", "synthetic"
    config.data.image_size, config.data.context_length = 32, 8
    config.train.batch_size, config.train.examples = 8, 64
    return config


def compare(exact: list[dict], other: list[dict]) -> dict:
    """Median and largest error over layers and blocks, each the mean of some batches."""
    from swjax.tools import layer_errors

    errors = [layer_errors.errors(*pair) for pair in zip(exact, other)]
    layers = {
        name: [statistics.fmean(block) for block in zip(*(e[name] for e in errors))]
        for name in errors[0]
    }
    every = [error for blocks in layers.values() for error in blocks]
    return {"median": statistics.median(every), "largest": max(every), "layers": layers}


def tokens(config) -> int:
    from swjax.training import setup

    cfg = setup.model_config(config)
    return cfg.vision.kept_patches(cfg.patch_dropout) + 1


def gradients(config, run: Path, moment: str, batch: int, arm: str) -> list[dict]:
    """{kernel of a block: gradient} for each batch."""
    import jax

    from swjax.tools.compare_precision import first_batches

    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.train.batch_size, config.train.accumulation = batch, 1
    gradient = gradient_of(config, run, moment, recipe_of(arm))
    found = []
    for examples in first_batches(config, BATCHES_EACH):
        grads = gradient(examples, jax.random.key(0))
        found.append({k: g for k, g in grads.items() if "/blocks/" in k and k.endswith("kernel")})
    return found


def gradient_of(config, run: Path, moment: str, recipe) -> Callable[..., dict]:
    """The gradient of a run's model, in fp32 but for what the recipe quantizes.

    Returns:
      A function (batch, key) -> {parameter: gradient}.
    """
    import jax
    from flax import nnx

    from swjax import inference
    from swjax.models import clip
    from swjax.training import setup
    from swjax.training.step import make_loss_and_grad

    if moment == "start":
        cfg = clip.config(setup.model_config(config), recipe=recipe, dtype="float32")
        model = clip.CLIP(cfg, rngs=nnx.Rngs(config.train.seed))
    else:
        model = inference.load(run, recipe=recipe, dtype="float32").model
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    nothing = jax.tree.map(lambda _: None, params)
    loss_and_grad = jax.jit(make_loss_and_grad(config, graphdef))

    def gradient(batch, key):
        grads = loss_and_grad(params, nothing, batch, key)[2]
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        }

    return gradient


def recipe_of(arm: str):
    """What is quantized in an arm."""
    from swjax.recipes import RECIPES, Recipe

    if arm in ("standard", "switchback"):
        return RECIPES[arm]
    return Recipe(wgrad=RECIPES[arm].wgrad)


def table(runs) -> None:
    for run in runs:
        key, r = run["key"], run["result"]
        print(
            f"{key['moment']:8} {key['arm']:15} batch {key['batch']:5,}  K {r['K']:7,}  "
            f"error of dW: median {r['median']:.2%}, largest {r['largest']:.2%}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
