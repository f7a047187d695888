"""A trained CLIP at work: embeddings of images and texts, and zero-shot classification."""

from swjax.inference.encoder import Encoder, export, load, pixels, save

__all__ = ["Encoder", "export", "load", "pixels", "save"]
