"""Finds the pictures that match a text best, and shows them on a page.

python -m swjax search runs/icons "coffee cup" "arrow pointing left"
python -m swjax search clip.safetensors "a red fox" --pictures=photos
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from swjax.data import Fitting, files, tokenize
from swjax.data.decoding import decode
from swjax.data.examples import reason
from swjax.evaluate.scoring import config_of
from swjax.evaluators import ranking
from swjax.inference.encoder import Encoder, load, pixels
from swjax.models.config import VisionConfig
from swjax.report import page
from swjax.safe_files import explain, mask_credentials, one_line, printable, write_atomically
from swjax.training.faults.errors import ConfigError
from swjax.training.inputs import open_source


class Found(NamedTuple):
    """A picture that matches a text.

    Attributes:
      name: name of the picture.
      cosine: cosine similarity of the embeddings of picture and text.
      number: index of the picture.
    """

    name: str
    cosine: float
    number: int


class Pictures(Protocol):
    """The interface of an indexed collection of pictures."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Any:
        """Returns a picture in a form that `swjax.inference.pixels` accepts."""

    def name(self, index: int) -> str:
        """Returns the name of a picture."""

    def reason(self, index: int, error: Exception) -> str:
        """Returns one line with the name of a picture and the reason why it cannot be read."""


class Folder:
    """The image files in a folder and its subfolders, sorted by path.

    Raises:
      ValueError: the folder does not exist, or has no images.
    """

    def __init__(self, folder: str):
        if not Path(folder).is_dir():
            raise ValueError(f"{folder!r} is not a folder: give the folder of the pictures")
        self._names = files.below(folder, files.PICTURES)
        if not self._names:
            raise ValueError(
                f"{folder!r} contains no pictures: give a folder with {', '.join(files.PICTURES)}"
            )
        self._folder = Path(folder)

    def __len__(self) -> int:
        return len(self._names)

    def image(self, index: int) -> Path:
        return self._folder / self._names[index]

    def name(self, index: int) -> str:
        return self._names[index]

    def reason(self, index: int, error: Exception) -> str:
        return one_line(error)  # `pixels` names the file


class Split:
    """The pictures of a split of a run's data.

    Args:
      workdir: directory of the run.
      split: "train", "val" or "test".

    Raises:
      ValueError: the run has no such split, or its data cannot be read.
    """

    def __init__(self, workdir: str, split: str):
        try:
            source = open_source(config_of(workdir), split)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if source is None:
            raise ValueError(
                f"the run {workdir!r} has no split {split!r}: pass --split or --pictures"
            )
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def image(self, index: int) -> np.ndarray:
        return self._source[index]["image"]

    def name(self, index: int) -> str:
        if self._source.photographs:
            return self._source.key(index)
        example = self._source[index]
        return example.get("key") or example["captions"][0]

    def reason(self, index: int, error: Exception) -> str:
        return reason(self._source, index, error)


def search(
    model: Encoder, queries: Sequence[str], pictures: Pictures, count: int = 20
) -> list[list[Found]]:
    """Finds the pictures whose embeddings are nearest to the embeddings of texts.

    Args:
      model: the encoder of texts and pictures.
      queries: texts.
      pictures: the pictures to search; each is read once, and one that cannot be read is skipped with a line.
      count: largest number of pictures per text.

    Returns:
      For each text its pictures, nearest first.

    Raises:
      ValueError: no picture can be read.
    """
    numbers: list[int] = []
    images = model.encode_image(_read(pictures, model.cfg.vision, numbers))
    if not numbers:
        raise ValueError("no picture can be read")
    count = min(count, len(numbers))
    indices, cosines = ranking.top(model.encode_text(list(queries)), images, count)
    return [
        [
            Found(pictures.name(numbers[i]), cosine, numbers[i])
            for i, cosine in zip(*row, strict=True)
        ]
        for row in zip(indices.tolist(), cosines.tolist(), strict=True)
    ]


