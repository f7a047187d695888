"""Initializes the parameters of a run from other weights: a swjax run, or a file of another library.

The function adapts differences that keep the learned features: it interpolates positions of another image
size, and truncates or extends the context. A head of another size starts from its new initialization. Each
change is logged in one line. Any other difference raises an error, because the model would compute something
else.
"""

import contextlib
import dataclasses
import json
import logging
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from ml_collections import ConfigDict

from swjax import interop
from swjax.data import Fitting, files
from swjax.interop import weight_files
from swjax.interop.files import PROCESSOR
from swjax.interop.layouts import LAYOUTS
from swjax.models import clip, lora
from swjax.safe_files import mask_credentials, one_line
from swjax.training import distributed
from swjax.training.config import blame
from swjax.training.faults.errors import ConfigError
from swjax.training.setup import model_config
from swjax.training.state.checkpoint import Checkpoints

logger = logging.getLogger("swjax.training.state.initialization")

KEY = "checkpoint.init_from"
_MOST = 8  # differences that an error names
# A new task may replace these parameters; they then keep the values that the run initializes.
_HEADS = re.compile(r"(vision|text)/projection/(kernel|bias)$|logit_bias$")


def first_parameters(address: str, cfg: clip.CLIPConfig, new: Any) -> Any:
    """Loads the initial parameters of a run.

    Args:
      address: value of `checkpoint.init_from`: a workdir with checkpoints, or a weights file or its folder,
        as a path or an fsspec address; see `swjax.interop.load`.
      cfg: model configuration of this run.
      new: initialized parameters, a nested dict of arrays; heads that do not fit keep these values.

    Returns:
      A tree with the structure, shapes and shardings of `new`.

    Raises:
      ConfigError: the address has no readable weights, or they belong to another architecture; the line names
        all differences.
    """
    here = traverse_util.flatten_dict(new, sep="/")
    address = address.removeprefix("file://")
    if "://" in address:
        with tempfile.TemporaryDirectory() as folder:
            theirs, found = _of_file(fetched(address, Path(folder)), cfg)
    elif is_run(address):
        theirs, found = model_of_run(address), _shapes_of_run(address)
    else:
        theirs, found = _of_file(address, cfg)
    said = _compare(address, cfg, theirs, found, here)
    if is_run(address):
        found = _of_run(address, found, here)
    for line in said if distributed.is_first() else ():
        logger.warning("init_from %s: %s", mask_credentials(address), line)
    fitted = {name: _adapted(name, found.get(name), x) for name, x in here.items()}
    return traverse_util.unflatten_dict(fitted, sep="/")


def check_parameters(address: str, cfg: clip.CLIPConfig, new: Any) -> None:
    """Refuses what `first_parameters` refuses, but reads no arrays of a run and no remote weights.

    Args:
      address, cfg: see `first_parameters`.
      new: ShapeDtypeStructs of the parameters of this run.

    Raises:
      ConfigError: see `first_parameters`.
    """
    here = traverse_util.flatten_dict(new, sep="/")
    address = address.removeprefix("file://")
    if "://" in address:
        _check_protocol(address)
    elif is_run(address):
        _compare(address, cfg, model_of_run(address), _shapes_of_run(address), here)
    else:
        _compare(address, cfg, *_of_file(address, cfg), here)


def is_run(address: str) -> bool:
    return (Path(address) / "checkpoints").is_dir()


def model_of_run(workdir: str) -> clip.CLIPConfig | None:
    """The model configuration of another swjax run, or None without a config.json."""
    path = Path(workdir) / "config.json"
    if not path.exists():
        return None
    with blame(KEY):
        config = ConfigDict(json.loads(path.read_text()))
        config.model.attention = ""  # the setting depends on the devices of that run
        try:
            return model_config(config)
        except AttributeError as error:
            key = str(error).strip('"')
            raise ValueError(
                f"needs a run of this version, got {path} without the key {key}: train it again, or add the "
                "key with its value in configs/common.py"
            ) from error


