"""Labelled sets from folders, tars, tables, Parquet and TFDS: read, and scored in and after training."""

import json
import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_oracle import write_weights
from micro_run import micro_config, records, train
from photographs import jpeg, write_coco, write_tar, write_tfds

from swjax import data
from swjax.data import imagenet
from swjax.data.labelled import address
from swjax.evaluate.__main__ import main
from swjax.models import sharding
from swjax.training import config as config_lib
from swjax.training import evaluation
from swjax.training.evaluation import open_labelled
from swjax.training.inputs import open_source

CLASSES = ("red_fox", "snow_owl", "toad")


def write_folders(root, classes=CLASSES, images=4):
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(images):
            (root / name / f"{i}.jpg").write_bytes(jpeg(label * 7 + i))
    return f"folders:{root}"


def write_labelled_tars(root, names=("fox", "owl")):
    samples = {f"{i:04d}": {"jpg": jpeg(i), "cls": str(i % 2).encode()} for i in range(6)}
    write_tar(root / "00.tar", samples)
    (root / "classnames.txt").write_text("\n".join(names))
    return f"webdataset:{root}/00.tar"


def open_set(text, tmp_path):
    return data.source("labelled", text, data_dir=str(tmp_path / "data"))


def test_folders_are_classes(tmp_path):
    found = open_set(write_folders(tmp_path / "pets"), tmp_path)
    assert found.class_names == ("red fox", "snow owl", "toad") and len(found) == 12
    assert [found[i]["label"] for i in (0, 4, 11)] == [0, 1, 2]
    assert found[4]["captions"] == found.captions(1) == ("snow owl",)
    assert found.templates == ("a photo of a {}.",) and found.set_name == "pets"
    assert pickle.loads(pickle.dumps(found))[11]["label"] == 2
    hidden = tmp_path / "pets" / ".ipynb_checkpoints"
    hidden.mkdir()
    (hidden / "1.jpg").write_bytes(jpeg(0))
    (tmp_path / "pets" / "toad" / "._1.jpg").write_bytes(b"macOS")
    assert open_set(f"folders:{tmp_path}/pets", tmp_path).class_names == found.class_names
    assert len(open_set(f"folders:{tmp_path}/pets", tmp_path)) == 12


def test_class_folders_named_by_numbers(tmp_path):
    """As texts 10 would be the third of 0 to 10."""
    names = [f"name {n}" for n in range(12)]
    for first in (0, 1):
        root = tmp_path / f"from {first}"
        text = write_folders(root, [str(n + first) for n in range(12)], images=1)
        (root / "classnames.txt").write_text("\n".join(names))
        found = open_set(text, tmp_path)
        assert [found[i]["captions"] for i in range(12)] == [(name,) for name in names]
        assert found.key(10) == f"{root}/{10 + first}/0.jpg" and found.class_names == tuple(names)
    (root / "5").rename(root / "50")
    with pytest.raises(ValueError, match="numbers must .* 11 or 1 to 12 without gaps, got 1 to"):
        open_set(text, tmp_path)
    (root / "50").rename(root / "5")
    (root / "classnames.txt").write_text("\n".join(sorted(str(n + 1) for n in range(12))))
    with pytest.raises(ValueError, match="in another order, .*: write them in the order 1, 2, 3"):
        open_set(text, tmp_path)
    (root / "classnames.txt").write_text("\n".join(names[:11]))
    with pytest.raises(ValueError, match="names 11 of 12 classes"):
        open_set(text, tmp_path)


def write_parquet(path, labels, **metadata):
    """Writes rows as Hugging Face does: a struct of bytes and path, and a label."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(len(labels))]
    table = pyarrow.table({"image": images, "label": labels})
    parquet.write_table(table.replace_schema_metadata(metadata or None), path, row_group_size=2)


def test_parquet_with_numbers_has_the_names_of_its_class_label(tmp_path):
    """The names are in the metadata that Hugging Face's datasets writes; `classnames.txt` overrides them."""
    names = {"label": {"names": ["owl", "red_fox", "toad"], "_type": "ClassLabel"}}
    about = json.dumps({"info": {"features": names}})
    write_parquet(tmp_path / "val.parquet", [1, 0, 1], huggingface=about)
    found = open_set(f"parquet:{tmp_path}/val.parquet", tmp_path)
    assert found.class_names == ("owl", "red fox", "toad")
    assert [found[i]["captions"] for i in range(3)] == [("red fox",), ("owl",), ("red fox",)]
    (tmp_path / "classnames.txt").write_text("Eule\nFuchs\nKröte\n")
    found = open_set(f"parquet:{tmp_path}/val.parquet", tmp_path)
    assert found[0]["captions"] == ("Fuchs",)


