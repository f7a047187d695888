"""The encoder: images and texts in, unit vectors and class probabilities out; loading, saving, exporting."""

import dataclasses
import io
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

from swjax import data, evaluators, interop, serving
from swjax.data import decoding
from swjax.data.images import fit
from swjax.data.packages import require
from swjax.evaluators import embed, zeroshot
from swjax.models import clip
from swjax.models.config import TextConfig, VisionConfig
from swjax.recipes import Product, Quantizer, Recipe

__all__ = ["Encoder", "export", "load", "pixels", "save"]

TEMPLATES: tuple[str, ...] = ("a photo of a {}.",)  # for weights without recorded prompts


class Encoder:
    """A CLIP model that takes images of any size, and texts.

    Args:
      model: any CLIP, in any recipe.
      batch_size: images, or texts, embedded at once at most.
      templates: prompts that `classifier` uses by default, with "{}" for the name. `load` gives those
        that a run was evaluated with.

    Raises:
      ValueError: batch_size is not positive; no template, or one without a place for the name.

    >>> cfg = clip.config("tiny", vision={"layers": 1}, text={"layers": 1})
    >>> encoder = Encoder(clip.CLIP(cfg, rngs=nnx.Rngs(0)))
    >>> grey = np.full((90, 120, 3), 128, np.uint8)
    >>> encoder.encode_image([grey]).shape
    (1, 128)
    >>> classifier = encoder.classifier(["cat", "dog"], ["a photo of a {}.", "a drawing of a {}."])
    >>> encoder.classify([grey], classifier).shape
    (1, 2)
    """

    def __init__(
        self,
        model: clip.CLIP,
        *,
        batch_size: int = 64,
        templates: str | Sequence[str] = TEMPLATES,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model, self.cfg, self.batch_size = model, model.cfg, batch_size
        self.templates = embed.check_templates(templates)
        graph, self._params = nnx.split(model)
        self._predict = evaluators.predictor(graph, model.cfg.vision.image_size)

    def encode_image(self, images: Iterable) -> np.ndarray:
        """Unit vectors [n, embed_dim] float32.

        Args:
          images: n of them, see `pixels`; read as they are needed. One image is a batch of one.
        """
        images = iter([images] if _is_one_image(images) else images)
        parts = [np.zeros((0, self.cfg.embed_dim), np.float32)]
        while part := list(islice(images, self.batch_size)):
            batch = np.stack([pixels(image, self.cfg.vision.image_size) for image in part])
            batch = np.pad(batch, ((0, self._padded(len(part)) - len(part)), *[(0, 0)] * 3))
            embedded = self._predict(self._params, {"image": batch})["image"]
            parts.append(np.asarray(embedded)[: len(part)])
        return np.concatenate(parts)

    def encode_text(self, texts: str | Sequence[str]) -> np.ndarray:
        """Unit vectors [n, embed_dim] float32 of n texts; one string is a batch of one."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        parts = embed.texts(self._predict, self._params, texts, **self._text_sizes(len(texts)))
        return np.concatenate([np.zeros((0, self.cfg.embed_dim), np.float32), *parts])

    def classifier(
        self, names: Sequence[str], templates: str | Sequence[str] | None = None
    ) -> np.ndarray:
        """A unit vector for each class, the mean of its prompts': [len(names), embed_dim] float32.

        Args:
          names: of the classes; ImageNet's are `swjax.data.imagenet.class_names()`.
          templates: prompts with "{}" for the name; `swjax.data.imagenet.templates()` are 80. None:
            the encoder's own.

        Raises:
          ValueError: one string in place of names; no name or no template, or a template without a place
            for the name.
        """
        if isinstance(names, str):
            raise ValueError(f"names must be a list of names, got {names!r}: write [{names!r}]")
        templates = embed.check_templates(self.templates if templates is None else templates)
        names = list(names)
        sizes = self._text_sizes(len(names) * len(templates))
        return zeroshot.classifier(self._predict, self._params, names, templates, **sizes)

    def classify(self, images: Iterable, classifier: np.ndarray) -> np.ndarray:
        """How likely each image shows each class, among these: [n, classes] float32, rows sum to 1.

        Args:
          images: n of them, or one, see `pixels`.
          classifier: of `classifier`, [classes, embed_dim].

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
        }

    def _padded(self, count: int) -> int:
        """A power of two, so that few programs are compiled, and one image costs one image."""
        return min(self.batch_size, 1 << max(count - 1, 0).bit_length())


