"""The config of a run: command-line parsing, and every check that can be made before training.

Each mistake is one `ConfigError`, whose message is one line: what is wrong, the value, the remedy.
"""

import contextlib
import difflib
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

UNITS = ("steps", "epochs", "examples")


class ConfigError(ValueError):
    """A mistake in a config or on the command line; `str(error)` is one line for the user."""


class RunError(RuntimeError):
    """What a run stands on failed, such as its disk; `str(error)` is one line for the user."""


def parse(argv: list[str]) -> tuple[ConfigDict, Path]:
    """Parses `PROGRAM --config=FILE.py[:ARG] --workdir=DIR [--config.section.key=VALUE ...]`.

    Args:
      argv: the command line, program name first.

    Returns:
      The locked config with the overrides applied, and the working directory.

    Raises:
      ConfigError: anything that cannot be parsed.
    """
    flags, overrides = {}, []
    for argument in argv[1:]:
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not equals:
            raise ConfigError(f"unexpected argument {argument!r}: write every one as --flag=value")
        if name.startswith("config."):
            overrides.append((name.removeprefix("config."), value))
        else:
            flags[_known("flag", name, ("config", "workdir"))] = value
    if not flags.get("config"):
        raise ConfigError("no config: pass --config=configs/openmoji.py (--help shows examples)")
    if not flags.get("workdir"):
        raise ConfigError("no working directory: pass --workdir=runs/NAME")
    return load(flags["config"], overrides), Path(flags["workdir"])


