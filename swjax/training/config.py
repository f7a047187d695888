"""The config of a run: command-line parsing, and every check that is possible before training.

Each mistake raises one `ConfigError`, whose one-line message names the problem, the value and the remedy.

`ml_collections.config_flags` could parse the same command line through absl. But it reports an unknown key
with a traceback and a wrong value with two lines and exit code 1, and it reads a tuple as a quoted Python
literal. So this module keeps `parse`, `load` and `override`; `swjax.training.keys` reads values.
"""

import contextlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from ml_collections import ConfigDict

from swjax.safe_files import mask_credentials, one_line
from swjax.training.faults.errors import ConfigError, OtherArrays, RunError
from swjax.training.keys import COMMON, INSTALLED, KEYS, SOURCES, Key, check_values, choice, suggest

__all__ = ["COMMON", "ConfigError", "RunError", "choice", "load", "parse", "validate"]

UNITS = ("steps", "epochs", "examples")
# Keys that have an effect with some values of another key only.
NEEDED = {
    "optimizer.clip_threshold": ("optimizer.name", ("stable_adamw",)),
    "optimizer.coefficients": ("optimizer.name", ("muon",)),
    "schedule.decay": ("schedule.name", ("wsd", "rsqrt")),
    "schedule.floor": ("schedule.name", ("cosine", "linear", "wsd", "rsqrt")),
    "data.shuffle_shards": ("data.shuffle", ("shard",)),
}
MAX_STEPS = 10**9

logger = logging.getLogger(__name__)


def parse(argv: list[str]) -> tuple[ConfigDict, Path]:
    """Parses `PROGRAM --config=FILE.py[:ARG] --workdir=DIR [--config.section.key=VALUE ...]`; see `load`.

    Args:
      argv: the command line, starting with the program name.

    Returns:
      The locked config with the overrides applied, and the working directory.

    Raises:
      ConfigError: an argument cannot be parsed, or a value is out of range.
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
    """Converts the value of a flag or config key, a plain path or a file:// address, to a path.

    Args:
      name: name of the flag or key, for the message.
      address: the value.

    Raises:
      ConfigError: the address belongs to a remote file system, which has neither locks nor appends.

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
    """Runs `get_config` of a Python file, or of a config of swjax by its name, and applies overrides.

    If an override shortens the run so that the warm-up does not fit, and no override sets the warm-up, the
    warm-up is scaled with the duration.

    Args:
      file: path of the file or name such as "openmoji", optionally followed by a colon and the argument of
        `get_config`.
      overrides: (key, value) pairs, such as ("train.steps", "100").

    Returns:
      The config, locked.

    Raises:
      ConfigError: the file or a key does not exist, a value has a wrong type or is out of range, or the file
        raises an error.
    """
    config = _run_file(file)
    durations = config.train.copy_and_resolve_references() if "train" in config else None
    override(config, overrides)
    check_values(_flatten(config))
    if durations is not None:
        _fit_warmup(config, durations, {key for key, _ in overrides})
    return config.lock()


def _run_file(file: str) -> ConfigDict:
    path, _, argument = file.partition(":")
    own = COMMON.parent / f"{path}.py"
    if path.isidentifier() and own.is_file() and not Path(path).exists():
        path = str(own)
    if not Path(path).is_file():
        raise ConfigError(f"config file {path!r} does not exist{_nearest_config(Path(path))}")
    spec = importlib.util.spec_from_file_location("swjax_config", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"config file {path!r} must be a Python file: its name must end with .py")
    # A config may import modules of the working directory and of the folder above its own: configs.common.
    # Above the installed configs are swjax's own modules, such as swjax.optax, which must not replace others.
    folders = [os.getcwd(), str(Path(path).resolve().parent.parent)]
    if Path(path).resolve().parent == INSTALLED.resolve().parent:
        folders.pop()
    sys.path[:0] = folders
    copied = importlib.util.find_spec("configs") is None  # away from the other configs
    if copied:
        sys.modules["configs"] = ModuleType("configs")
        sys.modules["configs"].__path__ = [str(COMMON.parent)]
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise AttributeError(
                "it has no get_config: define a function that returns a ConfigDict"
            )
        config = module.get_config(*([argument] if argument else []))
    except Exception as error:  # a user's file may raise anything
        # For an unknown key ml_collections prints the whole section before the nearest key.
        reason = re.sub(r' Other fields present: .*?}"', "", one_line(error)).replace("\\n", " ")
        raise ConfigError(f"config file {file!r}: {type(error).__name__}: {reason}") from error
    finally:
        for folder in folders:
            sys.path.remove(folder)
        if copied:
            for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
                del sys.modules[name]
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"config file {file!r}: get_config returns {type(config).__name__}: return a ConfigDict"
        )
    return config


