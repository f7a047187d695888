"""The tokenizer, compared with ids of open_clip 3.3.0's SimpleTokenizer (clip_tokens.json)."""

import hashlib
import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from swjax import data
from swjax.data import tokenizer

CASES = json.loads((Path(__file__).parent / "clip_tokens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_matches_open_clip(case):
    ids = case["ids"]
    expected = ids + [0] * (case["context_length"] - len(ids))
    tokens = data.tokenize([case["text"]], case["context_length"])
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, [expected])


def test_vocabulary_is_openais():
    file = resources.files("swjax.data") / "bpe_simple_vocab_16e6.txt.gz"
    assert hashlib.sha256(file.read_bytes()).hexdigest().startswith("924691ac288e5440")
    merges, byte_ids = tokenizer._vocabulary()
    assert sorted(byte_ids) == list(range(256))
    assert sorted(merges.values()) == list(range(512, tokenizer.START_OF_TEXT))


def test_ascii_needs_no_cleaning(monkeypatch):
    monkeypatch.setattr(tokenizer, "_clean", None)  # a call would raise
    assert tokenizer.encode("It's 5 o'clock, somewhere!")
    with pytest.raises(TypeError):
        tokenizer.encode("caf\u00e9")


@pytest.mark.parametrize("text", ["It's a 'test', isn't it? 3.50$", "x" * 300, "a_b-c d's 'RE"])
def test_fast_path_agrees_with_the_general_one(text):
    words = tokenizer._any_word().findall(tokenizer._clean(text).lower())
    assert tokenizer._ASCII_WORD.findall(text.lower()) == words


def test_one_string_is_a_batch_of_one():
    np.testing.assert_array_equal(data.tokenize("a cat", 6), data.tokenize(["a cat"], 6))


def test_no_texts():
    assert data.tokenize([], 6).shape == (0, 6)


def test_end_of_text_is_the_largest_id_even_when_cut():
    tokens = data.tokenize(["word " * n for n in range(12)], 8)
    assert (tokens.max(axis=1) == tokenizer.END_OF_TEXT).all()
    assert (tokens.argmax(axis=1) == [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7]).all()


def test_a_text_is_a_string():
    with pytest.raises(TypeError, match="a text must be a string, got int 3"):
        data.tokenize(["a", 3], 6)


def test_context_too_short():
    with pytest.raises(ValueError, match="context_length must be at least 2.*it is 1"):
        data.tokenize(["a"], 1)
