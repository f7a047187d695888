"""The evaluation of a run: retrieval, and zero-shot classification if the data have classes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from ml_collections import ConfigDict

from swjax import evaluators
from swjax.data.labelled import Labelled
from swjax.models import sharding
from swjax.training import distributed
from swjax.training.config import ConfigError, blame
from swjax.training.faults.failures import blame_data_path
from swjax.training.inputs import UNSCORED, open_source
from swjax.training.log.step_log import StepLog, as_json
from swjax.training.log.timing import Timing, is_due
from swjax.training.setup import fitting

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


class Evaluator:
    """Evaluates train states of a run; uses the average of the parameters if the run keeps one.

    All processes must create it and call it.

    Args:
      config: the config of the run.
      graph: graph definition of the model.
      mesh: mesh of all devices; batches are sharded over it.

    Attributes:
      sets: the sets of `eval.zeroshot`, by name.

    Raises:
      ConfigError: a set of `eval.zeroshot` cannot be opened.
    """

    def __init__(self, config: ConfigDict, graph: nnx.GraphDef, mesh: jax.sharding.Mesh):
        self._config = config
        embed = evaluators.predictor(graph, config.data.image_size)
        self._predict = lambda params, batch: embed(params, sharding.shard_batch(batch, mesh))
        self._sizes = {
            "batch_size": config.eval.batch_size,
            "context_length": config.data.context_length,
            "tokenizer": config.data.tokenizer,
            "image_size": config.data.image_size,
            "fitting": fitting(config),
            "share": sharding.batch_share(mesh),
            "on_bad": config.data.on_bad,
            "max_bad_share": config.data.max_bad_share,
        }
        self.sets = open_labelled(config)
        self._labelled = [self._zero_shot(each, name) for name, each in self.sets.items()]
        # The scores of the labelled sets, and the array `state["step"]` of their state. The array identifies
        # a state; its number does not, because a rollback repeats numbers with other parameters.
        self._labelled_scores: dict[str, Any] = {}
        self._scored: jax.Array | None = None

    def __call__(self, state: Any, split: str, examples: int = 0) -> Evaluation:
        """Evaluates a split, and the sets of `eval.zeroshot` if they were not evaluated with this state.

        Args:
          state: the train state.
          split: "train", "val" or "test"; "" evaluates only the sets of `eval.zeroshot`.
          examples: number of predictions to return.
        """
        params = state.get("ema", state["params"])
        if state["step"] is not self._scored:
            self._labelled_scores = {
                k: x for one in self._labelled for k, x in one.run(params).items()
            }
            self._scored = state["step"]
        own = self._evaluate_split(params, split, examples)
        return own._replace(scores=self._labelled_scores | own.scores)

    def _evaluate_split(self, params, split: str, examples: int) -> Evaluation:
        config = self._config
        source = open_source(config, split)
        if source is None:
            return Evaluation({}, [], [])
        per_image = config.eval.captions_per_image or None
        retrieval = evaluators.Retrieval(
            self._predict, source, name=split, captions_per_image=per_image, **self._sizes
        )
        images = retrieval.images(params, count=examples)  # one pass serves all scores
        shown: dict[str, Any] = {"count": examples, "images": images}
        scores = retrieval.run(params, images)
        if source.class_names:
            zero_shot = self._zero_shot(source, f"{config.eval.data or config.data.name}_{split}")
            predictions = zero_shot.predictions(params, **shown) if examples else []
            return Evaluation(zero_shot.run(params, images) | scores, predictions, [])
        if not examples:
            return Evaluation(scores, [], [])
        nearest = retrieval.nearest_images(params, count=CAPTIONS, images=images)
        return Evaluation(scores, retrieval.predictions(params, **shown), nearest)

    def _zero_shot(self, source: Any, name: str) -> evaluators.ZeroShot:
        return evaluators.ZeroShot(
            self._predict, source, templates=source.templates, name=name, **self._sizes
        )


class Validation:
    """Evaluates a run every `eval.every_steps` steps and after its last one, on its val split.

    The record of an evaluated step is written with its scores. A checkpoint of the step is saved before its
    evaluation and holds the record, so that a process that resumes there evaluates first.

    Args:
      config: the config of the run.
      steps: number of steps of the run.
      evaluate: the evaluator of the run.
      log: writes the records.
      timing: clock of the run; throughput excludes evaluation.
      position: data position saved with a checkpoint, with `position` of the process that saved it; None
        starts a new run.
    """

    def __init__(
        self,
        config: ConfigDict,
        steps: int,
        evaluate: Evaluator,
        log: StepLog,
        timing: Timing,
        position: Mapping[str, Any] | None,
    ):
        self._every, self._steps = config.eval.every_steps, steps
        self._evaluate, self._log, self._timing = evaluate, log, timing
        self._waiting: dict[str, Any] | None = (position or {}).get(UNSCORED)

    def is_due(self, step: int) -> bool:
        """Whether the run is evaluated after this step."""
        return step == self._steps or is_due(step, self._every)

    def resume(self, step: int, state: Any) -> None:
        """Writes the record that the restored checkpoint holds, if any, with scores if they are still due."""
        if self._waiting:
            self._log.rewind(step - 1)
            self.score(state, scored=self.is_due(step))

    def write(self, records: list[dict[str, Any]], *, wait: bool) -> None:
        """Writes records, oldest first; with `wait`, keeps the newest one for `score`."""
        self._waiting = None
        if wait:
            *records, self._waiting = records
        self._log.write(records, last=not wait)

    def position(self) -> dict[str, Any]:
        """Returns the record that waits for its scores, to save with the data position."""
        return {UNSCORED: as_json(self._waiting)} if self._waiting else {}

    def score(self, state: Any, *, scored: bool = True) -> None:
        """Evaluates the train state if a record waits for its scores, and writes the record."""
        if self._waiting is None:
            return
        if scored:
            self._waiting |= self._evaluate(state, "val").scores
            self._timing.lap("evaluation")
        self._log.write([self._waiting])
        self._waiting = None


def open_labelled(config: ConfigDict) -> dict[str, Labelled]:
    """Opens the labelled sets of `eval.zeroshot`, by name.

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
    sets = {source.set_name: source for source in found}
    lengths = {name: len(source) for name, source in sets.items()}
    distributed.check_same("eval.zeroshot", "{} examples", lengths)
    return sets


def evaluate_unseen(evaluate: Evaluator, state: Any) -> Evaluation:
    """Evaluates a run after its last step, on its test split, or on its val split if it has no test split.

    Args:
      evaluate: the evaluator of the run.
      state: train state after the last step.
    """
    test = evaluate(state, "test", examples=PREDICTIONS)
    has_test = any(name.startswith("test/") for name in test.scores)
    return test if has_test else evaluate(state, "val", examples=PREDICTIONS)
