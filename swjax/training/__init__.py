"""The trainer: the loop, the step, and all modules that read a run's config."""