def _is_one_image(images) -> bool:
    """Whether the argument is one image, or an invalid one that `pixels` rejects, not several images."""
    if isinstance(images, np.ndarray | jax.Array):
        return images.ndim != 4 and images.dtype.kind not in "OUS"  # those hold paths, or images
    kinds = str | bytes | bytearray | memoryview | os.PathLike | io.IOBase
    return isinstance(images, kinds) or not isinstance(images, Iterable)


def load(
    path: str | Path,
    cfg: clip.CLIPConfig | None = None,
    *,
    prequantize: bool = False,
    **options: Any,
) -> Encoder:
    """The model of a run, of a file by `save`, or of safetensors by open_clip, OpenAI or Hugging Face.

    A run's newest checkpoint is taken, of the averaged parameters if it averages them, and computes as
    in training; weights of others compute in float32. `Encoder.templates` are those that the run was
    evaluated with, which a file by `save` keeps, and "a photo of a {}." for weights of others.

    Args:
      path: a run's workdir; a file by `save`; or what `swjax.interop.load` takes: a safetensors file or
        its folder.
      cfg: for `swjax.interop.load`; a run and a file by `save` have their own.
      prequantize: keep 8-bit weights alone, see `swjax.serving.prequantize`; needs a quantized recipe.
        A file by `save` is what it was saved as.
      **options: fields of the configuration to be replaced, such as recipe="switchback" or
        dtype="bfloat16".

    Raises:
      FileNotFoundError, ModuleNotFoundError, ValueError: as `swjax.interop.load`; a run without a
        checkpoint.
    """
    path = Path(path)
    templates = TEMPLATES
    is_run = (path / "checkpoints").is_dir()
    saved = serving.read_metadata(path) if path.is_file() else None
    if not is_run and saved is None:
        model = interop.load(path, cfg, **options)
    elif cfg is not None:
        kind = "a run" if is_run else "a file by swjax.inference.save"
        raise ValueError(f"{path} is {kind} and has its own configuration: leave cfg out")
    elif saved is not None:
        templates = json.loads(saved["templates"]) if "templates" in saved else TEMPLATES
        return Encoder(_of_file(path, saved, options), templates=templates)
    else:
        model, templates = _of_run(path, options)
    return Encoder(serving.prequantize(model) if prequantize else model, templates=templates)


def _of_run(workdir: Path, options: dict) -> tuple[clip.CLIP, tuple[str, ...]]:
    """The model of a run, and the templates that it was evaluated with."""
    # These modules need the training libraries, which other weights do not.
    from ml_collections import ConfigDict

    from swjax.training.checkpoint import Checkpoints
    from swjax.training.setup import model_config

    if not any((workdir / "checkpoints").glob("[0-9]*")):
        raise ValueError(f"{workdir} holds no checkpoint yet: train on with the same command")
    config = ConfigDict(json.loads((workdir / "config.json").read_text()))
    config.model.attention = ""  # of the devices it was trained on
    cfg = clip.config(model_config(config), **options)
    graph, state = nnx.split(nnx.eval_shape(lambda: clip.CLIP(cfg, rngs=nnx.Rngs(0))))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        nnx.to_pure_dict(state),
    )
    name = "ema" if config.train.ema_decay else "params"
    with closing(Checkpoints.of("workdir", str(workdir))) as checkpoints:
        nnx.replace_by_pure_dict(state, checkpoints.restore_params(like, name))
    return nnx.merge(graph, state), _templates(config) or TEMPLATES


def _templates(config) -> tuple[str, ...]:
    """The prompts of the data set that a run was evaluated on; (): it has none."""
    name = config.eval.data or config.data.name
    mixture = config.data.get("mixture", {})
    return data.templates(mixture[name].get("name", name) if name in mixture else name)


def save(path: str | Path, encoder: Encoder) -> None:
    """Writes a model as one safetensors file that `load` opens: int8 weights as int8.

    Args:
      path: of the file, which is replaced if it is there. `swjax.serving.weights` names its arrays; the
        configuration and the templates are JSON in its metadata.
      encoder: of any CLIP, prequantized or not.

    Raises:
      ModuleNotFoundError: safetensors is not installed.

    >>> import tempfile
    >>> cfg = clip.config("tiny", vision={"layers": 1}, text={"layers": 1})
    >>> model = serving.prequantize(clip.CLIP(cfg, rngs=nnx.Rngs(0)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/clip.safetensors", Encoder(model))
    ...     load(f"{folder}/clip.safetensors").cfg == cfg
    True
    """
    prequantized = any(
        isinstance(leaf, serving.QuantizedKernel) for _, leaf in nnx.iter_graph(encoder.model)
    )
    description = {
        "config": dataclasses.asdict(encoder.cfg),
        "prequantized": prequantized,
        "templates": encoder.templates,
    }
    metadata = {name: json.dumps(value) for name, value in description.items()}
    serving.save(path, encoder.model, metadata)


