"""SigLIP's vocabularies: a tokenizer.json of the package `tokenizers`, or a model of `sentencepiece`.

SigLIP removes punctuation, ends a text by "</s>" and pads with it. SigLIP 2, whose vocabulary is Gemma's,
keeps punctuation, ends a text by "<eos>" and pads with "<pad>". Both lower-case. Nothing else is cleaned:
captions keep the letters of every script.
"""

import functools
import string
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from swjax.data.files import size_and_version
from swjax.packages import require
from swjax.safe_files import one_line

# Names of tokenizers in a folder of weights, the preferred first.
FILES = ("tokenizer.json", "spiece.model", "tokenizer.model", "sentencepiece.model")
_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))
_SENTINEL = "<extra_id_"  # T5's last pieces: no caption has them, and SigLIP no embeddings


class Vocabulary(NamedTuple):
    """How texts become token ids.

    Attributes:
      encode: a function: text -> ids, without start and end.
      size: number of ids.
      start: ids before each text.
      end: id after each text.
      padding: id after the end.
    """

    encode: Callable[[str], list[int]]
    size: int
    start: tuple[int, ...]
    end: int
    padding: int


def open_vocabulary(path: str) -> Vocabulary:
    """Reads a vocabulary of SigLIP.

    Args:
      path: a local tokenizer.json, or a model of SentencePiece.

    Raises:
      FileNotFoundError: the file does not exist.
      MissingPackage: the package that reads the file is not installed.
      ValueError: the file is damaged, or belongs to another kind of tokenizer.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"the tokenizer {path} does not exist: give a tokenizer.json or a model of SentencePiece, such "
            f"as the one next to SigLIP's weights"
        )
    return _opened(path, size_and_version(path)[1])


@functools.lru_cache(4)
def _opened(path: str, version: str) -> Vocabulary:
    """`open_vocabulary`; `version` is that of the file, which may be replaced."""
    encode, id_of, piece_of, size = (_json if path.endswith(".json") else _sentencepiece)(path)
    while _SENTINEL in piece_of(size - 1):
        size -= 1
    gemma, end = id_of("<eos>"), id_of("</s>")  # Gemma has both
    if gemma is not None:
        pad = id_of("<pad>")
        padding = gemma if pad is None else pad
        return Vocabulary(lambda text: encode(text.lower()), size, (), gemma, padding)
    if end is None:
        raise ValueError(
            f"the tokenizer {path} has neither a token '<eos>' nor '</s>': give that of a SigLIP"
        )
    return Vocabulary(lambda text: encode(canonical(text)), size, (), end, end)


def canonical(text: str) -> str:
    """Lower-cases a text, and removes ASCII punctuation and repeated white space, as big_vision does.

    >>> canonical("It's_a «Füchsin»,  no?")
    'its a «füchsin» no'
    """
    return " ".join(text.translate(_PUNCTUATION).lower().split())


def _json(path: str):
    """Opens a tokenizer.json; returns (encode, id of a piece or None, piece of an id, number of pieces)."""
    require("tokenizers", extra="text", user=f"reading {path}")
    from tokenizers import Tokenizer

    try:
        opened = Tokenizer.from_file(path)
    except Exception as error:  # the package raises nothing more specific
        raise ValueError(_damaged(path, error)) from error
    opened.no_padding()
    opened.no_truncation()

    def encode(text: str) -> list[int]:
        return opened.encode(text, add_special_tokens=False).ids

    piece_of = lambda i: opened.id_to_token(i) or ""
    return encode, opened.token_to_id, piece_of, opened.get_vocab_size()


def _sentencepiece(path: str):
    """Opens a model of SentencePiece; see `_json`."""
    require("sentencepiece", extra="text", user=f"reading {path}")
    from sentencepiece import SentencePieceProcessor

    try:
        opened = SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        raise ValueError(_damaged(path, error)) from error

    def id_of(piece: str) -> int | None:
        found = opened.piece_to_id(piece)
        return found if opened.id_to_piece(found) == piece else None  # otherwise the unknown piece

    return opened.encode, id_of, opened.id_to_piece, opened.get_piece_size()


def _damaged(path: str, error: Exception) -> str:
    reason = one_line(error)
    return f"{path} is neither a tokenizer.json nor SentencePiece's model ({reason:.99}): download it again"
