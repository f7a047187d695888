"""Zero-shot classification: each image is assigned to the class with the nearest prompts."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from swjax import data
from swjax.data import imagenet
from swjax.evaluators import embed
from swjax.evaluators.ranking import chance, ranks, recall, top
from swjax.models.sharding import Share


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One image and its predicted classes or captions.

    Attributes:
      image: uint8 [height, width, channels], as the loader yields it.
      name: the correct class or, in retrieval, a caption of the image.
      guesses: the most similar classes or captions, best first.
      cosines: cosine similarities of the guesses.
    """

    image: np.ndarray
    name: str
    guesses: tuple[str, ...]
    cosines: tuple[float, ...]


class ZeroShot(embed.OfSet):
    """Top-1 and top-5 accuracy over the names of the classes that occur in a set.

    The vector of a class is the normalized mean of the unit vectors of its prompts, one prompt per template.
    Classes whose prompts the model reads as one are one class, see `distinct`. Ties count against the model.

    ImageNet's list has two pairs of equal names. As in published accuracies, a set with this list is scored
    over all 1,000 columns, and of two equal columns the first is the prediction, so that images of the
    second class are wrong. Its scores "zeroshot/<name>_merged_top1" and "..._merged_top5" follow the rules
    above.

    Args:
      predict: see `swjax.evaluators.embed`.
      source: labelled images with `class_names`, see `swjax.data.source`.
      templates: prompts with "{}" for the name.
      name: name of the set, for the names of the scores.
      **reading: see `swjax.evaluators.Retrieval`; batch_size is also that of prompts.

    Raises:
      ValueError: a template has no "{}" for the name, or the source has no class names.

    References:
      Radford et al., "Learning transferable visual models from natural language supervision", 2021,
      section 3.1.4, https://arxiv.org/abs/2103.00020
    """

    def __init__(
        self,
        predict: embed.Predict,
        source: data.Source,
        *,
        templates: Sequence[str],
        name: str,
        **reading: Any,
    ):
        if not source.class_names:
            raise ValueError("the source has no class names: zero-shot classification needs them")
        super().__init__(predict, source, name, f"zero-shot set {name!r}", **reading)
        self._templates = embed.check_templates(templates)
        self._is_imagenet = tuple(source.class_names) == imagenet.class_names()

    def run(self, params: Any, images: embed.Images | None = None) -> dict[str, float]:
        """Computes the scores and the chance scores.

        Args:
          params: parameters for `predict`.
          images: result of `Retrieval.images` for the same set; None embeds the images here.

        Returns:
          "zeroshot/<name>_top1", "zeroshot/<name>_top5", and "..._chance_top1", "..._chance_top5".
        """
        images = images or self._images(params)
        if self._is_imagenet:
            return self._run_imagenet(params, images)
        names, correct = self._classes(images.labels)
        rank = ranks(images.embeddings, self._classifier(params, names), correct)
        return self._scores(self._name, rank, correct, len(names))

    def _run_imagenet(self, params, images: embed.Images) -> dict[str, float]:
        """The published scores over all columns, and those of merged names."""
        names = self._source.class_names
        vectors, first = self._classifier(params, names), self._distinct(names)
        alike: dict[int, list[int]] = {}  # {first column: all columns that equal it, in order}
        for column, same in enumerate(first):
            alike.setdefault(same, []).append(column)
        labels = images.labels.tolist()
        rank = ranks(images.embeddings, vectors, [alike[first[label]] for label in labels])
        rank += [alike[first[label]].index(label) for label in labels]
        scores = self._scores(self._name, rank, [[label] for label in labels], len(names))
        columns = sorted({first[label] for label in labels})
        correct = [[columns.index(first[label])] for label in labels]
        rank = ranks(images.embeddings, vectors[columns], correct)
        return scores | self._scores(f"{self._name}_merged", rank, correct, len(columns))

    def _scores(
        self, name: str, rank: np.ndarray, correct: list, candidates: int
    ) -> dict[str, float]:
        scores = {}
        for k in (1, 5):
            scores[f"zeroshot/{name}_top{k}"] = recall(rank, k)
            scores[f"zeroshot/{name}_chance_top{k}"] = chance(correct, candidates, k)
        return scores

    def predictions(
        self, params: Any, *, count: int, k: int = 3, images: embed.Images | None = None
    ) -> list[Prediction]:
        """Finds the nearest classes of `count` images, which are evenly spaced over the set, not selected.

        Args:
          params: parameters for `predict`.
          count: number of images; the result has fewer if some are unreadable.
          k: number of guesses per image.
          images: result of `Retrieval.images` for the same set and count; None embeds the images here.
        """
        images = images or self._images(params, count=count)
        assert images.pixels is not None, "images were embedded with a count"
        names, correct = self._classes(images.labels)
        classifier = self._classifier(params, names)
        guesses, cosines = top(images.embeddings[images.rows], classifier, min(k, len(names)))
        return [
            Prediction(
                image=images.pixels[i],
                name=names[correct[index][0]],
                guesses=tuple(names[g] for g in guesses[i]),
                cosines=tuple(cosines[i].tolist()),
            )
            for i, index in enumerate(images.rows)
        ]

    def _classes(self, labels: np.ndarray) -> tuple[list[str], list[list[int]]]:
        """The names that occur, one per reading, and for each image the index of its name."""
        occurring = np.unique(labels).tolist()
        names = [self._source.class_names[label] for label in occurring]
        first = self._distinct(names)
        position = {row: i for i, row in enumerate(sorted(set(first)))}
        of_label = {label: [position[row]] for label, row in zip(occurring, first, strict=True)}
        return [names[row] for row in position], [of_label[label] for label in labels.tolist()]

    def _distinct(self, names: Sequence[str]) -> list[int]:
        tokens = self._sizes["context_length"], self._sizes["tokenizer"]
        return distinct(names, self._templates, *tokens)

    def _classifier(self, params, names: Sequence[str]) -> np.ndarray:
        return classifier(self._predict, params, names, self._templates, **self._sizes)