def _shapes_of_run(workdir: str) -> dict[str, jax.ShapeDtypeStruct]:
    theirs = model_of_run(workdir)
    if theirs is not None and theirs.lora is not None:
        plain = dataclasses.replace(theirs, lora=None)
        model = nnx.eval_shape(lambda: clip.CLIP(plain, rngs=nnx.Rngs(0)))
        return traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model)), sep="/")
    with closing(Checkpoints.of(KEY, workdir)) as checkpoints:
        shapes = checkpoints.shapes("params/")
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def _of_run(workdir: str, shapes: dict, here: dict) -> dict:
    """The parameters of another swjax run; those that fit have the shardings of `here`."""
    mesh = next(iter(here.values())).sharding.mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    like = {}
    for name, x in shapes.items():
        fits = name in here and here[name].shape == x.shape
        like[name] = x.update(sharding=here[name].sharding if fits else everywhere)
    theirs = model_of_run(workdir)
    with closing(Checkpoints.of(KEY, workdir)) as checkpoints:
        if theirs is None or theirs.lora is None:
            restored = checkpoints.restore_params(traverse_util.unflatten_dict(like, sep="/"))
            return traverse_util.flatten_dict(restored, sep="/")
        graph, state = nnx.split(restored_model(checkpoints, theirs, everywhere))

    def merge(state):
        merged = lora.merged_parameters(nnx.merge(graph, state))
        return traverse_util.flatten_dict(merged, sep="/")

    return jax.jit(merge, out_shardings={name: x.sharding for name, x in like.items()})(state)


def restored_model(
    checkpoints: Checkpoints,
    cfg: clip.CLIPConfig,
    sharding: jax.sharding.Sharding,
    name: str = "params",
) -> clip.CLIP:
    """Returns a model with the parameters of the newest checkpoint, or with their average, "ema"."""
    graph, state = nnx.split(nnx.eval_shape(lambda: clip.CLIP(cfg, rngs=nnx.Rngs(0))))
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(state),
    )
    nnx.replace_by_pure_dict(state, checkpoints.restore_params(like, name))
    return nnx.merge(graph, state)


def _check_protocol(address: str) -> None:
    with blame(KEY):
        try:
            files.check_protocol(address)
        except OSError as error:  # some protocols connect here
            shown = mask_credentials(f"{address}: {type(error).__name__}: {one_line(error)}")
            raise ValueError(f"cannot read {shown}") from error


def fetched(address: str, folder: Path) -> str:
    """Copies weights and their config from an fsspec address to `folder`; returns the path of the copy."""
    name = address.rstrip("/").rpartition("/")[2]
    is_file = weight_files.is_name(name)
    parent = address.rstrip("/").rpartition("/")[0] if is_file else address.rstrip("/")
    _check_protocol(address)
    import fsspec

    try:
        filesystem, inside = fsspec.core.url_to_fs(parent)
        held = {path.rpartition("/")[2]: path for path in filesystem.ls(inside, detail=False)}
        names = [name] if is_file else [each for each in weight_files.NAMES if each in held]
        wanted = set(names[:1])
        if names and names[0].endswith(weight_files.INDEX):
            stem = names[0].removesuffix(weight_files.INDEX).partition(".")[0]
            wanted |= {each for each in held if re.match(rf"{re.escape(stem)}-\d+-of-\d+\.", each)}
        configs = {layout.config for layout in LAYOUTS.values()} | {PROCESSOR}
        chosen = held.keys() & (wanted | configs)
        for one in chosen:
            filesystem.get_file(held[one], str(folder / one))
    except Exception as error:  # third-party file systems may raise anything
        raise ConfigError(
            f"config.{KEY}={address!r} cannot be read: {type(error).__name__}: {one_line(error)}"
        ) from error
    if not chosen & wanted:
        raise ConfigError(
            f"config.{KEY}={address!r} holds no weights: give those of open_clip, OpenAI or Hugging Face, "
            f"or their folder; a workdir must be local"
        )
    return str(folder / name if is_file else folder)


