"""SigLIP's tokenizers, from a file to token ids, embeddings of texts, and runs."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import siglip_files
import thinning
from clip_oracle import random_model, small_config, write_weights
from flax import nnx
from micro_run import MICRO, ROOT, UNDIAGNOSED
from PIL import Image

from swjax import data, inference, interop
from swjax.data.vocabulary import open_vocabulary
from swjax.evaluate.scoring import score
from swjax.inference import export_command
from swjax.models import clip
from swjax.report import data_check
from swjax.tools import plan, replay
from swjax.training import config as config_lib
from swjax.training.config import ConfigError
from swjax.training.loop import train_and_evaluate
from swjax.training.state.model_of_weights import keep_tokenizer, settle_model

NEEDED = {".json": "tokenizers", ".model": "sentencepiece"}
KINDS = {
    "gemma": ("tokenizer.json", siglip_files.gemma_json),
    "t5": ("tokenizer.json", siglip_files.t5_json),
    "sentencepiece": ("spiece.model", siglip_files.t5_model),
}


@pytest.fixture(params=KINDS)
def files(request, tmp_path):
    """(kind, path, pieces) of a tokenizer."""
    name, write = KINDS[request.param]
    pytest.importorskip(NEEDED[name[name.rindex(".") :]])
    path = tmp_path / name
    return request.param, str(path), write(path)


@pytest.fixture
def gemma(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "gemma.json"
    return str(path), siglip_files.gemma_json(path)


def test_a_check_of_data_counts_the_tokens_of_a_tokenizer(gemma, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "pairs.csv").write_text("image,caption\na.png,Füchsin\n", encoding="utf-8")
    command = ["check", "pairs.csv", "--context_length=7", f"--tokenizer={gemma[0]}"]
    assert data_check.main(command) == 0
    assert "8 tokens; 1 (100%) are truncated at context_length=7" in capsys.readouterr().out
    assert data_check.main([*command[:-1], "--tokenizer=none.json"]) == 2
    assert "the tokenizer none.json does not exist" in capsys.readouterr().err


def siglip(pieces, **options) -> clip.CLIP:
    sizes = {"width": 32, "layers": 1, "heads": 4, "context_length": 9, "vocab_size": len(pieces)}
    cfg = clip.config(
        small_config(),
        architecture="siglip",
        gelu="tanh",
        embed_dim=32,
        init_logit_bias=-10.0,
        vision={"layers": 1, "resize_mode": "squash"},
        text=sizes,
        **options,
    )
    return nnx.merge(*random_model(cfg))


def test_a_text_becomes_its_lower_case_letters(files):
    """SigLIP drops punctuation and pads by the end; SigLIP 2 keeps punctuation, and pads by "<pad>"."""
    kind, path, pieces = files
    texts = ["Füchsin & Кош.", "写真  «猫»", "", "a" * 40]
    said = ["".join(pieces[i] for i in row) for row in data.tokenize(texts, 16, path)]
    expected = {
        "gemma": [
            "füchsin▁&▁кош.<eos><pad>",
            f"写真▁▁<unk>猫<unk><eos>{8 * '<pad>'}",
            f"<eos>{15 * '<pad>'}",
            f"{15 * 'a'}<eos>",
        ],
        "t5": [
            f"▁füchsin▁кош{4 * '</s>'}",
            f"▁写真▁<unk>猫<unk>{9 * '</s>'}",
            16 * "</s>",
            f"▁{14 * 'a'}</s>",
        ],
    }
    assert said == expected["gemma" if kind == "gemma" else "t5"]
    assert open_vocabulary(path).size == len(pieces)


def test_captions_are_not_repaired(gemma):
    """ftfy and html would change these; CLIP's tokenizer does."""
    path, pieces = gemma
    (row,) = data.tokenize("\uff21&a;", 8, path)
    assert [pieces[i] for i in row[:5]] == ["\uff41", "&", "a", ";", "<eos>"]


def test_sentinels_of_t5_are_not_counted(tmp_path):
    """SigLIP's multilingual models have 250,000 embeddings, and their tokenizer 250,100 pieces."""
    pytest.importorskip("tokenizers")
    pieces = siglip_files.t5_json(tmp_path / "mt5.json", sentinels=5)
    assert open_vocabulary(str(tmp_path / "mt5.json")).size == len(pieces)


def test_bad_tokenizers_are_one_line(gemma, tmp_path):
    path, pieces = gemma
    text = Path(path).read_text(encoding="utf-8")
    (tmp_path / "cut.json").write_text(text[:-9], encoding="utf-8")
    held = json.loads(text)
    held["model"]["vocab"] = {"[PAD]": 0, "a": 1}
    held["model"]["unk_token"], held["added_tokens"] = None, []
    (tmp_path / "other.json").write_text(json.dumps(held))
    cases = {
        "none.json": "the tokenizer .*none.json does not exist: give a tokenizer.json or",
        "cut.json": "cut.json is neither a tokenizer.json nor .*download it again",
        "other.json": "other.json has neither a token '<eos>' nor '</s>': give that of a SigLIP",
    }
    for name, message in cases.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
            data.tokenize("a", 8, str(tmp_path / name))
        assert "\n" not in str(error.value)
    with pytest.raises(
        ValueError, match=f"has 60 token ids, and the tokenizer .* {len(pieces)}: giv"
    ):
        data.check_tokenizer(path, 60)
    with pytest.raises(ValueError, match="has 60 token ids, and CLIP's tokenizer 49408: put"):
        data.check_tokenizer("", 60)


