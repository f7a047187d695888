"""An encoder of images and texts as unit vectors, zero-shot classification, and files of encoders."""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swjax import data, evaluators, interop, recipes, serving
from swjax.data import decoding
from swjax.data.images import SHORTEST, fit
from swjax.data.labelled import TEMPLATES
from swjax.data.tokenizer import VOCABULARY_SIZE
from swjax.evaluators import embed, zeroshot
from swjax.interop import hub
from swjax.interop.weight_files import is_safetensors
from swjax.models import clip, lora
from swjax.models.config import LoRA, TextConfig, VisionConfig
from swjax.packages import require
from swjax.recipes import Product, Quantizer, Recipe
from swjax.safe_files import one_line, parse_json, read_inside, write_atomically
from swjax.serving.models import is_prequantized

__all__ = ["Encoder", "export", "load", "pixels", "save"]


class Encoder:
    """A CLIP model for images of any size, and texts.

    Args:
      model: any CLIP, in any recipe.
      batch_size: largest number of images or texts that are embedded at a time.
      templates: prompts that `classifier` uses by default, with "{}" for the name. `load` passes the
        prompts that a run was evaluated with.
      tokenizer: see `swjax.data.tokenize`. `load` passes the one next to the weights.

    Raises:
      ValueError: batch_size is not positive; there is no template, or a template has no "{}".

    >>> cfg = clip.config("tiny", vision={"layers": 1}, text={"layers": 1})
    >>> encoder = Encoder(clip.CLIP(cfg, rngs=nnx.Rngs(0)))
    >>> gray = np.full((90, 120, 3), 128, np.uint8)
    >>> encoder.encode_image([gray]).shape
    (1, 128)
    >>> classifier = encoder.classifier(["cat", "dog"], ["a photo of a {}.", "a drawing of a {}."])
    >>> encoder.classify([gray], classifier).shape
    (1, 2)
    """

    def __init__(
        self,
        model: clip.CLIP,
        *,
        batch_size: int = 64,
        templates: str | Sequence[str] = TEMPLATES,
        tokenizer: str = "",
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model, self.cfg, self.batch_size = model, model.cfg, batch_size
        self.templates, self.tokenizer = embed.check_templates(templates), tokenizer
        graph, self._params = nnx.split(model)
        self._predict = evaluators.predictor(graph, model.cfg.vision.image_size)

    def encode_image(self, images: Iterable) -> np.ndarray:
        """Embeds images as unit vectors [n, embed_dim] float32.

        Args:
          images: n images, see `pixels`; files are read batch by batch. One image is a batch of one.
        """
        images = iter([images] if _is_one_image(images) else images)
        size, fitting = self.cfg.vision.image_size, data.Fitting.of(self.cfg.vision)
        parts = [np.zeros((0, self.cfg.embed_dim), np.float32)]
        while part := list(islice(images, self.batch_size)):
            batch = np.stack([pixels(image, size, fitting) for image in part])
            batch = np.pad(batch, ((0, self._padded(len(part)) - len(part)), *[(0, 0)] * 3))
            embedded = self._predict(self._params, {"image": batch})["image"]
            parts.append(np.asarray(embedded)[: len(part)])
        return np.concatenate(parts)

    def encode_text(self, texts: str | Sequence[str]) -> np.ndarray:
        """Embeds n texts as unit vectors [n, embed_dim] float32; one string is a batch of one.

        Raises:
          FileNotFoundError, ValueError: the tokenizer does not exist, or has another vocabulary.
        """
        data.check_tokenizer(self.tokenizer, self.cfg.text.vocab_size)
        texts = [texts] if isinstance(texts, str) else list(texts)
        parts = embed.texts(self._predict, self._params, texts, **self._text_sizes(len(texts)))
        return np.concatenate([np.zeros((0, self.cfg.embed_dim), np.float32), *parts])

    def classifier(
        self, names: Sequence[str], templates: str | Sequence[str] | None = None
    ) -> np.ndarray:
        """Returns a unit vector per class, the mean over its prompts: [len(names), embed_dim] float32.

        Args:
          names: names of the classes; `swjax.data.imagenet.class_names()` are ImageNet's.
          templates: prompts with "{}" for the name, such as the 80 of
            `swjax.data.imagenet.templates()`. None uses those of the encoder.

        Raises:
          ValueError: `names` is one string, there is no name or no template, a template has no "{}", or the
            tokenizer has another vocabulary than the model.
        """
        data.check_tokenizer(self.tokenizer, self.cfg.text.vocab_size)
        if isinstance(names, str):
            raise ValueError(f"names must be a list of names, got {names!r}: write [{names!r}]")
        templates = embed.check_templates(self.templates if templates is None else templates)
        names = list(names)
        sizes = self._text_sizes(len(names) * len(templates))
        return zeroshot.classifier(self._predict, self._params, names, templates, **sizes)

    def classify(self, images: Iterable, classifier: np.ndarray) -> np.ndarray:
        """Returns the probability of each class for each image: [n, classes] float32, rows sum to 1.

        Args:
          images: n images, or one, see `pixels`.
          classifier: result of the method `classifier`, [classes, embed_dim].

        Raises:
          ValueError: `classifier` has another shape.
        """
        classifier = np.asarray(classifier)
        if classifier.ndim != 2 or classifier.shape[1] != self.cfg.embed_dim:
            raise ValueError(
                f"classifier must be [classes, {self.cfg.embed_dim}], got {list(classifier.shape)}: make it "
                f"of the names of the classes by Encoder.classifier(names)"
            )
        cosines = self.encode_image(images) @ classifier.T
        scale = jnp.exp(self.model.logit_scale[...])
        return np.asarray(jax.nn.softmax(scale * cosines, axis=-1))

    def _text_sizes(self, texts: int) -> dict:
        return {
            "batch_size": self._padded(texts),
            "context_length": self.cfg.text.context_length,
            "tokenizer": self.tokenizer,
        }

    def _padded(self, count: int) -> int:
        """Rounds a batch size up to a power of two, so that few programs are compiled."""
        return min(self.batch_size, 1 << max(count - 1, 0).bit_length())


def _is_one_image(images) -> bool:
    """Whether the argument is one image, perhaps an invalid one that `pixels` rejects, and not several."""
    if isinstance(images, np.ndarray | jax.Array):
        return images.ndim != 4 and images.dtype.kind not in "OUS"  # those hold paths, or images
    kinds = str | bytes | bytearray | memoryview | os.PathLike
    is_file = hasattr(images, "read")
    return is_file or isinstance(images, kinds) or not isinstance(images, Iterable)


def load(
    path: str | Path,
    cfg: clip.CLIPConfig | None = None,
    *,
    prequantize: bool = False,
    **options: Any,
) -> Encoder:
    """Loads the model of a run, of a file by `save`, or of open_clip's, OpenAI's or Hugging Face's weights.

    Of a run, the newest checkpoint is loaded, with the averaged parameters if the run averages them. It
    computes in the dtype of training; weights of other libraries compute in float32. `Encoder.templates`
    are the prompts that the run was evaluated with, which a file by `save` keeps. Weights of other
    libraries have "a photo of a {}.". `Encoder.tokenizer` is CLIP's for models with CLIP's vocabulary.

    Args:
      path: a run's workdir, a file by `save`, or a file of weights, its folder or the name of a model, as for
        `swjax.interop.load`.
      cfg: configuration for `swjax.interop.load`; a run and a file by `save` contain theirs.
      prequantize: whether to keep only 8-bit weights, see `swjax.serving.prequantize`. Needs a quantized
        recipe, and has no effect on a file by `save`.
      **options: fields of the configuration to replace, such as recipe="switchback" or
        dtype="bfloat16".

    Raises:
      FileNotFoundError, ModuleNotFoundError, ValueError: as for `swjax.interop.load`, or the run has no
        checkpoint.
    """
    if not Path(path).exists() and hub.named(path) is None:
        raise FileNotFoundError(
            f"{path} does not exist: give a run's workdir, a file of weights or its folder, or a model's name"
        )
    path = Path(path)
    templates = TEMPLATES
    is_run = (path / "checkpoints").is_dir()
    saved = serving.read_metadata(path) if path.is_file() and is_safetensors(path) else None
    if saved is not None and "config" not in saved:
        raise ValueError(
            f"{path} is a file by swjax.serving.save, which does not describe the model: build the model and "
            "pass both to swjax.serving.load, or save it by swjax.inference.save"
        )
    if not is_run and saved is None:
        model = interop.load(path, cfg, **options)
        tokenizer = interop.tokenizer(path)
    elif cfg is not None:
        kind = "a run" if is_run else "a file by swjax.inference.save"
        raise ValueError(f"{path} is {kind} and has its own configuration: leave cfg out")
    elif saved is not None:
        model, templates = _of_file(path, saved, options)
        tokenizer, prequantize = _tokenizer_of(path), False
    else:
        model, templates = _of_run(path, options)
        tokenizer = interop.tokenizer(path)
    if model.cfg.text.vocab_size == VOCABULARY_SIZE:
        tokenizer = ""
    if prequantize and not is_prequantized(model):  # as with LoRA
        serving.prequantize(model)
    return Encoder(model, templates=templates, tokenizer=tokenizer)


def _tokenizer_of(path: Path) -> str:
    """The tokenizer next to a file by `save`, or ""."""
    return next((str(name) for name in _tokenizer_files(path) if name.is_file()), "")


def _tokenizer_files(path: Path) -> list[Path]:
    return [path.with_suffix(f".tokenizer{ending}") for ending in (".json", ".model")]


def _of_run(workdir: Path, options: dict) -> tuple[clip.CLIP, tuple[str, ...]]:
    """Returns the model of a run, and the templates that it was evaluated with."""
    # These modules need the training libraries, which other weights do not.
    from ml_collections import ConfigDict

    from swjax.training.setup import model_config
    from swjax.training.state.checkpoint import Checkpoints, saved_steps
    from swjax.training.state.initialization import restored_model

    if not saved_steps(workdir):
        raise ValueError(f"{workdir} holds no checkpoint yet: train on with the same command")
    try:
        saved = parse_json(read_inside(workdir, "config.json").decode(errors="replace"))
        config = ConfigDict(saved)
        config.model.attention = ""  # of the devices it was trained on
        described, ema, templates = model_config(config), config.train.ema_decay, _templates(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = one_line(error)
        raise ValueError(
            f"{workdir}/config.json is damaged: {reason:.200}: restore it from a copy"
        ) from error
    cfg = clip.config(described, **options)
    # The kernels of layers with LoRA are quantized for the recipe of the run, or have its dtype.
    assert isinstance(described.recipe, str), "config.model.recipe is one name"
    quantized = recipes.get(described.recipe).fwd is not None
    same = cfg.recipe == described.recipe and (quantized or cfg.dtype == described.dtype)
    merges = described.lora is not None and not same
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with closing(Checkpoints.of("workdir", str(workdir))) as checkpoints:
        name = "ema" if ema else "params"
        model = restored_model(checkpoints, described if merges else cfg, here, name)
    return lora.merged(model, **options) if merges else model, templates or TEMPLATES


def _templates(config) -> tuple[str, ...]:
    """Returns the prompts of the data set that a run was evaluated on; () if it has none."""
    name = config.eval.data or config.data.name
    part = config.data.get("mixture", {}).get(name, {})
    kind = part.get("name", name)
    if kind == "folders":
        return (part.get("template", config.data.folders.template),)
    return data.templates(kind)


def save(path: str | Path, encoder: Encoder) -> None:
    """Writes a model as one safetensors file that `load` opens: int8 weights as int8.

    Args:
      path: path of the file; an existing file is replaced. `swjax.serving.weights` names its arrays. The
        configuration and the templates are JSON in its metadata. A tokenizer other than CLIP's is copied next
        to clip.safetensors as clip.tokenizer.json or clip.tokenizer.model.
      encoder: encoder of any CLIP, prequantized or not.

    Raises:
      FileNotFoundError, ModuleNotFoundError: the tokenizer does not exist, or safetensors is not installed.

    >>> import tempfile
    >>> cfg = clip.config("tiny", vision={"layers": 1}, text={"layers": 1})
    >>> model = serving.prequantize(clip.CLIP(cfg, rngs=nnx.Rngs(0)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/clip.safetensors", Encoder(model))
    ...     load(f"{folder}/clip.safetensors").cfg == cfg
    True
    """
    description = {
        "config": dataclasses.asdict(encoder.cfg),
        "prequantized": is_prequantized(encoder.model),
        "templates": encoder.templates,
    }
    metadata = {name: json.dumps(value) for name, value in description.items()}
    serving.save(path, encoder.model, metadata)
    ending = ".json" if encoder.tokenizer.endswith(".json") else ".model"
    for target in _tokenizer_files(Path(path)):
        if encoder.tokenizer and target.suffix == ending:
            write_atomically(target, Path(encoder.tokenizer).read_bytes())
        else:
            target.unlink(missing_ok=True)  # of a model that was saved here before


def _of_file(
    path: Path, metadata: dict[str, str], options: dict
) -> tuple[clip.CLIP, tuple[str, ...]]:
    """Returns the model of a file, and its templates."""
    try:
        described = _config(parse_json(metadata["config"]))
        prequantized = bool(parse_json(metadata["prequantized"]))
        saved = parse_json(metadata.get("templates", json.dumps(TEMPLATES)))
        templates = embed.check_templates(saved)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = one_line(error)
        raise ValueError(
            f"{path} is damaged, in its metadata: {reason:.200}: save it again"
        ) from error
    cfg = clip.config(described, **options)

    def make():
        model = clip.CLIP(cfg, rngs=nnx.Rngs(0))
        return serving.prequantize(model) if prequantized and cfg.lora is None else model

    try:
        return serving.load(path, nnx.eval_shape(make)), templates
    except ValueError as error:
        if not options:
            raise
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"the {'prequantized ' * prequantized}weights of {path} do not fit {given}: leave that out, or "
            "load what the file was saved from"
        ) from error


def _config(fields: dict) -> clip.CLIPConfig:
    """Reads the configuration from the JSON of its `dataclasses.asdict`."""
    vision, text = VisionConfig(**fields["vision"]), TextConfig(**fields["text"])
    of_lora = LoRA(**fields["lora"]) if fields.get("lora") else None  # older files lack the field
    given = {"vision": vision, "text": text, "lora": of_lora, "recipe": _recipe(fields["recipe"])}
    return clip.CLIPConfig(**fields | given)


def _recipe(value):
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return {pattern: _recipe(recipe) for pattern, recipe in value}
    products = {
        name: Product(**product | {side: Quantizer(**product[side]) for side in ("lhs", "rhs")})
        for name, product in value.items()
        if isinstance(product, dict)
    }
    return Recipe(**value | products)


def export(
    folder: str | Path, encoder: Encoder, platforms: Sequence[str] = ("cpu", "cuda")
) -> None:
    """Writes a model as programs that run with jax alone, for any number of images or texts.

    `model.safetensors` is written by `save`. The program `encode_image.jax` takes its arrays and uint8
    [n, size, size, 3], see `pixels`. The program `encode_text.jax` takes its arrays and int32
    [n, context_length], see `swjax.data.tokenize`. Both return unit vectors [n, embed_dim] float32::

        program = jax.export.deserialize(bytearray(Path("encode_image.jax").read_bytes()))
        vectors = program.call(safetensors.numpy.load_file("model.safetensors"), images)

    Args:
      folder: created if it is missing.
      encoder: encoder of any CLIP whose layers run through XLA. On a GPU, load it with
        implementation="xla" and attention="xla".
      platforms: platforms that the programs run on, see `swjax.serving.export`.

    Raises:
      ImportError: safetensors or flatbuffers is not installed.
      ValueError: as for `swjax.serving.export`.
    """
    folder, cfg = Path(folder), encoder.cfg
    size, (n,) = cfg.vision.image_size, jax.export.symbolic_shape("n")

    def encode_image(model, images):
        return model.encode_image(data.preprocess(images, None, size))[0]

    def encode_text(model, tokens):
        return model.encode_text(tokens)[0]

    inputs = {
        encode_image: jax.ShapeDtypeStruct((n, size, size, 3), jnp.uint8),
        encode_text: jax.ShapeDtypeStruct((n, cfg.text.context_length), jnp.int32),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for function, shape in inputs.items():
        program = serving.export(function, encoder.model, shape, platforms=platforms)
        write_atomically(folder / f"{function.__name__}.jax", bytes(program.serialize()))
    save(folder / "model.safetensors", encoder)


def pixels(image: Any, size: int, fitting: data.Fitting = SHORTEST) -> np.ndarray:
    """Converts an image to uint8 [size, size, 3]: open_clip's pixels before normalization.

    `swjax.data.decoding.rgb` decodes it as in training: transparent pixels become white, while open_clip
    uses the color that they hide. Then the image is fitted into a square with an antialiased filter.

    Args:
      image: a JPEG, PNG, WebP, GIF, BMP or TIFF file, as its path, its bytes or a binary file object
        such as `io.BytesIO`; a `PIL.Image.Image`; or a NumPy or JAX array, uint8 [h, w, 3 or 4].
      size: height and width of the result.
      fitting: how an image of any shape becomes a square: `swjax.data.Fitting.of(cfg.vision)` for a model; by
        default its shorter side is scaled and its center is cropped.

    Raises:
      OSError: the file cannot be read or is truncated.
      TypeError: the image has another type.
      ValueError: the file is damaged or not an image of these formats, or the array has another shape or
        dtype.
    """
    require("PIL")
    from PIL import Image

    name = ""
    if isinstance(image, str | os.PathLike):
        name, image = f"{image}: ", Path(image).read_bytes()
    elif hasattr(image, "read"):
        image = image.read()
    if isinstance(image, bytes | bytearray | memoryview):
        try:
            return fit(decoding.decode_with_pillow(bytes(image)), size, fitting=fitting)
        except Exception as error:  # Pillow raises errors of many types for damaged files
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"{name}{error}") from error
    if isinstance(image, np.ndarray | jax.Array):
        image = np.asarray(image)
        if image.dtype != np.uint8 or image.shape[2:] not in ((3,), (4,)) or not image.size:
            h, _, channels = image.shape if image.ndim == 3 else (0, 0, 0)
            swapped = h in (3, 4) and channels not in (1, 3, 4)
            remedy = (
                "move the channels last"
                if swapped
                else "scale it to 0..255 and repeat gray three times"
            )
            raise ValueError(
                f"an image must be uint8 [h, w, 3 or 4], got {image.dtype} {list(image.shape)}: {remedy}"
            )
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise TypeError(
            f"an image must be a path, bytes, a binary file, a PIL image or a uint8 array "
            f"[h, w, 3 or 4], got {type(image).__name__}"
        )
    return fit(decoding.rgb(image), size, fitting=fitting)