def _of_file(address: str, cfg: clip.CLIPConfig) -> tuple[clip.CLIPConfig | None, dict]:
    """The model configuration and the parameters of a file of weights."""
    with unreadable(address):
        try:
            return interop.read(address)
        except interop.NoConfig:  # OpenAI's files have no config: the run's config must match them
            return None, interop.read(address, cfg)[1]


@contextlib.contextmanager
def unreadable(address: str) -> Iterator[None]:
    """Re-raises an error about other libraries' weights as a ConfigError about `checkpoint.init_from`."""
    shown = mask_credentials(address)
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(
            f"config.{KEY}={shown!r} holds no checkpoint and no weights: give a run's workdir, or "
            f"weights of open_clip, OpenAI or Hugging Face ({one_line(error)})"
        ) from error
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise ConfigError(f"config.{KEY}={shown!r}: {one_line(error)}") from error


def _compare(
    address: str, cfg: clip.CLIPConfig, theirs: clip.CLIPConfig | None, found: dict, here: dict
) -> list[str]:
    """Compares weights with the model of this run; returns a note of each change that `_adapted` makes.

    Args:
      address, cfg: see `first_parameters`.
      theirs: model configuration of the weights, or None if unknown.
      found, here: the arrays of the weights and of this run, or their shapes, by name.

    Raises:
      ConfigError: names all differences that cannot be adapted.
    """
    problems = _other_settings(theirs, cfg) if theirs else []
    said = []
    if theirs is None:
        said.append(
            f"the weights have no config, so config.model.gelu={cfg.gelu!r} is assumed; OpenAI's weights "
            "need 'quick'"
        )
    absent = [name for name in here if name not in found]
    surplus = sorted(found.keys() - here.keys())
    if not problems:  # otherwise these follow from the settings
        problems += _other_names([n for n in absent if not _HEADS.match(n)], found=False)
        problems += _other_names([n for n in surplus if not _HEADS.match(n)], found=True)
    if not problems:
        changed = [name for name in here if name in found and found[name].shape != here[name].shape]
        problems = [
            p for name in changed if (p := _misfit(name, found[name].shape, here[name].shape))
        ]
    if problems:
        raise ConfigError(
            f"config.{KEY}={mask_credentials(address)!r} belongs to another architecture: "
            f"{'; '.join(problems[:_MOST])}"
            + f"; and {len(problems) - _MOST} more"
            * (len(problems) > _MOST)
        )
    if theirs:
        said += [
            f"config.model.vision.{name} is {value!r} in the weights and {own!r} here: pictures are fitted "
            "otherwise than for the weights"
            for name in (field.name for field in dataclasses.fields(Fitting))
            if (value := getattr(theirs.vision, name)) != (own := getattr(cfg.vision, name))
        ]
    for name, x in here.items():
        if name not in found:
            said.append(
                f"{name} {list(x.shape)} is newly initialized: the weights have no such parameter"
            )
        elif found[name].shape != x.shape:
            said.append(_change(name, found[name].shape, x.shape))
    return said + [f"{name} is dropped: this model has no such parameter" for name in surplus]


def _other_settings(theirs: clip.CLIPConfig, cfg: clip.CLIPConfig) -> list[str]:
    """The settings that differ, and how to set each."""
    pairs: list[tuple[str, str | int, str | int]] = [
        ("architecture", theirs.architecture, cfg.architecture),
        ("gelu", theirs.gelu, cfg.gelu),
        ("vision.patch_size", theirs.vision.patch_size, cfg.vision.patch_size),
    ]
    for tower in ("vision", "text"):
        there, here = getattr(theirs, tower), getattr(cfg, tower)
        pairs += [
            (f"{tower}.{size}", getattr(there, size), getattr(here, size))
            for size in ("width", "layers", "heads")
        ]
    return [
        f"{key} is {value!r} in the weights and {own!r} here: set config.model.{key}={value}"
        for key, value, own in pairs
        if value != own
    ]


