"""Takes the model of a run from the weights that it starts from: `model.name="weights"`."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from swjax import interop
from swjax.data import Fitting, files
from swjax.data.tokenizer import VOCABULARY_SIZE
from swjax.models import clip
from swjax.safe_files import mask_credentials, one_line, write_atomically
from swjax.training import config as config_lib
from swjax.training import distributed
from swjax.training.config import ConfigError
from swjax.training.setup import WEIGHTS
from swjax.training.state.checkpoint import saved_steps
from swjax.training.state.initialization import KEY, fetched, is_run, model_of_run, unreadable

_LARGEST_TOKENIZER = 2**28  # bytes
_FITTING = tuple(field.name for field in dataclasses.fields(Fitting))
# Keys by which a run may differ from its weights, because `first_parameters` adapts them.
_ADAPTED = {"data.image_size", "data.context_length", "model.embed_dim", "train.loss"}
_ADAPTED |= {f"model.vision.{name}" for name in _FITTING}


def settle_model(config: ConfigDict, workdir: Path) -> ConfigDict:
    """Returns the config with the model of the weights, if `model.name` is "weights".

    Keys that are "" or 0 get the values of the weights: those of `checkpoint.init_from`, or the model of the
    run in the workdir or in `checkpoint.resume`. If a named model has these sizes, its name is set.

    Args:
      config: the config of the run.
      workdir: directory of the run.

    Raises:
      ConfigError: the config names no weights, or they cannot be read or describe no model; or keys
        contradict them, which the line lists.
    """
    if config.model.name != WEIGHTS:
        return config
    with distributed.all_or_none():
        theirs, address = _model_of_weights(config, workdir)
        values = _keys_of(theirs)
        given = {key: _section(config, key)[key.rpartition(".")[2]] for key in values}
        wrong = [
            f"config.{key} is {given[key]!r}, and {value!r} in the weights"
            for key, value in values.items()
            if given[key] and given[key] != value and key not in _ADAPTED
        ]
        if wrong:
            raise ConfigError(
                f"{'; '.join(wrong)}: leave these keys out, or name another model than that of the weights"
            )
    settled = config.copy_and_resolve_references()
    for key, value in values.items():
        _section(settled, key)[key.rpartition(".")[2]] = given[key] or value
    settled.model.name = _name(theirs)
    if not settled.data.tokenizer and theirs.text.vocab_size != VOCABULARY_SIZE:
        settled.data.tokenizer = interop.tokenizer(address)
    return settled


def keep_tokenizer(config: ConfigDict, workdir: Path) -> ConfigDict:
    """Returns the config whose `data.tokenizer` is the copy in the workdir, which a run makes when it begins.

    All processes must call it.

    Raises:
      ConfigError: the tokenizer cannot be read, or differs from the copy.
    """
    given = config.data.tokenizer
    if not given:
        return config
    own = workdir / f"tokenizer{'.json' if given.endswith('.json') else '.model'}"

    def copy() -> None:
        try:
            content = files.read_whole(given, _LARGEST_TOKENIZER)
        except FileNotFoundError as error:
            if own.exists():  # a run resumes without it
                return
            raise ConfigError(
                f"config.data.tokenizer={mask_credentials(given)!r} does not exist: give a tokenizer.json or "
                "a model of SentencePiece, such as the one next to SigLIP's weights"
            ) from error
        except (OSError, ValueError, ModuleNotFoundError) as error:
            shown = mask_credentials(f"{given!r}: {one_line(error)}")
            raise ConfigError(f"config.data.tokenizer={shown}") from error
        if own.exists() and own.read_bytes() == content:
            return
        begun = next(workdir.glob("tokenizer.*"), None)
        if begun and saved_steps(workdir):
            raise ConfigError(
                f"config.data.tokenizer={mask_credentials(given)!r} differs from {begun}, with which the run "
                "began: leave it out, or use another --workdir"
            )
        write_atomically(own, content)

    distributed.first_does(copy)
    settled = config.copy_and_resolve_references()
    settled.data.tokenizer = str(own)
    return settled


def _section(config: ConfigDict, key: str) -> ConfigDict:
    """The section that holds a key."""
    for section in key.split(".")[:-1]:
        config = config[section]
    return config


def _model_of_weights(config: ConfigDict, workdir: Path) -> tuple[clip.CLIPConfig, str]:
    """The model of the run in the workdir if it began with these weights, else of these; and its address."""
    c = config.checkpoint
    address = (c.init_from or c.resume).removeprefix("file://")
    if not address:
        raise ConfigError(
            f"config.model.name={WEIGHTS!r} needs weights: set config.checkpoint.init_from, or name the model"
        )
    path = workdir / "config.json"
    if path.exists():
        begun = config_lib.saved_section(path, "checkpoint")
        if begun.get("init_from") == mask_credentials(c.init_from):
            address = str(workdir)
    if address != str(workdir) and not is_run(address):
        return _described(address), address
    theirs = model_of_run(address)
    if theirs is None:
        raise ConfigError(
            f"config.{KEY}={address!r} has no config.json: set config.model.name to the model of the run"
        )
    return theirs, address


def _described(address: str) -> clip.CLIPConfig:
    """The model configuration of other libraries' weights."""
    with unreadable(address):
        try:
            if "://" not in address:
                return interop.configuration(address)
            with tempfile.TemporaryDirectory() as folder:
                return interop.configuration(fetched(address, Path(folder)))
        except interop.NoConfig as error:
            raise ConfigError(
                f"config.{KEY}={address!r} has no config file that describes the model: set "
                "config.model.name and config.model.gelu (OpenAI's weights: quick), or add the file"
            ) from error


def _name(theirs: clip.CLIPConfig) -> str:
    """The name of the model with the same towers, or `WEIGHTS`."""

    def sizes(cfg: clip.CLIPConfig) -> tuple:
        towers = ((t.width, t.layers, t.heads, t.mlp_ratio) for t in (cfg.vision, cfg.text))
        return cfg.vision.patch_size, cfg.embed_dim, *towers

    return next(
        (name for name, cfg in clip.CONFIGS.items() if sizes(cfg) == sizes(theirs)), WEIGHTS
    )


def _keys_of(theirs: clip.CLIPConfig) -> dict[str, Any]:
    """The config keys that describe a model."""
    keys: dict[str, Any] = {
        f"model.{tower}.{name}": getattr(getattr(theirs, tower), name)
        for tower, more in (("vision", ("patch_size", *_FITTING)), ("text", ("vocab_size",)))
        for name in ("width", "layers", "heads", "mlp_ratio", *more)
    }
    return keys | {
        "model.architecture": theirs.architecture,
        "model.embed_dim": theirs.embed_dim,
        "model.gelu": theirs.gelu,
        "model.layer_scale": theirs.layer_scale is not None,
        "model.qk_norm": theirs.qk_norm,
        "data.image_size": theirs.vision.image_size,
        "data.context_length": theirs.text.context_length,
        "train.loss": "softmax" if theirs.init_logit_bias is None else "sigmoid",
    }
