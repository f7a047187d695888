"""Embeds a whole set with a sharded predict function, batch by batch, in one process or many.

Each process reads its own rows of every batch, given by its `swjax.models.sharding.Share`. All processes
receive all embeddings, in host memory.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from swjax import data
from swjax.data.examples import EvalExample
from swjax.data.images import SHORTEST
from swjax.data.sources import spread
from swjax.models import sharding
from swjax.models.sharding import Share

ALONE = Share(0, (0,))

# (params, {"image" or "text": this process's rows}) -> {the same key: embeddings [b, e] of all processes}.
Predict = Callable[[object, dict], dict]


def predictor(graph: Any, image_size: int) -> Predict:
    """Returns the jitted predict function of a CLIP model, whose embeddings are already unit vectors.

    Args:
      graph: the graph definition from `flax.nnx.split(model)`; the state is the `params` of the result.
      image_size: pixels, height = width.
    """
    from flax import nnx  # imported here, because flax loads Orbax, which scoring does not need

    @partial(jax.jit, compiler_options=sharding.compiler_options())
    def predict(params, batch):
        model, out = nnx.merge(graph, sharding.gather_params(params)), {}
        if "image" in batch:
            images = data.preprocess(batch["image"], None, image_size)
            out["image"], _ = model.encode_image(images)
        if "text" in batch:
            out["text"], _ = model.encode_text(batch["text"])
        return out

    return predict


def texts(
    predict: Predict,
    params: Any,
    texts: Iterable[str],
    *,
    batch_size: int,
    context_length: int,
    tokenizer: str = "",
    share: Share = ALONE,
) -> Iterator[np.ndarray]:
    """Embeds texts in order.

    Args:
      predict: (params, {"text": tokens int32 [b, context_length]}) -> {"text": embeddings [b, e]}.
      params: parameters for `predict`.
      texts: any number of texts, consumed lazily.
      batch_size: texts per batch, over all processes.
      context_length, tokenizer: tokens per text, and what makes them, see `swjax.data.tokenize`.
      share: this process's share of each batch.

    Yields:
      Unit vectors [b, e] float32 of the next b texts; b is `batch_size`, or less for the last batch.
    """
    local = _local(batch_size, share)
    rows = slice(share.index * local, (share.index + 1) * local)
    texts = iter(texts)
    while part := list(itertools.islice(texts, batch_size)):
        padded = part + [""] * (batch_size - len(part))
        tokens = data.tokenize(padded[rows], context_length, tokenizer)
        yield unit(_gather(predict(params, {"text": tokens})["text"]))[: len(part)]


class Images(NamedTuple):
    """The readable images of a source.

    Attributes:
      embeddings: unit vectors [n, e] float32.
      labels: [n], label of each image.
      numbers: [n], index of each image in the source.
      digests: uint8 [n, 8], a hash of the pixels of each image; zeros if not wanted.
      rows: [m], rows of the images whose pixels were kept.
      pixels: uint8 [m, height, width, channels], or None if no pixels were kept.
      alike: {label: labels of the images with the same pixels, for which its image stands}, see `Retrieval`.
    """

    embeddings: np.ndarray
    labels: np.ndarray
    numbers: np.ndarray
    digests: np.ndarray
    rows: np.ndarray
    pixels: np.ndarray | None
    alike: dict[int, list[int]]


def images(
    predict: Predict,
    params: Any,
    source: data.Source,
    *,
    batch_size: int,
    context_length: int,
    image_size: int,
    tokenizer: str = "",
    fitting: data.Fitting = SHORTEST,
    share: Share = ALONE,
    count: int = 0,
    hashed: bool = False,
    what: str = "",
    on_bad: str = "skip",
    max_bad_share: float = 0.01,
) -> Images:
    """Embeds every readable image of a source, in order.

    Args:
      predict: (params, {"image": uint8 [b, height, width, channels]}) -> {"image": embeddings [b, e]}.
      params: parameters for `predict`.
      source: the data set, see `swjax.data.source`.
      batch_size: images per batch, over all processes.
      context_length, image_size: tokens per text and height = width in pixels, as in training.
      tokenizer, fitting: what makes the tokens, and how pictures become squares, as in training.
      share: this process's share of each batch.
      count: number of images whose pixels are kept, evenly spaced over the source.
      hashed: whether to hash the pixels.
      what: the set, for the beginning of errors.
      on_bad, max_bad_share: see `swjax.data.skipping.Skips`.

    Raises:
      ValueError: the source has no images.
      BadData: none is readable, or too many are unreadable.
    """
    what = what and f"{what}: "
    if len(source) == 0:
        raise ValueError(f"{what}the source to evaluate on has no images: choose another split")
    keep = spread(len(source), count)
    batches = data.loader(
        source,
        batch_size=_local(batch_size, share),
        train=False,
        context_length=context_length,
        tokenizer=tokenizer,
        image_size=image_size,
        fitting=fitting,
        process_index=share.index,
        process_count=share.count,
        on_bad=on_bad,
        max_bad_share=max_bad_share,
    )
    parts, kept = [], None
    for batch in _blame(batches, what):
        embedding = predict(params, {"image": batch["image"]})["image"]
        own = (
            *(batch[name] for name in ("mask", "label", "index")),
            _digests(batch["image"], hashed),
        )
        mask, *others = (_join(column, share) for column in own)
        columns = unit(_gather(embedding)), *others
        parts.append([column[mask] for column in columns])
        if keep:
            if kept is None:
                kept = np.zeros((len(keep), *batch["image"].shape[1:]), np.uint8)
            wanted = (np.asarray(keep)[:, None] == batch["index"]) & batch["mask"]
            slots, rows = np.nonzero(wanted)
            kept[slots] = batch["image"][rows]
    embeddings, labels, index, digests = map(np.concatenate, zip(*parts, strict=True))
    if not len(index):
        raise data.BadData(
            f"{what}none of the {len(source)} images to evaluate on can be read: repair them, or choose "
            "another split"
        )
    order = np.argsort(index)
    sorted_columns = embeddings[order], labels[order], index[order], digests[order]
    if kept is None:
        return Images(*sorted_columns, np.zeros(0, np.int64), None, {})
    kept = _gather(kept[None]).max(axis=0)  # one process has read each image; the others have 0
    readable = np.isin(keep, index)
    rows = np.searchsorted(index[order], np.asarray(keep)[readable])
    return Images(*sorted_columns, rows, kept[readable], {})


class OfSet:
    """What evaluators of a set share: its images, and the sizes of batches and texts.

    Args:
      predict, source, batch_size, share, on_bad, max_bad_share: see `images`.
      name: name of the set, for the names of the scores.
      what: the set, for the beginning of errors.
      context_length, image_size, tokenizer, fitting: see `images`.
    """

    def __init__(
        self,
        predict: Predict,
        source: data.Source,
        name: str,
        what: str,
        *,
        batch_size: int,
        context_length: int,
        image_size: int,
        tokenizer: str = "",
        fitting: data.Fitting = SHORTEST,
        share: Share = ALONE,
        on_bad: str = "skip",
        max_bad_share: float = 0.01,
    ):
        self._predict, self._source, self._name = predict, source, name
        self._sizes: dict[str, Any] = {
            "batch_size": batch_size,
            "context_length": context_length,
            "tokenizer": tokenizer,
            "share": share,
        }
        reading: dict[str, Any] = {"on_bad": on_bad, "max_bad_share": max_bad_share, "what": what}
        reading |= {"image_size": image_size, "fitting": fitting}
        self._images: Callable[..., Images] = partial(
            images, predict, source=source, **reading, **self._sizes
        )
        self._example = EvalExample(source, context_length, image_size, fitting, tokenizer)


def _blame(batches: Iterable[dict], what: str) -> Iterator[dict]:
    """Yields the batches; an error about the data begins with the name of the set."""
    try:
        yield from batches
    except data.BadData as error:
        raise data.BadData(f"{what}{error}") from error


def check_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the prompt templates as a tuple; a single string is one template.

    Raises:
      ValueError: there is no template, or a template is not a text with "{}" for the name.
    """
    single = isinstance(templates, str) or callable(templates)
    found: tuple[Any, ...] = (templates,) if single else tuple(templates)
    wrong = [t for t in found if not isinstance(t, str)]
    if wrong:
        raise ValueError(
            f'prompt templates must be texts with "{{}}" for the name, such as "a photo of a {{}}.", got a '
            f'{type(wrong[0]).__name__}: write the text that it makes of "{{}}"'
        )
    bad = [t for t in found if "{}" not in t]
    if bad or not found:
        raise ValueError(f'prompt templates need a "{{}}" for the name, got {bad or found}')
    return found


def _local(batch_size: int, share: Share) -> int:
    if batch_size % share.count:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of the {share.count} processes"
        )
    return batch_size // share.count


def _gather(x) -> np.ndarray:
    """Gathers an array: all rows of a sharded array, or the concatenated local arrays of all processes."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _digests(images: np.ndarray, hashed: bool) -> np.ndarray:
    if not hashed:
        return np.zeros((len(images), 8), np.uint8)
    hashes = (hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images)
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 8)


def _join(own: np.ndarray, share: Share) -> np.ndarray:
    """Gathers the rows of a whole batch from the rows of each process."""
    return _gather(own[None])[list(share.readers)].reshape(-1, *own.shape[1:])


def unit(x: np.ndarray) -> np.ndarray:
    """Normalizes rows to length 1; zero rows stay zero."""
    x = x.astype(np.float32)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.float32(1e-12))