def _other_names(names: list[str], *, found: bool) -> list[str]:
    """Describes parameters that only the weights have (`found`), or only this model, by their remedies."""
    by_remedy: dict[str, list[str]] = {}
    for name in names:
        by_remedy.setdefault(_remedy(name, has=found), []).append(name)
    text = (
        "{} of its parameters are not in this model, such as {}"
        if found
        else ("it lacks {} parameters of this model, such as {}")
    )
    return [f"{text.format(len(some), some[0])}: {what}" for what, some in by_remedy.items()]


def _misfit(name: str, theirs: tuple[int, ...], here: tuple[int, ...]) -> str:
    """Why a parameter of another shape cannot be adapted, or ""."""
    same_width = len(theirs) == 2 and theirs[1:] == here[1:]
    if _HEADS.match(name) or (name.endswith("/position_embedding") and same_width):
        return ""
    if name == "text/token_embedding/embedding" and same_width:
        return (
            f"its tokenizer has {theirs[0]} tokens, and that of this run {here[0]}: set "
            f"config.model.text.vocab_size={theirs[0]} and config.data.tokenizer"
        )
    return (
        f"the shape of {name} is {list(theirs)} in the weights, {list(here)} here: set the sizes of "
        f"config.model to those of the weights"
    )


def _change(name: str, theirs: tuple[int, ...], here: tuple[int, ...]) -> str:
    """Describes how `_adapted` changes a parameter."""
    change = f"{list(theirs)} in the weights, {list(here)} here"
    if _HEADS.match(name):
        return f"{name} is newly initialized: {change}"
    if name == "vision/position_embedding":
        return f"{name} is interpolated: {change}"
    kept = min(theirs[0], here[0])
    rest = f" and {here[0] - kept} are new" * (here[0] > kept)
    return f"{name}: the first {kept} positions are kept{rest}: {change}"


def _adapted(name: str, value: Any, new: jax.Array) -> jax.Array:
    """Adapts a parameter that `_compare` accepts to this run's shape and sharding."""
    if value is None or (value.shape != new.shape and _HEADS.match(name)):
        return new
    if value.shape == new.shape:
        return _place(value, new)
    if name == "vision/position_embedding":
        return _place(interpolate_positions(np.asarray(value), new.shape[0]), new)
    kept = min(value.shape[0], new.shape[0])
    return _place(np.concatenate([np.asarray(value)[:kept], np.asarray(new)[kept:]]), new)


def interpolate_positions(positions: np.ndarray, count: int) -> np.ndarray:
    """Resizes position embeddings of a square grid of patches to another grid.

    The interpolation is bicubic and antialiased, as in open_clip. The embedding of a class token, which comes
    first if there is one, is kept.

    Args:
      positions: [1 + n^2, width], or [n^2, width] without a class token.
      count: number of positions of the result: 1 + m^2, or m^2 without a class token.

    Returns:
      [count, width] float32.

    >>> interpolate_positions(np.ones((5, 3), np.float32), 10).shape
    (10, 3)
    """
    old, new = math.isqrt(len(positions)), math.isqrt(count)
    first = len(positions) - old * old
    grid = jnp.asarray(positions[first:]).reshape(old, old, -1)
    resized = jax.image.resize(grid, (new, new, grid.shape[2]), "cubic", antialias=True)
    return np.concatenate([positions[:first], np.asarray(resized).reshape(new * new, -1)])


def _place(value: Any, new: jax.Array) -> jax.Array:
    """Copies a value to the devices with the sharding of `new`."""
    if isinstance(value, jax.Array):
        return value
    return jax.make_array_from_callback(new.shape, new.sharding, lambda index: value[index])


def _remedy(name: str, *, has: bool) -> str:
    """Explains how to add (`has`=False) or remove (`has`=True) a parameter that the weights lack or have."""
    if re.search(r"/ls_\d/", name):
        return f"set config.model.layer_scale={has}"
    if re.search(r"/ln_[qk]/", name):
        return f"set config.model.qk_norm={has}"
    return "set config.model.name to the model of the weights"