def _nearest_config(path: Path) -> str:
    if path.parent == Path(".") and not path.suffix:
        known = sorted(p.stem for p in COMMON.parent.glob("*.py") if p.stem != "common")
    else:
        folder = path.parent if path.parent.is_dir() else Path("configs")
        known = sorted(str(p) for p in folder.glob("*.py") if p.stem != "common")
    return f": {suggest(str(path), known)}" if known else ""


def override(config: ConfigDict, overrides: Sequence[tuple[str, str]]) -> None:
    """Parses the text of each (key, text) pair, and sets the key to its value.

    Raises:
      ConfigError: the key does not exist, or the value has a wrong type or is out of range.
    """
    for key, text in overrides:
        _override(config, key, text)
        check_values({key: config[key]})


def _override(config: ConfigDict, key: str, text: str) -> None:
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
    accepted = KEYS.get(key) or Key(type(part))  # a part of a mixture has its own keys
    try:
        above[name] = accepted.read(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"config.{key}={text!r} must be {accepted.rule()}") from error


def _fit_warmup(config: ConfigDict, durations: ConfigDict, overridden: set[str]) -> None:
    """Scales a warm-up that does not fit into the duration given on the command line.

    Args:
      config: modified in place.
      durations: the section `train` as the config file sets it.
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
            "set the key to choose another value",
            key, warmup, unit, duration, config.schedule[key],
        )  # fmt: skip


def _flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """The values by full key, such as {"train.steps": 20}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def steps(section: ConfigDict, prefix: str, *, batch_size: int, dataset_size: int) -> int:
    """Computes a duration in steps from one of `{prefix}steps`, `{prefix}epochs`, `{prefix}examples`.

    Args:
      section: config.train or config.schedule, which has the three keys; 0 means that a key is unset.
      prefix: prefix of the three keys: "" in config.train, "warmup_" in config.schedule.
      batch_size: examples per step, over all devices.
      dataset_size: examples per epoch.

    Raises:
      ConfigError: more than one key is set, or the duration is shorter than one step.

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
    """Checks choices, ranges and divisibility, which need neither the model nor the data.

    Args:
      config: the config of the run.
      batch_shards: number of devices that the batch is sharded over.

    Raises:
      ConfigError: the first violated invariant, in one line.
    """
    flat = _flatten(config)
    check_values(flat)
    for key, (other, values) in NEEDED.items():
        if flat[key] not in (0, KEYS[key].default) and flat[other] not in values:
            raise ConfigError(
                f"config.{key}={flat[key]!r} has no effect with config.{other}={flat[other]!r}: set "
                f"config.{other} to {' or '.join(values)}, or leave config.{key} out"
            )
    _check_optimizer(config)
    _check_batch(config, batch_shards)
    _check_concurrency(config)
    check_data(config)
    for key, address in (
        ("checkpoint.resume", config.checkpoint.resume),
        ("data.dir", config.data.dir),
        ("train.compilation_cache", config.train.compilation_cache),
    ):
        if "://" in address:  # as a path, "file:" would name a folder
            local_path(f"config.{key}", address)
            raise ConfigError(f"config.{key}={address!r} must be a path: leave out file://")
        if address.split("/")[0] == "~":  # only command lines expand it
            raise ConfigError(f"config.{key}={address!r} must have no ~: use os.path.expanduser")
    if config.checkpoint.resume and config.checkpoint.init_from:
        raise ConfigError(
            f"config.checkpoint.resume={config.checkpoint.resume!r} and "
            f"config.checkpoint.init_from={config.checkpoint.init_from!r} exclude each other: resume "
            f"restores the parameters, the moments and the step, init_from only the parameters; set one to ''"
        )


def _check_optimizer(config: ConfigDict) -> None:
    optimizer = config.optimizer
    if optimizer.grad_clip_norm and optimizer.name == "stable_adamw" and optimizer.clip_threshold:
        raise ConfigError(
            f"config.optimizer clips twice, grad_clip_norm={optimizer.grad_clip_norm} and "
            f"clip_threshold={optimizer.clip_threshold}: set one of them to 0"
        )
    if optimizer.name == "stable_adamw" and not optimizer.b2_power:
        from swjax.optax import stable  # JAX is slow to load

        if stable.never_clips(optimizer.clip_threshold, optimizer.b2):
            raise ConfigError(
                f"config.optimizer.clip_threshold={optimizer.clip_threshold} never clips, because at "
                f"b2={optimizer.b2} the RMS stays below {stable.largest_rms(optimizer.b2):.4g}: lower it, "
                "or set it to 0"
            )
    if optimizer.b2_power and optimizer.name != "stable_adamw":
        raise ConfigError(
            f"config.optimizer.b2_power={optimizer.b2_power} needs name='stable_adamw', not "
            f"{optimizer.name!r}: set the name; with clip_threshold=0 it is AdamW with that schedule"
        )
    if config.model.dtype == "float16" and not optimizer.loss_scaling:
        raise ConfigError(
            "config.model.dtype='float16' needs a loss scale, or small gradients underflow to 0: set "
            "optimizer.loss_scaling to 'per_tensor' or 'dynamic'"
        )
    for key in ("alpha", "pattern"):
        if optimizer.lora[key] and not optimizer.lora.rank:
            raise ConfigError(
                f"config.optimizer.lora.{key}={optimizer.lora[key]!r} has no effect with rank=0: set "
                "config.optimizer.lora.rank, for example to 16"
            )
    for pattern in optimizer.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"config.optimizer.freeze={pattern!r} is not a regular expression: {error}"
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


def _check_concurrency(config: ConfigDict) -> None:
    remat = config.model.remat
    if config.train.concurrent_kernels and remat != "none":
        raise ConfigError(
            "config.train.concurrent_kernels=True needs config.model.remat='none', because recomputation "
            f"saves no memory with it, got remat={remat!r}: set one of them"
        )


def check_data(config: ConfigDict) -> None:
    """Checks the parts of the mixture, and that `eval.data` names a data set with a split to evaluate on.

    Raises:
      ConfigError: names the first key that is missing or wrong.
    """
    data = config.data
    for name, part in data.mixture.items():
        _check_part(f"data.mixture.{name}", part)
    if not config.eval.data:
        return
    choice("eval.data", config.eval.data, [*SOURCES, *data.mixture])
    part = data.mixture.get(config.eval.data, {"name": config.eval.data})
    section = data[part["name"]]
    splits = {**section.get("splits", {}), **part.get("splits", {})}
    if "splits" in section and not splits.get("val") and not splits.get("test"):
        key = f"mixture.{config.eval.data}" if config.eval.data in data.mixture else part["name"]
        raise ConfigError(
            f"config.eval.data={config.eval.data!r} has no split to evaluate on: set "
            f"config.data.{key}.splits.val or .test"
        )


def _check_part(key: str, part: ConfigDict) -> None:
    """Checks name, weight and splits of a part of the mixture; its source checks its other keys."""
    if not {"name", "weight"} <= set(part):
        raise ConfigError(f"config.{key} needs the keys name and weight; it has {', '.join(part)}")
    choice(f"{key}.name", part["name"], SOURCES)
    weight, splits = part["weight"], part.get("splits", {})
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"config.{key}.weight={weight!r} must be a number")
    if not isinstance(splits, Mapping | ConfigDict):
        raise ConfigError(
            f"config.{key}.splits={splits!r} must be a dict: write {{'train': {splits!r}}}"
        )
    for split, where in splits.items():
        choice(f"{key}.splits", split, ("train", "val", "test"))
        if not isinstance(where, str):
            raise ConfigError(f"config.{key}.splits.{split}={where!r} must be a text")


@contextlib.contextmanager
def blame(key: str) -> Iterator[None]:
    """Re-raises an error about a value or a missing package as a ConfigError about the config key."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, ModuleNotFoundError) as error:
        raise ConfigError(f"config.{key}: {one_line(error)}") from error


