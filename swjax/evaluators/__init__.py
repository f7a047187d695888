"""Evaluators of models that embed images and texts in one space; each turns predictions into scores."""

from swjax.evaluators.embed import predictor
from swjax.evaluators.ranking import chance, ranks, recall
from swjax.evaluators.retrieval import NearestImages, Retrieval
from swjax.evaluators.zeroshot import Prediction, ZeroShot

__all__ = [
    "NearestImages",
    "Prediction",
    "Retrieval",
    "ZeroShot",
    "chance",
    "predictor",
    "ranks",
    "recall",
]
