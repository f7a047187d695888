"""Softmax attention of short sequences."""