def to_json(config: ConfigDict) -> str:
    """The config as readable JSON with a stable order (tuples become lists) and masked credentials."""
    return mask_credentials(json.dumps(config.to_dict(), indent=2, sort_keys=True)) + "\n"


@contextlib.contextmanager
def blame_damage() -> Iterator[None]:
    """Re-raises an error that names a damaged file of a run as a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def read_json(what: str, text: str, *, remedy: str, **types: Any) -> dict:
    """Parses the JSON object in a file of a run: `swjax.diagnostics.recorder.json_object`.

    Raises:
      ConfigError: the file is damaged.
    """
    from swjax.diagnostics.recorder import json_object  # Flax is slow to load

    with blame_damage():
        return json_object(f"{what} of this run", text, remedy=remedy, **types)


def saved_section(path: Path, name: str) -> dict:
    """Reads a section of a run's config.json.

    Raises:
      ConfigError: the file is damaged.
    """
    remedy = "restore it from a copy, or remove it"
    text = path.read_text(errors="replace")
    return read_json("config.json", text, remedy=remedy, **{name: dict})[name]


# The user chooses the names and keys of the parts of a mixture.
CHOSEN = "data.mixture."
# Keys that may change when a run resumes, because they affect no result, or only its rounding; another
# tokenizer is refused by `keep_tokenizer`.
UNCOUNTED = ("checkpoint.every_steps:", "checkpoint.keep:", "checkpoint.mirror:", "checkpoint.resume:",
             "data.dir:", "data.tokenizer:", "data.workers:", "diagnostics.", "log.", "mesh.", "report.",
             "train.compilation_cache:", "train.concurrent_kernels:", "train.profile_steps:")  # fmt: skip


def changes(saved: str, config: ConfigDict) -> list[str]:
    """Lists the differences between a run's config.json and a config, as `key: old -> new`.

    A key that only one config has comes from another version of swjax and is ignored, except under `CHOSEN`.

    >>> config = ConfigDict({"model": {"recipe": "standard", "new": ""}, "log": {"every_steps": 2}})
    >>> changes('{"model": {"recipe": "switchback"}, "log": {"every_steps": 1}}', config)
    ["model.recipe: 'switchback' -> 'standard'"]

    Raises:
      ConfigError: the saved config is damaged.
    """
    old = read_json("config.json", saved, remedy="restore it from a copy, or remove it")
    found = differences(old, json.loads(to_json(config)))
    return [change for change in found if not change.startswith(UNCOUNTED)]


def changes_of_run(workdir: Path, config: ConfigDict) -> list[str]:
    """`changes` since a run's config.json; [] if it has none."""
    path = workdir / "config.json"
    return changes(path.read_text(errors="replace"), config) if path.exists() else []


def differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    """Lists the differences between two configs like `changes`, but with every key."""
    found = []
    chosen = prefix.startswith(CHOSEN)
    for key in sorted(old.keys() | new.keys() if chosen else old.keys() & new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return found


# These keys determine which arrays the state of a run has. A run can resume after any other change.
SHAPING = ("model.", "data.image_size:", "data.context_length:", "optimizer.name:",
           "optimizer.grad_clip_norm:", "optimizer.loss_scaling:", "optimizer.freeze:",
           "optimizer.layer_decay:", "optimizer.lora.", "optimizer.eight_bit_moments:",
           "optimizer.coefficients:", "train.loss:", "train.ema_decay:")  # fmt: skip


@contextlib.contextmanager
def blame_changes(workdir: Path, config: ConfigDict) -> Iterator[None]:
    """Re-raises an error about the arrays of a checkpoint as one about the config keys that changed them.

    Args:
      workdir: workdir of the run whose checkpoint is restored.
      config: the config of the current run.

    Raises:
      ConfigError: names the changed keys. If no such key changed, the original error propagates.
    """
    try:
        yield
    except OtherArrays as error:
        changed = changes_of_run(workdir, config)
        shaping = [f"config.{change}" for change in changed if change.startswith(SHAPING)]
        if not shaping:
            raise
        raise ConfigError(
            f"the checkpoints in {workdir} belong to another config: {'; '.join(shaping[:5])}: change "
            f"the keys back, or use another --workdir"
        ) from error
