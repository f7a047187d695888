"""Reads weights of CLIP models, and writes safetensors; checks every tensor before reading any."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from swjax.data import files, vocabulary
from swjax.interop import big_vision, configs, hub, weight_files
from swjax.interop.layouts import LAYOUTS, WeightFormat, for_our_images, for_their_images, tensors
from swjax.models import clip, lora
from swjax.safe_files import one_line, parse_json, write_atomically
from swjax.serving import tensor_files
from swjax.serving.models import is_prequantized, read_metadata

_READERS = {"open_clip": configs.from_open_clip, "huggingface": configs.from_hugging_face,
            "siglip": configs.from_siglip, "open_clip_siglip": configs.from_open_clip_siglip}  # fmt: skip
_WRITERS = {"open_clip": configs.to_open_clip, "huggingface": configs.to_hugging_face,
            "siglip": configs.to_siglip}  # fmt: skip
_SIGLIPS = ("siglip", "open_clip_siglip")
PROCESSOR = "preprocessor_config.json"  # how Hugging Face prepares pictures
_LARGEST_CONFIG = 2**24  # bytes
_EXACT = ("F32", "F16", "BF16")  # dtypes that convert to float32 exactly


class NoConfig(ValueError):
    """The weights have no config file next to them, like OpenAI's weights."""


def load(path: str | Path, cfg: clip.CLIPConfig | None = None, **options: Any) -> clip.CLIP:
    """Loads a model from weights in the layout of open_clip, OpenAI, Hugging Face or big_vision.

    The tensor names determine the layout. 16-bit values are converted to float32. Files of PyTorch, also
    OpenAI's in TorchScript, are read without running their pickle.

    Args:
      path: a safetensors file, a file of `torch.save` (.bin, .pt), the index of either's shards, an .npz of
        big_vision, a folder that open_clip or Hugging Face wrote, or the name of a model, see
        `swjax.interop.hub`.
      cfg: the model configuration; None reads the config file next to the weights, and sets float32 without
        quantization, as in those libraries.
      **options: fields of the configuration to replace, such as recipe="switchback".

    Returns:
      The model, with float32 parameters on the default device.

    Raises:
      FileNotFoundError: the file or a shard does not exist, or the folder has no weights.
      ModuleNotFoundError: safetensors is not installed.
      ValueError: the config is missing or describes another kind of model, or a tensor is missing,
        unexpected, or has another shape or dtype, or does not fit `options`. The one-line message names it.

    >>> import tempfile
    >>> cfg = clip.config("tiny", vision={"layers": 1}, text={"layers": 1})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, clip.CLIP(cfg, rngs=nnx.Rngs(0)), layout="huggingface")
    ...     load(folder, recipe="switchback").cfg.vision.layers
    1
    """
    cfg, parameters = read(path, cfg)
    cfg = clip.config(cfg, **options)
    graph, state = nnx.split(_abstract(cfg))
    _check_fit(path, parameters, _flat(state))
    values = traverse_util.unflatten_dict(parameters, sep="/")
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, values))
    return nnx.merge(graph, state)


def configuration(path: str | Path) -> clip.CLIPConfig:
    """Reads the configuration of a model from the file next to its weights, and no array of safetensors.

    Args:
      path: see `load`.

    Raises:
      FileNotFoundError, ModuleNotFoundError, ValueError: see `load`.
      NoConfig: the weights have no such file.
    """
    path = hub.resolve(path)
    if path.suffix == ".npz":
        return configs.SIGLIP.applied_to(big_vision.read(path)[0])
    file = weight_files.find(path)
    with weight_files.open_weights(file) as opened:
        return _read_config(file, _layout_of(file, opened.keys()))[0]


def tokenizer(path: str | Path) -> str:
    """Returns the path of the tokenizer next to weights, for `swjax.data.tokenize`; "" if there is none.

    Args:
      path: see `load`; also a run's workdir, or an fsspec address of weights or of their folder.
    """
    address = str(path)
    if files.is_remote(address):
        is_file = weight_files.is_name(address)
        folder = address.rpartition("/")[0] if is_file else address.rstrip("/")
    else:
        found = hub.resolve(path)
        folder = str(found if found.is_dir() else found.parent)
    for name in vocabulary.FILES:
        with contextlib.suppress(OSError):
            files.size_and_version(f"{folder}/{name}")
            return f"{folder}/{name}"
    return ""


