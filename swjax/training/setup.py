"""What a run is made of: devices, model, optimizer, train state and the compiled step."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from swjax import recipes
from swjax.models import clip, sharding
from swjax.nnx import set_layouts
from swjax.training import config as config_lib
from swjax.training.checkpoint import Checkpoints
from swjax.training.config import ConfigError, blame, choice
from swjax.training.optimizer import make_optimizer, make_schedule, split_frozen


def use_compilation_cache(config) -> None:
    """Keeps compiled programs where the config says; a program found there computes the same bits."""
    if config.train.compilation_cache:
        cache = str(Path(config.train.compilation_cache).absolute())
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # evaluators' too


def check(config) -> tuple[jax.sharding.Mesh, clip.CLIPConfig]:
    """Checks all that needs no data; returns the devices' mesh and the model's configuration."""
    with blame("mesh"):
        mesh = sharding.make_mesh(**config.mesh)
        sharding.batch_share(mesh)
    config_lib.validate(config, batch_shards=mesh.shape["data"] * mesh.shape["fsdp"])
    return mesh, model_config(config)


def model_config(config) -> clip.CLIPConfig:
    """The model that the config describes."""
    c = config.model
    choice("model.name", c.name, clip.CONFIGS)
    choice("model.recipe", c.recipe, recipes.RECIPES)
    sizes = {tower: {k: v for k, v in c[tower].items() if v} for tower in ("vision", "text")}
    sizes["vision"]["image_size"] = config.data.image_size
    sizes["text"]["context_length"] = config.data.context_length
    if c.embed_dim:
        sizes["embed_dim"] = c.embed_dim
    if c.attention in ("cudnn", "triton") and jax.default_backend() != "gpu":
        raise ConfigError(
            f"config.model.attention={c.attention!r} needs a GPU: set it to 'xla' or ''"
        )
    if config.train.loss == "sigmoid":  # where SigLIP starts
        sizes |= {"init_logit_scale": math.log(10), "init_logit_bias": -10.0}
    same = ("recipe", "dtype", "remat", "scan_layers", "qk_norm", "gelu", "patch_dropout")
    with blame("model"):
        return clip.config(
            c.name,
            attention=c.attention or None,
            layer_scale=0.0 if c.layer_scale else None,
            **{name: c[name] for name in same},
            **sizes,
        )


def plan(config, source):
    """How many steps a run has, its learning rate at each, and its optimizer."""
    sizes = {"batch_size": config.train.batch_size, "dataset_size": len(source)}
    total = config_lib.steps(config.train, "", **sizes)
    schedule = make_schedule(config, total, config_lib.steps(config.schedule, "warmup_", **sizes))
    return total, schedule, make_optimizer(config, schedule)


def compile_step(train_step, like, **options: str):
    """The step as it is run: the state's memory is used again, and the new state lies like the old. Every
    process has all metrics.

    Args:
      train_step: of `swjax.training.step.make_train_step`.
      like: the state, or ShapeDtypeStructs like it, with shardings.
      **options: of the compiler, beside those of `sharding.compiler_options`.
    """
    everywhere = like["step"].sharding
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, like), everywhere),
        compiler_options=sharding.compiler_options(everywhere.mesh) | options,
    )


def make_init(config, cfg: clip.CLIPConfig, optimizer):
    """Returns a function () -> the first train state, and the model's graph definition.

    The state is {"params", "opt_state", "step"}, and "ema" if the config averages parameters: plain
    nested dicts of arrays, so that paths and checkpoints need no Flax.
    """

    def model():
        clip_model = clip.CLIP(cfg, rngs=nnx.Rngs(config.train.seed))
        dtype, once = config.train.reduce_dtype, config.train.reduce_once
        return set_layouts(clip_model, sharding.spec_of, reduce_dtype=dtype, reduce_later=once)

    def init():
        params = nnx.to_pure_dict(nnx.state(model(), nnx.Param))
        trainable, _ = split_frozen(params, config.optimizer.freeze)
        state = {"params": params, "opt_state": optimizer.init(trainable), "step": jnp.int32(0)}
        return state | ({"ema": params} if config.train.ema_decay else {})

    return init, nnx.graphdef(nnx.eval_shape(model))


def init_or_restore(config, checkpoints: Checkpoints, init, like):
    """The first train state of this process and its position in the data; None: the beginning.

    Looks in this workdir, then in `checkpoint.resume`, then takes parameters from
    `checkpoint.init_from`, then starts from scratch.
    """
    if checkpoints.latest_step() is not None:
        with config_lib.blame_changes(checkpoints.directory.parent, config):
            return checkpoints.restore(like)
    if config.checkpoint.resume:
        with config_lib.blame_changes(Path(config.checkpoint.resume), config):
            return Checkpoints.of("checkpoint.resume", config.checkpoint.resume).restore(like)
    return first_state(config, init, like), None


def first_state(config, init, like):
    """The train state of step 0."""
    shardings = jax.tree.map(lambda x: x.sharding, like)
    # It runs once: optimizing it would take longer.
    options = {"xla_backend_optimization_level": 0}
    state = jax.jit(init, out_shardings=shardings, compiler_options=options)()
    if config.checkpoint.init_from:
        other = Checkpoints.of("checkpoint.init_from", config.checkpoint.init_from)
        state["params"] = other.restore_params(like["params"])
        if "ema" in state:
            state["ema"] = jax.tree.map(jnp.copy, state["params"])
    return state