def load(file: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Runs `get_config` of a Python file and overrides some keys.

    Args:
      file: path, and after a colon the argument of `get_config`, if it takes one.
      overrides: (key, value) pairs, as in ("train.steps", "100").

    Returns:
      The config, locked.

    Raises:
      ConfigError: no such file or key, a value of another type, an error in the file.
    """
    path, _, arg = file.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"config file {path!r} does not exist{_nearest_config(Path(path))}")
    spec = importlib.util.spec_from_file_location("swjax_config", path)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(*([arg] if arg else []))
    except Exception as error:  # whatever a user's file does wrong
        raise ConfigError(f"config file {file!r}: {_one_line(error)}") from error
    for key, value in overrides:
        *sections, name = key.split(".")
        part = config
        for section in sections:
            part = part[_known("config section", section, part)]
            if not isinstance(part, ConfigDict):
                raise ConfigError(f"config.{key} does not exist: config.{section} has no keys")
        part[name] = _cast(key, value, part[_known("config key", name, part)])
    return config.lock()


def _known(what: str, name: str, names) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name, list(names), n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    raise ConfigError(f"unknown {what} {name!r}: {remedy}")


def _cast(key: str, text: str, old):
    """The text as a value of the type that the key has now."""
    kind = type(old)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is tuple:
            return tuple(text.split(",")) if text else ()
        if kind in (int, float, str):
            return kind(text)
    except (KeyError, ValueError) as error:
        examples = {bool: "true or false", int: "a whole number", float: "a number"}
        raise ConfigError(f"config.{key}={text!r} must be {examples[kind]}") from error
    raise ConfigError(f"config.{key} is a section: set one of its keys, {', '.join(old)}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _nearest_config(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    known = sorted(p.stem for p in folder.glob("*.py") if p.stem != "common")
    near = difflib.get_close_matches(path.stem, known, n=1)
    if near:
        return f": did you mean {folder / near[0]}.py?"
    return f": {folder} has {', '.join(known)}" if known else ""


def choice(key: str, value: str, known) -> str:
    """Returns `value` if it is one of `known`.

    Raises:
      ConfigError: otherwise, naming the key, the choices and the nearest one.

    >>> choice("optimizer.name", "adamw", ("stable_adamw", "adamw"))
    'adamw'
    """
    if value in known:
        return value
    near = difflib.get_close_matches(value, list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(map(str, known))}"
    raise ConfigError(f"config.{key}={value!r} is unknown: {hint}")


def steps(section: ConfigDict, prefix: str, *, batch_size: int, dataset_size: int) -> int:
    """A duration in steps, from one of `{prefix}steps`, `{prefix}epochs`, `{prefix}examples`.

    Args:
      section: the part of the config that holds the three keys; 0 means "not this one".
      prefix: what precedes the unit in the keys, e.g. "warmup_".
      batch_size: examples a step, over all devices.
      dataset_size: examples an epoch.

    Raises:
      ConfigError: more than one of them is set, or one is negative.

    >>> train = ConfigDict({"steps": 0, "epochs": 2.0, "examples": 0})
    >>> steps(train, "", batch_size=10, dataset_size=100)
    20
    """
    given = {prefix + unit: section[prefix + unit] for unit in UNITS if section[prefix + unit]}
    if len(given) > 1:
        listed = " and ".join(f"{key}={value}" for key, value in given.items())
        raise ConfigError(
            f"config gives a duration more than once, {listed}: set all but one of them to 0"
        )
    (key, value) = next(iter(given.items()), (prefix + "steps", 0))
    if value < 0:
        raise ConfigError(f"config.{key}={value} is negative: a duration is 0 or more")
    scale = {"steps": 1.0, "epochs": dataset_size / batch_size, "examples": 1 / batch_size}
    return round(value * scale[key.removeprefix(prefix)])


CHOICES = {
    "model.dtype": ("float32", "bfloat16", "float16"),
    "data.emoji.task": ("mixed", "strict"),
    "data.shuffle": ("global", "shard"),
    "data.on_bad": ("skip", "stop"),
    "optimizer.name": ("stable_adamw", "adamw"),
    "optimizer.loss_scaling": ("", "per_tensor", "dynamic"),
    "schedule.name": ("cosine", "constant"),
    "train.loss": ("softmax", "sigmoid"),
    "train.reduce_dtype": ("float32", "bfloat16"),
    "train.nan_policy": ("stop", "skip", "rollback"),
}

RANGES = (
    (
        "train.batch_size train.accumulation eval.batch_size log.every_steps checkpoint.keep "
        "data.image_size data.context_length data.shuffle_shards",
        lambda value: value >= 1,
        "must be at least 1",
    ),
    ("optimizer.learning_rate optimizer.eps", lambda value: value > 0, "must be positive"),
    (
        "optimizer.loss_scale optimizer.loss_scale_growth_steps",
        lambda value: value >= 1,
        "must be at least 1",
    ),
    ("optimizer.b2_power", lambda value: 0 <= value <= 1, "must lie in [0, 1]"),
    (
        "optimizer.b1 optimizer.b2 train.ema_decay model.patch_dropout",
        lambda value: 0 <= value < 1,
        "must lie in [0, 1)",
    ),
    ("data.max_bad_share", lambda value: 0 <= value <= 1, "must lie in [0, 1]"),
    (
        "optimizer.weight_decay optimizer.grad_clip_norm optimizer.clip_threshold "
        "eval.every_steps eval.captions_per_image checkpoint.every_steps data.workers "
        "diagnostics.every_steps",
        lambda value: value >= 0,
        "must not be negative",
    ),
)


def validate(config: ConfigDict, *, batch_shards: int) -> None:
    """Checks what needs neither the model nor the data: choices, ranges, divisibility.

    Args:
      batch_shards: devices the batch is split over.

    Raises:
      ConfigError: the first violated invariant, in one line.
    """
    train, optimizer = config.train, config.optimizer
    for key, known in CHOICES.items():
        choice(key, _get(config, key), known)
    for keys, holds, rule in RANGES:
        for key in keys.split():
            if not holds(_get(config, key)):
                raise ConfigError(f"config.{key}={_get(config, key)} {rule}")
    if optimizer.grad_clip_norm and optimizer.name == "stable_adamw" and optimizer.clip_threshold:
        raise ConfigError(
            f"config.optimizer clips twice, grad_clip_norm={optimizer.grad_clip_norm} and "
            f"clip_threshold={optimizer.clip_threshold}: they are alternatives, set one to 0"
        )
    if optimizer.b2_power and optimizer.name != "stable_adamw":
        raise ConfigError(
            f"config.optimizer.b2_power={optimizer.b2_power} needs name='stable_adamw', not "
            f"{optimizer.name!r}: set clip_threshold to 0 for that schedule in plain AdamW"
        )
    if config.model.dtype == "float16" and not optimizer.loss_scaling:
        raise ConfigError(
            "config.model.dtype='float16' needs its loss scaled, or small gradients are 0: set "
            "optimizer.loss_scaling to 'per_tensor' or 'dynamic'"
        )
    for pattern in optimizer.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"config.optimizer.freeze={pattern!r} is no regular expression: {error}"
            ) from error
    shards = batch_shards * train.accumulation
    if train.batch_size % shards:
        raise ConfigError(
            f"config.train.batch_size={train.batch_size} does not divide into {batch_shards} "
            f"device(s) x accumulation={train.accumulation}: use a multiple of {shards}"
        )
    if config.eval.batch_size % batch_shards:
        raise ConfigError(
            f"config.eval.batch_size={config.eval.batch_size} does not divide into {batch_shards} "
            f"device(s): use a multiple of {batch_shards}"
        )


@contextlib.contextmanager
def blame(key: str):
    """Turns an error about a value, or a missing package, into one about the config key."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, ModuleNotFoundError) as error:
        raise ConfigError(f"config.{key}: {' '.join(str(error).split())}") from error


def _get(config: ConfigDict, key: str):
    for name in key.split("."):
        config = config[name]
    return config


def to_json(config: ConfigDict) -> str:
    """The config as stable, readable JSON (tuples become lists)."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def read_json(what: str, text: str, *, remedy: str, **types) -> dict:
    """The object that a file of a run holds.

    Args:
      what: names the file.
      text: what it holds.
      remedy: against damage.
      **types: of the keys that must be there.

    Raises:
      ConfigError: it holds no such object: the file is damaged.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} of this run is damaged: {_one_line(error)}: {remedy}") from error
    whole = isinstance(found, dict)
    if not whole or not all(isinstance(found.get(key), kind) for key, kind in types.items()):
        keys = f" with {' and '.join(types)}" if types else ""
        raise ConfigError(f"{what} of this run is damaged: it holds no object{keys}: {remedy}")
    return found


