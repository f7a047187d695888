"""A trained CLIP at work: images and texts in, unit vectors and class probabilities out.

Five lines name a picture, with a run of one's own or weights of others:

  from swjax import inference
  model = inference.load("runs/openmoji")
  names = ["cat", "dog", "violin"]
  probabilities = model.classify(["picture.png"], model.classifier(names))
  print(names[probabilities[0].argmax()])
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swjax import evaluators, interop
from swjax.data.images import fit
from swjax.data.packages import require
from swjax.evaluators import embed, zeroshot
from swjax.models import clip

__all__ = ["Encoder", "load", "pixels"]


class Encoder:
    """A CLIP model that takes images and texts as they come.

    Args:
      model: any CLIP; it computes as its configuration says, in int8 too.
      batch_size: images, or texts, embedded at once at most.

    >>> cfg = clip.config("tiny", vision={"layers": 1}, text={"layers": 1})
    >>> encoder = Encoder(clip.CLIP(cfg, rngs=nnx.Rngs(0)))
    >>> grey = np.full((90, 120, 3), 128, np.uint8)
    >>> encoder.encode_image([grey]).shape
    (1, 128)
    >>> classifier = encoder.classifier(["cat", "dog"], ["a photo of a {}.", "a drawing of a {}."])
    >>> encoder.classify([grey], classifier).shape
    (1, 2)
    """

    def __init__(self, model: clip.CLIP, *, batch_size: int = 64):
        self.model, self.cfg, self.batch_size = model, model.cfg, batch_size
        graph, self._params = nnx.split(model)
        self._predict = evaluators.predictor(graph, model.cfg.vision.image_size)

    def encode_image(self, images: Iterable) -> np.ndarray:
        """Unit vectors [n, embed_dim] float32.

        Args:
          images: n of them, see `pixels`; read as they are needed.
        """
        images = iter(images)
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
        self, names: Sequence[str], templates: str | Sequence[str] = ("a photo of a {}.",)
    ) -> np.ndarray:
        """A unit vector for each class, the mean of its prompts': [len(names), embed_dim] float32.

        Args:
          names: of the classes; ImageNet's are `swjax.data.imagenet.class_names()`.
          templates: prompts with "{}" for the name; `swjax.data.imagenet.templates()` are 80.

        Raises:
          ValueError: no name or no template, or a template without a place for the name.
        """
        templates = embed.check_templates(templates)
        sizes = self._text_sizes(len(names) * len(templates))
        return zeroshot.classifier(self._predict, self._params, names, templates, **sizes)

    def classify(self, images: Iterable, classifier: np.ndarray) -> np.ndarray:
        """How likely each image shows each class, among these: [n, classes] float32, rows sum to 1.

        Args:
          images: n of them, see `pixels`.
          classifier: of `classifier`, [classes, embed_dim].
        """
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


def load(path: str | Path, cfg: clip.CLIPConfig | None = None, **options) -> Encoder:
    """The model of a run, or of safetensors by open_clip, OpenAI or Hugging Face.

    A run's newest checkpoint is taken, of the averaged parameters if it averages them, and computes as
    in training; weights of others compute in float32.

    Args:
      path: a run's workdir; or what `swjax.interop.load` takes: a safetensors file or its folder.
      cfg: for `swjax.interop.load`; a run has its own.
      **options: fields of the configuration to be replaced, such as recipe="standard" or
        dtype="bfloat16".

    Raises:
      FileNotFoundError, ModuleNotFoundError, ValueError: as `swjax.interop.load`; a run without a
        checkpoint.
    """
    path = Path(path)
    if not (path / "checkpoints").is_dir():
        return Encoder(interop.load(path, cfg, **options))
    if cfg is not None:
        raise ValueError(f"{path} is a run and has its own configuration: leave cfg out")
    return Encoder(_of_run(path, options))


def _of_run(workdir: Path, options: dict) -> clip.CLIP:
    # Libraries of training, which weights of others do not need.
    from ml_collections import ConfigDict

    from swjax import trainer
    from swjax.checkpoint import Checkpoints

    if not any((workdir / "checkpoints").glob("[0-9]*")):
        raise ValueError(f"{workdir} holds no checkpoint yet: train on with the same command")
    config = ConfigDict(json.loads((workdir / "config.json").read_text()))
    config.model.attention = ""  # of the devices it was trained on
    cfg = clip.config(trainer.model_config(config), **options)
    graph, state = nnx.split(nnx.eval_shape(lambda: clip.CLIP(cfg, rngs=nnx.Rngs(0))))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        nnx.to_pure_dict(state),
    )
    name = "ema" if config.train.ema_decay else "params"
    with closing(Checkpoints.of("workdir", str(workdir))) as checkpoints:
        nnx.replace_by_pure_dict(state, checkpoints.restore_params(like, name))
    return nnx.merge(graph, state)


def pixels(image, size: int) -> np.ndarray:
    """An image as uint8 [size, size, 3]: open_clip's pixels before they are normalised.

    The shorter side is scaled to `size`, bicubic and antialiased, and the middle cut out. What is
    transparent is white, as in training on drawings; open_clip would show the colour hidden there.

    Args:
      image: a file's path, a `PIL.Image.Image`, or uint8 [h, w, 3 or 4].
      size: pixels.

    Raises:
      ValueError: an array of another shape or dtype.
    """
    require("PIL")
    from PIL import Image

    if isinstance(image, str | os.PathLike):
        with Image.open(image) as file:
            return pixels(file, size)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (3, 4):
            raise ValueError(
                f"an image must be uint8 [h, w, 3 or 4], got {image.dtype} {list(image.shape)}: "
                f"scale it to 0..255"
            )
        image = Image.fromarray(image)
    if not image.has_transparency_data:
        return fit(np.asarray(image.convert("RGB")), size)
    drawing = Image.fromarray(fit(np.asarray(image.convert("RGBA")), size))
    white = Image.new("RGBA", drawing.size, "white")
    return np.asarray(Image.alpha_composite(white, drawing))[..., :3]
