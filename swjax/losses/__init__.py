"""Losses: contrastive over a global batch of image-text pairs, and the cross-entropy of language models."""

from swjax.losses.contrastive import sigmoid_contrastive, softmax_contrastive
from swjax.losses.cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy", "sigmoid_contrastive", "softmax_contrastive"]
