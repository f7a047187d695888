"""Zero-shot and retrieval scores, compared with brute force in NumPy; ties, NaNs, duplicates, chance."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from swjax import data, evaluators
from swjax.data import imagenet
from swjax.evaluators import embed, ranking, retrieval
from swjax.models import sharding
from swjax.report import page

SIZES = {"batch_size": 8, "context_length": 12, "image_size": 4}
NAMES = ("cat", "dog", "fish", "cat", "owl", "bee", "fox")  # two classes named "cat"
TEMPLATES = ("a photo of a {}", "{}")


class Source:
    """Images whose pixels are their index."""

    class_names = NAMES
    templates = TEMPLATES
    attribution = ""
    photographs = False

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        label = self.labels[i]
        image = np.full((4, 4, 3), i, np.uint8)
        return {"image": image, "label": label, "captions": self.captions(label)}

    def captions(self, label):
        return (f"a {NAMES[label]}", f"one {NAMES[label]}", "an animal")[: 2 + label % 2]


class Model:
    """Embeds an image as a random vector, a text as the sum of random vectors of its tokens."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.image = rng.normal(size=(256, 5)).astype(np.float32)
        self.token = rng.normal(size=(49408, 5)).astype(np.float32)
        self.sizes = set()

    def text(self, tokens):
        return self.token[tokens].sum(axis=-2)

    def __call__(self, params, batch):
        (key, value), *rest = batch.items()
        assert not rest
        self.sizes.add(len(value))
        out = self.image[value[:, 0, 0, 0]] if key == "image" else self.text(value)
        return {key: jax.numpy.asarray(params * out)}


@pytest.fixture
def source():
    return make_source()


def make_source():
    return Source(np.random.default_rng(1).integers(0, len(NAMES), 37).tolist())


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def tokens(texts):
    return embed.data.tokenize(texts, context_length=12)


def brute_force(similarity, correct):
    """Returns the rank of the best correct candidate; wrong candidates that tie with it come before it."""
    worst = []
    for row, own in zip(similarity, correct, strict=True):
        best = max(row[i] for i in own)
        worst.append(sum(1 for j, s in enumerate(row) if j not in own and not s < best))
    return np.array(worst)


def zero_shot(model, source, **overrides):
    kwargs = {"templates": TEMPLATES, "name": "fake", **SIZES} | overrides
    return evaluators.ZeroShot(model, source, **kwargs)


def test_zero_shot_matches_brute_force(source):
    model = Model()
    scores = zero_shot(model, source).run(np.float32(1))
    names = sorted({NAMES[label] for label in source.labels})
    prompts = [tokens([template.format(name) for template in TEMPLATES]) for name in names]
    classes = unit(np.stack([unit(model.text(p)).mean(axis=0) for p in prompts]))
    similarity = unit(model.image[: len(source)]) @ classes.T
    rank = brute_force(similarity, [{names.index(NAMES[label])} for label in source.labels])
    for k in (1, 5):
        assert scores[f"zeroshot/fake_top{k}"] == np.mean(rank < k)
        assert scores[f"zeroshot/fake_chance_top{k}"] == pytest.approx(k / len(names))
    assert 0 < scores["zeroshot/fake_top1"] < scores["zeroshot/fake_top5"] < 1
    assert model.sizes == {8}  # one compilation: the last batch is padded


def test_zero_shot_knows_only_names_that_occur():
    scores = zero_shot(Model(), Source([1, 1, 2, 4])).run(np.float32(1))
    assert scores["zeroshot/fake_chance_top1"] == pytest.approx(1 / 3)


def test_texts_that_the_tokenizer_reads_as_one_are_one():
    """Their embeddings are equal: as two candidates they would tie, and none would be the first."""
    source = Source([0, 1, 2])
    source.class_names = ("Red fox", "red\nfox", "owl")
    source.captions = lambda label: (source.class_names[label],)
    scores = zero_shot(Model(), source).run(np.float32(1))
    assert scores["zeroshot/fake_chance_top1"] == pytest.approx(1 / 2)
    scores = evaluators.Retrieval(Model(), source, **SIZES).run(np.float32(1))
    assert scores["val/image_to_text_chance_R@1"] == pytest.approx(1 / 2)
    captions, captions_of, images_of = retrieval.pair(np.array([0, 1, 2]), source.captions, 12)
    assert captions == ["Red fox", "owl"]
    assert captions_of == [[0], [0], [1]] and images_of == [[0, 1], [2]]


