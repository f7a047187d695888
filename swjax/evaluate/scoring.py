"""Applies the evaluation of a training run to saved weights."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from swjax import data, inference
from swjax.data import Fitting
from swjax.models import sharding
from swjax.safe_files import one_line
from swjax.training import config as config_lib
from swjax.training.config import ConfigError
from swjax.training.evaluation import Evaluator
from swjax.training.inputs import open_source
from swjax.training.keys import SOURCES

SPLITS = ("val", "test")
_OF_THE_MODEL = ("data.image_size", "data.context_length", "data.tokenizer")


def score(
    *,
    workdir: str | Path = "",
    weights: str | Path = "",
    sets: Sequence[str] = (),
    splits: Sequence[str] | None = None,
    overrides: Sequence[tuple[str, str]] = (),
) -> dict[str, float]:
    """Scores the newest checkpoint of a run, or other CLIP weights, on one device.

    The evaluation code is that of training: on the same kind of device, the scores of a run equal the scores
    that training logs at the same step.

    Args:
      workdir: directory of a run; its config names the data.
      weights: weights for `swjax.inference.load`: a file of open_clip, OpenAI or Hugging Face, its folder,
        the name of a model, or a file by `swjax.inference.save`.
      sets: addresses of labelled sets, see `swjax.data.labelled`; () uses the sets of `eval.zeroshot`.
      splits: splits of the config's data set, for retrieval; () skips retrieval. None: those that it has.
      overrides: (key, value) pairs of the config's sections `data` and `eval`, such as ("data.name", "tfds").

    Returns:
      {name: score}, with the names of `WORKDIR/metrics.jsonl`.

    Raises:
      ConfigError: not exactly one of `workdir` and `weights` is given, there is nothing to score, an override
        is unknown or has no effect, the data set lacks a named split, or weights or data cannot be opened.
    """
    if bool(workdir) == bool(weights):
        raise ConfigError("pass exactly one of --workdir=RUN and --weights=FILE")
    config = config_of(workdir, overrides)
    for key, _ in overrides:
        if not key.startswith(("data.", "eval.")) or key in _OF_THE_MODEL:
            raise ConfigError(
                f"config.{key} does not change scores, because the weights determine the model: leave it out"
            )
    keys = [key for key, _ in overrides]
    if "data.name" in keys and "eval.data" not in keys and config.data.name != "mixture":
        config.eval.data = ""  # that of the run
    config_lib.check_data(config)
    _check_effect(config, keys)
    if sets:
        config.eval.zeroshot = tuple(sets)
    if splits == () and not config.eval.zeroshot:
        raise ConfigError(
            "nothing to score: pass --data=[NAME=]KIND:WHERE or --config.data.name=NAME"
        )
    try:
        encoder = inference.load(workdir or weights)
        model = encoder.model
        data.check_tokenizer(encoder.tokenizer, model.cfg.text.vocab_size)
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        reason = one_line(error)
        raise ConfigError(f"cannot score {str(workdir or weights)!r}: {reason}") from error
    config.data.image_size = model.cfg.vision.image_size
    config.data.context_length = model.cfg.text.context_length
    config.data.tokenizer = encoder.tokenizer
    config.model.vision.update(dataclasses.asdict(Fitting.of(model.cfg.vision)))
    for split in splits or ():
        if open_source(config, split) is None:
            raise ConfigError(
                f"the data set {config.eval.data or config.data.name!r} has no split {split!r}: set its "
                f"key splits.{split}, or leave --split={split} out"
            )
    graph, params = nnx.split(model)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    evaluate = Evaluator(config, graph, mesh)
    state = {"params": params, "step": jnp.int32(0)}
    scores: dict[str, float] = {}
    for split in (SPLITS if splits is None else splits) or ("",):
        scores |= evaluate(state, split).scores
    if not scores:
        raise ConfigError("nothing to score: the config names no val or test split: pass --data")
    return scores


def _check_effect(config: ConfigDict, keys: Sequence[str]) -> None:
    """Refuses keys of data sets that are not scored.

    Raises:
      ConfigError: names the first one.
    """
    name = config.eval.data or config.data.name
    part = config.data.mixture.get(name, {"name": name})
    for key in keys:
        section, _, option = key.removeprefix("data.").partition(".")
        of_part = key.startswith(f"data.mixture.{name}.")
        replaced = section != part["name"] or part.get(option) is not None
        if option and section in (*SOURCES, "mixture") and not of_part and replaced:
            own = (
                f"config.data.mixture.{name}" if name in config.data.mixture else "config.data.name"
            )
            raise ConfigError(
                f"config.{key} does not change scores, because {name!r} is scored: change {own}, or set "
                "config.eval.data to another data set"
            )


def config_of(workdir: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Loads the config of a run and applies overrides.

    Args:
      workdir: directory of the run; "" loads the defaults.
      overrides: (key, value) pairs.

    Raises:
      ConfigError: the directory has no config, or an override is invalid.
    """
    config = config_lib.load(str(config_lib.COMMON))
    if workdir:
        path = Path(workdir) / "config.json"
        if not path.is_file():
            raise ConfigError(f"{str(workdir)!r} is not a run: it has no config.json")
        text = path.read_text(errors="replace")
        saved = config_lib.read_json(
            "config.json", text, remedy="restore it from a copy", data=dict, eval=dict
        )
        with config.unlocked():
            _update(config, saved)
    config_lib.override(config, overrides)
    return config


def _update(config: ConfigDict, saved: dict[str, Any], prefix: str = "") -> None:
    """Sets the saved values; ignores keys that swjax no longer has."""
    for name, value in saved.items():
        key = f"{prefix}{name}"
        if key == "data.mixture":  # the user chooses its keys
            config[name] = ConfigDict(value)
        elif isinstance(value, dict) and isinstance(config.get(name), ConfigDict):
            _update(config[name], value, f"{key}.")
        elif name in config:
            config[name] = tuple(value) if isinstance(value, list) else value
