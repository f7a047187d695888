"""The config of a run: command-line parsing, and every check that can be made before training.

Each mistake is one `ConfigError`, whose message is one line: what is wrong, the value, the remedy.

`ml_collections.config_flags` parses the same command line through absl. It reports an unknown key with a
traceback, a wrong value with two lines and exit code 1, and reads a tuple as a quoted Python literal. So
`parse`, `load` and `_override` stay here; the types and the ranges are in `swjax.training.keys`.
"""

import contextlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ml_collections import ConfigDict

from swjax.training.errors import ConfigError, OtherArrays, RunError
from swjax.training.keys import KEYS, SOURCES, Key, check_values, choice, suggest

__all__ = ["ConfigError", "RunError", "choice", "describe_keys", "load", "parse", "validate"]

COMMON = Path(__file__).resolve().parents[2] / "configs" / "common.py"
UNITS = ("steps", "epochs", "examples")
MAX_STEPS = 10**9

logger = logging.getLogger(__name__)


def parse(argv: list[str]) -> tuple[ConfigDict, Path]:
    """Parses `PROGRAM --config=FILE.py[:ARG] --workdir=DIR [--config.section.key=VALUE ...]`.

    Args:
      argv: the command line, program name first.

    Returns:
      The locked config with the overrides applied, and the working directory.

    Raises:
      ConfigError: anything that cannot be parsed, or a value out of its range.
    """
    flags, overrides = {}, []
    for argument in argv[1:]:
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not equals:
            raise ConfigError(f"unexpected argument {argument!r}: write every one as --flag=value")
        if name.startswith("config."):
            overrides.append((name.removeprefix("config."), value))
        elif name in ("config", "workdir"):
            flags[name] = value
        else:
            raise ConfigError(f"unknown flag {name!r}: {suggest(name, ('config', 'workdir'))}")
    if not flags.get("config"):
        raise ConfigError("no config: pass --config=configs/openmoji.py (--help shows examples)")
    if not flags.get("workdir"):
        raise ConfigError("no working directory: pass --workdir=runs/NAME")
    workdir = local_path("--workdir", flags["workdir"])
    return load(flags["config"], overrides), workdir


def local_path(name: str, address: str) -> Path:
    """The path that a flag or a config key names: a plain one, or one as file://.

    Args:
      name: of the flag or the key, for the message.
      address: its value.

    Raises:
      ConfigError: the address is of another file system, which has no locks and no files that grow.

    >>> local_path("--workdir", "file:///tmp/run").as_posix()
    '/tmp/run'
    """
    protocol, separator, rest = address.partition("://")
    if separator and protocol != "file":
        raise ConfigError(
            f"{name}={address!r} must be local, because a run locks its files and appends to them: mount "
            f"{protocol}:// and give the path; config.checkpoint.mirror copies a local run there"
        )
    return Path(unquote(rest)) if separator else Path(address)


