"""The config of a run: command-line parsing, and every check that can be made before training.

Each mistake is one `ConfigError`, whose message is one line: what is wrong, the value, the remedy.
"""

import ast
import contextlib
import difflib
import json
import re
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

UNITS = ("steps", "epochs", "examples")


class ConfigError(ValueError):
    """A mistake in a config or on the command line; `str(error)` is one line for the user."""


def parse(argv: list[str]) -> tuple[ConfigDict, Path]:
    """Parses `PROGRAM --config=FILE.py[:ARG] --workdir=DIR [--config.section.key=value ...]`.

    Args:
      argv: the command line, program name first.

    Returns:
      The locked config with the overrides applied, and the working directory.

    Raises:
      ConfigError: anything that cannot be parsed, named in one line.
    """
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "config file", values, lock_config=True)
    flags.DEFINE_string("workdir", None, "directory of the run", values)
    file = next((a.partition("=")[2] for a in argv if re.match("--?config=", a)), "")
    path = file.partition(":")[0]
    if not path:
        raise ConfigError(
            "no config given: pass --config=configs/openmoji.py (--help shows examples)"
        )
    if not Path(path).is_file():
        raise ConfigError(f"config file {path!r} does not exist{_nearest_config(Path(path))}")
    try:
        positional = values([_quote_words(a) for a in argv])[1:]
        config = values.config
    except flags.Error as error:
        raise ConfigError(_one_line(error)) from error
    except (KeyError, AttributeError) as error:
        raise ConfigError(_unknown_key(error)) from error
    except (ConfigError, SyntaxError, TypeError, ValueError, ImportError, NameError) as error:
        raise ConfigError(f"config {file!r}: {_one_line(error)}") from error
    if positional:
        raise ConfigError(
            f"unexpected argument {positional[0]!r}: every argument is a --flag=value"
        )
    if not values.workdir:
        raise ConfigError("no working directory given: pass --workdir=runs/NAME")
    return config, Path(values.workdir)


def _quote_words(arg: str) -> str:
    """Lets a tuple of patterns be written bare: --config.optimizer.freeze=text/.*,logit_scale."""
    name, equals, value = arg.partition("=")
    if name != "--config.optimizer.freeze" or not value:
        return arg
    try:
        ast.literal_eval(value)
    except (SyntaxError, ValueError):
        value = repr(tuple(value.split(",")))
    return name + equals + value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _unknown_key(error: Exception) -> str:
    """ml_collections' two-line error about a missing key, as one line."""
    names = re.findall(r"[\w.]+", str(error))
    guess = re.search(r'Did you mean "(\w+)"', str(error).replace("\\", ""))
    remedy = f"did you mean {guess[1]!r}?" if guess else "configs/common.py lists every key"
    return f"unknown config key {names[0] if names else error!r}: {remedy}"


def _nearest_config(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    known = sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("common", "__init__"))
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
    near = difflib.get_close_matches(str(value), list(known), n=1)
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


def validate(config: ConfigDict, *, batch_shards: int) -> None:
    """Checks what needs neither the model nor the data: choices, ranges, divisibility.

    Args:
      batch_shards: devices the batch is split over.

    Raises:
      ConfigError: the first violated invariant, in one line.
    """
    train, optimizer = config.train, config.optimizer
    choice("optimizer.name", optimizer.name, ("stable_adamw", "adamw"))
    choice("schedule.name", config.schedule.name, ("cosine", "constant"))
    choice("train.loss", train.loss, ("softmax", "sigmoid"))
    choice("train.nan_policy", train.nan_policy, ("stop", "skip", "rollback"))
    for key in (
        "train.batch_size",
        "train.accumulation",
        "eval.batch_size",
        "log.every_steps",
        "checkpoint.keep",
        "data.image_size",
        "data.context_length",
    ):
        _require(config, key, lambda v: v >= 1, "must be at least 1")
    for key in ("optimizer.learning_rate", "optimizer.eps"):
        _require(config, key, lambda v: v > 0, "must be positive")
    for key in ("optimizer.b1", "optimizer.b2", "train.ema_decay", "model.patch_dropout"):
        _require(config, key, lambda v: 0 <= v < 1, "must lie in [0, 1)")
    for key in (
        "optimizer.weight_decay",
        "optimizer.grad_clip_norm",
        "optimizer.clip_threshold",
        "eval.every_steps",
        "checkpoint.every_steps",
    ):
        _require(config, key, lambda v: v >= 0, "must not be negative")
    if optimizer.grad_clip_norm and optimizer.name == "stable_adamw" and optimizer.clip_threshold:
        raise ConfigError(
            f"config.optimizer clips twice, grad_clip_norm={optimizer.grad_clip_norm} and "
            f"clip_threshold={optimizer.clip_threshold}: they are alternatives, set one to 0"
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


@contextlib.contextmanager
def blame(key: str):
    """Turns a ValueError raised inside into a `ConfigError` that names the config key behind it."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.{key}: {_one_line(error)}") from error


def _require(config: ConfigDict, key: str, holds, rule: str) -> None:
    section, name = key.split(".")
    if not holds(config[section][name]):
        raise ConfigError(f"config.{key}={config[section][name]} {rule}")


def to_json(config: ConfigDict) -> str:
    """The config as stable, readable JSON (tuples become lists)."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


# What may change between a run's parts without changing what it computes.
UNCOUNTED = ("checkpoint.", "data.dir:", "data.workers:", "log.", "mesh.", "report.",
             "train.compilation_cache:")  # fmt: skip


def changes(saved: str, config: ConfigDict) -> list[str]:
    """What differs between a run's config.json and a config, as `key: old -> new`.

    >>> config = ConfigDict({"model": {"recipe": "standard"}, "log": {"every_steps": 2}})
    >>> changes('{"model": {"recipe": "switchback"}, "log": {"every_steps": 1}}', config)
    ["model.recipe: 'switchback' -> 'standard'"]
    """
    found = _differences(json.loads(saved), json.loads(to_json(config)), "")
    return [change for change in found if not change.startswith(UNCOUNTED)]


def _differences(old: dict, new: dict, prefix: str) -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return found
