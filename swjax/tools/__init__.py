"""What reads the trainer's parts without training a run: plan, replay, comparison of precisions."""
