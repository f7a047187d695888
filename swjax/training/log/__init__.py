"""What a run records and prints: metrics, times, health, profiles and results."""