# The parts of a mixture have names, and keys, that the user chooses.
CHOSEN = "data.mixture."
# What may change between a run's parts without changing what it computes.
UNCOUNTED = ("checkpoint.", "data.dir:", "data.workers:", "diagnostics.", "log.", "mesh.", "report.",
             "train.compilation_cache:")  # fmt: skip


def changes(saved: str, config: ConfigDict) -> list[str]:
    """What differs between a run's config.json and a config, as `key: old -> new`.

    A key that one of them lacks is of another version of swjax, and no difference, but in `CHOSEN`.

    >>> config = ConfigDict({"model": {"recipe": "standard", "new": ""}, "log": {"every_steps": 2}})
    >>> changes('{"model": {"recipe": "switchback"}, "log": {"every_steps": 1}}', config)
    ["model.recipe: 'switchback' -> 'standard'"]

    Raises:
      ConfigError: what was saved is no config any more.
    """
    old = read_json("config.json", saved, remedy="put a copy there, or remove it")
    found = _differences(old, json.loads(to_json(config)), "")
    return [change for change in found if not change.startswith(UNCOUNTED)]


def _differences(old: dict, new: dict, prefix: str) -> list[str]:
    found = []
    chosen = prefix.startswith(CHOSEN)
    for key in sorted(old.keys() | new.keys() if chosen else old.keys() & new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return found