def _read(pictures: Pictures, vision: VisionConfig, numbers: list[int]) -> Iterator[np.ndarray]:
    """Yields the readable pictures in order and appends their numbers; shows progress on a terminal.

    Of a run's examples with equal pixels, as in a table with a row for each caption, it yields the first.
    """
    live, seen = sys.stderr.isatty(), set[bytes]()
    for index in range(len(pictures)):
        if live and (index % 100 == 0 or index == len(pictures) - 1):
            print(f"\rreading {index + 1} of {len(pictures)}", end="", file=sys.stderr)
        try:
            picture = pixels(pictures.image(index), vision.image_size, Fitting.of(vision))
        except Exception as error:  # Pillow raises errors of many types for damaged files
            skipped = printable(pictures.reason(index, error))
            print(f"swjax search: skipped {skipped}", file=sys.stderr)
            continue
        digest = hashlib.blake2b(picture.tobytes(), digest_size=16).digest()
        if isinstance(pictures, Split) and digest in seen:
            continue
        seen.add(digest)
        numbers.append(index)
        yield picture
    if live:
        print(file=sys.stderr)


def write_page(
    path: Path, title: str, queries: Sequence[str], found: list[list[Found]], pictures: Pictures
) -> None:
    """Writes a self-contained page with the pictures of each text."""
    sections = "".join(
        f'<h2>{escape(query)}</h2><div class="gallery">'
        + "".join(
            f'<figure><img src="{_thumbnail(pictures.image(each.number))}" alt="{escape(name)}">'
            f"<figcaption><strong>{escape(name)}</strong>{each.cosine:.2f}</figcaption></figure>"
            for each in row
            for name in (mask_credentials(each.name),)
        )
        + "</div>"
        for query, row in zip(queries, found, strict=True)
    )
    subtitle = "The nearest pictures, with cosine similarities"
    text = page.fill("search.html", title=title, subtitle=subtitle, tiles="", sections=sections)
    write_atomically(path, text)


def _warn_of_cut(texts: Sequence[str], model: Encoder) -> None:
    """Prints a line for each text that is longer than the model's context."""
    length = model.cfg.text.context_length
    read, longer = (tokenize(texts, n, model.tokenizer) for n in (length, length + 1))
    for text, cut in zip(texts, (read != longer[:, :length]).any(axis=1), strict=True):
        if cut:
            print(
                f"swjax search: the model reads the first {length} tokens of a text, and not the end of "
                f"{printable(text)[-60:]!r}: shorten it",
                file=sys.stderr,
            )


def _thumbnail(image: Any) -> str:
    return page.thumbnail(decode(image.read_bytes()) if isinstance(image, Path) else image)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the nearest pictures of each text and writes the page.

    Args:
      arguments: arguments of the command line; None uses `sys.argv`.

    Returns:
      The exit code: 0; 2 if the model or the pictures cannot be read.
    """
    parser = argparse.ArgumentParser(prog="swjax search", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a run's workdir, weights or their folder, or a name")
    parser.add_argument("texts", nargs="+", help="descriptions of the wanted pictures")
    parser.add_argument("--pictures", default="", help="a folder; default: the run's pictures")
    parser.add_argument("--split", default="test", choices=("train", "val", "test"))
    parser.add_argument("--count", type=int, default=20, help="number of pictures per text")
    parser.add_argument(
        "--page", type=page.new_page, default="search.html", help="the page to write"
    )
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count={options.count} shows nothing: give 1 or more")
    if not all(text.strip() for text in options.texts):
        parser.error(f"a text is empty, got {options.texts}: describe the wanted pictures")
    try:
        model = load(options.model)
        pictures: Pictures
        if options.pictures:
            pictures = Folder(options.pictures)
        elif (Path(options.model) / "config.json").is_file():
            pictures = Split(options.model, options.split)
        else:
            raise ValueError(f"{options.model!r} is not a run with data: pass --pictures=FOLDER")
        _warn_of_cut(options.texts, model)
        found = search(model, options.texts, pictures, options.count)
        write_page(options.page, f"Search in {options.model}", options.texts, found, pictures)
    except (OSError, ValueError) as error:
        print(f"swjax search: {explain(error)}", file=sys.stderr)
        return 2
    for text, row in zip(options.texts, found, strict=True):
        print(f"{text}: {printable(', '.join(each.name for each in row[:5]))}")
    print(f"page: {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
