"""The cross-entropy of logits and its gradient."""
