"""The train state with which a run starts: restored from a checkpoint, or initialized."""

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from swjax import recipes
from swjax.models import clip, sharding
from swjax.training import config as config_lib
from swjax.training import distributed
from swjax.training.config import ConfigError
from swjax.training.inputs import RESUMED, UNSCORED
from swjax.training.optimizer import split_frozen
from swjax.training.setup import WEIGHTS, Init, compile_init, model_config, preset
from swjax.training.state.checkpoint import Checkpoints
from swjax.training.state.checksums import arrays_by_name, of_devices
from swjax.training.state.initialization import first_parameters
from swjax.training.state.mirror import Mirror
from swjax.training.step import State, limit_logit_scale

logger = logging.getLogger("swjax.training.state.restore")


def init_or_restore(
    config: ConfigDict,
    checkpoints: Checkpoints,
    init: Init,
    like: State,
    mirror: Mirror | None = None,
) -> tuple[State, dict[str, Any] | None]:
    """Restores or initializes the train state.

    The function restores from the workdir, else from `checkpoint.resume`. Without a checkpoint it initializes
    the parameters from `checkpoint.init_from`, else randomly.

    Args:
      config: the config of the run.
      checkpoints: checkpoints of the workdir.
      init: makes the initial train state.
      like: the train state as ShapeDtypeStructs with shardings.
      mirror: has a copy of the run, which replaces a damaged newest checkpoint.

    Returns:
      (state, data position saved with it); the position is None at the beginning of a run.

    Raises:
      ConfigError: a checkpoint does not fit the config, a path in the config has no checkpoint, or replicas
        differ.
    """
    if checkpoints.latest_step() is not None:
        state, position = _restore(config, checkpoints, like, mirror)
    elif config.checkpoint.resume:
        with closing(Checkpoints.of("checkpoint.resume", config.checkpoint.resume)) as found:
            state, position = _restore(config, found, like)
        position.pop(UNSCORED, None)  # a record of the other run
        position |= {RESUMED: True}
    else:
        state, position = first_state(config, init, like), None
    require_equal_replicas(state)
    return state, position


def _restore(
    config: ConfigDict, checkpoints: Checkpoints, like: State, mirror: Mirror | None = None
) -> tuple[State, dict[str, Any]]:
    workdir = checkpoints.directory.parent
    with config_lib.blame_changes(workdir, config):
        restored = checkpoints.restore(like, fetch=mirror.fetch if mirror else None)
    require_same_model(workdir, config)
    return restored


def require_equal_replicas(state: State) -> None:
    """Checks in a run of several processes that all devices hold the same values of each array.

    Processes that compute an array each for itself, such as random initial parameters, may compute different
    values, which training would not notice.

    Raises:
      ConfigError: names the first array that differs.
    """
    if jax.process_count() == 1:
        return
    sums = of_devices(arrays_by_name(state))
    own = np.array([[min(values), max(values)] for values in sums.values()], np.int64)
    of_all = distributed.all_processes(own.ravel()).reshape(-1, *own.shape)
    different = np.any(of_all != of_all[0, :, :1], axis=(0, 2))
    if different.any():
        raise ConfigError(
            f"{different.sum()} of {len(sums)} arrays of the train state differ between devices that hold "
            f"replicas, such as {list(sums)[int(np.argmax(different))]}: start all processes with the same "
            f"software, flags and kind of device"
        )


