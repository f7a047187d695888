"""The trainer: the loop, the step, and everything else that reads a run's config."""
