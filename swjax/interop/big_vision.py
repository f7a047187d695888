"""SigLIP checkpoints in the format of big_vision: one .npz of arrays, named by path.

An example of a path is "params/img/embedding/kernel". Kernels are [in, out] as in swjax, with a separate axis
for heads in attention. The shapes determine the configuration. Blocks may be separate ("encoderblock_0/...")
or stacked ("encoderblock/...").
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swjax.data.files import size_and_version
from swjax.interop.configs import mlp_ratio
from swjax.models.config import CLIPConfig, TextConfig, VisionConfig
from swjax.safe_files import one_line, replacing

# Weights hardly compress: a file that inflates more, beyond a small size, is a trap.
_LARGEST_INFLATION, _SMALL = 20, 64 * 2**20

_NORM, _MLP, _ATTENTION = "LayerNorm_{}", "MlpBlock_0/Dense_{}", "MultiHeadDotProductAttention_0"
_HEADS = {"q": "query", "k": "key", "v": "value", "out": "out"}

_BLOCK = {
    **{f"ln_{i + 1}": _NORM.format(i) for i in range(2)},
    **{f"mlp/fc{i + 1}": _MLP.format(i) for i in range(2)},
    **{f"attn/{ours}": f"{_ATTENTION}/{theirs}" for ours, theirs in _HEADS.items()},
}
_POOL = {
    "ln": _NORM.format(0),
    **{f"fc{i + 1}": _MLP.format(i) for i in range(2)},
    **{ours: f"{_ATTENTION}/{theirs}" for ours, theirs in _HEADS.items()},
}
_ENCODERS = {"vision": "img/Transformer", "text": "txt/Encoder_0"}
_LAYERS = {
    "vision/patch_embed": "img/embedding",
    "vision/ln_post": "img/Transformer/encoder_norm",
    "text/ln_final": "txt/Encoder_0/encoder_norm",
    "text/projection": "txt/head",
    **{f"vision/pool/{ours}": f"img/MAPHead_0/{theirs}" for ours, theirs in _POOL.items()},
}
_ARRAYS = {
    "vision/position_embedding": "img/pos_embedding",
    "vision/pool/probe": "img/MAPHead_0/probe",
    "text/token_embedding/embedding": "txt/Embed_0/embedding",
    "text/position_embedding": "txt/pos_embedding",
    "logit_scale": "t",
    "logit_bias": "b",
}


def read(path: Path) -> tuple[CLIPConfig, dict[str, np.ndarray]]:
    """Reads a checkpoint, whose model expects images normalized as in big_vision.

    Args:
      path: path of the .npz.

    Returns:
      (configuration, {swjax path: float32 array}).

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is not a SigLIP of big_vision, or is incomplete.
    """
    try:
        size = size_and_version(str(path))[0]
        with open(path, "rb") as raw, np.load(raw) as file:
            inflated = sum(member.file_size for member in file.zip.infolist())
            if inflated > max(_LARGEST_INFLATION * size, _SMALL):
                raise ValueError(f"{size} bytes would inflate to {inflated}")
            held = {name.removeprefix("params/"): file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # NumPy and zlib raise errors of many types for damaged files
        reason = one_line(error)
        raise ValueError(f"{path} is not a complete .npz of arrays: {reason:.200}") from error
    try:
        held = _stacked(held)
        cfg = _config(held)
        parameters = {ours: _ours(held.pop(theirs), ours, cfg) for ours, theirs in _names()}
    except KeyError as error:
        raise ValueError(
            f"{path} lacks the array {error}: give a SigLIP checkpoint of big_vision"
        ) from error
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path} has an array whose shape does not fit the others: {error}: give a SigLIP checkpoint of "
            f"big_vision"
        ) from error
    if held:
        raise ValueError(
            f"{path} has an unexpected array {min(held)!r}: give a SigLIP checkpoint with MAP pooling"
        )
    return cfg, parameters


def write(path: Path, parameters: Mapping[str, np.ndarray], cfg: CLIPConfig) -> None:
    """Writes a checkpoint and replaces an existing one.

    Args:
      path: path of the .npz; its folder is created.
      parameters: {swjax path: array}, for images normalized as in big_vision.
      cfg: the model configuration.

    Raises:
      ValueError: the model is not a SigLIP, or has another GELU or fits pictures otherwise than big_vision.
    """
    if not cfg.siglip or cfg.gelu != "tanh":
        raise ValueError(
            f"big_vision's layout needs architecture='siglip' with gelu='tanh', got {cfg.architecture!r} "
            f"and {cfg.gelu!r}"
        )
    fitted = cfg.vision.resize_mode, cfg.vision.interpolation
    if fitted[0] != "squash" or fitted[1] == "bilinear":
        raise ValueError(
            f"big_vision's layout needs vision.resize_mode='squash' and 'bicubic' interpolation, because it "
            f"does not record others, got {fitted[0]!r} and {fitted[1]!r}: set them, or use layout='siglip'"
        )
    held = {}
    for ours, theirs in _names():
        value = _theirs(np.asarray(parameters[ours]), ours, cfg)
        if "/encoderblock/" not in theirs:
            held[theirs] = value
            continue
        for block, part in enumerate(value):
            held[theirs.replace("/encoderblock/", f"/encoderblock_{block}/")] = part
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"params/{name}": value for name, value in held.items()}
    with replacing(path) as file:
        np.savez(file, **arrays)


def _names() -> Iterator[tuple[str, str]]:
    """Yields (swjax path, big_vision path with stacked blocks) of every parameter."""
    layers = dict(_LAYERS)
    for tower, encoder in _ENCODERS.items():
        for ours, theirs in _BLOCK.items():
            layers[f"{tower}/blocks/{ours}"] = f"{encoder}/encoderblock/{theirs}"
    for ours, theirs in layers.items():
        norm = "LayerNorm" in theirs or "encoder_norm" in theirs
        for part in ("scale" if norm else "kernel", "bias"):
            yield f"{ours}/{part}", f"{theirs}/{part}"
    yield from _ARRAYS.items()


def _stacked(held: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks the arrays of separate blocks; raises a KeyError with the name of an absent array."""
    blocks: dict[str, int] = {}  # {name of the stack: number of blocks}
    found = {}
    for name, value in held.items():
        if numbered := re.search(r"/encoderblock_(\d+)/", name):
            stacked = name.replace(numbered[0], "/encoderblock/")
            blocks[stacked] = max(blocks.get(stacked, 0), int(numbered[1]) + 1)
        else:
            found[name] = value
    for name, count in blocks.items():
        names = (name.replace("/encoderblock/", f"/encoderblock_{i}/") for i in range(count))
        found[name] = np.stack([held[name] for name in names])
    return found


