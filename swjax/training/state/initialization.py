"""Initializes the parameters of a run from other weights: a swjax run, or a file of another library.

The function adapts differences that keep the learned features: it interpolates positions of another image
size, and truncates or extends the context. A head of another size starts from its new initialization. Each
change is logged in one line. Any other difference raises an error, because the model would compute something
else.
"""

import json
import logging
import math
import re
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from swjax import interop
from swjax.data import files
from swjax.interop.layouts import LAYOUTS
from swjax.models import clip
from swjax.training import distributed
from swjax.training.config import blame
from swjax.training.faults.errors import ConfigError
from swjax.training.setup import model_config
from swjax.training.state.checkpoint import Checkpoints

logger = logging.getLogger("swjax.training.state.initialization")

KEY = "checkpoint.init_from"
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
      ConfigError: the address has no readable weights, or they belong to another architecture.
    """
    here = traverse_util.flatten_dict(new, sep="/")
    address = address.removeprefix("file://")
    if "://" in address:
        with tempfile.TemporaryDirectory() as folder:
            theirs, found = _of_file(_fetched(address, Path(folder)), cfg)
    elif (Path(address) / "checkpoints").is_dir():
        theirs, found = _of_run(address, here)
    else:
        theirs, found = _of_file(address, cfg)
    said: list[str] = []
    if theirs is None:
        said.append(
            f"the weights have no config, so config.model.gelu={cfg.gelu!r} is assumed; OpenAI's weights "
            "need 'quick'"
        )
    else:
        _compare_models(address, theirs, cfg)
    fitted = {name: _fit(address, name, found.get(name), x, said) for name, x in here.items()}
    for name in sorted(found.keys() - here.keys()):
        if not _HEADS.match(name):
            raise ConfigError(
                f"config.{KEY}={address!r} has the parameter {name}, which this model lacks: "
                f"{_remedy(name, has=True)}"
            )
        said.append(f"{name} is dropped: this model has no such parameter")
    for line in said if distributed.is_first() else ():
        logger.warning("init_from %s: %s", address, line)
    return traverse_util.unflatten_dict(fitted, sep="/")


def _of_run(workdir: str, here: dict) -> tuple[clip.CLIPConfig | None, dict]:
    """The model configuration (None without a config.json) and the parameters of another swjax run."""
    path, model = Path(workdir) / "config.json", None
    if path.exists():
        with blame(KEY):
            config = ConfigDict(json.loads(path.read_text()))
            config.model.attention = ""  # the setting depends on the devices of that run
            model = model_config(config)
    with closing(Checkpoints.of(KEY, workdir)) as checkpoints:
        shapes = checkpoints.shapes("params/")
        everywhere = jax.sharding.NamedSharding(_mesh(here), jax.sharding.PartitionSpec())
        like = {
            name: jax.ShapeDtypeStruct(
                shape,
                jnp.float32,
                sharding=here[name].sharding
                if name in here and here[name].shape == shape
                else everywhere,
            )
            for name, shape in shapes.items()
        }
        restored = checkpoints.restore_params(traverse_util.unflatten_dict(like, sep="/"))
    return model, traverse_util.flatten_dict(restored, sep="/")


def _fetched(address: str, folder: Path) -> str:
    """Copies weights and their config from an fsspec address to `folder`; returns the path of the copy."""
    name = address.rstrip("/").rpartition("/")[2]
    is_file = name.endswith((".safetensors", ".npz"))
    parent = address.rstrip("/").rpartition("/")[0] if is_file else address.rstrip("/")
    with blame(KEY):
        files.check_protocol(address)
    import fsspec

    try:
        filesystem, inside = fsspec.core.url_to_fs(parent)
        held = {path.rpartition("/")[2]: path for path in filesystem.ls(inside, detail=False)}
        wanted = {name} if is_file else {layout.weights for layout in LAYOUTS.values()}
        chosen = held.keys() & (wanted | {layout.config for layout in LAYOUTS.values()})
        for one in chosen:
            filesystem.get_file(held[one], str(folder / one))
    except Exception as error:  # third-party file systems may raise anything
        raise ConfigError(
            f"config.{KEY}={address!r} cannot be read: {type(error).__name__}: {_one_line(error)}"
        ) from error
    if not chosen & wanted:
        raise ConfigError(
            f"config.{KEY}={address!r} holds no weights: give safetensors of open_clip, OpenAI or Hugging "
            f"Face or their folder; a workdir must be local"
        )
    return str(folder / name if is_file else folder)


def _of_file(address: str, cfg: clip.CLIPConfig) -> tuple[clip.CLIPConfig | None, dict]:
    """The model configuration and the parameters of a safetensors file."""
    try:
        return interop.read(address)
    except FileNotFoundError as error:
        raise ConfigError(
            f"config.{KEY}={address!r} holds no checkpoint and no weights: give a run's workdir, or "
            f"safetensors of open_clip, OpenAI or Hugging Face ({_one_line(error)})"
        ) from error
    except interop.NoConfig:  # OpenAI's files have no config: the run's config must match them
        with blame(KEY):
            return None, interop.read(address, cfg)[1]
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise ConfigError(f"config.{KEY}={address!r}: {_one_line(error)}") from error


def _compare_models(address: str, theirs: clip.CLIPConfig, cfg: clip.CLIPConfig) -> None:
    """Raises a ConfigError if settings differ that do not show in the shapes of parameters."""
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
    for key, value, own in pairs:
        if value != own:
            raise ConfigError(
                f"config.{KEY}={address!r} belongs to another architecture: {key} is {value!r} in the "
                f"weights and {own!r} here: set config.model.{key}={value}"
            )


def _fit(address: str, name: str, value: Any, new: jax.Array, said: list[str]) -> jax.Array:
    """Adapts a parameter to this run's shape and sharding; appends a note of the change to `said`."""
    shape = new.shape
    if value is None:
        if not _HEADS.match(name):
            raise ConfigError(
                f"config.{KEY}={address!r} lacks the parameter {name}, which this model has: "
                f"{_remedy(name, has=False)}"
            )
        said.append(
            f"{name} {list(shape)} is newly initialized: the weights have no such parameter"
        )
        return new
    if value.shape == shape:
        return _place(value, new)
    change = f"{list(value.shape)} in the weights, {list(shape)} here"
    if _HEADS.match(name):
        said.append(f"{name} is newly initialized: {change}")
        return new
    if name == "vision/position_embedding" and value.shape[1] == shape[1]:
        said.append(f"{name} is interpolated: {change}")
        return _place(interpolate_positions(np.asarray(value), shape[0]), new)
    if name == "text/position_embedding" and value.shape[1] == shape[1]:
        kept = min(value.shape[0], shape[0])
        rest = "" if kept == shape[0] else f" and {shape[0] - kept} are new"
        said.append(f"{name}: the first {kept} positions are kept{rest}: {change}")
        return _place(np.concatenate([np.asarray(value)[:kept], np.asarray(new)[kept:]]), new)
    if name == "text/token_embedding/embedding" and value.shape[1] == shape[1]:
        raise ConfigError(
            f"config.{KEY}={address!r}: its tokenizer has {value.shape[0]} tokens, but swjax "
            f"reads captions with CLIP's, which has {shape[0]}: use weights trained with CLIP's tokenizer"
        )
    raise ConfigError(
        f"config.{KEY}={address!r} belongs to another architecture: the shape of {name} is {change}: set the "
        f"sizes of config.model to those of the weights"
    )


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


def _mesh(arrays: dict) -> jax.sharding.Mesh:
    return next(iter(arrays.values())).sharding.mesh


def _remedy(name: str, *, has: bool) -> str:
    """Explains how to add (`has`=False) or remove (`has`=True) a parameter that the weights lack or have."""
    if re.search(r"/ls_\d/", name):
        return f"set config.model.layer_scale={has}"
    if re.search(r"/ln_[qk]/", name):
        return f"set config.model.qk_norm={has}"
    return "set config.model.name to the model of the weights"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
