"""The evaluation of a run: retrieval, and zero-shot classification if the data have classes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from ml_collections import ConfigDict

from swjax import evaluators
from swjax.data.labelled import Labelled
from swjax.models import sharding
from swjax.training import distributed
from swjax.training.config import ConfigError, blame
from swjax.training.failures import blame_data_path
from swjax.training.inputs import open_source

PREDICTIONS = 24  # number of unseen images in the report
CAPTIONS = 5  # number of unseen captions in the report, if the data have no classes


class Evaluation(NamedTuple):
    """The result of evaluating a split.

    Attributes:
      scores: {name: number} of the split, if the config names one, and of the sets of `eval.zeroshot`.
      predictions: some images with their most likely classes, or with captions if the data have no classes.
      nearest_images: some captions with their nearest images; [] if the data have classes.
    """

    scores: dict[str, Any]
    predictions: list[evaluators.Prediction]
    nearest_images: list[evaluators.NearestImages]


def make_evaluate(
    config: ConfigDict, graph: nnx.GraphDef, mesh: jax.sharding.Mesh
) -> Callable[..., Evaluation]:
    """Returns a function (state, split, examples=0) -> `Evaluation` with `examples` predictions.

    The function evaluates the average of the parameters if the run keeps one. All processes must call it.

    Args:
      config: the config of the run.
      graph: graph definition of the model.
      mesh: mesh of all devices; batches are sharded over it.

    Raises:
      ConfigError: a set of `eval.zeroshot` cannot be opened.
    """
    embed = evaluators.predictor(graph, config.data.image_size)
    sizes = {
        "batch_size": config.eval.batch_size,
        "context_length": config.data.context_length,
        "image_size": config.data.image_size,
        "share": sharding.batch_share(mesh),
        "on_bad": config.data.on_bad,
        "max_bad_share": config.data.max_bad_share,
    }

    def predict(params, batch):
        return embed(params, sharding.shard_batch(batch, mesh))

    labelled = [
        evaluators.ZeroShot(
            predict, source, templates=source.templates, name=source.set_name, **sizes
        )
        for source in open_labelled(config)
    ]
    # The scores of the labelled sets, and the array `state["step"]` of their state. The array identifies a
    # state; its number does not, because a rollback repeats numbers with other parameters.
    labelled_scores: dict[str, Any] = {}
    scored: jax.Array | None = None

    def evaluate(state, split, examples=0):
        nonlocal labelled_scores, scored
        if state["step"] is not scored:
            params = state.get("ema", state["params"])
            labelled_scores = {k: x for one in labelled for k, x in one.run(params).items()}
            scored = state["step"]
        own = evaluate_split(state, split, examples)
        return own._replace(scores=labelled_scores | own.scores)

    def evaluate_split(state, split, examples):
        source, params = open_source(config, split), state.get("ema", state["params"])
        if source is None:
            return Evaluation({}, [], [])
        retrieval = evaluators.Retrieval(
            predict,
            source,
            name=split,
            captions_per_image=config.eval.captions_per_image or None,
            **sizes,
        )
        images = retrieval.images(params, count=examples)  # one pass serves all scores
        shown = {"count": examples, "images": images}
        scores = retrieval.run(params, images)
        if not source.class_names:
            if not examples:
                return Evaluation(scores, [], [])
            nearest = retrieval.nearest_images(params, count=CAPTIONS, images=images)
            return Evaluation(scores, retrieval.predictions(params, **shown), nearest)
        zero_shot = evaluators.ZeroShot(
            predict,
            source,
            templates=source.templates,
            name=f"{config.eval.data or config.data.name}_{split}",
            **sizes,
        )
        predictions = zero_shot.predictions(params, **shown) if examples else []
        return Evaluation(zero_shot.run(params, images) | scores, predictions, [])

    return evaluate


def open_labelled(config: ConfigDict) -> list[Labelled]:
    """Opens the labelled sets of `eval.zeroshot`.

    Raises:
      ConfigError: a set cannot be opened, two sets have the same name, or the processes have sets of
        different lengths.
    """
    with distributed.all_or_none(), blame("eval.zeroshot"), blame_data_path():
        options = {"data_dir": config.data.dir}
        found = [Labelled(text, **options) for text in config.eval.zeroshot]
    names = [source.set_name for source in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"config.eval.zeroshot has two sets named {twice!r}: name each, as in NAME=KIND:WHERE"
        )
    lengths = {source.set_name: len(source) for source in found}
    distributed.check_same_lengths("eval.zeroshot", lengths)
    return found


def evaluate_unseen(evaluate: Callable[..., Evaluation], state: Any) -> Evaluation:
    """Evaluates a run after its last step, on its test split, or on its val split if it has no test split.

    Args:
      evaluate: function from `make_evaluate`.
      state: train state after the last step.
    """
    test = evaluate(state, "test", examples=PREDICTIONS)
    has_test = any(name.startswith("test/") for name in test.scores)
    return test if has_test else evaluate(state, "val", examples=PREDICTIONS)