def read(
    path: str | Path, cfg: clip.CLIPConfig | None = None
) -> tuple[clip.CLIPConfig, dict[str, np.ndarray]]:
    """Reads the configuration and the parameters of a file, on the host.

    Args:
      path, cfg: see `load`.

    Returns:
      (configuration, {path: float32 array}), with paths such as "vision/blocks/attn/q/kernel".

    Raises:
      FileNotFoundError, ModuleNotFoundError, ValueError: see `load`.
    """
    path = hub.resolve(path)
    if path.suffix == ".npz":
        described, parameters = big_vision.read(path)
        if cfg is not None:
            _check_heads(path, described, cfg)
        _check_fit(path, parameters, _flat(nnx.state(_abstract(cfg or described))))
        cfg = cfg or configs.SIGLIP.applied_to(described)
        return cfg, for_our_images(parameters, configs.SIGLIP.mean, configs.SIGLIP.std)
    path = weight_files.find(path)
    with weight_files.open_weights(path) as file:
        found = {name: file.get_slice(name) for name in file.keys()}
        layout = _layout_of(path, found)
        prepared = configs.SIGLIP if layout in _SIGLIPS else configs.Preparation()
        if cfg is None:
            cfg, prepared = _read_config(path, layout)
        state = nnx.state(_abstract(cfg))
        shapes = {name: leaf.shape for name, leaf in _flat(state).items()}
        expected = list(tensors(LAYOUTS[layout], shapes))
        _check(path, LAYOUTS[layout], found, expected)
        parameters = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
        for tensor in expected:
            tensor.unpack(file.get_tensor(tensor.name), parameters)
    return cfg, for_our_images(parameters, prepared.mean, prepared.std)


