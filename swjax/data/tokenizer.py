"""Tokenizes captions. CLIP's tokenizer is lower-cased byte-pair encoding, as OpenAI's and open_clip's.

Its vocabulary file bpe_simple_vocab_16e6.txt.gz is OpenAI's, under the MIT license
(LICENSE-bpe_simple_vocab.txt, next to it).
"""

import functools
import gzip
import html
import itertools
import re
from collections.abc import Sequence
from importlib import resources

import numpy as np

from swjax.data.vocabulary import Vocabulary, open_vocabulary
from swjax.packages import require

VOCABULARY_SIZE = 49_408
START_OF_TEXT = VOCABULARY_SIZE - 2
END_OF_TEXT = VOCABULARY_SIZE - 1  # the largest id: CLIP finds a caption's end by argmax
_BYTES = 256
_MERGES = VOCABULARY_SIZE - 2 * _BYTES - 2

# A word is a special token, an English contraction's ending, letters, one digit, or other signs.
_WORD = r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|{letter}+|{digit}|[^\s{others}]+"
_ASCII_WORD = re.compile(_WORD.format(letter="[a-z]", digit="[0-9]", others="a-z0-9"))
_WORDS_KEPT = 2**18  # words in the cache of ids; a web crawl has a long tail of words


def tokenize(
    texts: str | Sequence[str], context_length: int = 77, tokenizer: str = ""
) -> np.ndarray:
    """Returns the token ids of captions: the start token, the ids of the words, the end token, padding.

    A caption longer than the context is truncated; its last id is then the end token. CLIP's padding is 0.
    SigLIP has no start token; its padding is the end token, or in SigLIP 2 "<pad>".

    Args:
      texts: captions; a single string is a batch of one.
      context_length: ids per row.
      tokenizer: "" is CLIP's; otherwise SigLIP's, the path of a tokenizer.json or a model of SentencePiece.

    Returns:
      int32 [len(texts), context_length].

    Raises:
      FileNotFoundError, MissingPackage: the tokenizer does not exist, or needs a package.
      TypeError: a caption is not a string.
      ValueError: the context is too short for the start and end tokens, or the tokenizer is not SigLIP's.

    >>> tokenize(["a photo of a cat", ""], context_length=8)
    array([[49406,   320,  1125,   539,   320,  2368, 49407,     0],
           [49406, 49407,     0,     0,     0,     0,     0,     0]], dtype=int32)

    References:
      Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021,
      https://arxiv.org/abs/2103.00020
    """
    if context_length < 2:
        raise ValueError(
            f"context_length must be at least 2, for the start and end tokens; it is "
            f"{context_length}: CLIP uses 77"
        )
    texts = [texts] if isinstance(texts, str) else texts
    used = vocabulary_of(tokenizer)
    tokens = np.full((len(texts), context_length), used.padding, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        if not isinstance(text, str):
            raise TypeError(f"a text must be a string, got {type(text).__name__} {text!r:.40}")
        ids = [*used.start, *used.encode(text)][: context_length - 1]
        row[: len(ids)] = ids
        row[len(ids)] = used.end
    return tokens


def check_tokenizer(tokenizer: str, size: int) -> None:
    """Checks that a tokenizer has the vocabulary of a model; other ids embed to NaN or noise.

    Args:
      tokenizer: see `tokenize`.
      size: token ids of the model, `cfg.text.vocab_size`.

    Raises:
      FileNotFoundError, MissingPackage: see `tokenize`.
      ValueError: the tokenizer has another number of ids.
    """
    if not tokenizer and size != CLIP.size:
        raise ValueError(
            f"the model has {size} token ids, and CLIP's tokenizer {CLIP.size}: put the model's "
            f"tokenizer.json or spiece.model next to its weights, or name it as tokenizer"
        )
    if (found := vocabulary_of(tokenizer).size) != size:
        raise ValueError(
            f"the model has {size} token ids, and the tokenizer {tokenizer} {found}: give the one with which "
            f"the model was trained"
        )


def vocabulary_of(tokenizer: str) -> Vocabulary:
    """Opens a tokenizer; see `tokenize`."""
    return open_vocabulary(tokenizer) if tokenizer else CLIP


def encode(text: str) -> list[int]:
    """Returns the ids of a text's words, without the start and end tokens.

    >>> encode("It's 20&deg;")
    [585, 568, 273, 271, 6858]
    """
    if text.isascii() and text.isprintable() and "&" not in text:
        words = _ASCII_WORD.findall(text.lower())  # cleaning would not change these texts
    else:
        words = _any_word().findall(" ".join(_clean(text).split()).lower())
    return [token for word in words for token in _encode_word(word)]


def _clean(text: str) -> str:
    """Repairs mis-decoded characters and HTML entities; entities may be escaped twice."""
    require("ftfy", "regex")
    import ftfy

    return html.unescape(html.unescape(ftfy.fix_text(text)))


@functools.cache
def _any_word():
    import regex  # supports Unicode's letter and number classes, unlike re

    word = _WORD.format(letter=r"[\p{L}]", digit=r"[\p{N}]", others=r"\p{L}\p{N}")
    return regex.compile(word, regex.IGNORECASE)


@functools.lru_cache(_WORDS_KEPT)
def _encode_word(word: str) -> tuple[int, ...]:
    """Merges the bytes of a word pair by pair, in the order in which the pairs were learned."""
    if word == "<start_of_text>":
        return (START_OF_TEXT,)
    if word == "<end_of_text>":
        return (END_OF_TEXT,)
    merges, byte_ids = _vocabulary()
    ids = [byte_ids[byte] for byte in word.encode()]
    ids[-1] += _BYTES  # ids in the second half of the byte ids end a word
    while len(ids) > 1:
        # Ids increase in learning order, so the smallest id marks the pair to merge.
        known = (merges.get(pair, VOCABULARY_SIZE) for pair in itertools.pairwise(ids))
        merged = min(known)
        if merged == VOCABULARY_SIZE:
            break
        ids = _merge(ids, merged, merges)
    return tuple(ids)


def _merge(ids: list[int], merged: int, merges: dict) -> list[int]:
    out, i = [], 0
    while i < len(ids):
        if merges.get(tuple(ids[i : i + 2])) == merged:
            out.append(merged)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


@functools.cache
def _vocabulary() -> tuple[dict[tuple[int, int], int], list[int]]:
    """Returns {(left id, right id): id of the merged pair} and the id of every byte."""
    packed = resources.files(__package__).joinpath("bpe_simple_vocab_16e6.txt.gz").read_bytes()
    lines = gzip.decompress(packed).decode().split("\n")[1 : 1 + _MERGES]
    letters, byte_ids = _byte_letters()
    ids = {letter: i for i, letter in enumerate(letters)}
    ids |= {letter + "</w>": i + _BYTES for i, letter in enumerate(letters)}
    merges = {}
    for i, line in enumerate(lines, 2 * _BYTES):
        left, right = line.split()
        merges[ids[left], ids[right]] = ids[left + right] = i
    return merges, byte_ids


def _byte_letters() -> tuple[list[str], list[int]]:
    """Returns the characters that represent bytes in the file, by id, and the id of every byte.

    Printable Latin-1 bytes come first and represent themselves; the other bytes follow, from U+0100 on.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(_BYTES) if byte not in itself]
    letters = [chr(byte) for byte in itself] + [chr(0x100 + i) for i in range(len(other))]
    byte_ids = [0] * _BYTES
    for i, byte in enumerate(itself + other):
        byte_ids[byte] = i
    return letters, byte_ids


CLIP = Vocabulary(encode, VOCABULARY_SIZE, (START_OF_TEXT,), END_OF_TEXT, padding=0)
