"""Contrastive losses over a global batch of image-text pairs."""

from swjax.losses.contrastive import sigmoid_contrastive, softmax_contrastive

__all__ = ["sigmoid_contrastive", "softmax_contrastive"]