def test_parquet_without_labels(tmp_path):
    write_parquet(tmp_path / "val.parquet", [None, None])
    with pytest.raises(ValueError, match="no row of .* has a label"):
        open_set(f"parquet:{tmp_path}/val.parquet", tmp_path)


def test_parquet_with_several_labels_in_a_row(tmp_path):
    """As names, the list [1, 2] would be the second of three classes."""
    names = {"label": [{"names": ["owl", "fox", "toad"], "_type": "ClassLabel"}]}
    about = json.dumps({"info": {"features": names}})
    write_parquet(tmp_path / "val.parquet", [[0], [1, 2], [2]], huggingface=about)
    (tmp_path / "classnames.txt").write_text("owl\nfox\ntoad")
    with pytest.raises(ValueError, match=r"the label \[0\] of .* must be one number or text"):
        open_set(f"parquet:{tmp_path}/val.parquet", tmp_path)


def test_fractions_in_jsonl_are_named(tmp_path):
    """pandas writes 1.0 for 1 if a label is missing; the rows had no label."""
    rows = [{"image": "0.jpg", "label": label} for label in (0.0, 1.0, None)]
    (tmp_path / "pets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"the label '0.0' of .* must be a whole number, as 0"):
        open_set(f"table:{tmp_path}/pets.jsonl", tmp_path)


def test_tars_have_a_cls_file_and_names_and_prompts_beside_them(tmp_path):
    text = write_labelled_tars(tmp_path / "birds")
    (tmp_path / "birds" / "zeroshot_classification_templates.txt").write_text("a {c}\none {}\n")
    found = open_set(text, tmp_path)
    assert found.class_names == ("fox", "owl") and found.templates == ("a {}", "one {}")
    assert [found[i]["label"] for i in range(4)] == [0, 1, 0, 1] and found.set_name == "birds"
    assert pickle.loads(pickle.dumps(found))[5]["captions"] == ("owl",)


def test_a_prompt_without_a_place_for_the_name_is_told_with_its_file(tmp_path):
    text = write_folders(tmp_path / "pets")
    (tmp_path / "pets" / "zeroshot_classification_templates.txt").write_text("a {}\na picture\n")
    with pytest.raises(ValueError, match="templates.txt: the prompt 'a picture' has no place for"):
        open_set(text, tmp_path)


def test_names_in_another_encoding_are_told_with_their_file(tmp_path):
    text = write_folders(tmp_path / "pets")
    (tmp_path / "pets" / "classnames.txt").write_text("fox\nowl\n", encoding="utf-16")
    with pytest.raises(ValueError, match="classnames.txt is not UTF-8, .*: save it as UTF-8"):
        open_set(text, tmp_path)


def write_rows(tmp_path, labels):
    rows = [f"{i}.jpg,{label}" for i, label in enumerate(labels)]
    for i in range(len(labels)):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    (tmp_path / "pets.csv").write_text("\n".join(["image,label", *rows]))
    return f"table:{tmp_path}/pets.csv"


@pytest.mark.parametrize("kind", ["table", "parquet"])
def test_a_column_of_labels(tmp_path, kind):
    labels = ["owl", "red fox", None, "owl"]
    text = write_rows(tmp_path, [label or "" for label in labels])
    if kind == "parquet":
        write_parquet(tmp_path / "val.parquet", labels)
        text = f"pets=parquet:{tmp_path}/*.parquet"
    found = open_set(text, tmp_path)
    assert found.class_names == ("owl", "red fox") and found.set_name == "pets"
    assert [found[i]["label"] for i in (0, 1, 3)] == [0, 1, 0]
    assert pickle.loads(pickle.dumps(found))[1]["captions"] == ("red fox",)
    with pytest.raises(ValueError, match="the row has no label"):
        found[2]


def test_a_column_of_numbers_needs_names(tmp_path):
    text = write_rows(tmp_path, [1, 0, 2])
    with pytest.raises(ValueError, match=r"have no names: write them to .*classnames.txt"):
        open_set(text, tmp_path)
    (tmp_path / "classnames.txt").write_text("\ufeffowl\nfox\ntoad\n")
    found = open_set(text, tmp_path)
    assert [found[i]["captions"] for i in range(3)] == [("fox",), ("owl",), ("toad",)]
    rows = [{"image": "0.jpg", "label": 2}, {"image": "1.jpg", "label": None}]
    (tmp_path / "pets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = open_set(f"table:{tmp_path}/pets.jsonl", tmp_path)
    assert found[0]["captions"] == ("toad",)
    with pytest.raises(ValueError, match="the row has no label"):
        found[1]
    with pytest.raises(ValueError, match="no row of .* has a label"):
        open_set(write_rows(tmp_path, ["", ""]), tmp_path)


def test_labels_that_are_names_follow_the_names_file(tmp_path):
    (tmp_path / "classnames.txt").write_text("zebra\nape\n")
    found = open_set(write_rows(tmp_path, ["zebra"]), tmp_path)
    assert found.class_names == ("zebra", "ape") and found[0]["captions"] == ("zebra",)


@pytest.mark.parametrize(
    "labels, names, message",
    [
        (["owl", "Toad"], "toad\nowl", "label 'Toad' of .*pets.csv' .* in classnames.txt, which"),
        (["1", "3", "?"], "a\nb\nc", "labels '1' and '\\?', and classnames.txt contains neither"),
        (["0.0", "10.0", "2.0"], "a\nb\nc", "label '0.0' of .* must be a whole number, as 0, or"),
        ([1, 3, 2], "a\nb\nc", "labels of .*pets.csv' must be 0 to 2, and are 1 to 3: subtract 1"),
        ([0, 1, 2], "a\n\nb\nc", "classnames.txt: line 2 is empty, and would move the names after"),
        (["crane", "owl"], "crane\nowl\ncrane", "classnames.txt contains 'crane' .* a label of"),
    ],
)
def test_labels_that_would_have_names_of_other_classes(labels, names, message, tmp_path):
    (tmp_path / "classnames.txt").write_text(names)
    with pytest.raises(ValueError, match=message) as caught:
        open_set(write_rows(tmp_path, labels), tmp_path)
    assert "\n" not in str(caught.value)


def test_only_line_ends_separate_names(tmp_path):
    """Python also splits text at U+2028 and form feeds; it moved the names after them to other labels."""
    (tmp_path / "classnames.txt").write_text("owl\u2028barn\nfox\x0cred\r\ntoad", newline="")
    found = open_set(write_rows(tmp_path, [0, 1, 2]), tmp_path)
    assert found.class_names == ("owl\u2028barn", "fox\x0cred", "toad")


def test_names_of_folders_in_another_order(tmp_path):
    text = write_folders(tmp_path / "pets", images=1)
    (tmp_path / "pets" / "classnames.txt").write_text("toad\nred fox\nsnow owl\n")
    with pytest.raises(ValueError, match="classnames.txt has .* order, .* order red fox, snow owl"):
        open_set(text, tmp_path)


def test_negative_numbers_are_no_labels(tmp_path):
    """Hugging Face writes -1. As a name, it would move the names of all others."""
    names = {"label": {"names": ["owl", "fox"], "_type": "ClassLabel"}}
    about = json.dumps({"info": {"features": names}})
    write_parquet(tmp_path / "val.parquet", [-1, 0, 1], huggingface=about)
    found = open_set(f"parquet:{tmp_path}/val.parquet", tmp_path)
    assert found.class_names == ("owl", "fox") and found[1]["captions"] == ("owl",)
    with pytest.raises(ValueError, match="the row has no label"):
        found[0]
    write_parquet(tmp_path / "nan.parquet", [float("nan")])
    with pytest.raises(ValueError, match="no row of .* has a label"):
        open_set(f"parquet:{tmp_path}/nan.parquet", tmp_path)
    write_parquet(tmp_path / "bytes.parquet", [b"owl"])
    assert open_set(f"parquet:{tmp_path}/bytes.parquet", tmp_path).class_names == ("owl",)


def test_synsets_of_imagenet_get_its_names_and_prompts(tmp_path):
    text = write_labelled_tars(tmp_path / "x", [f"n{i:08d}" for i in range(1000)])
    found = open_set(text, tmp_path)
    assert found.class_names == imagenet.class_names()
    assert found.templates == imagenet.templates()
    text = write_labelled_tars(tmp_path / "y", [f"n{i:08d}" for i in reversed(range(1000))])
    with pytest.raises(ValueError, match="the synsets in .*classnames.txt are not sorted, as"):
        open_set(text, tmp_path)


def test_a_label_without_a_name_is_a_bad_example(tmp_path):
    found = open_set(write_labelled_tars(tmp_path / "x", ["fox"]), tmp_path)
    with pytest.raises(ValueError, match="the label '1' is not one of the 1 classes"):
        found[1]


@pytest.mark.parametrize(
    "text, message",
    [
        ("pets", "not an address of a labelled set: write"),
        ("zip:pets", "not an address of a labelled set: write"),
        ("tfds:imagenet2012", "names no split"),
        ("folders:missing", "is not a folder"),
    ],
)
def test_mistakes_in_addresses_are_one_line(text, message, tmp_path):
    config = micro_config(str(tmp_path), eval__zeroshot=text)
    with pytest.raises(config_lib.ConfigError, match=message) as caught:
        open_labelled(config)
    assert "config.eval.zeroshot" in str(caught.value) and "\n" not in str(caught.value)


def test_two_sets_with_one_name(tmp_path):
    text = write_folders(tmp_path / "pets")
    config = micro_config(str(tmp_path), eval__zeroshot=f"{text},{text}")
    with pytest.raises(config_lib.ConfigError, match="two sets named 'pets'"):
        open_labelled(config)


def test_tfds_splits_may_be_slices():
    assert address("tfds:a/b:1.0.0/test[:9]") == ("a", "tfds", "a/b:1.0.0/test[:9]")


@pytest.mark.release
def test_evaluate_gives_the_scores_of_training(tmp_path, shared_cache, capsys):
    pets, birds = write_folders(tmp_path / "pets"), write_labelled_tars(tmp_path / "birds")
    config = micro_config(
        str(shared_cache),
        eval__zeroshot=f"animals={pets},{birds}",
        eval__every_steps=4,
        data__dir=tmp_path / "data",
    )
    run = tmp_path / "run"
    assert train(config, run) == 0
    rows = [row for row in records(run) if "zeroshot/animals_top1" in row]
    assert [row["step"] for row in rows] == [4, 6]
    final = json.loads((run / "results.json").read_text())["scores"]
    assert {"zeroshot/animals_top1", "zeroshot/birds_top1", "test/image_to_text_R@1"} <= set(final)

    capsys.readouterr()
    assert main(["evaluate", f"--workdir={run}"]) == 0
    scores = json.loads(capsys.readouterr().out)
    names = {name for name in rows[-1] if name.startswith(("zeroshot/", "val/"))}
    logged = {name: np.float32(rows[-1][name]) for name in names}  # metrics.jsonl holds float32
    assert {name: np.float32(scores[name]) for name in names} == logged
    assert {name: scores[name] for name in final} == final

    assert main(["evaluate", f"--workdir={run}", "--split=val", f"--data={birds}"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["zeroshot/birds_top1"] == scores["zeroshot/birds_top1"]
    assert "zeroshot/animals_top1" not in again and "test/image_to_text_R@1" not in again


def test_sets_are_scored_once_for_each_state(monkeypatch):
    """A rollback repeats a step with other parameters, whose scores differ."""
    runs = []

    class Scores:
        def __init__(self, *_, on_bad, max_bad_share, **__):
            assert (on_bad, max_bad_share) == ("stop", 0.5)  # of the config

        def run(self, params):
            runs.append(params)
            return {"zeroshot/pets_top1": params}

    pets = SimpleNamespace(templates=(), set_name="pets")
    monkeypatch.setattr(evaluation, "open_labelled", lambda config: {pets.set_name: pets})
    monkeypatch.setattr(evaluation, "open_source", lambda config, split: None)
    monkeypatch.setattr(evaluation.evaluators, "ZeroShot", Scores)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    config = micro_config("cache", data__on_bad="stop", data__max_bad_share=0.5)
    evaluate = evaluation.Evaluator(config, None, mesh)
    for params in (0.1, 0.2):
        state = {"params": params, "step": jnp.int32(4)}
        for split in ("val", "test"):
            assert evaluate(state, split).scores == {"zeroshot/pets_top1": params}
    assert runs == [0.1, 0.2]


def test_foreign_weights_are_scored(tmp_path, capsys):
    write_weights(tmp_path / "clip")
    pets = write_folders(tmp_path / "pets")
    assert main(["evaluate", f"--weights={tmp_path}/clip", f"--data={pets}"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["zeroshot/pets_chance_top1"] == pytest.approx(1 / 3)
    assert scores["zeroshot/pets_top5"] == 1  # 1 with three classes; NaN would score 0
    assert set(scores) == {f"zeroshot/pets_{x}" for x in
                           ("top1", "top5", "chance_top1", "chance_top5")}  # fmt: skip
    for flags in (["--split=test"], [f"--config.data.dir={tmp_path}"]):
        table = ["--config.data.name=table", *flags]
        assert main(["evaluate", f"--weights={tmp_path}/clip", *table]) == 2
        wanted = "'table' has no split 'test'" if "--split=test" in flags else "nothing to score"
        assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--workdir=missing"], "is not a run"),
        (
            ["--weights=missing", "--data=folders:x"],
            "cannot score 'missing': missing does not exist",
        ),
        (["--weights=missing"], "nothing to score"),
        (["--data=folders:x"], "exactly one of --workdir"),
        (["--workdir=a", "--workdir=b"], "2 times"),
        (["--workdir=a", "--split=train"], "choose from val, test"),
        (["--wordkir=a"], "unexpected argument"),
        (["--weights=a", "--config.model.recipe=standard"], "recipe does not change scores"),
        (["--weights=a", "--config.data.image_size=64"], "image_size does not change scores"),
    ],
)
def test_mistakes_of_the_command_are_one_line(flags, message, capsys):
    assert main(["evaluate", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"mixture.own.splits.val": "v.csv", "mixture.own.weight": "2"}, "no checkpoint"),
        ({"name": "parquet", "parquet.splits.val": "v.parquet"}, "no checkpoint"),
        ({"mixture.own.wieght": "2"}, "did you mean 'weight'?"),
        ({"mixture.web.weight": "2"}, "because 'own' is scored: change config.data.mixture.own"),
        ({"tfds.builder": "coco_captions"}, "because 'own' is scored"),
        ({"table.splits.val": "v.csv"}, "because 'own' is scored"),
    ],
)
def test_overrides_of_a_run_on_a_mixture(flags, message, tmp_path, capsys):
    """Keys of parts were unknown. Scores of the run's own data stood for those of `data.name`."""
    config = config_lib.load(str(config_lib.COMMON))
    config.data.name, config.eval.data = "mixture", "own"
    splits = {"train": "t.csv", "val": "t.csv"}
    own = {"name": "table", "weight": 1.0, "splits": splits}
    with config.unlocked():
        config.data.mixture = {"own": own, "web": {"name": "webdataset", "weight": 1.0}}
    (tmp_path / "config.json").write_text(config_lib.to_json(config))
    (tmp_path / "checkpoints").mkdir()
    given = [f"--config.data.{key}={value}" for key, value in flags.items()]
    assert main(["evaluate", f"--workdir={tmp_path}", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_tfds_labels_have_the_names_of_the_builder(tmp_path):
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(names=["fox", "owl"]),
    }
    examples = [{"image": jpeg(i), "label": i % 2} for i in range(5)]
    write_tfds(tmp_path / "data", "small", "validation", features, examples)
    found = open_set("tfds:small/validation", tmp_path)
    assert found.class_names == ("fox", "owl") and found.set_name == "small" and len(found) == 5
    assert [found[i]["label"] for i in range(3)] == [0, 1, 0] and found[1]["captions"] == ("owl",)
    assert pickle.loads(pickle.dumps(found))[3]["label"] == 1


def test_coco_captions_are_found_under_their_real_name(tmp_path):
    """The default text_key finds the captions of TFDS's COCO."""
    write_coco(tmp_path, "val")
    changes = {"data__name": "tfds", "data__tfds__builder": "coco_captions", "data__dir": tmp_path}
    found = open_source(micro_config(str(tmp_path), **changes), "val")
    assert len(found) == 3 and found.captions(2) == ("cat 2", "pet 2")
    assert found[1]["captions"] == ("cat 1", "pet 1")