def _config(held: Mapping[str, np.ndarray]) -> CLIPConfig:
    def tower(name):
        block = f"{_ENCODERS[name]}/encoderblock"
        layers, width, heads, _ = held[f"{block}/{_ATTENTION}/query/kernel"].shape
        hidden = held[f"{block}/{_MLP.format(0)}/kernel"].shape[2]
        ratio = mlp_ratio(width, hidden)
        return {"width": width, "layers": layers, "heads": heads, "mlp_ratio": ratio}

    patch, grid = (
        held["img/embedding/kernel"].shape[0],
        math.isqrt(held["img/pos_embedding"].shape[1]),
    )
    vocabulary = held["txt/Embed_0/embedding"].shape[0]
    return CLIPConfig(
        architecture="siglip",
        vision=VisionConfig(**tower("vision"), patch_size=patch, image_size=patch * grid),
        text=TextConfig(
            **tower("text"),
            context_length=held["txt/pos_embedding"].shape[1],
            vocab_size=vocabulary,
        ),
        embed_dim=held["txt/head/kernel"].shape[1],
        gelu="tanh",
        recipe="standard",
        dtype="float32",
        init_logit_scale=math.log(10),
        init_logit_bias=-10.0,
    )


def _ours(value: np.ndarray, path: str, cfg: CLIPConfig) -> np.ndarray:
    """Converts an array to swjax's layout: merges heads, removes leading axes of length 1."""
    value = np.asarray(value, np.float32)
    layer, _, part = path.rpartition("/")
    if "position_embedding" in path or not layer:
        return value.reshape(value.shape[1:])
    if layer.rpartition("/")[2] not in _HEADS:
        return value
    width = (cfg.text if path.startswith("text/") else cfg.vision).width
    stack = value.shape[:1] if "/blocks/" in path else ()
    return value.reshape(*stack, *((width, width) if part == "kernel" else (width,)))


def _theirs(value: np.ndarray, path: str, cfg: CLIPConfig) -> np.ndarray:
    """Undoes `_ours`."""
    layer, _, part = path.rpartition("/")
    if "position_embedding" in path or not layer:
        return value[None]
    name = layer.rpartition("/")[2]
    if name not in _HEADS or (name == "out" and part == "bias"):
        return value
    tower = cfg.text if path.startswith("text/") else cfg.vision
    heads = (tower.heads, tower.width // tower.heads)
    stack = value.shape[:1] if "/blocks/" in path else ()
    if part == "bias":
        return value.reshape(*stack, *heads)
    return value.reshape(
        *stack, *((*heads, tower.width) if name == "out" else (tower.width, *heads))
    )