def require_same_model(workdir: Path, config: ConfigDict) -> None:
    """Checks the settings of the model that do not show in the shapes of its parameters.

    Args:
      workdir: directory of the run whose checkpoint is restored.
      config: the config of the current run.

    Raises:
      ConfigError: names the first setting that differs from that in the run's config.json.
    """
    path = workdir / "config.json"
    if not path.exists():
        return
    model = config_lib.saved_section(path, "model")
    if model.get("name") not in (*clip.CONFIGS, WEIGHTS):
        raise ConfigError(
            f"the checkpoint in {workdir} belongs to the model {model.get('name')!r}, which does not exist: "
            "use another --workdir"
        )
    saved = _hidden_settings(model)
    for key, own in _hidden_settings(config.model.to_dict()).items():
        if saved[key] != own:
            raise ConfigError(
                f"the checkpoint in {workdir} belongs to another model: config.model.{key} is "
                f"{saved[key]!r} there and {own!r} here: set it back, or use another --workdir"
            )
    theirs, ours = model.get("recipe", ""), config.model.recipe
    known = recipes.RECIPES
    if config.optimizer.lora.rank and theirs in known and known[theirs].fwd != known[ours].fwd:
        raise ConfigError(
            f"the frozen kernels in {workdir} are quantized for config.model.recipe={theirs!r}, not "
            f"{ours!r}: set it back, or begin another --workdir with config.checkpoint.init_from={workdir}"
        )


def _hidden_settings(model: dict[str, Any]) -> dict[str, Any]:
    """Settings of a config's section "model" that change no shape."""
    named = preset(model["name"])
    heads = {
        f"{tower}.heads": (model.get(tower) or {}).get("heads") or getattr(named, tower).heads
        for tower in ("vision", "text")
    }
    defaults = {"architecture": "clip", "gelu": "exact"}
    return {key: model.get(key, default) for key, default in defaults.items()} | heads


def finished_steps(state: State, steps: int) -> int:
    """Returns how many of the run's steps are finished in a train state.

    Raises:
      ConfigError: the state is beyond the last step.
    """
    step = int(state["step"])
    if step > steps:
        raise ConfigError(
            f"the checkpoint is at step {step}, beyond the run's last step {steps}: set "
            f"config.train.steps={step} to score it, or more to train on, or use another --workdir"
        )
    return step


def first_state(config: ConfigDict, init: Init, like: State) -> State:
    """The train state of step 0, see `init_or_restore`."""
    address, cfg = config.checkpoint.init_from, model_config(config)
    if not address:
        if cfg.lora and distributed.is_first():
            logger.warning(
                "config.optimizer.lora.rank=%d adapts random weights, which stay frozen: set "
                "config.checkpoint.init_from",
                cfg.lora.rank,
            )
        return compile_init(init, like)()
    plain = sharding.abstract_state(
        {"params": jax.eval_shape(init.params)}, like["step"].sharding.mesh
    )
    new = compile_init(init.params, plain["params"])()
    params = first_parameters(address, replace(cfg, lora=None), new)
    trained, frozen = split_frozen(like["params"], config.optimizer.freeze)
    _refuse_frozen(config, params, new, frozen)
    _say_limit(config, params, trained)
    return compile_init(init.state, like)(params)


def _refuse_frozen(config: ConfigDict, params: Any, new: Any, frozen: Any) -> None:
    """Refuses parameters that are new, because the weights have none that fit, and would not be trained.

    Args:
      params: the result of `first_parameters`, which has arrays of `new` in their place.
      new: initialized parameters.
      frozen: tree of the parameters that are not trained, from `split_frozen`.
    """
    untrained = set(arrays_by_name(frozen))
    given, fresh = arrays_by_name(params), arrays_by_name(new)
    found = [name for name in given if given[name] is fresh[name] and name in untrained]
    if found:
        raise ConfigError(
            f"config.checkpoint.init_from={config.checkpoint.init_from!r} has no {', '.join(found)} for this "
            "config, which is frozen: leave out config.model.embed_dim, or freeze less, without "
            "config.optimizer.lora"
        )


def _say_limit(config: ConfigDict, params: Any, trained: Any) -> None:
    """Warns if the first step will clamp the logit scale of the loaded weights, if it is `trained`."""
    if trained["logit_scale"] is None:
        return
    logit_scale = params["logit_scale"]
    limit = limit_logit_scale(config, {"logit_scale": logit_scale})["logit_scale"]
    if logit_scale != limit and distributed.is_first():
        logger.warning(
            "init_from %s: the logit scale %.6g becomes %.6g, a limit of the softmax loss; "
            "optimizer.freeze=^logit_scale keeps it",
            config.checkpoint.init_from, jnp.exp(logit_scale), jnp.exp(limit),
        )  # fmt: skip