def load(file: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Runs `get_config` of a Python file and overrides some keys.

    A warm-up that the overrides leave out and that does not fit into their duration is scaled with it.

    Args:
      file: path, and after a colon the argument of `get_config`, if it takes one.
      overrides: (key, value) pairs, as in ("train.steps", "100").

    Returns:
      The config, locked.

    Raises:
      ConfigError: no such file or key, a value of another type or out of its range, an error in the file.
    """
    config = _run_file(file)
    durations = config.train.copy_and_resolve_references() if "train" in config else None
    for key, text in overrides:
        _override(config, key, text)
    check_values(_flatten(config))
    if durations is not None:
        _fit_warmup(config, durations, {key for key, _ in overrides})
    return config.lock()


def _run_file(file: str) -> ConfigDict:
    path, _, argument = file.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"config file {path!r} does not exist{_nearest_config(Path(path))}")
    spec = importlib.util.spec_from_file_location("swjax_config", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"config file {path!r} must be a Python file, one that ends with .py")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(*([argument] if argument else []))
    except Exception as error:  # whatever a user's file does wrong
        raise ConfigError(f"config file {file!r}: {_one_line(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"config file {file!r}: get_config returns {type(config).__name__}: return a ConfigDict"
        )
    return config


def _nearest_config(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    known = sorted(str(p) for p in folder.glob("*.py") if p.stem != "common")
    return f": {suggest(str(path), known)}" if known else ""


def _override(config: ConfigDict, key: str, text: str) -> None:
    """Sets one key to the value that a text means."""
    *sections, name = key.split(".")
    part, found = config, "config"
    for section in [*sections, name]:
        if not isinstance(part, ConfigDict):
            raise ConfigError(f"config.{key} does not exist: {found} is a value, not a section")
        if section not in part:
            raise ConfigError(f"config.{key} does not exist: {suggest(section, list(part))}")
        part, found, above = part[section], f"{found}.{section}", part
    if isinstance(part, ConfigDict):
        raise ConfigError(
            f"config.{key}={text!r} sets a section: set one of its keys, {', '.join(part)}"
        )
    accepted = KEYS.get(key) or Key(type(part))  # a part of a mixture has keys of its own
    try:
        above[name] = accepted.read(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"config.{key}={text!r} must be {accepted.rule()}") from error


def _fit_warmup(config: ConfigDict, durations: ConfigDict, overridden: set[str]) -> None:
    """Scales a warm-up that does not fit into a duration given on the command line.

    Args:
      config: is changed.
      durations: the section `train` of the config's file.
      overridden: the keys given on the command line.
    """
    for unit in UNITS:
        key, duration = f"warmup_{unit}", config.train[unit]
        warmup, before = config.schedule[key], durations[unit]
        chosen = f"schedule.{key}" in overridden or f"train.{unit}" not in overridden
        if chosen or not 0 < duration <= warmup < before:
            continue
        config.schedule[key] = type(warmup)(warmup * duration / before)
        logger.warning(
            "config.schedule.%s=%s does not fit into config.train.%s=%s: scaled to %s, the same share; "
            "set it to choose another",
            key, warmup, unit, duration, config.schedule[key],
        )  # fmt: skip


def _flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """The values by key, as in {"train.steps": 20}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class Description(NamedTuple):
    """One config key for a reference page."""

    name: str
    default: Any
    type: str
    accepts: str
    meaning: str


def describe_keys(file: Path = COMMON) -> list[Description]:
    """Every config key: its default, type, range and meaning.

    Args:
      file: configs/common.py. The meaning of a key is the comment at the end of its line, or the lines of
        comment above it.

    >>> key = describe_keys()[0]
    >>> key.name, key.default, key.type
    ('config.model.name', 'tiny', 'str')
    """
    defaults, meanings, above = _flatten(load(str(file))), dict[str, str](), list[str]()
    for line in file.read_text().splitlines():
        code, _, comment = line.strip().partition("# ")
        assigned = re.match(r"config\.([\w.]+) = ", code)
        if assigned:
            meanings.setdefault(assigned[1], comment or " ".join(above))
        above = [*above, comment] if comment and not code else []
    return [
        Description(f"config.{name}", defaults[name], key.kind.__name__, key.rule(), meanings[name])
        for name, key in KEYS.items()
    ]


def steps(section: ConfigDict, prefix: str, *, batch_size: int, dataset_size: int) -> int:
    """A duration in steps, from one of `{prefix}steps`, `{prefix}epochs`, `{prefix}examples`.

    Args:
      section: config.train or config.schedule, which holds the three keys; 0 means "not this one".
      prefix: what precedes the unit in the keys: "" in config.train, "warmup_" in config.schedule.
      batch_size: examples a step, over all devices.
      dataset_size: examples an epoch.

    Raises:
      ConfigError: more than one of them is set, or the one that is set is less than a step.

    >>> train = ConfigDict({"steps": 0, "epochs": 2.0, "examples": 0})
    >>> steps(train, "", batch_size=10, dataset_size=100)
    20
    """
    where = "config.schedule" if prefix else "config.train"
    given = {prefix + unit: section[prefix + unit] for unit in UNITS if section[prefix + unit]}
    if len(given) > 1:
        listed = " and ".join(f"{where}.{key}={value}" for key, value in given.items())
        raise ConfigError(f"{listed} give a duration more than once: set all but one of them to 0")
    if not given:
        return 0
    ((key, value),) = given.items()
    per_unit = {"steps": 1.0, "epochs": dataset_size / batch_size, "examples": 1 / batch_size}
    each = per_unit[key.removeprefix(prefix)]
    number = round(value * each)
    if not 1 <= number <= MAX_STEPS:
        raise ConfigError(
            f"{where}.{key}={value} is {value * each:.3g} steps of {batch_size} examples: give at least "
            f"{1 / each:.3g} and at most {MAX_STEPS / each:.3g}"
        )
    return number


def validate(config: ConfigDict, *, batch_shards: int) -> None:
    """Checks what needs neither the model nor the data: choices, ranges, divisibility.

    Args:
      batch_shards: devices the batch is split over.

    Raises:
      ConfigError: the first violated invariant, in one line.
    """
    check_values(_flatten(config))
    _check_optimizer(config)
    _check_batch(config, batch_shards)
    _check_data(config)
    for key, address in (
        ("checkpoint.resume", config.checkpoint.resume),
        ("data.dir", config.data.dir),
        ("train.compilation_cache", config.train.compilation_cache),
    ):
        if "://" in address:  # read as a path, "file:" would be a folder
            local_path(f"config.{key}", address)
            raise ConfigError(f"config.{key}={address!r} must be a path: leave out file://")
    if config.checkpoint.resume and config.checkpoint.init_from:
        raise ConfigError(
            f"config.checkpoint.resume={config.checkpoint.resume!r} and "
            f"config.checkpoint.init_from={config.checkpoint.init_from!r} exclude each other: resume takes "
            f"the parameters, the moments and the step, init_from the parameters only; set one to ''"
        )


def _check_optimizer(config: ConfigDict) -> None:
    optimizer = config.optimizer
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


def _check_batch(config: ConfigDict, batch_shards: int) -> None:
    train = config.train
    if train.loss == "softmax" and train.batch_size == 1:
        raise ConfigError(
            "config.train.batch_size=1 leaves the softmax loss no negative pairs, and its gradient is 0: "
            "use at least 2, or config.train.loss='sigmoid'"
        )
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


def _check_data(config: ConfigDict) -> None:
    """Checks the parts of the mixture, and that `eval.data` names a data set with a split to evaluate on."""
    data = config.data
    for name, part in data.mixture.items():
        if "name" in part:
            choice(f"data.mixture.{name}.name", part["name"], SOURCES)
    if not config.eval.data:
        return
    choice("eval.data", config.eval.data, [*SOURCES, *data.mixture])
    part = data.mixture.get(config.eval.data, {"name": config.eval.data})
    section = data[part["name"]]
    splits = {**section.get("splits", {}), **part.get("splits", {})}
    if "splits" in section and not splits.get("val") and not splits.get("test"):
        raise ConfigError(
            f"config.eval.data={config.eval.data!r} has no split to evaluate on: set "
            f"config.data.{part['name']}.splits.val or .test"
        )


@contextlib.contextmanager
def blame(key: str) -> Iterator[None]:
    """Turns an error about a value, or a missing package, into one about the config key."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, ModuleNotFoundError) as error:
        raise ConfigError(f"config.{key}: {' '.join(str(error).split())}") from error


def to_json(config: ConfigDict) -> str:
    """The config as stable, readable JSON (tuples become lists)."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def read_json(what: str, text: str, *, remedy: str, **types: Any) -> dict:
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
             "train.compilation_cache:", "train.profile_steps:")  # fmt: skip


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
    found = differences(old, json.loads(to_json(config)))
    return [change for change in found if not change.startswith(UNCOUNTED)]


def differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    """What differs between two configs, as `changes` gives it, without the exceptions."""
    found = []
    chosen = prefix.startswith(CHOSEN)
    for key in sorted(old.keys() | new.keys() if chosen else old.keys() & new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return found


# The keys that decide which arrays a run's state has. What else changes may be resumed.
SHAPING = ("model.", "data.image_size:", "data.context_length:", "optimizer.name:",
           "optimizer.grad_clip_norm:", "optimizer.loss_scaling:", "optimizer.freeze:", "train.loss:",
           "train.ema_decay:")  # fmt: skip


@contextlib.contextmanager
def blame_changes(workdir: Path, config: ConfigDict) -> Iterator[None]:
    """Turns an error about the arrays of a checkpoint into one about the config keys that changed them.

    Args:
      workdir: of the run whose checkpoint is restored.
      config: of this run.

    Raises:
      ConfigError: the changed keys; without one, the error itself.
    """
    try:
        yield
    except OtherArrays as error:
        path = workdir / "config.json"
        changed = changes(path.read_text(errors="replace"), config) if path.exists() else []
        shaping = [f"config.{change}" for change in changed if change.startswith(SHAPING)]
        if not shaping:
            raise
        raise ConfigError(
            f"the checkpoints in {workdir} are of another config: {'; '.join(shaping[:5])}: change it "
            f"back, or use another --workdir"
        ) from error
