"""Assembles a run: devices, model, optimizer, train state and the compiled step."""

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from swjax import auto, data, recipes
from swjax.kernels import targets
from swjax.models import clip, lora, sharding
from swjax.models.config import LoRA
from swjax.nnx import set_layouts
from swjax.safe_files import mask_credentials
from swjax.training import config as config_lib
from swjax.training.config import ConfigError, blame, choice
from swjax.training.optimizer import make_optimizer, make_schedule, split_frozen
from swjax.training.step import State, make_train_step

logger = logging.getLogger(__name__)


WEIGHTS = "weights"  # the value of `model.name` by which the model is that of the weights


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run; none of them holds arrays on devices.

    Attributes:
      source: the training examples.
      mesh: mesh of all devices.
      model: the model configuration.
      steps: number of steps of the whole run.
      schedule: step -> learning rate.
      optimizer: optimizer of the trainable parameters.
      init: makes the initial train state.
      graphdef: graph definition of the model.
      like: the train state as ShapeDtypeStructs with shardings.
    """

    source: Any
    mesh: jax.sharding.Mesh
    model: clip.CLIPConfig
    steps: int
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    init: "Init"
    graphdef: nnx.GraphDef
    like: State

    def train_step(self, config: ConfigDict) -> Callable:
        """Returns the step of `swjax.training.step.make_train_step`, which compiles at its first call."""
        step = make_train_step(config, self.graphdef, self.optimizer, self.schedule)
        return compile_step(step, self.like, concurrent=config.train.concurrent_kernels)


def assemble(config: ConfigDict, source: Any) -> Parts:
    """Creates the parts of a run.

    Args:
      config: the config of the run.
      source: the training examples; their number defines an epoch.

    Raises:
      ConfigError: settings of the config do not fit each other, the data or the devices.
    """
    mesh, model = check_config(config)
    check_tokenizer(config, model)
    sizes = {"batch_size": config.train.batch_size, "dataset_size": len(source)}
    steps = config_lib.steps(config.train, "", **sizes)
    require_profile(config, steps)
    schedule = make_schedule(config, steps, config_lib.steps(config.schedule, "warmup_", **sizes))
    optimizer = make_optimizer(config, schedule)
    init, graphdef = make_init(config, model, optimizer)
    like = sharding.abstract_state(jax.eval_shape(init), mesh)
    return Parts(source, mesh, model, steps, schedule, optimizer, init, graphdef, like)


def check_tokenizer(config: ConfigDict, model: clip.CLIPConfig) -> None:
    """Raises a ConfigError if `data.tokenizer` does not exist or has another vocabulary than the model."""
    with blame("data.tokenizer"):
        try:
            data.check_tokenizer(config.data.tokenizer, model.text.vocab_size)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from error


def require_profile(config: ConfigDict, steps: int) -> None:
    """Raises a ConfigError if the profile would end after the last step."""
    if max(config.train.profile_steps, default=0) > steps:
        raise ConfigError(
            f"config.train.profile_steps={config.train.profile_steps} must end by the last step, {steps}: "
            f"give earlier steps"
        )


def use_compilation_cache(config: ConfigDict) -> None:
    """Caches compiled programs in `train.compilation_cache`; a cached program computes the same bits."""
    if config.train.compilation_cache:
        cache = str(Path(config.train.compilation_cache).absolute())
        jax.config.update("jax_compilation_cache_dir", cache)
        # Low enough to cache the evaluators' programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def check_config(config: ConfigDict) -> tuple[jax.sharding.Mesh, clip.CLIPConfig]:
    """Checks the config as far as possible without data.

    Returns:
      (mesh of all devices, model configuration).

    Raises:
      ConfigError: a value is out of range, or does not fit the other values or the devices.
    """
    mesh, model = _mesh_of(config), model_config(config)
    if model.lora is not None:
        _require_whole_rotations(mesh, model)
    return mesh, model


def _require_whole_rotations(mesh: jax.sharding.Mesh, model: clip.CLIPConfig) -> None:
    """Raises a ConfigError if the mesh splits groups of features that quantized kernels rotate."""
    assert isinstance(model.recipe, str), "config.model.recipe is one name"
    for tower in (model.vision, model.text):
        width, hidden = tower.width, tower.mlp_width
        for k, axis in ((width, "fsdp"), (width, "tensor"), (hidden, "tensor")):
            shards = mesh.shape[axis] if k % mesh.shape[axis] == 0 else 1
            whole, fitting = (
                recipes.get(model.recipe).rotating(n, n).fwd for n in (k, k // shards)
            )
            if whole is not None and whole != fitting:
                raise ConfigError(
                    f"config.optimizer.lora quantizes kernels whose {k} features {model.recipe} rotates in "
                    f"groups of {whole.lhs.rotation}, which config.mesh.{axis}={shards} splits: set it to 1, "
                    "or change config.model.recipe"
                )


def check_command(config: ConfigDict) -> None:
    """Checks the config as far as possible without data and weights; see `check_config` for the errors."""
    if config.model.name == WEIGHTS:  # the model is not known yet
        _mesh_of(config)
    else:
        check_config(config)


def _mesh_of(config: ConfigDict) -> jax.sharding.Mesh:
    """Checks the config as far as possible without the model; returns the mesh of all devices."""
    with blame("mesh"):
        mesh = sharding.make_mesh(**config.mesh)
        sharding.batch_share(mesh)
    config_lib.validate(config, batch_shards=mesh.shape["data"] * mesh.shape["fsdp"])
    return mesh


def settle_recipe(config: ConfigDict, workdir: Path) -> ConfigDict:
    """Returns the config with the name of the recipe that `model.recipe="auto"` stands for.

    It is the recipe in the config.json of the workdir, or of `checkpoint.resume`, so that a run keeps
    its recipe on other devices; without one it is the choice of `swjax.auto` for the devices and the model.

    Raises:
      ConfigError: the config.json of the run is damaged.
    """
    if config.model.recipe != auto.NAME:
        return config
    best = model_config(config).recipe
    settled = config.copy_and_resolve_references()
    for folder in filter(None, (workdir, config.checkpoint.resume)):
        path = Path(folder) / "config.json"
        if not path.exists():
            continue
        model = config_lib.saved_section(path, "model")
        kept = choice("model.recipe", model.get("recipe", ""), recipes.RECIPES)
        if kept != best and jax.process_index() == 0:
            logger.warning(
                "the recipe 'auto' stays %r, with which the run in %s began: here it would be %r",
                kept, folder, best,
            )  # fmt: skip
        best = kept
        break
    settled.model.recipe = best
    return settled


def model_config(config: ConfigDict) -> clip.CLIPConfig:
    """Builds the model configuration from the config.

    Raises:
      ConfigError: the model does not exist, or its sizes do not fit each other.
    """
    c = config.model
    choice("model.name", c.name, (*clip.CONFIGS, WEIGHTS))
    _require_settled(config)
    choice("model.recipe", c.recipe, recipes.NAMES)
    vision, text = ({k: v for k, v in c[tower].items() if v} for tower in ("vision", "text"))
    sizes: dict[str, Any] = {
        "vision": vision | {"image_size": config.data.image_size},
        "text": text | {"context_length": config.data.context_length},
    }
    if c.embed_dim:
        sizes["embed_dim"] = c.embed_dim
    elif c.architecture == "siglip":  # its embedding is the pooled patches, without a projection
        sizes["embed_dim"] = c.vision.width or preset(c.name).vision.width
    if c.attention in ("cudnn", "fused") and targets.platform() != "gpu":
        raise ConfigError(
            f"config.model.attention={c.attention!r} needs a GPU: set it to 'xla' or ''"
        )
    if config.train.loss == "sigmoid":  # SigLIP's initial values
        sizes |= {"init_logit_scale": math.log(10), "init_logit_bias": -10.0}
    same = ("recipe", "dtype", "remat", "scan_layers", "qk_norm", "gelu", "patch_dropout")
    adapted = config.optimizer.lora
    with blame("optimizer.lora"):
        of_lora = LoRA(**adapted) if adapted.rank else None
    with blame("model"):
        return clip.config(
            preset(c.name),
            architecture=c.architecture,
            attention=c.attention or None,
            layer_scale=0.0 if c.layer_scale else None,
            lora=of_lora,
            **{name: c[name] for name in same},
            **sizes,
        )


def preset(name: str) -> clip.CLIPConfig:
    """Returns the named model; for "weights", one whose sizes the keys of the config replace."""
    return clip.CONFIGS["vit_b32" if name == WEIGHTS else name]


def model_title(config: ConfigDict) -> str:
    """The name of the model, or of the weights that it comes from, for output."""
    c = config.checkpoint
    address = mask_credentials(c.init_from or c.resume)
    return f"the model of {address}" if config.model.name == WEIGHTS else config.model.name


def _require_settled(config: ConfigDict) -> None:
    """Raises a ConfigError if a key stands for a value of weights that were not read."""
    model, data_ = config.model, config.data
    first = {
        "model.architecture": model.architecture,
        "model.gelu": model.gelu,
        "data.image_size": data_.image_size,
        "data.context_length": data_.context_length,
        "train.loss": config.train.loss,
    }
    if model.name == WEIGHTS:
        first["model.vision.width"] = model.vision.width
    unset = [f"config.{key}={value!r}" for key, value in first.items() if not value]
    if unset:
        raise ConfigError(
            f"{', '.join(unset)} must be the value of weights: set config.model.name='weights' and "
            "config.checkpoint.init_from, or these keys"
        )


def fitting(config: ConfigDict) -> data.Fitting:
    """Returns how pictures become squares according to the config."""
    names = (field.name for field in dataclasses.fields(data.Fitting))
    given = {name: value for name in names if (value := config.model.vision[name])}
    return data.Fitting(**given)


def augmentation(config: ConfigDict) -> data.Augmentation:
    """Returns how training photographs change at random according to the config."""
    changes = config.data.augment.to_dict()
    changes.pop("drawings")
    return data.Augmentation(**changes)


def compile_step(
    train_step: Callable, like: State, *, concurrent: bool = False, **options: str
) -> Callable:
    """Compiles a train step at its first call, with the trainer's options.

    The state is donated. The new state has the sharding of the old one, and metrics are replicated.

    Args:
      train_step: function from `swjax.training.step.make_train_step`.
      like: the state, or ShapeDtypeStructs like it, with shardings.
      concurrent: see `sharding.compiler_options`.
      **options: further XLA compiler options.

    Returns:
      A function (state, batch) -> (new state, metrics).
    """
    everywhere = like["step"].sharding
    mesh = everywhere.mesh
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, like), everywhere),
        compiler_options=sharding.compiler_options(mesh, concurrent=concurrent) | options,
    )


def compile_init(init: Callable, like: Any) -> Callable:
    """Compiles `init`, or a part of it, at its first call; its result has the shardings of `like`.

    The program runs once, so optimizing it, or timing its parts on a GPU, would take longer than it saves.
    """
    return jax.jit(
        init,
        out_shardings=jax.tree.map(lambda x: x.sharding, like),
        compiler_options={"xla_backend_optimization_level": 0, "xla_gpu_autotune_level": 0},
    )


@dataclasses.dataclass(frozen=True)
class Init:
    """Makes the initial train state, {"params", "opt_state", "step"}, and "ema" if the config averages them.

    The state consists of nested dicts of arrays, so paths and checkpoints do not depend on Flax.

    Attributes:
      params: () -> random parameters of the model without LoRA.
      state: parameters of the model without LoRA -> the train state, whose parameters have LoRA if the config
        does.
    """

    params: Callable[[], Any]
    state: Callable[[Any], State]

    def __call__(self) -> State:
        return self.state(self.params())


def make_init(
    config: ConfigDict, cfg: clip.CLIPConfig, optimizer: optax.GradientTransformation
) -> tuple[Init, nnx.GraphDef]:
    """Returns what makes the initial train state, and the model's graph definition.

    Args:
      config: the config of the run; its seed initializes the parameters.
      cfg: the model configuration.
      optimizer: optimizer of the trainable parameters.
    """

    def model(cfg):
        clip_model = clip.CLIP(cfg, rngs=nnx.Rngs(config.train.seed))
        dtype, once = config.train.reduce_dtype, config.train.reduce_once
        return set_layouts(clip_model, sharding.spec_of, reduce_dtype=dtype, reduce_later=once)

    plain = dataclasses.replace(cfg, lora=None)

    def params():
        return nnx.to_pure_dict(nnx.state(model(plain)))

    def state(params):
        if cfg.lora is not None:
            adapted = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: model(plain))), params)
            lora.adapt(adapted, cfg.lora, nnx.Rngs(config.train.seed))
            params = nnx.to_pure_dict(nnx.state(adapted))
        trainable, _ = split_frozen(params, config.optimizer.freeze)
        with blame("optimizer"):  # muon, if all of its matrices are frozen
            opt_state = optimizer.init(trainable)
        state = {"params": params, "opt_state": opt_state, "step": jnp.int32(0)}
        return state | ({"ema": params} if config.train.ema_decay else {})

    return Init(params, state), nnx.graphdef(nnx.eval_shape(lambda: model(cfg)))
