"""Scores a trained run, or other CLIP weights, without training."""

from swjax.evaluate.scoring import score

__all__ = ["score"]
