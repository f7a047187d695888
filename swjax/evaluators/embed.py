"""Embeds a whole set with a sharded predict function, batch by batch, on one process or many.

Each process reads its own rows of every batch, those of its `swjax.models.sharding.Share`; the embeddings
come back to all of them, on the host.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from swjax import data
from swjax.models import sharding
from swjax.models.sharding import Share

ALONE = Share(0, (0,))

# (params, {"image" or "text": this process's rows}) -> {the same key: embeddings [b, e] of all processes}.
Predict = Callable[[object, dict], dict]


def predictor(graph: Any, image_size: int) -> Predict:
    """The predict function, jitted, of a CLIP model: its embeddings are unit vectors already.

    Args:
      graph: of `flax.nnx.split(model)`; the other part are the params of what is returned.
      image_size: pixels, height = width.
    """
    from flax import nnx  # loads Orbax, which scoring alone does not need

    @jax.jit
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
    share: Share = ALONE,
) -> Iterator[np.ndarray]:
    """Embeds texts in order.

    Args:
      predict: (params, {"text": tokens int32 [b, context_length]}) -> {"text": embeddings [b, e]}.
      params: passed on.
      texts: any number; read as they are needed.
      batch_size: over all processes.
      context_length: tokens a text.
      share: this process's part of each batch.

    Yields:
      Unit vectors [b, e] float32 of the next b texts: `batch_size`, fewer at the end.
    """
    local = _local(batch_size, share)
    rows = slice(share.index * local, (share.index + 1) * local)
    texts = iter(texts)
    while part := list(itertools.islice(texts, batch_size)):
        padded = part + [""] * (batch_size - len(part))
        tokens = data.tokenize(padded[rows], context_length=context_length)
        yield unit(_gather(predict(params, {"text": tokens})["text"]))[: len(part)]


class Images(NamedTuple):
    """The images of a source that can be read.

    Attributes:
      embeddings: unit vectors [n, e] float32.
      labels: [n].
      numbers: [n] the numbers of the examples in the source.
      rows: [m] the rows of those whose pixels were wanted.
      pixels: uint8 [m, height, width, channels]; None if none were wanted.
    """

    embeddings: np.ndarray
    labels: np.ndarray
    numbers: np.ndarray
    rows: np.ndarray
    pixels: np.ndarray | None


def images(
    predict: Predict,
    params: Any,
    source: data.Source,
    *,
    batch_size: int,
    context_length: int,
    image_size: int,
    share: Share = ALONE,
    count: int = 0,
) -> Images:
    """Embeds every image of a source that can be read, in order.

    Args:
      predict: (params, {"image": uint8 [b, height, width, channels]}) -> {"image": embeddings [b, e]}.
      params: passed on.
      source: records, see `swjax.data.source`.
      batch_size: over all processes.
      context_length, image_size: as in training.
      share: this process's part of each batch.
      count: how many images' pixels are kept; they are evenly spaced over the source.

    Raises:
      ValueError: there are no images.
    """
    if len(source) == 0:
        raise ValueError("the source to evaluate on has no images: choose another split")
    keep = evenly_spaced(count, len(source))
    batches = data.loader(
        source,
        batch_size=_local(batch_size, share),
        train=False,
        context_length=context_length,
        image_size=image_size,
        process_index=share.index,
        process_count=share.count,
    )
    parts, kept = [], None
    for batch in batches:
        embedding = predict(params, {"image": batch["image"]})["image"]
        mask, label, index = (_join(batch[name], share) for name in ("mask", "label", "index"))
        columns = unit(_gather(embedding)), label, index
        parts.append([column[mask] for column in columns])
        if keep:
            if kept is None:
                kept = np.zeros((len(keep), *batch["image"].shape[1:]), np.uint8)
            wanted = (np.asarray(keep)[:, None] == batch["index"]) & batch["mask"]
            slots, rows = np.nonzero(wanted)
            kept[slots] = batch["image"][rows]
    embeddings, labels, index = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(index)
    columns = embeddings[order], labels[order], index[order]
    if kept is None:
        return Images(*columns, np.zeros(0, np.int64), None)
    kept = _gather(kept[None]).max(axis=0)  # one process read each image; it is 0 in the others
    readable = np.isin(keep, index)
    rows = np.searchsorted(index[order], np.asarray(keep)[readable])
    return Images(*columns, rows, kept[readable])


def evenly_spaced(count: int, total: int) -> list[int]:
    """The indices of some of `total` examples; of all if there are fewer.

    >>> evenly_spaced(3, 9), evenly_spaced(9, 2)
    ([0, 4, 8], [0, 1])
    """
    return np.unique(np.linspace(0, total - 1, count).round().astype(int)).tolist()


def check_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the prompt templates; one string is one of them.

    Raises:
      ValueError: there are none, or one has no place for the name.
    """
    templates = (templates,) if isinstance(templates, str) else tuple(templates)
    bad = [t for t in templates if "{}" not in t]
    if bad or not templates:
        raise ValueError(f'prompt templates need a "{{}}" for the name, got {bad or templates}')
    return templates


def _local(batch_size: int, share: Share) -> int:
    if batch_size % share.count:
        raise ValueError(
            f"batch_size={batch_size} does not divide into {share.count} processes' parts: choose a multiple"
        )
    return batch_size // share.count


def _gather(x) -> np.ndarray:
    """All rows of an array on the devices of all processes; or those of every process, one after another."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _join(own: np.ndarray, share: Share) -> np.ndarray:
    """The rows of a whole batch, from this process's."""
    return _gather(own[None])[list(share.readers)].reshape(-1, *own.shape[1:])


def unit(x: np.ndarray) -> np.ndarray:
    """Rows at length 1; a zero row stays zero."""
    x = x.astype(np.float32)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.float32(1e-12))
