"""The evaluation of a run: retrieval, and zero-shot classification where the data have classes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from swjax import evaluators
from swjax.models import sharding
from swjax.training.inputs import open_source
from swjax.training.setup import Parts

PREDICTIONS = 24  # unseen images in the report


class Evaluation(NamedTuple):
    """What a model makes of a split.

    Attributes:
      scores: {name: number}; {} if the config names no such split.
      predictions: some images with their likeliest classes; [] if the data have no classes.
    """

    scores: dict[str, Any]
    predictions: list[evaluators.Prediction]


def make_evaluate(config: ConfigDict, parts: Parts) -> Callable[..., Evaluation]:
    """Returns a function (state, split, examples=0) -> `Evaluation` with that many predictions.

    It evaluates the average of the parameters, if the run has one. All processes must call it.

    Args:
      config: the run's.
      parts: of the run.
    """
    embed = evaluators.predictor(parts.graphdef, config.data.image_size)
    sizes = {
        "batch_size": config.eval.batch_size,
        "context_length": config.data.context_length,
        "image_size": config.data.image_size,
        "share": sharding.batch_share(parts.mesh),
    }

    def predict(params, batch):
        return embed(params, sharding.shard_batch(batch, parts.mesh))

    def evaluate(state, split, examples=0):
        source, params = open_source(config, split), state.get("ema", state["params"])
        if source is None:
            return Evaluation({}, [])
        retrieval = evaluators.Retrieval(
            predict,
            source,
            name=split,
            captions_per_image=config.eval.captions_per_image or None,
            **sizes,
        )
        scores = retrieval.run(params)
        if not source.class_names:
            return Evaluation(scores, [])
        zero_shot = evaluators.ZeroShot(
            predict,
            source,
            templates=source.templates,
            name=f"{config.eval.data or config.data.name}_{split}",
            **sizes,
        )
        predictions = zero_shot.predictions(params, count=examples) if examples else []
        return Evaluation(zero_shot.run(params) | scores, predictions)

    return evaluate


def evaluate_unseen(evaluate: Callable[..., Evaluation], state: Any) -> Evaluation:
    """The final evaluation of a run: of its test split, or of its val split if it has no test split.

    Args:
      evaluate: of `make_evaluate`.
      state: after the last step.
    """
    test = evaluate(state, "test", examples=PREDICTIONS)
    return test if test.scores else evaluate(state, "val", examples=PREDICTIONS)