def save(
    folder: str | Path, model: clip.CLIP, layout: str = "open_clip", tokenizer: str = ""
) -> None:
    """Writes a model and its config as float32 safetensors for other libraries.

    Args:
      folder: created if it is missing; existing files are replaced. `open_clip.create_model(
        "local-dir:FOLDER")` or `CLIPModel.from_pretrained(FOLDER)` opens it.
      model: any CLIP; its recipe and dtype are not saved. LoRA is merged into the kernels.
      layout: "open_clip" (also OpenAI's layout), "huggingface", "siglip" (Hugging Face's layout of SigLIP) or
        "big_vision", which writes model.npz.
      tokenizer: a file to copy to the folder, for a model without CLIP's vocabulary; "" copies none.

    Raises:
      FileNotFoundError, ModuleNotFoundError: the tokenizer does not exist, or safetensors is not installed.
      ValueError: the layout does not exist, or has no name for a parameter of this model, or the model is
        prequantized, or the folder is a run.

    See `load` for an example.
    """
    layouts = (*_WRITERS, "big_vision")
    if layout not in layouts:
        raise ValueError(f"layout must be one of {', '.join(layouts)}, got {layout!r}")
    if model.cfg.lora is not None:
        model = lora.merged(model)
    if is_prequantized(model):
        raise ValueError(
            f"{layout} needs float weights, got a prequantized model: load the model without prequantize, or "
            "write it by swjax.inference.save"
        )
    folder = Path(folder)
    if (folder / "checkpoints").exists():
        raise ValueError(
            f"folder must not be a run, whose config.json would be replaced, got {folder}: give another"
        )
    parameters = jax.tree.map(np.asarray, _flat(nnx.state(model, nnx.Param)))
    if tokenizer:
        ending = Path(tokenizer).suffix
        content = Path(tokenizer).read_bytes()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"tokenizer{ending}", content)
    if model.cfg.siglip:
        parameters = for_their_images(parameters, configs.SIGLIP.mean, configs.SIGLIP.std)
    if layout == "big_vision":
        big_vision.write(folder / "model.npz", parameters, model.cfg)
        return
    shapes = {name: value.shape for name, value in parameters.items()}
    packed = {t.name: t.pack(parameters) for t in tensors(LAYOUTS[layout], shapes)}
    names = LAYOUTS[layout]
    processor = None if layout == "open_clip" else configs.to_image_processor(model.cfg)
    config = json.dumps(_WRITERS[layout](model.cfg), indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    # transformers rejects files without this format entry.
    tensor_files.write(folder / names.weights, packed, {"format": "pt"})
    write_atomically(folder / names.config, config + "\n")
    if processor:
        write_atomically(folder / PROCESSOR, json.dumps(processor, indent=2) + "\n")


def _abstract(cfg: clip.CLIPConfig) -> clip.CLIP:
    """A model of shapes."""
    return nnx.eval_shape(lambda: clip.CLIP(cfg, rngs=nnx.Rngs(0)))


def _flat(tree) -> dict:
    return traverse_util.flatten_dict(nnx.to_pure_dict(tree), sep="/")


def _layout_of(path: Path, names: Iterable[str]) -> str:
    # Hugging Face's two layouts share most names.
    for name in ("siglip", "open_clip_siglip", "open_clip", "huggingface"):
        if LAYOUTS[name].marker in names:
            return name
    if weight_files.is_safetensors(path) and read_metadata(path) is not None:
        raise ValueError(
            f"{path} was saved by swjax, not by another library: give what it was "
            "saved from, such as a run's workdir, or convert its model by swjax.interop.save"
        )
    markers = " nor ".join(repr(layout.marker) for layout in LAYOUTS.values())
    raise ValueError(
        f"{path} has neither a tensor {markers}: give a CLIP ViT of open_clip, OpenAI or Hugging Face, "
        f"or a SigLIP"
    )


def _read_config(path: Path, layout: str) -> tuple[clip.CLIPConfig, configs.Preparation]:
    """Reads the configuration, and how pictures are prepared, from the files next to the weights."""
    file = path.parent / LAYOUTS[layout].config
    if not file.is_file():
        raise NoConfig(
            f"{path} has no {file.name} next to it for the number of heads and the GELU: pass the model, as "
            f'in cfg=clip.config("vit_b32", gelu="quick", recipe="standard", dtype="float32")'
        )
    described = _parse(file, _READERS[layout])
    if layout.startswith("open_clip"):
        prepared = _parse(file, configs.open_clip_preparation)
    else:
        read = functools.partial(configs.hugging_face_preparation, cfg=described)
        processor = path.parent / PROCESSOR
        prepared = _parse(processor, read) if processor.is_file() else read({})
    fitted = _parse(file, lambda _: prepared.applied_to(described))
    return clip.config(fitted, recipe="standard", dtype="float32"), prepared


def _parse(file: Path, read: Callable[[Any], Any]) -> Any:
    """Applies a function to the JSON of a file; its errors begin with the name of the file."""
    try:
        return read(parse_json(files.read_whole(str(file), _LARGEST_CONFIG)))
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{file}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = one_line(error)
    if isinstance(error, KeyError):
        return f"lacks the key {text}: give the config of a CLIP"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _check(path: Path, layout: WeightFormat, found, expected) -> None:
    """Raises a ValueError that names the first tensor whose shape or dtype differs from the model's."""
    names = {tensor.name for tensor in expected}
    missing = [tensor.name for tensor in expected if tensor.name not in found]
    unexpected = sorted(found.keys() - names - layout.buffers)
    remedy = "pass this model's configuration as cfg, see swjax.models.clip.config"
    for what, which in (("lacks the tensor", missing), ("has an unexpected tensor", unexpected)):
        if which:
            more = f" (and {len(which) - 1} more)" if len(which) > 1 else ""
            raise ValueError(f"{path} {what} {which[0]!r}{more}: {remedy}")
    for tensor in expected:
        shape, dtype = tuple(found[tensor.name].get_shape()), found[tensor.name].get_dtype()
        scalar = len(tensor.axes) == 0 and shape in ((), (1,))  # libraries save it in either shape
        if shape != tensor.shape and not scalar:
            raise ValueError(
                f"the tensor {tensor.name!r} of {path} must be {list(tensor.shape)}, "
                f"got {list(shape)}: {remedy}"
            )
        if dtype not in _EXACT:
            raise ValueError(
                f"the tensor {tensor.name!r} of {path} must be one of {', '.join(_EXACT)}, got {dtype}: "
                f"convert the file to one of them"
            )


def _check_fit(path: str | Path, parameters: dict, expected: dict) -> None:
    """Raises a ValueError that names the first parameter whose shape differs from the model's.

    The model would slice positions, and compute with the other parameters as they are.
    """
    for name in sorted(parameters.keys() | expected.keys()):
        there, here = (
            list(arrays[name].shape) if name in arrays else None
            for arrays in (parameters, expected)
        )
        if there != here:
            raise ValueError(
                f"{path} does not fit the given configuration: the parameter {name!r} is {there} in the file "
                f"and {here} in the model (None: no such parameter): leave out fields that change shapes, "
                "or train on from the file with checkpoint.init_from, which adapts it"
            )


def _check_heads(path: str | Path, described: clip.CLIPConfig, cfg: clip.CLIPConfig) -> None:
    """Raises a ValueError if the number of heads, which the file shows, differs from the model's."""
    there, here = ((c.vision.heads, c.text.heads) for c in (described, cfg))
    if there != here:
        raise ValueError(
            f"{path} has {there[0]} (vision) and {there[1]} (text) heads, got a configuration "
            f"with {here[0]} and {here[1]}: leave cfg out"
        )