def distinct(
    names: Sequence[str], templates: Sequence[str], context_length: int, tokenizer: str = ""
) -> list[int]:
    """For each name, the index of the first name that the model reads as the same in every prompt.

    The model reads tokens, up to `context_length`: names that differ only in case, in white space or beyond
    the last token are one.

    >>> distinct(["Red fox", "owl", "red\\nfox", "red fox cub"], ["a photo of a {}"], 77)
    [0, 1, 0, 3]
    >>> distinct(["Red fox", "owl", "red\\nfox", "red fox cub"], ["a photo of a {}"], 8)
    [0, 1, 0, 0]
    """

    def read(name: str, templates: Iterable[str]) -> bytes:
        prompts = [template.replace("{}", name) for template in templates]
        return data.tokenize(prompts, context_length, tokenizer).tobytes()

    begins = [read(name, templates[:1]) for name in names]
    counts = Counter(begins)
    # Most names differ in the first prompt, and need no other.
    keys = [
        (begin, read(name, templates[1:]) if counts[begin] > 1 else b"")
        for name, begin in zip(names, begins, strict=True)
    ]
    first: dict[tuple[bytes, bytes], int] = {}
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def classifier(
    predict: embed.Predict,
    params: Any,
    names: Sequence[str],
    templates: Sequence[str],
    *,
    batch_size: int,
    context_length: int,
    tokenizer: str = "",
    share: Share = embed.ALONE,
) -> np.ndarray:
    """The normalized mean of the unit vectors of each class's prompts.

    Args:
      predict: see `swjax.evaluators.embed`.
      params: parameters for `predict`.
      names: names of the classes.
      templates: prompts with "{}" for the name.
      batch_size: prompts per batch, over all processes.
      context_length, tokenizer: tokens per prompt, and what makes them, see `swjax.data.tokenize`.
      share: this process's share of each batch.

    Returns:
      Unit vectors, float32 [len(names), e].

    Raises:
      ValueError: there is no name, a name is not a text, there is no template, or a template has no "{}" for
        the name.
    """
    if not len(names):
        raise ValueError("a classifier needs the name of at least one class, got none")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise ValueError(
            f"names of classes must be texts, got {wrong[0]!r:.40} of type {type(wrong[0]).__name__}: pass "
            "its name"
        )
    templates = embed.check_templates(templates)
    prompts = (template.replace("{}", name) for name in names for template in templates)
    sizes: dict[str, Any] = {
        "batch_size": batch_size,
        "context_length": context_length,
        "tokenizer": tokenizer,
        "share": share,
    }
    total, position = np.zeros((len(names), 0), np.float32), 0
    for part in embed.texts(predict, params, prompts, **sizes):
        if not position:
            total = np.zeros((len(names), part.shape[1]), np.float32)
        rows = np.arange(position, position + len(part)) // len(templates)
        np.add.at(total, rows, part)
        position += len(part)
    return embed.unit(total)
