"""CLIP in Flax NNX: a vision and a text transformer whose linear layers follow a recipe."""
