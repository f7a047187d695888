"""Scores of a model that embeds images and texts in one space: a predict function in, numbers by name out."""

from swjax.evaluators.embed import predictor
from swjax.evaluators.ranking import chance, ranks, recall
from swjax.evaluators.retrieval import Retrieval
from swjax.evaluators.zeroshot import Prediction, ZeroShot

__all__ = ["Prediction", "Retrieval", "ZeroShot", "chance", "predictor", "ranks", "recall"]
