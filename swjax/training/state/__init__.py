"""Where a run's train state comes from and goes to: initial weights, checkpoints and their copies."""
