"""Small tokenizers in the forms of SigLIP's files, whose ids are known without their libraries."""

import json
import string

LETTERS = [*string.ascii_lowercase, *"üкош写真猫.&;", "\uff41"]
SPACE = "\u2581"


def gemma_json(path) -> list[str]:
    """Writes a tokenizer.json like that of SigLIP 2; returns its pieces, one for each character."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", SPACE, *LETTERS]
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": []}
    added = [_special(i, piece) for i, piece in enumerate(pieces[:4])]
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    _write(path, model | {"unk_token": "<unk>"}, added, normalizer, None)
    return pieces


def t5_json(path, sentinels: int = 0) -> list[str]:
    """Writes a tokenizer.json like that of SigLIP; returns its pieces without T5's sentinels."""
    pieces = ["<pad>", "</s>", "<unk>", SPACE, *LETTERS]
    extra = [f"<extra_id_{i}>" for i in range(sentinels)]
    vocab = [[piece, -float(i)] for i, piece in enumerate([*pieces, *extra])]
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always",
        "split": True,
    }
    added = [_special(i, piece) for i, piece in enumerate(pieces[:3])]
    _write(path, {"type": "Unigram", "unk_id": 2, "vocab": vocab}, added, None, metaspace)
    return pieces


def t5_model(path) -> list[str]:
    """Trains a model of SentencePiece, one piece for each character; returns its pieces."""
    import sentencepiece

    options = dict(model_type="char", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2)
    text = " ".join(LETTERS)
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([text] * 20), model_writer=file, vocab_size=4 + len(LETTERS),
            hard_vocab_limit=False, character_coverage=1.0, **options,
        )  # fmt: skip
    opened = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [opened.id_to_piece(i) for i in range(opened.get_piece_size())]


def _special(number: int, content: str) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True} | flags


def _write(path, model: dict, added: list, normalizer, pre_tokenizer) -> None:
    rest = dict.fromkeys(("truncation", "padding", "post_processor", "decoder"))
    held = rest | {"version": "1.0", "model": model, "added_tokens": added}
    held |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    path.write_text(json.dumps(held), encoding="utf-8")