def _of_file(path: Path, metadata: dict[str, str], options: dict) -> clip.CLIP:
    cfg = clip.config(_config(json.loads(metadata["config"])), **options)

    def make():
        model = clip.CLIP(cfg, rngs=nnx.Rngs(0))
        return serving.prequantize(model) if json.loads(metadata["prequantized"]) else model

    return serving.load(path, nnx.eval_shape(make))


def _config(fields: dict) -> clip.CLIPConfig:
    """The configuration from JSON of its `dataclasses.asdict`."""
    vision, text = VisionConfig(**fields["vision"]), TextConfig(**fields["text"])
    recipe = _recipe(fields["recipe"])
    return clip.CLIPConfig(**fields | {"vision": vision, "text": text, "recipe": recipe})


def _recipe(value):
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return {pattern: _recipe(recipe) for pattern, recipe in value}
    products = {
        name: Product(
            Quantizer(**product["lhs"]), Quantizer(**product["rhs"]), product["outlier_threshold"]
        )
        for name, product in value.items()
        if isinstance(product, dict)
    }
    return Recipe(**value | products)


def export(
    folder: str | Path, encoder: Encoder, platforms: Sequence[str] = ("cpu", "cuda")
) -> None:
    """Writes a model as programs that run with jax alone, for any number of images or texts.

    `model.safetensors` is by `save`; `encode_image.jax` takes its arrays and uint8 [n, size, size, 3], as
    `pixels` gives them; `encode_text.jax` int32 [n, context_length], as `swjax.data.tokenize` does. Both
    give unit vectors [n, embed_dim] float32::

        program = jax.export.deserialize(bytearray(Path("encode_image.jax").read_bytes()))
        vectors = program.call(safetensors.numpy.load_file("model.safetensors"), images)

    Args:
      folder: created if it is missing.
      encoder: of any CLIP whose layers run through XLA: on a GPU load it with implementation="xla" and
        attention="xla".
      platforms: that the programs run on, see `swjax.serving.export`.

    Raises:
      ImportError: safetensors or flatbuffers is not installed.
      ValueError: as `swjax.serving.export`.
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
        (folder / f"{function.__name__}.jax").write_bytes(program.serialize())
    save(folder / "model.safetensors", encoder)


def pixels(image: Any, size: int) -> np.ndarray:
    """An image as uint8 [size, size, 3]: open_clip's pixels before they are normalised.

    `swjax.data.decoding.rgb` converts it as in training: transparent pixels become white, where
    open_clip shows the colour hidden there. Then the shorter side is scaled to `size`, bicubic and
    antialiased, and the middle cut out.

    Args:
      image: a JPEG, PNG, WebP, GIF, BMP or TIFF file, as its path, its bytes or a binary file object
        such as `io.BytesIO`; a `PIL.Image.Image`; or a NumPy or JAX array, uint8 [h, w, 3 or 4].
      size: pixels.

    Raises:
      OSError: the file cannot be read or is truncated.
      TypeError: a value of another type.
      ValueError: a file that is no such image; an array of another shape or dtype.
    """
    require("PIL")
    from PIL import Image

    if isinstance(image, str | os.PathLike):
        image = Path(image).read_bytes()
    elif isinstance(image, io.IOBase):
        image = image.read()
    if isinstance(image, bytes | bytearray | memoryview):
        return fit(decoding.decode_with_pillow(bytes(image)), size)
    if isinstance(image, np.ndarray | jax.Array):
        image = np.asarray(image)
        if image.dtype != np.uint8 or image.shape[2:] not in ((3,), (4,)) or not image.size:
            raise ValueError(
                f"an image must be uint8 [h, w, 3 or 4], got {image.dtype} {list(image.shape)}: "
                f"scale it to 0..255 and repeat grey three times"
            )
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise TypeError(
            f"an image must be a path, bytes, a binary file, a PIL image or a uint8 array "
            f"[h, w, 3 or 4], got {type(image).__name__}"
        )
    return fit(decoding.rgb(image), size)
