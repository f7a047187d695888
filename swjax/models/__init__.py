"""CLIP in Flax NNX: a vision and a text transformer whose linear layers compute as a recipe says."""
