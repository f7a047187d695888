"""Scores of a trained run, or of other CLIP weights, without training."""

from swjax.evaluate.scoring import score

__all__ = ["score"]
