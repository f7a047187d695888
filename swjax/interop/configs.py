"""Converts the config files next to weights, open_clip's and Hugging Face's, to `CLIPConfig` and back.

Weights alone determine neither the number of attention heads nor the kind of GELU. An error names the first
setting that `swjax.models` does not support, because ignoring it would change the model's output.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from swjax.data.images import MEAN, SHORTEST, STD
from swjax.fitting import Fitting
from swjax.models.config import CLIPConfig, TextConfig, VisionConfig

_PREPARE = "prepare the images yourself, and pass this model's configuration as cfg"
# The largest sizes that a file may have, so that a malformed one is refused at once; by the libraries' keys.
_LARGEST = {
    **dict.fromkeys(("layers", "num_hidden_layers"), 1000),
    **dict.fromkeys(("heads", "num_attention_heads"), 1024),
    **dict.fromkeys(("width", "hidden_size", "head_width", "embed_dim", "projection_dim"), 2**16),
    "intermediate_size": 2**20,
    **dict.fromkeys(("patch_size", "image_size"), 2**13),
    **dict.fromkeys(("context_length", "max_position_embeddings"), 2**17),
    "vocab_size": 2**24,
}
# The libraries' defaults for missing keys.
_OPEN_CLIP_VISION = {"layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0,
                     "patch_size": 16, "image_size": 224, "ls_init_value": None}  # fmt: skip
_OPEN_CLIP_TEXT = {"layers": 12, "width": 512, "heads": 8, "mlp_ratio": 4.0,
                   "context_length": 77, "vocab_size": 49408, "ls_init_value": None}  # fmt: skip
_HUGGING_FACE_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                        "num_attention_heads": 12, "image_size": 224, "patch_size": 32,
                        "hidden_act": "quick_gelu"}  # fmt: skip
_HUGGING_FACE_TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
                      "num_attention_heads": 8, "max_position_embeddings": 77,
                      "vocab_size": 49408, "hidden_act": "quick_gelu",
                      "eos_token_id": 2}  # fmt: skip
_SIGLIP_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                  "num_attention_heads": 12, "image_size": 224, "patch_size": 16,
                  "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
_SIGLIP_TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                "num_attention_heads": 12, "max_position_embeddings": 64, "vocab_size": 32000,
                "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip

# timm's name of a SigLIP's image tower, and (width, layers, heads, features of the MLP).
_TIMM_SIGLIP = re.compile(r"vit_(base|large|so400m|giantopt)_patch(\d+)_siglip_\d+")
_SIGLIP_TOWERS = {"base": (768, 12, 12, 3072), "large": (1024, 24, 16, 4096),
                  "so400m": (1152, 27, 16, 4304), "giantopt": (1536, 40, 16, 6144)}  # fmt: skip

# {swjax's name of a GELU: Hugging Face's}.
_ACTIVATIONS = {"exact": "gelu", "quick": "quick_gelu", "tanh": "gelu_pytorch_tanh"}


def from_open_clip(file: Mapping) -> CLIPConfig:
    """Converts an open_clip_config.json to a model configuration.

    Raises:
      ValueError: the model has a part that swjax does not support.
    """
    model = file.get("model_cfg", file)
    known = {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "init_logit_bias"}
    _refuse("model_cfg", model, known | {"init_logit_scale"}, {})
    vision = _OPEN_CLIP_VISION | model["vision_cfg"]
    if isinstance(vision["layers"], list):
        raise ValueError(
            f"vision_cfg.layers must be one number, because swjax supports only vision transformers, "
            f"got {vision['layers']!r} of a ResNet: give a ViT"
        )
    text = _OPEN_CLIP_TEXT | model["text_cfg"]
    neutral = {"patch_dropout", "output_tokens", "pad_id", "eos_id", "act_kwargs"}  # no effect here
    _refuse(
        "vision_cfg",
        vision,
        _OPEN_CLIP_VISION.keys() | neutral,
        {"pool_type": "tok", "pos_embed_type": "learnable"},
    )
    _refuse(
        "text_cfg",
        text,
        _OPEN_CLIP_TEXT.keys() | neutral,
        {"pool_type": "argmax", "proj_type": "linear"},
    )
    _check_sizes("model_cfg", model)
    _check_sizes("vision_cfg", vision)
    _check_sizes("text_cfg", text)
    _need("text_cfg.ls_init_value", text["ls_init_value"], vision["ls_init_value"])
    return CLIPConfig(
        vision=VisionConfig(
            **{key: vision[key] for key in ("width", "layers", "mlp_ratio", "patch_size")},
            image_size=vision["image_size"],
            heads=vision["width"] // vision["head_width"],
        ),
        text=TextConfig(
            **{key: text[key] for key in ("width", "layers", "heads", "mlp_ratio")},
            context_length=text["context_length"],
            vocab_size=text["vocab_size"],
        ),
        embed_dim=model["embed_dim"],
        gelu=_open_clip_gelu(model, vision, text),
        layer_scale=vision["ls_init_value"],
        init_logit_bias=model.get("init_logit_bias"),
    )


def from_open_clip_siglip(file: Mapping) -> CLIPConfig:
    """Converts the open_clip_config.json of a SigLIP, whose image tower is timm's, to a model configuration.

    GELU is approximated by tanh, as in the models' training. open_clip computes some of them with the exact
    one.

    Raises:
      ValueError: the model has a part that swjax does not support.
    """
    model = file.get("model_cfg", file)
    known = {"embed_dim", "vision_cfg", "text_cfg", "init_logit_bias", "init_logit_scale"}
    _refuse("model_cfg", model, known | {"custom_text"}, {})
    vision, text = model["vision_cfg"], _OPEN_CLIP_TEXT | model["text_cfg"]
    named = _TIMM_SIGLIP.fullmatch(str(vision.get("timm_model_name")))
    if not named:
        raise ValueError(
            f"vision_cfg.timm_model_name must be that of a SigLIP, such as 'vit_base_patch16_siglip_224', "
            f"got {vision.get('timm_model_name')!r:.80}"
        )
    fixed: dict[str, Any] = {"timm_pool": "map", "timm_proj": "none"}
    for key, value in fixed.items():
        _need(f"vision_cfg.{key}", vision.get(key), value)
    _refuse("vision_cfg", vision, {"image_size", "timm_model_name", *fixed}, {})
    fixed = {"pool_type": "last", "no_causal_mask": True, "proj_bias": True}
    for key, value in fixed.items():
        _need(f"text_cfg.{key}", text.get(key), value)
    _need("text_cfg.norm_kwargs", text.get("norm_kwargs"), {"eps": 1e-6})
    tokens = {"hf_tokenizer_name", "tokenizer_kwargs", "norm_kwargs", "act_kwargs"}
    _refuse(
        "text_cfg", text, _OPEN_CLIP_TEXT.keys() | fixed.keys() | tokens, {"proj_type": "linear"}
    )
    width, layers, heads, hidden = _SIGLIP_TOWERS[named[1]]
    patch = int(named[2])
    _check_sizes("model_cfg", model)
    _check_sizes("vision_cfg", vision)
    _check_sizes("text_cfg", text)
    return CLIPConfig(
        architecture="siglip",
        vision=VisionConfig(
            width=width,
            layers=layers,
            heads=heads,
            mlp_ratio=mlp_ratio(width, hidden),
            patch_size=patch,
            image_size=_whole_patches(vision["image_size"], patch),
        ),
        text=TextConfig(
            **{key: text[key] for key in ("width", "layers", "heads")},
            mlp_ratio=mlp_ratio(text["width"], int(text["width"] * text["mlp_ratio"])),
            context_length=text["context_length"],
            vocab_size=text["vocab_size"],
        ),
        embed_dim=model["embed_dim"],
        gelu="tanh",
        init_logit_scale=math.log(10),
        init_logit_bias=-10.0,
    )


def _whole_patches(size: int, patch: int) -> int:
    """The pixels of the whole patches: a SigLIP of 384 pixels does not see the last 6 with patches of 14."""
    return max(patch, size - size % patch)


class Preparation(NamedTuple):
    """How a library prepares a model's pictures.

    Attributes:
      mean, std: normalization of red, green and blue.
      fitting: how pictures become squares.
    """

    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    fitting: Fitting = SHORTEST

    def applied_to(self, cfg: CLIPConfig) -> CLIPConfig:
        """Returns a model configuration with this fitting."""
        fitted = dataclasses.replace(cfg.vision, **dataclasses.asdict(self.fitting))
        return dataclasses.replace(cfg, vision=fitted)


SIGLIP = Preparation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), Fitting("squash"))


def open_clip_preparation(file: Mapping) -> Preparation:
    """Reads how pictures are prepared from an open_clip_config.json.

    Raises:
      ValueError: a setting is not known.
    """
    given = {
        key: value for key, value in file.get("preprocess_cfg", {}).items() if value is not None
    }
    size = (_OPEN_CLIP_VISION | file.get("model_cfg", file)["vision_cfg"])["image_size"]
    if given.get("size", size) not in (size, [size], [size, size]):
        raise ValueError(
            f"preprocess_cfg.size must be {size}, got {given['size']!r:.80}: {_PREPARE}"
        )
    if given.get("mode", "RGB") != "RGB":
        raise ValueError(
            f"preprocess_cfg.mode must be 'RGB', got {given['mode']!r:.80}: {_PREPARE}"
        )
    names = ("resize_mode", "interpolation", "fill_color")
    fitted = {key: given[key] for key in names if key in given}
    try:
        fitting = Fitting(**fitted)
    except ValueError as error:
        raise ValueError(f"preprocess_cfg.{error}: {_PREPARE}") from error
    _refuse("preprocess_cfg", given, {"mean", "std", "size", "mode", *fitted}, {})
    mean, std = (
        _colors(f"preprocess_cfg.{key}", given.get(key, default))
        for key, default in (("mean", MEAN), ("std", STD))
    )
    return Preparation(mean, std, fitting)


def _colors(key: str, value: Any) -> tuple[float, ...]:
    """Reads a number for each of red, green and blue, or one for all."""
    numbers = value if isinstance(value, list | tuple) else [value] * 3
    least = 0.0 if key.endswith("mean") else 1e-6
    usable = all(type(x) in (int, float) and least <= x < math.inf for x in numbers)
    if len(numbers) != 3 or not usable:
        raise ValueError(f"{key} must be three numbers from {least:g} on, got {value!r:.80}")
    return tuple(float(x) for x in numbers)


def hugging_face_preparation(file: Mapping, cfg: CLIPConfig) -> Preparation:
    """Reads how pictures are prepared from the preprocessor_config.json next to Hugging Face's weights.

    Args:
      file: the file's contents; {} if there is none.
      cfg: the model configuration.

    Raises:
      ValueError: a setting is not known.
    """
    usual = SIGLIP if cfg.siglip else Preparation()
    side, patch = cfg.vision.image_size, cfg.vision.patch_size if cfg.siglip else 1
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if file.get(key, True) is not True:
            raise ValueError(f"{key} must be True, got {file[key]!r:.80}: {_PREPARE}")
    factor = file.get("rescale_factor", 1 / 255)
    if not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise ValueError(f"rescale_factor must be 1 / 255, got {factor!r:.80}: {_PREPARE}")
    size = file.get("size")
    crops = file.get("do_center_crop", not cfg.siglip)
    kind, sides = "squash" if cfg.siglip else "shortest", [side]
    if isinstance(size, int):
        sides = [size]
    elif isinstance(size, Mapping):
        kind = {("shortest_edge",): "shortest", ("height", "width"): "squash"}.get(
            tuple(sorted(size)), ""
        )
        sides = list(size.values())
    if crops:
        cut = file.get("crop_size", side)
        sides += list(cut.values()) if isinstance(cut, Mapping) else [cut]
    if (
        not kind
        or (kind == "shortest" and not crops)
        or any(each - each % patch != side for each in sides)
    ):
        raise ValueError(
            f"size must be the shortest edge with a center crop, or height and width, all {side}, got "
            f"size={size!r:.80}, crop_size={file.get('crop_size')!r:.80}, do_center_crop={crops}: {_PREPARE}"
        )
    filters = {3: "bicubic", 2: "bilinear"}  # Pillow's numbers
    if (number := file.get("resample", 3)) not in filters:
        raise ValueError(f"resample must be 3 or 2, got {number!r:.80}: {_PREPARE}")
    mean = _colors("image_mean", file.get("image_mean", usual.mean))
    std = _colors("image_std", file.get("image_std", usual.std))
    return Preparation(mean, std, Fitting(kind, filters[number]))


def to_image_processor(cfg: CLIPConfig) -> dict:
    """Converts a model configuration to a preprocessor_config.json of Hugging Face.

    Raises:
      ValueError: Hugging Face has no such way to fit pictures into a square.
    """
    vision, kind = cfg.vision, "Siglip" if cfg.siglip else "CLIP"
    if vision.resize_mode == "longest":
        raise ValueError(
            "Hugging Face's image processors have no resize_mode='longest': use layout='open_clip'"
        )
    usual = SIGLIP if cfg.siglip else Preparation()
    square = {"height": vision.image_size, "width": vision.image_size}
    cropped = vision.resize_mode == "shortest"
    return {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": vision.image_size} if cropped else square,
        "do_center_crop": cropped,
        "crop_size": square,
        "resample": 2 if vision.interpolation == "bilinear" else 3,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": list(usual.mean),
        "image_std": list(usual.std),
    }


def _check_sizes(section: str, given: Mapping) -> None:
    """Raises a ValueError if a size is not a whole number, or is absurdly large."""
    for key, most in _LARGEST.items():
        value = given.get(key, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(
                f"{section}.{key} must be a whole number from 1 to {most}, got {value!r:.80}"
            )


def _open_clip_gelu(model: Mapping, vision: Mapping, text: Mapping) -> str:
    if model.get("quick_gelu"):
        return "quick"
    given = vision.get("act_kwargs") or {}
    _need("text_cfg.act_kwargs", text.get("act_kwargs") or {}, given)
    _refuse("vision_cfg.act_kwargs", given, {"approximate"}, {})
    return "tanh" if given.get("approximate") == "tanh" else "exact"


def to_open_clip(cfg: CLIPConfig) -> dict:
    """Converts a model configuration to an open_clip_config.json."""
    common: dict[str, Any] = (
        {"ls_init_value": cfg.layer_scale} if cfg.layer_scale is not None else {}
    )
    if cfg.gelu == "tanh":
        common["act_kwargs"] = {"approximate": "tanh"}
    vision, text = cfg.vision, cfg.text
    model = {
        "embed_dim": cfg.embed_dim,
        "quick_gelu": cfg.gelu == "quick",
        "vision_cfg": {
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "width": vision.width,
            "layers": vision.layers,
            "head_width": vision.width // vision.heads,
            "mlp_ratio": vision.mlp_ratio,
            **common,
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.vocab_size,
            "width": text.width,
            "heads": text.heads,
            "layers": text.layers,
            "mlp_ratio": text.mlp_ratio,
            **common,
        },
    }
    if cfg.init_logit_bias is not None:
        model["init_logit_bias"] = cfg.init_logit_bias
    prepared = {"mean": MEAN, "std": STD} | dataclasses.asdict(Fitting.of(vision))
    return {"model_cfg": model, "preprocess_cfg": prepared}


def from_hugging_face(file: Mapping) -> CLIPConfig:
    """Converts the config.json of a `CLIPModel` to a model configuration.

    Raises:
      ValueError: the model is of another kind, or has a part that swjax does not support.
    """
    _need("model_type", file.get("model_type"), "clip")
    # Older files repeat the sections under these keys, which take precedence.
    vision, text = (
        defaults | file.get(f"{tower}_config", {}) | (file.get(f"{tower}_config_dict") or {})
        for tower, defaults in (("vision", _HUGGING_FACE_VISION), ("text", _HUGGING_FACE_TEXT))
    )
    _check_sizes("config", file)
    for tower, config in (("vision", vision), ("text", text)):
        _check_sizes(f"{tower}_config", config)
        _need(f"{tower}_config.layer_norm_eps", config.get("layer_norm_eps", 1e-5), 1e-5)
    _need("text_config.hidden_act", text["hidden_act"], vision["hidden_act"])
    gelus = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    if vision["hidden_act"] not in gelus:
        raise ValueError(
            f"hidden_act must be one of {', '.join(gelus)}, got {vision['hidden_act']!r}"
        )
    last = text["vocab_size"] - 1
    if text["eos_token_id"] != 2:  # old files have a wrong 2 for the largest id
        _need("text_config.eos_token_id", text["eos_token_id"], last)
    return CLIPConfig(
        **_hugging_face_towers(vision, text),
        embed_dim=file.get("projection_dim", 512),
        gelu=gelus[vision["hidden_act"]],
    )


def from_siglip(file: Mapping) -> CLIPConfig:
    """Converts the config.json of a `SiglipModel` to a model configuration.

    Raises:
      ValueError: the model is of another kind, or has a part that swjax does not support.
    """
    _need("model_type", file.get("model_type"), "siglip")
    vision = _SIGLIP_VISION | file.get("vision_config", {})
    text = _SIGLIP_TEXT | file.get("text_config", {})
    for tower, config in (("vision", vision), ("text", text)):
        _check_sizes(f"{tower}_config", config)
        for key in ("layer_norm_eps", "hidden_act"):
            _need(f"{tower}_config.{key}", config[key], _SIGLIP_VISION[key])
    _need("vision_config.vision_use_head", vision.get("vision_use_head", True), True)
    vision["image_size"] = _whole_patches(vision["image_size"], vision["patch_size"])
    projection = text.get("projection_size") or text["hidden_size"]
    _need("text_config.projection_size", projection, vision["hidden_size"])
    return CLIPConfig(
        architecture="siglip",
        **_hugging_face_towers(vision, text),
        embed_dim=vision["hidden_size"],
        gelu="tanh",
        init_logit_scale=math.log(10),
        init_logit_bias=-10.0,
    )


def to_siglip(cfg: CLIPConfig) -> dict:
    """Converts a model configuration to a config.json for `SiglipModel.from_pretrained`.

    Raises:
      ValueError: the model is not a SigLIP.
    """
    _need("architecture", cfg.architecture, "siglip")
    _need("gelu", cfg.gelu, "tanh")

    vision, text = _hugging_face_sections(cfg)
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "vision_config": vision | {"model_type": "siglip_vision_model"},
        "text_config": text | {"model_type": "siglip_text_model", "projection_size": cfg.embed_dim},
    }


def _hugging_face_towers(vision: Mapping, text: Mapping) -> dict[str, Any]:
    """The tower fields of a CLIPConfig."""
    return {
        "vision": VisionConfig(
            **_hugging_face_tower(vision),
            image_size=vision["image_size"],
            patch_size=vision["patch_size"],
        ),
        "text": TextConfig(
            **_hugging_face_tower(text),
            context_length=text["max_position_embeddings"],
            vocab_size=text["vocab_size"],
        ),
    }


def _hugging_face_tower(config: Mapping) -> dict:
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    return {
        "width": width,
        "layers": layers,
        "heads": config["num_attention_heads"],
        "mlp_ratio": mlp_ratio(width, config["intermediate_size"]),
    }


def mlp_ratio(width: int, hidden: int) -> float:
    """The `mlp_ratio` of a `TowerConfig` whose MLP has exactly `hidden` features.

    >>> int(28 * (61 / 28)), int(28 * mlp_ratio(28, 61))
    (60, 61)
    """
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def to_hugging_face(cfg: CLIPConfig) -> dict:
    """Converts a model configuration to a config.json for `CLIPModel.from_pretrained`."""

    vision, text = _hugging_face_sections(cfg)
    projection, end = {"projection_dim": cfg.embed_dim}, cfg.text.vocab_size - 1
    ids = {"bos_token_id": end - 1, "eos_token_id": end, "pad_token_id": 0}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        **projection,
        "vision_config": vision | projection,
        "text_config": text | projection | ids,
    }


def _hugging_face_sections(cfg: CLIPConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Undoes `_hugging_face_towers`: the keys of both towers that CLIP and SigLIP share."""
    vision, text = (
        {
            "hidden_size": part.width,
            "intermediate_size": part.mlp_width,
            "num_hidden_layers": part.layers,
            "num_attention_heads": part.heads,
            "hidden_act": _ACTIVATIONS[cfg.gelu],
            "layer_norm_eps": cfg.epsilon,
        }
        for part in (cfg.vision, cfg.text)
    )
    vision |= {"image_size": cfg.vision.image_size, "patch_size": cfg.vision.patch_size}
    text |= {
        "max_position_embeddings": cfg.text.context_length,
        "vocab_size": cfg.text.vocab_size,
    }
    return vision, text


def _need(key: str, value, only) -> None:
    if value != only:
        raise ValueError(
            f"{key} must be {only!r}, the only value that swjax supports, got {value!r:.80}"
        )


def _refuse(section: str, given: Mapping, known, fixed: Mapping) -> None:
    """Raises a ValueError if a key has another value than its neutral one."""
    for key, value in given.items():
        if key in known or not value or fixed.get(key) == value:
            continue
        raise ValueError(
            f"{section}.{key:.80}={value!r:.80} is not supported by swjax's CLIP: use a model without"
        )
