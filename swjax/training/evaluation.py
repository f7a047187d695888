"""The evaluation of a run: retrieval, and zero-shot classification where the data have classes."""

from swjax import evaluators
from swjax.models import sharding
from swjax.training.inputs import open_source

PREDICTIONS = 24  # unseen images in the report


def make_evaluate(config, graphdef, mesh):
    """Returns a function (state, split, examples) -> (scores by name, that many predictions)."""

    embed = evaluators.predictor(graphdef, config.data.image_size)

    def predict(params, batch):
        return embed(params, sharding.shard_batch(batch, mesh))

    def evaluate(state, split, examples=0):
        source, params = open_source(config, split), state.get("ema", state["params"])
        if source is None:
            return {}, []
        sizes = {
            "batch_size": config.eval.batch_size,
            "context_length": config.data.context_length,
            "image_size": config.data.image_size,
            "share": sharding.batch_share(mesh),
        }
        retrieval = evaluators.Retrieval(
            predict,
            source,
            name=split,
            captions_per_image=config.eval.captions_per_image or None,
            **sizes,
        )
        scores = retrieval.run(params)
        if not source.class_names:
            return scores, []
        zero_shot = evaluators.ZeroShot(
            predict,
            source,
            templates=source.templates,
            name=f"{config.eval.data or config.data.name}_{split}",
            **sizes,
        )
        predictions = zero_shot.predictions(params, count=examples) if examples else []
        return zero_shot.run(params) | scores, predictions

    return evaluate
