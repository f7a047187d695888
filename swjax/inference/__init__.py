"""Inference with a trained CLIP: embeddings of images and texts, and zero-shot classification.

Five lines classify a picture, with a run's checkpoint or other CLIP weights:

  from swjax import inference
  model = inference.load("runs/openmoji")
  names = ["cat", "dog", "violin"]
  probabilities = model.classify("picture.png", model.classifier(names))
  print(names[probabilities[0].argmax()])

With `prequantize=True` the int8 layers keep only their int8 weights. `save` writes such a model as one
file, which `load` opens; `export` writes programs that run with jax alone.
"""

from swjax.inference.encoder import Encoder, export, load, pixels, save

__all__ = ["Encoder", "export", "load", "pixels", "save"]