def test_a_damaged_model_of_sentencepiece_is_one_line(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "cut.model").write_bytes(b"\x0a\x05abc")
    with pytest.raises(ValueError, match="cut.model is neither .* nor SentencePiece's model") as e:
        data.tokenize("a", 8, str(tmp_path / "cut.model"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("files", thinning.kept(KINDS, ["gemma", "sentencepiece"]), indirect=True)
def test_weights_bring_their_tokenizer(files, tmp_path):
    """To embeddings of texts, classifiers, and the files that `inference.save` writes."""
    _, path, pieces = files
    model = siglip(pieces)
    interop.save(tmp_path / "weights", model, "siglip", path)
    encoder = inference.load(tmp_path / "weights")
    texts = ["Füchsin", "ein Кош"]
    expected = model.encode_text(jnp.asarray(data.tokenize(texts, 9, path)))[0]
    np.testing.assert_allclose(encoder.encode_text(texts), expected, atol=1e-6)
    classifier = encoder.classifier(texts, "{}")
    np.testing.assert_allclose(classifier, expected, atol=1e-6)
    for ending in ("json", "model"):  # of a model that was saved here before
        (tmp_path / f"clip.tokenizer.{ending}").write_text("{}")
    inference.save(tmp_path / "clip.safetensors", encoder)
    shutil.rmtree(tmp_path / "weights")
    again = inference.load(tmp_path / "clip.safetensors")
    np.testing.assert_allclose(again.encode_text(texts), expected, atol=1e-6)


def test_weights_without_their_tokenizer_are_one_line(gemma, tmp_path):
    """Such as an .npz of big_vision; images need none."""
    _, pieces = gemma
    interop.save(tmp_path, siglip(pieces), "big_vision")
    file = tmp_path / "model.npz"
    encoder = inference.load(file)
    assert np.isfinite(encoder.encode_image(np.zeros((32, 40, 3), np.uint8))).all()
    for use in (
        lambda: encoder.encode_text("a"),
        lambda: encoder.classifier(["a"]),
        lambda: score(weights=file, sets=["folders:pets"]),
    ):
        with pytest.raises((ValueError, ConfigError), match="put the model's tokenizer.json or"):
            use()
    siglip_files.t5_json(tmp_path / "tokenizer.json")  # it has one piece less
    with pytest.raises(
        ValueError, match=f"model has {len(pieces)} token ids, and the tokenizer .*"
    ):
        inference.load(file).encode_text("a")


def small(**changes):
    """Returns configs/siglip2.py with the sizes of the very small run."""
    keep = ("data.name", "optimizer", "schedule.name", "data.context_length", "model.embed_dim")
    sizes = {key: value for key, value in MICRO.items() if not key.startswith(keep)}
    sizes |= {"train.examples": 0, "train.steps": 3, "schedule.warmup_steps": 1}
    sizes |= {"data.context_length": 8, "model.recipe": "standard", "model.dtype": "float32"}
    pairs = {key.replace("__", "."): value for key, value in changes.items()}
    overrides = sizes | UNDIAGNOSED | pairs
    pairs = [(key, str(value)) for key, value in overrides.items()]
    return config_lib.load(f"{ROOT}/configs/siglip2.py", pairs)


@pytest.mark.release
def test_siglip_2_trains_from_its_config(shared_cache, gemma, tmp_path):
    """And its run keeps the tokenizer, from which its texts are embedded and with which it resumes."""
    path, pieces = gemma
    options = {"data__tokenizer": path, "model__text__vocab_size": len(pieces)}
    options |= {"train__compilation_cache": shared_cache}
    workdir = tmp_path / "run"
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw mixes dtypes
        assert train_and_evaluate(small(**options), workdir) == 0
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(np.isfinite(record["train/loss"]) for record in records)
    assert "val/image_to_text_R@1" in records[-1]
    encoder = inference.load(workdir)
    assert encoder.tokenizer == str(workdir / "tokenizer.json")
    assert encoder.encode_text(["Füchsin"]).shape == (1, 32)
    assert hasattr(encoder.model, "logit_bias") and encoder.cfg.vision.resize_mode == "squash"
    Path(path).unlink()
    assert train_and_evaluate(small(**options), workdir) == 0  # finished


def test_the_tokenizer_of_a_run_must_fit_its_model(shared_cache, gemma, tmp_path, capsys):
    path, pieces = gemma
    other = str(tmp_path / "other.json")
    assert len(siglip_files.t5_json(Path(other))) == len(pieces) - 1
    options = {"train__compilation_cache": shared_cache}
    for changes, message in (
        ({}, "config.data.tokenizer='data/siglip2/tokenizer.json' does not exist: give a token"),
        ({"data__tokenizer": path}, "config.data.tokenizer: the model has 256000 token ids, and"),
        ({"data__tokenizer": other}, f"256000 token ids, and the tokenizer .* {len(pieces) - 1}: "),
        ({"data__tokenizer": ""}, "config.data.tokenizer: .* CLIP's tokenizer 49408: put"),
    ):
        with pytest.raises(ConfigError, match=message) as error:  # and the next may have another
            train_and_evaluate(small(**options | changes), tmp_path / "run")
        assert "\n" not in str(error.value)
        if "data__tokenizer" in changes:
            with pytest.raises(ConfigError, match=message):
                plan.show(small(**changes), "")
    assert plan.show(small(), "") == 0
    assert "tokenizer      training needs data/siglip2/tokenizer.json" in capsys.readouterr().out


def test_a_run_takes_the_tokenizer_of_its_weights(gemma, tmp_path):
    """Next to a file or a folder, here or at an address; not that of a run with CLIP's vocabulary."""
    path, pieces = gemma
    folder = tmp_path / "weights"
    interop.save(folder, siglip(pieces), "siglip", path)
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(f"{folder}/", "/siglip/", recursive=True)
    for address, expected in (
        (str(folder), f"{folder}/tokenizer.json"),
        (f"{folder}/model.safetensors", f"{folder}/tokenizer.json"),
        ("memory://siglip", "memory://siglip/tokenizer.json"),
        ("memory://siglip/model.safetensors", "memory://siglip/tokenizer.json"),
    ):
        config = config_lib.load(f"{ROOT}/configs/finetune.py", [("checkpoint.init_from", address)])
        settled = settle_model(config, tmp_path / "none")
        assert settled.data.tokenizer == expected
        assert settled.model.text.vocab_size == len(pieces)
        (tmp_path / "run").mkdir(exist_ok=True)
        kept = keep_tokenizer(settled, tmp_path / "run").data.tokenizer
        assert Path(kept).read_bytes() == Path(path).read_bytes()
    saved = config_lib.to_json(keep_tokenizer(settled, tmp_path / "run"))
    (tmp_path / "run" / "config.json").write_text(saved)
    (tmp_path / "run").rename(tmp_path / "moved")  # and it is the same run there
    moved = keep_tokenizer(settled, tmp_path / "moved")
    assert config_lib.changes(saved, moved) == []
    assert replay.load_config(tmp_path / "moved").data.tokenizer == moved.data.tokenizer
    (tmp_path / "moved").rename(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    siglip_files.t5_json(folder / "tokenizer.json")
    (folder / "other.model").write_bytes(b"a model of SentencePiece")
    for name in ("tokenizer.json", "other.model"):
        with pytest.raises(ConfigError, match="differs from .*tokenizer.json, with .* run began"):
            keep_tokenizer(small(data__tokenizer=str(folder / name)), tmp_path / "run")
    write_weights(tmp_path / "clip")
    shutil.copy(path, tmp_path / "clip" / "tokenizer.json")  # CLIPs have one too
    address = ("checkpoint.init_from", str(tmp_path / "clip"))
    config = config_lib.load(f"{ROOT}/configs/finetune.py", [address])
    assert settle_model(config, tmp_path / "none").data.tokenizer == ""
    assert inference.load(tmp_path / "clip").tokenizer == ""


@pytest.mark.release
def test_a_siglip_is_fine_tuned_and_exported(shared_cache, gemma, tmp_path):
    """From its weights alone; the run of that is the start of another, and its export a start as well."""
    path, pieces = gemma
    interop.save(tmp_path / "weights", siglip(pieces), "siglip", path)
    sizes = {
        key: value for key, value in MICRO.items() if not key.startswith(("model.", "optimizer"))
    }
    sizes |= {"train.steps": 2, "train.compilation_cache": shared_cache, "model.recipe": "standard"}
    sizes |= {
        "data.image_size": 0,
        "data.context_length": 0,
        "model.dtype": "float32",
    } | UNDIAGNOSED

    def tune(address, run):
        pairs = [(key, str(value)) for key, value in sizes.items()]
        config = config_lib.load(
            f"{ROOT}/configs/finetune.py", [*pairs, ("checkpoint.init_from", str(address))]
        )
        assert train_and_evaluate(config, run) == 0
        return inference.load(run)

    first = tune(tmp_path / "weights", tmp_path / "first")
    assert first.tokenizer == str(tmp_path / "first" / "tokenizer.json")
    assert export_command.main([str(tmp_path / "first"), str(tmp_path / "exported")]) == 0
    for address in (tmp_path / "first", tmp_path / "exported"):
        again = tune(address, tmp_path / f"{address.name}_again")
        assert Path(again.tokenizer).read_bytes() == Path(path).read_bytes()
