"""Retrieval of the captions of an image among all captions, and of images among all images."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swjax import data
from swjax.data.sources import spread
from swjax.evaluators import embed
from swjax.evaluators.ranking import chance, ranks, recall, top
from swjax.evaluators.zeroshot import Prediction


@dataclasses.dataclass(frozen=True)
class NearestImages:
    """One caption and the images nearest to it.

    Attributes:
      caption: the query.
      images: uint8 [k, height, width, channels], best first, as the loader yields them.
      own: [k], whether the caption belongs to the image.
      cosines: [k], cosine similarities.
    """

    caption: str
    images: np.ndarray
    own: tuple[bool, ...]
    cosines: tuple[float, ...]


class Retrieval(embed.OfSet):
    """Recall at 1, 5 and 10, from images to texts and from texts to images.

    An image may have several captions, and a caption several images. A query is answered within the first k
    if any correct candidate is among them. Texts that the model reads as one, such as "A cat" and "a cat", or
    texts that differ after the last token that it reads, count as one caption. Ties count against the model.
    Photographs with equal pixels, as in a table with a row for each caption, are one image with all captions.

    Args:
      predict: see `swjax.evaluators.embed`.
      source: labelled images with `captions(label)`, see `swjax.data.source`.
      captions_per_image: largest number of captions per image; None uses all.
      name: name of the set, the prefix of the scores.
      **reading: batch_size (of images, and of captions), context_length and image_size; tokenizer, fitting,
        share, on_bad and max_bad_share: see `swjax.evaluators.embed.images`.

    References:
      Karpathy and Fei-Fei, "Deep visual-semantic alignments for generating image descriptions", 2015,
      https://arxiv.org/abs/1412.2306
    """

    def __init__(
        self,
        predict: embed.Predict,
        source: data.Source,
        *,
        captions_per_image: int | None = None,
        name: str = "val",
        **reading: Any,
    ):
        super().__init__(predict, source, name, f"split {name!r}", **reading)
        self._captions_per_image = captions_per_image

    def images(self, params: Any, *, count: int = 0) -> embed.Images:
        """Embeds the images of the set, and keeps the pixels of `count` evenly spaced images."""
        merged = self._source.photographs and not self._source.class_names
        images = self._images(params, count=count, hashed=merged)
        if not merged:
            return images
        _, first, group = np.unique(images.digests, return_index=True, return_inverse=True, axis=0)
        firsts = first[group.ravel()]  # of each image the first one with the same pixels
        labels = images.labels[firsts]
        alike: dict[int, list[int]] = {label: [] for label in labels.tolist()}
        for label, own in zip(labels.tolist(), images.labels.tolist(), strict=True):
            alike[label].append(own)
        kept = np.unique(firsts)
        rows, shown = np.unique(np.searchsorted(kept, firsts[images.rows]), return_index=True)
        return embed.Images(
            images.embeddings[kept],
            labels[kept],
            images.numbers[kept],
            images.digests[kept],
            rows,
            None if images.pixels is None else images.pixels[shown],
            alike,
        )

    def run(self, params: Any, images: embed.Images | None = None) -> dict[str, float]:
        """Computes the scores and the chance scores.

        Args:
          params: parameters for `predict`.
          images: result of `images`; None embeds the images here.

        Returns:
          "<name>/image_to_text_R@1", ...R@5, ...R@10, "<name>/text_to_image_R@1", ..., and the same with
          "_chance_R@".
        """
        images = images or self.images(params)
        captions, captions_of, images_of = self._pair(images)
        texts = self._texts(params, captions)
        scores = {}
        for direction, queries, candidates, correct in (
            ("image_to_text", images.embeddings, texts, captions_of),
            ("text_to_image", texts, images.embeddings, images_of),
        ):
            rank = ranks(queries, candidates, correct)
            for k in (1, 5, 10):
                scores[f"{self._name}/{direction}_R@{k}"] = recall(rank, k)
                scores[f"{self._name}/{direction}_chance_R@{k}"] = chance(
                    correct, len(candidates), k
                )
        return scores

    def predictions(
        self, params: Any, *, count: int, k: int = 3, images: embed.Images | None = None
    ) -> list[Prediction]:
        """Finds the captions nearest to `count` images, which are evenly spaced over the set, not selected.

        Args:
          params: parameters for `predict`.
          count: number of images; the result has fewer if some are unreadable.
          k: number of captions per image.
          images: result of `images` with this count; None embeds the images here.

        Returns:
          For each image its nearest captions. `name` is the nearest caption of the image if it is among
          these, and the image's first caption otherwise.
        """
        images = images or self.images(params, count=count)
        assert images.pixels is not None, "images were embedded with a count"
        captions, captions_of, _ = self._pair(images)
        texts = self._texts(params, captions)
        guesses, cosines = top(images.embeddings[images.rows], texts, min(k, len(captions)))
        shown = []
        for i, index in enumerate(images.rows):
            own, found = captions_of[index], guesses[i].tolist()
            name = next((guess for guess in found if guess in own), own[0])
            names = tuple(captions[guess] for guess in found)
            shown.append(
                Prediction(images.pixels[i], captions[name], names, tuple(cosines[i].tolist()))
            )
        return shown

    def nearest_images(
        self, params: Any, *, count: int, k: int = 5, images: embed.Images | None = None
    ) -> list[NearestImages]:
        """Finds the images nearest to `count` captions, which are evenly spaced over the set, not selected.

        Args:
          params: parameters for `predict`.
          count: number of captions; the result has fewer if the set has fewer.
          k: number of images per caption.
          images: result of `images`; None embeds the images here.
        """
        images = images or self.images(params)
        captions, _, images_of = self._pair(images)
        chosen = spread(len(captions), count)
        texts = self._texts(params, [captions[i] for i in chosen])
        found, cosines = top(texts, images.embeddings, min(k, len(images.embeddings)))
        return [
            NearestImages(
                caption=captions[caption],
                images=np.stack([self._example(images.numbers[row])["image"] for row in rows]),
                own=tuple(row in images_of[caption] for row in rows.tolist()),
                cosines=tuple(similar.tolist()),
            )
            for caption, rows, similar in zip(chosen, found, cosines, strict=True)
        ]

    def _pair(self, images: embed.Images) -> tuple[list[str], list[list[int]], list[list[int]]]:
        first = slice(self._captions_per_image)

        def captions_of(label):
            alike = images.alike.get(label, (label,))
            return [text for each in alike for text in self._source.captions(each)][first]

        tokens = self._sizes["context_length"], self._sizes["tokenizer"]
        return pair(images.labels, captions_of, *tokens)

    def _texts(self, params, captions: list[str]) -> np.ndarray:
        return np.concatenate(list(embed.texts(self._predict, params, captions, **self._sizes)))


def pair(
    labels: np.ndarray,
    captions_of_label: Callable[[int], Sequence[str]],
    context_length: int,
    tokenizer: str = "",
) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Lists which captions belong to which images.

    Args:
      labels: [n], labels of the images.
      captions_of_label: label -> its captions.
      context_length: tokens per caption; the model does not read those beyond.
      tokenizer: see `swjax.data.tokenize`.

    Returns:
      (captions that the model distinguishes, indices of the captions of each image, indices of the images
      of each caption).

    Raises:
      ValueError: an image has no caption.

    >>> pair(np.array([7, 7, 8]), {7: ["a cat", "a pet"], 8: ["a dog", "a pet"]}.get, 77)
    (['a cat', 'a pet', 'a dog'], [[0, 1], [0, 1], [2, 1]], [[0, 1], [0, 1, 2], [2]])
    """
    tokens = functools.partial(data.tokenize, context_length=context_length, tokenizer=tokenizer)
    position: dict[bytes, int] = {}
    distinct, by_label = [], {}
    for label in np.unique(labels).tolist():
        captions = {tokens(caption).tobytes(): caption for caption in captions_of_label(label)}
        if not captions:
            raise ValueError(f"label {label} has no caption: retrieval needs one for every image")
        distinct += [caption for ids, caption in captions.items() if ids not in position]
        by_label[label] = [position.setdefault(ids, len(position)) for ids in captions]
    captions_of = [by_label[label] for label in labels.tolist()]
    images_of: list[list[int]] = [[] for _ in position]
    for image, own in enumerate(captions_of):
        for caption in own:
            images_of[caption].append(image)
    return distinct, captions_of, images_of