def test_texts_that_are_equal_after_truncation_are_one():
    """Every score was 0: their embeddings tie."""
    source = Source([0, 1, 2])
    long = "one two three four five six seven eight nine ten eleven"
    source.class_names = (long, f"{long} twelve", "owl")
    source.captions = lambda label: (source.class_names[label],)
    model = Model()
    scores = zero_shot(model, source).run(np.float32(1))
    scores |= evaluators.Retrieval(model, source, **SIZES).run(np.float32(1))
    assert scores["zeroshot/fake_chance_top1"] == pytest.approx(1 / 2)
    assert scores["val/image_to_text_chance_R@1"] == pytest.approx(1 / 2)
    model.image[:3] = embed.unit(
        model.text(tokens(source.class_names))
    )  # each image has the embedding of its own caption
    scores = zero_shot(model, source, templates=("{}",)).run(np.float32(1))
    scores |= evaluators.Retrieval(model, source, **SIZES).run(np.float32(1))
    assert scores["zeroshot/fake_top1"] == scores["val/image_to_text_R@1"] == 1
    assert evaluators.zeroshot.distinct(["a b", "a c"], ["{} x", "y z {}"], 4) == [0, 1]


def test_imagenet_is_scored_by_the_published_protocol_and_merged():
    """Over 1,000 columns; of two equal ones the first is the prediction."""
    source, model = Source([0, 836, 837, 999]), Model()
    source.class_names = imagenet.class_names()
    assert source.class_names[836] == source.class_names[837]
    scorer = zero_shot(model, source, templates=("{}",))
    vectors = embed.unit(model.text(tokens(source.class_names)))
    images = embed.Images(
        vectors[source.labels],
        np.array(source.labels),
        np.arange(4),
        np.zeros((4, 8)),
        np.zeros(0),
        None,
        {},
    )
    scores = scorer.run(np.float32(1), images)
    argmax = np.argmax(np.round(images.embeddings @ vectors.T, 5), axis=1)
    assert scores["zeroshot/fake_top1"] == np.mean(argmax == source.labels) == 0.75
    assert scores["zeroshot/fake_top5"] == scores["zeroshot/fake_merged_top1"] == 1
    assert scores["zeroshot/fake_chance_top1"] == pytest.approx(1 / 1000)
    assert scores["zeroshot/fake_merged_chance_top1"] == pytest.approx(1 / 3)
    assert page.label("zeroshot/fake_merged_top1") == "Zero-shot top-1, fake_merged"


def test_retrieval_matches_brute_force(source):
    model = Model()
    scores = evaluators.Retrieval(model, source, name="val", **SIZES).run(np.float32(1))
    texts = sorted({c for label in source.labels for c in source.captions(label)})
    similarity = unit(model.image[: len(source)]) @ unit(model.text(tokens(texts))).T
    own = [{texts.index(c) for c in source.captions(label)} for label in source.labels]
    of_text = [{i for i, o in enumerate(own) if t in o} for t in range(len(texts))]
    for direction, s, correct in (
        ("image_to_text", similarity, own),
        ("text_to_image", similarity.T, of_text),
    ):
        rank = brute_force(s, correct)
        for k in (1, 5, 10):
            assert scores[f"val/{direction}_R@{k}"] == np.mean(rank < k), (direction, k)
    assert 0 < scores["val/image_to_text_R@1"] < scores["val/image_to_text_R@5"] < 1


def test_photographs_with_equal_pixels_are_one_image(tmp_path):
    """A table with a row for each caption is scored as one with lists of captions."""
    rows, lists = ["image,caption"], []
    for number, name in enumerate(NAMES[:3]):
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
        captions = [f"a {name}", f"one {name}"]
        rows += [f"{number}.png,{caption}" for caption in captions]
        lists.append(json.dumps({"image": f"{number}.png", "caption": captions}))
    scores, shown = [], []
    for name, lines in (("t.csv", rows), ("t.jsonl", lists)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        source = data.source("table", str(tmp_path / name), data_dir=str(tmp_path))
        retrieval = evaluators.Retrieval(Model(), source, **SIZES)
        images = retrieval.images(np.float32(1), count=9)
        retrieval = evaluators.Retrieval(Model(), source, **SIZES)  # keeps nothing of `images`
        scores.append(retrieval.run(np.float32(1), images))
        shown.append(retrieval.predictions(np.float32(1), count=9, images=images))
    assert scores[0] == scores[1]
    assert [p.name for p in shown[0]] == [p.name for p in shown[1]]
    assert [p.image[0, 0, 0] for p in shown[0]] == [0, 1, 2]


def test_retrieval_among_the_first_captions(source):
    scores = evaluators.Retrieval(Model(), source, captions_per_image=1, **SIZES).run(np.float32(1))
    names = {NAMES[label] for label in source.labels}
    assert scores["val/image_to_text_chance_R@1"] == pytest.approx(1 / len(names))


@pytest.mark.parametrize("params", [0.0, np.nan])
def test_a_model_that_knows_nothing_scores_nothing(source, params):
    """Ties and NaNs count against the model: constant embeddings never score above chance."""
    scores = zero_shot(Model(), source).run(np.float32(params))
    scores |= evaluators.Retrieval(Model(), source, **SIZES).run(np.float32(params))
    for name, value in scores.items():
        assert ("chance" in name) == (value > 0), (name, value)


def test_ties_within_rounding_are_ties():
    """The cosines of equal embeddings may differ in the last bit between columns of a matrix product."""
    x = np.tile(unit(np.random.default_rng(0).normal(size=(1, 640))).astype(np.float32), (99, 1))
    noisy = x + np.random.default_rng(1).choice([-5e-8, 5e-8], x.shape).astype(np.float32)
    assert (ranking.ranks(x, noisy, [[i] for i in range(99)]) == 98).all()


def test_nan_is_never_the_nearest():
    found, cosines = ranking.top(
        np.eye(3, dtype=np.float32), np.diag([1, np.nan, 1]).astype("f"), 3
    )
    assert found[:, -1].tolist() == [1, 1, 1] and np.isnan(cosines[:, -1]).all()
    assert found[0, 0] == 0 and cosines[0, 0] == 1


def test_ranks_do_not_depend_on_chunks(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = (unit(rng.normal(size=(n, 8))).astype(np.float32) for n in (23, 31))
    correct = [rng.choice(31, rng.integers(1, 4), replace=False) for _ in range(23)]
    whole = ranking.ranks(x, y, correct)
    monkeypatch.setattr(ranking, "CHUNK", 5 * 31)
    np.testing.assert_array_equal(ranking.ranks(x, y, correct), whole)
    np.testing.assert_array_equal(whole, brute_force(x @ y.T, [set(c) for c in correct]))


def test_chance_matches_simulation():
    rng = np.random.default_rng(0)
    correct = [[0], [1, 2], [3, 4, 5]]
    for k in (1, 4, 12, 20):
        hits = [
            bool(set(rng.permutation(12)[:k].tolist()) & set(own))
            for own in correct
            for _ in range(2000)
        ]
        assert ranking.chance(correct, 12, k) == pytest.approx(np.mean(hits), abs=0.02)


def test_predictions_are_the_nearest_names(source):
    model = Model()
    shown = zero_shot(model, source).predictions(np.float32(1), count=5)
    names = sorted({NAMES[label] for label in source.labels})
    prompts = [tokens([template.format(name) for template in TEMPLATES]) for name in names]
    classes = unit(np.stack([unit(model.text(p)).mean(axis=0) for p in prompts]))
    assert [p.image[0, 0, 0] for p in shown] == [0, 9, 18, 27, 36]
    for p in shown:
        index = p.image[0, 0, 0]
        cosines = classes @ unit(model.image[index])
        assert p.name == NAMES[source.labels[index]]
        assert list(p.guesses) == [names[i] for i in np.argsort(-cosines)[:3]]
        np.testing.assert_allclose(p.cosines, np.sort(cosines)[::-1][:3], rtol=1e-5)


def test_the_nearest_captions_of_images(source):
    """Without classes, images are shown with their nearest captions; any caption of the image is correct."""
    model = Model()
    retrieval = evaluators.Retrieval(model, source, **SIZES)
    shown = retrieval.predictions(np.float32(1), count=5)
    captions = sorted({c for label in source.labels for c in source.captions(label)})
    texts = unit(model.text(tokens(captions)))
    assert [p.image[0, 0, 0] for p in shown] == [0, 9, 18, 27, 36]
    for p in shown:
        index = p.image[0, 0, 0]
        cosines = texts @ unit(model.image[index])
        assert list(p.guesses) == [captions[i] for i in np.argsort(-cosines)[:3]]
        own = source.captions(source.labels[index])
        found = [guess for guess in p.guesses if guess in own]
        assert p.name == (found or own)[0]
    assert any(p.name in p.guesses for p in shown)
    assert len(retrieval.predictions(np.float32(1), count=99, k=99)) == len(source)


def test_the_nearest_images_of_captions(source):
    model = Model()
    retrieval = evaluators.Retrieval(model, source, **SIZES)
    found = retrieval.nearest_images(np.float32(1), count=4, k=3)
    images = unit(model.image[: len(source)])
    assert len(found) == 4
    for each in found:
        cosines = images @ unit(model.text(tokens([each.caption]))[0])
        nearest = np.argsort(-cosines)[:3]
        assert each.images[:, 0, 0, 0].tolist() == nearest.tolist()
        own = [each.caption in source.captions(source.labels[i]) for i in nearest]
        assert list(each.own) == own
        np.testing.assert_allclose(each.cosines, cosines[nearest], rtol=1e-5)


class WithUnreadable(Source):
    """A source of photographs whose first and last image cannot be read."""

    photographs = True

    def __getitem__(self, i):
        if i in (0, len(self) - 1):
            raise OSError("no image")
        return super().__getitem__(i)


def test_images_that_cannot_be_read_are_not_shown(source):
    """All other images keep their names and captions."""
    unreadable = WithUnreadable(source.labels)
    retrieval = evaluators.Retrieval(Model(), unreadable, **SIZES)
    for scorer in (zero_shot(Model(), unreadable), retrieval):
        shown = scorer.predictions(np.float32(1), count=5)
        assert [p.image[0, 0, 0] for p in shown] == [9, 18, 27]
        for p in shown:
            label = source.labels[p.image[0, 0, 0]]
            assert p.name in (NAMES[label], *source.captions(label))


@pytest.mark.parametrize(
    "labels, options, message",
    [
        ([0, 1, 2], {"on_bad": "stop"}, "': cannot read example 0: OSError: no image"),
        ([0, 1, 2], {"max_bad_share": 0.0}, "': 1 of 1 examples cannot be read, more than"),
        ([0, 1], {}, "': none of the 2 images to evaluate on can be read"),
    ],
)
def test_too_many_unreadable_images_end_an_evaluation(labels, options, message):
    unreadable = WithUnreadable(labels)
    retrieval = evaluators.Retrieval(Model(), unreadable, **SIZES, **options)
    for scorer, name in ((zero_shot(Model(), unreadable, **options), "zero-shot set 'fake"),
                         (retrieval, "split 'val")):  # fmt: skip
        with pytest.raises(data.BadData, match=f"^{name}{message}"):
            scorer.run(np.float32(1))


def evaluate_sharded(tensor=1):
    """Returns scores and predictions from embeddings that are sharded over all processes' devices."""
    model, source, mesh = Model(), make_source(), sharding.make_mesh(tensor=tensor)
    sizes = SIZES | {"share": sharding.batch_share(mesh)}

    def predict(params, batch):
        return sharding.shard_batch(jax.device_get(model(params, batch)), mesh)

    scorer, one = zero_shot(predict, source, **sizes), np.float32(1)
    scores = scorer.run(one) | evaluators.Retrieval(predict, source, **sizes).run(one)
    shown = [[int(p.image[0, 0, 0]), p.name, *p.guesses] for p in scorer.predictions(one, count=5)]
    return scores | {"shown": shown}


@pytest.mark.release
def test_two_processes_score_like_one():
    """Two processes with two devices each give the scores and predictions of one process.

    Each process reads half of the images; with a tensor axis over both, each reads all.
    """
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port = str(sock.getsockname()[1])
    worker = str(Path(__file__).parent / "evaluate_worker.py")
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    both = [
        subprocess.Popen(
            [sys.executable, worker, "1", "4"],
            env=os.environ | slurm
            | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "JAX_COORDINATOR_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=120)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    alone = evaluate_sharded()
    assert [json.loads(text.splitlines()[-1]) for text in printed] == [[alone, alone]] * 2


def test_more_predictions_than_images():
    assert len(zero_shot(Model(), Source([0, 1])).predictions(np.float32(1), count=24, k=9)) == 2


def test_errors_name_the_remedy(source):
    with pytest.raises(ValueError, match=r'need a "\{\}" for the name, got \[.a cat.\]'):
        zero_shot(Model(), source, templates=("a cat",))
    with pytest.raises(ValueError, match="no images: choose another split"):
        zero_shot(Model(), Source([])).run(np.float32(1))
    source.class_names = ()
    with pytest.raises(ValueError, match="has no class names"):
        zero_shot(Model(), source)
    with pytest.raises(ValueError, match="label 3 has no caption"):
        retrieval.pair(np.array([3]), lambda label: (), 12)
    for templates in (lambda name: name, [str.upper], [1]):
        with pytest.raises(ValueError, match='must be texts with "{}" for the name'):
            zero_shot(Model(), make_source(), templates=templates)
    for names in ([1], ["cat", None], np.array([3])):
        with pytest.raises(ValueError, match="names of classes must be texts, got"):
            evaluators.zeroshot.classifier(
                Model(), np.float32(1), names, ("{}",), batch_size=8, context_length=12
            )
